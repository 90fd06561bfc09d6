"""GIFAIR's Skewed and 3-Groups partitions, checked by counting samples."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from equipoise.data import Skewed, Source, ThreeGroups, load
from equipoise.errors import InputError


def labelled(labels, classes=62):
    return Source(x=torch.zeros(len(labels), 1), y=torch.tensor(labels), classes=classes)


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
    clients = (
        Skewed(clients=3, classes=2, images=3).assign(labelled(labels, classes=4), seed=0).clients
    )
    assert [sorted(labels[samples].tolist()) for samples in clients] == [
        [0, 0, 0, 1, 1, 1],
        [1, 1, 1, 2, 2, 2],
        [2, 2, 2, 3, 3, 3],
    ]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        # 50 clients hold each class: 6 images each are 300, 7 are 350; 0.064 still rounds to 6.
        (
            Skewed(),
            "'custom' has too few images for scale=1.0; the largest that fits is scale=0.065",
        ),
        (Skewed(0.07), "the largest that fits is scale=0.065"),
        (Skewed(0.001), "scale=0.001 leaves clients too few images; valid: from 0.01 on"),
        (Skewed(classes=11), "classes=11 per client is more than the 10 of source 'custom'"),
        (ThreeGroups(), "needs 62 classes in the order 0-9A-Za-z, source 'custom' has 10"),
    ],
)
def test_what_cannot_be_met_is_refused(partition, message):
    with pytest.raises(InputError, match=message):
        partition.assign(labelled(np.repeat(np.arange(10), 300), classes=10), seed=0)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Skewed, {"scale": 0}, "scale must be a finite number above 0, got 0"),
        (Skewed, {"clients": 0}, "clients must be a whole number of at least 1, got 0"),
        (ThreeGroups, {"scale": "all"}, "scale must be a finite number above 0, got 'all'"),
    ],
)
def test_options_are_refused(kind, options, message):
    with pytest.raises(InputError, match=message):
        kind(**options)


@pytest.mark.parametrize("partition", [Skewed(0.01), ThreeGroups(0.01)])
def test_sources_with_groups_are_refused(partition):
    with pytest.raises(
        InputError, match="is for sources without groups, but source 'digits' has plain, blurred"
    ):
        load("digits", partition=partition)


def test_three_groups_by_hand():
    # 3,600 digits, 2,400 capital and 1,200 lowercase letters: their shares are easy to compute.
    labels = np.concatenate(
        [np.repeat(np.arange(10), 360), 10 + np.arange(2400) % 26, 36 + np.arange(1200) % 26]
    )
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
    # Digits run out first. 24, 30 and 18 images per client use 1440/6000 + 3000/4800 + 720/7200 =
    # 0.965 of them; scale=0.031 means 25, 31 and 19, and would use 1500/6000 + 3100/4800 + 760/7200
    # = 1.001.
    labels = np.concatenate(
        [np.repeat(np.arange(10), 360), 10 + np.arange(2400) % 26, 36 + np.arange(1200) % 26]
    )
    with pytest.raises(
        InputError, match="too few images for scale=0.2; the largest that fits is scale=0.03$"
    ):
        ThreeGroups(0.2).assign(labelled(labels), seed=0)
    ThreeGroups(0.03).assign(labelled(labels), seed=0)
    with pytest.raises(InputError, match="valid: from 0.005 on"):
        ThreeGroups(0.004).assign(labelled(labels), seed=0)
    with pytest.raises(InputError, match="no scale fits"):
        ThreeGroups(0.2).assign(labelled(labels[:100]), seed=0)
