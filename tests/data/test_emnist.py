"""EMNIST from small files written by the tests, and the real ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.data import PARTITIONS, Skewed, ThreeGroups, load
from equipoise.data.emnist import CHARACTERS, RELEASE, UPRIGHT, emnist, recipe
from equipoise.errors import InputError
from tests.data.real_files import SHARED, needs_shared
from tests.data.small_files import write_idx_pair


@pytest.fixture(scope="module")
def images():
    """Images whose pixel in row r, column c is 2 r + c + a constant, so none is symmetric."""
    rows, columns = np.indices((28, 28))
    return (2 * rows + columns + np.arange(124)[:, None, None]).astype(np.uint8)


LABELS = np.arange(124) % 62


def test_upright_files_are_read_as_they_are(tmp_path, images):
    write_idx_pair(images, LABELS, tmp_path / "emnist", UPRIGHT)
    source = emnist(root=str(tmp_path))
    assert source.x.shape == (124, 1, 28, 28)
    assert source.x.dtype == torch.float32
    assert source.classes == 62
    assert source.y.tolist() == LABELS.tolist()
    assert float(source.x[5, 0, 3, 10]) == pytest.approx((2 * 3 + 10 + 5) / 255)
    turned = emnist(root=str(tmp_path), transposed=True)
    assert float(turned.x[5, 0, 10, 3]) == pytest.approx((2 * 3 + 10 + 5) / 255)


def test_files_of_the_release_are_turned_upright(tmp_path, images):
    write_idx_pair(images[:100], LABELS[:100], tmp_path / "emnist" / "gzip", RELEASE[:2])
    write_idx_pair(
        images[100:], LABELS[100:], tmp_path / "emnist" / "gzip", RELEASE[2:], compress=False
    )
    source = emnist(root=str(tmp_path))
    assert source.y.tolist() == LABELS.tolist()
    assert float(source.x[110, 0, 10, 3]) == pytest.approx((2 * 3 + 10 + 110) / 255)
    kept = emnist(root=str(tmp_path), transposed=False)
    assert float(kept.x[110, 0, 3, 10]) == pytest.approx((2 * 3 + 10 + 110) / 255)


def test_characters_choose_classes_and_their_order(tmp_path, images):
    write_idx_pair(images, LABELS, tmp_path, UPRIGHT)
    source = emnist(root=str(tmp_path), characters="bA7")
    # "b" is label 37, "A" 10, "7" 7; each label comes twice, 62 images apart.
    order = [(7, 2), (10, 1), (37, 0), (69, 2), (72, 1), (99, 0)]
    assert source.y.tolist() == [label for _, label in order]
    assert [round(float(x[0, 0, 0]) * 255) for x in source.x] == [place for place, _ in order]
    assert source.classes == 3


@pytest.mark.parametrize("characters", ["", "aa", "é", "a b"])
def test_other_characters_are_refused(characters):
    with pytest.raises(
        InputError, match=f"characters='{characters}' of data 'emnist' must be distinct"
    ):
        emnist(characters=characters)


def test_missing_files_name_both_sets(tmp_path):
    with pytest.raises(
        InputError,
        match="emnist-byclass-test-labels-idx1-ubyte; or emnist-byclass-images-idx3-ubyte",
    ):
        emnist(root=str(tmp_path))


def test_recipe_depends_on_the_characters(tmp_path, images):
    write_idx_pair(images, LABELS, tmp_path, UPRIGHT)
    assert recipe(seed=0, root=str(tmp_path), scale=0.1)[1] == ThreeGroups(0.1)
    assert recipe(seed=0, root=str(tmp_path), characters="ab", scale=0.1)[1] == Skewed(0.1)
    assert PARTITIONS["skewed"] is Skewed
    assert PARTITIONS["threegroups"] is ThreeGroups


@needs_shared("emnist")
def test_real_counts():
    source = emnist(root=str(SHARED))
    counts = np.bincount(source.y, minlength=62)
    assert (counts.sum(), counts.min(), counts.max()) == (40_000, 109, 2_177)
    # Upright: an "l" or "I" is taller than wide, so its ink varies more over rows.
    ink = source.x[source.y == CHARACTERS.index("l"), 0].mean(0)
    places = torch.arange(28.0)
    spread = [
        float((weights * (places - (weights * places).sum()).square()).sum())
        for weights in (ink.sum(1) / ink.sum(), ink.sum(0) / ink.sum())
    ]
    assert spread[0] > 1.5 * spread[1]


@needs_shared("emnist")
def test_real_three_groups_and_letters():
    federation = load("emnist", root=str(SHARED), scale=0.15)
    assert np.bincount(federation.groups).tolist() == [60, 100, 40]
    totals = sum(federation.split(name).sizes for name in ("train", "val", "test"))
    assert totals.tolist() == [120] * 60 + [150] * 100 + [90] * 40
    letters = load("emnist", root=str(SHARED), characters="abcdefghij", scale=0.02)
    assert (letters.clients, letters.classes) == (100, 10)
    assert letters.train.sizes.tolist() == [7] * 100
