"""The ranges of the numbers that clients report."""

from __future__ import annotations

import math

import pytest

from equipoise import tasks
from equipoise.flower.checks import Misfit
from equipoise.flower.reports import Declared, Number
from equipoise.task import Task


def test_an_accuracy_of_one_is_in_the_range():
    number = Declared(tasks.build("classification")).of_model("global", {"val": 1, "test": 1})[
        "global.test"
    ]["accuracy"]
    assert number.read(1.0) == 1.0
    assert number.read(1 + 1e-12) == 1 + 1e-12
    with pytest.raises(Misfit, match="answered with 1.001 as test accuracy"):
        number.read(1.001)


def test_all_metrics_that_a_task_declares_have_their_range():
    class Own(Task):
        score = "close"
        ranges = {"close": (0.0, 1.0), "distance": (0.0, math.inf)}

    numbers = Declared(Own(), largest_loss=50.0).measured("test {}", needed=True)
    assert set(numbers) == {"loss", "close", "distance"}
    assert numbers["distance"].read(7.0) == 7.0
    for name, value in (("distance", -1.0), ("distance", math.inf), ("close", 1.5), ("loss", 51.0)):
        with pytest.raises(Misfit, match=f"answered with {value:g} as test {name}"):
            numbers[name].read(value)


def test_a_number_that_may_be_left_out_is_read_as_nan():
    optional = Number(called="val loss", needed=False)
    assert math.isnan(optional.read(None))
    assert math.isnan(optional.read(math.nan))
    with pytest.raises(Misfit, match="answered with inf as val loss"):
        optional.read(math.inf)
