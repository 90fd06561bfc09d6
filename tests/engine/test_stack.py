"""Passes over stacked clients: every sample once."""

from __future__ import annotations

import numpy as np
import pytest

from equipoise.engine.stack import passes


@pytest.mark.parametrize("together", [1, 4, 7, 1000])
@pytest.mark.parametrize("sizes", [[1], [5], [9, 9, 2, 1], [30, 1, 1, 1, 1, 0]])
def test_every_sample_is_looked_at_once(sizes, together):
    seen = [[] for _ in sizes]
    for active, slots, inside in passes(np.array(sizes), together):
        assert slots.shape == inside.shape == (active, slots.shape[1])
        assert slots.size <= max(together, active)
        assert not slots[~inside].any()
        for client in range(active):
            seen[client] += slots[client, inside[client]].tolist()
    assert seen == [list(range(size)) for size in sizes]


def test_nobody_holds_anything():
    assert list(passes(np.array([0, 0]), 4)) == []
