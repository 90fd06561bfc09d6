"""Bounds of the weights of clients."""

from __future__ import annotations

import pytest
import torch

from equipoise.flower.shares import capped_shares


@pytest.mark.parametrize(
    ("shares", "largest", "expected"),
    [
        ([0.8, 0.15, 0.05], 0.5, [0.5, 0.375, 0.125]),
        ([0.6, 0.3, 0.1], 0.4, [0.4, 0.4, 0.2]),
        ([0.5, 0.3, 0.2], 0.5, [0.5, 0.3, 0.2]),
        ([0.9, 0.1], 0.3, [0.5, 0.5]),
        ([1.0, 0.0, 0.0], 0.5, [0.5, 0.25, 0.25]),
        ([0.5, 0.5], None, [0.5, 0.5]),
    ],
)
def test_shares_above_the_bound_go_to_the_others_in_proportion(shares, largest, expected):
    found = capped_shares(torch.tensor(shares, dtype=torch.float64), largest)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
