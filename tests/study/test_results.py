"""Marks, p-values, intervals and LaTeX in the tables of a study."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from equipoise.cli.show.study import show_results
from equipoise.study import Results, study_from
from equipoise.study.metrics import BETTER, SERVER, TOTALS, check_metric, words_of
from equipoise.study.significance import LEVEL, holm
from tests.report.synthetic import write_run

SEEDS = [3, 4, 5, 6, 7]
STUDY = {
    "base": {"data": "digits"},
    "methods": ["fedavg", "fedprox", {"name": "ditto", "label": "ditto_1"}],
    "seeds": SEEDS,
    "metrics": ["mean", "sigma_clients"],
    "baseline": "fedavg",
}
# One row for each method, one column for each seed.
MEANS = np.array(
    [[0.80, 0.81, 0.79, 0.80, 0.82], [0.81, 0.80, 0.80, 0.81, 0.82], [0.60, 0.62, 0.59, 0.61, 0.60]]
)
SIGMAS = np.array([[0.2, 0.3, 0.1, 0.2, 0.3], [0.1, 0.2, 0.2, 0.1, 0.2], [0.3, 0.1, 0.2, 0.2, 0.2]])


def summary(mean, sigma):
    part = {"mean": mean, "sigma_clients": sigma, "groups": {}}
    return {"score": "accuracy", "round": 1, "results": {"global": {"seen": part}}}


def results_of(seeds=SEEDS):
    study = study_from({**STUDY, "seeds": seeds})
    found = {
        job.path: summary(MEANS[row, SEEDS.index(job.seed)], SIGMAS[row, SEEDS.index(job.seed)])
        for job in study.jobs
        for row in [study.methods.index(job.method)]
    }
    return Results(study, found, {})


def test_best_second_and_worse_are_marked():
    results = results_of()
    rows = [line for line in results.markdown().splitlines() if line.startswith("|")][2:5]
    assert rows == [
        "| fedavg | <u>0.804 ± 0.011</u> | 0.220 ± 0.084 |",
        "| fedprox | **0.808 ± 0.008** | **0.160 ± 0.055** |",
        "| ditto_1 | 0.604 ± 0.011 † | <u>0.200 ± 0.071</u> |",
    ]
    assert (
        "† worse than the best: p < 0.05, two-sided paired t-test over seeds, Holm correction over "
        "all pairs" in (results.markdown())
    )


def test_p_values_are_in_csv_and_json():
    results = results_of()
    pairs = {(0, 1): 0.0, (0, 2): 0.0, (1, 2): 0.0}
    adjusted = holm([stats.ttest_rel(MEANS[a], MEANS[b]).pvalue for a, b in pairs])
    expected = {"fedavg": adjusted[0], "ditto_1": adjusted[2]}
    table = list(csv.DictReader(io.StringIO(results.csv())))
    of_mean = {row["method"]: row for row in table if row["metric"] == "mean"}
    assert [of_mean[method]["rank"] for method in results.study.methods] == ["2", "1", ""]
    assert of_mean["fedprox"]["p"] == ""
    for method, p in expected.items():
        assert float(of_mean[method]["p"]) == pytest.approx(p, rel=1e-9)
    plain = json.loads(json.dumps(results.plain()))
    assert next(
        row["p"] for row in plain["results"] if row["method"] == "ditto_1"
    ) == pytest.approx(expected["ditto_1"])
    assert plain["statistics"]["level"] == LEVEL


def test_a_baseline_is_tested_over_the_other_methods_only():
    results = results_of()
    raw = holm([stats.ttest_rel(MEANS[other], MEANS[0]).pvalue for other in (1, 2)])
    found = [results.difference("base", method, "mean").p for method in ("fedprox", "ditto_1")]
    assert found == pytest.approx(raw, rel=1e-9)
    assert results.difference("base", "ditto_1", "mean").cell.endswith(f"; 5; p = {raw[1]:.3f})")
    assert "Holm correction over methods" in results.about_differences("base")


def test_with_fewer_seeds_nothing_is_claimed():
    results = results_of(SEEDS[:4])
    text = results.markdown()
    assert "†" not in text
    assert "Differences are not tested: that needs 5 seeds." in text
    assert "**0.805" in text or "**0.808" in text
    assert results.difference("base", "ditto_1", "mean").p is None


def test_latex_has_the_same_marks():
    text = results_of().latex()
    assert r"fedavg & \underline{0.804 $\pm$ 0.011} & 0.220 $\pm$ 0.084 \\" in text
    assert r"fedprox & \textbf{0.808 $\pm$ 0.008} & \textbf{0.160 $\pm$ 0.055} \\" in text
    assert r"ditto\_1 & 0.604 $\pm$ 0.011 $^{\dagger}$ & \underline{0.200 $\pm$ 0.071} \\" in text
    assert r"Method & Mean over clients & $\sigma$ over clients \\" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1


def test_slow_runs_are_counted_by_reason():
    results = results_of()
    assert not results.warnings
    what = "GPU kernels were not used: Triton is not installed"
    first, second, *_ = results.summaries.values()
    first["slowed_by"] = [what, "process 1: something else"]
    second["slowed_by"] = [what]
    assert results.warnings == [
        f"2 runs slower than possible: {what}",
        "1 run slower than possible: process 1: something else",
    ]


def test_heads_in_latex_are_words_and_names_elsewhere():
    shown = ["auroc", "auroc.mean", "my_own.worst10", "global.unseen.mean", "groups.a_b"]
    part = {"mean": 0.5, "groups": {"mean": 0.25, "a_b": 0.75}}
    results = {"personal": {"seen": part}, "global": {"seen": part, "unseen": part}}
    # The names of metrics are not checked here: my_own would have to be registered.
    study = replace(study_from({**STUDY, "seeds": [3]}), metrics=tuple(shown))
    summaries = {
        job.path: {"score": "accuracy", "round": 1, "results": results} for job in study.jobs
    }
    found = Results(study, summaries, {})
    first, second = found.latex().split(r"\end{table}")[:2]
    assert (
        r"Method & Model & auroc: mean over clients & auroc: mean over clients & "
        r"my\_own: worst tenth of clients & Global, unseen: mean over clients & Group a\_b \\"
    ) in first
    assert r"\begin{tabular}{llrrrrr}" in first
    # Names of groups are not metrics, even if a group is called like one.
    assert r"Method & Model & mean & a\_b \\" in second
    assert f"| method | model | {' | '.join(shown)} |" in found.markdown()
    metrics = {row["metric"] for row in csv.DictReader(io.StringIO(found.csv()))}
    assert metrics == {*shown, "groups.mean"}
    assert found.plain()["metrics"] == shown


PREFIXES = ("", "val.", "selected.", "each.global.unseen.", "val.each.local.seen.")
NAMES = [
    prefix + name.replace("NAME", "x_y")
    for name in BETTER
    for prefix in (("",) if name in TOTALS else ("", "val.") if name in SERVER else PREFIXES)
]


@pytest.mark.parametrize("metric", NAMES)
def test_every_metric_has_words(metric):
    check_metric(metric, "here")
    words = words_of(metric)
    assert ("x_y" in words) == ("x_y" in metric)
    assert "_" not in words.replace("x_y", "")
    # Capital letters are for words; a name at the beginning is as it was given.
    assert words.startswith(("x_y", "σ")) or words[0].isupper()


def test_words_of_different_metrics_differ():
    assert len({words_of(metric) for metric in NAMES}) == len(NAMES)
    assert words_of("val.each.local.seen.my_own.jain") == (
        "Validation, mean over rounds, local, seen, my_own: Jain index"
    )


def test_intervals_are_read_from_the_runs(tmp_path):
    study = study_from({**STUDY, "seeds": [0, 1], "methods": ["fedavg", "fedprox"]})
    found = {}
    for job in study.jobs:
        directory = write_run(tmp_path / job.path, clients=24, seed=job.seed, method=job.method)
        found[job.path] = json.loads((directory / "summary.json").read_text())
    results = Results(study, found, {}, tmp_path)
    low, high = results.interval("base", "fedavg", "mean")
    values = [
        found[job.path]["results"]["global"]["seen"]["mean"]
        for job in study.jobs
        if job.method == "fedavg"
    ]
    assert low < np.mean(values) < high
    # The clients of a run have a spread of about 0.2 around a group mean; the mean of 24 has about
    # 0.04.
    assert 0.05 < high - low < 0.25
    assert results.interval("base", "fedavg", "groups.group 1") is not None
    title = "95% bootstrap intervals over clients (BCa, 1,000 resamples), mean over seeds"
    assert f"**base: {title}**" in results.markdown()
    row = next(row for row in results.plain()["results"] if row["metric"] == "mean")
    assert (row["low"], row["high"]) == (low, high)
    assert Results(study, found, {}).interval("base", "fedavg", "mean") is None


@pytest.mark.parametrize("styled", [False, True])
def test_the_terminal_explains_bold_only_if_something_is_bold(styled, capsys, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if styled:
        monkeypatch.setenv("FORCE_COLOR", "1")
    for seeds, said in ((SEEDS[:4], "Differences are not tested"), (SEEDS, "† worse than")):
        show_results(results_of(seeds), Path("runs"))
        text = capsys.readouterr().out
        assert said in text
        assert ("Bold: best. Underlined: second." in text) == styled
        assert ("\x1b[1m" in text) == styled
