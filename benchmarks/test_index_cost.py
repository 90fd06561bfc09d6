"""What local training with client indices costs, with few clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import index_cost


def test_the_ratio_follows_from_the_seconds(tmp_path: Path) -> None:
    out = tmp_path / "out" / "cost.jsonl"
    few = ["--clients", "10", "--samples", "4", "--rounds", "1", "--turns", "2"]
    assert index_cost.main([*few, "--host", "fedavg", "--host", "fedprox", "--json", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["host"] for line in lines] == ["fedavg", "fedprox"]
    for line in lines:
        assert (line["clients"], line["samples"], line["rounds"]) == (10, 4, 2)
        seconds = line["seconds"]
        assert line["ratio"] == pytest.approx(seconds["with"] / seconds["host"])


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--turns", "0"], "--turns"), (["--host", "fedprix"], "fedprix")]
)
def test_bad_input_is_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert index_cost.main(arguments) == 2
    assert named in capsys.readouterr().err
