"""The generated app is accepted by Flower without changes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from typer.testing import CliRunner

from equipoise import methods
from equipoise.cli import app
from equipoise.config import experiment_from, load_experiment
from equipoise.errors import InputError
from equipoise.flower import QUIET
from equipoise.flower.new import new_app
from equipoise.methods import describe


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# a remark\nmethod: {name: ditto, lam: 0.5}\ndata: digits\n")
    return path


# Flower itself uses deprecated functions of the library.
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_accepts_the_app(experiment, tmp_path, monkeypatch):
    new_app(tmp_path / "my-app", experiment)
    monkeypatch.chdir(tmp_path)
    config, warnings = load_and_validate(tmp_path / "my-app" / "pyproject.toml")
    assert warnings == []
    assert config["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "app:server",
        "clientapp": "app:client",
    }
    assert set(config["tool"]["flwr"]["app"]["config"]) == {"out", "set"}
    assert len(build_fab_from_disk(tmp_path / "my-app")) > 500


def test_a_norm_bound_is_suggested_and_off(experiment, tmp_path):
    new_app(tmp_path / "my-app", experiment)
    text = (tmp_path / "my-app" / "experiment.yaml").read_text()
    assert load_experiment(tmp_path / "my-app" / "experiment.yaml").method.guard is None
    suggested = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#   method: ")]
    assert len(suggested) == 2
    guards = [
        experiment_from({"data": "digits", **yaml.safe_load(line)}).method.guard
        for line in suggested
    ]
    assert [guard.bound for guard in guards] == [None, 2.0]
    assert suggested[1] == "method: {name: ditto, lam: 0.5, guard: {name: norm, bound: 2.0}}"
    # With a guard no advice is needed, and without updates there is nothing to guard.
    for number, method in enumerate(("{name: ditto, guard: norm}", "local")):
        experiment.write_text(f"method: {method}\ndata: digits\n")
        new_app(tmp_path / f"app-{number}", experiment)
        assert "#   method" not in (tmp_path / f"app-{number}" / "experiment.yaml").read_text()


@pytest.mark.parametrize(
    "method",
    [
        "",
        "method: ditto",
        "method:\n  name: fedrep\n  weights: uniform\n  aggregation: {name: qffl, q: 3.0}",
        "method: {name: fedbabu, tune_epochs: 7, sampling: size}",
        "method: {name: client2vec, host: {name: fedprox, mu: 1e-05}}",
    ],
)
def test_the_suggested_guard_changes_nothing_else_of_the_method(method, experiment, tmp_path):
    experiment.write_text(f"{method}\ndata: digits\n")
    new_app(tmp_path / "my-app", experiment)
    text = (tmp_path / "my-app" / "experiment.yaml").read_text()
    suggested = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#   method: ")]
    before = load_experiment(experiment).method
    for line in suggested:
        after = experiment_from({"data": "digits", **yaml.safe_load(line)}).method
        assert after.guard.name == "norm"
        assert describe(after) == describe(
            methods.build(**{**describe(before), "guard": after.guard})
        )


def test_the_app_holds_both_halves(experiment, tmp_path):
    new_app(tmp_path / "my-app", experiment)
    found: dict = {"__file__": str(tmp_path / "my-app" / "app.py")}
    exec((tmp_path / "my-app" / "app.py").read_text(), found)
    assert isinstance(found["server"], ServerApp)
    assert isinstance(found["client"], ClientApp)


def test_the_experiment_is_copied_and_says_how_many_clients_there_are(experiment, tmp_path):
    new_app(tmp_path / "my-app", experiment)
    text = (tmp_path / "my-app" / "experiment.yaml").read_text()
    assert text.startswith(experiment.read_text())
    made = load_experiment(tmp_path / "my-app" / "experiment.yaml")
    assert made.flower.clients == 22
    assert "num-supernodes=22 " in (tmp_path / "my-app" / "README.md").read_text()
    assert made.method.local.lam == 0.5


OWN = """
from equipoise import models

@models.register
def small(shape, classes):
    return models.build("mlp", shape=shape, classes=classes, hidden=(2,))
