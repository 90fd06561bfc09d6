"""Clients with different laws and validation data, and their local step in NumPy."""

from __future__ import annotations

import numpy as np

from equipoise.optimizers import Sgd
from tests.rounds import linear, random_regression

LR = 0.05
TRAINING = {"batch_size": 100, "epochs": 1, "optimizer": Sgd(lr=LR)}


def regression():
    """Four clients of different sizes, each with training and validation samples."""
    return random_regression([12, 20, 9, 15], seed=4, splits=(0.6, 0.4, 0.0))


def first_weights():
    """The initial weights of ``linear()``."""
    return linear().head.weight.detach().numpy()[0].copy()


def held(federation, client, split):
    positions = federation.split(split).of(client)
    return federation.x.numpy()[positions], federation.y.numpy()[positions]


def loss(federation, client, w, split):
    """The mean squared error of a linear model on a client's split."""
    x, y = held(federation, client, split)
    return float(np.mean((x @ w - y) ** 2))


def local_step(federation, client, w):
    """One step of gradient descent on all of a client's training samples."""
    x, y = held(federation, client, "train")
    return w - LR * 2 * x.T @ (x @ w - y) / len(y)


def adjusted_by_hand(a, gap, step):
    """The equation of GA in NumPy, for clients that all have a gap."""
    deviation = gap - gap.mean()
    raised = np.maximum(a + step * deviation / np.abs(deviation).max(), 0)
    return a.sum() * raised / raised.sum()
