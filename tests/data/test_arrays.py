"""Samples, labels and clients in NumPy files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.data import load
from equipoise.errors import InputError

CLINICS = np.repeat(["north", "south", "west"], [5, 6, 7])


@pytest.fixture
def files(tmp_path):
    def write(**arrays):
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array)
        return {name: str(tmp_path / f"{name}.npy") for name in arrays}

    return write


def samples(rows=18):
    return {"x": np.arange(2.0 * rows).reshape(rows, 2), "y": np.arange(rows) % 3}


def test_every_client_holds_its_rows(files):
    groups = np.where(CLINICS == "south", "rural", "urban")
    federation = load("arrays", **files(**samples(), clients=CLINICS, groups=groups))
    assert [federation.client_name(client) for client in range(3)] == ["north", "south", "west"]
    assert [federation.group_names[group] for group in federation.groups] == [
        "urban",
        "rural",
        "urban",
    ]
    for client, name in enumerate(("north", "south", "west")):
        held = np.concatenate(
            [federation.split(split).of(client) for split in ("train", "val", "test")]
        )
        assert (
            sorted(federation.x[held, 0].tolist())
            == (2.0 * np.flatnonzero(name == CLINICS)).tolist()
        )
    assert federation.x.dtype == torch.float32
    assert federation.classes == 3


def test_without_clients_samples_are_divided(files):
    federation = load("arrays", **files(**samples(200)))
    assert federation.clients == 10
    assert sum(federation.split(split).sizes.sum() for split in ("train", "val", "test")) == 200


def test_other_byte_orders_and_whole_numbers(files):
    given = samples()
    federation = load(
        "arrays", **files(x=given["x"].astype(">i2"), y=given["y"].astype(">f8"), clients=CLINICS)
    )
    assert federation.x.dtype == torch.int16
    assert federation.x[:, 0].tolist() == given["x"][:, 0].tolist()
    assert federation.y.tolist() == given["y"].tolist()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"y": np.arange(17) % 3},
            r"y.npy \(data.y\) has 17 rows and .*x.npy \(data.x\) has 18; valid: a row for each",
        ),
        ({"clients": CLINICS.reshape(9, 2)}, r"clients.npy \(data.clients\) has 9 rows"),
        (
            {"clients": np.stack([CLINICS] * 2, 1)},
            r"clients.npy \(data.clients\) has shape \(18, 2\); valid: one value",
        ),
        (
            {"x": np.float64(1)},
            r"x.npy \(data.x\) holds a single value; valid: a row for each sample",
        ),
        (
            {"x": np.arange(18.0)},
            r"x.npy \(data.x\) has shape \(18,\); valid: a row of .* such as \(18, 1\)",
        ),
        ({"x": np.stack([CLINICS], 1)}, r"x.npy \(data.x\) must hold numbers, got an array of <U5"),
        ({"y": CLINICS}, r"y.npy \(data.y\) must hold numbers, .*numpy.unique"),
        (
            {"y": (np.arange(18) % 3)[:, None]},
            r"y.npy \(data.y\) has shape \(18, 1\); valid: one label .* \(18,\). Use numpy.ravel",
        ),
        ({"y": np.eye(3)[np.arange(18) % 3]}, r"has shape \(18, 3\); .*argmax\(y, 1\) for one-hot"),
        (
            {"y": np.arange(18) % 10 + 1},
            r"y.npy \(data.y\) has labels from 1 to 10, and labels count from 0; subtract 1 from "
            "them, or give data.classes: 11",
        ),
        (
            {"y": np.arange(18) % 3 * 100},
            r"y.npy \(data.y\) has 3 different labels from 0 to 200, and labels count from 0; use "
            r"numpy.unique\(y, return_inverse=True\)\[1\], or give data.classes: 201",
        ),
        (
            {"y": np.zeros(18, int)},
            r"y.npy \(data.y\) has the label 0 only, .* two classes or more, or give data.classes: "
            "2 if",
        ),
        ({"y": np.arange(18) - 3}, "label"),
        (
            {"clients": np.where(np.arange(18) == 4, np.nan, 1.0)},
            r"clients.npy \(data.clients\): sample 4 has no client \(nan\); name one or drop",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(files, wrong, message):
    with pytest.raises(InputError, match=message):
        load("arrays", **files(**{**samples(), "clients": CLINICS, **wrong}))


def test_a_missing_file_names_the_working_directory(tmp_path, monkeypatch, files):
    files(**samples())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"cannot read z.npy .*directory, {tmp_path}$"):
        load("arrays", x="x.npy", y="z.npy")


def test_attributes_and_unseen_clients_by_name(files):
    given = files(**samples(), clients=CLINICS, sex=np.tile(["f", "m"], 9), age=np.arange(17))
    sex, age = given.pop("sex"), given.pop("age")
    federation = load("arrays", **given, attributes={"sex": sex}, unseen=["south"])
    assert federation.attributes["sex"].names == ("f", "m")
    assert federation.attributes["sex"].codes.tolist() == [0, 1] * 9
    assert [federation.client_name(k) for k in np.flatnonzero(federation.unseen)] == ["south"]
    with pytest.raises(InputError, match=r"age.npy \(data.attributes.age\) has 17 rows"):
        load("arrays", **given, attributes={"age": age})
    with pytest.raises(InputError, match="'sout' does not exist; did you mean 'south'.; the clien"):
        load("arrays", **given, unseen=["sout"])


def test_labels_above_0_are_used_if_the_number_of_classes_is_given(files):
    given = {**samples(), "y": np.arange(18) % 3 + 1, "clients": CLINICS}
    federation = load("arrays", **files(**given), classes=4)
    assert federation.classes == 4
    assert set(federation.y.tolist()) == {1, 2, 3}


def test_files_of_another_kind_are_refused(tmp_path, files):
    given = files(**samples())
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "table.csv").write_text("1,2,3")
    (tmp_path / "broken.npz").write_bytes(b"PK")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name, message in (
        ("text.npy", "it is not a NumPy file; valid: a file of numpy.save"),
        ("table.csv", "it is not a NumPy file; data 'table' reads CSV files; valid: "),
        ("broken.npz", "data.x: cannot read .*broken.npz: File is not a zip file"),
        ("objects.npy", "without Python objects"),
    ):
        with pytest.raises(InputError, match=message):
            load("arrays", x=str(tmp_path / name), y=given["y"])


def test_one_file_may_hold_all_arrays(tmp_path, files):
    given = {**samples(), "clients": CLINICS, "sex": np.tile(["f", "m"], 9)}
    kept = files(**given)
    attributes = {"sex": kept.pop("sex")}
    expected = load("arrays", **kept, attributes=attributes)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "all.npz", **given)
        path = str(tmp_path / "all.npz")
        made = load("arrays", x=path, y=path, clients=path, attributes={"sex": path})
        assert made.fingerprint() == expected.fingerprint()
        assert made.client_names == expected.client_names


def test_the_only_array_of_a_file_may_have_any_name(tmp_path, files):
    given = files(**samples(), clients=CLINICS)
    np.savez(tmp_path / "alone.npz", CLINICS)
    made = load("arrays", **{**given, "clients": str(tmp_path / "alone.npz")})
    assert made.client_names == ("north", "south", "west")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            {"a": np.zeros(3), "b": np.zeros(3)},
            r"odd.npz \(data.x\) has no array 'x'; its arrays: a, b. Valid: a file with this "
            "array, or with one array only",
        ),
        ({}, "has no array 'x'; its arrays: none"),
        ({"x": np.array([{}], object)}, "data.x: x in .*odd.npz must hold real numbers or text"),
        ({"x": np.array(["a"] * 18)}, r"odd.npz \(data.x\) has shape \(18,\)"),
        ({"x": np.float64(3)}, r"odd.npz \(data.x\) holds a single value"),
    ],
)
def test_npz_files_that_do_not_fit_are_refused(tmp_path, files, held, message):
    given = files(**samples())
    np.savez(tmp_path / "odd.npz", **held)
    with pytest.raises(InputError, match=message):
        load("arrays", x=str(tmp_path / "odd.npz"), y=given["y"])


def test_targets_without_labels_are_divided_at_random(files):
    given = {"x": np.zeros((60, 2)), "y": np.arange(60.0)}
    assert load("arrays", **files(**given), task="regression").train.sizes.tolist() == [4] * 10
