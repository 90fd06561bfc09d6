"""Metrics of outputs in studies: columns, tables, and tuning in the right direction."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest
import torch
import yaml

from equipoise import metrics
from equipoise.cli import main
from equipoise.errors import InputError
from equipoise.run.left_out import MOST_NAMED
from equipoise.study import study_from, value_of

BASE = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 2},
    "evaluation": {"metrics": ["ece", "auroc"]},
}
STUDY = {"base": BASE, "methods": ["fedavg", "ditto"]}
OWN = """
from equipoise import metrics


@metrics.register(higher_is_better=False, range=(0, 1))
def doubt(output, y):
    return 1 - output.softmax(1).amax(1).mean()
"""


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    metrics.names()
    monkeypatch.setattr(metrics, "_METRICS", dict(metrics._METRICS))


def test_columns_are_means_and_worst_groups_unless_others_are_named():
    assert study_from(STUDY).metrics[-4:] == (
        "ece.mean",
        "ece.worst_group",
        "auroc.mean",
        "auroc.worst_group",
    )
    named = study_from(
        {**STUDY, "metrics": ["mean", "global.unseen.ece.worst10", "val.auroc", "ece.groups.plain"]}
    )
    assert named.metrics == ("mean", "global.unseen.ece.worst10", "val.auroc", "ece.groups.plain")
    assert "ece.mean" not in study_from({"base": {"data": "digits"}, "methods": ["fedavg"]}).metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metrics": ["mae"]},
            "'mae' in metrics of the study: 'mae' is not evaluated; add it to evaluation.metrics",
        ),
        (
            {"metrics": ["ece.wurst_group"]},
            "unknown metric 'ece.wurst_group' in metrics of the study; did you mean 'ece.worst_g",
        ),
        ({"metrics": ["ece.loss"]}, "unknown metric 'ece.loss' in metrics of the study"),
        ({"metrics": ["ece.bytes_up"]}, "unknown metric 'ece.bytes_up' in metrics of the study"),
        ({"tuning": {"by": "brier"}}, "'brier' in tuning of the study: 'brier' is not evaluated"),
        (
            {"tuning": {"by": "ecce.mean"}},
            "unknown metric 'ecce.mean' in tuning of the study; did you mean 'ece.mean'",
        ),
    ],
)
def test_mistakes_are_found_before_anything_runs(changes, message):
    with pytest.raises(InputError, match=message):
        study_from({**STUDY, **changes})


def by_hand(directory, metric, *, model, split="test"):
    """Return the mean of a metric over seen clients and the largest group mean, from the rows."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    wanted = (2, model, split, False)
    rows = [
        row
        for row in rows
        if (row["round"], row["model"], row["split"], row["unseen"]) == wanted and metric in row
    ]
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row[metric])
    return sum(row[metric] for row in rows) / len(rows), {
        name: sum(own) / len(own) for name, own in groups.items()
    }


def test_tables_equal_what_the_runs_say(tmp_path):
    study = study_from(
        {
            **STUDY,
            "metrics": ["ece", "ece.worst_group", "global.ece.groups.plain", "val.auroc.mean"],
        }
    )
    results = study.run(tmp_path)
    for method, model in (("fedavg", "global"), ("ditto", "personal")):
        directory = tmp_path / "base" / method / "seed0"
        mean, groups = by_hand(directory, "ece", model=model)
        assert results.values("base", method, "ece")[0] == pytest.approx(mean, rel=1e-12)
        # Lower calibration errors are better.
        assert results.values("base", method, "ece.worst_group")[0] == pytest.approx(
            max(groups.values()), rel=1e-12
        )
        plain = by_hand(directory, "ece", model="global")[1]["plain"]
        assert results.values("base", method, "global.ece.groups.plain")[0] == pytest.approx(
            plain, rel=1e-12
        )
        auroc = by_hand(directory, "auroc", model=model, split="val")[0]
        assert results.values("base", method, "val.auroc.mean")[0] == pytest.approx(
            auroc, rel=1e-12
        )
    # Without the mark of the better of the two.
    plain = results.markdown().replace("**", "").replace("<u>", "").replace("</u>", "")
    assert f"| ditto | personal | {results.cell('base', 'ditto', 'ece')} |" in plain
    lost = Counter(
        client
        for job, model in zip(study.jobs, ("global", "personal"), strict=True)
        for client in results.summaries[job.path]["validation"][model]["seen"]["metrics"]["auroc"][
            "left_out_clients"
        ]
    )
    names = json.loads((tmp_path / study.jobs[0].path / "names.json").read_text())
    said = {f"{names[int(c)]} (undefined; {count} of 2 runs)" for c, count in lost.items()}
    (warning,) = results.warnings
    before, _, listed = warning.partition(": clients without a value are left out: ")
    assert before == "val.auroc.mean"
    assert 0 < len(said) <= MOST_NAMED
    assert set(listed.split(", ")) == said


@pytest.mark.parametrize(
    ("by", "best"), [("doubt", min), ("auroc", max), ("doubt.sigma_clients", min)]
)
def test_values_are_chosen_in_the_direction_of_the_metric(by, best, tmp_path):
    file = tmp_path / "metric_of_doubt.py"
    file.write_text(OWN)
    exec(OWN, {"__name__": "metric_of_doubt"})
    base = {**BASE, "imports": str(file), "evaluation": {"metrics": ["doubt", "auroc"]}}
    grid = {"name": "fedprox", "grid": {"mu": [0.01, 10.0]}, "set": {"training.epochs": 3}}
    study = study_from(
        {"base": base, "methods": ["fedavg", grid], "tuning": {"by": by, "tolerance": 1.0}},
        tune=True,
    )
    results = study.run(tmp_path / "runs")
    values = {
        mu: value_of(results.summaries[study.jobs[place].path], by)
        for place, mu in ((1, 0.01), (2, 10.0))
    }
    assert values[0.01] != values[10.0]
    assert results.chosen("base") == {"fedprox": {"mu": best(values, key=values.__getitem__)}}


def test_run_and_compare_show_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({"base": BASE, "methods": ["fedavg"]}))
    threads = torch.get_num_threads()
    for command in (["run", "experiment.yaml", "--out", "run"], ["compare", "study.yaml"]):
        monkeypatch.setattr(sys, "argv", ["equipoise", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (line,) = [
        line.split()
        for line in printed.splitlines()
        if line.startswith("ece ") and "global, seen" in line
    ]
    part = summary["results"]["global"]["seen"]["metrics"]["ece"]
    columns = ("mean", "mean_groups", "sigma_clients", "worst10", "worst_group")
    assert line[1:] == ["low", "global,", "seen", *(f"{part[name]:.3f}" for name in columns), "0"]
    assert "auroc.worst_group" in printed
