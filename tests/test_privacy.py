"""The ε of Gaussian noise, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from equipoise.errors import InputError
from equipoise.privacy import gaussian_epsilon


@pytest.mark.parametrize(
    ("noise", "releases", "delta"),
    [(1.0, 1, 1e-5), (8.0, 1, 1e-5), (4.0, 9, 1e-3), (30.0, 50, 1e-6)],
)
def test_the_largest_excess_over_all_events_is_delta(noise, releases, delta):
    """δ is the largest P(A) − e^ε Q(A), for the two distributions of all releases together."""
    epsilon = gaussian_epsilon(noise, releases, delta)
    # Vectors C and −C in one dimension, with deviation noise · C; means of n releases have a
    # deviation of 1/√n of it.
    deviation = noise / np.sqrt(releases)
    grid = np.linspace(-1 - 12 * deviation, 1 + 12 * deviation, 2_000_001)
    excess = norm.pdf(grid, 1, deviation) - np.exp(epsilon) * norm.pdf(grid, -1, deviation)
    found = np.maximum(excess, 0).sum() * (grid[1] - grid[0])
    assert found == pytest.approx(delta, rel=1e-4)


def test_more_noise_and_fewer_releases_cost_less():
    assert gaussian_epsilon(2.0, 1, 1e-5) > gaussian_epsilon(4.0, 1, 1e-5) > 0
    assert gaussian_epsilon(4.0, 2, 1e-5) > gaussian_epsilon(4.0, 1, 1e-5)
    assert gaussian_epsilon(1e9, 1, 1e-5) == 0


def test_refusals():
    with pytest.raises(InputError, match="noise must be a finite number above 0, got 0"):
        gaussian_epsilon(0, 1, 1e-5)
    with pytest.raises(InputError, match="delta must be a number between 0 and 1, got 1"):
        gaussian_epsilon(1.0, 1, 1)