"""
WRITE = """
from pathlib import Path
from equipoise.flower.new import new_app
new_app(Path("app"), Path("mine.yaml"))
"""
READ = """
import sys
sys.path.append(sys.argv[1])
import app
from equipoise.config import load_experiment
print(load_experiment(app.EXPERIMENT).model)
"""


def python(code, *arguments, cwd):
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)


def test_code_of_ones_own_travels_with_the_app(tmp_path):
    """From another directory, with the app importable, as in Flower."""
    places = [tmp_path / "here", tmp_path / "elsewhere"]
    for place in places:
        place.mkdir()
    (places[0] / "nets.py").write_text(OWN)
    (places[0] / "mine.yaml").write_text("imports: nets.py\ndata: digits\nmodel: small\n")
    python(WRITE, cwd=places[0])
    assert (places[0] / "app" / "nets.py").read_text() == OWN
    (places[0] / "nets.py").unlink()
    done = python(READ, str(places[0] / "app"), cwd=places[1])
    assert done.stdout == "{'name': 'small'}\n"


def test_own_code_must_not_take_the_place_of_the_app(experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "app.py").write_text("")
    experiment.write_text("imports: app.py\ndata: digits\n")
    with pytest.raises(InputError, match=r"imports 'app.py', a name that the app uses itself"):
        new_app(tmp_path / "my-app", experiment)
    assert not (tmp_path / "my-app").exists()
    del sys.modules["app"]


def test_what_the_experiment_says_of_flower_stands(experiment, tmp_path):
    experiment.write_text(experiment.read_text() + "flower: {clients: 3}\n")
    new_app(tmp_path / "my-app", experiment)
    assert load_experiment(tmp_path / "my-app" / "experiment.yaml").flower.clients == 3


@pytest.mark.parametrize(
    "content",
    [
        "{method: {name: ditto, lam: 0.5}, data: digits}",
        "{method: {name: ditto, lam: 0.5}, data: digits, flower: {timeout: 30}}\n",
        "method: {name: ditto, lam: 0.5}\ndata: digits\nflower: {timeout: 30}\n",
        "method: {name: ditto, lam: 0.5}\ndata: digits\nflower:\n",
        "method: {name: ditto, lam: 0.5}\ndata: digits\n...\n",
    ],
)
def test_clients_are_counted_however_the_experiment_is_written(content, experiment, tmp_path):
    experiment.write_text(content)
    new_app(tmp_path / "my-app", experiment)
    made = load_experiment(tmp_path / "my-app" / "experiment.yaml")
    assert made.flower.clients == 22
    assert made.flower.timeout == (30 if "timeout" in content else 600)
    assert (made.method.local.lam, made.data["name"]) == (0.5, "digits")
    assert "num-supernodes=22 " in (tmp_path / "my-app" / "README.md").read_text()


def test_the_words_of_a_section_are_kept(experiment, tmp_path):
    experiment.write_text("data: digits\nflower:\n    timeout: 30  # seconds\nseed: 1 # mine\n")
    new_app(tmp_path / "my-app", experiment)
    lines = (tmp_path / "my-app" / "experiment.yaml").read_text().splitlines()
    assert lines.pop(2) == "    clients: 22  # that must have registered before round 1"
    kept = experiment.read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert all(line.startswith("#") for line in lines[len(kept) :] if line)


def test_data_that_are_not_here_are_no_obstacle(experiment, tmp_path):
    experiment.write_text("data: {name: silos, root: /nowhere, classes: 2}\n")
    new_app(tmp_path / "my-app", experiment)
    assert load_experiment(tmp_path / "my-app" / "experiment.yaml").flower.clients == 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("my_app", "data: digits", "'my_app' is not a valid name for a Flower app"),
        ("a" * 33, "data: digits", "is not a valid name for a Flower app"),
        ("my-app", "data: digits\nmethod: central", "method 'central' pools all data"),
        ("my-app", "data: digist", "unknown data 'digist'"),
        (
            "my-app",
            "{data: digits, method: scaffold, flower: {privacy: {clip: 1}}}",
            "mine.yaml: flower.privacy protects parameters, but Scaffold also uploads "
            "control_change",
        ),
    ],
)
def test_what_cannot_become_an_app_is_refused(name, content, says, experiment, tmp_path):
    experiment.write_text(content)
    with pytest.raises(InputError, match=says):
        new_app(tmp_path / name, experiment)
    assert not (tmp_path / name).exists()


def test_what_would_be_written_is_checked_before_it_is(experiment, tmp_path):
    (tmp_path / "silos" / "clinic-0").mkdir(parents=True)
    np.savez(tmp_path / "silos" / "clinic-0" / "data.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2)
    experiment.write_text(
        f"data: {{name: silos, root: {tmp_path / 'silos'}}}\nflower: {{min_clients: 2}}"
    )
    with pytest.raises(
        InputError, match=r"mine.yaml: flower.min_clients is 2, more than the flower.clients=1"
    ):
        new_app(tmp_path / "my-app", experiment)
    assert not (tmp_path / "my-app").exists()


def test_nothing_is_written_over(experiment, tmp_path):
    new_app(tmp_path / "my-app", experiment)
    with pytest.raises(InputError, match="exists and is not empty"):
        new_app(tmp_path / "my-app", experiment)


def test_the_command_writes_and_names_the_files(experiment, tmp_path):
    result = CliRunner().invoke(
        app, ["flower", "new", str(tmp_path / "my-app"), "--experiment", str(experiment)]
    )
    assert result.exit_code == 0
    names = ["app.py", "experiment.yaml", "pyproject.toml", "README.md"]
    assert [Path(line).name for line in result.stdout.split()] == names
    tomllib.loads((tmp_path / "my-app" / "pyproject.toml").read_text())
    again = CliRunner().invoke(
        app, ["flower", "new", str(tmp_path / "my-app"), "--experiment", str(experiment)]
    )
    assert again.exit_code == 2


def test_flowers_own_commands_run_without_telemetry_update_check_and_installation(tmp_path):
    """The command becomes Flower's, and its environment is what Flower sees."""
    (tmp_path / "flower-superlink").write_text("#!/bin/sh\nenv; echo $@\n")
    (tmp_path / "flower-superlink").chmod(0o755)
    program = (
        "import sys; sys.executable = sys.argv.pop(1) + '/python'; "
        "from equipoise.cli import app; app(prog_name='equipoise')"
    )
    done = subprocess.run(
        [
            sys.executable, "-c", program, str(tmp_path),
            "flower", "superlink", "--insecure", "--help", "--port", "1",
        ],
        capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert {f"{name}={value}" for name, value in QUIET.items()} <= set(lines)
    assert lines[-1] == "--insecure --help --port 1"


def test_who_wants_telemetry_can_have_it(tmp_path):
    program = (
        "import os; os.environ['FLWR_TELEMETRY_ENABLED'] = '1'; import equipoise.flower; "
        "print(os.environ['FLWR_TELEMETRY_ENABLED'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"


def test_a_study_is_refused(tmp_path):
    study = tmp_path / "study.yaml"
    study.write_text("{base: {data: digits}, methods: [fedavg]}")
    done = CliRunner().invoke(
        app, ["flower", "new", str(tmp_path / "my-app"), "--experiment", str(study)]
    )
    assert done.exit_code == 2
    assert f"{study} is a study, not an experiment; run it with: equipoise compare" in done.stderr
    assert not (tmp_path / "my-app").exists()
