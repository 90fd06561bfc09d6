"""Passes over stacked clients: every sample once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import vmap

from equipoise.engine.stack import over_clients, passes


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


def test_stacked_calls_equal_those_of_pytorch():
    def of_one(moving, trees, x, mask, key):
        product = torch.tanh(x @ moving[0]) + trees["a"]["w"]
        kept = product if mask is None else product * mask
        return kept.sum(), {}, {"new": [product, (key + 1,)]}

    generator = torch.Generator().manual_seed(0)
    moving = [torch.randn(4, 3, 2, generator=generator)]
    trees = {"a": {"w": torch.randn(4, 2, generator=generator)}, "b": {}}
    x, key = torch.randn(4, 5, 3, generator=generator), torch.arange(4)
    for mask, across in ((None, None), (torch.ones(4, 5, 1), 0)):
        given = (moving, trees, x, mask, key)
        wanted = vmap(of_one, in_dims=(0, 0, 0, across, 0))(*given)
        found = over_clients(of_one)(*given)
        assert torch.equal(found[0], wanted[0])
        assert found[1] == wanted[1] == {}
        assert torch.equal(found[2]["new"][0], wanted[2]["new"][0])
        assert torch.equal(found[2]["new"][1][0], key + 1)
