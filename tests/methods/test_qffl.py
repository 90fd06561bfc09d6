"""q-FFL against the paper's algorithm in plain Python, its limits, and its purpose."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.data import load
from equipoise.engine.evaluation import evaluate_shared
from equipoise.errors import InputError
from equipoise.method import State, Updates
from equipoise.methods import build
from equipoise.methods.qffl import squared_differences
from equipoise.models import build as build_model
from equipoise.models.base import Model
from equipoise.optimizers import Schedule, Sgd
from tests import quick
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.rounds import linear, play, random_regression, scalar, targets, weight

TARGETS = (3.0, -1.0, 0.5)


def rounds_by_hand(w, *, q, lr, lipschitz, rounds, steps=2):
    """Algorithm 2 of Li et al. for F_k(w) = (w - t_k)²."""
    for _ in range(rounds):
        deltas, bounds = [], []
        for target in TARGETS:
            own = w
            for _ in range(steps):
                own = own - lr * 2 * (own - target)
            loss, gradient = (w - target) ** 2, lipschitz * (w - own)
            deltas.append(loss**q * gradient)
            bounds.append(q * loss ** (q - 1) * gradient**2 + lipschitz * loss**q)
        w = w - sum(deltas) / sum(bounds)
    return w


@pytest.mark.parametrize("lipschitz", [None, 25.0])
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 5.0])
def test_rounds_equal_the_papers_algorithm(q, lipschitz):
    method = build("qffl", q=q, lipschitz=lipschitz)
    how = {"steps": 2, "optimizer": Sgd(lr=0.1)}
    # Unequal sizes, because they must not matter.
    played = play(method, targets(*TARGETS, samples=[1, 4, 2]), scalar(1.0), [[0, 1, 2]] * 3, **how)
    wanted = rounds_by_hand(1.0, q=q, lr=0.1, lipschitz=lipschitz or 10.0, rounds=3)
    assert weight(played.model) == pytest.approx(wanted, abs=1e-8)


def test_one_round_by_hand():
    # From w = 1 with η = 0.1: F = 4, 4, 0.25, w_k = 1.4, 0.6, 0.9, L (w - w_k) = -4, 4, 1. For q =
    # 1 the Δ_k = -16, 16, 0.25 and h_k = 16 + 40, 16 + 40, 1 + 2.5.
    played = play(
        build("qffl", q=1.0),
        targets(*TARGETS),
        scalar(1.0),
        [[0, 1, 2]],
        steps=1,
        optimizer=Sgd(lr=0.1),
    )
    assert weight(played.model) == pytest.approx(1 - 0.25 / 115.5, abs=1e-9)


def test_a_single_number_is_part_of_the_norm():
    params = {"a": torch.tensor([[1.0, 2.0], [0.0, 0.0]]), "temperature": torch.tensor([2.0, 3.0])}
    model = {"a": torch.zeros(2), "temperature": torch.tensor(5.0)}
    # 1 + 4 + (2 - 5)² and 0 + 0 + (3 - 5)².
    assert squared_differences(State(0, model), Updates(params, {}, {}, {})).tolist() == [14.0, 4.0]


def test_the_norm_runs_over_the_whole_model():
    params = {"a": torch.tensor([[1.0, 2.0], [0.0, 0.0]]), "b": torch.tensor([[2.0], [3.0]])}
    reports = {"loss_before": torch.tensor([2.0, 3.0]), "lr": torch.tensor([0.5, 0.5])}
    state = State(0, {"a": torch.zeros(2), "b": torch.zeros(1)})
    new = build("qffl", q=2.0).aggregation.combine(
        state, Updates(params, {}, {}, reports), SimpleNamespace()
    )
    # Both squared norms are 9, L = 2: h = 2·2·36 + 2·4 and 2·3·36 + 2·9; Δ = 4·2·(-w_1) and
    # 9·2·(-w_2).
    total = 152 + 234
    assert new.model["a"].tolist() == pytest.approx([8 / total, 16 / total], rel=1e-6)
    assert new.model["b"].item() == pytest.approx((16 + 54) / total, rel=1e-6)


def test_l_follows_the_learning_rate_of_the_round():
    schedule = Schedule(kind="exponential", decay=0.5)
    how = {"steps": 2, "optimizer": Sgd(lr=0.1), "schedule": schedule}
    played = play(build("qffl", q=2.0), targets(*TARGETS), scalar(1.0), [[0, 1, 2]] * 2, **how)
    first = rounds_by_hand(1.0, q=2.0, lr=0.1, lipschitz=10.0, rounds=1)
    wanted = rounds_by_hand(first, q=2.0, lr=0.05, lipschitz=20.0, rounds=1)
    assert weight(played.model) == pytest.approx(wanted, abs=1e-8)
    assert played.updates[1].reports["lr"].tolist() == [0.05] * 3


def test_a_learning_rate_of_0_changes_nothing():
    schedule = Schedule(kind="steps", at=(1,), factors=(0.0,))
    how = {"steps": 2, "optimizer": Sgd(lr=0.1), "schedule": schedule}
    played = play(build("qffl", q=2.0), targets(*TARGETS), scalar(1.0), [[0, 1, 2]] * 2, **how)
    wanted = rounds_by_hand(1.0, q=2.0, lr=0.1, lipschitz=10.0, rounds=1)
    assert weight(played.model) == pytest.approx(wanted, abs=1e-8)


def test_q_zero_is_the_plain_mean():
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1, momentum=0.9)}
    fair = play(build("qffl", q=0.0), images(), batchnorm(), THREE_COHORTS, **how)
    plain = play(build("fedavg", weights="uniform"), images(), batchnorm(), THREE_COHORTS, **how)
    assert distance(fair.model, plain.model, WITHOUT_GRADIENT) <= 1e-9


def test_batchnorm_statistics_are_averaged_by_the_powers_and_not_stepped():
    torch.manual_seed(0)
    module = Model(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    federation = random_regression([6, 6])
    how = {"steps": 1, "batch_size": 10, "optimizer": Sgd(lr=0.1)}
    played = play(build("qffl", q=3.0), federation, module, [[0, 1]], **how)
    losses = played.updates[0].reports["loss_before"]
    shares = losses**3 / (losses**3).sum()
    means = torch.stack(
        [federation.x[torch.from_numpy(federation.train.of(k))].mean(0) for k in (0, 1)]
    )
    wanted = 0.1 * (shares.unsqueeze(1) * means).sum(0)
    torch.testing.assert_close(played.model["features.running_mean"], wanted, rtol=0, atol=1e-9)
    assert (played.model["features.running_var"] > 0).all()


@pytest.mark.parametrize("make", [mlp, batchnorm])
def test_stacked_equals_one_by_one(make):
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.05)}
    one, all_ = (
        play(build("qffl", q=2.0), images(), make(), THREE_COHORTS, chunk=chunk, **how)
        for chunk in (1, 10)
    )
    assert distance(all_.model, one.model, WITHOUT_GRADIENT) <= 1e-9


def test_perfect_clients_and_large_powers_stay_finite():
    at_optimum = play(build("qffl", q=0.5), targets(3.0, 3.0), scalar(3.0), [[0, 1]], steps=1)
    assert weight(at_optimum.model) == 3.0
    steep = play(build("qffl", q=400.0), targets(30.0, -10.0), scalar(0.0), [[0, 1]] * 3, steps=1)
    assert np.isfinite(weight(steep.model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": -1.0}, r"qffl\.q must be at least 0 and finite, got -1\.0"),
        ({"q": float("nan")}, r"qffl\.q must be"),
        (
            {"lipschitz": 0.0},
            r"qffl\.lipschitz must be above 0 and finite, or None for 1/lr, got 0\.0",
        ),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("qffl", **options)


def test_larger_q_makes_losses_more_uniform():
    """With different laws, the spread of the final losses falls as q grows, and the mean rises."""
    federation = random_regression([20] * 6, seed=3)
    spreads, means = [], []
    for q in (0.0, 1.0, 5.0):
        how = {"steps": 1, "batch_size": 20, "optimizer": Sgd(lr=0.1)}
        engine = (
            played := play(build("qffl", q=q), federation, linear(), [range(6)] * 400, **how)
        ).engine
        found = evaluate_shared(
            engine.network, engine.data, played.model, federation.train, np.arange(6)
        )["loss"]
        spreads.append(found.std())
        means.append(found.mean())
    assert spreads[2] < 0.9 * spreads[1] < 0.81 * spreads[0], spreads
    assert means[0] < means[1] < means[2], means


@pytest.mark.parametrize("seed", quick.only([0], [0, 1]))
def test_the_worst_group_of_digits_loses_less(seed):
    digits = load("digits", seed=seed)
    module = build_model("mlp", shape=digits.shape, classes=10, hidden=(32,), seed=seed)
    worst = {}
    for q in (0.0, 1.0):
        how = {"epochs": 1, "batch_size": 20, "optimizer": Sgd(lr=0.1)}
        played = play(
            build("qffl", q=q),
            digits,
            module,
            [digits.seen] * 30,
            seed=seed,
            precision="float32",
            **how,
        )
        engine = played.engine
        losses = evaluate_shared(
            engine.network, engine.data, played.model, digits.train, digits.seen
        )["loss"]
        worst[q] = max(losses[digits.groups == group].mean() for group in range(5))
    assert worst[1.0] < worst[0.0], worst
