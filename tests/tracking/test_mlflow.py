"""Values of runs in MLflow's store, read back with MLflow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equipoise.config import experiment_from
from equipoise.errors import InputError
from equipoise.study import study_from
from tests.run.small import Stop, rows_of, stop_after

pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings(
    "default::Warning:mlflow", "default::FutureWarning", "default::DeprecationWarning"
)

BASE = {"data": "digits", "model": "logistic", "training": {"rounds": 3}}


@pytest.fixture(autouse=True)
def file_store(monkeypatch):
    # The newest releases require consent before they write plain files.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def tracked(folder, **sections):
    return {
        **BASE,
        "tracking": {"name": "mlflow", "uri": str(folder / "mlruns"), "experiment": "digits"},
        **sections,
    }


def client(folder):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=str(folder / "mlruns"))


def runs(folder):
    store = client(folder)
    return store.search_runs([store.get_experiment_by_name("digits").experiment_id])


def history(folder, run, name):
    return [
        (value.step, value.value)
        for value in client(folder).get_metric_history(run.info.run_id, name)
    ]


def check(folder, run, directory):
    losses = [(row["round"], row["train_loss"]) for row in rows_of(directory, "rounds")]
    assert history(folder, run, "round/train_loss") == losses
    for number, value in history(folder, run, "test/global/seen/groups/rotated"):
        rows = [
            r
            for r in rows_of(directory)
            if (r["round"], r["model"], r["split"]) == (number, "global", "test")
        ]
        own = [row["accuracy"] for row in rows if row["group"] == "rotated"]
        assert value == pytest.approx(sum(own) / len(own), rel=1e-12)


def test_parameters_values_and_summary_are_read_back(tmp_path):
    made = experiment_from(tracked(tmp_path, method={"name": "fedprox", "mu": 0.3}, seed=4))
    made.run(tmp_path / "run")
    (run,) = runs(tmp_path)
    check(tmp_path, run, tmp_path / "run")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["method.mu"] == "0.3"
    assert run.data.params["training.rounds"] == "3"
    assert {name: run.data.tags[name] for name in ("method", "data", "seed")} == {
        "method": "fedprox",
        "data": "digits",
        "seed": "4",
    }
    summary = json.loads(
        Path(client(tmp_path).download_artifacts(run.info.run_id, "summary.json")).read_text()
    )
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_resumed_run_is_the_same_run(tmp_path):
    made = experiment_from(tracked(tmp_path, checkpoint_every=2, training={"rounds": 4}))
    with pytest.raises(Stop):
        made.run(tmp_path / "run", on_round=stop_after(3))
    (broken,) = runs(tmp_path)
    assert broken.info.status == "FAILED"
    made.run(tmp_path / "run", resume=True)
    (run,) = runs(tmp_path)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history(tmp_path, run, "round/train_loss")] == [1, 2, 3, 4]
    check(tmp_path, run, tmp_path / "run")


def test_the_runs_of_a_study_are_in_one_experiment(tmp_path):
    study = {"base": tracked(tmp_path), "methods": ["fedavg", "fedprox"], "seeds": [0, 1]}
    study_from(study).run(tmp_path / "study")
    found = {(run.data.tags["method"], run.data.tags["seed"]) for run in runs(tmp_path)}
    assert found == {(method, seed) for method in ("fedavg", "fedprox") for seed in "01"}


def test_a_store_that_cannot_be_used_is_named():
    with pytest.raises(InputError, match="tracking: mlflow cannot write to gopher://there"):
        experiment_from({**BASE, "tracking": {"name": "mlflow", "uri": "gopher://there"}}).run()
