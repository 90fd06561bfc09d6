"""Where a round's time goes: parts without those inside them, and a tiny job on the CPU."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import jobs
from benchmarks.round_time import PARTS, Parts, draw, measure, of_kernels
from equipoise.engine.data import DeviceData


def test_a_part_does_not_count_what_is_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([0.0, 1.0, 3.0, 10.0, 20.0, 25.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ends))
    parts = Parts(torch.device("cpu"))
    parts.counting = True
    with parts.part("forward"), parts.part("backward"):
        pass
    # An evaluation fetches batches, too; it is not divided.
    with parts.part("evaluation"), parts.part("fetch"):
        pass
    assert {name: value for name, value in parts.seconds.items() if value} == {
        "forward": 1.0 + 7.0,
        "backward": 2.0,
        "evaluation": 5.0,
    }


def event(name: str, start: float, end: float, kind: DeviceType) -> SimpleNamespace:
    where = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=where, device_type=kind)


def test_kernels_belong_to_the_innermost_part_they_began_in() -> None:
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    seconds = of_kernels(
        [
            event("part: forward", 10, 50, cpu),
            event("part: backward", 20, 30, cpu),
            event("part: optimizer", 60, 90, cpu),
            event("part: optimizer", 61, 89, gpu),
            event("aten::mm", 12, 15, cpu),
            event("product", 12, 16, gpu),
            event("gradient", 22, 27, gpu),
            event("again", 40, 47, gpu),
            event("sgd", 70, 71, gpu),
            event("copy", 55, 59, gpu),
        ]
    )
    assert {name: round(value * 1e6) for name, value in seconds.items() if value} == {
        "forward": 11,
        "backward": 5,
        "optimizer": 1,
    }


def test_a_tiny_job_is_divided_and_drawn(tmp_path: Path) -> None:
    job = dataclasses.replace(
        jobs.make("small", device="cpu", threads=1), clients=4, cohort=4, samples=20
    )
    fetch = DeviceData.fetch
    report = measure(job, device="cpu", rounds=2)
    assert DeviceData.fetch is fetch, "the engine is as it was"
    assert set(report["parts"]) == {*PARTS, "rest"}
    assert all(report["parts"][name] > 0 for name in PARTS)
    draw([report], tmp_path / "round.png")
    assert (tmp_path / "round.png").stat().st_size > 5_000
