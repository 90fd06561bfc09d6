"""Finding files in a data directory, and reading idx files made byte by byte."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from equipoise.data.files import as_pixels, data_files, read, read_idx, read_idx_images
from equipoise.errors import InputError
from tests.data.small_files import idx_bytes, write_idx_pair


@pytest.fixture
def tree(tmp_path):
    for name in (
        "one/a",
        "one/b.gz",
        "two/a",
        "two/b",
        "two/c",
        "json/train/2.json",
        "json/train/1.json",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return tmp_path


def names(paths, root):
    return [path.relative_to(root).as_posix() for path in paths]


def test_the_first_folder_that_holds_all_files_is_taken(tree):
    assert names(data_files("s", ["a", "b"], folders=["none", "one", "two"], root=tree), tree) == [
        "one/a",
        "one/b.gz",
    ]
    assert names(data_files("s", ["b", "c"], folders=["one", "two"], root=tree), tree) == [
        "two/b",
        "two/c",
    ]


def test_the_first_complete_choice_is_taken(tree):
    found = data_files("s", ["a", "z"], ["c", "a"], folders=["one", "two"], root=tree)
    assert names(found, tree) == ["two/c", "two/a"]


def test_patterns_give_all_their_files_in_order(tree):
    found = data_files("s", ["train/*.json"], folders=["json"], root=tree)
    assert names(found, tree) == ["json/train/1.json", "json/train/2.json"]


def test_a_plain_file_is_preferred_to_a_compressed_one(tree):
    (tree / "two/a.gz").write_bytes(b"")
    assert names(data_files("s", ["a"], folders=["two"], root=tree), tree) == ["two/a"]


def test_root_comes_before_the_environment_and_that_before_the_working_directory(
    tree, monkeypatch, tmp_path
):
    (tree / "data").mkdir()
    (tree / "data" / "a").write_bytes(b"")
    monkeypatch.chdir(tree)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    assert names(data_files("s", ["a"], folders=["."]), tree) == ["data/a"]
    monkeypatch.setenv("EQUIPOISE_DATA", str(tree / "one"))
    assert names(data_files("s", ["a"], folders=["."]), tree) == ["one/a"]
    assert names(data_files("s", ["a"], folders=["."], root=tree / "two"), tree) == ["two/a"]


@pytest.mark.parametrize(
    ("root", "variable", "origin"),
    [
        ("here", "there", "root='here'"),
        (None, "there", "variable EQUIPOISE_DATA"),
        (None, None, "neither root nor"),
    ],
)
def test_the_error_says_where_and_for_what(monkeypatch, tmp_path, root, variable, origin):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    if variable:
        monkeypatch.setenv("EQUIPOISE_DATA", variable)
    with pytest.raises(InputError) as caught:
        data_files("mnist", ["images", "labels"], ["all.npz"], folders=["mnist", "."], root=root)
    message = str(caught.value)
    home = tmp_path / (root or variable or "data")
    assert f"no files of data 'mnist' in {home / 'mnist'} or {home} (" in message
    assert origin in message
    assert "expected images, labels; or all.npz (or with .gz)" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "code", "dtype"),
    [
        (0x08, "B", np.uint8),
        (0x09, "b", np.int8),
        (0x0B, "h", np.int16),
        (0x0C, "i", np.int32),
        (0x0D, "f", np.float32),
        (0x0E, "d", np.float64),
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_idx_of_every_type(tmp_path, kind, code, dtype, compress):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype) * (1 if kind == 0x08 else -1)
    content = idx_bytes(values, kind, code)
    path = tmp_path / "values"  # the name says nothing about compression
    path.write_bytes(gzip.compress(content) if compress else content)
    found = read_idx(path)
    assert found.dtype == dtype
    assert found.dtype.isnative
    assert np.array_equal(found, values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an idx file: it begins with nothing"),
        (b"PNG!", "is not an idx file: it begins with 50 4e 47 21"),
        (bytes([0, 0, 7, 1]), "is not an idx file"),
        (bytes([0, 0, 8, 3, 0, 0]), "is truncated: its header of 16 bytes"),
        (
            bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]),
            r"holds 2 bytes of values, its shape \(3,\) needs 3",
        ),
        (
            bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 2]),
            r"holds 2 bytes of values, its shape \(1,\) needs 1",
        ),
        (gzip.compress(b"words", mtime=0)[:-9], "is a broken gzip file"),
        (b"\x1f\x8bnonsense", "is a broken gzip file"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path, content, message):
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_read_gives_plain_files_as_they_are(tmp_path):
    (tmp_path / "plain.gz").write_bytes(b"not compressed")
    assert read(tmp_path / "plain.gz") == b"not compressed"


def test_pixels_are_bytes_over_255():
    assert as_pixels(np.arange(256, dtype=np.uint8)).tolist() == pytest.approx(
        [b / 255 for b in range(256)]
    )


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            np.zeros((2, 3)),
            [0, 1],
            r"uint8 of shape \(2, 3\); images must be uint8 \[N, height, width\]",
        ),
        (np.zeros((2, 3, 3)), [0, 1, 2], r"shape \(3,\), but .*images.gz has 2 images"),
        (np.zeros((2, 3, 3)), [0, 10], "has label 10; valid: 0 to 9"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(tmp_path, images, labels, message):
    write_idx_pair(images.astype(np.uint8), labels, tmp_path, ("images", "labels"))
    with pytest.raises(InputError, match=message):
        read_idx_images(tmp_path / "images.gz", tmp_path / "labels.gz", classes=10)
