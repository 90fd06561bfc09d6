"""EMNIST from small files of our own; GIFAIR's Skewed and 3-Groups partitions counted sample by sample."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from equipoise.data import PARTITIONS, load
from equipoise.data.emnist import CHARACTERS, RELEASE, UPRIGHT, Skewed, ThreeGroups, emnist, recipe
from equipoise.data.source import Source
from equipoise.errors import InputError
from tests.data.test_files import SHARED, needs_shared, write_idx_pair


@pytest.fixture(scope="module")
def images():
    """Images whose pixel in row r and column c is 2 r + c + a number of their own, so that none is symmetric."""
    rows, columns = np.indices((28, 28))
    return (2 * rows + columns + np.arange(124)[:, None, None]).astype(np.uint8)


LABELS = np.arange(124) % 62


def labelled(labels, classes=62):
    return Source(x=torch.zeros(len(labels), 1), y=torch.tensor(labels), classes=classes)


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
    write_idx_pair(images[100:], LABELS[100:], tmp_path / "emnist" / "gzip", RELEASE[2:], compress=False)
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
    with pytest.raises(InputError, match=f"characters='{characters}' of data 'emnist' must be different ones"):
        emnist(characters=characters)


def test_missing_files_name_both_sets(tmp_path):
    with pytest.raises(InputError, match="emnist-byclass-test-labels-idx1-ubyte; or emnist-byclass-images-idx3-ubyte"):
        emnist(root=str(tmp_path))


def test_recipe_depends_on_the_characters(tmp_path, images):
    write_idx_pair(images, LABELS, tmp_path, UPRIGHT)
    assert recipe(seed=0, root=str(tmp_path), scale=0.1)[1] == ThreeGroups(0.1)
    assert recipe(seed=0, root=str(tmp_path), characters="ab", scale=0.1)[1] == Skewed(0.1)
    assert PARTITIONS["skewed"] is Skewed
    assert PARTITIONS["threegroups"] is ThreeGroups


def test_skewed_gives_client_k_the_classes_from_k_on():
    labels = np.repeat(np.arange(10), 5000)
    assignment = Skewed().assign(labelled(labels, classes=10), seed=3)
    assert len(assignment.clients) == 100
    for client, samples in enumerate(assignment.clients):
        assert Counter(labels[samples].tolist()) == {(client + j) % 10: 100 for j in range(5)}
    used = np.concatenate(assignment.clients)
    assert len(set(used.tolist())) == len(used) == 50_000
    assert (assignment.group_names, set(assignment.groups)) == (("all",), {0})


def test_skewed_is_scaled_and_drawn_by_its_seed():
    source = labelled(np.repeat(np.arange(10), 700), classes=10)
    one, again, other = (Skewed(0.124).assign(source, seed) for seed in (1, 1, 2))
    assert {len(samples) for samples in one.clients} == {5 * 12}
    assert all(np.array_equal(a, b) for a, b in zip(one.clients, again.clients, strict=True))
    assert not np.array_equal(one.clients[0], other.clients[0])


def test_skewed_with_other_numbers():
    labels = np.repeat(np.arange(4), 10)
    clients = Skewed(clients=3, classes=2, images=3).assign(labelled(labels, classes=4), seed=0).clients
    assert [sorted(labels[samples].tolist()) for samples in clients] == [
        [0, 0, 0, 1, 1, 1],
        [1, 1, 1, 2, 2, 2],
        [2, 2, 2, 3, 3, 3],
    ]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        # 50 clients hold each class: 6 images each are 300, 7 are 350; 0.064 still rounds to 6.
        (Skewed(), "'custom' has too few images for scale=1.0; the largest that fits is scale=0.065"),
        (Skewed(0.07), "the largest that fits is scale=0.065"),
        (Skewed(0.001), "scale=0.001 leaves clients too few images; valid: from 0.01 on"),
        (Skewed(0), "scale must be a finite number above 0, got 0"),
        (Skewed(classes=11), "classes=11 a client is more than the 10 of source 'custom'"),
        (Skewed(clients=0), "clients must be a whole number of at least 1, got 0"),
        (ThreeGroups(), "needs 62 classes in the order 0-9A-Za-z, source 'custom' has 10"),
    ],
)
def test_what_cannot_be_met_is_refused(partition, message):
    with pytest.raises(InputError, match=message):
        partition.assign(labelled(np.repeat(np.arange(10), 300), classes=10), seed=0)


@pytest.mark.parametrize("partition", [Skewed(0.01), ThreeGroups(0.01)])
def test_sources_with_groups_are_refused(partition):
    with pytest.raises(InputError, match="is for sources without groups, but source 'digits' has plain, blurred"):
        load("digits", partition=partition)


def test_three_groups_by_hand():
    # 3,600 digits, 2,400 capital and 1,200 lowercase letters: their shares are easy to work out.
    labels = np.concatenate([np.repeat(np.arange(10), 360), 10 + np.arange(2400) % 26, 36 + np.arange(1200) % 26])
    assignment = ThreeGroups(0.01).assign(labelled(labels), seed=0)
    assert assignment.group_names == ("capital", "lowercase", "mixed")
    assert np.bincount(assignment.groups).tolist() == [60, 100, 40]
    assert [len(samples) for samples in assignment.clients] == [8] * 60 + [10] * 100 + [6] * 40
    used = np.concatenate(assignment.clients)
    assert len(set(used.tolist())) == len(used)
    kinds = [Counter(), Counter(), Counter()]
    for group, samples in zip(assignment.groups, assignment.clients, strict=True):
        for label in labels[samples]:
            kinds[group]["digit" if label < 10 else "capital" if label < 36 else "lowercase"] += 1
    assert kinds == [
        {"digit": 288, "capital": 192},  # 480 as 3 : 2
        {"digit": 750, "lowercase": 250},  # 1,000 as 3 : 1
        {"digit": 120, "capital": 80, "lowercase": 40},  # 240 as 3 : 2 : 1
    ]


def test_three_groups_name_the_largest_scale():
    # Digits run out first. 24, 30 and 18 images a client take 1440/6000 + 3000/4800 + 720/7200 = 0.965 of them;
    # scale=0.031 means 25, 31 and 19 and would take 1500/6000 + 3100/4800 + 760/7200 = 1.001.
    labels = np.concatenate([np.repeat(np.arange(10), 360), 10 + np.arange(2400) % 26, 36 + np.arange(1200) % 26])
    with pytest.raises(InputError, match="too few images for scale=0.2; the largest that fits is scale=0.03$"):
        ThreeGroups(0.2).assign(labelled(labels), seed=0)
    ThreeGroups(0.03).assign(labelled(labels), seed=0)
    with pytest.raises(InputError, match="valid: from 0.005 on"):
        ThreeGroups(0.004).assign(labelled(labels), seed=0)
    with pytest.raises(InputError, match="no scale fits"):
        ThreeGroups(0.2).assign(labelled(labels[:100]), seed=0)


@needs_shared("emnist")
def test_real_counts():
    source = emnist(root=str(SHARED))
    counts = np.bincount(source.y, minlength=62)
    assert (counts.sum(), counts.min(), counts.max()) == (40_000, 109, 2_177)
    # Upright: an "l" or "I" is taller than wide, its ink spread over rows more than over columns.
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
