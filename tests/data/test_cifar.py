"""CIFAR from small pickles in the formats of Python 2 and 3, and harmful pickles."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.data import load
from equipoise.data.cifar import COLOURS, FILES, cifar, read_pickle, recipe
from equipoise.data.partition import Dirichlet
from equipoise.errors import InputError
from tests.data.real_files import SHARED
from tests.data.small_files import cifar_batch

HOME = Path(os.environ.get("EQUIPOISE_DATA", SHARED))


def write(root, classes, protocol=2):
    folder = root / {10: "cifar-10-batches-py", 100: "cifar100/cifar-100-python"}[classes]
    folder.mkdir(parents=True)
    names = FILES[classes]["train"] + FILES[classes]["test"]
    for i, name in enumerate(names):
        (folder / name).write_bytes(pickle.dumps(cifar_batch(classes, 10 * i), protocol=protocol))
    return str(root), len(names)


@pytest.mark.parametrize("classes", [10, 100])
def test_images_and_labels(tmp_path, classes):
    root, files = write(tmp_path, classes)
    source = cifar(classes=classes, root=root, standardize=False)
    assert source.x.shape == (4 * files, 3, 32, 32)
    assert source.x.dtype == torch.float32
    assert (source.classes, source.name) == (classes, f"cifar{classes}")
    assert source.y.tolist() == [(10 * i + j) % classes for i in range(files) for j in range(4)]
    # The last image of the second file is 13 brighter; green (colour 1), row 5, column 9.
    assert float(source.x[7, 1, 5, 9]) == pytest.approx((13 + 40 + 15 + 9) / 255)


def test_portions_keep_training_images_first(tmp_path):
    root, _ = write(tmp_path, 10)
    whole, train, test = (cifar(root=root, portion=portion) for portion in ("all", "train", "test"))
    assert (len(train.x), len(test.x)) == (20, 4)
    assert torch.equal(whole.x, torch.cat([train.x, test.x]))
    with pytest.raises(InputError, match="unknown portion 'val' in data 'cifar'"):
        cifar(root=root, portion="val")


def test_the_published_test_images_may_stay_with_the_server(tmp_path):
    root, _ = write(tmp_path, 10)
    federation = load("cifar", root=root, test="server", partition={"name": "iid", "clients": 2})
    assert federation.server["test"].tolist() == [20, 21, 22, 23]
    assert sorted(
        np.concatenate([federation.split(s).indices for s in ("train", "val", "test")])
    ) == list(range(20))


@pytest.mark.parametrize("classes", [10, 100])
def test_colours_are_standardized_one_by_one(tmp_path, classes):
    root, _ = write(tmp_path, classes)
    plain, standard = (
        cifar(classes=classes, root=root, standardize=choice) for choice in (False, True)
    )
    for colour in range(3):
        mean, deviation = (numbers[colour] for numbers in COLOURS[classes])
        wanted = (plain.x[:, colour].double() - mean) / deviation
        torch.testing.assert_close(standard.x[:, colour].double(), wanted, rtol=0, atol=1e-6)


def test_recipe_and_load(tmp_path):
    root, _ = write(tmp_path, 100)
    assert recipe(seed=0, classes=100, root=root)[1] == Dirichlet(100, beta=0.1)
    federation = load("cifar", classes=100, root=root, partition={"name": "iid", "clients": 2})
    assert (federation.classes, federation.name, federation.shape) == (100, "cifar100", (3, 32, 32))


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_is_read(tmp_path, protocol):
    path = tmp_path / "batch"
    wanted = cifar_batch(10, 3)
    path.write_bytes(pickle.dumps(wanted, protocol=protocol))
    found = read_pickle(path)
    assert found[b"labels"] == wanted[b"labels"]
    assert np.array_equal(found[b"data"], wanted[b"data"])


def test_a_pickle_of_python_2_is_read(tmp_path):
    """Write the opcodes of protocol 2 as Python 2 did: its text is bytes in Python 3."""

    def text(content):
        return b"U" + bytes([len(content)]) + content

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
        + text(b"b")
        + b"\x87R(K\x01K\x02K\x03\x86"
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", 6) + bytes(range(6)) + b"tb"
    )
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02}(" + text(b"data") + array + text(b"labels") + b"](K\x01K\x02eu.")
    found = read_pickle(path)
    assert found[b"labels"] == [1, 2]
    assert found[b"data"].tolist() == [[0, 1, 2], [3, 4, 5]]


class Harmful:
    """Requests a function call with arguments when it is loaded."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(os.system, ("touch {}",)), (eval, ("open({!r}, 'w')",)), (np.load, ("{}",))],
)
def test_harmful_pickles_are_refused_before_anything_happens(tmp_path, function, arguments):
    mark = tmp_path / "mark"
    path = tmp_path / "batch"
    path.write_bytes(
        pickle.dumps({b"data": Harmful(function, *(a.format(str(mark)) for a in arguments))})
    )
    with pytest.raises(
        InputError, match=r"is refused: it asks for .*, which files of CIFAR have no use for"
    ):
        read_pickle(path)
    assert not mark.exists()


def test_only_the_one_harmless_encoding_is_allowed(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(b"c_codecs\nencode\n(Vabc\nVrot13\ntR.")
    with pytest.raises(InputError, match="is refused: it asks for the encoding 'rot13'"):
        read_pickle(path)


@pytest.mark.parametrize(
    "content", [b"", b"no pickle at all", pickle.dumps(cifar_batch(10, 0))[:-50]]
)
def test_damaged_pickles_are_refused(tmp_path, content):
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a pickle or is damaged") as caught:
        read_pickle(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"data": None}, r"must be bytes of shape \[N, 3072\]"),
        ({b"data": np.zeros((4, 3072))}, r"must be bytes of shape \[N, 3072\]"),
        ({b"data": np.zeros((4, 3000), np.uint8)}, r"must be bytes of shape \[N, 3072\]"),
        ({b"labels": [1, 2]}, "4 images, 2 labels"),
        ({b"labels": [0.5, 1, 2, 3]}, "one whole number per label"),
        ({b"labels": [0, 1, 2, 10]}, "run from 0 to 10; valid: 0 to 9"),
        ({b"labels": [-1, 1, 2, 3]}, "run from -1 to 3; valid: 0 to 9"),
    ],
)
def test_batches_that_do_not_fit_are_refused(tmp_path, change, message):
    root, _ = write(tmp_path, 10)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps({**cifar_batch(10, 0), **change}))
    with pytest.raises(InputError, match=message) as caught:
        cifar(root=root)
    assert "data_batch_3" in str(caught.value)


def test_files_of_the_other_cifar_are_refused(tmp_path):
    root, _ = write(tmp_path, 10)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(cifar_batch(100, 0)))
    with pytest.raises(InputError, match="is not a file of CIFAR-10: it must hold data and labels"):
        cifar(root=root)


@pytest.mark.skipif(
    not (HOME / "cifar-10-batches-py").exists(),
    reason=f"{HOME / 'cifar-10-batches-py'} is not here; cifar10.py writes it",
)
def test_real_counts():
    train, test = (
        cifar(root=str(HOME), portion=portion, standardize=False) for portion in ("train", "test")
    )
    assert np.bincount(train.y).tolist() == [5000] * 10
    assert np.bincount(test.y).tolist() == [1000] * 10
    assert int(train.y[0]) == 6  # a frog
    for colour in range(3):
        pixels = train.x[:, colour].double()
        assert float(pixels.mean()) == pytest.approx(COLOURS[10][0][colour], abs=1e-4)
        assert float(pixels.std()) == pytest.approx(COLOURS[10][1][colour], abs=1e-4)
