"""The command line: its output and its exit codes."""

from __future__ import annotations

import doctest
import json
import operator
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import equipoise
from equipoise import data, methods, metrics, models, tasks
from equipoise.cli import paths
from equipoise.cli.show import console, progress
from equipoise.cli.show.federation import _histogram
from equipoise.client_index import make_index, similarity_by_group
from equipoise.config import experiment_from
from equipoise.data import load
from equipoise.data.cache import cached
from equipoise.errors import InputError
from equipoise.fairness import METRICS
from equipoise.parity import FIGURES
from equipoise.study import load_study
from equipoise.study.numbers import numbers
from tests import quick
from tests.data.small_adult import write_adult

START = "from equipoise.cli import main; main()"


def run_json(call, *arguments):
    code, stdout, stderr = call("run", *arguments, "--json")
    assert (code, stderr) == (0, "")
    return json.loads(stdout)


HEAVY = {"torch", "numpy", "sklearn", "scipy", "matplotlib", "yaml"}


# Some versions of Typer use pydantic for the options of a command.
@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], HEAVY | {"pydantic"}),
        (["run", "--help"], HEAVY),
        (["compare", "--help"], HEAVY),
        (["report", "--help"], HEAVY),
    ],
)
def test_help_imports_nothing_heavy(arguments, absent):
    code = (
        "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
        + START
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert "Example: equipoise" in done.stdout
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert not loaded & absent


@pytest.mark.parametrize(
    "command", ["run", "methods", "data", "cache", "compare", "report", "advise"]
)
def test_every_command_shows_an_example(call, command):
    code, stdout, _ = call(command, "--help")
    assert code == 0
    assert f"Example: equipoise {command}" in stdout


def test_the_example_of_run_runs(call):
    _, stdout, _ = call("run", "--help")
    example = shlex.split(stdout.partition("Example: equipoise ")[2])
    assert example[example.index("--rounds") + 1] == "20"
    code, stdout, stderr = call(*example, "--rounds", 1)
    assert (code, stderr) == (0, "")
    assert "files: runs/mine\n" in stdout


@pytest.mark.parametrize("command", ["run", "methods", "data", "compare"])
def test_files_of_examples_are_there(call, command):
    example = call(command, "--help")[1].partition("Example: ")[2]
    assert all(
        (README.parent / word).is_file() for word in example.split() if word.endswith(".yaml")
    )


def test_version(call):
    assert call("--version") == (0, f"{equipoise.__version__}\n", "")


# ---- run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", quick.only(["fedavg", "fedcrc"], methods.names()))
def test_every_method_runs_on_digits_with_its_defaults(call, method):
    arguments = (
        "--method",
        method,
        "--data",
        "digits",
        "--rounds",
        2,
        "--seed",
        1,
        "--out",
        "here",
    )
    document = run_json(call, *arguments)
    assert (document["method"], document["data"], document["seed"], document["rounds"]) == (
        method,
        "digits",
        1,
        2,
    )
    assert document["directory"] == "here"
    assert document["config"] == yaml.safe_load(Path("here/config.yaml").read_text())
    summary = json.loads(Path("here/summary.json").read_text())
    assert {key: document[key] for key in summary} == summary
    assert document["seconds"] > 0
    for model in document["results"].values():
        assert set(METRICS) <= set(model["seen"])


def test_a_file_its_options_and_overrides(call):
    Path("a.yaml").write_text(
        "{data: digits, method: {name: fedprox, mu: 0.5}, training: {rounds: 3}, seed: 5}"
    )
    config = run_json(
        call,
        "a.yaml",
        "--rounds",
        1,
        "--model",
        "logistic",
        "--set",
        "method.mu=2",
        "--device",
        "cpu",
    )["config"]
    assert (config["method"]["mu"], config["training"]["rounds"], config["model"]) == (
        2.0,
        1,
        {"name": "logistic"},
    )
    assert (config["seed"], config["data"]["seed"], config["machine"]["device"]) == (5, 5, "cpu")


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_log_gets_lines_about_long_runs(call, command, monkeypatch):
    """On a cluster the output is a file, which must not be empty for hours."""
    settings = {"data": "digits", "training": {"rounds": 3}}
    study = {"base": settings, "methods": ["fedavg"], "seeds": [1]}
    given, name = (settings, "fedavg") if command == "run" else (study, "base/fedavg/seed1")
    Path("given.yaml").write_text(yaml.safe_dump(given))
    code, _, quiet = call(command, "given.yaml", "--out", "quiet")
    assert (code, "round 2" in quiet) == (0, False)
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    code, _, stderr = call(command, "given.yaml", "--out", "said")
    lines = [line for line in stderr.splitlines() if ": round " in line]
    assert code == 0
    assert [line.partition(", mean ")[0] for line in lines] == [
        f"{name}: round 1 of 3",
        f"{name}: round 2 of 3",
    ]
    assert re.search(r"worst client 0\.\d{3}  σ 0\.\d{3} \(about \d+ s left\)$", lines[1])


def test_each_run_gets_a_directory_of_its_own(call):
    first, second = (
        run_json(call, "--rounds", 1, "--set", "model.hidden=[2]")["directory"] for _ in range(2)
    )
    assert (first, second) == ("runs/digits-fedavg-seed0", "runs/digits-fedavg-seed0-2")


def test_the_tables_show_every_metric_and_who_is_left_behind(call):
    code, stdout, stderr = call("run", "--rounds", 3, "--set", "data.unseen=4")
    assert (code, stderr) == (0, "")
    summary = json.loads(Path("runs/digits-fedavg-seed0/summary.json").read_text())["results"][
        "global"
    ]
    for name, metric in METRICS.items():
        value, other = summary["seen"][name], summary["unseen"][name]
        words = " ".join(stdout.split())
        expected = " ".join([name, *numbers([value, other]), metric.description])
        assert expected in words
    worst = [line for line in stdout.splitlines() if "served worst" in line and "←" in line]
    assert [line.split()[0] for line in worst] == [summary["seen"]["worst_group_name"]]
    assert "global, seen" in stdout
    assert "global, unseen" in stdout
    assert "files: runs/digits-fedavg-seed0" in stdout
    assert "MB sent by clients" in stdout


def test_local_models_have_a_column_and_do_not_say_who_is_left_behind(call):
    code, stdout, _ = call(
        "run", "--rounds", 1, "--set", "evaluation.local=true", "--method", "ditto"
    )
    assert code == 0
    results = json.loads(Path("runs/digits-ditto-seed0/summary.json").read_text())["results"]
    (header,) = [line for line in stdout.splitlines() if line.startswith("metric")]
    assert re.split(r" {2,}", header.strip())[1:4] == [
        "global, seen",
        "personal, seen",
        "local, seen",
    ]
    (mean,) = [line for line in stdout.splitlines() if line.startswith("mean ")]
    assert mean.split()[1:4] == [
        f"{results[model]['seen']['mean']:.3f}" for model in ("global", "personal", "local")
    ]
    (worst,) = [line for line in stdout.splitlines() if "served worst" in line and "←" in line]
    assert worst.split()[0] == results["personal"]["seen"]["worst_group_name"]


def test_a_task_without_rates_shows_none(call, tmp_path):
    rows = [f"{'ab'[row % 2]},{'fm'[row // 2 % 2]},{row},{row % 7}" for row in range(200)]
    (tmp_path / "rows.csv").write_text("\n".join(["site,sex,x,y", *rows]))
    options = {"file": "rows.csv", "y": "y", "clients": "site", "attributes": "[sex]"}
    options["task"] = "regression"
    sets = [part for key, value in options.items() for part in ("--set", f"data.{key}={value}")]
    code, stdout, _ = call("run", "--data", "table", *sets, "--rounds", 1)
    assert code == 0
    assert "by sex: samples of all clients" in stdout
    assert "score_difference" in stdout
    assert not {"selection_rate", "tpr", "demographic_parity_difference"} & {*stdout.split()}


def test_the_tables_show_how_values_of_attributes_are_treated(call, tmp_path):
    write_adult(tmp_path / "data" / "adult", train=500, test=300)
    document = run_json(
        call, "--data", "adult", "--rounds", 1, "--set", "evaluation.min_cell=3", "--out", "json"
    )
    _, stdout, _ = call("run", "--data", "adult", "--rounds", 1, "--set", "evaluation.min_cell=3")
    sex = document["results"]["global"]["seen"]["attributes"]["sex"]
    lines = [line.split() for line in stdout.splitlines()]
    for value, rates in sex["values"].items():
        numbers = [f"{rates[name]:.3f}" for name in ("accuracy", "selection_rate", "tpr", "fpr")]
        counts = [str(rates["n"]), str(rates["scored"])]
        assert [value, "global,", "seen", *counts, *numbers] in lines
    shown = {
        line[0]: line[1:3]
        for line in lines
        if len(line) > 3 and line[0] in (*FIGURES, "withheld", "without_targets")
    }
    for figure in FIGURES:
        values = [
            document["results"]["global"]["seen"]["attributes"][name][figure]
            for name in ("sex", "race")
        ]
        assert shown[figure] == ["–" if value is None else f"{value:.3f}" for value in values]
    assert shown["withheld"][0] == str(sex["withheld"])
    assert shown["without_targets"][0] == str(sex["without_targets"]) != "0"


def test_nothing_evaluated(call):
    code, stdout, _ = call("run", "--rounds", 1, "--set", "evaluation.every=0")
    assert code == 0
    assert "\nnothing was evaluated (evaluation.every is 0)\n" in stdout


def test_zero_shot(call):
    code, stdout, _ = call("run", "--model", "clip", "--rounds", 0, "--out", "zero")
    assert code == 0
    assert "fedavg on digits, seed 0, round 0 of 0 (the last)" in stdout
    assert "0 B sent by clients" in stdout
    code, _, stderr = call("run", "--model", "clip", "--rounds", 1)
    assert code == 2
    assert "no parameter that can be trained" in stderr


def test_nobody_has_test_or_validation_data(call):
    code, stdout, _ = call("run", "--rounds", 1, "--set", "data.splits=[1,0,0]")
    assert code == 0
    assert (
        "\nno results: no client has test or validation data (data.splits is [1.0, 0.0, 0.0])\n"
        in stdout
    )
    assert "evaluation.every" not in stdout


@pytest.mark.parametrize(
    ("splits", "unseen", "columns"),
    [
        ("[0.8,0.2,0]", "leave_out=plain", ["global, unseen", "global, seen, validation"]),
        ("[0.8,0.2,0]", "unseen=0", ["global, seen, validation"]),
        ("[1,0,0]", "leave_out=plain", ["global, unseen"]),
    ],
)
def test_clients_without_test_data_are_shown_on_what_they_have(call, splits, unseen, columns):
    code, stdout, _ = call(
        "run", "--rounds", 1, "--set", f"data.splits={splits}", "--set", f"data.{unseen}"
    )
    assert code == 0
    summary = json.loads(Path("runs/digits-fedavg-seed0/summary.json").read_text())
    parts = {
        "global, unseen": summary["results"].get("global", {}).get("unseen"),
        "global, seen, validation": summary["validation"].get("global", {}).get("seen"),
    }
    words = " ".join(stdout.split())
    assert " ".join(["metric", *columns, "what it is"]) in words
    assert " ".join(["mean", *(f"{parts[column]['mean']:.3f}" for column in columns)]) in words
    worst = next(line for line in stdout.splitlines() if "←" in line)
    assert worst.split()[0] == parts[columns[-1]]["worst_group_name"]


def test_an_interrupted_run_goes_on(call, monkeypatch):
    whole = run_json(call, "--rounds", 4, "--out", "whole")

    @contextmanager
    def impatient(name):
        def on_round(progress):
            if progress.round == 2:
                raise KeyboardInterrupt

        yield on_round

    with monkeypatch.context() as patch:
        patch.setattr(progress, "progress_of_run", impatient)
        code, stdout, stderr = call("run", "--rounds", 4, "--out", "broken")
    assert (code, stdout) == (130, "")
    assert stderr == "interrupted; resume with: equipoise run broken\n"
    assert not Path("broken/summary.json").exists()
    assert run_json(call, "broken/config.yaml", "--resume")["results"] == whole["results"]
    assert Path("broken/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--method", "fedvag"],
            "unknown method 'fedvag' in --method; did you mean 'fedavg'? Valid: ",
        ),
        (["--model", "mpl"], "unknown model 'mpl' in --model; did you mean 'mlp'? Valid: "),
        (["--data", "digit"], "unknown data 'digit' in --data; did you mean 'digits'? Valid: "),
        (
            ["--set", "trainig.rounds=3"],
            "unknown key 'trainig' in --set trainig.rounds=3; did you mean 'training'? Valid: ",
        ),
        (
            ["--set", "training.rounds=ten"],
            "--set training.rounds=ten: training.rounds must be a whole number, got 'ten'\n",
        ),
        (
            ["--set", "training.rounds"],
            "--set 'training.rounds' is not of the form key=value, such as training.rounds=20\n",
        ),
        (
            ["--rounds", "-1"],
            "--rounds: training.rounds must be a whole number of at least 0, got -1\n",
        ),
        (["--device", "tpu"], "--device: unknown device 'tpu' in machine.device"),
        (
            ["--set", "data.partition={name: dirichlet, clients: 9, beta: 0}"],
            "--set data.partition={name: dirichlet, clients: 9, beta: 0}: data.partition.beta must "
            "be a finite number above 0, got 0.0\n",
        ),
        (
            ["--set", "data.partition={name: iid, clients: 1000}"],
            "--set data.partition={name: iid, clients: 1000}: data.partition.clients: source "
            "'digits' has 1797 samples, too few for 1000 clients with min_samples=3 each\n",
        ),
        (["no.yaml"], "cannot read no.yaml: No such file or directory\n"),
        (
            ["--resume"],
            "--resume needs the run to resume: --out DIR, or DIR/config.yaml as the experiment\n",
        ),
        (
            ["--resume", "--out", "typo"],
            "--resume: typo does not exist, so there is no run to resume; start it without "
            "--resume\n",
        ),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(call, arguments, message):
    code, stdout, stderr = call("run", *arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"error: {message}")
    assert stderr.count("\n") == 1


