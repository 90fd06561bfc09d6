"""Losses for the whole task: their values, and that all reported losses follow them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from equipoise import Federation, Machine, Training, losses, tasks, train
from equipoise.config import experiment_from, load_experiment
from equipoise.engine.cohort import StackedCohort
from equipoise.errors import InputError
from equipoise.run.plain import to_plain
from tests.rounds import random_regression

FLOAT64 = Machine(device="cpu", precision="float64")


def scores(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(classes, *shape, seed=0):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def federation():
    """Six clients of unequal sizes in two groups."""
    sizes = [5, 9, 12, 20, 7, 15]
    clients = np.repeat(np.arange(6), sizes)
    x, y = scores(len(clients), 5), labels(3, len(clients))
    x = x + y.unsqueeze(1) * torch.tensor([1.0, 0.5, 0.0, 0.0, -1.0], dtype=torch.float64)
    groups = {client: ("a", "b")[client % 2] for client in range(6)}
    return Federation.from_arrays(x, y, clients=clients, groups=groups, classes=3)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3, 2)])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_is_that_of_pytorch(shape, smoothing):
    output, y, weights = scores(*shape), labels(4, shape[0], *shape[2:]), (1.0, 2.0, 0.5, 3.0)
    plain = F.cross_entropy(output, y, reduction="none", label_smoothing=smoothing)
    found = losses.build("cross_entropy", smoothing=smoothing)(output, y)
    torch.testing.assert_close(found, plain.flatten(1).mean(1) if plain.dim() > 1 else plain)
    weighted = plain * torch.tensor(weights, dtype=torch.float64)[y]
    found = losses.build("cross_entropy", smoothing=smoothing, weights=weights)(output, y)
    torch.testing.assert_close(found, weighted.flatten(1).mean(1) if plain.dim() > 1 else weighted)


def test_focal_loss_by_hand():
    output, y = scores(6, 4), labels(4, 6)
    p = output.softmax(1)[torch.arange(6), y]
    torch.testing.assert_close(
        losses.build("focal", gamma=1.5)(output, y), -((1 - p) ** 1.5) * p.log()
    )
    torch.testing.assert_close(
        losses.build("focal", gamma=0.0)(output, y), F.cross_entropy(output, y, reduction="none")
    )
    several = labels(2, 6, 4).double()
    p = torch.where(several == 1, output.sigmoid(), 1 - output.sigmoid())
    torch.testing.assert_close(
        losses.build("focal")(output, several), (-((1 - p) ** 2) * p.log()).mean(1)
    )


def test_focal_loss_has_a_gradient_where_everything_is_right():
    output = torch.tensor([[800.0, 0.0]], dtype=torch.float64, requires_grad=True)
    losses.build("focal", gamma=0.5)(output, torch.tensor([0])).sum().backward()
    assert torch.isfinite(output.grad).all()


def test_losses_of_regression_are_those_of_pytorch():
    output, y = scores(6, 2), 3 * scores(6, 2, seed=1)
    torch.testing.assert_close(losses.build("absolute")(output, y), (output - y).abs().mean(1))
    wanted = F.huber_loss(output, y, reduction="none", delta=0.7).mean(1)
    torch.testing.assert_close(losses.build("huber", delta=0.7)(output, y), wanted)


# ---- what follows them ---------------------------------------------------------------------------


def doubled(output, y):
    return 2 * F.cross_entropy(output, y, reduction="none")


def test_a_run_follows_its_loss_from_training_to_the_summary(tmp_path):
    """Twice the loss with half the learning rate: same training, reported losses are doubled."""
    how = {"model": "mlp", "rounds": 2, "machine": FLOAT64}
    plain = train(federation(), optimizer={"name": "sgd", "lr": 0.1}, **how)
    run = train(
        federation(),
        loss=doubled,
        optimizer={"name": "sgd", "lr": 0.05},
        out=tmp_path / "run",
        **how,
    )
    for name, tensor in plain.trainer.global_model.items():
        torch.testing.assert_close(run.trainer.global_model[name], tensor, rtol=1e-9, atol=1e-12)
    one, other = (made.summary["results"]["global"]["seen"] for made in (plain, run))
    assert other["loss"] == pytest.approx(2 * one["loss"], rel=1e-9)
    assert other["worst10"] == one["worst10"]
    assert run.config["training"]["loss"] == {"name": f"custom:{__name__}.doubled"}
    with pytest.raises(InputError, match=r"training.loss is .*doubled.* there and None here"):
        train(
            federation(),
            out=tmp_path / "run",
            resume=True,
            optimizer={"name": "sgd", "lr": 0.05},
            **how,
        )


@pytest.mark.parametrize("method", ["qffl", "afl", "gifair"])
def test_what_methods_know_of_losses_follows_the_loss(method, monkeypatch):
    """The reports of a round are the run's loss on the clients' samples, computed by hand."""
    seen = []
    original = StackedCohort.launch_training

    def noting(self, shared, *given):
        launched = original(self, shared, *given)

        def wait():
            updates = launched.wait()
            received, trained = shared["model"], updates.params
            before = {
                name: tensor.expand(len(self.ids), *tensor.shape)
                for name, tensor in received.items()
            }
            seen.append((self.ids, {"loss_before": before, "loss_after": trained}, updates.reports))
            return updates

        return replace(launched, wait=wait)

    monkeypatch.setattr(StackedCohort, "launch_training", noting)
    data, focal = federation(), losses.build("focal")
    train(data, method=method, model="logistic", loss="focal", rounds=1, machine=FLOAT64)
    ids, models, reports = seen[0]
    (name,) = reports.keys() & models.keys()
    for position, client in enumerate(ids.tolist()):
        rows = data.train.of(client)
        weight, bias = (models[name][f"head.{leaf}"][position] for leaf in ("weight", "bias"))
        wanted = focal(data.x[rows].double() @ weight.T + bias, data.y[rows]).mean()
        assert reports[name][position].item() == pytest.approx(wanted.item(), rel=1e-9)


def test_losses_are_equal_stacked_and_one_by_one():
    models = [
        train(
            federation(),
            loss="focal",
            rounds=2,
            machine=Machine(device="cpu", precision="float64", chunk=chunk),
        )
        for chunk in (1, 6)
    ]
    one, other = (run.trainer.global_model for run in models)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-12)


def test_the_loss_of_an_experiment(tmp_path):
    experiment = experiment_from(
        {"data": "digits", "training": {"loss": {"name": "focal", "gamma": 1}}}
    )
    assert experiment.training.loss == losses.build("focal", gamma=1.0)
    assert experiment_from(experiment.plain()).training == experiment.training
    assert "loss" not in experiment_from({"data": "digits"}).plain()["training"]
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({"data": "digits", "training": {"loss": "focal", "rounds": 1}}))
    assert load_experiment(path, ["training.loss.gamma=0.5"]).training.loss.gamma == 0.5
    run = load_experiment(path).run(tmp_path / "run")
    assert (
        yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["loss"]["name"]
        == "focal"
    )
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert math.isfinite(row["loss"])
    again = load_experiment(tmp_path / "run" / "config.yaml").run(tmp_path / "run", resume=True)
    assert again.summary == run.summary


def test_a_registered_function_is_known_by_its_name():
    @losses.register("tenfold", tasks=["classification"])
    def tenfold(output, y):
        return 10 * F.cross_entropy(output, y, reduction="none")

    assert to_plain(Training(loss=tenfold))["loss"] == {"name": "tenfold"}
    assert Training(loss="tenfold").loss is tenfold


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("focl", "unknown loss 'focl' in training.loss; did you mean 'focal'"),
        (
            {"name": "focal", "gama": 1},
            "unknown option 'gama' in the loss 'focal'; did you mean 'gamma'",
        ),
        ({"name": "absolute", "x": 1}, "the loss 'absolute' takes no options, got 'x'"),
        ({"name": "focal", "gamma": -1}, "loss.gamma must be a finite number of at least 0"),
        ({"name": "cross_entropy", "smoothing": 1.0}, "loss.smoothing must be below 1"),
        (
            {"name": "cross_entropy", "weights": [1.0, 2.0]},
            "weights has 2 numbers, but the model has 3 classes",
        ),
        (
            "huber",
            "the loss 'huber' is for the task regression, but the task of this federation is "
            "classification",
        ),
        (torch.nn.CrossEntropyLoss, "got the class CrossEntropyLoss"),
        (3, "a function of outputs and targets that returns one value per sample, got 3"),
        (
            F.cross_entropy,
            r"loss of task 'classification' has shape \(\) for 3 samples; valid: one value per "
            "sample",
        ),
        (
            lambda output, y: None,
            "loss of task 'classification' is None for 3 samples; valid: one value per sample",
        ),
        (
            lambda output, y: output @ y,
            "the loss or a metric of task 'classification' fails for outputs of shape",
        ),
        (torch.nn.CrossEntropyLoss(), r"has shape \(\) for 3 samples"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_before_training(loss, says, tmp_path):
    with pytest.raises(InputError, match=says):
        train(federation(), model="logistic", loss=loss, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_branches_is_refused_in_the_librarys_words():
    def branching(output, y):
        values = F.cross_entropy(output, y, reduction="none")
        return values if values.max() < 100 else values / 2

    with pytest.raises(
        InputError, match="it has an if or a loop that depends on values.*torch.where"
    ):
        train(federation(), loss=branching, rounds=1)


def test_a_name_that_is_taken_or_what_is_no_function_is_refused():
    with pytest.raises(
        InputError, match="the name 'focal' of a loss is taken by equipoise.losses.Focal"
    ):
        losses.register("focal")(doubled)
    with pytest.raises(InputError, match="is not a function of outputs and targets"):
        losses.register("three")(3)


def test_regression_with_another_loss():
    run = train(
        random_regression([5, 8], splits=(0.8, 0.1, 0.1)),
        model="logistic",
        loss="absolute",
        rounds=1,
    )
    assert run.summary["task"] == "regression"
    assert tasks.build("regression").with_loss(None) is not None
