"""Does a round take longer with a million registered clients?

Cohorts have the same size among a million and among a thousand clients.

Run ``python -m benchmarks.million``. It prints the median time of a round in both federations,
measured alternately, their ratio, and the peak resident memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from equipoise import Evaluation, Federation, Machine, Training
from equipoise.federation import Split
from equipoise.methods import build as build_method
from equipoise.models import build as build_model
from equipoise.run.trainer import Progress, Trainer

COHORT, SAMPLES, POOL = 100, 10, 5000


def registered(clients: int) -> Federation:
    """Return a federation whose clients have ten samples each, drawn from a small common pool."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(POOL, 1, 8, 8)).astype(np.float32))
    nobody = Split(np.empty(0, np.int64), np.zeros(clients + 1, np.int64))
    return Federation(
        x=x,
        y=torch.from_numpy(rng.integers(0, 10, POOL)),
        train=Split(rng.integers(0, POOL, clients * SAMPLES), np.arange(clients + 1) * SAMPLES),
        val=nobody,
        test=nobody,
        groups=np.zeros(clients, np.int64),
        group_names=("all",),
        unseen=np.zeros(clients, bool),
        classes=10,
        name=f"{clients} clients",
    )


def trainer(clients: int, rounds: int) -> Trainer:
    federation = registered(clients)
    return Trainer(
        federation,
        build_method("fedavg"),
        build_model("mlp", shape=federation.shape, classes=10),
        Training(rounds=rounds, cohort=COHORT),
        Machine(device="cpu"),
        Evaluation(every=0),
        seed=0,
    )


class Pause(Exception):
    """End a trainer's loop after one round. The trainer can continue afterwards."""


def one_round(trainer: Trainer) -> float:
    """Run the next round, and return its seconds."""

    def pause(progress: Progress) -> None:
        raise Pause

    began = time.perf_counter()
    with suppress(Pause):
        trainer.run(pause)
    return time.perf_counter() - began


def median_seconds(counts: Sequence[int], *, rounds: int, warm_up: int) -> list[float]:
    """Return the median time of a round for each number of clients, in alternating rounds."""
    trainers = [trainer(count, warm_up + rounds) for count in counts]
    ticks = [[one_round(each) for each in trainers] for _ in range(warm_up + rounds)]
    return [statistics.median(seconds) for seconds in zip(*ticks[warm_up:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.million", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds")
    parser.add_argument("--warm-up", type=int, default=5, help="rounds before them")
    arguments = parser.parse_args()
    few, many = median_seconds(
        [1_000, 1_000_000], rounds=arguments.rounds, warm_up=arguments.warm_up
    )
    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(f"{COHORT} clients of {SAMPLES} samples per round, median of {arguments.rounds} rounds")
    print(f"    1,000 registered: {few * 1e3:7.2f} ms per round")
    print(f"1,000,000 registered: {many * 1e3:7.2f} ms per round, {many / few:.2f} times as long")
    print(f"peak resident memory: {peak / 2**20:7.0f} MiB")


if __name__ == "__main__":
    main()