STUDY = "{base: {data: digits}, methods: [fedavg, local], seeds: [0]}"
EXPERIMENT = "{data: digits, method: fedavg, training: {rounds: 1}}"
NEEDS = "it needs base and methods, such as 'base: {data: digits}' and 'methods: [fedavg, local]'"


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        (
            "run",
            STUDY,
            "f.yaml is a study, not an experiment; run it with: equipoise compare f.yaml",
        ),
        (
            "run",
            "methods: [fedavg]",
            "f.yaml is a study, not an experiment; run it with: equipoise compare f.yaml",
        ),
        (
            "run",
            "{data: digits, methods: [fedavg]}",
            "unknown key 'methods' in f.yaml; did you mean 'method'?",
        ),
        (
            "compare",
            EXPERIMENT,
            "f.yaml is an experiment, not a study; run it with: equipoise run f.yaml",
        ),
        (
            "compare",
            "data: digits",
            "f.yaml is an experiment, not a study; run it with: equipoise run f.yaml",
        ),
        (
            "compare",
            "{base: {data: digits}, method: [fedavg]}",
            "unknown key 'method' in f.yaml; did you mean 'methods'",
        ),
        ("compare", "", f"f.yaml is not a study; {NEEDS}\n"),
        ("compare", "# nothing yet", f"f.yaml is not a study; {NEEDS}\n"),
        ("compare", "- fedavg", f"f.yaml is not a study; {NEEDS}\n"),
        ("compare", "base: [", "f.yaml is not valid YAML: "),
    ],
)
def test_a_file_for_another_command(call, command, content, message):
    Path("f.yaml").write_text(content)
    code, stdout, stderr = call(command, "f.yaml")
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"error: {message}")
    assert stderr.count("\n") == 1
    assert not Path("runs").exists()


