"""The two references: each client alone, and all data pooled."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equipoise.data import load
from equipoise.engine.settings import Machine
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.random import fold
from equipoise.run.api import train
from equipoise.run.evaluation import Evaluation
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.plain_loop import train_client, with_plain_dropout
from tests.engine.small_models import mlp
from tests.rounds import play

SEED = 7
HOW = {"batch_size": 8, "epochs": 2}
NEVER = Evaluation(every=0)


def alone(module, federation, samples, client, rounds):
    """Train one client over some rounds, each with a new optimizer and its own random numbers."""
    module = with_plain_dropout(copy.deepcopy(module))
    x, y = federation.x[samples], federation.y[samples]
    for round_ in rounds:
        key = fold(fold(SEED, round_), client)
        module = train_client(
            module,
            x,
            y,
            client_key=key,
            make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            **HOW,
        )
    return dict(module.state_dict())


@pytest.mark.parametrize("chunk", [1, 4, 10])
def test_local_is_training_every_client_alone(chunk):
    federation = images()
    run = train(
        federation,
        method="local",
        model=mlp(0.3),
        rounds=3,
        seed=SEED,
        optimizer=Sgd(lr=0.1, momentum=0.9),
        machine=Machine(device="cpu", precision="float64", chunk=chunk),
        evaluation=NEVER,
        **HOW,
    )
    for client in range(federation.clients):
        samples = torch.from_numpy(federation.train.of(client))
        wanted = alone(mlp(0.3), federation, samples, client, range(3))
        assert distance(dict(run.model(client).state_dict()), wanted) <= 1e-9


def test_local_with_partial_cohorts_moves_only_who_takes_part():
    federation = images()
    played = play(
        build("local"),
        federation,
        mlp(),
        THREE_COHORTS,
        seed=SEED,
        optimizer=Sgd(lr=0.1, momentum=0.9),
        **HOW,
    )
    initial = played.engine.network.initial()
    memory, seen = played.engine.memory.read(np.arange(10), {"kept": initial})
    assert bool(seen.all())
    for client in (0, 1, 4):
        rounds = [r for r, cohort in enumerate(THREE_COHORTS) if client in cohort]
        wanted = alone(
            mlp(), federation, torch.from_numpy(federation.train.of(client)), client, rounds
        )
        assert (
            distance({name: stack[client] for name, stack in memory["kept"].items()}, wanted)
            <= 1e-9
        )


def test_local_leaves_the_global_model_alone_and_sends_nothing():
    played = play(build("local"), images(), mlp(), THREE_COHORTS, **HOW)
    initial = played.engine.network.initial()
    assert all(torch.equal(played.model[name], tensor) for name, tensor in initial.items())
    assert not any(
        updates.params or updates.buffers or updates.uploads for updates in played.updates
    )


def test_central_is_training_on_the_pooled_data():
    federation = images()
    run = train(
        federation,
        method="central",
        model=mlp(),
        rounds=3,
        seed=SEED,
        cohort=2,
        optimizer=Sgd(lr=0.1, momentum=0.9),
        machine=Machine(device="cpu", precision="float64"),
        evaluation=NEVER,
        **HOW,
    )
    wanted = alone(mlp(), federation, torch.arange(len(federation.x)), 0, range(3))
    assert distance(dict(run.model().state_dict()), wanted) <= 1e-9


def test_central_is_evaluated_on_every_client_and_beats_clients_alone_on_digits():
    digits = load("digits")
    how = {"rounds": 10, "epochs": 2, "optimizer": Sgd(lr=0.1), "evaluation": Evaluation(every=10)}
    central = train(digits, method="central", **how).summary["results"]["global"]["seen"]
    local = train(digits, method="local", **how).summary["results"]["personal"]["seen"]
    assert sorted(central["groups"]) == sorted(digits.group_names)
    assert central["mean"] > local["mean"] + 0.05


def test_clients_that_were_never_drawn_train_for_a_round_before_they_are_evaluated():
    """One client per round for two rounds: the others are not evaluated with the initial model."""
    federation = images()
    how = {
        "rounds": 2,
        "cohort": 1,
        "seed": SEED,
        "optimizer": Sgd(lr=0.1),
        "batch_size": 64,
        "evaluation": NEVER,
    }
    run = train(
        federation,
        method="local",
        model=mlp(),
        machine=Machine(device="cpu", precision="float64"),
        **how,
    )
    drawn = {client for row in run.trainer.rounds for client in row["clients"]}
    assert len(drawn) <= 2
    for client in sorted(set(range(federation.clients)) - drawn)[:3]:
        module = mlp().double()
        held = torch.from_numpy(federation.train.of(client))
        F.cross_entropy(module(federation.x[held]), federation.y[held]).backward()
        wanted = {name: (p - 0.1 * p.grad).detach() for name, p in module.named_parameters()}
        assert distance(dict(run.model(client).double().state_dict()), wanted) <= 1e-6
