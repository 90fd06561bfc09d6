"""The federation: the properties of its data, and what it refuses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.data.cache import MappedArray
from equipoise.errors import InputError
from equipoise.federation import Federation, Split


def small(**changes: Any) -> Federation:
    """Two clients in two groups; samples 0-2 train, 3 val, 4-5 test; sample 6 is not used."""
    parts: dict[str, Any] = {
        "x": torch.arange(14.0).reshape(7, 2),
        "y": torch.tensor([0, 1, 2, 0, 1, 2, 0]),
        "train": Split.from_lists([[0, 1], [2]]),
        "val": Split.from_lists([[], [3]]),
        "test": Split.from_lists([[4], [5]]),
        "groups": np.array([1, 0]),
        "group_names": ("north", "south"),
        "unseen": np.array([False, False]),
    }
    return Federation(**{**parts, **changes})


def test_properties() -> None:
    federation = small(unseen=np.array([True, False]))
    assert federation.clients == 2
    assert federation.seen.tolist() == [1]
    assert federation.shape == (2,)
    assert federation.classes == federation.outputs == 3
    assert federation.split("val") is federation.val
    assert federation.client_name(1) == "client 1"
    with pytest.raises(InputError, match="did you mean 'train'"):
        federation.split("trian")
    with pytest.raises(InputError, match="client 2 does not exist"):
        federation.client_name(2)


def test_regression() -> None:
    federation = small(y=torch.rand(7, 4), task="regression")
    assert federation.classes is None
    assert federation.outputs == 4
    assert small(y=torch.rand(7), task="regression").outputs == 1
    assert "labels" not in federation.describe()[0]
    with pytest.raises(InputError, match="no labels"):
        federation.label_counts()


BROKEN = torch.arange(14.0).reshape(7, 2)
BROKEN[4, 1] = float("nan")
INFINITE = torch.zeros(7)
INFINITE[6] = float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": BROKEN}, "sample 4 of client 0 has NaN or infinity in x"),
        ({"y": INFINITE, "task": "regression"}, "sample 6 has NaN or infinity in y"),
        ({"y": torch.tensor([0, 1, -1, 0, 1, 2, 0])}, "sample 2 of client 1 has label -1"),
        ({"classes": 2}, "sample 2 of client 1 has label 2 in y; valid: 0 to 1"),
        ({"y": torch.rand(7)}, "int64 labels"),
        ({"y": torch.arange(7), "task": "regression"}, "floating point"),
        ({"y": torch.rand(7), "task": "regression", "classes": 3}, "classes=3"),
        ({"y": torch.zeros(6).long()}, "x has 7 rows, y has 6"),
        (
            {"x": np.zeros((7, 2))},
            r"Federation.x must be a tensor \(or equipoise.samples.Samples\) .*, not ndarray",
        ),
        ({"x": torch.tensor(1.0)}, r"with one row per sample, not torch.float32 of shape \[\]"),
        ({"y": np.zeros(7)}, "Federation.y must be a tensor with one row per sample, not ndarray"),
        ({"task": "regresion"}, "did you mean 'regression'"),
        ({"unseen": np.array([True, True])}, "all 2 clients are unseen"),
        ({"unseen": np.array([True])}, "unseen has 1 clients, groups has 2"),
        ({"test": Split.from_lists([[4]])}, "test has 1 clients, groups has 2"),
        ({"client_names": ("ann",)}, "client_names has 1 clients"),
        ({"groups": np.array([0, 2])}, "client 1 has group 2; valid: 0 to 1"),
        ({"group_names": ("north", "north")}, "group_names must all differ"),
        ({"train": Split.from_lists([[0, 1], []])}, "client 1 has no training samples"),
        (
            {"test": Split.from_lists([[4], [7]])},
            "test split of client 1 has sample 7; valid: 0 to 6",
        ),
        ({"val": Split.from_lists([[-1], [3]])}, "val split of client 0 has sample -1"),
        (
            {"train": Split.from_lists([[0, 1], [2, 4]])},
            "sample 4 is in the train split of client 1 and in the test",
        ),
        (
            {"val": Split.from_lists([[2], [3]])},
            "sample 2 is in the train split of client 1 and in the val",
        ),
        (
            {"val": Split.from_lists([[], [4]])},
            "sample 4 is in the val split of client 1 and in the test",
        ),
        (
            {"train": Split.from_lists([[0], []]), "client_names": ("ann", "bob")},
            r"client 1 \('bob'\) has no training samples",
        ),
    ],
)
def test_construction_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**changes)


def test_clients_may_share_samples_within_a_split() -> None:
    federation = small(train=Split.from_lists([[0, 1], [1, 2]]))
    assert federation.pooled().train.of(0).tolist() == [0, 1, 2]


def test_unseen_client_may_have_nothing_to_train_on() -> None:
    assert small(
        train=Split.from_lists([[0, 1], []]), unseen=np.array([False, True])
    ).seen.tolist() == [0]


def test_pooled_holds_what_seen_clients_hold() -> None:
    pooled = small(unseen=np.array([True, False])).pooled()
    assert [pooled.split(name).of(0).tolist() for name in ("train", "val", "test")] == [
        [2],
        [3],
        [5],
    ]
    assert pooled.clients == 1
    assert pooled.group_names == ("all",)
    assert pooled.classes == 3


def test_label_counts_and_describe() -> None:
    federation = small(client_names=("ann", "bob"), unseen=np.array([False, True]))
    assert federation.label_counts().tolist() == [[1, 2, 0], [1, 0, 2]]
    assert federation.label_counts("train").tolist() == [[1, 1, 0], [0, 0, 1]]
    assert federation.describe()[1] == {
        "id": 1,
        "name": "bob",
        "group": "north",
        "unseen": True,
        "train": 1,
        "val": 1,
        "test": 1,
        "labels": [1, 0, 2],
    }


def test_fingerprint_depends_on_everything_but_names() -> None:
    base = small()
    changed_pixel = base.x.clone()
    changed_pixel[6, 1] += 1
    others = [
        small(x=changed_pixel),
        small(x=base.x.double()),
        small(x=base.x.reshape(7, 1, 2)),
        small(y=torch.tensor([0, 1, 2, 0, 1, 2, 1])),
        small(classes=4),
        small(train=Split.from_lists([[0], [1, 2]])),
        small(test=Split.from_lists([[5], [4]])),
        small(groups=np.array([0, 1])),
        small(group_names=("east", "south")),
        small(unseen=np.array([True, False])),
    ]
    assert len({federation.fingerprint() for federation in [base, *others]}) == 11
    assert base.fingerprint() == small().fingerprint() == replace(base, name="other").fingerprint()
    assert base.fingerprint() == small(x=base.x.T.contiguous().T).fingerprint()
    assert len(base.fingerprint()) == 16


def test_fingerprints_of_tensors_never_change() -> None:
    """Runs on disk store them, and are resumed only with the same federation."""
    x, y = torch.arange(24.0).view(8, 3), torch.arange(8) % 2
    groups = {"a": "one", "b": "two"}
    federation = Federation.from_arrays(x, y, clients=list("aaaabbbb"), groups=groups, unseen=["b"])
    assert federation.fingerprint() == "cefc53fd8d7ec8fc"


def mapped(path: Path, x: torch.Tensor) -> MappedArray:
    return MappedArray.write(path, tuple(x.shape), x.dtype, x.split(3))


def test_samples_may_be_on_disk(tmp_path: Path) -> None:
    x, y = torch.arange(24.0).view(12, 2), torch.arange(12) % 3
    stored = mapped(tmp_path / "x.npy", x)
    one, other = (
        Federation.from_arrays(samples, y, clients=[0, 1, 2] * 4, seed=7) for samples in (x, stored)
    )
    assert other.x is stored
    assert other.shape == (2,)
    assert other.describe() == one.describe()
    for name in ("train", "val", "test"):
        assert np.array_equal(one.split(name).indices, other.split(name).indices)
    assert other.pooled().x is stored


def test_samples_on_disk_enter_the_fingerprint_by_their_digest(tmp_path: Path) -> None:
    x = small().x
    changed = x[:].clone()
    changed[6, 1] += 1
    federations = [
        small(x=mapped(tmp_path / f"{place}.npy", samples))
        for place, samples in enumerate((x[:], x[:], changed))
    ]
    fingerprints = [federation.fingerprint() for federation in federations]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_samples_on_disk_are_checked_block_by_block(tmp_path: Path) -> None:
    x = torch.zeros(7, 2)
    x[4, 1] = torch.nan
    with pytest.raises(InputError, match="sample 4 of client 0 has NaN or infinity in x"):
        small(x=mapped(tmp_path / "x.npy", x))
    # 40 MiB per row: each is a separate block.
    large = torch.zeros(3, 10 << 20)
    large[2, -1] = torch.inf
    nobody = Split.from_lists([[]])
    with pytest.raises(InputError, match="sample 2 of client 0 has NaN or infinity in x"):
        Federation(
            mapped(tmp_path / "large.npy", large),
            torch.zeros(3).long(),
            Split.from_lists([[0, 1, 2]]),
            nobody,
            nobody,
            groups=np.zeros(1, np.int64),
            group_names=("all",),
            unseen=np.zeros(1, bool),
        )


def test_from_arrays_numbers_clients_and_groups() -> None:
    clients = ["bob", "ann", "bob", "ann", "bob", "ann"]
    federation = Federation.from_arrays(
        np.arange(6.0)[:, None],
        [0, 1, 0, 1, 0, 1],
        clients=clients,
        groups={"ann": "south", "bob": "north"},
        unseen=["ann"],
    )
    assert federation.client_names == ("bob", "ann")
    assert federation.group_names == ("north", "south")
    assert federation.groups.tolist() == [0, 1]
    assert federation.unseen.tolist() == [False, True]
    held = [
        sorted(np.concatenate([federation.split(s).of(k) for s in ("train", "val", "test")]))
        for k in (0, 1)
    ]
    assert held == [[0, 2, 4], [1, 3, 5]]
    assert federation.x.dtype == torch.float32


def test_one_hot_labels_are_refused_with_advice() -> None:
    with pytest.raises(InputError, match=r"y\.argmax\(1\) turns one-hot rows into labels"):
        Federation.from_arrays(np.zeros((6, 2)), np.eye(2)[[0, 1] * 3], clients=[0] * 6)


def test_from_arrays_takes_any_hashables() -> None:
    x, y = np.zeros((6, 1)), np.arange(6) % 2
    assert Federation.from_arrays(x, y, clients=[("a", 1)] * 3 + [("a", 2)] * 3).client_names == (
        "('a', 1)",
        "('a', 2)",
    )
    as_array = Federation.from_arrays(x, y, clients=np.array([9, 9, 9, 4, 4, 4]))
    as_tensor = Federation.from_arrays(x, y, clients=torch.tensor([9, 9, 9, 4, 4, 4]))
    as_list = Federation.from_arrays(x, y, clients=[9, 9, 9, 4, 4, 4])
    assert as_array.fingerprint() == as_tensor.fingerprint() == as_list.fingerprint()


@pytest.mark.parametrize(
    "unseen", ["east", ["east"], ("east",), {"east"}, np.array(["east"])], ids=repr
)
def test_a_lone_string_is_one_unseen_client(unseen: Any) -> None:
    clients = ["east", "e", "a", "s", "t"] * 3
    federation = Federation.from_arrays(
        np.zeros((15, 1)), np.arange(15) % 2, clients=clients, unseen=unseen
    )
    assert federation.unseen.tolist() == [True, False, False, False, False]


def test_unseen_clients_may_come_as_a_tensor_or_one_by_one() -> None:
    x, y, clients = np.zeros((6, 1)), np.arange(6) % 2, torch.tensor([9, 9, 9, 4, 4, 4])
    for unseen in (torch.tensor([4]), iter([4]), np.array([4])):
        assert Federation.from_arrays(x, y, clients=clients, unseen=unseen).unseen.tolist() == [
            False,
            True,
        ]


def test_adding_a_client_changes_nothing_for_the_others() -> None:
    x, y = torch.zeros(60, 1), torch.arange(60) % 2
    alone = Federation.from_arrays(x[:40], y[:40], clients=["ann"] * 20 + ["bob"] * 20)
    joined = Federation.from_arrays(x, y, clients=["ann"] * 20 + ["bob"] * 20 + ["cleo"] * 20)
    before = Federation.from_arrays(x, y, clients=["cleo"] * 20 + ["ann"] * 20 + ["bob"] * 20)
    for split in ("train", "val", "test"):
        for client in (0, 1):
            assert alone.split(split).of(client).tolist() == joined.split(split).of(client).tolist()
            assert (
                alone.split(split).of(client).tolist()
                == (before.split(split).of(client + 1) - 20).tolist()
            )


@pytest.mark.parametrize(
    "fractions",
    [(0.7, 0.1, 0.1), (0.5, 0.5), (1.2, -0.2, 0.0), (0.0, 0.5, 0.5), (np.nan, 0.5, 0.5)],
)
def test_fractions_must_sum_to_one(fractions: Any) -> None:
    with pytest.raises(InputError, match="summing to 1"):
        Federation.from_arrays(np.zeros((4, 1)), [0, 1, 0, 1], clients=[0] * 4, splits=fractions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": [0, 0, 0]}, "4 samples, 3 names"),
        ({"clients": 2}, "clients must have the client of each sample, such as .*, got 2"),
        ({"groups": ["north"] * 4}, "groups must be a mapping from clients to groups, .* got list"),
        ({"groups": {1: "north"}}, "no group for client 0"),
        (
            {"groups": {0: "north", 7: "south"}},
            "groups: client 7 has no sample; the clients are 0",
        ),
        (
            {"groups": {0: "north", "0": "south"}},
            "groups: client '0' has no sample; the clients are 0",
        ),
        ({"clients": [1, 1, "1", "1"]}, "clients 1 and '1' would both be called '1'"),
        (
            {"clients": ["(1, 2)", (1, 2), 3, 3]},
            r"clients '\(1, 2\)' and \(1, 2\) would both be called '\(1, 2\)'",
        ),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"seed": 0.5}, "seed must be a whole number of at least 0, got 0.5"),
        ({"seed": True}, "seed must be a whole number of at least 0, got True"),
        ({"unseen": [5]}, "unseen client 5 has no sample; the clients are 0"),
        ({"unseen": "east"}, "unseen client 'east' has no sample; the clients are 0"),
        ({"unseen": 0}, r"unseen=0 must be a list of clients, such as \[0\]"),
        ({"unseen": [0]}, "all 1 clients are unseen"),
        (
            {"x": np.zeros((0, 2)), "y": [], "clients": []},
            "the federation has no clients; valid: at least one client with samples",
        ),
        ({"y": [0, 1, 1.5, 0]}, "sample 2 has label 1.5"),
        ({"y": [0, 1, np.nan, 0]}, "sample 2 has label nan"),
        ({"y": ["a", "b", "a", "b"]}, "y must hold real numbers, not <U1; numpy.unique"),
        ({"classes": 1}, "label 1 in y; valid: 0 to 0"),
    ],
)
def test_from_arrays_refuses(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": np.zeros((4, 1)),
        "y": [0, 1, 0, 1],
        "clients": [0] * 4,
        **changes,
    }
    with pytest.raises(InputError, match=message):
        Federation.from_arrays(**arguments)


def test_from_arrays_takes_whole_floats_and_read_only_arrays() -> None:
    x = np.zeros((4, 1))[::-1]
    x.setflags(write=False)
    federation = Federation.from_arrays(x, np.array([0.0, 1.0, 0.0, 1.0]), clients=[0] * 4)
    assert federation.y.tolist() == [0, 1, 0, 1]
    assert federation.y.dtype == torch.int64
    regression = Federation.from_arrays(
        x, np.array([0.0, 1.0, 0.0, 1.0]), clients=[0] * 4, task="regression"
    )
    assert regression.y.dtype == torch.float32


def test_from_dataset_equals_from_arrays() -> None:
    x, y = torch.rand(8, 1, 2, 2), torch.arange(8) % 2
    clients = [0, 1] * 4
    pairs = [(sample.numpy(), int(label)) for sample, label in zip(x, y, strict=True)]
    expected = Federation.from_arrays(x, y, clients=clients, seed=5).fingerprint()
    tensors = torch.utils.data.TensorDataset(x, y)
    assert Federation.from_dataset(tensors, clients=clients, seed=5).fingerprint() == expected
    assert Federation.from_dataset(pairs, clients=clients, seed=5).fingerprint() == expected


def test_from_dataset_refuses() -> None:
    with pytest.raises(InputError, match="has no length"):
        Federation.from_dataset(iter([]), clients=[])
    with pytest.raises(InputError, match="is empty"):
        Federation.from_dataset([], clients=[])
    with pytest.raises(InputError, match="sample 1 of the dataset has shape"):
        Federation.from_dataset([(torch.zeros(2), 0), (torch.zeros(3), 0)], clients=[0, 0])
    with pytest.raises(InputError, match="clients 1 and '1' would both be called '1'"):
        Federation.from_dataset([(torch.zeros(2), 0)] * 2, clients=[1, "1"])


@pytest.mark.parametrize(
    ("item", "given"),
    [
        (torch.tensor([3.0, 1.0]), "Tensor"),
        (np.array([3.0, 1.0]), "ndarray"),
        ({0: 3.0, 1: 1.0}, "dict"),
        ("ab", "str"),
        ((torch.zeros(2), 0, 0.5), "tuple of 3"),
        ([torch.zeros(2)], "list of 1"),
    ],
)
def test_items_that_are_no_pairs_are_refused(item: Any, given: str) -> None:
    with pytest.raises(
        InputError, match=rf"item 1 of the dataset must be a pair \(x, y\), got {given}$"
    ):
        Federation.from_dataset([(torch.zeros(2), 0), item], clients=[0, 0])


def test_pairs_may_be_lists() -> None:
    items = [[torch.zeros(2), label] for label in (0, 1, 0)]
    assert Federation.from_dataset(items, clients=[0] * 3).shape == (2,)


def test_a_million_clients_are_quick() -> None:
    clients = 1_000_000
    draws = np.random.default_rng(0)
    started = time.perf_counter()
    federation = Federation(
        x=torch.zeros(2000, 4),
        y=torch.zeros(2000).long(),
        train=Split(draws.integers(0, 1500, clients * 10), np.arange(clients + 1) * 10),
        val=Split(np.empty(0, np.int64), np.zeros(clients + 1, np.int64)),
        test=Split(draws.integers(1500, 2000, clients), np.arange(clients + 1)),
        groups=np.zeros(clients, np.int64),
        group_names=("all",),
        unseen=np.zeros(clients, bool),
    )
    federation.fingerprint()
    assert time.perf_counter() - started < 10
    assert federation.pooled().train.sizes[0] == 1500


def test_classes_may_have_names():
    x, y = np.zeros((6, 1)), [0, 1, 2, 0, 1, 2]
    named = Federation.from_arrays(
        x, y, clients=[0] * 3 + [1] * 3, class_names=["cat", "dog", "mouse"]
    )
    assert named.class_names == named.pooled().class_names == ("cat", "dog", "mouse")
    without = Federation.from_arrays(x, y, clients=[0] * 3 + [1] * 3)
    assert without.class_names is None
    assert named.fingerprint() == without.fingerprint()


@pytest.mark.parametrize("names", [["cat", "dog"], "abc", ["cat", "dog", 3]])
def test_names_of_classes_are_one_a_class(names):
    with pytest.raises(InputError, match="class_names must be 3 names, one per class, not "):
        Federation.from_arrays(np.zeros((3, 1)), [0, 1, 2], clients=[0] * 3, class_names=names)


def test_a_regression_has_no_classes_to_name():
    with pytest.raises(
        InputError, match="class_names of federation 'custom' are not valid for a regression"
    ):
        Federation.from_arrays(
            np.zeros((3, 1)), np.zeros(3), clients=[0] * 3, task="regression", class_names=["a"]
        )


def test_a_federation_is_printed_as_one_short_line() -> None:
    assert repr(small(name="two", unseen=np.array([False, True]))) == (
        "<Federation 'two': classification with 3 classes; 2 clients in 2 groups (north, south), 1 "
        "of them unseen; 7 samples of shape (2,): 3 train, 1 val, 2 test>"
    )
    many = small(
        group_names=tuple("abcdefghijkl"), y=torch.arange(7.0), task="regression", classes=None
    )
    assert "regression; 2 clients in 12 groups (a, b, c, d, e, f, g, h, …); 7 samples" in repr(many)


# ---- what is probably a mistake ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 2, 3], "'mine' has labels from 1 to 3, and labels count from 0; subtract 1 from them"),
        ([0, 100, 200], "'mine' has 3 different labels from 0 to 200, .* use numpy.unique"),
        ([100, 200, 300], "'mine' has 3 different labels from 100 to 300, .* use numpy.unique"),
        ([0, 0, 0], "'mine' has the label 0 only, .*; use labels of two classes or more"),
        ([7, 7, 7], "'mine' has the label 7 only, .*; use labels of two classes or more"),
    ],
)
def test_labels_that_are_probably_a_mistake_are_warned_of(labels, message):
    x, y = np.zeros((6, 2)), np.array(labels * 2)
    with pytest.warns(UserWarning, match=message):
        federation = Federation.from_arrays(x, y, clients=[0] * 6, name="mine")
    assert federation.classes == max(labels) + 1
    # No warning if the number of classes is given, or if targets are not labels.
    Federation.from_arrays(x, y, clients=[0] * 6, classes=max(labels) + 1)
    Federation.from_arrays(x, y.astype(float), clients=[0] * 6, task="regression")


@pytest.mark.parametrize("missing", [None, float("nan"), "nan", "None"])
def test_clients_and_groups_named_like_missing_values_are_warned_of(missing):
    x, y = np.zeros((6, 2)), np.array([0, 1] * 3)
    clients = ["a"] * 3 + [missing] * 3
    if isinstance(missing, str):
        with pytest.warns(
            UserWarning,
            match=r"clients of 'mine' has 1 named '(None|nan)', which is usually a missing",
        ):
            Federation.from_arrays(x, y, clients=clients, name="mine")
    else:
        with pytest.raises(InputError, match=r"clients: sample 3 has no client \((None|nan)\)"):
            Federation.from_arrays(x, y, clients=clients, name="mine")
    groups = {"a": "north", "b": missing}
    with pytest.warns(
        UserWarning,
        match=r"groups of 'mine' has 1 named .*(None|nan)'?, which is usually a missing value",
    ):
        federation = Federation.from_arrays(
            x, y, clients=["a"] * 3 + ["b"] * 3, groups=groups, name="mine"
        )
    assert federation.group_names == ("north", str(missing))
