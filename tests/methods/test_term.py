"""TERM: tilted weights by hand, from the gradient of the tilted objective, and their limits."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.engine.evaluation import evaluate_shared
from equipoise.errors import InputError
from equipoise.method import State, Updates
from equipoise.methods import build
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.rounds import linear, play, random_regression, scalar, targets, weight

LOSSES = torch.tensor([0.3, 2.0, 1.1, 0.7, 1.9], dtype=torch.float64)
PRIOR = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
GROUPS = np.array([2, 0, 2, 0, 5])


def weights_of(**options):
    """Unit vectors as parameters make the combined model the weights themselves."""
    updates = Updates({"w": torch.eye(5).double()}, {}, {}, {"loss_before": LOSSES})
    cohort = SimpleNamespace(prior=PRIOR, groups=GROUPS)
    state = State(0, {"w": torch.zeros(5).double()})
    return build("term", **options).aggregation.combine(state, updates, cohort).model["w"]


def objective(losses, t, tau, groups):
    """The objective: (1/t) log Σ_g P_g exp(t R_g), R_g = (1/τ) log Σ_k p_k/P_g exp(τ F_k)."""
    total = 0.0
    for group in set(groups.tolist()):
        inside = torch.from_numpy(groups == group)
        share = PRIOR[inside].sum()
        p = PRIOR[inside] / share
        risk = (
            (p * (tau * losses[inside]).exp()).sum().log() / tau
            if tau
            else (p * losses[inside]).sum()
        )
        total = total + share * (t * risk).exp()
    return total.log() / t


def test_clients_are_tilted_by_hand():
    tilted = [p * math.exp(1.5 * f) for p, f in zip(PRIOR.tolist(), LOSSES.tolist(), strict=True)]
    assert weights_of(t=1.5).tolist() == pytest.approx(
        [value / sum(tilted) for value in tilted], abs=1e-14
    )


@pytest.mark.parametrize("tau", [0.0, 0.8, -1.2])
@pytest.mark.parametrize("t", [2.0, -0.5])
def test_weights_are_the_gradient_of_the_hierarchical_objective(t, tau):
    losses = LOSSES.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(objective(losses, t, tau, GROUPS), losses)
    found = weights_of(t=t, tilts="groups", tau=tau)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    assert found.sum().item() == pytest.approx(1.0, abs=1e-14)


def test_groups_by_hand():
    # Mean losses by size: group 0 has 0.2·2.0 + 0.15·0.7 over 0.35, group 2 0.1·0.3 + 0.3·1.1 over
    # 0.4, group 5 1.9.
    means = {0: (0.4 + 0.105) / 0.35, 2: (0.03 + 0.33) / 0.4, 5: 1.9}
    tilted = [p * math.exp(means[g]) for p, g in zip(PRIOR.tolist(), GROUPS.tolist(), strict=True)]
    found = weights_of(t=1.0, tilts="groups").tolist()
    assert found == pytest.approx([value / sum(tilted) for value in tilted], abs=1e-14)


def test_one_level_is_the_hierarchy_with_equal_tilts():
    torch.testing.assert_close(
        weights_of(t=1.3, tilts="groups", tau=1.3), weights_of(t=1.3), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("options", [{}, {"tilts": "groups"}])
def test_without_tilt_it_is_the_data_weighted_mean(options):
    torch.testing.assert_close(weights_of(t=0.0, **options), PRIOR, rtol=0, atol=1e-15)
    torch.testing.assert_close(weights_of(t=1e-7, **options), PRIOR, rtol=0, atol=1e-6)


def test_extreme_tilts_choose_the_worst_or_the_best_client():
    assert weights_of(t=1e6).tolist() == [0, 1, 0, 0, 0]
    assert weights_of(t=-1e6).tolist() == [1, 0, 0, 0, 0]
    assert weights_of(t=1e6, tilts="groups").tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("chunk", [1, 2])
def test_two_rounds_by_hand(chunk):
    played = play(
        build("term", t=0.4),
        targets(3.0, -1.0, samples=[1, 3]),
        scalar(0.0),
        [[0, 1]] * 2,
        chunk=chunk,
        steps=1,
        optimizer=Sgd(lr=0.1),
    )
    w = 0.0
    for _ in range(2):
        high, low = 0.25 * math.exp(0.4 * (w - 3) ** 2), 0.75 * math.exp(0.4 * (w + 1) ** 2)
        w = (high * (w - 0.2 * (w - 3)) + low * (w - 0.2 * (w + 1))) / (high + low)
    assert weight(played.model) == pytest.approx(w, abs=1e-13)


def test_zero_tilt_rounds_are_fedavg():
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    tilted = play(build("term", t=0.0), images(), batchnorm(), THREE_COHORTS, **how)
    plain = play(build("fedavg"), images(), batchnorm(), THREE_COHORTS, **how)
    assert distance(tilted.model, plain.model, WITHOUT_GRADIENT) <= 1e-9


@pytest.mark.parametrize("options", [{}, {"tilts": "groups", "tau": 0.5}])
@pytest.mark.parametrize("make", [mlp, batchnorm])
def test_stacked_equals_one_by_one(make, options):
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.05)}
    method = build("term", t=2.0, **options)
    one, all_ = (
        play(method, images(), make(), THREE_COHORTS, chunk=chunk, **how) for chunk in (1, 10)
    )
    assert distance(all_.model, one.model, WITHOUT_GRADIENT) <= 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"t": float("inf")}, r"term\.t must be finite, got inf"),
        ({"tau": float("nan"), "tilts": "groups"}, r"term\.tau must be finite, got nan"),
        ({"tilts": "group"}, "'group' in term.tilts; did you mean 'groups'"),
        ({"tau": 1.0}, r"term\.tau is 1\.0, but it is used only with term\.tilts='groups'"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("term", **options)


def test_training_ends_where_the_tilted_objective_is_least():
    federation = random_regression([20] * 5, seed=1)
    how = {"steps": 1, "batch_size": 20, "optimizer": Sgd(lr=0.05)}
    played = play(build("term", t=1.0), federation, linear(), [range(5)] * 600, **how)
    engine = played.engine

    def tilted(w):
        model = {"head.weight": w}
        found = evaluate_shared(engine.network, engine.data, model, federation.train, np.arange(5))[
            "loss"
        ]
        return math.log(np.mean(np.exp(found)))

    end = played.model["head.weight"]
    least = tilted(end)
    for direction in torch.eye(3).double():
        assert min(tilted(end + 1e-3 * direction), tilted(end - 1e-3 * direction)) > least
