"""The grid over cohorts, models and chunk sizes, in a tiny form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.machine import Rates, percent, rounded


def test_cells_are_measured_in_pieces_and_shown_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def rates(device: str, *, precision: str, threads: int) -> Rates:
        asked.append(precision)
        return Rates(1e9, 1e18, "here", precision)

    monkeypatch.setattr(scaling, "measured_apart", rates)
    common = ["--models", "mlp-1k", "--seconds", "0.01", "--steps", "2", "--out", str(tmp_path)]
    assert scaling.main([*common, "--cohorts", "2", "6", "--precisions", "float32"]) == 0
    pieces = ["--cohorts", "6", "--precisions", "bfloat16", "--chunks", "2", "7"]
    assert scaling.main([*common, *pieces]) == 0
    lines = [json.loads(line) for line in (tmp_path / "scaling.jsonl").read_text().splitlines()]
    cells = [
        (line["cohort"], line["precision"], line["chunk"], line["used_chunk"]) for line in lines
    ]
    assert asked == ["float32", "bfloat16"]
    # A chunk of seven clients does not exist in a cohort of six.
    assert [cell[:3] for cell in cells] == [
        (2, "float32", "auto"),
        (6, "float32", "auto"),
        (6, "bfloat16", 2),
    ]
    assert cells[2][3] == 2
    for line in lines:
        steps = line["cohort"] * line["steps"]
        assert line["client_steps_per_second"] == pytest.approx(steps / line["seconds_per_round"])
        assert line["fastest"] <= line["seconds_per_round"] <= line["slowest"]
        # Batches of 10: three products a layer, two of the first.
        highest = 1e9 / (2 * 10 * (2 * 64 * 12 + 3 * 12 * 10))
        assert line["limit"]["client_steps_per_second"] == pytest.approx(highest)
        assert line["limit"]["precision"] == line["precision"]
        share = line["client_steps_per_second"] / highest
        assert line["share_of_limit"] == pytest.approx(share)
        assert line["parameters"] == 64 * 12 + 12 + 12 * 10 + 10
    table = (tmp_path / "scaling.md").read_text()
    limit = rounded(highest)
    assert f"| mlp-1k | bfloat16 | {limit} | 6 |" in table
    rate, share = lines[1]["client_steps_per_second"], percent(lines[1]["share_of_limit"])
    assert f" {rounded(rate)} (6), {share} |" in table
    assert "Measured rates of the machine: here: 1 GFLOP/s in bfloat16" in table
    # Cells of earlier versions have no limit.
    del lines[0]["limit"]
    old = scaling.markdown(lines[:1])
    assert f"| mlp-1k | float32 |  | {rounded(lines[0]['client_steps_per_second'])} (2) |" in old
    # A cell that is measured again replaces the one before.
    lines.append({**lines[2], "client_steps_per_second": 1234.0})
    assert "1,234" in scaling.markdown(scaling.latest(lines))
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "mpl-1k"], "mlp-1k"),
        (["--chunks", "0"], "--chunks has '0'"),
        (["--show"], "no scaling.jsonl"),
    ],
)
def test_bad_choices_are_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scaling.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
