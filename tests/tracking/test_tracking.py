"""Trackers in general: options, names of values, and user-defined trackers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import yaml

from equipoise import Callback, Evaluation, Training, tracking
from equipoise.config import experiment_from, load_experiment
from equipoise.errors import InputError
from equipoise.study import study_from
from tests.attributed import attributed
from tests.run.small import small_run

SHORT = {"rounds": 2}
OWN = """
from dataclasses import dataclass
from pathlib import Path

from equipoise import Callback, tracking


@tracking.register
@dataclass
class Noted(Callback):
    file: str
    values: bool = False

    def round(self, run):
        with Path(self.file).open("a") as file:
            loss = f"{run.record['train_loss']:.6f}"
            file.write(f"{run.method} {run.config['seed']} {run.round} {loss}\\n")
"""


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(tracking, "TRACKERS", dict(tracking.TRACKERS))


def noted(folder, name):
    """Write a user-defined tracker to a file; each test imports another one."""
    (folder / f"{name}.py").write_text(OWN)
    return str(folder / f"{name}.py")


def test_a_tracker_may_be_named_alone_or_in_a_list():
    made = experiment_from({"data": "digits", "tracking": "tensorboard"})
    assert made.tracking == ({"name": "tensorboard"},)
    both = [{"name": "mlflow", "uri": "runs", "experiment": "adult"}, "tensorboard"]
    made = experiment_from({"data": "digits", "tracking": both})
    assert made.tracking == (
        {"name": "mlflow", "uri": "runs", "experiment": "adult"},
        {"name": "tensorboard"},
    )
    assert experiment_from({"data": "digits"}).tracking == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "tensorbord",
            "unknown tracker 'tensorbord' in tracking of a.yaml; did you mean 'tensorboard'",
        ),
        (
            {"name": "mlflow", "url": "x"},
            "unknown key 'tracking.url' in a.yaml; did you mean 'tracking.uri'",
        ),
        ({"name": "mlflow", "uri": 3}, "a.yaml: tracking.uri must be text or null, got 3"),
        (
            [3],
            "a.yaml: tracking must be a name or a mapping with a name, got 3; valid names: "
            "tensorboard, mlflow",
        ),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(InputError, match=message):
        experiment_from({"data": "digits", "tracking": given}, "a.yaml")


def test_a_missing_package_is_named_before_training(tmp_path, monkeypatch):
    @tracking.register
    @dataclass
    class Elsewhere(Callback):
        packages = ("package_that_nobody_has",)

    made = experiment_from({"data": "digits", "training": SHORT, "tracking": "Elsewhere"})
    with pytest.raises(
        InputError,
        match=r"tracking: Elsewhere needs package_that_nobody_has: pip install 'equipoise",
    ):
        made.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_values_have_names_for_every_table():
    class Names(Callback):
        def evaluated(self, run):
            self.found, self.results = tracking.scores(run), run.results("test")

        def round(self, run):
            self.of_round, self.record = tracking.round_values(run), run.record

    names = Names()
    small_run(
        None,
        "ditto",
        federation=attributed(unseen=[3]),
        model="logistic",
        training=Training(rounds=1),
        evaluation=Evaluation(metrics=["auroc"], min_cell=1),
        callbacks=[names],
    )
    seen = names.results["personal"]["seen"]
    assert names.found["test/personal/seen/mean"] == seen["mean"]
    assert names.found["test/personal/seen/groups/all"] == seen["groups"]["all"]
    assert (
        names.found["test/personal/seen/metrics/auroc/worst_group"]
        == seen["metrics"]["auroc"]["worst_group"]
    )
    sex = seen["attributes"]["sex"]
    name = "test/personal/seen/attributes/sex/"
    assert names.found[f"{name}demographic_parity_ratio"] == sex["demographic_parity_ratio"]
    assert names.found[f"{name}values/Female/tpr"] == sex["values"]["Female"]["tpr"]
    assert "val/global/unseen/mean" in names.found
    assert not [name for name in names.found if name.endswith("_id")]
    assert names.of_round["round/train_loss"] == names.record["train_loss"]


def test_names_with_other_characters_stay_apart():
    class Of:
        def results(self, split):
            return {
                "global": {"seen": {"groups": {"a(b": 1.0, "a)b": 2.0}, "worst_group_name": "a(b"}}
            }

    found = tracking.scores(Of())
    assert found == {
        f"{split}/global/seen/groups/a_b{more}": value
        for split in ("test", "val")
        for more, value in (("", 1.0), ("_", 2.0))
    }


def test_a_tracker_of_ones_own_follows_runs_and_studies(tmp_path):
    own, file = noted(tmp_path, "noted_runs"), tmp_path / "values.txt"
    base = {
        "data": "digits",
        "imports": own,
        "training": SHORT,
        "tracking": {"name": "Noted", "file": str(file)},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(base))
    run = load_experiment(path).run(tmp_path / "run")
    losses = [row["train_loss"] for row in run.trainer.rounds]
    assert file.read_text().splitlines() == [
        f"fedavg 0 {n} {loss:.6f}" for n, loss in enumerate(losses, start=1)
    ]
    file.unlink()
    study = {"base": base, "methods": ["fedavg", "fedprox"], "seeds": [0, 1]}
    study_from(study).run(tmp_path / "study")
    told = {tuple(line.split()[:3]) for line in file.read_text().splitlines()}
    assert told == {(m, s, r) for m in ("fedavg", "fedprox") for s in "01" for r in "12"}
    # A finished study is not tracked again, even with another tracker.
    file.unlink()
    study_from(
        {**study, "base": {**base, "tracking": {"name": "Noted", "file": "other", "values": True}}}
    ).run(tmp_path / "study")
    assert not file.exists()


def test_a_run_may_be_resumed_with_another_tracker(tmp_path):
    own, file = noted(tmp_path, "noted_resumed"), tmp_path / "values.txt"
    base = {"data": "digits", "imports": own, "training": SHORT}
    experiment_from({**base, "tracking": {"name": "Noted", "file": str(file)}}).run(
        tmp_path / "run"
    )
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["tracking"] == [{"name": "Noted", "file": str(file)}]
    (tmp_path / "run" / "summary.json").unlink()
    experiment_from(base).run(tmp_path / "run", resume=True)
    # The configuration of a run names its tracker, so that a resumed run is tracked, too.
    assert load_experiment(tmp_path / "run" / "config.yaml").tracking == (
        {"name": "Noted", "file": str(file)},
    )
