"""Measures of client heterogeneity, on federations that differ in one respect each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise import Federation, Training
from equipoise.advise import measure

PER_CLIENT = 60


def federation(*, sizes=None, labels=None, moved=0.0, groups=None, y=None, x=None, **options):
    """Return ten clients with points around one centre per label.

    ``labels`` are those of each client, and ``moved`` is a shift per client.
    """
    random = np.random.default_rng(0)
    sizes = sizes or [PER_CLIENT] * 10
    clients = np.repeat(np.arange(len(sizes)), sizes)
    if y is None:
        y = random.integers(0, 4, len(clients))
        if labels:
            y = np.array([random.choice(labels[client]) for client in clients])
    if x is None:
        centres = random.normal(size=(4, 6))
        x = centres[y] + random.normal(size=(len(clients), 6)) + moved * (clients % 5)[:, None]
    named = (
        {"groups": {client: groups[client % 5] for client in range(len(sizes))}} if groups else {}
    )
    return Federation.from_arrays(x, y, clients=clients, splits=(1.0, 0.0, 0.0), **named, **options)


def test_clients_that_differ_by_chance_only():
    measured = measure(federation(), Training())
    assert (measured.clients, measured.groups, measured.unseen) == (10, 1, 0)
    assert measured.label_skew < 0.05
    assert measured.feature_shift < 0.02
    assert (measured.smallest, measured.median, measured.largest, measured.size_skew) == (
        60,
        60.0,
        60,
        1.0,
    )
    assert (measured.samples, measured.participation, measured.between_groups) == (600, 1.0, None)


def test_labels_are_compared_with_those_of_all():
    """Each client has one of two labels: half of the sum of |1 - 1/2| and |0 - 1/2| is 1/2."""
    labels = [[client % 2] for client in range(10)]
    measured = measure(federation(labels=labels), Training())
    assert measured.labels_held == 1
    # Random labels have a distance of about 0.5 · √(2/(π · 60)) = 0.05, so (0.5 - 0.05) / 0.95.
    assert measured.label_skew == pytest.approx(0.47, abs=0.03)
    # Points differ by label, but not within labels.
    assert measured.feature_shift < 0.02


def test_inputs_are_compared_within_labels_and_with_groups():
    apart = measure(federation(moved=1.0, groups="abcde"), Training())
    assert apart.feature_shift > 0.3
    assert apart.between_groups == pytest.approx(1.0, abs=0.02)
    assert apart.label_skew < 0.05
    assert measure(federation(moved=0.2), Training()).feature_shift < apart.feature_shift


def test_the_share_of_variance_by_hand():
    """Two clients at -1 and +1 with noise of variance 1: half of the variance is between them."""
    random = np.random.default_rng(1)
    clients = np.repeat([0, 1], 2000)
    x = (2.0 * clients - 1 + random.normal(size=4000))[:, None]
    found = Federation.from_arrays(
        x, np.zeros(4000, int), clients=clients, splits=(1.0, 0.0, 0.0), classes=2
    )
    assert measure(found, Training()).feature_shift == pytest.approx(0.5, abs=0.02)


def test_shift_of_groups_is_told_from_that_of_clients():
    measured = measure(federation(moved=1.0, groups="aabbc"), Training())
    assert 0.3 < measured.between_groups < 0.95


def test_sizes_and_participation():
    measured = measure(federation(sizes=[20] * 9 + [400]), Training(cohort=0.2))
    assert (measured.size_skew, measured.participation) == (20.0, 0.2)
    assert measured.label_skew < 0.05


def test_clients_held_out_are_not_measured():
    measured = measure(federation(labels=[[0, 1, 2, 3]] * 9 + [[0]], unseen=[9]), Training())
    assert (measured.clients, measured.unseen) == (9, 1)
    assert measured.label_skew < 0.06


def test_targets_that_are_no_labels_and_inputs_that_are_no_numbers():
    random = np.random.default_rng(2)
    regression = federation(
        x=random.normal(size=(600, 6)), y=random.normal(size=600), task="regression"
    )
    measured = measure(regression, Training())
    assert (measured.label_skew, measured.labels_held) == (None, None)
    assert measured.feature_shift < 0.02
    tokens = federation(x=torch.randint(0, 50, (600, 6)), y=random.integers(0, 4, 600), classes=4)
    assert not torch.is_floating_point(tokens.x)
    assert measure(tokens, Training()).feature_shift is None


def test_wide_inputs_are_projected():
    random = np.random.default_rng(3)
    x = random.normal(size=(600, 1000)) + np.repeat(np.arange(10) % 2, 60)[:, None]
    wide = federation(x=x, y=random.integers(0, 4, 600))
    # Means of -1/2 and 1/2 add a variance of 1/4 to that of 1: a share of 0.2.
    assert measure(wide, Training()).feature_shift == pytest.approx(0.2, abs=0.04)


def test_the_same_numbers_again():
    assert measure(federation(moved=0.3), Training()) == measure(federation(moved=0.3), Training())
