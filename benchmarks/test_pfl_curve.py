"""The comparison of accuracy curves reads both sides and finds what they have in common."""

import json

import pytest

from benchmarks import pfl_curve
from equipoise.errors import InputError


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_both_curves_are_shown_at_common_rounds(tmp_path, capsys):
    for seed, last in ((0, 0.6), (1, 0.4)):
        lines = [{"round": 10, "accuracy": 0.2}, {"round": 20, "accuracy": last}]
        write(tmp_path / f"pfl-{seed}.jsonl", lines)
        own = [{"split": "val", "round": 20, "accuracy": 0.0}]
        own += [{"split": "test", "round": n, "accuracy": 0.1 + n / 100} for n in (10, 20, 30)]
        write(tmp_path / f"ours/seed{seed}/server.jsonl", own)
    files = [str(path) for path in sorted(tmp_path.glob("*.jsonl"))]
    pfl_curve.main(["show", *files, "--runs", str(tmp_path / "ours")])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 10 | 20.0 ± 0.0 | 20.0 ± 0.0 |",
        "| 20 | 50.0 ± 14.1 | 30.0 ± 0.0 |",
    ]
    assert (tmp_path / "pfl-curve.png").stat().st_size > 10_000


def test_nothing_to_compare_is_said(tmp_path):
    with pytest.raises(InputError, match="has no runs"):
        pfl_curve.show([tmp_path / "pfl.jsonl"], tmp_path)