def test_a_directory_in_use_is_refused(call):
    run_json(call, "--rounds", 2, "--out", "a")
    assert call("run", "--rounds", 2, "--out", "a") == (
        2,
        "",
        "error: a already holds a run; resume it (--resume, in Python resume=True) or choose "
        "another directory\n",
    )
    assert call("run", "--rounds", 1, "--out", "a", "--resume") == (
        2,
        "",
        "error: --rounds: training.rounds is 1, but the run in a was started with 2 rounds and "
        "cannot be made shorter; valid: 2 or more\n",
    )


def test_the_directory_of_a_run_makes_it_longer(call):
    run_json(call, "--rounds", 1, "--out", "short")
    run_json(call, "--rounds", 3, "--out", "long")
    assert run_json(call, "short", "--rounds", 3)["rounds"] == 3
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "rounds.jsonl",
        "summary.json",
        "model.safetensors",
    ):
        assert Path("short", name).read_bytes() == Path("long", name).read_bytes()
    code, _, stderr = call("run", "short", "--out", "other")
    assert (code, stderr) == (
        2,
        "error: short is a run directory, in which the run is resumed; leave out --out\n",
    )


def test_a_truncated_checkpoint_is_a_failure_of_the_run(call):
    run_json(call, "--rounds", 1, "--out", "a")
    Path("a/summary.json").unlink()
    checkpoint = Path("a/checkpoint.safetensors")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    code, stdout, stderr = call("run", "a/config.yaml", "--resume")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: cannot read a/checkpoint.safetensors: ")
    assert stderr.endswith("; the file is missing, truncated or not written by Equipoise\n")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("finished", [True, False])
