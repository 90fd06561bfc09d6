"""FedLC: its loss by hand, rounds against a plain loop, absent classes, and label skew."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from tests import quick
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.methods.plain_rounds import (
    COHORTS,
    FULL_BATCHES,
    assert_equal,
    average,
    by_size,
    federation,
    on_digits,
    samples_of,
    skewed_digits,
    smooth_model,
    steps,
)
from tests.rounds import linear, play, random_regression


def calibrated(scores, y, counts, tau, true_class):
    """The paper's eq. 8 sample by sample, with the true class in the denominator or not."""
    total = 0.0
    for row, label in zip(scores, y.tolist(), strict=True):
        shifted = [row[c] - tau * max(counts[c], 1e-8) ** -0.25 for c in range(len(row))]
        others = [torch.exp(s) for c, s in enumerate(shifted) if true_class or c != label]
        total = total - torch.log(torch.exp(shifted[label]) / sum(others))
    return total / len(scores)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(("tau", "true_class"), [(1.0, True), (0.3, True), (1.0, False)])
def test_rounds_equal_a_plain_loop(tau, true_class, chunk):
    data, module = federation(), smooth_model()
    for cohort in COHORTS:
        trained = []
        for k in cohort:
            x, y = samples_of(data, k)
            counts = np.bincount(y.numpy(), minlength=4)
            trained.append(
                steps(module, lambda m, x=x, y=y, n=counts: calibrated(m(x), y, n, tau, true_class))
            )
        module = average(trained, by_size(cohort))
    method = build("fedlc", tau=tau, true_class=true_class)
    found = play(method, data, smooth_model(), COHORTS, chunk=chunk, **FULL_BATCHES)
    assert_equal(found.model, module)
    assert (
        distance(
            found.model, play(build("fedavg"), data, smooth_model(), COHORTS, **FULL_BATCHES).model
        )
        > 1e-4
    )


def test_shifts_by_hand():
    """16 samples shift by τ/2, 1 by τ, and a class without samples by 100 τ."""
    found = build("fedlc", tau=2.0).local.shifts(
        {"count": torch.tensor([16.0, 1.0, 0.0], dtype=torch.float64)}
    )
    assert found["shift"].tolist() == pytest.approx([1.0, 2.0, 200.0])


def one_client(labels, classes=3):
    x = torch.eye(len(labels), dtype=torch.float64)
    return Federation.from_arrays(
        x,
        torch.tensor(labels),
        clients=np.zeros(len(labels), int),
        splits=(1, 0, 0),
        classes=classes,
    )


def zero_model(inputs, classes=3):
    head = torch.nn.Linear(inputs, classes, bias=False).double()
    torch.nn.init.zeros_(head.weight)
    return Model(torch.nn.Identity(), head)


def test_one_step_by_hand():
    """Logits 0, one sample of class 0 and sixteen of class 1, and τ = 2 log 3.

    Shifts are 2 log 3 and log 3, so the probabilities are 1/4 and 3/4, whatever the true class.
    """
    played = play(
        build("fedlc", tau=2 * math.log(3)),
        one_client([0] + [1] * 16, classes=2),
        zero_model(17, classes=2),
        [[0]],
        steps=1,
        batch_size=17,
        optimizer=Sgd(lr=1.0),
    )
    found = played.model["head.weight"]
    assert found[:, 0].tolist() == pytest.approx([0.75 / 17, -0.75 / 17], abs=1e-14)
    assert found[:, 1].tolist() == pytest.approx([-0.25 / 17, 0.25 / 17], abs=1e-14)


def test_scores_of_absent_classes_are_left_alone():
    """Cross-entropy lowers the scores of absent classes; with calibration they do not change."""
    how = {"steps": 5, "batch_size": 4, "optimizer": Sgd(lr=1.0)}
    ours, plain = (
        play(build(name), one_client([0, 0, 1, 1]), zero_model(4), [[0]], **how).model[
            "head.weight"
        ]
        for name in ("fedlc", "fedavg")
    )
    assert ours[2].abs().max().item() < 1e-40
    assert plain[2].max().item() < -0.1


@pytest.mark.parametrize("true_class", [True, False])
def test_a_client_with_a_single_class_stays_finite(true_class):
    method = build("fedlc", true_class=true_class)
    played = play(
        method, one_client([1, 1]), zero_model(2), [[0]] * 2, steps=3, optimizer=Sgd(lr=0.1)
    )
    assert bool(torch.isfinite(played.model["head.weight"]).all())


@pytest.mark.parametrize("make", [mlp, batchnorm, lambda: mlp(0.3)], ids=["mlp", "bn", "dropout"])
def test_without_a_shift_it_is_fedavg(make):
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1, momentum=0.9)}
    ours, plain = (
        play(method, images(), make(), THREE_COHORTS, **how)
        for method in (build("fedlc", tau=0.0), build("fedavg"))
    )
    assert distance(ours.model, plain.model, WITHOUT_GRADIENT) <= 1e-9


def test_label_counts_stay_with_the_client():
    ours, plain = (
        play(build(name), images(), mlp(), [range(10)] * 2, batch_size=8)
        for name in ("fedlc", "fedavg")
    )
    # Clients also report how much the loss differs from the task's.
    moved = [(c.bytes_down, c.bytes_up - 8 * len(c.ids)) for c in ours.cohorts]
    assert moved == [(c.bytes_down, c.bytes_up) for c in plain.cohorts]
    assert not any(updates.uploads for updates in ours.updates)


def test_it_combines_with_any_aggregation():
    how = {"batch_size": 8, "optimizer": Sgd(lr=0.1)}
    method = build("fedlc", tau=0.0, aggregation={"name": "qffl", "q": 2.0})
    ours = play(method, images(), mlp(), THREE_COHORTS, **how)
    assert (
        distance(
            ours.model, play(build("qffl", q=2.0), images(), mlp(), THREE_COHORTS, **how).model
        )
        <= 1e-12
    )


@pytest.mark.parametrize("seed", quick.only([0], [0, 1]))
def test_local_models_forget_less_of_classes_they_lack_on_digits(seed):
    """The accuracy of local models on classes absent from the client, after one round."""
    digits = skewed_digits(seed)
    found = {}
    for name in ("fedavg", "fedlc"):
        played, _ = on_digits(name, seed)
        params, right = played.updates[-1].params, []
        for k in digits.seen:
            present = torch.bincount(samples_of(digits, k)[1], minlength=10) > 0
            rows = torch.from_numpy(digits.test.indices)
            x, y = digits.x[rows].flatten(1), digits.y[rows]
            lacking = ~present[y]
            z = torch.relu(x @ params["features.1.weight"][k].T + params["features.1.bias"][k])
            scores = z @ params["head.weight"][k].T + params["head.bias"][k]
            right.append((scores.argmax(1) == y)[lacking].float())
        found[name] = torch.cat(right).mean().item()
    assert found["fedlc"] > found["fedavg"] + 0.05, found


def test_regression_is_refused():
    with pytest.raises(
        InputError, match="fedlc counts labels, but the task of this federation is regression"
    ):
        play(build("fedlc"), random_regression([4, 4]), linear(), [[0, 1]])


def test_a_negative_shift_is_refused():
    with pytest.raises(
        InputError, match=r"fedlc\.tau must be a finite number of at least 0, got -1"
    ):
        build("fedlc", tau=-1.0)
