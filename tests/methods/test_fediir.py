"""FedIIR: worked numbers, rounds against a plain loop with second derivatives, and limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.methods import build
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
    cross_entropy,
    federation,
    on_digits,
    smooth_model,
    steps,
)
from tests.rounds import play, scalar, targets, weight


def head_gradient(module, data, client, **how):
    return torch.autograd.grad(
        cross_entropy(module, data, client), list(module.head.parameters()), **how
    )


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(("gamma", "ema"), [(1e-3, 0.95), (0.5, 0.3)])
def test_rounds_equal_a_plain_loop(gamma, ema, chunk):
    data, module = federation(), smooth_model()
    mean = [torch.zeros_like(p) for p in module.head.parameters()]
    for cohort in COHORTS:
        gradients = [head_gradient(module, data, k) for k in cohort]
        new = [sum(parts) / len(cohort) for parts in zip(*gradients, strict=True)]
        mean = [ema * old + (1 - ema) * g for old, g in zip(mean, new, strict=True)]
        trained = []
        for k in cohort:

            def loss(copy, k=k, mean=mean):
                own = head_gradient(copy, data, k, create_graph=True)
                penalty = sum((g - m).square().sum() for g, m in zip(own, mean, strict=True))
                return cross_entropy(copy, data, k) + gamma * penalty

            trained.append(steps(module, loss))
        module = average(trained, [1 / len(cohort)] * len(cohort))
    found = play(
        build("fediir", gamma=gamma, ema=ema),
        data,
        smooth_model(),
        COHORTS,
        chunk=chunk,
        **FULL_BATCHES,
    )
    assert_equal(found.model, module)
    kept = found.states[-1].server["mean_gradient"]
    for name, wanted in zip(("head.weight", "head.bias"), mean, strict=True):
        torch.testing.assert_close(kept[name], wanted, rtol=0, atol=1e-9)


def test_one_round_by_hand():
    """F = (w - 3)² and (w + 1)² at w = 2: gradients -2 and 6, mean 2, and with β = 0.5 ḡ = 1.

    The gradient of F + γ (F' - ḡ)² is F' + 2 γ (F' - ḡ) F'' with F'' = 2 and γ = 0.25: -2 - 3 = -5
    and 6 + 5 = 11. Steps of 0.1 lead to 2.5 and 0.9.
    """
    method = build("fediir", gamma=0.25, ema=0.5)
    played = play(
        method, targets(3.0, -1.0), scalar(2.0), [[0, 1]] * 2, steps=1, optimizer=Sgd(lr=0.1)
    )
    assert played.updates[0].params["head.weight"].flatten().tolist() == pytest.approx(
        [2.5, 0.9], abs=1e-12
    )
    assert weight(played.states[1].model) == pytest.approx(1.7, abs=1e-12)
    # At 1.7 the gradients are -2.6 and 5.4, mean 1.4; the stored value has weight 1/2: (1 + 1.4) /
    # 2.
    assert played.states[2].server["mean_gradient"]["head.weight"].item() == pytest.approx(
        1.2, abs=1e-12
    )


def test_the_mean_is_over_clients_and_not_over_samples():
    federation_ = targets(3.0, -1.0, samples=[1, 9])
    played = play(
        build("fediir", ema=0.0), federation_, scalar(2.0), [[0, 1]], steps=1, batch_size=20
    )
    assert played.states[1].server["mean_gradient"]["head.weight"].item() == pytest.approx(
        2.0, abs=1e-12
    )
    by_size = build("fediir", ema=0.0, weights="size")
    played = play(by_size, federation_, scalar(2.0), [[0, 1]], steps=1, batch_size=20)
    assert played.states[1].server["mean_gradient"]["head.weight"].item() == pytest.approx(
        5.2, abs=1e-12
    )


@pytest.mark.parametrize("make", [mlp, batchnorm, lambda: mlp(0.3)], ids=["mlp", "bn", "dropout"])
def test_without_the_penalty_it_is_fedavg(make):
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1, momentum=0.9)}
    ours, plain = (
        play(method, images(), make(), THREE_COHORTS, **how)
        for method in (build("fediir", gamma=0.0), build("fedavg", weights="uniform"))
    )
    assert distance(ours.model, plain.model, WITHOUT_GRADIENT) <= 1e-9


def test_the_features_learn_from_the_penalty():
    """Second derivatives: the penalty on the head's gradient also trains the features."""
    how = {"batch_size": 64, "steps": 1, "optimizer": Sgd(lr=0.1)}
    ours, plain = (
        play(method, images(), smooth_model(), [range(10)], **how).model["features.1.weight"]
        for method in (build("fediir", gamma=1.0), build("fedavg", weights="uniform"))
    )
    assert (ours - plain).abs().max().item() > 1e-4


@pytest.mark.parametrize("seed", quick.only([0], [0, 1]))
def test_gradients_of_the_head_differ_less_between_clients_on_digits(seed):
    """The mean squared distance of clients' gradients from their mean, at the global model."""
    spread = {}
    for name, options in (("fedavg", {}), ("fediir", {"gamma": 0.05, "ema": 0.5})):
        played, _ = on_digits(name, seed, **options)
        cohort = played.engine.cohort(build("fediir"), np.arange(10), 99)
        sums, counts = cohort.ask("head_gradient", model=played.model)
        rows = torch.cat([(t.flatten(1) / counts.view(-1, 1)) for t in sums.values()], 1)
        spread[name] = (rows - rows.mean(0)).square().sum(1).mean().item()
    assert spread["fediir"] < 0.9 * spread["fedavg"], spread


def test_another_aggregation_lacks_the_mean_gradient():
    with pytest.raises(
        InputError, match="FedIIR needs mean_gradient, which FedAdam does not provide"
    ):
        build("fediir", aggregation="fedadam")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -1.0}, r"fediir\.gamma must be a finite number of at least 0, got -1"),
        ({"ema": 1.0}, r"fediir\.ema must be in \[0, 1\), got 1.0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message):
        build("fediir", **options)
