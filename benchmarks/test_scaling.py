"""The grid over cohorts, models and chunk sizes, in a tiny form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scaling


def test_cells_are_measured_in_pieces_and_shown_together(tmp_path: Path) -> None:
    common = ["--models", "mlp-1k", "--seconds", "0.01", "--steps", "2", "--out", str(tmp_path)]
    assert scaling.main([*common, "--cohorts", "2", "6", "--precisions", "float32"]) == 0
    pieces = ["--cohorts", "6", "--precisions", "bfloat16", "--chunks", "2", "7"]
    assert scaling.main([*common, *pieces]) == 0
    lines = [json.loads(line) for line in (tmp_path / "scaling.jsonl").read_text().splitlines()]
    cells = [
        (line["cohort"], line["precision"], line["chunk"], line["used_chunk"]) for line in lines
    ]
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
        assert line["parameters"] == 64 * 12 + 12 + 12 * 10 + 10
    table = (tmp_path / "scaling.md").read_text()
    assert "| mlp-1k | bfloat16 | 6 |" in table
    assert f"{lines[1]['client_steps_per_second']:,.0f} (6)" in table
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