def test_a_checkpoint_that_is_gone_is_a_failure_and_nothing_is_lost(call, finished):
    run_json(call, "--rounds", 3, "--out", "a")
    Path("a/checkpoint.safetensors").unlink()
    if not finished:
        Path("a/summary.json").unlink()
    before = {path.name: path.read_bytes() for path in Path("a").iterdir()}
    code, stdout, stderr = call("run", "a/config.yaml", "--resume")
    assert (code, stdout) == (1, "")
    wanted = (
        "is finished, but its checkpoint.safetensors is missing"
        if finished
        else "but no checkpoint, so the run"
    )
    assert stderr.startswith("error: ")
    assert wanted in stderr
    assert stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in Path("a").iterdir()} == before


def test_a_diverging_run_is_a_failure(call):
    code, stdout, stderr = call(
        "run", "--rounds", 2, "--set", "training.optimizer.lr=1e30", "--out", "a"
    )
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: round 1: the training loss of client ")
    assert stderr.count("\n") == 1


def test_debug_shows_the_traceback(call):
    code, _, stderr = call("run", "--method", "fedvag", "--debug")
    assert code == 2
    assert stderr.startswith("Traceback")
    assert stderr.splitlines()[-1].startswith("error: unknown method")


def test_an_error_of_own_code_names_its_line(call):
    Path("mine.py").write_text(
        "from equipoise import models\n\n@models.register\ndef faulty(shape, classes):\n"
        "    return shape.width\n\n@models.register\ndef textual(shape, classes):\n"
        "    return 'net'\n"
    )
    code, _, stderr = call("run", "--import", "mine.py", "--model", "faulty", "--rounds", 1)
    assert code == 1
    assert f"(line 5 of {Path.cwd() / 'mine.py'}; run again with --debug to see more)" in stderr
    code, _, stderr = call("run", "--import", "mine.py", "--model", "textual", "--rounds", 1)
    assert "function of model 'textual' returned 'net'; valid: an nn.Module" in stderr


def test_clients_of_one_group_are_listed(call):
    arrays = {"x": np.arange(80.0).reshape(40, 2) / 80, "y": np.arange(40) % 2}
    clients = np.repeat(["north", "south"], [30, 10])
    for name, array in {**arrays, "clients": clients, "alone": ["north"] * 40}.items():
        np.save(f"{name}.npy", array)
    data = {"name": "arrays", "x": "x.npy", "y": "y.npy", "clients": "clients.npy"}
    given = [f"--set=data={json.dumps(data)}", "--rounds", 1, "--no-report"]
    code, stdout, _ = call("run", *given, "--out", "a")
    table = stdout.partition("who is left behind: clients, the worst first")[2].splitlines()
    assert code == 0
    assert table[1].split()[:3] == ["client", "test", "samples"]
    assert sorted(line.split()[0] for line in table[2:4]) == ["north", "south"]
    assert "served worst" in table[2]
    worst = json.loads(Path("a/summary.json").read_text())["results"]["global"]["seen"]
    assert table[2].startswith(worst["worst_client_name"])
    assert "left behind" not in call("run", *given, "--set=data.clients=alone.npy")[1]
    Path("s.yaml").write_text(json.dumps({"base": {"data": data}, "methods": ["fedavg"]}))
    few = ["--set=training.rounds=1", "--no-report", "--markdown", "table.md"]
    stdout = call("compare", "s.yaml", *few)[1]
    assert f"{worst['worst_client_name']} (1 of 1)" in stdout
    assert "clients of each group" not in Path("table.md").read_text()


