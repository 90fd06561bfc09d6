"""Rounds of methods that treat features and heads differently, and their personal models."""

from __future__ import annotations

import numpy as np

from equipoise.engine.contract import Personal
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.random import Purpose, fold
from tests.engine.by_hand import held_by, train_by_hand
from tests.engine.federations import images
from tests.engine.five_clients import BATCH, COHORTS, SEED, SIZES
from tests.rounds import play

LR = 0.1


def played(method, module, cohorts=COHORTS, *, chunk=3, **how):
    """Run rounds of a method with the settings of ``tests/engine/five_clients.py``."""
    how = {"batch_size": BATCH, "optimizer": Sgd(lr=LR, momentum=0.9), **how}
    method = build(method) if isinstance(method, str) else method
    return play(method, images(sizes=SIZES), module, cohorts, chunk=chunk, seed=SEED, **how)


def personal_models(found, method, clients):
    """The whole personal model of every client, as in evaluation after the last round."""
    personal = Personal(method, (), len(found.updates))
    still, own = found.engine.personal_models(found.model, personal, np.array(clients))
    return {
        c: {**still, **{n: stack[row] for n, stack in own.items()}} for row, c in enumerate(clients)
    }


def adapt_by_hand(module, turns, client, rounds):
    """Adapt a module to a client after some rounds, with the random numbers of adaptation."""
    key = fold(fold(SEED, rounds - 1, Purpose.ADAPT), client)
    train_by_hand([module], turns, *held_by(images(sizes=SIZES), client), key, interleaved=False)
