"""Partitions, checked by hand if nothing is random and by slow loops otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data import ByGroup, ClassesPerClient, Dirichlet, Iid, Natural, Partition, Source
from equipoise.data.partition import Assignment
from equipoise.errors import InputError


def plain(samples: int = 200, classes: int = 10) -> Source:
    return Source(x=torch.zeros(samples, 1), y=torch.arange(samples) % classes, classes=classes)


def grouped(*sizes: int, classes: int = 10) -> Source:
    names = tuple("abcdefgh"[: len(sizes)])
    groups = np.repeat(np.arange(len(sizes)), sizes)
    samples = sum(sizes)
    return Source(
        x=torch.zeros(samples, 1),
        y=torch.arange(samples) % classes,
        classes=classes,
        groups=groups,
        group_names=names,
    )


def sizes(assignment: Assignment) -> list[int]:
    return [len(samples) for samples in assignment.clients]


def sizes_by_group(assignment: Assignment) -> list[list[int]]:
    return [
        [len(s) for s, g in zip(assignment.clients, assignment.groups, strict=True) if g == group]
        for group in range(len(assignment.group_names))
    ]


EVERY = [
    Iid(12),
    Dirichlet(12, 0.1),
    Dirichlet(12, 100.0),
    Dirichlet(12, 0.1, equal=True),
    ClassesPerClient(12, 9),
    ByGroup(3),
    ByGroup(1),
]


@pytest.mark.parametrize("partition", EVERY, ids=repr)
def test_no_sample_is_given_twice_and_groups_are_kept_apart(partition: Partition) -> None:
    source = grouped(120, 90, 60)
    assignment = partition.assign(source, 0)
    given_out = np.concatenate(assignment.clients)
    assert len(np.unique(given_out)) == len(given_out)
    assert source.groups is not None
    for samples, group in zip(assignment.clients, assignment.groups, strict=True):
        assert set(source.groups[samples]) == {group}
        assert len(samples) >= 3
    if not isinstance(partition, ByGroup):
        assert len(given_out) == 270


@pytest.mark.parametrize("partition", EVERY, ids=repr)
def test_the_seed_decides(partition: Partition) -> None:
    source = grouped(120, 90, 60)
    one, again, other = (partition.assign(source, seed).clients for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_iid_shares_are_equal() -> None:
    assert sizes(Iid(6).assign(plain(200), 0)) == [34, 34, 33, 33, 33, 33]


def test_clients_follow_the_groups_sizes() -> None:
    assert [len(group) for group in sizes_by_group(Iid(10).assign(grouped(100, 60, 40), 0))] == [
        5,
        3,
        2,
    ]
    assert [len(group) for group in sizes_by_group(Iid(4).assign(grouped(1000, 5, 5), 0))] == [
        2,
        1,
        1,
    ]


def test_min_samples_is_met_where_proportions_rounded_up_would_not() -> None:
    # 3 clients in proportion 10 : 5 would be 2 : 1, and the fourth must go to the first group.
    assert sizes_by_group(Iid(4, min_samples=3).assign(grouped(10, 5), 0)) == [[4, 3, 3], [5]]


def test_dirichlet_matches_its_definition() -> None:
    """Over many draws, shares of a class have mean 1/K and variance (K-1)/(K^2 (K beta + 1))."""
    clients, beta, of_class = 4, 0.5, 500
    source = plain(2 * of_class, classes=2)
    shares = []
    for seed in range(300):
        for samples in Dirichlet(clients, beta, min_samples=1).assign(source, seed).clients:
            shares.append(float((source.y[samples] == 0).sum()) / of_class)
    assert np.mean(shares) == pytest.approx(1 / clients)
    assert np.var(shares) == pytest.approx(
        (clients - 1) / (clients**2 * (clients * beta + 1)), rel=0.1
    )


def test_large_beta_approaches_iid() -> None:
    source = plain(1000)
    for samples in Dirichlet(5, 1e6).assign(source, 0).clients:
        assert np.abs(np.bincount(source.y[samples], minlength=10) - 20).max() <= 1


@pytest.mark.parametrize("beta", [1e-300, 1e-12, 1e-3, 1e12])
def test_extreme_beta_still_meets_the_minimum(beta: float) -> None:
    assignment = Dirichlet(20, beta, min_samples=10).assign(plain(200), 0)
    assert sizes(assignment) == [10] * 20


@given(st.integers(1, 30), st.floats(1e-4, 1e4), st.integers(1, 6), st.integers(0, 99))
def test_dirichlet_always_ends(clients: int, beta: float, least: int, seed: int) -> None:
    held = sizes(Dirichlet(clients, beta, min_samples=least).assign(plain(180), seed))
    assert sum(held) == 180
    assert min(held) >= least


def test_equal_clients_draw_their_own_proportions() -> None:
    """For the first client, a class's share has mean 1/C and variance (C-1)/(C^2 (C beta + 1)).

    A finite client adds the noise of drawing, E[q (1 - q)]/n.
    """
    classes, beta, size = 4, 0.5, 250
    source = plain(
        8 * size, classes=classes
    )  # two clients hold no more than there is of a single class
    shares = []
    for seed in range(300):
        for samples in Dirichlet(8, beta, equal=True).assign(source, seed).clients[:2]:
            assert len(samples) == size
            shares.append(np.bincount(source.y[samples], minlength=classes) / size)
    variance = (classes - 1) / (classes**2 * (classes * beta + 1))
    noise = (1 / classes - 1 / classes**2 - variance) / size
    assert np.mean(shares, axis=0) == pytest.approx(np.full(classes, 1 / classes), abs=0.03)
    assert np.var(shares) == pytest.approx(variance + noise, rel=0.1)


def test_equal_clients_take_what_is_left_of_the_classes() -> None:
    source = plain(100, classes=2)
    held = Dirichlet(4, 1e-6, equal=True).assign(source, 0).clients
    # A draw is of one class or the other; if a class is used up, the other is taken.
    assert sizes(Dirichlet(4, 1e-6, equal=True).assign(source, 0)) == [25, 25, 25, 25]
    assert [len(set(source.y[samples].tolist())) for samples in held] == [1, 1, 1, 1]
    assert np.bincount(source.y[np.concatenate(held)]).tolist() == [50, 50]


@given(st.integers(1, 30), st.floats(1e-300, 1e12), st.integers(0, 99))
def test_equal_clients_are_always_filled(clients: int, beta: float, seed: int) -> None:
    assignment = Dirichlet(clients, beta, equal=True).assign(plain(180), seed)
    assert max(sizes(assignment)) - min(sizes(assignment)) <= 1
    assert sorted(np.concatenate(assignment.clients)) == list(range(180))


def test_filling_up_takes_from_the_largest_only() -> None:
    bare = sizes(Dirichlet(8, 0.05, min_samples=1).assign(plain(400), 3))
    filled = sizes(Dirichlet(8, 0.05, min_samples=20).assign(plain(400), 3))
    slow = list(bare)
    for client in range(8):
        while slow[client] < 20:
            slow[slow.index(max(slow))] -= 1
            slow[client] += 1
    assert min(bare) < 20
    assert filled == slow


def test_classes_per_client_by_hand() -> None:
    source = plain(120, classes=4)  # 30 samples a class
    held = ClassesPerClient(6, classes=2).assign(source, 0).clients
    assert [sorted(set(source.y[samples].tolist())) for samples in held] == [
        [0, 1],
        [1, 2],
        [2, 3],
        [0, 3],
        [0, 1],
        [1, 2],
    ]
    # Class 0 has holders 0, 3, 4; class 1 has 0, 1, 4, 5; class 2 has 1, 2, 5; class 3 has 2, 3.
    counts = np.array([np.bincount(source.y[samples], minlength=4) for samples in held])
    assert counts.tolist() == [
        [10, 8, 0, 0],
        [0, 8, 10, 0],
        [0, 0, 10, 15],
        [10, 0, 0, 15],
        [10, 7, 0, 0],
        [0, 7, 10, 0],
    ]


@pytest.mark.parametrize(
    ("groups", "imbalance", "ratio", "counts"),
    [
        (5, 1, None, [2, 2, 2, 2, 2]),
        (5, 5, 1.5, [5, 3, 2, 2, 1]),
        (5, 10, None, [10, 6, 3, 2, 1]),
        (6, 5, None, [5, 4, 3, 2, 1, 1]),
        (6, 10, 1.6, [10, 7, 4, 3, 2, 1]),
        (4, 5, None, [5, 3, 2, 1]),
        (4, 10, None, [10, 5, 2, 1]),
    ],
)
def test_clients_per_group_as_published(
    groups: int, imbalance: float, ratio: float | None, counts: list[int]
) -> None:
    """The numbers of clients in FedGCR's digit, DomainNet and PACS settings."""
    assignment = ByGroup(imbalance, ratio=ratio).assign(grouped(*[4000] * groups), 0)
    assert [len(group) for group in sizes_by_group(assignment)] == counts