def test_directories_of_another_kind_are_refused(call):
    call("run", "--rounds", 0, "--out", "a", "--no-report")
    Path("empty").mkdir()
    Path("s.yaml").write_text("base: {data: digits}\nmethods: [fedavg]\n")
    for arguments, message in (
        (["compare", "s.yaml", "--out", "a"], "a holds a run, so it cannot be the directory of a"),
        (["compare", "a"], "a is a directory; valid: the file of a study"),
        (["run", "empty"], "empty is a directory without a run (it has no config.yaml)"),
    ):
        code, _, stderr = call(*arguments)
        assert (code, message in stderr) == (2, True)
    assert not Path("a/base").exists()


def test_help_has_no_backslashes(call):
    assert "\\" not in call("compare", "--help")[1] + call("flower", "new", "--help")[1]


def test_an_unexpected_error_is_one_line_too(call, monkeypatch):
    # A function without Python code: an error of own code would have a line.
    broken = partial(operator.truediv, 1, 0)
    monkeypatch.setattr("equipoise.cli.show.methods.method_documents", broken)
    code, stdout, stderr = call("methods", "--json")
    assert (code, stdout) == (1, "")
    assert (
        stderr
        == "error: ZeroDivisionError: division by zero (run again with --debug to see where)\n"
    )


@pytest.mark.parametrize(
    "arguments", [["run", "--rounds", "x"], ["nothing"], ["compare"], ["run", "--jsn"]]
)
def test_wrong_usage_has_code_2(call, arguments):
    code, stdout, stderr = call(*arguments)
    assert (code, stdout) == (2, "")
    assert "Usage: equipoise" in stderr


# ---- methods and data ----------------------------------------------------------------------------


def test_methods_as_json(call):
    code, stdout, stderr = call("methods", "--json")
    assert (code, stderr) == (0, "")
    documents = {document["name"]: document for document in json.loads(stdout)}
    assert sorted(documents) == methods.names()
    prox = documents["fedprox"]
    assert (prox["parts"], prox["server_sees"], prox["personal_models"]) == (
        ["local"],
        "sums only",
        False,
    )
    assert prox["hyper_parameters"] == {"mu": 0.1}
    assert prox["paper"] == "Li et al., MLSys 2020"
    assert documents["local"]["personal_models"]
    assert documents["scaffold"]["parts"] == ["local", "aggregation"]


def test_methods_as_a_table(call):
    code, stdout, _ = call("methods")
    assert code == 0
    rows = {line.split()[0]: line for line in stdout.splitlines() if line}
    assert set(methods.names()) <= set(rows)
    assert "mu=0.1" in rows["fedprox"]


def test_data_as_json(call):
    code, stdout, stderr = call(
        "data", "digits", "--seed", 3, "--set", "imbalance=4", "--set", "unseen=2", "--json"
    )
    assert (code, stderr) == (0, "")
    document, expected = json.loads(stdout), load("digits", imbalance=4, unseen=2, seed=3)
    assert document["clients"] == expected.describe()
    assert document["fingerprint"] == expected.fingerprint()
    assert document["picture"] is None
    assert sum(group["train"] for group in document["groups"]) == expected.train.sizes.sum()
    assert sum(group["unseen"] for group in document["groups"]) == 2
    assert not list(Path().iterdir())


def test_test_samples_that_clients_share_are_counted_once_a_group(call):
    code, stdout, _ = call("data", "digits", "--set", "test=group", "--json")
    assert code == 0
    document, expected = json.loads(stdout), load("digits", test="group")
    assert [client["test"] for client in document["clients"]] == expected.test.sizes.tolist()
    assert [group["test"] for group in document["groups"]] == [
        expected.test.sizes[c] for c in (0, 10, 16, 19, 21)
    ]


def test_data_as_tables_and_a_picture(call):
    options = ("partition.name=dirichlet", "partition.clients=12", "partition.beta=0.1")
    arguments = [part for option in options for part in ("--set", option)]
    code, stdout, _ = call("data", "digits", *arguments)
    assert code == 0, stdout
    assert "picture: runs/digits.png" in stdout
    assert Path("runs/digits.png").read_bytes().startswith(b"\x89PNG")
    rows = stdout.splitlines()
    start = next(number for number, line in enumerate(rows) if line.startswith("client "))
    histograms = [line.split()[-1] for line in rows[start + 1 : start + 13]]
    held = load(
        "digits", partition={"name": "dirichlet", "clients": 12, "beta": 0.1}
    ).label_counts()
    assert [[mark != "·" for mark in histogram] for histogram in histograms] == (held > 0).tolist()
    assert call("data", "digits", "--picture", "mine.svg")[0] == 0
    assert Path("mine.svg").exists()


