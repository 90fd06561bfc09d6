"""Which client holds which samples, and how they are divided into train, val and test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import InputError
from equipoise.splits import Split, split_samples


def test_split_rows() -> None:
    split = Split(np.array([5, 3, 8]), np.array([0, 2, 2, 3]))
    assert split.clients == 3
    assert split.sizes.tolist() == [2, 0, 1]
    assert split.holders.tolist() == [0, 0, 2]
    assert [split.of(client).tolist() for client in range(3)] == [[5, 3], [], [8]]
    assert Split.from_lists([[5, 3], [], [8]]).offsets.tolist() == [0, 2, 2, 3]
    assert Split.from_lists([]).clients == 0


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        ([1, 2], [0, 1], "end at 2"),
        ([1, 2], [1, 2], "start at 0"),
        ([1, 2], [], "start at 0"),
        ([1, 2], [0, 2, 1, 2], "client 1"),
        ([1.5, 2.0], [0, 2], "whole numbers"),
        ([[1, 2]], [0, 1], "flat"),
    ],
)
def test_split_refuses_broken_rows(indices: list[Any], offsets: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Split(np.array(indices), np.array(offsets, dtype=np.int64))


@pytest.mark.parametrize("client", [-1, 1])
def test_split_refuses_unknown_client(client: int) -> None:
    with pytest.raises(InputError, match=f"client {client} does not exist"):
        Split.from_lists([[1]]).of(client)


def test_shuffle_depends_on_seed_and_client() -> None:
    held = Split.from_lists([range(100), range(100)])
    first, second = (
        split_samples(held, ["ann", "bob"], (0.5, 0.0, 0.5), seed).train for seed in (0, 1)
    )
    assert first.of(0).tolist() != first.of(1).tolist()
    assert first.of(0).tolist() != second.of(0).tolist()


def test_every_sample_is_equally_likely_to_be_trained_on() -> None:
    held = Split.from_lists([range(10)] * 4000)
    train = split_samples(held, [str(client) for client in range(4000)], (0.7, 0.1, 0.2), 0).train
    shares = np.bincount(train.indices) / 4000
    assert np.abs(shares - 0.7).max() < 5 * np.sqrt(0.7 * 0.3 / 4000)


@pytest.mark.parametrize(
    ("samples", "fractions", "sizes"),
    [
        (10, (0.7, 0.1, 0.2), [7, 1, 2]),
        (11, (0.7, 0.1, 0.2), [8, 1, 2]),
        (1, (0.7, 0.1, 0.2), [1, 0, 0]),
        (2, (0.7, 0.1, 0.2), [1, 0, 1]),
        (3, (0.7, 0.1, 0.2), [1, 1, 1]),
        (1, (0.1, 0.1, 0.8), [1, 0, 0]),
        (3, (0.1, 0.0, 0.9), [1, 0, 2]),
        (5, (1.0, 0.0, 0.0), [5, 0, 0]),
        (1000, (0.6, 0.2, 0.2), [600, 200, 200]),
    ],
)
def test_split_sizes(samples: int, fractions: tuple[float, float, float], sizes: list[int]) -> None:
    parts = split_samples(Split.from_lists([range(samples)]), ["ann"], fractions, 0)
    assert [int(part.sizes[0]) for part in parts] == sizes


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)),
)
def test_splits_divide_without_loss(sizes: list[int], parts: tuple[int, int, int]) -> None:
    fractions = tuple(part / sum(parts) for part in parts)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    held = Split(np.arange(bounds[-1]), bounds)
    splits = split_samples(held, [str(client) for client in range(len(sizes))], fractions, 3)
    for client, size in enumerate(sizes):
        mine = [split.of(client).tolist() for split in splits]
        assert sorted(mine[0] + mine[1] + mine[2]) == held.of(client).tolist()
        assert mine[0]
        if size >= 3:
            assert all(mine[i] for i in range(3) if fractions[i] > 0)
            assert all(abs(len(mine[i]) - size * fractions[i]) <= 2 for i in range(3))
