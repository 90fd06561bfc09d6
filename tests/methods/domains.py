"""Clients with different laws and validation data, and their local step in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from equipoise.optimizers import Sgd
from tests.rounds import linear, random_regression

LR = 0.05
TRAINING = {"batch_size": 100, "epochs": 1, "optimizer": Sgd(lr=LR)}


def regression(third=9):
    """Four clients of different sizes with training and validation samples.

    If the ``third`` has a single sample, it has no validation samples.
    """
    return random_regression([12, 20, third, 15], seed=4, splits=(0.6, 0.4, 0.0))


def first_weights():
    """The initial weights of ``linear()``."""
    return linear().head.weight.detach().numpy()[0].copy()


def held(federation, client, split):
    positions = federation.split(split).of(client)
    return federation.x.numpy()[positions], federation.y.numpy()[positions]


def loss(federation, client, w, split):
    """The mean squared error of a linear model on a client's split; NaN without samples."""
    x, y = held(federation, client, split)
    return float(np.mean((x @ w - y) ** 2)) if len(y) else np.nan


def local_step(federation, client, w):
    """One step of gradient descent on all of a client's training samples."""
    x, y = held(federation, client, "train")
    return w - LR * 2 * x.T @ (x @ w - y) / len(y)


def shares(a, cohort):
    """The weights of a cohort, scaled to sum to one; equal ones if all are 0."""
    return a[cohort] / a[cohort].sum() if a[cohort].any() else np.full(len(cohort), 1 / len(cohort))


def adjusted_by_hand(a, gap, step):
    """The equation of GA in NumPy; clients without a gap keep their weight, and so do all clients
    if their gaps are equal.
    """
    known, adjusted = np.isfinite(gap), a.copy()
    if known.any() and np.ptp(gap[known]) > 1e-12:
        deviation = gap[known] - gap[known].mean()
        raised = np.maximum(a[known] + step * deviation / np.abs(deviation).max(), 0)
        adjusted[known] = a[known].sum() * raised / raised.sum()
    return adjusted


def equal_gaps_by_hand(a, gap, nudged, change):
    """Equations 8 to 11 in NumPy; clients whose gap is unknown or did not change have slope 0."""
    measured = np.abs(change) > 1e-12
    slope, level = np.zeros(len(a)), np.where(measured, gap, 0)
    slope[measured] = np.maximum((nudged - a)[measured] / change[measured], 0)
    if not slope.any():
        return nudged
    fair = np.clip(a + slope * (level - (slope * level).sum() / slope.sum()), 0, 1)
    return fair / fair.sum()


def assert_on_the_simplex(*weights):
    """Weights of a cohort, or of all clients: none is negative, and they sum to one."""
    for each in weights:
        assert float(min(each)) >= 0
        assert float(sum(each)) == pytest.approx(1, abs=1e-12)