DIGITS_10 = [
    [6, 12, 21, 38, 70, 126, 227, 409, 736, 1325],
    [40, 72, 129, 233, 420, 756],
    [151, 273, 491],
    [181, 327],
    [282],
]
DIGITS_5 = [[225, 338, 507, 761, 1142], [417, 626, 939], [528, 792], [352, 528], [587]]
DOMAINS_10 = [
    [6, 11, 17, 28, 45, 72, 116, 186, 298, 477],
    [18, 29, 46, 74, 119, 191, 306],
    [53, 85, 136, 217],
    [59, 95, 152],
    [73, 118],
    [120],
]
DOMAINS_5 = [
    [115, 161, 225, 316, 442],
    [126, 177, 248, 348],
    [147, 206, 289],
    [191, 267],
    [327],
    [234],
]
PACS_10 = [[14, 18, 24, 31, 40, 52, 68, 88, 113, 146], [12, 22, 40, 72, 128], [11, 115], [58]]
PACS_5 = [[45, 68, 102, 153, 229], [42, 95, 213], [34, 172], [121]]


@pytest.mark.parametrize(
    ("partition", "published", "off"),
    [
        (ByGroup(10, ratio=1.8, largest=2975), DIGITS_10, 0),
        (ByGroup(5, ratio=1.5, largest=2975), DIGITS_5, 1),
        (ByGroup(1, largest=1487), [[371, 1115]] * 5, 0),
        (ByGroup(10, ratio=1.6, largest=1262), DOMAINS_10, 2),
        (ByGroup(5, ratio=1.4, largest=1262), DOMAINS_5, 1),
        (ByGroup(1, largest=630), [[157, 472]] * 6, 0),
        # The ratio is published as 2.16; only ratios from 2.1642 to 2.1661 give the published
        # sizes.
        (ByGroup(10, ratio=2.165, largest=600, within="imbalance"), PACS_10, 0),
        (ByGroup(5, ratio=1.7, largest=600, within="imbalance"), PACS_5, 0),
    ],
)
def test_sizes_as_published(partition: ByGroup, published: list[list[int]], off: int) -> None:
    """FedGCR's settings; where its own rounding differs, single clients differ by one sample."""
    held = sizes_by_group(partition.assign(grouped(*[4000] * len(published)), 0))
    ours, theirs = np.concatenate(held), np.concatenate(published)
    assert [len(group) for group in held] == [len(group) for group in published]
    assert np.abs(ours - theirs).max() <= 1
    assert (ours != theirs).sum() == off


