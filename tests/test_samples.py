"""Samples: what is accepted, and reading all of them in blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.data.cache import MappedArray
from equipoise.samples import Samples, blocks, kind_of


def test_a_mapped_array_is_samples_and_plain_arrays_are_not(tmp_path):
    stored = MappedArray.write(tmp_path / "x.npy", (3, 2), torch.float32, [torch.zeros(3, 2)])
    assert isinstance(stored, Samples)
    for other in (torch.zeros(3, 2), np.zeros((3, 2)), [[0.0]]):
        assert not isinstance(other, Samples)
    assert kind_of(stored) == "torch.float32 of shape [3, 2]"


@pytest.mark.parametrize(
    ("size", "lengths"), [(1, [1] * 7), (24, [3, 3, 1]), (31, [3, 3, 1]), (32, [4, 3]), (999, [7])]
)
def test_blocks_have_the_asked_size_and_miss_nothing(tmp_path, size, lengths):
    x = torch.arange(14, dtype=torch.int32).view(7, 2)
    for samples in (x, MappedArray.write(tmp_path / "x.npy", (7, 2), torch.int32, [x])):
        found = list(blocks(samples, size))
        assert [len(block) for _, block in found] == lengths
        assert [first for first, _ in found] == [
            sum(lengths[:place]) for place in range(len(lengths))
        ]
        assert torch.equal(torch.cat([block for _, block in found]), x)


def test_samples_without_values_are_one_block():
    assert [tuple(block.shape) for _, block in blocks(torch.zeros(5, 0))] == [(5, 0)]
    assert list(blocks(torch.zeros(0, 3))) == []
