"""FedCRC's experiments match the paper, and its figures are computed correctly."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equipoise import Federation, Training, load, train
from equipoise.data import load as load_data
from equipoise.models import build
from equipoise.optimizers import Sgd
from equipoise.study import load_study
from tests.experiments.scripts import load_script

HOME = Path(__file__).parents[2] / "experiments" / "fedcrc"
STUDIES = sorted(path.stem for path in HOME.glob("*.yaml"))
BETAS = {"beta0.1": 0.1, "beta0.5": 0.5, "beta1": 1.0}
BY_CLASS = {"byclass0.1": 0.1}  # each class shared out among the clients


@cache
def study(name):
    """Read a study once, because it has many experiments."""
    return load_study(HOME / f"{name}.yaml")


def test_every_table_and_figure_is_there():
    assert STUDIES == [
        "figure3",
        "table1-cifar10",
        "table1-cifar100",
        "table1-mnist",
        "table2",
        "table3",
    ]


@pytest.mark.parametrize("name", STUDIES)
def test_local_training_is_the_papers(name):
    for job in study(name).jobs:
        training = job.experiment.training
        optimizer = training.optimizer
        rates = [
            optimizer.lr * training.schedule.factor(r, training.rounds)
            for r in (0, 49, 50, 74, 75, 99)
        ]
        assert rates == pytest.approx([0.05, 0.05, 0.01, 0.01, 0.001, 0.001], rel=1e-12)
        assert (training.rounds, training.batch_size, optimizer.momentum) == (100, 50, 0.9)
        assert (optimizer.weight_decay, optimizer.nesterov, training.augment, training.clip) == (
            0,
            False,
            (),
            None,
        )
        assert training.epochs == (1 if name == "figure3" else 5)
        registered = 60 if name == "table2" else 100
        assert training.cohort_size(registered) == {"figure3": 100, "table2": 6}.get(name, 10)
        assert job.experiment.evaluation.select == "last"


@pytest.mark.parametrize("name", STUDIES)
def test_clients_hold_the_papers_shares(name):
    for job in study(name).jobs:
        data = job.experiment.data
        assert data["splits"] == (0.8, 0.0, 0.2)
        assert data["unseen"] == (40 if name == "table2" else 0)
        assert data["partition"]["clients"] == 100
        assert data["partition"].get("beta") == (BETAS | BY_CLASS).get(job.setting)
        assert data["partition"].get("equal", False) == (job.setting in BETAS)
        assert data["partition"]["name"] == ("iid" if job.setting == "iid" else "dirichlet")
        assert data["seed"] == job.seed
        assert data["name"] == ("mnist" if name == "table1-mnist" else "cifar")
        assert data.get("classes") == {"table1-mnist": None, "table1-cifar100": 100}.get(name, 10)


@pytest.mark.parametrize("name", STUDIES)
def test_models_are_the_papers(name):
    """Four convolutions and a fully connected layer, or ResNet-18 with twenty convolutions."""
    for options in {json.dumps(job.experiment.model) for job in study(name).jobs}:
        shape = (1, 28, 28) if name == "table1-mnist" else (3, 32, 32)
        model = build(**json.loads(options), shape=shape, classes=10)
        layers = [type(layer).__name__ for layer in model.modules()]
        assert (layers.count("Conv2d"), layers.count("Linear")) == (
            (20, 1) if "cifar100" in name else (4, 1)
        )


@pytest.mark.parametrize("name", ["table1-cifar10", "table1-cifar100", "table1-mnist", "table2"])
def test_tables_1_and_2_compare_the_papers_methods(name):
    table = study(name)
    assert table.methods == ("fedavg", "fedprox", "fedbabu", "fedper", "fedrep", "fedcrc")
    extra = {"table2": (), "table1-cifar10": (*BY_CLASS, "iid")}.get(name, ("iid",))
    assert table.settings == (*BETAS, *extra)
    local = {job.method: job.experiment.method.local for job in table.jobs}
    assert local["fedprox"].mu == 0.1
    assert local["fedcrc"].tau == 0.99
    # Without the mean of their heads, fedper and fedrep have no global model for new clients.
    assert all(job.experiment.evaluation.average_kept for job in table.jobs)


def test_table_3_sweeps_tau():
    table = study("table3")
    assert {job.method: job.experiment.method.local.tau for job in table.jobs} == {
        "tau0.99": 0.99,
        "tau0.9": 0.9,
        "tau0.5": 0.5,
        "tau0.2": 0.2,
        "tau1": 1.0,
    }


def test_figure_1_measures_heads_after_each_step():
    """Softmax regression by hand: two clients with three samples, two gradient steps."""
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(6, 4)), np.array([0, 1, 2, 2, 1, 2])
    federation = Federation.from_arrays(
        torch.tensor(x, dtype=torch.float32), y, clients=[0, 0, 0, 1, 1, 1], splits=(1.0, 0.0, 0.0)
    )
    model = build("logistic", shape=(4,), classes=3, seed=1)
    measured = load_script(HOME / "figure1.py").distances(federation, model, updates=2)

    start = np.column_stack(
        [model.head.weight.detach().numpy(), model.head.bias.detach().numpy()]
    ).astype(float)
    heads, wanted = [start.copy(), start.copy()], []
    for _ in range(2):
        for client, rows in enumerate((slice(0, 3), slice(3, 6))):
            inputs = np.column_stack([x[rows], np.ones(3)])
            scores = np.exp(inputs @ heads[client].T)
            error = scores / scores.sum(1, keepdims=True) - np.eye(3)[y[rows]]
            heads[client] -= 0.05 * error.T @ inputs / 3
        wanted.append(np.sqrt(((heads[0] - heads[1]) ** 2).sum()))
    assert measured == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(model.head.weight, torch.tensor(start[:, :4], dtype=torch.float32))


def test_figure_3_averages_clients_and_seeds_on_test_data(tmp_path):
    accuracies = {"seed0": [0.2, 0.4], "seed1": [0.6, 0.8]}
    for seed, values in accuracies.items():
        folder = tmp_path / "iid" / "fedcrc" / seed
        folder.mkdir(parents=True)
        rows = [
            {"round": 7, "model": "global", "split": "test", "client": k, "accuracy": v}
            for k, v in enumerate(values)
        ]
        rows += [{**row, "split": "val", "accuracy": 0.0} for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = load_script(HOME / "figure3.py")
    curves = figure.read(tmp_path)
    assert list(curves) == [("iid", "fedcrc", "global")]
    assert curves["iid", "fedcrc", "global"] == {7: pytest.approx(0.5)}
    figure.draw(curves, tmp_path / "figure3.svg")
    assert (tmp_path / "figure3.svg").stat().st_size > 1000


def test_norm_statistics_are_the_models_own_and_those_of_each_clients_test_data(tmp_path):
    training = Training(rounds=2, cohort=4, batch_size=16, optimizer=Sgd(lr=0.1))
    model = {"name": "bncnn", "channels": [4], "hidden": [], "pools": 1}
    data = {
        "name": "digits",
        "partition": {"name": "dirichlet", "clients": 8, "beta": 0.1, "equal": True},
    }
    digits, out = load_data(**data), tmp_path / "beta0.1" / "fedavg" / "seed0"
    run = train(digits, data=data, model=model, training=training, out=out)
    script = load_script(HOME / "norm_statistics.py")
    [(running, own)] = script.read(tmp_path)["beta0.1", "fedavg"]
    assert running == pytest.approx(run.summary["results"]["global"]["seen"]["mean"])

    weights = {name: tensor.double() for name, tensor in load(out).state_dict().items()}
    hits = []
    for client in digits.seen:
        samples = digits.test.of(client)
        seen = F.conv2d(digits.x[samples].double(), weights["features.0.weight"], padding=2)
        mean, var = (
            seen.mean((0, 2, 3), keepdim=True),
            seen.var((0, 2, 3), keepdim=True, correction=0),
        )
        scale, shift = (
            weights[f"features.1.{name}"].view(1, -1, 1, 1) for name in ("weight", "bias")
        )
        z = F.max_pool2d(((seen - mean) / (var + 1e-5).sqrt() * scale + shift).relu(), 2).flatten(1)
        answers = (z @ weights["head.weight"].T + weights["head.bias"]).argmax(1)
        hits.append(float((answers == digits.y[samples]).double().mean()))
    assert own == pytest.approx(np.mean(hits))
    assert own != pytest.approx(running)