def test_totals_as_published() -> None:
    assert sum(map(sum, DIGITS_10)) == 6325
    assert sum(map(sum, PACS_10)) == 1052


def test_all_samples_that_are_kept_are_given_out_unless_a_size_is_asked_for() -> None:
    held = sizes_by_group(ByGroup(5, ratio=1.5).assign(grouped(*[2973] * 5), 0))
    assert [sum(group) for group in held] == [2973, 1982, 1321, 880, 586]


def test_another_order_of_groups() -> None:
    source = grouped(400, 400, 400)
    usual = ByGroup(4, largest=100).assign(source, 0)
    swapped = ByGroup(4, largest=100, order=("c", "a", "b")).assign(source, 0)
    assert sizes(swapped) == sizes(usual)
    assert swapped.groups == [2, 2, 2, 2, 0, 0, 1]
    assert swapped.names == ("c 1", "c 2", "c 3", "c 4", "a 1", "a 2", "b 1")
    assert source.groups is not None
    for samples, group in zip(swapped.clients, swapped.groups, strict=True):
        assert (source.groups[samples] == group).all()


def test_equal_groups_hold_one_to_three() -> None:
    assert sizes_by_group(ByGroup(1).assign(grouped(100, 200, 80), 0)) == [
        [20, 60],
        [20, 60],
        [20, 60],
    ]
    assert sizes_by_group(ByGroup(1, truncate=False).assign(grouped(100, 200), 0)) == [
        [25, 75],
        [50, 150],
    ]
    three = sizes_by_group(ByGroup(1, clients_per_group=(3, 1)).assign(grouped(1000, 1000), 0))
    assert three[0][2] / three[0][0] == pytest.approx(3, rel=0.02)
    assert three[1] == [1000]


