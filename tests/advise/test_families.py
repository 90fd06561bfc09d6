"""Which family of methods is recommended for which measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equipoise import methods
from equipoise.advise import FAMILIES, Measured, measure, recommend
from equipoise.data import load
from equipoise.engine.settings import Training

ALIKE = Measured(
    clients=20,
    groups=1,
    unseen=0,
    samples=2000,
    smallest=100,
    median=100.0,
    largest=100,
    label_skew=0.01,
    labels_held=10.0,
    feature_shift=0.0,
    between_groups=None,
    participation=1.0,
)


@pytest.mark.parametrize(
    ("changes", "family", "said"),
    [
        ({}, "average", "Clients differ in labels, inputs and sizes only by chance"),
        (
            {"label_skew": 0.6, "labels_held": 2.0},
            "personal",
            "half of them have 2 labels or fewer",
        ),
        ({"label_skew": 0.15}, "personal", "Clients have different labels (skew 0.15"),
        (
            {"feature_shift": 0.5, "between_groups": 0.9, "groups": 5},
            "corrected",
            "shift 0.50, 90% of it between groups",
        ),
        ({"feature_shift": 0.5, "label_skew": 0.6}, "personal", "Inputs of the same label differ"),
        ({"feature_shift": 0.5, "label_skew": 0.15}, "corrected", "Clients have different labels"),
        ({"largest": 2000, "smallest": 10}, "average", "the largest 20 times the median"),
        (
            {"label_skew": None, "labels_held": None, "feature_shift": None},
            "average",
            "only by chance",
        ),
    ],
)
def test_numbers_and_words(changes, family, said):
    advice = recommend(replace(ALIKE, **changes))
    assert advice.family == family
    assert any(said in reason for reason in advice.reasons)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"participation": 0.1}, "Only 10% of the clients take part"),
        ({"unseen": 3}, "3 clients are held out of training"),
        ({"groups": 3, "feature_shift": 0.3, "between_groups": 0.8}, "Groups differ"),
        ({"largest": 2000}, "term or qffl help if small clients are left behind"),
    ],
)
def test_notes(changes, said):
    assert any(said in note for note in recommend(replace(ALIKE, **changes)).notes)
    assert not any(said in note for note in recommend(ALIKE).notes)


def test_batchnorm_is_a_reason_for_fedbn():
    shifted = replace(ALIKE, feature_shift=0.5)
    assert any("fedbn" in note for note in recommend(shifted, batchnorm=True).notes)
    assert not any("fedbn" in note for note in recommend(shifted).notes)
    assert not any("fedbn" in note for note in recommend(ALIKE, batchnorm=True).notes)


def test_families_have_registered_methods_with_different_labels():
    labels = [label for family in FAMILIES.values() for label in family.labels]
    assert len(set(labels)) == len(labels)
    for family in FAMILIES.values():
        assert {method["name"] for method in family.methods} <= set(methods.names())


def test_the_embedded_digits():
    skewed = {"name": "dirichlet", "clients": 20, "beta": 0.1}
    assert recommend(measure(load("digits"), Training())).family == "corrected"
    assert recommend(measure(load("digits", partition=skewed), Training())).family == "personal"