def test_the_similarities_of_a_client_index(call):
    digits = load("digits")
    made = make_index(digits, lambda x, y: (x.flatten(1), torch.eye(10)[y]), made_by="pixels")
    made.write("index.safetensors")
    code, stdout, _ = call("data", "digits", "--index", "index.safetensors")
    assert code == 0, stdout
    assert "picture: runs/digits-index.png" in stdout
    assert Path("runs/digits-index.png").read_bytes().startswith(b"\x89PNG")
    code, stdout, stderr = call("data", "digits", "--index", "index.safetensors", "--json")
    assert (code, stderr) == (0, "")
    document = json.loads(stdout)
    assert (document["made_by"], document["digest"]) == ("pixels", made.digest())
    found = similarity_by_group(made, digits.groups, "features")
    assert document["similarity"]["features"]["within"] == pytest.approx(found["within"])
    assert document["group_names"] == list(digits.group_names)
    few = ("--set", "partition.name=iid", "--set", "partition.clients=5")
    code, _, stderr = call("data", "digits", "--index", "index.safetensors", *few)
    assert code == 2
    assert "none of its clients ('plain 1', 'plain 2', " in stderr
    assert "is in 'digits', which has 'client 0', " in stderr


def test_histogram_uses_the_full_height():
    assert _histogram([0, 1, 4, 8]) == "·▁▄█"
    assert _histogram([0, 0]) == "··"
    assert _histogram([1, 80]) == "▁█"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "unknown data 'digit' in equipoise data digit; did you mean 'digits'? Valid: "),
        (
            ["digits", "--set", "imbalanse=3"],
            "unknown key 'data.imbalanse' in --set imbalanse=3; did you mean",
        ),
        (
            ["digits", "--set", "partition.beta=3"],
            "--set partition.beta=3: data.partition must be a name or a mapping",
        ),
        (
            ["digits", "--picture", "a.bmp"],
            "cannot draw to 'a.bmp'; its name must end in .png, .svg, .pdf\n",
        ),
        # Only typed values are named.
        (
            ["cifar", "--set", "root=."],
            "equipoise data cifar, --set root=.: data.root: no files of data 'cifar' in ",
        ),
        (
            ["cifar", "--set", "root=.", "--seed", "1"],
            "equipoise data cifar, --seed, --set root=.: data.root: no files of data 'cifar' in ",
        ),
    ],
)
def test_mistakes_with_data(call, arguments, message):
    code, stdout, stderr = call("data", *arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"error: {message}")
    assert stderr.count("\n") == 1


# ---- names and widths ----------------------------------------------------------------------------

STRANGE = {"[city]": "[a]-0", "[/red]": ":fire:-1"}


@pytest.fixture
def strange(tmp_path):
    """Write two silos and a study whose names look like markup."""
    for group, name in STRANGE.items():
        (tmp_path / "silos" / name).mkdir(parents=True)
        rows = np.arange(24)
        np.savez(
            tmp_path / "silos" / name / "data.npz",
            x=np.stack([rows, rows % 2], 1).astype(float),
            y=rows % 2,
        )
        (tmp_path / "silos" / name / "client.yaml").write_text(yaml.safe_dump({"group": group}))
    data = {"name": "silos", "root": "silos"}
    base = {"data": data, "model": "logistic", "training": {"rounds": 1}}
    study = {
        "base": base,
        "methods": [{"name": "fedprox", "label": "prox[mu]"}],
        "settings": {"[bold]": {}},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base))


def test_names_that_look_like_markup_are_shown_as_they_are(call, strange):
    _, stdout, _ = call("data", "silos", "--set", "root=silos")
    rows = [line.split() for line in stdout.splitlines()]
    for client, (group, name) in enumerate(STRANGE.items()):
        assert [str(client), name, group] in [row[:3] for row in rows]
    _, stdout, _ = call("run", "run.yaml", "--out", "[dim]")
    assert set(STRANGE) <= {line.partition(" ")[0] for line in stdout.splitlines()}
    assert "files: [dim]\n" in stdout
    code, stdout, stderr = call("compare", "study.yaml")
    assert code == 0, stderr
    assert "[bold]/prox[mu]/seed0: done" in stderr
    assert "[bold]: one seed" in stdout
    words = [line.split() for line in stdout.splitlines()]
    assert sum(row[:1] == ["prox[mu]"] for row in words) == 2
    assert ["method", *STRANGE, "served", "worst"] in words
    assert next(row for row in reversed(words) if row[:1] == ["prox[mu]"])[-1] in STRANGE


LONG = [f"global.seen.{name}" for name in METRICS][:7]


def test_no_name_is_cut_where_no_terminal_sets_the_width(call, strange):
    _, stdout, _ = call("compare", "study.yaml", "--metrics", ", ".join([*LONG, "bytes_up"]))
    assert ["method", *LONG, "bytes_up"] in [line.split() for line in stdout.splitlines()]


def test_names_are_folded_where_a_terminal_is_narrow(call, strange, monkeypatch):
    monkeypatch.setattr(console, "UNLIMITED", 60)
    _, stdout, _ = call("compare", "study.yaml", "--metrics", ",".join(LONG))
    assert "…" not in stdout
    assert max(map(len, stdout.splitlines()[:-1])) <= 60


def test_compare_says_which_model_numbers_are_of_and_what_is_missing(call, strange):
    study = yaml.safe_load(Path("study.yaml").read_text())
    study["methods"].append("ditto")
    Path("study.yaml").write_text(yaml.safe_dump(study))
    _, stdout, _ = call("compare", "study.yaml", "--metrics", "mean,unseen.mean")
    rows = [line.split() for line in stdout.splitlines()]
    assert ["method", "model", "mean", "unseen.mean"] in rows
    assert ["method", "model", *STRANGE, "served", "worst"] in rows
    assert [row[1] for row in rows if row[:1] == ["ditto"]] == ["personal"] * 2
    assert [row[1] for row in rows if row[:1] == ["prox[mu]"]] == ["global"] * 2
    assert "warning: no run has a value of unseen.mean\n" in stdout


