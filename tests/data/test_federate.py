"""Federations from a source and a partition: unseen clients, left-out groups, names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.data import Assignment, ByGroup, Iid, Natural, Source, federate
from equipoise.errors import InputError
from equipoise.federation import SPLITS, Federation

SOURCE = Source(
    x=torch.arange(300.0)[:, None],
    y=torch.arange(300) % 3,
    groups=np.repeat([0, 1, 2], 100),
    group_names=("a", "b", "c"),
    name="made up",
)


class Own:
    """A partition with groups of its own."""

    def assign(self, source: Source, seed: int) -> Assignment:
        return Assignment([np.arange(5), np.arange(5, 9)], [0, 1], ("rich", "poor"))


def test_splits_and_names() -> None:
    federation = federate(SOURCE, ByGroup(1), splits=(0.6, 0.2, 0.2))
    assert federation.name == "made up"
    assert federation.client_names == ("a 1", "a 2", "b 1", "b 2", "c 1", "c 2")
    assert federation.train.sizes.tolist() == [15, 45, 15, 45, 15, 45]
    assert federation.test.sizes.tolist() == [5, 15, 5, 15, 5, 15]
    assert federation.group_names == ("a", "b", "c")
    assert not federation.unseen.any()


@pytest.mark.parametrize(
    ("unseen", "count"),
    [(0, 0), (2, 2), (0.5, 6), (0.0, 0), ([3, 5, 7], 3), (np.int64(4), 4), (np.array([1]), 1)],
)
def test_unseen_count_share_or_list(unseen: Any, count: int) -> None:
    federation = federate(SOURCE, Iid(12), unseen=unseen)
    assert federation.unseen.sum() == count
    if isinstance(unseen, list):
        assert np.flatnonzero(federation.unseen).tolist() == unseen


def test_seed_decides_who_is_unseen() -> None:
    chosen = {
        tuple(federate(SOURCE, Iid(12), unseen=3, seed=seed).seen) for seed in (0, 0, 1, 2, 3)
    }
    assert 2 <= len(chosen) <= 4


def test_left_out_group_is_unseen_on_top() -> None:
    federation = federate(SOURCE, Iid(12), leave_out="b", unseen=2)
    in_b = federation.groups == 1
    assert federation.unseen[in_b].all()
    assert federation.unseen[~in_b].sum() == 2


@pytest.mark.parametrize("splits", [(0.7, 0.1, 0.2), (0.8, 0.2, 0.0)])
def test_a_left_out_group_is_test_data_as_a_whole(splits: tuple[float, float, float]) -> None:
    whole, federation = (
        federate(SOURCE, Iid(12), splits=splits),
        federate(SOURCE, Iid(12), splits=splits, leave_out="b"),
    )
    assert sorted(
        federation.test.indices[np.isin(federation.test.holders, np.flatnonzero(federation.unseen))]
    ) == list(range(100, 200))
    for client in range(12):
        if federation.unseen[client]:
            assert not federation.train.of(client).size
            assert not federation.val.of(client).size
            held = [whole.split(name).of(client) for name in ("train", "val", "test")]
            assert sorted(federation.test.of(client)) == sorted(np.concatenate(held))
        else:
            for name in ("train", "val", "test"):
                assert np.array_equal(
                    federation.split(name).of(client), whole.split(name).of(client)
                )


def test_unseen_clients_keep_their_splits() -> None:
    seen, held_out = federate(SOURCE, Iid(6)), federate(SOURCE, Iid(6), unseen=[2])
    for split in ("train", "val", "test"):
        assert np.array_equal(seen.split(split).indices, held_out.split(split).indices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unseen": 12}, "count from 0 to 11"),
        ({"unseen": 0.99}, "count from 0 to 11"),
        ({"unseen": -1}, "unseen=-1"),
        ({"unseen": 1.5}, "unseen=1.5"),
        ({"unseen": float("nan")}, "unseen=nan"),
        ({"unseen": "many"}, "unseen client 'many' does not exist; the clients have no names"),
        ({"unseen": [12]}, "unseen client 12 does not exist; valid: 0 to 11"),
        ({"unseen": range(12)}, "all 12 clients are unseen"),
        ({"unseen": 8, "leave_out": "a"}, "count from 0 to 7"),
        ({"leave_out": "d"}, "unknown group 'd' in leave_out"),
        ({"splits": (0.5, 0.1, 0.1)}, "summing to 1"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        federate(SOURCE, Iid(12), **options)


def test_natural_clients_equal_those_of_from_arrays() -> None:
    ids = np.repeat(["cleo", "ann", "bob"], [5, 8, 9])
    x, y = torch.rand(22, 2), torch.arange(22) % 2
    natural = federate(Source(x=x, y=y, ids=ids), Natural(), seed=4)
    assert natural.fingerprint() == Federation.from_arrays(x, y, clients=ids, seed=4).fingerprint()


def test_units_are_never_divided() -> None:
    """With units of unequal sizes, shares are of units, and each unit is in one split."""
    sizes = [1, 7, 2, 9, 4, 3, 1, 8, 5, 6] * 2
    units = np.repeat(np.arange(20), sizes)
    ids = np.repeat(["north", "south"], len(units) // 2)
    source = Source(
        x=torch.arange(len(units)).view(-1, 1),
        y=torch.zeros(len(units)).long(),
        ids=ids,
        units=units,
    )
    federation = federate(source, Natural(), splits=(0.6, 0.2, 0.2), seed=3)
    held = {
        name: [set(units[federation.split(name).of(client)].tolist()) for client in range(2)]
        for name in SPLITS
    }
    for client in range(2):
        assert [len(held[name][client]) for name in SPLITS] == [6, 2, 2]
        assert set().union(*(held[name][client] for name in SPLITS)) == set(
            range(10 * client, 10 * client + 10)
        )
    everything = np.concatenate([federation.split(name).indices for name in SPLITS])
    assert sorted(everything.tolist()) == list(range(len(units)))
    other = federate(source, Natural(), splits=(0.6, 0.2, 0.2), seed=4)
    assert other.train.indices.tolist() != federation.train.indices.tolist()
    with pytest.raises(InputError, match="units of source 'custom' has 3 rows, x has 5"):
        Source(x=torch.zeros(5, 1), y=torch.zeros(5).long(), units=np.arange(3))


# ---- test samples of groups ----------------------------------------------------------------------


def published(**options: Any) -> Source:
    """The same source, in which every fifth sample is for testing."""
    return replace(SOURCE, test=np.arange(300) % 5 == 0, **options)


def test_clients_of_a_group_share_its_test_samples() -> None:
    federation = federate(published(), ByGroup(4, largest=60), splits=(1.0, 0.0, 0.0), test="group")
    assert federation.train.sizes.tolist() == [4, 8, 16, 32, 10, 20, 15]
    assert federation.test.sizes.tolist() == [20] * 7
    for client, group in enumerate(federation.groups):
        assert federation.test.of(client).tolist() == list(range(100 * group, 100 * group + 100, 5))
        assert (federation.train.of(client) % 5 > 0).all()
    assert federation.test.repeats
    assert not federation.train.repeats


def test_test_samples_of_a_group_are_drawn_if_none_are_published() -> None:
    federation = federate(SOURCE, ByGroup(1), splits=(0.6, 0.2, 0.2), test="group")
    assert [federation.split(name).sizes.tolist() for name in ("train", "val", "test")] == [
        [15, 45] * 3,
        [5, 15] * 3,
        [20] * 6,
    ]
    for client, group in enumerate(federation.groups):
        tested = federation.test.of(client)
        assert (SOURCE.groups[tested] == group).all()  # type: ignore[index]
        assert tested.tolist() == federation.test.of(2 * group).tolist()
    again, other = (
        federate(SOURCE, ByGroup(1), test="group", seed=seed).test.of(0).tolist() for seed in (0, 1)
    )
    assert again == federation.test.of(0).tolist() != other


def test_published_test_samples_of_clients_themselves() -> None:
    federation = federate(published(), Iid(3), splits=(0.7, 0.1, 0.2))
    assert [federation.split(name).sizes.tolist() for name in ("train", "val", "test")] == [
        [70] * 3,
        [10] * 3,
        [20] * 3,
    ]
    assert (federation.test.indices % 5 == 0).all()


def test_the_source_says_whose_test_samples_are_usual() -> None:
    assert federate(published(test_of="group"), Iid(6)).test.repeats
    assert not federate(published(test_of="group"), Iid(6), test="client").test.repeats
    assert federate(
        replace(SOURCE, groups=None, group_names=()), Iid(2), test="group"
    ).test.sizes.tolist() == [60, 60]


def test_shared_test_samples_stay_with_unseen_clients_and_pooled_data() -> None:
    federation = federate(published(), ByGroup(1), test="group", unseen=[0])
    assert federation.test.sizes.tolist() == [20] * 6
    assert federation.pooled().test.sizes.tolist() == [60]


def test_clients_of_a_group_that_is_left_out_are_tested_on_everything() -> None:
    federation = federate(
        published(), ByGroup(1), splits=(1.0, 0.0, 0.0), test="group", leave_out="b"
    )
    assert federation.train.sizes.tolist() == [20, 60, 0, 0, 20, 60]
    assert federation.test.sizes.tolist() == [20, 20, 40, 80, 20, 20]
    assert set(federation.test.of(2)) & set(federation.test.of(3)) == set(range(100, 200, 5))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (SOURCE, {"test": "grup"}, "unknown value 'grup' in test; did you mean 'group'"),
        (
            SOURCE,
            {"test": "group", "splits": (0.8, 0.2, 0.0)},
            r"group 'a' .* has no test samples; splits=\(0\.8, 0\.2",
        ),
        (
            replace(SOURCE, test=np.arange(300) < 200),
            {"test": "group"},
            "group 'c' of source 'made up' has no test",
        ),
        (
            replace(SOURCE, test=np.ones(300, bool)),
            {"test": "group"},
            "leaves no sample of source 'made up' to train on",
        ),
        (
            SOURCE,
            {"test": "group", "partition": Own()},
            "the partition Own makes other groups: rich, poor",
        ),
    ],
)
def test_test_samples_that_are_not_there_are_refused(
    source: Source, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        federate(source, **{"partition": Iid(6), **options})
