"""The metrics of ``evaluation.metrics`` and of studies in reports."""

from __future__ import annotations

import json
import statistics

import pytest

from equipoise import Evaluation
from equipoise.report import write_report
from equipoise.study import study_from
from tests.report.pages import Page
from tests.run.small import small_run


def page_of(*paths):
    return Page(write_report(paths, paths[0] / "report.html").read_text(encoding="utf-8"))


def shown(value):
    return "–" if value is None else f"{value:.3f}"


def test_one_run_has_a_table_of_further_metrics(tmp_path):
    # Some clients have test data of a single class, so their auroc is undefined.
    run = small_run(tmp_path, "ditto", rounds=2, evaluation=Evaluation(metrics=["auroc", "ece"]))
    header, *rows = page_of(tmp_path).tables["Further metrics of each client"]
    columns = ["mean", "mean_groups", "sigma_clients", "worst10", "worst_group"]
    assert header == ["metric", "better", "of", *columns, "clients without a value"]
    parts = {
        f"{words}, {who} clients, test data": run.summary["results"][model][who]["metrics"]
        for model, words in (("global", "global model"), ("personal", "personal models"))
        for who in ("seen", "unseen")
        if who in run.summary["results"][model]
    }
    found = {(row[0], row[2]): row for row in rows}
    assert set(found) == {(name, part) for part in parts for name in ("auroc", "ece")}
    for (name, part), row in found.items():
        own = parts[part][name]
        assert row[1] == {"auroc": "high", "ece": "low"}[name]
        assert row[3:] == [*(shown(own.get(column)) for column in columns), str(own["left_out"])]
    assert any(row[-1] != "0" for row in rows)


def test_runs_without_further_metrics_have_no_such_table(tmp_path):
    small_run(tmp_path, rounds=1)
    assert "Further metrics of each client" not in page_of(tmp_path).tables


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    study_from(
        {
            "base": {
                "data": {"name": "digits", "unseen": 2},
                "training": {"rounds": 1},
                "evaluation": {"metrics": ["ece"]},
            },
            "methods": ["fedavg", "ditto"],
            "seeds": [0, 1],
            "metrics": ["jain", "global.unseen.mean", "ece.worst10"],
        }
    ).run(folder)
    return folder


def by_seed(study, method, *path):
    """Return mean ± standard deviation over both seeds of a value in the summaries."""
    values = []
    for seed in (0, 1):
        found = json.loads((study / f"base/{method}/seed{seed}/summary.json").read_text())
        for key in path:
            found = found[key]
        values.append(found)
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def test_several_methods_have_mean_and_worst_group_of_further_metrics(study):
    page = page_of(study)
    for who, models in (("seen", ("global", "personal")), ("unseen", ("global", "personal"))):
        table = page.table(f"Further metrics, {who} clients")
        for method, model in zip(("fedavg", "ditto"), models, strict=True):
            path = ("results", model, who, "metrics", "ece")
            assert table[method] == {
                "method": method,
                "ece.mean ↓": by_seed(study, method, *path, "mean"),
                "ece.worst_group ↓": by_seed(study, method, *path, "worst_group"),
            }


def test_the_metrics_of_a_study_are_columns_of_its_report(study):
    table = page_of(study).table("Metrics of the study")
    for method, model in (("fedavg", "global"), ("ditto", "personal")):
        seen = ("results", model, "seen")
        assert table[method] == {
            "method": method,
            "jain ↑": by_seed(study, method, *seen, "jain"),
            "global.unseen.mean ↑": by_seed(study, method, "results", "global", "unseen", "mean"),
            "ece.worst10 ↓": by_seed(study, method, *seen, "metrics", "ece", "worst10"),
        }


def test_metrics_that_other_tables_have_or_nobody_knows_are_not_shown(study):
    results = study / "results.json"
    kept = results.read_text()
    try:
        for metrics in (["mean", "ece.worst_group"], ["metric of a newer release"], "broken", [7]):
            results.write_text(json.dumps(json.loads(kept) | {"metrics": metrics}))
            assert "Metrics of the study" not in page_of(study).tables
    finally:
        results.write_text(kept)
