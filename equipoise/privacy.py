"""What noise guarantees: the ε of Gaussian noise on vectors of bounded length."""

from __future__ import annotations

import math

from equipoise.checks import count, real
from equipoise.errors import InputError


def gaussian_epsilon(noise: float, releases: int, delta: float) -> float:
    """Return the ε of vectors that are clipped and released with Gaussian noise.

    Vectors of a length of at most C differ by at most 2 C, whatever the data they were made of.
    With noise of standard deviation σ = ``noise`` · C, n releases are μ-Gaussian differentially
    private with μ = 2 √n / ``noise``. The ε for a given δ solves δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 −
    ε/μ) (Dong, Roth and Su, 2022), which is exact.

    Parameters
    ----------
    noise : float
        σ / C.
    releases : int
        n, how often a vector of the same client is released.
    delta : float
        δ, between 0 and 1.

    Returns
    -------
    float
        ε, at least 0.

    Examples
    --------
    >>> round(gaussian_epsilon(8.0, 1, 1e-5), 3), round(gaussian_epsilon(8.0, 50, 1e-5), 3)
    (0.926, 8.596)
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    mu = 2 * math.sqrt(count(releases, "releases")) / real(noise, "noise")
    if not 0 < real(delta, "delta") < 1:
        raise InputError(f"delta must be a number between 0 and 1, got {delta!r}")

    def excess(epsilon: float) -> float:
        """Return δ of an ε less the one wanted."""
        lost = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        return lost - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta

    if excess(0.0) <= 0:
        return 0.0
    most = 1.0
    while excess(most) > 0:
        most *= 2
    return float(brentq(excess, 0.0, most, xtol=1e-12))
