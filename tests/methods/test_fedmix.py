"""FedMix: means by hand, rounds against plain PyTorch, the expansion against mixup, refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import equipoise
from equipoise import Evaluation, Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.random import Purpose, fold
from equipoise.run.trainer import Trainer
from tests.engine.by_hand import average, hand_batches, held_by, tensors
from tests.engine.comparison import distance
from tests.engine.federations import images, text
from tests.engine.five_clients import BATCH, CHUNKS, COHORTS, EVERYONE, SEED, SIZES
from tests.engine.small_models import NOISE, mlp, normalised, transformer
from tests.methods.decoupled import played
from tests.rounds import random_regression
from tests.run.small import Stop, promised, stop_after

LAM = 0.2


def means_by_hand(federation, number):
    """The mean images and labels of equal parts of every client's samples, in their order."""
    x_means, y_means = [], []
    for client in EVERYONE:
        x, y = held_by(federation, client)
        parts = min(number, len(x) // 2)
        for part in range(parts):
            inside = [i for i in range(len(x)) if i * parts // len(x) == part]
            x_means.append(x[inside].mean(0))
            y_means.append(F.one_hot(y[inside], 4).double().mean(0))
    return torch.stack(x_means), torch.stack(y_means)


def mixed_loss(module, x, y, mean_x, mean_y, lam):
    """The paper's three terms of each sample, and mean over the batch."""
    shrunk = ((1 - lam) * x).requires_grad_()
    output = module(shrunk)
    own = (1 - lam) * F.cross_entropy(output, y, reduction="none")
    other = lam * F.cross_entropy(output, mean_y.expand_as(output), reduction="none")
    (towards,) = torch.autograd.grad(own.sum(), shrunk, create_graph=True)
    return (own + other + lam * (towards * mean_x).sum((1, 2, 3))).mean()


def rounds_by_hand(module, cohorts, federation, number):
    means = means_by_hand(federation, number)
    for round_, cohort in enumerate(cohorts):
        sent = []
        for client in cohort:
            own = copy.deepcopy(module).train()
            moving = [p for p in own.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(moving, lr=0.1, momentum=0.9)
            x, y = held_by(federation, client)
            key = fold(fold(SEED, round_), client)
            for step, batch in enumerate(hand_batches(len(x), key, 0, 1)):
                hashed = fold(fold(key, Purpose.STEP, 0, step), Purpose.AUGMENT)
                signed = hashed - (1 << 64) if hashed >> 63 else hashed
                drawn = signed % len(means[0])
                optimizer.zero_grad()
                mixed_loss(
                    own, x[batch], y[batch], means[0][drawn], means[1][drawn], LAM
                ).backward()
                optimizer.step()
            sent.append(tensors(own))
        module.load_state_dict(average(sent, [SIZES[client] for client in cohort]), strict=False)
    return tensors(module)


@CHUNKS
@pytest.mark.parametrize("make", [mlp, normalised], ids=["mlp", "bn"])
def test_rounds_equal_plain_pytorch(make, chunk):
    found = played(build("fedmix", lam=LAM, means=2), make(), chunk=chunk)
    wanted = rounds_by_hand(make(), COHORTS, images(sizes=SIZES), 2)
    assert distance(found.model, wanted, NOISE) <= 1e-9


@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize("fused", [True, False])
def test_prompts_in_a_frozen_transformer_equal_plain_pytorch(fused, chunk):
    """The derivative with respect to x needs second derivatives, which fused attention lacks."""
    federation = images(sizes=SIZES, shape=(1, 8, 8))
    how = {"batch_size": BATCH, "optimizer": Sgd(lr=0.1, momentum=0.9)}
    trainer = Trainer(
        federation,
        build("fedmix", lam=LAM),
        transformer(fused=fused),
        Training(rounds=2, **how),
        Machine(device="cpu", precision="float64", chunk=chunk),
        Evaluation(every=0),
        seed=SEED,
    )
    trainer.run()
    wanted = rounds_by_hand(transformer(fused=False), [EVERYONE] * 2, federation, 1)
    assert (
        distance(trainer.state.model, {name: wanted[name] for name in trainer.state.model}) <= 1e-9
    )


def test_an_engine_that_has_encoded_images_is_refused():
    engine = StackedEngine(
        images(shape=(1, 8, 8)), transformer(), Training(), Machine(device="cpu")
    )
    with pytest.raises(
        InputError, match="method 'fedmix' works on images, but this engine has encoded them"
    ):
        engine.cohort(build("fedmix"), np.array([0]), 0)


@pytest.mark.parametrize("method", ["fedmix", "harmofl"])
def test_a_resumed_run_leaves_the_same_bytes(method, tmp_path):
    def run(name, **options):
        how = {
            "training": Training(rounds=3, cohort=3, batch_size=8),
            "evaluation": Evaluation(every=1),
            **options,
        }
        return equipoise.train(
            images(sizes=SIZES), method=method, model="mlp", out=tmp_path / name, **how
        )

    run("whole")
    with pytest.raises(Stop):
        run("broken", on_round=stop_after(1))
    run("broken", resume=True)
    assert promised(tmp_path / "broken") == promised(tmp_path / "whole")


@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize("number", [1, 3])
def test_means_are_those_of_equal_parts(number, chunk):
    found = (
        played(build("fedmix", means=number), mlp(), COHORTS[:1], chunk=chunk)
        .states[0]
        .server["means"]
    )
    x, y = means_by_hand(images(sizes=SIZES), number)
    # The smallest client holds three samples, too few for two means of two or more.
    assert len(x) == {1: 5, 3: 13}[number]
    torch.testing.assert_close(found["x"], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["y"], y, rtol=0, atol=1e-12)


def test_the_loss_is_that_of_mixup_up_to_second_order():
    """With five samples, a factor 1/5 in the last term would leave a first-order error."""
    x, y = held_by(images(sizes=SIZES), 2)
    x, y, mean_x = x[:5], y[:5], x[5:].mean(0)
    mean_y = F.one_hot(y, 4).double().mean(0)
    module = mlp()
    module.features[2] = torch.nn.Tanh()

    def error(lam):
        soft = (1 - lam) * F.one_hot(y, 4) + lam * mean_y
        wanted = F.cross_entropy(module((1 - lam) * x + lam * mean_x), soft)
        return abs((wanted - mixed_loss(module, x, y, mean_x, mean_y, lam)).item())

    assert error(0.02) / error(0.01) == pytest.approx(4, rel=0.05)


def test_lambda_zero_is_fedavg():
    assert (
        distance(
            played(build("fedmix", lam=0.0), normalised()).model,
            played("fedavg", normalised()).model,
        )
        <= 1e-12
    )


def test_means_are_sent_once_and_clients_that_join_add_none():
    method, federation = build("fedmix"), images(sizes=SIZES, shape=(1, 8, 8))
    settings = (
        Training(rounds=3, batch_size=8),
        Machine(device="cpu", precision="float64"),
        Evaluation(every=0),
    )
    trainer = Trainer(federation, method, transformer(), *settings, seed=0)
    trainer.run()
    assert not trainer.engine.network.encoded
    first, second, third = (row["bytes_down"] for row in trainer.rounds)
    # The model goes to five clients each round, and once more for the question, with two numbers
    # for each.
    assert second == third
    assert first - second == second + 5 * 2 * 8 + 5 * (5 * 64 + 5 * 4) * 8
    assert method.aggregation.admit(trainer.state, None) is trainer.state


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(InputError, match=r"method 'fedmix' works on images .* has shape \(9,\)"):
        equipoise.train(text(), method="fedmix", rounds=1)
    regression = random_regression([4, 4], features=16)
    pictures = equipoise.Federation.from_arrays(
        regression.x.view(-1, 1, 4, 4),
        regression.y,
        clients=np.arange(8) // 4,
        splits=(1, 0, 0),
        task="regression",
    )
    with pytest.raises(
        InputError,
        match=r"fedmix mixes labels, one class for each sample, but y holds float32 of shape "
        r"\(4,\)",
    ):
        equipoise.train(pictures, method="fedmix", rounds=1)
    with pytest.raises(
        InputError, match="fedmix needs at least one client with 2 training samples or more"
    ):
        equipoise.train(images(sizes=[1] * 5), method="fedmix", rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 1.0}, r"fedmix\.lam must be at least 0 and below 1, got 1\.0"),
        ({"lam": float("nan")}, r"fedmix\.lam must be"),
        ({"means": 0}, r"fedmix\.means must be a whole number of at least 1"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("fedmix", **options)
