"""User-defined methods, models and sources in files, on the command line and in processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from equipoise import data, load, methods, models, train
from equipoise.config import load_experiment
from equipoise.data import Iid, Source
from equipoise.errors import InputError
from equipoise.figures import embed_features, loss_surface
from equipoise.figures.__main__ import main as figures
from equipoise.figures.opened import open_run
from equipoise.imports import import_own
from equipoise.report import write_report

OWN = '''
from dataclasses import dataclass

import torch
from torch import nn

from equipoise import data, models
from equipoise.data import Iid, Source
from equipoise.method import LocalRule, Phase
from equipoise.methods import register
from equipoise.models.base import Model


@register("halved", paper="our own")
@dataclass(frozen=True)
class Halved(LocalRule):
    """Half the loss: as if the learning rate were half as large."""

    share: float = 0.5

    def phases(self):
        return (Phase(loss=lambda client: self.share * client.task_loss()),)


@models.register
def oneunit(shape, classes, *, width: int = 1):
    return Model(nn.Sequential(nn.Flatten(), nn.Linear(shape[0], width)), nn.Linear(width, classes))


@data.register
def coins(*, seed: int, tosses: int = 120):
    y = torch.arange(tosses) % 2
    noise = torch.randn(tosses, 3, generator=torch.Generator().manual_seed(seed))
    return Source(x=noise + y.unsqueeze(1), y=y, name="coins"), Iid(4)
'''

STUDY = {
    "base": {
        "imports": "mine.py",
        "data": {"name": "coins", "tosses": 160},
        "model": {"name": "oneunit", "width": 2},
        "training": {"rounds": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
    },
    "methods": ["fedavg", {"name": "halved", "share": 0.25}],
    "settings": {"plain": {}, "faster": {"training.optimizer.lr": 0.4}},
}


def python(code, *arguments, cwd):
    """Run Python in another process; return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], cwd=cwd, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def equipoise(*arguments, cwd):
    return python("from equipoise.cli import main; main()", *arguments, cwd=cwd)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    return tmp_path


@pytest.mark.slow
def test_a_study_of_own_code_runs_in_processes_of_its_own(place):
    code, printed, errors = equipoise(
        "compare", "study.yaml", "--jobs", "2", "--out", "runs", cwd=place
    )
    assert code == 0, errors
    assert "halved" in printed
    show = """
import sys, torch, equipoise
runs = [equipoise.load(f"runs/{run}/seed0", trust=True) for run in sys.argv[1:]]
print(torch.equal(*(run.head.weight for run in runs)))
"""
    # A quarter of the loss with four times the learning rate is plain training, to the last bit.
    assert python(show, "plain/fedavg", "faster/halved", cwd=place)[1] == "True\n"
    assert python(show, "plain/fedavg", "plain/halved", cwd=place)[1] == "False\n"
    config = yaml.safe_load((place / "runs/plain/halved/seed0/config.yaml").read_text())
    assert config["imports"] == ["mine.py"]
    code, printed, errors = equipoise("compare", "study.yaml", "--out", "runs", cwd=place)
    assert code == 0, errors
    assert "halved" in printed


