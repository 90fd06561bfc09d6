"""Hostile clients: engines in which one client sends something other than its trained update."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from equipoise.data import load
from equipoise.engine.cohort import StackedCohort
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer

LIAR = 3
SGD = Sgd(lr=0.5, momentum=0.5)
# The attacks: functions of the trained tensor and the received one (zero for uploads).
ATTACKS = {
    "x1e6": lambda own, received: received + 1e6 * (own - received),
    "flipped": lambda own, received: received - 10 * (own - received),
    "1e300": lambda own, received: torch.full_like(own, 1e300),
}


def longer(own, received):
    """Three times the update: the guard ``norm`` scales it and keeps the client."""
    return received + 3 * (own - received)


def lying(attack, liar=LIAR, uploads_only=False):
    """Return an engine in which one client applies an attack to its update and its uploads."""

    class LyingCohort(StackedCohort):
        def _train_members(self, members, moving, received, shared, *rest):
            memory, uploads, reports = super()._train_members(
                members, moving, received, shared, *rest
            )
            for row in np.flatnonzero(self.ids[members] == liar).tolist():
                for name, stack in {} if uploads_only else moving.items():
                    stack[row] = attack(stack[row].clone(), shared["model"][name])
                for stack in (stack for tree in uploads.values() for stack in tree.values()):
                    stack[row] = attack(stack[row].clone(), torch.zeros_like(stack[row]))
            return memory, uploads, reports

    class LyingEngine(StackedEngine):
        def cohort(self, method, clients, round_):
            return LyingCohort(self, method, np.sort(clients), round_)

    return LyingEngine


@cache
def ten_clients(unseen=(), seed=0):
    """The digits, divided at random among ten clients."""
    return load("digits", partition={"name": "iid", "clients": 10}, unseen=list(unseen), seed=seed)


def trained(
    method,
    *,
    unseen=(),
    engine=StackedEngine,
    rounds=12,
    optimizer=SGD,
    every=0,
    directory=None,
    seed=0,
):
    """Train a small model on the ten clients for a few rounds, and return the trainer."""
    federation = ten_clients(unseen, seed)
    made = build(**method) if isinstance(method, dict) else build(method)
    trainer = Trainer(
        federation,
        made,
        build_model("mlp", shape=federation.shape, classes=10, hidden=(32,)),
        Training(rounds=rounds, batch_size=16, epochs=2, optimizer=optimizer),
        Machine(device="cpu", precision="float64"),
        Evaluation(every=every),
        seed=seed,
        directory=directory,
        engine=engine,
    )
    trainer.run()
    return trainer


def accuracy(trainer):
    """Return the mean accuracy of the global model on the test data of the nine honest clients."""
    honest = np.setdiff1d(np.arange(10), [LIAR])
    return float(trainer.engine.evaluate(trainer.global_model, honest)["test"]["accuracy"].mean())
