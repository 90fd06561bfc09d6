"""Random numbers: the same bits everywhere, the right distributions, and independence."""

from __future__ import annotations

from collections import Counter
from itertools import permutations as orders

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from equipoise.random import (
    Purpose,
    choose,
    choose_by_weight,
    fold,
    fold_array,
    fold_tensor,
    keep_mask,
    permutations,
    uniform,
)

MASK = (1 << 64) - 1
# With fixed keys a test always passes or always fails; one in a thousand is generous.
GENEROUS = 1e-3


def splitmix(state):
    """The output function of SplitMix64 as published."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_hash_is_splitmix64():
    # The first outputs of the reference implementation with seed 0.
    assert [fold(0, i) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert fold(12345, 0) == splitmix(12345)
    assert fold(7, 3, 5) == fold(fold(7, 3), 5)


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0])
def test_tensors_and_integers_give_the_same_bits(key):
    first = torch.tensor([0, 1, 2, 1000, 2**40, 2**62, -1])
    second = 17
    found = fold_tensor(key, first, second)
    assert [int(value) & MASK for value in found] == [fold(key, int(c), second) for c in first]
    keys = fold_tensor(key, first)
    assert [int(v) & MASK for v in fold_tensor(keys, 4, 9)] == [
        fold(key, int(c), 4, 9) for c in first
    ]


def test_leading_integers_are_folded_before_the_first_tensor():
    assert int(fold_tensor(5, 1, 2, torch.tensor(3))) & MASK == fold(5, 1, 2, 3)


def test_the_array_form_gives_the_same_bits():
    """Small populations are ordered by hash, so their order depends on every relevant bit."""
    key, population = 99, 300
    hashes = [
        splitmix((fold(key, 0) + (i - 1) * 0x9E3779B97F4A7C15) & MASK) for i in range(population)
    ]
    wanted = sorted(range(population), key=lambda i: hashes[i])
    assert choose(key, population, population).tolist() == wanted


def test_coordinates_and_purposes_do_not_collide():
    keys = {fold(s, r, c, p) for s in range(6) for r in range(6) for c in range(6) for p in Purpose}
    assert len(keys) == 6**3 * len(Purpose)


def test_uniform_numbers_are_uniform_and_exact_in_float32():
    keys = fold_tensor(3, torch.arange(40_000))
    numbers = uniform(keys)
    assert chisquare(np.histogram(numbers.numpy(), bins=50, range=(0, 1))[0]).pvalue > GENEROUS
    assert torch.equal(numbers.double(), uniform(keys, torch.float64))
    assert [int(n * 2**24) for n in numbers[:5].tolist()] == [
        (int(k) & MASK) >> 40 for k in keys[:5]
    ]


@pytest.mark.parametrize("bit", [0, 15, 16, 31, 47, 62, 63])
def test_every_bit_is_balanced_and_neighbours_are_independent(bit):
    """Pairs must not overlap, or draws are dependent; p-values over many keys are uniform."""
    hashes = fold_tensor(fold_tensor(0, torch.arange(200)).unsqueeze(1), torch.arange(8000))
    bits = ((hashes >> bit) & 1).view(200, 4000, 2)
    pairs = (2 * bits[..., 0] + bits[..., 1]).numpy()
    assert (
        kstest([chisquare(np.bincount(row, minlength=4)).pvalue for row in pairs], "uniform").pvalue
        > GENEROUS
    )


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75])
def test_masks_keep_at_their_rate(rate):
    threshold = round(rate * 65536)
    mask = keep_mask(torch.tensor(5), torch.Size((250, 401)), threshold)
    deviation = np.sqrt(rate * (1 - rate) / mask.numel())
    assert abs(mask.double().mean().item() - rate) < 4 * deviation
    lanes = mask.flatten()[: mask.numel() // 4 * 4].view(-1, 4).double()
    assert (lanes.mean(0) - rate).abs().max() < 4 * 2 * deviation
    assert np.abs(np.corrcoef(lanes.numpy().T) - np.eye(4)).max() < 0.03


def test_a_mask_is_the_beginning_of_every_longer_one():
    short, long = (keep_mask(torch.tensor(5), torch.Size((n,)), 30_000) for n in (10, 1001))
    assert torch.equal(long[:10], short)


def test_permutations_are_permutations_and_padding_comes_last():
    sizes = torch.tensor([1, 2, 7, 30])
    found = permutations(fold_tensor(0, torch.arange(4)), sizes, 30)
    for row, size in zip(found, sizes.tolist(), strict=True):
        assert sorted(row[:size].tolist()) == list(range(size))
        assert sorted(row.tolist()) == list(range(30))


def test_all_permutations_are_equally_likely():
    found = permutations(fold_tensor(1, torch.arange(12_000)), torch.tensor(4), 4)
    counts = Counter(map(tuple, found.tolist()))
    assert chisquare([counts[order] for order in orders(range(4))]).pvalue > GENEROUS


def test_a_permutation_does_not_depend_on_chunk_mates_or_width():
    keys = fold_tensor(2, torch.arange(6))
    sizes = torch.tensor([5, 9, 3, 20, 1, 9])
    together = permutations(keys, sizes, 20)
    for i in (1, 2, 5):
        size = int(sizes[i])
        assert torch.equal(permutations(keys[i], sizes[i], size), together[i, :size])
        order = sorted(range(size), key=lambda e, i=i: fold(int(keys[i]), e) & (MASK >> 1))
        assert together[i, :size].tolist() == order


# ---- choosing clients ----------------------------------------------------------------------------


@pytest.mark.parametrize("population", [1, 7, 4096, 4097, 5000, 65_536, 65_537, 1_000_003])
def test_chosen_numbers_are_distinct_and_inside(population):
    for key in range(3):
        count = min(population, 300)
        chosen = choose(key, population, count)
        assert len(set(chosen.tolist())) == count
        assert 0 <= chosen.min() <= chosen.max() < population


@pytest.mark.parametrize("population", [4097, 6000])
def test_everybody_can_be_chosen_from_a_large_population(population):
    assert sorted(choose(4, population, population).tolist()) == list(range(population))


def test_every_pair_of_a_small_population_is_equally_likely():
    counts = Counter(tuple(sorted(choose(key, 5, 2).tolist())) for key in range(6000))
    assert len(counts) == 10
    assert chisquare(list(counts.values())).pvalue > GENEROUS


@pytest.mark.parametrize("population", [4500, 1_000_000])
def test_a_large_population_is_drawn_from_uniformly(population):
    drawn = np.concatenate([choose(key, population, 40) for key in range(800)])
    assert chisquare(np.histogram(drawn, bins=40, range=(0, population))[0]).pvalue > GENEROUS
    first = np.array([choose(key, population, 2)[0] for key in range(2000)])
    assert chisquare(np.histogram(first, bins=20, range=(0, population))[0]).pvalue > GENEROUS


def test_two_draws_from_a_large_population_are_independent():
    pairs = np.array([choose(key, 10_000, 2) for key in range(4000)])
    cells = np.histogram2d(pairs[:, 0], pairs[:, 1], bins=4, range=[[0, 10_000]] * 2)[0]
    assert chisquare(cells.ravel()).pvalue > GENEROUS


def successive(weights, count):
    """The probability of every ordered draw without replacement, enumerated."""
    result = {}
    for order in orders(range(len(weights)), count):
        left, probability = sum(weights), 1.0
        for item in order:
            probability *= weights[item] / left
            left -= weights[item]
        result[order] = probability
    return result


@pytest.mark.parametrize(
    ("weights", "count"),
    [([1, 2, 5], 1), ([1, 2, 5], 2), ([1, 2, 5], 3), ([4, 1, 1, 10], 2), ([1, 3, 200], 2)],
)
def test_choosing_by_weight_is_successive_sampling(weights, count):
    """The last case needs more draws than one batch, so that the exponential race is used too."""
    trials = 12_000
    found = Counter(
        tuple(choose_by_weight(key, np.array(weights, float), count).tolist())
        for key in range(trials)
    )
    wanted = successive(weights, count)
    assert set(found) <= set(wanted)
    expected = np.array(list(wanted.values())) * trials
    observed = np.array([found[order] for order in wanted])
    often = expected >= 5
    assert observed[~often].sum() <= 5 * max(1, expected[~often].sum())
    total = observed[often].sum()
    assert (
        chisquare(observed[often], expected[often] / expected[often].sum() * total).pvalue
        > GENEROUS
    )


def test_clients_without_weight_are_never_chosen():
    weights = np.array([0, 3, 0, 1, 0, 2.0])
    for key in range(200):
        assert sorted(choose_by_weight(key, weights, 3).tolist()) == [1, 3, 5]


def test_arrays_of_keys_are_folded_like_tensors_and_numbers():
    largest = np.iinfo(np.int64).max
    keys = np.array([[0], [-1], [largest], [-largest - 1], [12345]])
    numbers = np.array([0, 3, largest, -1])
    found = fold_array(keys, 7, numbers, 2**40)
    assert found.dtype == np.int64
    wanted = fold_tensor(torch.from_numpy(keys), 7, torch.from_numpy(numbers), 2**40)
    assert found.tolist() == wanted.tolist()
    one_by_one = [[fold(int(k), 7, int(n), 2**40) for n in numbers] for k in keys[:, 0]]
    assert [[value % 2**64 for value in row] for row in found.tolist()] == one_by_one
    assert (
        fold_array(2**64 - 5, numbers).tolist()
        == fold_tensor(-5, torch.from_numpy(numbers)).tolist()
    )