@pytest.mark.slow
def test_a_run_takes_own_code_along(place, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (place / "one.yaml").write_text(
        "{imports: mine.py, method: halved, data: coins, model: oneunit, training: {rounds: 1}}"
    )
    code, _, errors = equipoise("run", place / "one.yaml", "--out", "run", cwd=elsewhere)
    assert code == 0, errors
    (place / "mine.py").unlink()
    (elsewhere / "mine.py").write_text("raise RuntimeError('not this one')")
    resume = "run", elsewhere / "run" / "config.yaml", "--resume"
    code, _, errors = equipoise(*resume, cwd=place)
    assert (code, errors.count("\n")) == (2, 1)
    assert (
        f"would execute {elsewhere / 'run' / 'mine.py'}; read it, and if you trust it, pass "
        "trust=True" in errors
    )
    code, _, errors = equipoise(*resume, "--trust", cwd=place)
    assert code == 0, errors
    # Two runs with the same code can be loaded together.
    shutil.copytree(elsewhere / "run", elsewhere / "copy")
    load = (
        f"import equipoise; [equipoise.load({str(elsewhere)!r} + '/' + run, trust=True) "
        "for run in ('run', 'copy')]"
    )
    assert python(load, cwd=place)[0] == 0
    assert "InputError: the run in" in python(load.replace("trust=True", ""), cwd=place)[2]
    (elsewhere / "copy" / "mine.py").write_text(OWN + "# changed")
    assert "under the name 'mine'; rename the file" in python(load, cwd=place)[2]


def test_the_command_line_knows_own_code(place):
    code, printed, errors = equipoise("methods", "--import", "mine.py", "--json", cwd=place)
    assert code == 0, errors
    assert "halved" in {method["name"] for method in json.loads(printed)}
    code, printed, errors = equipoise("explain", "halved", "--import", "mine.py", cwd=place)
    assert code == 0, errors
    assert "method.share (with halved): a number; default 0.5" in printed
    code, printed, errors = equipoise("data", "coins", "--import", "mine", "--json", cwd=place)
    assert code == 0, errors
    own = (
        "--import",
        "mine.py",
        "--method",
        "halved",
        "--data",
        "coins",
        "--model",
        "oneunit",
        "--rounds",
        "1",
    )
    code, printed, errors = equipoise("run", *own, "--out", "run", "--json", cwd=place)
    assert code == 0, errors
    assert errors == f"importing {place / 'mine.py'}\n"
    code, _, errors = equipoise("run", "run/config.yaml", "--resume", "--trust", cwd=place)
    assert code == 0, errors


HARMFUL = "import pathlib\npathlib.Path(__file__).with_name('executed').touch()\n"


@pytest.fixture
def strangers_run(tmp_path):
    """Return a run directory whose code would leave a trace."""
    train(data.load("digits"), rounds=1, out=tmp_path / "run", sections={"imports": ["harm.py"]})
    (tmp_path / "run" / "SHA256SUMS").unlink()
    (tmp_path / "run" / "harm.py").write_text(HARMFUL)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "use",
    [
        load,
        open_run,
        loss_surface,
        embed_features,
        lambda run: figures(["embedding", str(run), "--out", str(run / "x.png")]) == 1 and 1 / 0,
    ],
    ids=["load", "open_run", "loss_surface", "embed_features", "figures"],
)
def test_code_of_a_run_directory_is_not_executed(use, strangers_run):
    with pytest.raises((InputError, ZeroDivisionError)):
        use(strangers_run)
    assert not (strangers_run / "executed").exists()
    assert str(strangers_run) not in sys.path


def test_code_of_a_run_directory_is_executed_on_ones_word(strangers_run, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    load(strangers_run, trust=True)
    assert (strangers_run / "executed").exists()
    # Imported code is not executed again, so it needs no further consent.
    (strangers_run / "executed").unlink()
    load(strangers_run)
    assert not (strangers_run / "executed").exists()
    del sys.modules["harm"]


@pytest.mark.parametrize("finished", [True, False])
def test_a_report_needs_no_code(finished, strangers_run):
    if not finished:
        (strangers_run / "summary.json").unlink()
    assert write_report([strangers_run]).exists()
    assert not (strangers_run / "executed").exists()


def test_a_report_on_a_task_of_its_own_says_what_it_would_execute(strangers_run):
    summary = json.loads((strangers_run / "summary.json").read_text())
    (strangers_run / "summary.json").write_text(json.dumps({**summary, "task": "closeness"}))
    with pytest.raises(InputError, match=f"would execute {strangers_run}/harm.py"):
        write_report([strangers_run])
    assert not (strangers_run / "executed").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{imports: harm.py, data: digits, trainin: {}}", "unknown key 'trainin'"),
        (
            "{imports: harm.py, data: digits, training: {rounds: ten}}",
            "training.rounds must be a whole number",
        ),
        ("{imports: harm.py, data: digits, machine: {device: gpu}}", "unknown device 'gpu'"),
        ("{imports: harm.py, data: digits, seed: -1}", "seed must be from 0"),
        ("{imports: [harm.py, 3], data: digits}", "imports must be a list"),
        ("{imports: harm.py}", "names no data"),
    ],
)
def test_an_experiment_is_checked_before_its_code_is_executed(content, says, tmp_path):
    (tmp_path / "harm.py").write_text(HARMFUL)
    (tmp_path / "one.yaml").write_text(content)
    with pytest.raises(InputError, match=says):
        load_experiment(tmp_path / "one.yaml")
    assert not (tmp_path / "executed").exists()


