"""Metrics of outputs in runs: journals, summaries, selection, resuming, and user code."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import f1_score, roc_auc_score

from equipoise import Evaluation, Federation, Machine, Training, fairness, metrics, tasks, train
from equipoise.config import experiment_from, load_experiment
from equipoise.errors import InputError
from equipoise.metrics import Metric
from equipoise.tasks.classification import Classification
from tests.run.small import Stop, federation, promised, rows_of, small_run, stop_after

SHORT = Training(rounds=2, cohort=4)
OWN = """
from equipoise import metrics


@metrics.register(higher_is_better=False, range=(0, 1), tasks=["classification"])
def overconfidence(output, y):
    highest = output.softmax(1).amax(1)
    wrong = output.argmax(1) != y
    return highest[wrong].mean() if wrong.any() else None
"""


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    metrics.names()
    monkeypatch.setattr(metrics, "_METRICS", dict(metrics._METRICS))


def highest_loss(output, y):
    """The loss of the sample with the highest loss."""
    return torch.nn.functional.cross_entropy(output, y, reduction="none").max()


HIGHEST = Metric(function=highest_loss, higher_is_better=False, range=(0, float("inf")))


def outputs(model, split, client):
    data = federation()
    held = data.split(split).of(client)
    with torch.no_grad():
        return model(data.x[held].double()), data.y[held]


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_rows_of_all_models_have_the_metrics_of_their_clients(method):
    evaluation = Evaluation(
        metrics=["accuracy", "f1_macro", "auroc", HIGHEST], local=True, keep_local=True
    )
    run = small_run(
        None, method, training=SHORT, evaluation=evaluation, machine=Machine(precision="float64")
    )
    kinds = {"global": run.model, "local": run.local_model} | (
        {"personal": run.model} if method == "ditto" else {}
    )
    rows = [row for row in run.trainer.metrics if row["round"] == 2]
    assert {row["model"] for row in rows} == set(kinds)
    for row in rows:
        model = kinds[row["model"]](*(() if row["model"] == "global" else (row["client"],)))
        output, y = outputs(model, row["split"], row["client"])
        assert row["f1_macro"] == pytest.approx(
            f1_score(y, output.argmax(1), average="macro"), abs=1e-12
        )
        assert row["highest_loss"] == pytest.approx(float(highest_loss(output, y)), rel=1e-9)
        if len(set(y.tolist())) < 2:
            assert row["left_out"] == {"auroc": "undefined"}
            assert "auroc" not in row
        else:
            p = output.softmax(1).numpy()
            wanted = np.mean(
                [roc_auc_score(y == label, p[:, label]) for label in y.unique().tolist()]
            )
            assert row["auroc"] == pytest.approx(wanted, abs=1e-12)
            assert "left_out" not in row
    assert any("left_out" in row for row in rows)


def test_summaries_have_every_spread_and_name_who_is_left_out():
    run = small_run(
        None, training=SHORT, evaluation=Evaluation(metrics=["accuracy", "auroc", HIGHEST])
    )
    rows = [
        row
        for row in run.trainer.metrics
        if (row["round"], row["split"], row["unseen"]) == (2, "test", False)
    ]
    part = run.summary["results"]["global"]["seen"]
    for name, higher in (("auroc", True), ("highest_loss", False), ("accuracy", True)):
        having = [row for row in rows if name in row]
        names = sorted({row["group"] for row in having})
        wanted = fairness.summarize(
            [row[name] for row in having],
            [names.index(row["group"]) for row in having],
            weights=[row["n"] for row in having],
            higher_is_better=higher,
        )
        found = part["metrics"][name]
        for spread in fairness.METRICS:
            if not spread.startswith("gap_"):
                assert found[spread] == pytest.approx(getattr(wanted, spread), rel=1e-12), (
                    name,
                    spread,
                )
        assert found["clients"] == len(having)
        lost = {str(row["client"]): "undefined" for row in rows if name not in row}
        assert (found["left_out"], found["left_out_clients"]) == (len(lost), lost)
        assert found["worst_client_name"] == str(found["worst_client_id"])
    assert part["metrics"]["auroc"]["left_out"] > 0
    assert part["metrics"]["accuracy"]["mean"] == part["mean"]
    assert run.summary["metrics"]["highest_loss"] == {
        "higher_is_better": False,
        "range": [0.0, None],
    }
    json.loads(json.dumps(run.summary, allow_nan=False))


def test_a_metric_that_no_client_has():
    nowhere = Metric(function=lambda output, y: None, name="nowhere", higher_is_better=True)
    beyond = Metric(
        function=lambda output, y: 2.0, name="beyond", higher_is_better=True, range=(0, 1)
    )
    run = small_run(None, training=SHORT, evaluation=Evaluation(metrics=[nowhere, beyond]))
    part = run.summary["results"]["global"]["unseen"]["metrics"]
    left_out = {"clients": 0, "left_out": 1, "left_out_clients": {"7": "undefined"}}
    empty = {"groups": {"b": None}, **left_out}
    assert {name: part["nowhere"][name] for name in empty} == empty
    having = small_run(None, training=SHORT, evaluation=Evaluation(metrics=["accuracy"])).summary
    names = having["results"]["global"]["unseen"]["metrics"]["accuracy"].keys()
    assert part["nowhere"].keys() == names
    assert all(part["nowhere"][name] is None for name in names - empty.keys())
    json.loads(json.dumps(run.summary, allow_nan=False))
    assert part["beyond"]["left_out_clients"] == {"7": "2 is not in the range from 0 to 1"}


def test_metrics_change_nothing_else(tmp_path):
    small_run(tmp_path / "without", "ditto", training=SHORT)
    small_run(tmp_path / "with", "ditto", training=SHORT, evaluation=Evaluation(metrics=["auroc"]))
    ours, theirs = promised(tmp_path / "with"), promised(tmp_path / "without")
    assert ours.pop("rounds.jsonl") == theirs.pop("rounds.jsonl")
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    added = ("auroc", "left_out")
    rows = [
        {name: row[name] for name in row if name not in added} for row in rows_of(tmp_path / "with")
    ]
    assert rows == rows_of(tmp_path / "without")
    for name in ("metrics", "select_by"):
        assert (
            name
            not in yaml.safe_load((tmp_path / "without" / "config.yaml").read_text())["evaluation"]
        )
    assert "metrics" not in json.loads((tmp_path / "without" / "summary.json").read_text())


@pytest.mark.parametrize(("by", "best"), [("highest_loss", min), ("accuracy", max), (None, min)])
def test_the_round_is_chosen_by_a_metric(by, best):
    training = Training(rounds=6, cohort=3)
    evaluation = Evaluation(metrics=[HIGHEST], select="best", select_by=by)
    run = small_run(None, training=training, evaluation=evaluation)
    rows = [row for row in run.trainer.metrics if row["split"] == "val" and not row["unseen"]]
    means = {
        n: np.mean([row[by or "loss"] for row in rows if row["round"] == n]) for n in range(1, 7)
    }
    assert run.summary["round"] == best(means, key=lambda n: means[n])
    assert run.summary.get("select_by") == by


def test_patience_follows_the_metric():
    def worsens(output, y):
        worsens.calls += 1
        return worsens.calls

    worsens.calls = 0
    metric = Metric(function=worsens, higher_is_better=False)
    run = small_run(None, evaluation=Evaluation(metrics=[metric], select_by="worsens", patience=2))
    assert run.summary["rounds"] == 3


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"metrics": ["mae"]}, "'mae' is for regression, but the task is classification"),
        (
            {"select": "best", "select_by": "auroc"},
            "unknown metric 'auroc' in evaluation.select_by",
        ),
        (
            {"select_by": "loss"},
            "evaluation.select_by needs evaluation.select 'best' or evaluation.patience",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_training(evaluation, message):
    with pytest.raises(InputError, match=message):
        small_run(None, evaluation=Evaluation(**evaluation))


def test_a_round_cannot_be_chosen_by_what_nobody_has():
    nowhere = Metric(function=lambda output, y: None, name="nowhere", higher_is_better=True)
    with pytest.raises(InputError, match="no seen client has a value of nowhere"):
        small_run(
            None, evaluation=Evaluation(metrics=[nowhere], select="best", select_by="nowhere")
        )


def test_a_resumed_run_is_the_same(tmp_path):
    options = {
        "evaluation": Evaluation(
            metrics=["auroc", HIGHEST], select="best", select_by="highest_loss"
        )
    }
    small_run(tmp_path / "whole", "ditto", **options)
    with pytest.raises(Stop):
        small_run(tmp_path / "part", "ditto", on_round=stop_after(3), **options)
    small_run(tmp_path / "part", "ditto", resume=True, **options)
    assert promised(tmp_path / "part") == promised(tmp_path / "whole")
    with pytest.raises(InputError, match="holds another experiment: evaluation.metrics is"):
        small_run(
            tmp_path / "part",
            "ditto",
            resume=True,
            evaluation=Evaluation(metrics=["auroc"], select="best"),
        )


def test_metrics_of_a_file_of_ones_own(tmp_path):
    (tmp_path / "own_metric_file.py").write_text(OWN)
    path = tmp_path / "experiment.yaml"
    content = {
        "imports": "own_metric_file.py",
        "data": "digits",
        "training": {"rounds": 1},
        "evaluation": {"metrics": ["overconfidence", "auroc"]},
    }
    path.write_text(yaml.safe_dump(content))
    experiment = load_experiment(path)
    run = experiment.run(tmp_path / "run")
    assert experiment.plain()["evaluation"]["metrics"] == ["overconfidence", "auroc"]
    assert run.summary["results"]["global"]["seen"]["metrics"]["overconfidence"]["clients"] > 10
    again = load_experiment(tmp_path / "run" / "config.yaml")
    assert again.evaluation == experiment.evaluation
    with pytest.raises(
        InputError,
        match="experiment.yaml: unknown metric 'overconfidense' in evaluation.metrics; did you",
    ):
        experiment_from(
            {**content, "imports": [], "evaluation": {"metrics": ["overconfidense"]}},
            "experiment.yaml",
        )


def test_what_a_task_of_ones_own_measures_is_not_replaced(monkeypatch):
    monkeypatch.setattr(tasks, "_TASKS", dict(tasks._discover()))

    @tasks.register("ranked")
    class Ranked(Classification):
        def metrics(self, output, y):
            best = output.topk(2, dim=1).indices
            return {
                **super().metrics(output, y),
                "top2": (best == y.unsqueeze(1)).any(1).to(output.dtype),
            }

    data = replace(federation(), task="ranked")
    own = Metric(function=highest_loss, name="top2", higher_is_better=True)
    with pytest.raises(InputError, match="'top2' is already a metric of the task ranked"):
        small_run(None, federation=data, training=SHORT, evaluation=Evaluation(metrics=[own]))
    run = small_run(None, federation=data, training=SHORT, evaluation=Evaluation(metrics=["auroc"]))
    assert {"top2", "auroc"} <= set().union(*run.trainer.metrics)


def test_regression_has_metrics_too():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    data = Federation.from_arrays(x, x.sum(1), clients=np.arange(60) % 3, task="regression")
    run = train(data, rounds=1, evaluation=Evaluation(metrics=["mae", "r2"]))
    (row,) = [r for r in run.trainer.metrics if (r["client"], r["split"]) == (1, "test")]
    held = data.test.of(1)
    with torch.no_grad():
        error = run.model()(data.x[held]).double().squeeze(1) - data.y[held]
    assert row["mae"] == pytest.approx(float(error.abs().mean()), rel=1e-6)
    total = (data.y[held] - data.y[held].mean()).square().sum()
    assert row["r2"] == pytest.approx(float(1 - error.square().sum() / total), rel=1e-5)
