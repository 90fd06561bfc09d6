"""Metrics of groups are shown if there are several groups, or if they are named."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from equipoise.cli import main
from equipoise.fairness import GROUP_METRICS, METRICS
from equipoise.study import Results, study_from
from equipoise.study.intervals import OF_GROUPS
from tests.study.small import compare

OF_CLIENTS = ["mean", "sigma_clients", "worst10", "auroc.mean"]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Write arrays with one or two groups, and return a study of them."""
    monkeypatch.chdir(tmp_path)
    arrays = {
        "x": np.arange(160.0).reshape(80, 2) / 160,
        "y": np.arange(80) % 2,
        "clients": np.repeat(["north", "south"], [50, 30]),
        "groups": np.repeat(["city", "country"], [50, 30]),
    }
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    data = {"name": "arrays", "x": "x.npy", "y": "y.npy", "clients": "clients.npy"}
    base = {"data": data, "training": {"rounds": 1}, "evaluation": {"metrics": ["auroc"]}}
    return {"base": base, "methods": ["fedavg", "fedprox"], "baseline": "fedavg"}


def compared(study, monkeypatch, capsys, *options):
    Path("s.yaml").write_text(yaml.safe_dump(study))
    files = ("--markdown", "t.md", "--latex", "t.tex", "--csv", "t.csv", "--no-report")
    code, stdout, _ = compare(monkeypatch, capsys, "s.yaml", *files, *options)
    assert code == 0
    return stdout


def heads(stdout):
    """Return the heads of the tables of metrics and of differences on the terminal."""
    lines = [line.split() for line in stdout.splitlines()]
    return [line[1:] for line in lines if line[:2] == ["method", "mean"]]


def test_by_default_they_are_left_out_for_a_single_group(study, monkeypatch, capsys):
    stdout = compared(study, monkeypatch, capsys)
    assert heads(stdout) == [OF_CLIENTS, OF_CLIENTS]
    assert Path("t.md").read_text().count(f"| method | {' | '.join(OF_CLIENTS)} |") == 2
    assert not any(name in Path("t.md").read_text() for name in GROUP_METRICS)
    assert (
        r"Method & Mean over clients & $\sigma$ over clients & Worst tenth of clients & auroc: "
        r"mean over clients \\" in Path("t.tex").read_text()
    )
    every = set(study_from(study).metrics)
    assert every > {"mean_groups", "sigma_groups", "worst_group", "auroc.worst_group"}
    for file in ("t.csv", "t-seeds.csv", "t-differences.csv"):
        rows = csv.DictReader(Path(file).read_text().splitlines())
        assert {row["metric"] for row in rows} >= every
    assert set(json.loads(Path("runs/s/results.json").read_text())["metrics"]) == every
    summary = json.loads(Path("runs/s/base/fedavg/seed0/summary.json").read_text())
    assert summary["results"]["global"]["seen"]["sigma_groups"] == 0


@pytest.mark.parametrize("where", ["the file", "--metrics"])
def test_they_are_shown_if_they_are_named(where, study, monkeypatch, capsys):
    named = ["mean", "sigma_groups", "auroc.worst_group"]
    options = ()
    if where == "the file":
        study = {**study, "metrics": named}
    else:
        options = ("--metrics", ",".join(named))
    assert heads(compared(study, monkeypatch, capsys, *options)) == [named, named]
    assert f"| method | {' | '.join(named)} |" in Path("t.md").read_text()


def test_they_are_shown_for_several_groups(study, monkeypatch, capsys):
    stdout = compared(study, monkeypatch, capsys, "--set", "data.groups=groups.npy")
    assert heads(stdout) == [list(study_from(study).metrics)] * 2


def test_one_run_with_several_groups_is_enough(study):
    plan = study_from({**study, "seeds": [0, 1]})
    assert plan.metrics_by_default

    def results(**groups):
        parts = {job: {"seen": {"groups": own}} for job, own in groups.items()}
        summaries = {
            job.path: {"score": "accuracy", "results": {"global": parts[name]}}
            for job, name in zip(plan.jobs, ("a", "b", "b", "b"), strict=True)
        }
        return Results(plan, summaries, {})

    alone, empty = {"all": 0.5}, {"all": 0.5, "other": None}
    assert results(a=alone, b=empty).columns == tuple(OF_CLIENTS)
    assert results(a={"x": 0.5, "y": 0.4}, b=alone).columns == plan.metrics
    # Nothing is known about groups.
    assert results(a={}, b={}).columns == Results(plan, {}, {}).columns == plan.metrics
    named = replace(plan, metrics_by_default=False)
    assert Results(named, results(a=alone, b=alone).summaries, {}).columns == plan.metrics


@pytest.mark.parametrize("several", [False, True])
def test_a_run_shows_them_for_several_groups(several, study, monkeypatch, capsys):
    groups = {"groups": "groups.npy"} if several else {}
    experiment = {**study["base"], "data": {**study["base"]["data"], **groups}}
    Path("e.yaml").write_text(yaml.safe_dump(experiment))
    monkeypatch.setattr(sys, "argv", ["equipoise", "run", "e.yaml", "--out", "run", "--no-report"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [line[0] for line in lines if line and line[0] in METRICS]
    assert shown == [name for name in METRICS if several or name not in GROUP_METRICS]
    columns = ("mean", "mean_groups", "sigma_clients", "worst10", "worst_group")
    (head,) = [line[3:] for line in lines if line[:2] == ["metric", "better"]]
    expected = [name for name in columns if several or name not in GROUP_METRICS]
    assert head == [*expected, "left", "out"]
    part = json.loads(Path("run/summary.json").read_text())["results"]["global"]["seen"]
    (row,) = [line for line in lines if line[:2] == ["auroc", "high"]]
    values = [f"{part['metrics']['auroc'][name]:.3f}" for name in expected]
    assert row[4:] == [*values, "0"]
    assert set(part) >= set(METRICS)


def test_metrics_of_groups_are_those_of_group_means():
    assert set(GROUP_METRICS) == {
        name for name, metric in METRICS.items() if "m_g" in metric.formula
    }
    assert {*GROUP_METRICS, "groups.NAME"} == set(OF_GROUPS)
