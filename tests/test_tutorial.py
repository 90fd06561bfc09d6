"""The tutorial runs as it is printed, and mistakes on the way get messages that help."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from equipoise.cli import app

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(60, 4))
    np.save("x.npy", rows)
    np.save("y.npy", np.arange(60) % 3)
    np.save("hospital.npy", np.repeat(["A", "B", "C"], 20))
    return tmp_path


def experiment(number):
    """Return one of the tutorial's YAML files, as short as possible."""
    text = re.findall(r"```yaml\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)[number]
    given = yaml.safe_load(text)
    given.get("base", given)["training"]["rounds"] = 1
    return yaml.safe_dump({**given, **({"seeds": [0]} if "seeds" in given else {})})


def told(*arguments, code):
    answer = CliRunner().invoke(app, [*arguments])
    assert answer.exit_code == code, answer.output
    assert "Traceback" not in answer.output
    return " ".join(answer.output.split())


def test_the_python_of_the_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(TUTORIAL), module_relative=False)
    assert (failed, tried) == (0, 19)


def test_the_commands_of_the_tutorial(folder):
    commands = re.findall(r"^equipoise (.*)$", TUTORIAL.read_text(), re.MULTILINE)
    Path("experiment.yaml").write_text(experiment(0))
    Path("study.yaml").write_text(experiment(1))
    assert [command.split()[0] for command in commands] == ["data", "run", "compare"]
    outputs = [told(*command.split(), code=0) for command in commands]
    assert "all 3 0 42 6 12" in outputs[0]
    assert "runs/fedavg" in outputs[1]
    assert all(name in outputs[2] for name in ("fedavg", "local", "ditto", "qffl"))
    assert Path("runs/fedavg/report.html").exists()


def test_files_of_different_length(folder):
    np.save("y.npy", np.arange(50) % 3)
    Path("experiment.yaml").write_text(experiment(0))
    assert "y.npy (data.y) has 50 rows and x.npy (data.x) has 60" in told("run", "experiment.yaml", code=2)


def test_labels_that_are_no_whole_numbers(folder):
    np.save("y.npy", np.arange(60) % 3 + 0.5)
    Path("experiment.yaml").write_text(experiment(0))
    assert "whole numbers" in told("run", "experiment.yaml", code=2)


def test_a_client_of_three_samples(folder):
    np.save("hospital.npy", np.repeat(["A", "B", "C"], [37, 20, 3]))
    Path("experiment.yaml").write_text(experiment(0))
    told("run", "experiment.yaml", "--out", "run", code=0)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {row["client"]: row["n"] for row in rows if row["split"] == "test"}[2] == 1
