"""Runs end with a warning if the model was probably not trained."""

from __future__ import annotations

import math

import pytest

from equipoise import train
from equipoise.data import load
from equipoise.run.doubts import nothing_learned


def warnings_of(caplog, **changes):
    settings = {"model": "logistic", "rounds": 10, "evaluation": {"every": 0}} | changes
    caplog.clear()
    train(load("digits"), **settings)
    return [record.getMessage() for record in caplog.records if "equal prob" in record.getMessage()]


def test_a_classifier_that_learns_nothing_is_named(caplog):
    still = {"name": "sgd", "lr": 1e-9}
    (found,) = warnings_of(caplog, optimizer=still)
    assert found.startswith("after 10 rounds the training loss is 2.")
    assert "equal probabilities for all 10 classes is 2.3: the model has learned nothing" in found
    # It may only have begun.
    assert not warnings_of(caplog, optimizer=still, rounds=9)
    assert not warnings_of(caplog)
    # The values of another loss mean something else.
    assert not warnings_of(caplog, optimizer=still, loss={"name": "focal"})


def test_a_resumed_run_that_had_ended_says_nothing(caplog, tmp_path):
    still = {"optimizer": {"name": "sgd", "lr": 1e-9}, "out": tmp_path / "run"}
    assert len(warnings_of(caplog, **still)) == 1
    assert not warnings_of(caplog, **still, resume=True)


@pytest.mark.parametrize(
    ("loss", "classes", "rounds", "doubtful"),
    [
        (1.0, 2, 10, True),
        (0.95 * math.log(2) + 1e-9, 2, 10, True),
        (0.95 * math.log(2) - 1e-9, 2, 10, False),
        (1.0, 2, 9, False),
        (1.0, 1, 10, False),
    ],
)
def test_the_limits(loss, classes, rounds, doubtful):
    assert (nothing_learned(loss, classes, rounds) is not None) is doubtful
