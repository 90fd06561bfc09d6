"""Multi-label classification: values against scikit-learn, runs, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as reference

from equipoise import Evaluation, Machine, Training, metrics, tasks, train
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.models import build as build_model
from tests.engine.federations import several_labels

TASK = tasks.build("multilabel")


def targets(samples=40, classes=4, seed=0):
    return (np.random.default_rng(seed).random((samples, classes)) < 0.3).astype(np.int64)


def outputs(samples=40, classes=4, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(samples, classes)))


def test_loss_and_score_are_those_of_pytorch_and_scikit_learn():
    y, output = targets(), outputs()
    y[0], output[0] = 0, -1.0  # neither has nor is predicted any class
    measured = TASK.metrics(output, torch.from_numpy(y).double())
    wanted = F.binary_cross_entropy_with_logits(
        output, torch.from_numpy(y).double(), reduction="none"
    ).mean(1)
    torch.testing.assert_close(measured["loss"], wanted)
    predicted = (output > 0).numpy()
    assert measured["f1"].mean().item() == pytest.approx(
        reference.f1_score(y, predicted, average="samples", zero_division=1.0), abs=1e-12
    )


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("exact_match", lambda y, p: reference.accuracy_score(y, p)),
        ("label_accuracy", lambda y, p: 1 - reference.hamming_loss(y, p)),
        ("f1_micro", lambda y, p: reference.f1_score(y, p, average="micro")),
        ("f1_classes", lambda y, p: reference.f1_score(y, p, average="macro")),
    ],
)
def test_metrics_are_those_of_scikit_learn(name, wanted):
    y, output = targets(), outputs()
    found = metrics.build(name)(output, torch.from_numpy(y).float())
    assert found == pytest.approx(wanted(y, (output > 0).numpy()), abs=1e-12)


def test_metrics_without_any_label_are_undefined():
    output, y = torch.full((3, 2), -1.0), torch.zeros(3, 2)
    assert np.isnan([metrics.build(name)(output, y) for name in ("f1_micro", "f1_classes")]).all()
    assert metrics.build("exact_match")(output, y) == 1


def test_a_run_learns_and_records_its_score():
    run = train(
        several_labels(),
        model="logistic",
        rounds=20,
        optimizer={"name": "sgd", "lr": 1.0},
        evaluation=Evaluation(metrics=["exact_match", "f1_micro"]),
    )
    assert (run.summary["task"], run.summary["score"]) == ("multilabel", "f1")
    assert run.summary["results"]["global"]["seen"]["mean"] > 0.8
    assert run.model()(torch.zeros(2, 5)).shape == (2, 3)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "qffl"])
def test_stacked_clients_equal_clients_one_by_one(method):
    runs = [
        train(
            several_labels(),
            method=method,
            rounds=2,
            batch_size=4,
            machine=Machine(device="cpu", precision="float64", chunk=chunk),
        ).trainer.global_model
        for chunk in (1, 4)
    ]
    for name, tensor in runs[0].items():
        torch.testing.assert_close(runs[1][name], tensor, rtol=1e-9, atol=1e-12)


def test_zeros_and_ones_of_any_type_are_taken():
    wanted = several_labels().y
    assert wanted.dtype == torch.float32
    for kind in (bool, np.uint8, np.int64, np.float64):
        assert torch.equal(several_labels(wanted.numpy().astype(kind)).y.float(), wanted)


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (np.zeros(60), r"must be zeros and ones of shape \[N, classes\]"),
        (np.zeros((60, 2, 2)), r"must be zeros and ones of shape \[N, classes\]"),
        (np.eye(60)[:, :3] * 2, "has 2 for class 0 in y; valid: 0 and 1"),
        (np.full((60, 3), 0.5), "has 0.5 for class 0 in y; valid: 0 and 1"),
    ],
)
def test_other_targets_are_refused(y, says):
    with pytest.raises(InputError, match=says):
        several_labels(y)


def test_what_needs_one_label_a_sample_is_refused():
    with pytest.raises(InputError, match="the task of this federation is multilabel"):
        train(several_labels(), method="fedlc", rounds=1)
    module = build_model("logistic", shape=(5,), classes=4)
    with pytest.raises(InputError, match="but the federation has 3 classes"):
        StackedEngine(several_labels(), module, Training(), Machine(device="cpu")).cohort(
            build("fedavg"), np.arange(2), 0
        )