def test_group_sizes_fall_by_the_ratio_even_if_a_later_group_is_short() -> None:
    held = sizes_by_group(ByGroup(4).assign(grouped(1000, 100, 1000), 0))
    assert [sum(group) for group in held] == [200, 100, 50]


def test_total_number_of_clients_is_divided_in_the_same_proportions() -> None:
    held = sizes_by_group(ByGroup(4, clients=14).assign(grouped(400, 400, 400), 0))
    assert [len(group) for group in held] == [8, 4, 2]


def test_by_group_fills_up_small_clients() -> None:
    held = sizes_by_group(ByGroup(10, min_samples=20).assign(grouped(*[1000] * 5), 0))
    assert min(min(group) for group in held) == 20
    assert [sum(group) for group in held] == [1000, 562, 316, 177, 99]


def test_natural_keeps_ids_in_order_and_leaves_small_ones_out() -> None:
    ids = np.array(["cleo", "ann", "bob", "cleo", "ann", "cleo", "ann", "ann"])
    assignment = Natural().assign(Source(x=torch.zeros(8, 1), y=torch.zeros(8).long(), ids=ids), 0)
    assert assignment.names == ("cleo", "ann")
    assert [samples.tolist() for samples in assignment.clients] == [[0, 3, 5], [1, 4, 6, 7]]
    assert assignment.group_names == ("all",)


def test_natural_clients_take_their_samples_group() -> None:
    source = Source(
        x=torch.zeros(6, 1),
        y=torch.zeros(6).long(),
        ids=np.array([7, 7, 7, 5, 5, 5]),
        groups=np.array([1, 1, 1, 0, 0, 0]),
        group_names=("a", "b"),
    )
    assert Natural().assign(source, 0).groups == [1, 0]


