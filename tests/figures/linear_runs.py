"""Runs of a linear model on clients with different laws, with figures computed in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from equipoise import Evaluation, Machine, train
from tests.methods.domains import TRAINING
from tests.rounds import linear, random_regression

KEPT = Evaluation(local=True, keep_local=True)


def world(unseen=(3, 4)):
    """Five clients of different sizes with all three splits, some held out of training."""
    data = random_regression([12, 20, 9, 15, 26], seed=4, splits=(0.5, 0.25, 0.25))
    return replace(data, unseen=np.isin(np.arange(5), unseen))


def linear_run(out, data, method="fedavg", *, rounds=2, **options):
    """Train for a few rounds of one gradient step."""
    machine = Machine(device="cpu", precision="float64")
    options = {"evaluation": KEPT, "model": linear(), "machine": machine, **TRAINING, **options}
    return train(data, method=method, rounds=rounds, out=out, **options)


def weights_of(module):
    return module.head.weight.detach().numpy()[0].astype(float)
