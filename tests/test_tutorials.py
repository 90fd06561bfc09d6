"""Tutorials run as written, with small copies of their data."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from equipoise.cli import app
from tests.data.small_adult import write_adult

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
FIRST = TUTORIALS / "first_report.md"


def test_adult(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    write_adult(tmp_path / "data" / "adult", train=900, test=900)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    threads = torch.get_num_threads()
    failed, tried = doctest.testfile(
        str(TUTORIALS / "adult.md"), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    torch.set_num_threads(threads)
    assert failed == 0
    assert (tmp_path / "adult.svg").read_text().count("<use ") >= 6
    assert tried >= 25
    summaries = list((tmp_path / "runs" / "adult").rglob("summary.json"))
    assert len(summaries) == 12
    for path in summaries:
        results = json.loads(path.read_text())["results"]
        assert set(results["global"]["seen"]["attributes"]) == {"sex", "race"}


def test_every_tutorial_is_carried_out():
    assert {page.stem for page in TUTORIALS.glob("*.md")} == {"adult", "first_report"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(60, 4))
    np.save("x.npy", rows)
    np.save("y.npy", np.arange(60) % 3)
    np.save("hospital.npy", np.repeat(["A", "B", "C"], 20))
    return tmp_path


def experiment(number):
    """Return one of the tutorial's YAML files, shortened as far as possible."""
    text = re.findall(r"```yaml\n(.*?)```", FIRST.read_text(), re.DOTALL)[number]
    given = yaml.safe_load(text)
    given.get("base", given)["training"]["rounds"] = 1
    return yaml.safe_dump({**given, **({"seeds": [0]} if "seeds" in given else {})})


def told(*arguments, code):
    answer = CliRunner().invoke(app, [*arguments])
    assert answer.exit_code == code, answer.output
    assert "Traceback" not in answer.output
    return " ".join(answer.output.split())


def test_the_python_of_the_first_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(FIRST), module_relative=False)
    assert (failed, tried) == (0, 35)


def test_the_commands_of_the_first_report(folder):
    commands = re.findall(r"^equipoise (.*)$", FIRST.read_text(), re.MULTILINE)
    Path("experiment.yaml").write_text(experiment(0))
    Path("study.yaml").write_text(experiment(1))
    Path("five.yaml").write_text(experiment(2))
    names = ["data", "run", "compare", "compare", "compare", "report"]
    assert [command.split()[0] for command in commands] == names
    # Drawing takes seconds, and is tested elsewhere.
    assert "--figures" in commands.pop()
    outputs = [told(*command.split(), code=0) for command in commands]
    assert "all 3 0 42 6 12" in outputs[0]
    assert "runs/fedavg" in outputs[1]
    assert all(name in outputs[2] for name in ("fedavg", "local", "ditto", "qffl"))
    assert "served worst" in outputs[1]
    assert Path("runs/fedavg/report.html").exists()
    assert "chosen for ditto: lam: " in outputs[4]
    assert r"\toprule" in Path("table.tex").read_text()


def test_two_files_are_enough(folder):
    (inline,) = re.findall(r"`(data: \{name: arrays.*?\})`", FIRST.read_text(), re.DOTALL)
    given = {**yaml.safe_load(experiment(0)), **yaml.safe_load(inline)}
    Path("experiment.yaml").write_text(yaml.safe_dump(given))
    told("run", "experiment.yaml", "--out", "run", code=0)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {row["client"] for row in rows} == set(range(10))
    assert Path("run/report.html").exists()


@pytest.mark.parametrize(
    ("name", "array", "model", "message"),
    [
        ("y", np.arange(50) % 3, "mlp", "y.npy (data.y) has 50 rows and x.npy (data.x) has 60"),
        ("y", np.arange(60) % 3 + 0.5, "mlp", "whole numbers"),
        ("y", np.arange(60) % 10 + 1, "mlp", "has labels from 1 to 10, and labels count from 0"),
        ("y", np.eye(3)[np.arange(60) % 3], "mlp", "has shape (60, 3); valid: one label for each"),
        ("x", np.arange(60.0), "mlp", "x.npy (data.x) has shape (60,); valid: a row of one or"),
        ("x", np.zeros((60, 8, 8)), "cnn2", "got shape (8, 8); x[:, None] gives grey images"),
        ("x", np.zeros((60, 8, 8, 3)), "cnn2", "numpy.moveaxis(x, -1, 1) moves channels to the"),
    ],
)
def test_files_that_do_not_fit_get_one_line_that_says_what_to_do(
    folder, name, array, model, message
):
    np.save(f"{name}.npy", array)
    given = {**yaml.safe_load(experiment(0)), "model": model}
    Path("experiment.yaml").write_text(yaml.safe_dump(given))
    said = told("run", "experiment.yaml", code=2)
    assert message in said
    assert said.startswith("error: experiment.yaml: ")


def test_a_client_of_three_samples(folder):
    np.save("hospital.npy", np.repeat(["A", "B", "C"], [37, 20, 3]))
    Path("experiment.yaml").write_text(experiment(0))
    told("run", "experiment.yaml", "--out", "run", code=0)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {row["client"]: row["n"] for row in rows if row["split"] == "test"}[2] == 1
