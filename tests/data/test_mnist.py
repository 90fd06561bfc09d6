"""MNIST from small files written by the tests, and its counts with the real files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.data import load
from equipoise.data.mnist import FILES, mnist, recipe
from equipoise.data.partition import Dirichlet
from equipoise.errors import InputError
from tests.data.real_files import SHARED, needs_shared
from tests.data.small_files import write_idx_pair


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Seven training images and three test images, compressed and not."""
    root = tmp_path_factory.mktemp("data")
    draws = np.random.default_rng(0)
    images, labels = draws.integers(0, 256, (10, 28, 28)).astype(np.uint8), np.arange(10)[::-1]
    write_idx_pair(images[:7], labels[:7], root / "mnist", FILES["train"])
    write_idx_pair(images[7:], labels[7:], root / "mnist", FILES["test"], compress=False)
    return str(root), images, labels


@pytest.mark.parametrize(
    ("portion", "rows"), [("all", slice(None)), ("train", slice(7)), ("test", slice(7, None))]
)
def test_portions(small, portion, rows):
    root, images, labels = small
    source = mnist(root=root, portion=portion)
    assert source.y.tolist() == labels[rows].tolist()
    assert source.x.dtype == torch.float32
    assert source.x.shape == (len(labels[rows]), 1, 28, 28)
    assert np.allclose(source.x[:, 0].numpy() * 255, images[rows], atol=1e-4)
    assert (source.classes, source.name) == (10, "mnist")


def test_a_portion_needs_its_own_files_only(small, tmp_path):
    _, images, labels = small
    write_idx_pair(images, labels, tmp_path / "MNIST" / "raw", FILES["test"])
    assert len(mnist(root=str(tmp_path), portion="test").x) == 10
    with pytest.raises(
        InputError, match="expected train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k"
    ):
        mnist(root=str(tmp_path))


def test_recipe_is_label_skew_over_a_hundred_clients(small):
    assert recipe(seed=0, root=small[0])[1] == Dirichlet(100, beta=0.1)
    assert load("mnist", root=small[0], partition={"name": "iid", "clients": 3}).shape == (
        1,
        28,
        28,
    )


@needs_shared("mnist")
def test_real_counts():
    train, test = (mnist(root=str(SHARED), portion=portion) for portion in ("train", "test"))
    assert (len(train.x), len(test.x)) == (60_000, 10_000)
    # The first digits of each file are well known.
    assert train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert test.y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert np.bincount(test.y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert float(train.x.mean()) == pytest.approx(0.1307, abs=1e-4)


@needs_shared("mnist")
def test_real_digits_in_fedcrcs_setting():
    """A hundred clients with label skew, splits of 80/20 without validation, 40 of them new."""
    partition = {"name": "dirichlet", "clients": 100, "beta": 0.1}
    federation = load(
        "mnist", root=str(SHARED), partition=partition, splits=(0.8, 0.0, 0.2), unseen=40
    )
    train, val, test = (federation.split(name).sizes for name in ("train", "val", "test"))
    held = train + test
    assert (len(held), held.sum(), val.sum(), len(federation.seen)) == (100, 70_000, 0, 60)
    assert np.abs(train - 0.8 * held).max() <= 1
    assert min(train.min(), test.min()) >= 1
    counts = federation.label_counts()
    # With beta 0.1 the largest class of a client has most of its samples; with equal shares it
    # would have a tenth.
    assert (counts.max(axis=1) / held).mean() > 0.5


@needs_shared("mnist")
def test_real_digits_fill_skewed_at_the_papers_size():
    federation = load("mnist", root=str(SHARED), partition="skewed")
    assert federation.clients == 100
    sizes = [federation.split(name).sizes.tolist() for name in ("train", "val", "test")]
    assert sizes == [[350] * 100, [50] * 100, [100] * 100]
    labels = federation.label_counts()
    for client in range(100):
        assert [int(labels[client][(client + j) % 10]) for j in range(10)] == [100] * 5 + [0] * 5
