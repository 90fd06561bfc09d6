"""User-defined metrics: what can be registered, what is refused, and valid values."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from equipoise import Evaluation, metrics, tasks
from equipoise.errors import InputError
from equipoise.metrics import Metric, build, check_metrics, register
from equipoise.tasks.classification import Classification

OUTPUT, Y = torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0])


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    metrics.names()
    monkeypatch.setattr(metrics, "_METRICS", dict(metrics._METRICS))


def error_rate(output, y):
    return (output.argmax(1) != y).double().mean()


def test_a_function_is_registered_under_its_name_and_stays_a_function():
    assert register(higher_is_better=False, range=(0, 1))(error_rate) is error_rate
    assert build("error_rate")(OUTPUT, Y) == 0.5
    assert not build("error_rate").higher_is_better
    assert Evaluation(metrics=[error_rate]).metrics == (build("error_rate"),)


def test_a_function_that_is_defined_again_takes_its_own_place_only():
    register(higher_is_better=False)(error_rate)
    register("error_rate", higher_is_better=True)(error_rate)
    assert build("error_rate").higher_is_better
    with pytest.raises(
        InputError,
        match="the name 'auroc' of a metric is taken by equipoise.metrics.classification:auroc",
    ):
        register("auroc", higher_is_better=True)(error_rate)


@pytest.mark.parametrize(
    "name",
    [
        "round",
        "client",
        "split",
        "model",
        "unseen",
        "loss",
        "n",
        "group",
        "gap",
        "left_out",
        "mean",
        "groups",
        "val",
    ],
)
def test_names_of_columns_and_of_tables_are_refused(name):
    with pytest.raises(
        InputError, match=f"a metric cannot be called '{name}', which has another meaning"
    ):
        register(name, higher_is_better=True)(error_rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "a.b"},
            "a metric cannot be called 'a.b'; valid: letters, digits and underscores",
        ),
        (
            {"higher_is_better": "low"},
            "higher_is_better of metric 'error_rate' must be true or false, got 'low'",
        ),
        (
            {"range": (1, 0)},
            r"range of metric 'error_rate' must be the smallest and the largest value, "
            r"got \(1, 0\)",
        ),
        (
            {"range": 1},
            "range of metric 'error_rate' must be the smallest and the largest value, got 1",
        ),
        ({"function": 3}, "a metric must be a function of outputs and targets, got 3"),
    ],
)
def test_what_is_no_metric(options, message):
    with pytest.raises(InputError, match=message):
        Metric(**{"function": error_rate, "higher_is_better": True, **options})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["aurco"], "unknown metric 'aurco' in evaluation.metrics; did you mean 'auroc'?"),
        (["ece", "ece"], "evaluation.metrics has 'ece' twice"),
        ("ece", "evaluation.metrics must be a list of metrics, got 'ece'"),
        ([3], "evaluation.metrics must be names of metrics, or metrics, got 3"),
        (
            [error_rate],
            r"has the function error_rate without higher_is_better; write Metric\(function=",
        ),
    ],
)
def test_what_cannot_be_evaluated(given, message):
    with pytest.raises(InputError, match=message):
        Evaluation(metrics=given)


@pytest.mark.parametrize("value", [None, math.nan, torch.tensor(math.nan)])
def test_nothing_and_nan_are_undefined(value):
    metric = Metric(function=lambda output, y: value, name="none", higher_is_better=True)
    assert metric.fault(metric(OUTPUT, Y)) == "undefined"


def test_values_outside_of_the_range_are_named():
    metric = Metric(function=error_rate, higher_is_better=False, range=(0, 1))
    assert metric.fault(1 + 1e-12) is None
    assert metric.fault(1.5) == "1.5 is not in the range from 0 to 1"
    assert build("mae").fault(math.inf) == "inf is not in the range from 0 to inf"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda output, y: output,
            r"metric 'wrong' returned tensor\(.*; valid: one number, or None",
        ),
        (lambda output, y: "high", "metric 'wrong' returned 'high'"),
        (lambda output, y: output[7], "metric 'wrong' failed: IndexError"),
    ],
)
def test_mistakes_in_functions_name_metric_and_client(function, message):
    metric = Metric(function=function, name="wrong", higher_is_better=True)
    with pytest.raises(InputError, match=f"(?s)client 4: {message}"):
        metrics.measure([metric], OUTPUT, Y, client=4)


def test_outputs_of_a_diverged_model_are_no_mistake():
    assert math.isnan(build("auroc")(torch.full((2, 2), math.nan), torch.tensor([0, 1])))


def test_functions_get_outputs_in_float64_on_the_cpu():
    seen = []
    Metric(
        function=lambda output, y: seen.append((output.dtype, y.dtype)),
        name="kinds",
        higher_is_better=True,
    )(OUTPUT.bfloat16(), Y)
    assert seen == [(torch.float64, torch.int64)]


def test_metrics_are_for_their_task_and_those_derived_from_it():
    class Focal(Classification):
        score = "sharpness"

    check_metrics([build("auroc"), build("accuracy")], Focal())
    for name, message in (("mae", "'mae' is for regression"), ("iou", "'iou' is for segmentation")):
        with pytest.raises(InputError, match=message):
            check_metrics([build(name)], Focal())


def test_a_metric_cannot_replace_what_the_task_measures():
    task = tasks.build("classification")
    check_metrics([build("accuracy")], task)
    own = Metric(function=error_rate, name="accuracy", higher_is_better=True)
    with pytest.raises(
        InputError, match="'accuracy' is already a metric of the task classification"
    ):
        check_metrics([own], task)
    with pytest.raises(InputError, match="'top2' is already a metric of the task classification"):
        check_metrics(
            [Metric(function=error_rate, name="top2", higher_is_better=True)],
            task,
            ["loss", "top2"],
        )


def test_other_processes_get_metrics():
    metric = Metric(function=error_rate, higher_is_better=False)
    assert pickle.loads(pickle.dumps(Evaluation(metrics=["ece", metric]))).metrics == (
        build("ece"),
        metric,
    )
