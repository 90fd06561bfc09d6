"""Runs of the small federation on a CPU whose engine defers work as on a GPU."""

from __future__ import annotations

from equipoise import Machine
from equipoise.engine.stacked import StackedEngine
from equipoise.run.trainer import Trainer
from tests.run.small import small_run

ROUNDS = 7


def deferring(monkeypatch):
    """Make engines defer work on a CPU as on a GPU, and note the rounds that end later."""
    for name in ("defers", "keeps_samples"):
        monkeypatch.setattr(StackedEngine, name, property(lambda engine: True))
    return watched(monkeypatch)


def watched(monkeypatch):
    later, original = [], Trainer._waits

    def noted(trainer, launch, row, clock):
        waits = original(trainer, launch, row, clock)
        later.extend([row["round"]] * waits)
        return waits

    monkeypatch.setattr(Trainer, "_waits", noted)
    return later


def run(out, **how):
    return small_run(out, **{"machine": Machine(device="cpu"), **how})


def files(directory):
    """Read all files of a run but the seconds of its rounds and what contains their checksum."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.name not in ("timings.jsonl", "SHA256SUMS", "checkpoint.safetensors")
    }
