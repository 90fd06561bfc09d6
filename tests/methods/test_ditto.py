"""Ditto: both models' steps by hand, the anchor of the personal one, limits, and memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.tree import size_in_bytes
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.rounds import linear, play, random_regression, scalar, targets, weight

TARGETS = (3.0, -1.0, 0.5)


def personal_models(played, federation):
    """Every client's personal model, read back from its memory."""
    start = {"personal." + name: tensor for name, tensor in played.states[-1].model.items()}
    kept = played.engine.memory.read(np.arange(federation.clients), {"kept": start})[0]["kept"]
    return {name.removeprefix("personal."): stack for name, stack in kept.items()}


def rounds_by_hand(cohorts, start, *, lam, lr, steps):
    """Algorithm 1 of Li et al. for F_k(w) = (w - t_k)²."""
    w, own = start, dict.fromkeys(range(len(TARGETS)), None)
    for cohort in cohorts:
        sent = []
        for k in cohort:
            copy, v = w, w if own[k] is None else own[k]
            for _ in range(steps):
                v = v - lr * (2 * (v - TARGETS[k]) + lam * (v - w))
                copy = copy - lr * 2 * (copy - TARGETS[k])
            own[k] = v
            sent.append(copy)
        w = sum(sent) / len(sent)
    return w, own


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("lam", [0.0, 0.5, 3.0])
def test_rounds_equal_the_papers_algorithm(lam, chunk):
    cohorts = [[0, 1], [1, 2], [0, 1]]
    federation = targets(*TARGETS)
    how = {"steps": 3, "optimizer": Sgd(lr=0.1)}
    played = play(build("ditto", lam=lam), federation, scalar(5.0), cohorts, chunk=chunk, **how)
    w, own = rounds_by_hand(cohorts, 5.0, lam=lam, lr=0.1, steps=3)
    assert weight(played.model) == pytest.approx(w, abs=1e-13)
    found = personal_models(played, federation)["head.weight"].flatten().tolist()
    assert found == pytest.approx([own[k] for k in range(3)], abs=1e-13)


def test_long_training_ends_between_the_clients_optimum_and_the_received_model():
    # v minimises (v - t)² + λ/2 (v - w)² at (2t + λw)/(2 + λ), with the received w, although the
    # client's copy ends at t.
    played = play(
        build("ditto", lam=6.0), targets(3.0), scalar(1.0), [[0]], steps=300, optimizer=Sgd(lr=0.1)
    )
    found = personal_models(played, targets(3.0))["head.weight"].item()
    assert found == pytest.approx((6 + 6) / 8, abs=1e-12)
    assert weight(played.model) == pytest.approx(3.0, abs=1e-12)


@pytest.mark.parametrize("make", [mlp, batchnorm, lambda: mlp(0.3)], ids=["mlp", "bn", "dropout"])
def test_the_global_model_is_that_of_fedavg_whatever_lambda(make):
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1, momentum=0.9)}
    # FedAvg draws the batches of its first phase, and so does Ditto.
    both = play(build("ditto", lam=2.0), images(), make(), THREE_COHORTS, **how)
    plain = play(build("fedavg"), images(), make(), THREE_COHORTS, **how)
    assert distance(both.model, plain.model, WITHOUT_GRADIENT) <= 1e-9


@pytest.mark.parametrize("make", [mlp, batchnorm], ids=["mlp", "bn"])
def test_without_the_term_personal_models_are_those_of_local_training(make):
    federation, how = (
        images(),
        {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1, momentum=0.9)},
    )
    everyone = [range(10), [0, 3, 7], [1, 3, 9]]
    both = personal_models(
        play(build("ditto", lam=0.0), federation, make(), everyone, **how), federation
    )
    alone = play(build("local"), federation, make(), everyone, **how)
    wanted = alone.engine.memory.read(np.arange(10), {"kept": alone.engine.network.initial()})[0][
        "kept"
    ]
    assert distance(both, wanted, WITHOUT_GRADIENT) <= 1e-9


def test_a_very_large_lambda_holds_personal_models_at_the_received_one():
    federation = targets(*TARGETS)
    how = {"steps": 50, "optimizer": Sgd(lr=1e-5)}
    played = play(build("ditto", lam=1e5), federation, scalar(2.0), [[0, 1, 2]], **how)
    assert personal_models(played, federation)["head.weight"].flatten().tolist() == pytest.approx(
        [2.0] * 3, abs=1e-4
    )


def test_personal_models_never_travel():
    federation = images()
    played = play(build("ditto"), federation, mlp(), [range(10)] * 2, batch_size=8)
    plain = play(build("fedavg"), federation, mlp(), [range(10)] * 2, batch_size=8)
    for updates in played.updates:
        assert not [name for name in updates.params if name.startswith("personal")]
        assert not updates.uploads
    assert [c.bytes_down for c in played.cohorts] == [c.bytes_down for c in plain.cohorts]
    # Clients also report the terms that the method adds to the loss.
    assert [c.bytes_up - 8 * len(c.ids) for c in played.cohorts] == [
        c.bytes_up for c in plain.cohorts
    ]
    assert size_in_bytes(played.updates[0].params) == size_in_bytes(plain.updates[0].params)


def test_personal_batchnorm_statistics_are_the_clients_own():
    federation = images()
    played = play(build("ditto", lam=0.1), federation, batchnorm(), [range(10)] * 3, batch_size=64)
    own = personal_models(played, federation)["features.1.running_mean"]
    assert own.std(0).min() > 1e-4, "every client's statistics would be alike"
    assert not torch.allclose(own[0], played.model["features.1.running_mean"])


@pytest.mark.parametrize("make", [mlp, batchnorm], ids=["mlp", "bn"])
def test_stacked_equals_one_by_one(make):
    federation, how = images(), {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.05)}
    one, all_ = (
        play(build("ditto"), federation, make(), THREE_COHORTS, chunk=chunk, **how)
        for chunk in (1, 10)
    )
    assert distance(all_.model, one.model, WITHOUT_GRADIENT) <= 1e-9
    own = [personal_models(played, federation) for played in (all_, one)]
    assert distance(*own, WITHOUT_GRADIENT) <= 1e-9


def test_it_combines_with_any_aggregation():
    federation = random_regression([8, 8])
    how = {"steps": 2, "batch_size": 8}
    fair = play(
        build("ditto", aggregation={"name": "qffl", "q": 2.0}),
        federation,
        linear(),
        [[0, 1]] * 2,
        **how,
    )
    alone = play(build("qffl", q=2.0), federation, linear(), [[0, 1]] * 2, **how)
    assert distance(fair.model, alone.model) <= 1e-12


@pytest.mark.parametrize("lam", [-0.1, float("nan"), float("inf")])
def test_a_term_that_pushes_away_is_refused(lam):
    with pytest.raises(InputError, match=r"ditto\.lam must be at least 0 and finite, got"):
        build("ditto", lam=lam)
