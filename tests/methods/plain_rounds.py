"""Rounds as plain PyTorch loops, one client after the other, and digits with label skew."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.data import load
from equipoise.engine.evaluation import evaluate_shared
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from tests.engine.federations import images
from tests.rounds import play

SIZES = [7, 12, 5, 20]
# Clients 0 and 2 take part three times; the others miss a round.
COHORTS = [[0, 1, 2], [0, 2, 3], [0, 1, 2, 3]]
# Every step uses all samples of a client.
FULL_BATCHES = {"batch_size": 64, "steps": 3, "optimizer": Sgd(lr=0.1)}


def federation():
    """Four clients with images of four classes."""
    return images(sizes=SIZES)


def smooth_model():
    """A smooth model, so that rounding cannot change a branch."""
    torch.manual_seed(6)
    return Model(nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.Tanh()), nn.Linear(6, 4)).double()


def samples_of(data, client):
    """All training samples of a client."""
    held = torch.from_numpy(data.train.of(client))
    return data.x[held], data.y[held]


def steps(module, loss, *, lr=0.1, count=3):
    """Train a copy of a module with plain gradient steps; ``loss`` takes the copy."""
    trained = copy.deepcopy(module)
    for _ in range(count):
        gradients = torch.autograd.grad(
            loss(trained), list(trained.parameters()), materialize_grads=True
        )
        with torch.no_grad():
            for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
                parameter -= lr * gradient
    return trained


def average(modules, weights):
    """The weighted mean of modules."""
    mean = copy.deepcopy(modules[0])
    with torch.no_grad():
        for parameter, *others in zip(
            mean.parameters(), *(m.parameters() for m in modules), strict=True
        ):
            parameter.copy_(sum(a * other for a, other in zip(weights, others, strict=True)))
    return mean


def by_size(cohort):
    """The clients' shares of the samples."""
    sizes = np.array([SIZES[k] for k in cohort])
    return sizes / sizes.sum()


def cross_entropy(module, data, client):
    """The mean cross-entropy of a client's samples."""
    x, y = samples_of(data, client)
    return F.cross_entropy(module(x), y)


def assert_equal(model, module, atol=1e-9):
    """Compare a tree with a module's parameters."""
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(model[name], parameter.detach(), rtol=0, atol=atol)


@cache
def skewed_digits(seed):
    """Ten clients with most of their samples in few classes."""
    return load("digits", partition={"name": "dirichlet", "clients": 10, "beta": 0.1}, seed=seed)


@cache
def on_digits(name, seed, rounds=8, **options):
    """Run rounds with five local epochs; return them and the final model's mean training loss."""
    digits = skewed_digits(seed)
    module = build_model("mlp", shape=digits.shape, classes=10, hidden=(32,), seed=seed)
    method = build(name, weights="size", **options)
    how = {
        "epochs": 5,
        "batch_size": 20,
        "optimizer": Sgd(lr=0.1),
        "seed": seed,
        "precision": "float32",
    }
    played = play(method, digits, module, [digits.seen] * rounds, **how)
    model = method.aggregation.evaluated(played.states[-1])
    measured = evaluate_shared(
        played.engine.network, played.engine.data, model, digits.train, digits.seen
    )
    return played, float(np.average(measured["loss"], weights=digits.train.sizes))
