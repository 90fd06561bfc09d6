"""Digits whose clients hold few of the classes, and short runs on them."""

from __future__ import annotations

from functools import cache

from equipoise.data import load
from equipoise.optimizers import Sgd
from equipoise.run.api import train
from equipoise.run.evaluation import Evaluation


@cache
def digits(seed=0):
    """Twenty clients with most samples in one or two classes; four are held out of training."""
    skew = {"name": "dirichlet", "clients": 20, "beta": 0.1, "min_samples": 20}
    return load("digits", partition=skew, imbalance=None, unseen=4, seed=seed)


def scores(method, *, rounds=10, average_kept=False):
    """The mean accuracy over clients: global and personal models, on seen and new clients."""
    run = train(
        digits(),
        method=method,
        rounds=rounds,
        epochs=2,
        optimizer=Sgd(lr=0.1, momentum=0.5),
        evaluation=Evaluation(every=rounds, average_kept=average_kept),
    )
    results = run.summary["results"]
    return {
        f"{model} {who}": found["mean"]
        for model, of in results.items()
        for who, found in of.items()
    }
