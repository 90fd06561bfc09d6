"""FedProx: the proximal term by hand, its limits, and the paper's claims."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from equipoise.data import load
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import mlp
from tests.rounds import play, scalar, targets, weight


def trained(target, start, *, mu, lr, steps):
    """The update written out: w ← w - η (∇F(w) + μ (w - wᵗ)) with F(w) = (w - t)²."""
    w = start
    for _ in range(steps):
        w = w - lr * (2 * (w - target) + mu * (w - start))
    return w


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_steps_by_hand(steps, chunk):
    played = play(
        build("fedprox", mu=0.7),
        targets(3.0, -1.0),
        scalar(0.5),
        [[0, 1]],
        steps=steps,
        chunk=chunk,
        optimizer=Sgd(lr=0.1),
    )
    found = played.updates[0].params["head.weight"].flatten().tolist()
    assert found == pytest.approx(
        [trained(t, 0.5, mu=0.7, lr=0.1, steps=steps) for t in (3.0, -1.0)], abs=1e-14
    )


def test_the_anchor_is_the_model_received_this_round():
    played = play(
        build("fedprox", mu=2.0),
        targets(3.0),
        scalar(0.0),
        [[0], [0]],
        steps=3,
        optimizer=Sgd(lr=0.1),
    )
    first = trained(3.0, 0.0, mu=2.0, lr=0.1, steps=3)
    assert weight(played.model) == pytest.approx(
        trained(3.0, first, mu=2.0, lr=0.1, steps=3), abs=1e-14
    )


def test_the_first_step_does_not_feel_the_term():
    how = {"steps": 1, "optimizer": Sgd(lr=0.1)}
    prox = play(build("fedprox", mu=50.0), targets(3.0, -1.0), scalar(0.5), [[0, 1]], **how)
    plain = play(build("fedavg"), targets(3.0, -1.0), scalar(0.5), [[0, 1]], **how)
    assert weight(prox.model) == weight(plain.model)


def test_long_training_ends_at_the_proximal_point():
    # (w - t)² + μ/2 (w - wᵗ)² is least where 2 (w - t) + μ (w - wᵗ) = 0.
    played = play(
        build("fedprox", mu=6.0), targets(3.0), scalar(1.0), [[0]], steps=200, optimizer=Sgd(lr=0.1)
    )
    assert weight(played.model) == pytest.approx((2 * 3.0 + 6.0 * 1.0) / (2 + 6.0), abs=1e-12)


def test_mu_zero_is_fedavg():
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1, momentum=0.9)}
    prox = play(build("fedprox", mu=0.0), images(), mlp(), THREE_COHORTS, **how)
    plain = play(build("fedavg"), images(), mlp(), THREE_COHORTS, **how)
    assert distance(prox.model, plain.model) <= 1e-12


@pytest.mark.parametrize("mu", [-0.1, float("nan")])
def test_a_term_that_pushes_apart_is_refused(mu):
    with pytest.raises(InputError, match="mu must be at least 0"):
        build("fedprox", mu=mu)


def test_larger_mu_keeps_local_models_nearer_on_digits():
    digits = load("digits", partition={"name": "dirichlet", "clients": 10, "beta": 0.1})
    module = build_model("mlp", shape=digits.shape, classes=10, hidden=(32,))
    drifts = []
    for mu in (0.0, 0.1, 1.0, 5.0):
        played = play(
            build("fedprox", mu=mu),
            digits,
            module,
            [digits.seen] * 3,
            precision="float32",
            epochs=5,
            batch_size=20,
            optimizer=Sgd(lr=0.05),
        )
        received, sent = played.states[-2].model, played.updates[-1].params
        squares = torch.stack(
            [(rows - received[name]).square().flatten(1).sum(1) for name, rows in sent.items()]
        )
        drifts.append(squares.sum(0).sqrt().mean().item())
    assert all(nearer < 0.95 * farther for farther, nearer in pairwise(drifts)), drifts
