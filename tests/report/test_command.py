"""``equipoise report``, and the reports that ``run`` and ``compare`` write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import equipoise.cli
import equipoise.report
from equipoise import train
from equipoise.data import load
from tests.report.synthetic import write_run

TINY = ("--rounds", 1, "--set", "model.hidden=[2]")


def test_run_writes_a_report_and_says_where(call):
    code, stdout, stderr = call("run", *TINY, "--out", "here")
    assert (code, stderr) == (0, "")
    assert stdout.endswith("files: here\nreport: here/report.html\n")
    assert "<h1>fedavg on digits</h1>" in Path("here/report.html").read_text(encoding="utf-8")
    # A run that has a report is still a run.
    assert call("run", "here/config.yaml", "--resume")[0] == 0


def test_run_without_a_report(call):
    code, stdout, _ = call("run", *TINY, "--out", "here", "--no-report")
    assert (code, "report" in stdout, Path("here/report.html").exists()) == (0, False, False)
    document = json.loads(call("run", *TINY, "--out", "there", "--no-report", "--json")[1])
    assert document["report"] is None


def test_json_says_where_the_report_is(call):
    assert (
        json.loads(call("run", *TINY, "--out", "here", "--json")[1])["report"] == "here/report.html"
    )


@pytest.mark.parametrize("settings", [("training.rounds=0",), ("evaluation.every=0",)])
def test_runs_without_rounds_or_evaluation_have_a_report_too(call, settings):
    sets = [option for setting in settings for option in ("--set", setting)]
    code, stdout, stderr = call(
        "run", "--set", "model.hidden=[2]", "--set", "training.rounds=1", *sets, "--out", "here"
    )
    assert (code, stderr) == (0, "")
    assert "report: here/report.html" in stdout
    assert "Not in this report" in Path("here/report.html").read_text(encoding="utf-8")


def test_a_report_that_fails_does_not_lose_the_run(call, monkeypatch):
    def fail(paths):
        raise RuntimeError("broken")

    monkeypatch.setattr(equipoise.report, "write_report", fail)
    code, stdout, stderr = call("run", *TINY, "--out", "here")
    assert (code, stderr) == (
        0,
        "no report: RuntimeError: broken (equipoise report here --debug shows where)\n",
    )
    assert "files: here" in stdout


def test_compare_writes_a_report_of_the_study(call):
    study = {"base": {"data": "digits", "training": {"rounds": 1}}, "methods": ["fedavg", "local"]}
    Path("study.yaml").write_text(yaml.safe_dump(study))
    code, stdout, _ = call("compare", "study.yaml")
    assert code == 0
    assert "report: runs/study/report.html\n" in stdout
    assert "2 methods on digits" in Path("runs/study/report.html").read_text(encoding="utf-8")
    Path("runs/study/report.html").unlink()
    call("compare", "study.yaml", "--no-report")
    assert not Path("runs/study/report.html").exists()
    # What is there can be reported later, with the same numbers.
    assert call("report", "runs/study")[:2] == (0, "report: runs/study/report.html\n")


def test_train_writes_no_report(tmp_path):
    train(load("digits"), model={"name": "mlp", "hidden": [2]}, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run/report.html").exists()


def test_report_of_several_runs(call):
    runs = [write_run(Path(name), method=name, groups=1, rounds=2) for name in ("fedavg", "local")]
    assert call("report", *runs) == (0, "report: report.html\n", "")
    assert call("report", *runs, "--out", "deep/page.html")[1] == "report: deep/page.html\n"
    document = json.loads(call("report", *runs, "--json")[1])
    assert document == {"report": "report.html", "figures": None}
    code, stdout, _ = call("report", "fedavg", "--figures", "figures")
    assert (code, stdout) == (0, "report: fedavg/report.html\nfigures: figures\n")
    assert Path("figures/seconds.pdf").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["none"],
            "error: none does not exist; valid: a run directory or the directory of a study\n",
        ),
        (["."], "error: . holds no run and no study"),
        ([], "Missing argument"),
    ],
)
def test_bad_directories_get_one_line(call, arguments, said):
    code, stdout, stderr = call("report", *arguments)
    assert (code, stdout) == (2, "")
    assert said in stderr


def test_bad_targets_are_refused_before_anything_is_read(call):
    Path("file").write_text("")
    code, _, stderr = call("report", "none", "--out", "file/page.html")
    assert (code, "choose another with --out" in stderr) == (2, True)
    code, _, stderr = call("report", "none", "--figures", "file")
    assert (code, "choose another with --figures" in stderr) == (2, True)