# ---- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "option", "what"),
    [
        (
            ["run", "--rounds", "1", "--out", "taken/x/y"],
            "with --out",
            "make the directory taken/x/y",
        ),
        (["compare", "study.yaml", "--out", "taken/x"], "with --out", "make the directory taken/x"),
        (
            ["compare", "study.yaml", "--markdown", "taken/t.md"],
            "with --markdown",
            "write taken/t.md",
        ),
        (["compare", "study.yaml", "--csv", "taken/t.csv"], "with --csv", "write taken/t.csv"),
        (["data", "digits", "--picture", "taken/t.png"], "with --picture", "write taken/t.png"),
        (
            ["flower", "new", "taken/app", "--experiment", "run.yaml"],
            "DIR",
            "make the directory taken/app",
        ),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    call, strange, arguments, option, what
):
    Path("taken").touch()
    message = f"error: cannot {what}: taken is not a directory; choose another {option}\n"
    assert call(*arguments) == (2, "", message)
    assert not Path("runs").exists()


def test_the_file_of_each_seeds_values_is_checked_too(call, strange):
    Path("t-seeds.csv").mkdir()
    message = "error: cannot write t-seeds.csv: it is a directory; choose another with --csv\n"
    assert call("compare", "study.yaml", "--csv", "t.csv") == (2, "", message)


def test_trying_a_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old").write_text("kept")
    for path in ("new/deep", "there/new", "there", "new/../other"):
        paths.check_directory(tmp_path / path, "")
    for path in ("new/deep/file", "there/file", "there/old"):
        paths.check_file(tmp_path / path, "")
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "old"]
    assert (tmp_path / "there" / "old").read_text() == "kept"


def test_permissions_alone_do_not_tell(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(paths, "TemporaryFile", refuse)
    says = (
        r"cannot make the directory .*x/y: nothing can be made in .* \(Permission denied\); "
        "choose another"
    )
    with pytest.raises(InputError, match=says):
        paths.check_directory(tmp_path / "x" / "y", "choose another")
    with pytest.raises(
        InputError, match="cannot write to the directory .*: nothing can be made in"
    ):
        paths.check_directory(tmp_path, "choose another")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_tables_are_shown_even_if_they_cannot_be_written(call, strange, monkeypatch, options):
    def fail(path, text):
        raise InputError(f"cannot write {path}: the disk is full")

    monkeypatch.setattr("equipoise.cli.commands.compare._write", fail)
    code, stdout, stderr = call("compare", "study.yaml", "--markdown", "t.md", *options)
    assert code == 2
    assert "prox[mu]" in stdout
    assert stderr.endswith("error: cannot write t.md: the disk is full\n")


def test_the_tables_are_written_even_if_nobody_reads_them(call, strange, monkeypatch):
    def leave(*_):
        raise SystemExit(1)

    monkeypatch.setattr("equipoise.cli.show.study.show_results", leave)
    assert call("compare", "study.yaml", "--markdown", "t.md")[0] == 1
    assert "prox[mu]" in Path("t.md").read_text()


# ---- the front page ------------------------------------------------------------------------------

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"


def test_the_examples_of_the_front_page_and_of_extending(monkeypatch):
    # What the pages register must not stay with the tests that come after.
    monkeypatch.setattr(methods, "_PARTS", dict(methods._PARTS))
    monkeypatch.setattr(methods, "_METHODS", set(methods._METHODS))
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    monkeypatch.setattr(data, "SOURCES", dict(data.SOURCES))
    monkeypatch.setattr(tasks, "_TASKS", dict(tasks._discover()))
    monkeypatch.setattr(metrics, "_METRICS", dict(metrics._discover()))
    for page, least in ((README, 5), (DOCS / "extending.md", 10)):
        failed, tried = doctest.testfile(
            str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
        )
        assert tried >= least
        assert failed == 0


def test_the_experiment_and_the_commands_of_the_page_on_the_command_line():
    text = (DOCS / "command_line.md").read_text()
    experiment_from(yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0]))
    commands = {line.split()[1] for line in text.splitlines() if line.startswith("equipoise ")}
    assert commands == {
        "methods",
        "explain",
        "data",
        "run",
        "compare",
        "report",
        "advise",
        "cache",
    }


def test_the_page_on_the_command_line_names_the_commands_with_json(call):
    text = (DOCS / "command_line.md").read_text()
    named = re.search(r"`--help`; (.*?)\s+have `--json`", text, re.DOTALL)[1]
    commands = {"run", "methods", "explain", "data", "compare", "report", "advise", "cache"}
    commands |= {"flower new"}
    able = {command for command in commands if "--json" in call(*command.split(), "--help")[1]}
    assert set(re.findall("`(.*?)`", named)) == able