REGRESSION = Source(x=torch.zeros(50, 1), y=torch.zeros(50), task="regression")
LOPSIDED = Source(x=torch.zeros(100, 1), y=(torch.arange(100) >= 95).long())
MIXED = Source(
    x=torch.zeros(4, 1),
    y=torch.zeros(4).long(),
    ids=np.array([1, 1, 1, 1]),
    groups=np.array([0, 0, 1, 1]),
    group_names=("a", "b"),
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Iid(0), "clients must be a whole number of at least 1, got 0"),
        (lambda: Iid(2.5), "clients must be a whole number of at least 1, got 2.5"),  # type: ignore[arg-type]
        (lambda: Iid(5, min_samples=0), "min_samples must be a whole number of at least 1, got 0"),
        (lambda: Dirichlet(5, 0), "beta must be a finite number above 0, got 0"),
        (lambda: Dirichlet(5, float("nan")), "beta must be a finite number above 0, got nan"),
        (lambda: Dirichlet(5, "much"), "beta must be a finite number above 0, got 'much'"),  # type: ignore[arg-type]
        (lambda: Dirichlet(5, 1.0, equal="no"), "equal must be true or false, got 'no'"),  # type: ignore[arg-type]
        (lambda: ByGroup(2, truncate="no"), "truncate must be true or false, got 'no'"),  # type: ignore[arg-type]
        (lambda: ClassesPerClient(5, 0), "classes must be a whole number of at least 1, got 0"),
        (lambda: ByGroup(0.5), "imbalance must be a finite number of at least 1, got 0.5"),
        (lambda: ByGroup(5, ratio=0.5), "ratio must be a finite number of at least 1, got 0.5"),
        (lambda: ByGroup(1, ratio=1.5), "cannot be used with imbalance=1"),
        (lambda: ByGroup(5, largest=0), "largest must be a whole number of at least 1, got 0"),
        (lambda: ByGroup(2, largest=9, truncate=False), "which truncate=False forbids"),
        (lambda: ByGroup(2, within="rato"), "did you mean 'ratio'"),
        (
            lambda: ByGroup(5, clients=4, clients_per_group=(2, 2)),
            "clients=4 cannot be used with clients_per_group",
        ),
        (
            lambda: ByGroup(5, clients_per_group=(2, 0)),
            "each of clients_per_group must be a whole number of at least 1, got 0",
        ),
    ],
)
def test_refuses_options(make: Callable[[], Partition], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("partition", "source", "message"),
    [
        (Iid(201, min_samples=1), plain(200), "200 samples, too few for 201 clients"),
        (Iid(100), plain(200), "min_samples=3"),
        (Iid(2), grouped(50, 50, 50), "fewer than the 3 groups"),
        (Iid(3), grouped(50, 2), "group 'b' has 2 samples"),
        (Dirichlet(5, 1.0), REGRESSION, "needs one label per sample"),
        (ClassesPerClient(5, 11), plain(), "more than the 10"),
        (ClassesPerClient(5, 2), plain(), "none of clients 0 to 4 would hold class 6"),
        (
            ClassesPerClient(10, 1),
            LOPSIDED,
            "client 1 would hold 1 samples of its 1 classes, fewer than min_samples=3",
        ),
        (ByGroup(5), plain(), "no groups"),
        (ByGroup(5), grouped(50), "two or more groups"),
        (
            ByGroup(2, largest=60),
            grouped(50, 50),
            "group 'a' has 50 samples, but largest=60 needs 60 of it",
        ),
        (
            ByGroup(2, largest=50),
            grouped(50, 20),
            "group 'b' has 20 samples, but largest=50 needs 25 of it",
        ),
        (
            ByGroup(2, order=("a", "c")),
            grouped(50, 50),
            r"order=\['a', 'c'\] must name each of the groups a, b once",
        ),
        (ByGroup(5, clients=1), grouped(50, 50), "fewer than the 2 groups"),
        (ByGroup(5, clients_per_group=(2,)), grouped(50, 50), "each of the 2 groups a, b"),
        (ByGroup(40), grouped(50, 50), "group 'a' has 50 samples, too few for 40 clients"),
        (Natural(), plain(), "has no client ids"),
        (Natural(), MIXED, "client 1 of source 'custom' has samples in groups a and b"),
        (Natural(min_samples=5), MIXED, "the largest has 4"),
    ],
)
def test_refuses_what_cannot_be_met(partition: Partition, source: Source, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition.assign(source, 0)


@pytest.mark.parametrize("seed", [-1, 1.5])
def test_refuses_seeds(seed: Any) -> None:
    with pytest.raises(InputError, match=f"seed must be a whole number of at least 0, got {seed}"):
        Iid(2).assign(plain(), seed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.zeros(3).long()}, "y of source 'custom' has 3 rows, x has 4"),
        ({"ids": np.zeros(5)}, "ids of source 'custom' has 5 rows"),
        ({"groups": np.array([0, 0, 1, 1]), "group_names": ("a",)}, "valid: 0 to 0"),
        ({"x": torch.zeros(0, 1), "y": torch.zeros(0).long()}, "is empty"),
    ],
)
def test_source_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Source(**{"x": torch.zeros(4, 1), "y": torch.zeros(4).long(), **changes})


def test_empty_group_is_refused() -> None:
    source = Source(
        x=torch.zeros(4, 1),
        y=torch.zeros(4).long(),
        groups=np.array([0, 0, 2, 2]),
        group_names=("a", "b", "c"),
    )
    with pytest.raises(InputError, match="group 'b' of source 'custom' has no samples"):
        Iid(3, min_samples=1).assign(source, 0)
