"""Small federations with known results, and rounds without the round loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.federation import Federation
from equipoise.method import State
from equipoise.methods import build
from equipoise.models.base import Model


@dataclass
class Played:
    """The results: the state before and after every round, the cohorts and their updates."""

    engine: StackedEngine
    states: list[State]
    cohorts: list = field(default_factory=list)
    updates: list = field(default_factory=list)

    @property
    def model(self):
        """The last global model."""
        return self.states[-1].model


def play(
    method,
    federation,
    module,
    cohorts,
    *,
    chunk=10,
    seed=5,
    precision="float64",
    reports=(),
    **training,
):
    """Run one round per cohort."""
    machine = Machine(device="cpu", precision=precision, chunk=chunk)
    engine = StackedEngine(
        federation, module, Training(rounds=len(cohorts), **training), machine, seed
    )
    everyone = engine.cohort(method, federation.seen, 0)
    played = Played(
        engine, [method.aggregation.begin(State(0, engine.network.initial()), everyone)]
    )
    for round_, clients in enumerate(cohorts):
        cohort = engine.cohort(method, np.asarray(clients), round_)
        cohort.wanted_reports |= set(reports)
        prepared = method.aggregation.prepare(played.states[-1], cohort)
        shared, each = method.aggregation.send(prepared, cohort)
        updates = cohort.train(shared, each, method.local)
        state = method.aggregation.combine(prepared, updates, cohort)
        played.states.append(replace(state, round=round_ + 1))
        engine.commit(cohort)
        played.cohorts.append(cohort)
        played.updates.append(updates)
    return played


def everyone_of(ids, names=None, clients=None, **more):
    """A cohort that a method can only look at, without names and of a federation that may grow."""
    names = tuple(f"client {id_}" for id_ in ids) if names is None else tuple(names)
    return SimpleNamespace(ids=np.array(ids), names=names, clients=clients, **more)


def minimised(reports):
    """The whole loss of each client: the task's and the terms of the method."""
    return reports["train_loss"] + reports.get("method_terms", 0)


def engine_run(module, federation, cohorts, *, chunk, method="fedavg", **how):
    """Run one round per cohort of a method by name, and return the last global model."""
    return play(build(method), federation, module, cohorts, chunk=chunk, **how).model


def kept_by(played, client, first):
    """The kept parts of one client, read from the engine."""
    memory, seen = played.engine.memory.read(np.array([client]), {"kept": first})
    assert bool(seen.all())
    return {name: stack[0] for name, stack in memory["kept"].items()}


def targets(*values, samples=None):
    """One client per value t, with ``samples`` copies of the sample (x, y) = (1, t).

    With one weight and no bias its loss is (w - t)².
    """
    counts = samples or [1] * len(values)
    y = torch.tensor(np.repeat(values, counts), dtype=torch.float64)
    clients = np.repeat(np.arange(len(values)), counts)
    return Federation.from_arrays(
        torch.ones(len(y), 1).double(), y, clients=clients, splits=(1, 0, 0), task="regression"
    )


def scalar(start=0.0):
    """A model of one weight."""
    head = nn.Linear(1, 1, bias=False)
    nn.init.constant_(head.weight, start)
    return Model(nn.Identity(), head).double()


def weight(model):
    """The weight of that model."""
    return model["head.weight"].item()


def random_regression(sizes, features=3, seed=0, splits=(1, 0, 0)):
    """Clients with different linear laws."""
    draws = np.random.default_rng(seed)
    clients = np.repeat(np.arange(len(sizes)), sizes)
    x = draws.normal(size=(len(clients), features))
    laws = draws.normal(size=(len(sizes), features))
    y = (x * laws[clients]).sum(1) + 0.1 * draws.normal(size=len(clients))
    return Federation.from_arrays(
        torch.from_numpy(x), torch.from_numpy(y), clients=clients, splits=splits, task="regression"
    )


def linear(features=3, seed=0):
    """A linear model without bias, in float64."""
    head = nn.Linear(features, 1, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(np.random.default_rng(seed).normal(size=(1, features))))
    return Model(nn.Identity(), head).double()
