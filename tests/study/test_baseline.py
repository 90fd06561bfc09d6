"""Differences from a method that is named on the command line."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest
import yaml

from equipoise.errors import InputError
from equipoise.study import study_from
from tests.study.small import compare, snapshot

STUDY = {
    "base": {
        "data": "digits",
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"rounds": 1},
    },
    "methods": ["fedavg", {"name": "fedprox", "mu": 10, "label": "strong"}, "local"],
    "seeds": [0, 1],
    "metrics": ["mean", "worst10"],
    "baseline": "fedavg",
}
MODELS = {"fedavg": "global", "strong": "global", "local": "personal"}


def by_hand(method, baseline, metric):
    """Return mean and sample standard deviation of the differences over seeds."""

    def value(label, seed):
        summary = json.loads(Path(f"runs/s/base/{label}/seed{seed}/summary.json").read_text())
        return summary["results"][MODELS[label]]["seen"][metric]

    differences = [value(method, seed) - value(baseline, seed) for seed in (0, 1)]
    return sum(differences) / 2, statistics.stdev(differences)


def test_any_method_can_be_the_baseline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump(STUDY))
    assert compare(monkeypatch, capsys, "s.yaml", "--no-report")[0] == 0
    runs = snapshot(tmp_path / "runs" / "s" / "base")
    assert runs
    others = {"fedavg": ["strong", "local"], "local": ["fedavg", "strong"]}
    for baseline, compared in others.items():
        given = ("s.yaml", "--no-report", "--baseline", baseline)
        code, stdout, stderr = compare(monkeypatch, capsys, *given, "--json")
        assert code == 0
        assert stderr.count("already there") == len(stderr.splitlines()) == 6
        found = json.loads(stdout)["differences"]
        assert [(row["method"], row["metric"]) for row in found] == [
            (method, metric) for method in compared for metric in STUDY["metrics"]
        ]
        for row in found:
            mean, std = by_hand(row["method"], baseline, row["metric"])
            assert (row["baseline"], row["pairs"]) == (baseline, 2)
            assert (row["mean"], row["std"]) == pytest.approx((mean, std), abs=1e-12)
        assert json.loads(Path("runs/s/results.json").read_text())["differences"] == found
        files = ("--markdown", "t.md", "--csv", "t.csv")
        code, stdout, _ = compare(monkeypatch, capsys, *given, *files)
        assert code == 0
        assert f"base: difference from {baseline}, paired over seeds" in " ".join(stdout.split())
        assert f"**base: difference from {baseline}, paired over seeds" in Path("t.md").read_text()
        with Path("t-differences.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["mean"]) for row in rows] == [row["mean"] for row in found]
    assert by_hand("local", "fedavg", "mean")[0] != 0
    assert snapshot(tmp_path / "runs" / "s" / "base") == runs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--baseline", "lokal"),
            "unknown method 'lokal' in --baseline; did you mean 'local'? Valid: fedavg, local, "
            "strong",
        ),
        (
            ("--baseline", "local", "--method", "fedavg", "--method", "strong"),
            "--baseline local is not among the methods of --method (fedavg, strong); add --method "
            "local",
        ),
        (
            ("--baseline", "local", "--method", "local"),
            "--baseline local needs another method to compare with",
        ),
        (("--baseline", "local", "--tune"), "--baseline cannot be used together with --tune"),
        (
            ("--set", "baseline=local"),
            "--set baseline=local: baseline cannot be set for all runs of a study; use --baseline",
        ),
    ],
)
def test_mistakes_are_found_before_anything_runs(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump(STUDY))
    code, stdout, stderr = compare(monkeypatch, capsys, "s.yaml", *arguments)
    assert (code, stdout, stderr) == (2, "", f"error: {message}\n")
    assert not Path("runs").exists()


def test_the_baseline_changes_no_run():
    without = {key: value for key, value in STUDY.items() if key != "baseline"}
    plain, compared = study_from(without), study_from(without, baseline="local")
    assert (plain.baseline, compared.baseline, compared.others) == (
        None,
        "local",
        ("fedavg", "strong"),
    )
    assert compared.jobs == plain.jobs
    # A baseline of the file that is not run is left out; one of the command line is refused.
    assert study_from(STUDY, methods=["local", "strong"]).baseline is None
    with pytest.raises(InputError, match="--baseline fedavg is not among the methods"):
        study_from(STUDY, methods=["local", "strong"], baseline="fedavg")


def test_the_option_is_explained(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    code, stdout, _ = compare(monkeypatch, capsys, "--help")
    assert code == 0
    assert "--baseline" in stdout
    assert "Show paired differences from this method" in stdout
