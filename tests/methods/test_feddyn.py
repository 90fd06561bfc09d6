"""FedDyn: worked numbers, the paper's algorithm in NumPy, its fixed point, and evaluation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from tests import quick
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.small_models import mlp
from tests.methods.plain_rounds import on_digits
from tests.rounds import linear, play, random_regression, scalar, targets, weight


def feddyn_in_numpy(federation, start, cohorts, *, alpha, lr, steps):
    """Algorithm 1 of Acar et al. with full-batch gradients of the mean squared error."""
    held = [federation.train.of(k) for k in range(federation.clients)]
    data = [(federation.x[samples].numpy(), federation.y[samples].numpy()) for samples in held]
    sent, h = start.copy(), np.zeros_like(start)
    dual = [np.zeros_like(start) for _ in data]
    for cohort in cohorts:
        models = []
        for k in cohort:
            features, y = data[k]
            w = sent.copy()
            for _ in range(steps):
                gradient = 2 / len(y) * features.T @ (features @ w - y)
                w = w - lr * (gradient - dual[k] + alpha * (w - sent))
            dual[k] = dual[k] - alpha * (w - sent)
            models.append(w)
        h = h - alpha / len(data) * sum(w - sent for w in models)
        mean = np.mean(models, axis=0)
        sent = mean - h / alpha
    return sent, mean, h, dual


def duals_of(played, clients):
    first = {"dual": {"head.weight": torch.full((1, 3), torch.nan, dtype=torch.float64)}}
    return played.engine.memory.read(np.asarray(clients), first)[0]["dual"]["head.weight"][
        :, 0
    ].numpy()


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("alpha", [0.1, 2.0])
@pytest.mark.parametrize(
    "cohorts",
    [[[0, 1, 2]] * 3, [[0, 2], [1, 2], [0, 1]], [[1], [0], [1]]],
    ids=["full", "two", "one"],
)
def test_rounds_equal_the_papers_algorithm(cohorts, alpha, chunk):
    federation = random_regression([6, 4, 9])
    start = linear().head.weight.detach().numpy()[0]
    method = build("feddyn", alpha=alpha)
    how = {"chunk": chunk, "steps": 4, "batch_size": 10, "optimizer": Sgd(lr=0.05)}
    played = play(method, federation, linear(), cohorts, **how)
    sent, mean, h, dual = feddyn_in_numpy(federation, start, cohorts, alpha=alpha, lr=0.05, steps=4)
    np.testing.assert_allclose(played.model["head.weight"].numpy()[0], sent, atol=1e-9)
    evaluated = method.aggregation.evaluated(played.states[-1])
    np.testing.assert_allclose(evaluated["head.weight"].numpy()[0], mean, atol=1e-9)
    np.testing.assert_allclose(
        played.states[-1].server["h"]["head.weight"].numpy()[0], h, atol=1e-9
    )
    seen = sorted({k for cohort in cohorts for k in cohort})
    np.testing.assert_allclose(duals_of(played, seen), [dual[k] for k in seen], atol=1e-9)


def test_two_rounds_by_hand():
    """F = (w - 3)² and (w + 1)², α = 0.5, one step of rate 0.1 from w = 1, one client per round.

    Round 1: gradient -4, so w_0 = 1.4; λ_0 = -0.5 · 0.4 = -0.2; h = -0.5 / 2 · 0.4 = -0.1; sent 1.4
    + 0.2 = 1.6. Round 2: gradient 2 (1.6 + 1) = 5.2, so w_1 = 1.08; λ_1 = 0.26; h = -0.1 + 0.25 ·
    0.52 = 0.03; sent 1.08 - 0.06.
    """
    method = build("feddyn", alpha=0.5)
    played = play(
        method, targets(3.0, -1.0), scalar(1.0), [[0], [1]], steps=1, optimizer=Sgd(lr=0.1)
    )
    assert weight(played.states[1].model) == pytest.approx(1.6, abs=1e-12)
    assert weight(method.aggregation.evaluated(played.states[1])) == pytest.approx(1.4, abs=1e-12)
    assert played.states[2].server["h"]["head.weight"].item() == pytest.approx(0.03, abs=1e-12)
    assert weight(played.model) == pytest.approx(1.02, abs=1e-12)
    assert weight(method.aggregation.evaluated(played.states[2])) == pytest.approx(1.08, abs=1e-12)


@pytest.mark.parametrize(
    "cohorts", [[[0, 1, 2]] * 3, [[0, 2], [1], [1, 2]]], ids=["full", "partial"]
)
def test_h_is_the_mean_of_all_duals(cohorts):
    federation = random_regression([4, 9, 6])
    played = play(
        build("feddyn"),
        federation,
        linear(),
        cohorts,
        epochs=2,
        batch_size=4,
        optimizer=Sgd(lr=0.03),
    )
    own = duals_of(played, [0, 1, 2])
    np.testing.assert_allclose(
        played.states[-1].server["h"]["head.weight"].numpy()[0], own.mean(0), atol=1e-13
    )
    assert np.abs(own.mean(0)).max() > 1e-4


def test_clients_agree_at_the_optimum_of_the_mean():
    """Many local steps lead to the optimum of the mean loss, where FedAvg ends elsewhere."""
    federation = random_regression([30, 8, 15], seed=3)
    how = {"steps": 20, "batch_size": 64, "optimizer": Sgd(lr=0.05)}
    everyone = [[0, 1, 2]] * 60
    method = build("feddyn", alpha=1.0)
    played = play(method, federation, linear(), everyone, **how)
    x, y, owner = (
        np.asarray(v) for v in (federation.x, federation.y, np.repeat(range(3), [30, 8, 15]))
    )
    counts = 1 / np.bincount(owner)[owner]
    optimum = np.linalg.solve((x * counts[:, None]).T @ x, (x * counts[:, None]).T @ y)
    found = method.aggregation.evaluated(played.states[-1])["head.weight"].numpy()[0]
    np.testing.assert_allclose(found, optimum, atol=1e-5)
    np.testing.assert_allclose(played.model["head.weight"].numpy()[0], optimum, atol=1e-5)
    plain = play(build("fedavg", weights="uniform"), federation, linear(), everyone, **how)
    assert np.abs(plain.model["head.weight"].numpy()[0] - optimum).max() > 1e-2


def test_the_first_updates_are_those_of_fedprox():
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    ours = play(build("feddyn", alpha=0.7), images(), mlp(), [range(10)], **how)
    prox = play(build("fedprox", mu=0.7), images(), mlp(), [range(10)], **how)
    assert distance(ours.updates[0].params, prox.updates[0].params) <= 1e-12


def test_batchnorm_statistics_are_averaged_and_not_corrected():
    torch.manual_seed(0)
    module = Model(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    federation = random_regression([6, 6])
    played = play(
        build("feddyn"),
        federation,
        module,
        [[0, 1]] * 3,
        steps=2,
        batch_size=10,
        optimizer=Sgd(lr=0.01),
    )
    means = torch.stack(
        [federation.x[torch.from_numpy(federation.train.of(k))].mean(0) for k in (0, 1)]
    ).mean(0)
    # Two steps of momentum 0.1 in each of three rounds.
    wanted = (1 - 0.9**6) * means
    torch.testing.assert_close(played.model["features.running_mean"], wanted, rtol=0, atol=1e-13)


def test_clients_that_join_have_no_dual():
    method = build("feddyn", alpha=0.5)
    played = play(method, targets(3.0, -1.0), scalar(1.0), [[0]], steps=1, optimizer=Sgd(lr=0.1))
    joined = method.aggregation.admit(played.states[-1], SimpleNamespace(ids=np.arange(4)))
    # h was -0.1 as a mean over 2 clients, and is now a mean over 4.
    assert joined.server["h"]["head.weight"].item() == pytest.approx(-0.05, abs=1e-13)
    assert joined.server["clients"]["count"].item() == 4


def test_nothing_but_the_model_is_sent():
    ours, plain = (
        play(build(name), images(), mlp(), [range(10)] * 2, batch_size=8).cohorts
        for name in ("feddyn", "fedavg")
    )
    # Clients also report the terms that the method adds to the loss.
    assert [(c.bytes_down, c.bytes_up - 8 * len(c.ids)) for c in ours] == [
        (c.bytes_down, c.bytes_up) for c in plain
    ]


@pytest.mark.parametrize("seed", quick.only([0], [0, 1]))
def test_label_skew_and_many_local_epochs_hurt_it_less_than_fedavg_on_digits(seed):
    _, ours = on_digits("feddyn", seed)
    _, plain = on_digits("fedavg", seed)
    assert ours < 0.7 * plain, (ours, plain)


@pytest.mark.parametrize("alpha", [0, -0.1, float("nan"), float("inf")])
def test_a_penalty_that_is_none_is_refused(alpha):
    with pytest.raises(InputError, match=r"feddyn\.alpha must be a finite number above 0, got"):
        build("feddyn", alpha=alpha)
