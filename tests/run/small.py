"""A small federation, and functions to read what its runs write."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from equipoise import Federation, Training, train
from equipoise.optimizers import optimizer_named

# Files that are equal byte for byte; timings.jsonl may differ.
PROMISED = (
    "model.safetensors",
    "personal.safetensors",
    "local.safetensors",
    "metrics.jsonl",
    "rounds.jsonl",
    "summary.json",
)
MODEL = {"name": "mlp", "hidden": [12], "dropout": 0.2}
TRAINING = Training(
    rounds=7,
    cohort=4,
    batch_size=8,
    epochs=2,
    optimizer=optimizer_named("sgd", lr=0.2, momentum=0.5),
)


class Stop(Exception):
    """The exception that interrupts a run."""


def stop_after(number):
    """Return an ``on_round`` that interrupts a run after a number of rounds."""

    def on_round(progress):
        if progress.round == number:
            raise Stop

    return on_round


@cache
def federation(unseen=(7,)):
    """Nine clients of unequal sizes in three groups, with three clouds rotated for every group."""
    rng = np.random.default_rng(0)
    sizes = [12, 40, 9, 25, 60, 18, 33, 21, 15]
    clients = np.repeat(np.arange(len(sizes)), sizes)
    y = rng.integers(0, 3, len(clients))
    centres = rng.normal(size=(3, 3, 5))
    x = centres[clients % 3, y] + rng.normal(scale=0.9, size=(len(clients), 5))
    groups = {client: "abc"[client % 3] for client in range(len(sizes))}
    return Federation.from_arrays(
        x,
        y,
        clients=clients,
        groups=groups,
        splits=(0.6, 0.2, 0.2),
        unseen=unseen,
        classes=3,
        name="clouds",
    )


def small_run(out=None, method="fedavg", **options):
    """Train the small federation for a few rounds with four clients per round.

    Every round ends with a checkpoint, so what is resumed does not depend on the time.
    """
    fixed = {"model": MODEL, "training": TRAINING, "seed": 3, "checkpoint_every": 1}
    options = {**fixed, **options}
    return train(options.pop("federation", None) or federation(), method=method, out=out, **options)


def promised(directory):
    """Read the files of a run that must be equal byte for byte."""
    return {
        name: (Path(directory) / name).read_bytes()
        for name in PROMISED
        if (Path(directory) / name).exists()
    }


def rows_of(directory, name="metrics"):
    return [
        json.loads(line) for line in (Path(directory) / f"{name}.jsonl").read_text().splitlines()
    ]


@torch.no_grad()
def measure(module, data, split, client):
    """Return loss and accuracy of a module on one client's samples, one sample after the other."""
    losses, hits = [], []
    for position in data.split(split).of(client):
        output = module(data.x[position : position + 1])
        losses.append(float(F.cross_entropy(output.double(), data.y[position : position + 1])))
        hits.append(int(output.argmax()) == int(data.y[position]))
    return sum(losses) / len(losses), sum(hits) / len(hits)
