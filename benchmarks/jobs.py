"""The jobs of the comparison, from launch-bound to compute-bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.protocol import Job, Pass
from benchmarks.text import draw_text
from equipoise.models import build

_COMMON: dict[str, Any] = {"samples": 50, "batch": 10, "epochs": 1, "seed": 0}
_IMAGE = (3, 32, 32)

# ``rounds``: warm-up and timed, by device; ``exact``: rounds of the exactness pass. ``tolerance``:
# how far a result may be from the bare loop's, over the way that one has come; it allows for
# rounding, which training amplifies.
_JOBS: dict[str, dict[str, Any]] = {
    "small": {
        "about": "MLP 64-64-10, 100 clients, all in the cohort",
        "fields": {
            "model": "mlp",
            "classes": 10,
            "options": {"hidden": [64]},
            "shape": (64,),
            "clients": 100,
            "cohort": 100,
            "lr": 0.1,
        },
        "rounds": {"cpu": (3, 20), "cuda": (5, 50)},
        "exact": 3,
        "tolerance": 1e-4,
    },
    "pfl": {
        "about": "pfl-research's CIFAR-10 setting: two-layer CNN, 1,000 clients, cohort of 50",
        "fields": {
            "model": "pflcnn",
            "classes": 10,
            "options": {},
            "shape": _IMAGE,
            "clients": 1000,
            "cohort": 50,
            "lr": 0.1,
        },
        "rounds": {"cpu": (1, 5), "cuda": (5, 30)},
        "exact": 2,
        "tolerance": 1e-2,
    },
    "big": {
        "about": "ResNet-18 with BatchNorm, 100 clients, cohort of 10",
        # At 0.1 the loss explodes and rounding with it: two runs of the bare loop end in different
        # places.
        "fields": {
            "model": "resnet18",
            "classes": 10,
            "options": {"norm": "batch"},
            "shape": _IMAGE,
            "clients": 100,
            "cohort": 10,
            "lr": 0.001,
        },
        "rounds": {"cpu": (1, 2), "cuda": (5, 15)},
        "exact": 1,
        "tolerance": 3e-2,
    },
    "text": {
        "about": "LSTM 2 x 256, 80 characters, 31 clients, all in the cohort",
        "fields": {
            "model": "textlstm",
            "classes": 80,
            "options": {},
            "shape": (80,),
            "clients": 31,
            "cohort": 31,
            "lr": 0.5,
        },
        "rounds": {"cpu": (1, 1), "cuda": (5, 15)},
        "exact": 1,
        "tolerance": 1e-2,
    },
}

NAMES = tuple(_JOBS)
ABOUT = {name: spec["about"] for name, spec in _JOBS.items()}


def make(
    name: str,
    *,
    device: str,
    threads: int,
    rounds: int | None = None,
    quick: bool = False,
    tf32: bool = False,
    processes: int = 1,
) -> Job:
    """Describe one of the jobs for a device.

    Parameters
    ----------
    name : str
        One of ``NAMES``.
    device : str
        ``"cpu"`` or ``"cuda"``; a GPU affords more rounds.
    threads : int
        Torch threads for every peer.
    rounds : int, optional
        Timed rounds, in place of the job's own number.
    quick : bool
        A quarter of the rounds, to see that everything runs.
    tf32 : bool
        Whether the timed pass may use TF32; the exactness pass never does.
    processes : int
        How many processes Equipoise uses. The other peers ignore it.

    Returns
    -------
    Job
        Without its data and weights, which ``materialize`` makes.

    Examples
    --------
    >>> job = make("pfl", device="cpu", threads=2, rounds=7)
    >>> job.cohort, job.steps_per_round, job.timed.rounds
    (50, 250, 7)
    """
    spec = _JOBS[name]
    warmup, timed = spec["rounds"][device]
    if quick:
        warmup, timed = 1, max(1, timed // 4)
    return Job(
        name=name,
        **spec["fields"],
        **_COMMON,
        threads=threads,
        processes=processes,
        tolerance=spec["tolerance"],
        timed=Pass("timed", warmup=warmup, rounds=rounds or timed, shuffle=True, dropout=True),
        exact=Pass("exact", warmup=0, rounds=spec["exact"], shuffle=False, dropout=False),
        tf32=tf32,
    )


def materialize(job: Job, directory: Path) -> None:
    """Draw the job's initial weights and data and write them where the peers read them."""
    model = build(job.model, shape=job.shape, classes=job.classes, seed=job.seed, **job.options)
    job.write(directory, model.state_dict(), *draw(job))


def draw(job: Job) -> tuple[Tensor, Tensor]:
    """Draw samples that can be learnt: unit noise around one point per class, or texts."""
    if job.model == "textlstm":
        (length,), drawn = job.shape, torch.Generator().manual_seed(job.seed)
        texts = draw_text(drawn, job.clients * job.samples, length + 1, job.classes)
        texts = texts.unflatten(0, (job.clients, job.samples))
        return texts[..., :-1].clone(), texts[..., -1].clone()
    generator = np.random.default_rng(job.seed)
    y = generator.integers(job.classes, size=(job.clients, job.samples))
    centres = 0.5 * generator.standard_normal((job.classes, *job.shape), dtype=np.float32)
    x = generator.standard_normal((job.clients, job.samples, *job.shape), dtype=np.float32)
    for client in range(
        job.clients
    ):  # one client at a time: all centres at once would double the memory
        x[client] += centres[y[client]]
    return torch.from_numpy(x), torch.from_numpy(y)
