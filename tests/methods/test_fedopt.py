"""Server optimizers on a problem of one weight in plain Python, and the purpose of FedAvgM."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.data import load
from equipoise.engine.evaluation import evaluate_shared
from equipoise.errors import InputError
from equipoise.method import State, Updates
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from tests import quick
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import mlp
from tests.rounds import play, scalar, targets, weight

# One client step of rate 0.1 on (w - t)² leads to w - 0.2 (w - t), so Δ = 0.2 (w - mean of t).
TARGETS, START = (3.0, -1.0, 4.0), 5.0


def delta(w):
    return 0.2 * (w - sum(TARGETS) / 3)


def weights_over_rounds(method, rounds):
    how = {"steps": 1, "optimizer": Sgd(lr=0.1)}
    played = play(method, targets(*TARGETS), scalar(START), [[0, 1, 2]] * rounds, **how)
    return [weight(state.model) for state in played.states[1:]]


def momentum_by_hand(variant, beta, lr, rounds):
    w, v, path = START, 0.0, []
    for _ in range(rounds):
        d = delta(w)
        v = beta * v + ((1 - beta) * d if variant == "dampened" else d)
        w = w - lr * (d + beta * v if variant == "nesterov" else v)
        path.append(w)
    return path


@pytest.mark.parametrize("variant", ["hsu", "dampened", "nesterov"])
def test_fedavgm_three_rounds_by_hand(variant):
    method = build("fedavgm", momentum=0.6, lr=0.8, variant=variant)
    assert weights_over_rounds(method, 3) == pytest.approx(
        momentum_by_hand(variant, 0.6, 0.8, 3), abs=1e-14
    )


def test_the_variants_of_fedavgm_differ():
    ends = {
        variant: momentum_by_hand(variant, 0.6, 0.8, 3)[-1]
        for variant in ("hsu", "dampened", "nesterov")
    }
    assert len({round(end, 3) for end in ends.values()}) == 3


def adaptive_by_hand(*, yogi, rounds, lr, beta1, beta2, tau):
    w, m, v, path, signs = START, 0.0, tau**2, [], []
    for _ in range(rounds):
        d = delta(w)
        m = beta1 * m + (1 - beta1) * d
        signs.append(math.copysign(1, v - d * d))
        v = v - (1 - beta2) * d * d * signs[-1] if yogi else beta2 * v + (1 - beta2) * d * d
        w = w - lr * m / (math.sqrt(v) + tau)
        path.append(w)
    return path, signs


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
@pytest.mark.parametrize("tau", [1e-3, 0.4])
def test_adaptive_server_optimizers_by_hand(name, tau):
    options = {"lr": 0.3, "beta1": 0.8, "beta2": 0.6, "tau": tau}
    wanted, _ = adaptive_by_hand(yogi=name == "fedyogi", rounds=6, **options)
    assert weights_over_rounds(build(name, **options), 6) == pytest.approx(wanted, abs=1e-13)


def test_yogi_is_tested_with_both_signs():
    _, signs = adaptive_by_hand(yogi=True, rounds=6, lr=0.3, beta1=0.8, beta2=0.6, tau=0.4)
    assert set(signs) == {-1.0, 1.0}


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi"])
def test_buffers_are_averaged_and_never_stepped(name):
    updates = Updates(
        {"w": torch.tensor([[2.0], [4.0]])}, {"running_var": torch.tensor([[1.0], [5.0]])}, {}, {}
    )
    state = State(0, {"w": torch.tensor([7.0]), "running_var": torch.tensor([100.0])})
    cohort = SimpleNamespace(prior=torch.tensor([0.25, 0.75], dtype=torch.float64))
    method = build(name, lr=0.0).aggregation
    for _ in range(2):
        state = method.combine(state, updates, cohort)
        assert state.model["w"].tolist() == [7.0], "a learning rate of zero moves no parameter"
        assert state.model["running_var"].tolist() == [4.0]
    assert all("running_var" not in tree for tree in state.server.values())


@pytest.mark.parametrize("variant", ["hsu", "dampened", "nesterov"])
def test_without_momentum_fedavgm_is_fedavg(variant):
    how = {"batch_size": 8, "optimizer": Sgd(lr=0.1)}
    with_server = play(
        build("fedavgm", momentum=0.0, variant=variant), images(), mlp(), THREE_COHORTS, **how
    )
    plain = play(build("fedavg"), images(), mlp(), THREE_COHORTS, **how)
    assert distance(with_server.model, plain.model) <= 1e-12


def test_a_very_large_tau_makes_adam_plain_momentum():
    # With τ far above every Δ, √v + τ is 2τ in the first round; a learning rate of 2τ then steps
    # along m.
    options = {"lr": 2e6, "beta1": 0.5, "beta2": 0.99999999, "tau": 1e6}
    found = weights_over_rounds(build("fedadam", **options), 3)
    assert found == pytest.approx(momentum_by_hand("dampened", 0.5, 1.0, 3), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedavgm", {"variant": "hus"}, "did you mean 'hsu'"),
        ("fedadam", {"beta1": 1.0}, r"fedadam.beta1 must be in \[0, 1\), got 1.0"),
        ("fedyogi", {"beta2": -0.1}, r"fedyogi.beta2 must be in"),
        ("fedadam", {"tau": 0.0}, "fedadam.tau must be above 0, got 0.0"),
    ],
)
def test_bad_values_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        build(name, **options)


@pytest.mark.parametrize("seed", quick.only([0], [0, 1, 2]))
def test_server_momentum_speeds_training_up_on_digits(seed):
    digits = load("digits", partition={"name": "dirichlet", "clients": 10, "beta": 0.1}, seed=seed)
    module = build_model("mlp", shape=digits.shape, classes=10, hidden=(32,), seed=seed)
    losses = {}
    for name in ("fedavg", "fedavgm"):
        cohorts = [digits.seen] * 15
        how = {"epochs": 5, "batch_size": 20, "optimizer": Sgd(lr=0.1)}
        played = play(build(name), digits, module, cohorts, seed=seed, precision="float32", **how)
        engine, train = played.engine, digits.train
        measured = evaluate_shared(engine.network, engine.data, played.model, train, digits.seen)[
            "loss"
        ]
        losses[name] = np.average(measured, weights=train.sizes)
    assert losses["fedavgm"] < 0.75 * losses["fedavg"], losses