def test_code_that_changed_since_a_run_began_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "changing.py").write_text("VALUE = 1\n")
    (tmp_path / "one.yaml").write_text(
        "{imports: changing.py, data: digits, training: {rounds: 1}}"
    )
    load_experiment(tmp_path / "one.yaml").run(tmp_path / "run")
    (tmp_path / "changing.py").write_text("VALUE = 2\n")
    del sys.modules["changing"]
    changed = load_experiment(tmp_path / "one.yaml")
    with pytest.raises(
        InputError, match=r"changing.py differs from the copy there, with which the run started"
    ):
        changed.run(tmp_path / "run", resume=True)
    del sys.modules["changing"]


@pytest.fixture
def own_registries(monkeypatch):
    """Let a test register what it likes: it does not stay with the tests that come after."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(methods, "_PARTS", dict(methods._discover()))
    monkeypatch.setattr(methods, "_METHODS", set(methods._METHODS))
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    monkeypatch.setattr(data, "SOURCES", dict(data.SOURCES))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("absent.py", None, "--import: imports: no file 'absent.py' in "),
        (
            "absent",
            None,
            "--import: imports: 'absent' cannot be imported (ModuleNotFoundError: No module named "
            "'absent')",
        ),
        (
            "broken.py",
            "1 / 0",
            "--import: imports: 'broken.py' cannot be imported (ZeroDivisionError: division by "
            "zero)",
        ),
        (
            "leaving.py",
            "raise SystemExit(3)",
            "--import: imports: 'leaving.py' cannot be imported (SystemExit: 3)",
        ),
        ("json.py", "", "under the name 'json'; rename the file"),
        (
            "taken.py",
            OWN.replace('"halved"', '"fedavg"'),
            "the name 'fedavg' of Halved is taken by FedAvg",
        ),
        (
            "taken.py",
            OWN.replace("oneunit", "mlp"),
            "the name 'mlp' of a model is taken by equipoise.models.dense:mlp",
        ),
        (
            "taken.py",
            OWN.replace("def coins", "def mnist"),
            "the name 'mnist' of a source is taken by equipoise.data.mnist:recipe",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(call, own_registries, tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    code, _, errors = call("run", "--import", name, "--out", "run")
    assert code == 2
    assert says in " ".join(errors.split())
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


def test_registering_again_is_no_conflict():
    assert models.register(models.register(own_model)) is own_model
    assert data.register(data.register(own_source)) is own_source
    assert data.load("own_source").clients == 2
    del models.MODELS["own_model"], data.SOURCES["own_source"]


def own_model(shape, classes):
    return models.build("mlp", shape=shape, classes=classes)


def own_source(*, seed):
    import torch

    return Source(x=torch.zeros(20, 1), y=torch.arange(20) % 2), Iid(2)


def test_a_file_is_imported_once(tmp_path, monkeypatch):
    (tmp_path / "counted_once.py").write_text(
        "import os\nwith open('count', 'a') as f:\n    f.write('x')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    import_own(["counted_once.py", "counted_once.py"])
    import_own(["counted_once"])
    assert (tmp_path / "count").read_text() == "x"
    with pytest.raises(InputError, match="no file 'other.py'"):
        import_own(["counted_once", "other.py"])
