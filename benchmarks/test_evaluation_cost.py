"""What evaluation costs, with few clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import evaluation_cost


def test_the_cost_follows_from_the_seconds(tmp_path: Path) -> None:
    out = tmp_path / "out" / "cost.jsonl"
    arguments = ["--job", "small", "--clients", "12", "--val", "2", "--test", "3", "--rounds", "2"]
    assert evaluation_cost.main([*arguments, "--profile", "--json", str(out)]) == 0
    measured = json.loads(out.read_text())
    assert (measured["clients"], measured["rounds"]) == (12, 2)
    seconds, laps, counts = (measured[name] for name in ("seconds", "laps", "counts"))
    assert measured["percent"] == pytest.approx(100 * (seconds["with"] / seconds["without"] - 1))
    assert measured["share"] == pytest.approx(100 * laps["evaluate"] / seconds["without"])
    assert 0 < laps["evaluate"] < seconds["with"]
    # A round with evaluation calls the model more often, and no kernel of a GPU.
    assert counts["with"]["operations"] > counts["without"]["operations"] > 0
    assert counts["with"]["launches"] == 0


def test_every_client_holds_samples_of_each_kind() -> None:
    job = evaluation_cost.jobs.make("small", device="cpu", threads=1)
    data = evaluation_cost.federation(job, val=2, test=3)
    for split, size in (("train", job.samples), ("val", 2), ("test", 3)):
        assert (data.split(split).sizes == size).all()
    assert len(data.x) == job.clients * (job.samples + 5)
