"""Data in one directory per client."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.data import load
from equipoise.data.silos import silo_federation, silos
from equipoise.errors import InputError

HOW = {"splits": (0.5, 0.25, 0.25), "classes": 3, "task": "classification", "seed": 0}


def write(root, name, rows, *, group=None, shape=(2,), first=0):
    folder = root / name
    folder.mkdir(parents=True)
    x = np.arange(first, first + rows * int(np.prod(shape)), dtype=float).reshape(rows, *shape)
    np.savez(folder / "data.npz", x=x, y=np.arange(rows) % 3)
    if group:
        (folder / "client.yaml").write_text(f"group: {group}\n")
    return folder


def test_clients_come_in_the_order_of_their_numbers(tmp_path):
    for number, rows in ((10, 4), (2, 8), (1, 12)):
        write(tmp_path, f"clinic-{number}", rows, group="rural" if number == 2 else "urban")
    federation = load("silos", root=str(tmp_path), splits=(0.5, 0.25, 0.25))
    assert [federation.client_name(client) for client in range(3)] == [
        "clinic-1",
        "clinic-2",
        "clinic-10",
    ]
    assert federation.train.sizes.tolist() == [6, 4, 2]
    assert [federation.group_names[group] for group in federation.groups] == [
        "urban",
        "rural",
        "urban",
    ]
    assert federation.classes == 3
    assert federation.x.dtype == torch.float32


def test_one_directory_has_the_splits_it_has_among_all(tmp_path):
    folders = [write(tmp_path, f"c{number}", 8 + number, first=100 * number) for number in range(3)]
    together = load("silos", root=str(tmp_path), classes=3, splits=HOW["splits"])
    alone = silo_federation(folders[1], **HOW)
    for split in ("train", "val", "test"):
        assert torch.equal(
            alone.x[alone.split(split).of(0)], together.x[together.split(split).of(1)]
        )


def test_samples_to_test_on_may_have_a_file_of_their_own(tmp_path):
    folders = [write(tmp_path, f"c{number}", 6 + number, first=100 * number) for number in range(2)]
    for folder in folders:
        np.savez(folder / "test.npz", x=np.full((4, 2), 7.0), y=np.arange(4) % 3)
    together = load("silos", root=str(tmp_path), classes=3, splits=HOW["splits"])
    assert [together.split(name).sizes.tolist() for name in ("train", "val", "test")] == [
        [4, 5],
        [2, 2],
        [4, 4],
    ]
    assert (together.x[together.test.indices] == 7).all()
    for client, folder in enumerate(folders):
        alone = silo_federation(folder, **HOW)
        for split in ("train", "val", "test"):
            assert torch.equal(
                alone.x[alone.split(split).of(0)], together.x[together.split(split).of(client)]
            )
    (folders[0] / "test.npz").unlink()
    with pytest.raises(
        InputError, match="1 of 2 silos have test.npz; either all of them must have it, or none"
    ):
        silos(root=str(tmp_path))


def test_numbers_as_targets(tmp_path):
    write(tmp_path, "c0", 6)
    source = silos(root=str(tmp_path), task="regression")
    assert source.y.dtype == torch.float32
    assert source.classes is None


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, ">i4", np.float32])
def test_labels_of_any_type(tmp_path, kind):
    folder = write(tmp_path, "c0", 6)
    np.savez(folder / "data.npz", x=np.zeros((6, 2)), y=(np.arange(6) % 3).astype(kind))
    source = silos(root=str(tmp_path))
    assert source.y.dtype == torch.int64
    assert source.y.tolist() == [0, 1, 2, 0, 1, 2]


def test_labels_that_are_not_whole_numbers_are_refused(tmp_path):
    folder = write(tmp_path, "c0", 6)
    np.savez(folder / "data.npz", x=np.zeros((6, 2)), y=np.arange(6) / 2)
    with pytest.raises(
        InputError, match="sample 1 has label 0.5 in y; labels must be whole numbers"
    ):
        silos(root=str(tmp_path))


@pytest.mark.parametrize("kind", [bool, np.uint8, np.int32])
def test_masks_as_targets(tmp_path, kind):
    folder = write(tmp_path, "c0", 6)
    masks = np.random.default_rng(0).integers(0, 2, (6, 4, 5))
    np.savez(folder / "data.npz", x=np.zeros((6, 1, 4, 5)), y=masks.astype(kind))
    source = silos(root=str(tmp_path), task="segmentation")
    assert (source.y.dtype, source.classes) == (torch.uint8, 2)
    assert np.array_equal(source.y.numpy(), masks)


def test_the_data_directory_is_the_usual_one(tmp_path, monkeypatch):
    write(tmp_path / "silos", "c0", 6)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    assert load("silos").clients == 1


def spoil_shape(folder):
    write(folder.parent, "other-2", 4, shape=(3,))


def spoil_rows(folder):
    np.savez(folder / "data.npz", x=np.zeros((3, 2)), y=np.zeros(2))


def spoil_names(folder):
    np.savez(folder / "data.npz", images=np.zeros((3, 2)))


def spoil_file(folder):
    (folder / "data.npz").write_bytes(b"not an archive")


def spoil_key(folder):
    (folder / "client.yaml").write_text("grupo: rural\n")


def spoil_about(folder):
    (folder / "client.yaml").write_text("rural\n")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_shape, r"must have one shape, got \(2,\) in .*c1, \(3,\) in .*other-2"),
        (spoil_rows, r"data.npz has 3 rows in x and 2 in y"),
        (spoil_names, "cannot read .*data.npz: .*x.*; it must hold the arrays x and y"),
        (spoil_file, "cannot read .*data.npz"),
        (spoil_key, "unknown key 'grupo' in .*client.yaml; did you mean 'group'"),
        (
            spoil_about,
            "client.yaml must hold keys with values, such as 'group: rural', got 'rural'",
        ),
    ],
)
def test_mistakes_are_named(spoil, says, tmp_path):
    spoil(write(tmp_path, "c1", 4))
    with pytest.raises(InputError, match=says):
        silos(root=str(tmp_path))


def test_attributes_lie_in_the_same_file(tmp_path):
    for number, values in enumerate(
        (["f", "m", "m", "f", "x", "m"], ["m", "m", "f", "f", "f", "m"])
    ):
        folder = write(tmp_path, f"c{number}", 6, first=100 * number)
        with np.load(folder / "data.npz") as arrays:
            np.savez(folder / "data.npz", **arrays, **{"attribute.sex": np.array(values)})
    together = load("silos", root=str(tmp_path), classes=3, splits=HOW["splits"])
    sex = together.attributes["sex"]
    assert sex.names == ("f", "m", "x")
    assert [sex.names[code] for code in sex.codes[6:]] == ["m", "m", "f", "f", "f", "m"]
    # A client that reads only its own directory knows only its own values.
    assert silo_federation(folder, **HOW).attributes["sex"].names == ("f", "m")


def test_all_silos_have_the_same_attributes(tmp_path):
    first, second = (write(tmp_path, f"c{number}", 4, first=100 * number) for number in range(2))
    with np.load(second / "data.npz") as arrays:
        np.savez(second / "data.npz", **arrays, **{"attribute.sex": np.array(["f"] * 4)})
    with pytest.raises(
        InputError,
        match=r"c1/data.npz has the attributes sex, .*c0/data.npz has none; all silos must",
    ):
        silos(root=str(tmp_path))
    with np.load(first / "data.npz") as arrays:
        np.savez(first / "data.npz", **arrays, **{"attribute.sex": np.array(["f"] * 3)})
    with pytest.raises(
        InputError,
        match=r"has attribute.sex of shape \(3,\); an attribute needs one value per sample",
    ):
        silos(root=str(tmp_path))