@pytest.fixture
def three_stored(tmp_path, monkeypatch):
    """A cache directory with an entry, one that is damaged, and a file of the user."""
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    for digit in "ab":
        rows = lambda: iter([torch.zeros(100, 3)])  # noqa: E731
        stored = cached(digit * 16, (100, 3), torch.float32, rows, f"zeros {digit}\x1b[2J")
    stored.path.write_bytes(b"damaged")
    (tmp_path / "cache" / "arrays" / "mine.npy").write_text("mine")
    return tmp_path / "cache"


def test_cache_lists_entries(call, three_stored):
    code, stdout, stderr = call("cache")
    assert (code, stderr) == (0, "")
    title, *rows = (" ".join(line.split()) for line in stdout.splitlines())
    assert title == f"Cache directory {three_stored}:"
    assert f"{'a' * 12} complete 1.4 kB 0.0 zeros a\\x1b[2J, 100 x 3" in rows
    # The 7 bytes of the array and the 12 of its description.
    assert f"{'b' * 12} damaged 19 B 0.0 zeros b\\x1b[2J" in rows
    assert "2 entries, 1.4 kB; days since the last use" in stdout
    assert "mine" not in stdout
    document = json.loads(call("cache", "--json")[1])
    assert document["directory"] == str(three_stored)
    assert {entry["key"][0]: entry["state"] for entry in document["entries"]} == {
        "a": "complete",
        "b": "damaged",
    }
    assert document["removed"] == document["in_use"] == []


def test_cache_removes_entries(call, three_stored):
    folder = three_stored / "arrays"
    code, stdout, _ = call("cache", "--prune", "1")
    assert code == 0
    removed, _, left = stdout.partition("Cache directory")
    assert "b" * 12 in removed
    assert "a" * 12 in left
    assert {path.name for path in folder.iterdir()} == {
        f"{'a' * 16}.npy",
        f"{'a' * 16}.txt",
        "mine.npy",
    }
    document = json.loads(call("cache", "--clear", "--json")[1])
    assert [entry["key"] for entry in document["removed"]] == ["a" * 16]
    assert [path.name for path in folder.iterdir()] == ["mine.npy"]
    assert f"The cache directory {three_stored} has no entries." in call("cache")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prune", "-1"], "--prune must be a number of days of at least 0, got -1"),
        (["--prune", "nan"], "--prune must be a number of days of at least 0, got nan"),
        (["--prune", "3", "--clear"], "--prune and --clear cannot be used together"),
    ],
)
def test_cache_refuses_options(call, three_stored, options, message):
    code, stdout, stderr = call("cache", *options)
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert len(list((three_stored / "arrays").iterdir())) == 5


def test_a_mistyped_demo_is_suggested(call):
    code, _, err = call("compare", "dmeo")
    assert code == 2
    assert "unknown study 'dmeo'; did you mean 'demo'? Valid: a YAML file, demo" in err


def test_the_demo_is_a_valid_study():
    study = load_study(README.parent / "equipoise" / "demo.yaml")
    assert study.methods == ("fedavg", "local", "central", "fedbn", "ditto")
    assert study.seeds == (0, 1, 2)
    assert study.jobs[0].experiment.data["imbalance"] == 10


def test_the_front_page_fits_a_screen_and_its_links_hold():
    text = README.read_text()
    assert len(text.splitlines()) < 120
    named = re.findall(r"(?:\]\(|src=\")(?!https?:)([^)#\"]+)", text)
    assert len(named) > 20
    assert "docs/results/demo-clients.png" in named
    assert [name for name in named if not (README.parent / name).is_file()] == []


def test_the_front_page_counts_the_methods_that_there_are():
    purposes = yaml.safe_load((DOCS / "methods.yaml").read_text())["purposes"]
    rows = {
        row.split("|")[1].strip(): row.split("|")[2].strip()
        for row in README.read_text().splitlines()
        if row.startswith("| methods ")
    }
    assert rows == {
        "methods for fairness between clients or groups": str(
            len(purposes["fairness between clients or groups"])
        ),
        "methods with personal models": str(len(purposes["personal models"])),
    }


def test_python_runs_the_package_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == equipoise.__version__


# ---- files from others ---------------------------------------------------------------------------


def test_names_in_a_summary_from_others_do_not_act_on_the_terminal(call):
    run_json(call, "--rounds", 1, "--out", "a", "--no-report")
    text = Path("a/summary.json").read_text()
    Path("a/summary.json").write_text(text.replace('"fedavg"', r'"fed\u001b[2J\navg"'))
    Path("a/SHA256SUMS").unlink()
    code, stdout, _ = call("run", "a/config.yaml", "--resume", "--no-report")
    assert code == 0
    assert r"fed\x1b[2J\navg on digits" in stdout
    assert "\x1b" not in stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--device", "cpu:x"], 2),
        (["--set", "seed=" + "9" * 5000], 2),
        (["--set", "data=&a {name: *a}"], 2),
        (["--set", "training={<<: [rounds]}"], 2),
        (["--set", "data.name=" + "x" * 1_000_000], 2),
        (["--set", 'data.name="\\e[2J"'], 2),
    ],
    ids=["device", "digits", "alias", "merge", "long", "escape"],
)
def test_odd_values_are_one_short_line(arguments, code, call):
    found, stdout, stderr = call("run", *arguments)
    assert (found, stdout, stderr.count("\n")) == (code, "", 1)
    assert stderr[:-1].isprintable()
    assert len(stderr) < 2200
