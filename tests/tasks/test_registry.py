"""User-defined tasks: registered, from a file of an experiment, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from equipoise import Federation, load, models, tasks, train
from equipoise.config import load_experiment
from equipoise.errors import InputError
from equipoise.run.records import task_of
from equipoise.study.runs import finished
from equipoise.task import Task

OWN = '''
import torch

from equipoise import data, tasks
from equipoise.data import Iid, Source
from equipoise.tasks.regression import Regression


@tasks.register("closeness")
class Closeness(Regression):
    """Absolute error; the score is the share of predictions that are off by less than a half."""

    score = "close"
    higher_is_better = True

    def loss(self, output, y):
        return (output.reshape(y.shape) - y).abs()

    def metrics(self, output, y):
        loss = self.loss(output, y)
        return {"loss": loss, "close": (loss < 0.5).to(output.dtype)}


@data.register
def slopes(*, seed: int):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed))
    return Source(x=x, y=x.sum(1), task="closeness", name="slopes"), Iid(3)
'''


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    tasks.names()
    monkeypatch.setattr(tasks, "_TASKS", dict(tasks._TASKS))


def test_the_tasks_there_are():
    # Examples of documentation may have registered others.
    own = [
        task
        for task in map(tasks.build, tasks.names())
        if type(task).__module__.startswith("equipoise.tasks.")
    ]
    about = {task.name: (task.score, task.higher_is_better) for task in own}
    assert about == {
        "classification": ("accuracy", True),
        "regression": ("loss", False),
        "segmentation": ("dice", True),
        "multilabel": ("f1", True),
    }
    with pytest.raises(
        InputError, match="unknown task 'segmentaton'; did you mean 'segmentation'?"
    ):
        tasks.build("segmentaton")


def test_a_task_in_a_file_of_an_experiment(tmp_path):
    (tmp_path / "closeness.py").write_text(OWN)
    content = {
        "imports": str(tmp_path / "closeness.py"),
        "data": "slopes",
        "model": "logistic",
        "training": {"rounds": 3, "optimizer": {"lr": 0.1}},
    }
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(content))
    run = load_experiment(tmp_path / "one.yaml").run(tmp_path / "run")
    federation = run.trainer.federation
    assert federation.classes is None
    assert federation.outputs == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["task"], summary["score"]) == ("closeness", "close")
    # Training minimizes the absolute error.
    untrained = models.build("logistic", shape=(3,), classes=1).requires_grad_(False)
    before = (untrained(federation.x).squeeze(1) - federation.y).abs().mean()
    assert summary["results"]["global"]["seen"]["loss"] < 0.9 * float(before)
    model, rows = load(tmp_path / "run"), list(run.trainer.metrics)
    for client in range(3):
        mine = federation.test.of(client)
        with torch.no_grad():
            error = (model(federation.x[mine]).squeeze(1) - federation.y[mine]).abs()
        (row,) = [r for r in rows if (r["round"], r["split"], r["client"]) == (3, "test", client)]
        assert row["loss"] == pytest.approx(float(error.mean()), rel=1e-5)
        assert row["close"] == pytest.approx(float((error < 0.5).float().mean()), rel=1e-6)
    # The worst client is the one with the lowest score.
    val = finished(tmp_path / "run", "val")["results"]["global"]["seen"]
    assert val["worst_client"] == min(
        r["close"] for r in rows if (r["round"], r["split"]) == (3, "val")
    )
    resumed = load_experiment(tmp_path / "run" / "config.yaml").run(tmp_path / "run", resume=True)
    assert resumed.summary == run.summary


def test_summaries_of_older_versions_name_no_task():
    assert task_of({"score": "loss"}).name == "regression"
    assert task_of({"score": "accuracy"}).name == "classification"


class Lossless(Task):
    pass


class Scoreless(Task):
    score = "f1"

    def loss(self, output, y):
        return output


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        (
            "lossless",
            Lossless,
            "Lossless, registered as 'lossless', is a task without a method 'loss'",
        ),
        ("scoreless", Scoreless, "has the score 'f1' but no method 'metrics' that returns it"),
        ("number", float, "is not a task; valid: a class derived from Task"),
        (
            "regression",
            type("Other", (Scoreless,), {"score": "loss"}),
            "'regression' of a task is taken by Regression",
        ),
    ],
)
def test_what_cannot_be_registered(name, what, message):
    with pytest.raises(InputError, match=message):
        tasks.register(name)(what)


def test_registering_again_is_no_conflict():
    again = type("Again", (Scoreless,), {"score": "loss"})
    assert tasks.register("again")(tasks.register("again")(again)) is again


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            lambda self, output, y: {"loss": output[:, 0]},
            "the metrics of task 'wrong' are loss, without f1",
        ),
        (
            lambda self, output, y: {"loss": output[:, 0], "f1": output.mean()},
            r"f1 of task 'wrong' has shape \(\)",
        ),
    ],
)
def test_metrics_are_checked_before_training(metrics, message):
    tasks.register("wrong")(type("Wrong", (Scoreless,), {"metrics": metrics}))
    federation = Federation.from_arrays(
        torch.zeros(9, 2), torch.zeros(9), clients=[0] * 9, task="wrong"
    )
    with pytest.raises(InputError, match=message):
        train(federation, model="logistic", rounds=1)
