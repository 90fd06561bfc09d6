"""Runs from Python: what is refused, with which messages, and what can be loaded again."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from equipoise import Evaluation, Federation, Machine, Training, load, train
from equipoise.data import load as load_data
from equipoise.errors import InputError, RunError
from equipoise.method import LocalRule
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.optimizers import Schedule, optimizer_named
from equipoise.report import write_report
from equipoise.run.checksums import verify
from equipoise.run.files import load_tensors
from equipoise.run.round_steps import RoundSteps
from equipoise.run.trainer import Trainer
from tests.run.small import (
    MODEL,
    TRAINING,
    Stop,
    federation,
    measure,
    promised,
    rows_of,
    small_run,
    stop_after,
)


def custom(width=6, dropout=0.3):
    torch.manual_seed(7)
    features = nn.Sequential(
        nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)
    )
    return Model(features, nn.Linear(width, 3))


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def broken_off(tmp_path):
    """A run that stopped after three of its seven rounds."""
    with pytest.raises(Stop):
        small_run(tmp_path / "run", on_round=stop_after(3))
    return tmp_path / "run"


class Answers(nn.Module):
    """A model with a given number of outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.features, self.head = nn.Flatten(), nn.Linear(5, outputs)

    def forward(self, x):
        return self.head(self.features(x))


# ---- models and data that do not fit -------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_model_with_too_few_outputs_is_refused(outputs, tmp_path):
    message = (
        rf"the model's output for a sample has shape \({outputs},\), but the federation has 3 "
        "classes"
    )
    with pytest.raises(InputError, match=message):
        train(federation(), model=Answers(outputs), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(federation(), model=Answers(4), rounds=1)


@pytest.mark.parametrize("model", ["mlp", "logistic", "cnn2"])
def test_whole_numbers_for_a_model_that_needs_floating_point_are_refused(model, tmp_path):
    images = np.arange(6 * 64, dtype=np.uint8).reshape(6, 1, 8, 8)
    given = Federation.from_arrays(
        images, np.arange(6) % 2, clients=[0, 0, 0, 1, 1, 1], splits=(1, 0, 0)
    )
    with pytest.raises(
        InputError,
        match=r"the model cannot take a sample: x holds uint8 of shape \(1, 8, 8\); .* such as "
        "x / 255",
    ):
        train(given, model=model, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_embedding_with_too_few_rows_is_named(tmp_path):
    tokens = np.array([[0, 1], [2, 9], [3, 4], [5, 6]])
    given = Federation.from_arrays(tokens, [0, 1, 0, 1], clients=[0, 0, 1, 1], splits=(1, 0, 0))
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(InputError, match="has an embedding fewer rows than"):
        train(given, model=model, rounds=1, out=tmp_path / "run")


def test_the_name_of_a_source_is_no_federation():
    with pytest.raises(
        InputError,
        match=r"takes a federation, not a name; use equipoise.data.load\('digits'\)",
    ):
        train("digits", rounds=1)
    with pytest.raises(InputError, match="takes a federation, got tuple; use equipoise.Federatio"):
        train((np.zeros((6, 2)), np.arange(6)), rounds=1)


def test_a_run_in_a_notebook_is_one_line():
    run = train(federation(), rounds=1)
    seen = run.summary["results"]["global"]["seen"]
    assert repr(run) == (
        "<Run of fedavg on 'clouds', seed 0, round 1 of 1; global model: accuracy "
        f"{seen['mean']:.3f} over clients, {seen['worst_client']:.3f} for the worst>"
    )


def test_a_model_is_left_as_it_was_after_it_was_tried_out():
    model = custom().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(federation(), model=model, rounds=1)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": "short"}, "training must be a mapping or of the class Training"),
        ({"machine": "cpu"}, "machine must be a mapping or of the class Machine"),
        ({"evaluation": 5}, "evaluation must be a mapping or of the class Evaluation"),
        ({"method": 3}, "method must be a name or a mapping with 'name', got 3"),
        ({"method": ["fedavg"]}, "method must be a name or a mapping"),
        ({"model": nn.Flatten}, r"it may also be an nn.Module, such as Flatten\(...\)"),
    ],
)
def test_arguments_of_another_kind_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        train(federation(), **settings)


def test_optimizer_and_schedule_may_be_given_as_in_a_file():
    plain = train(federation(), rounds=2, optimizer={"name": "sgd", "lr": 0.3}, schedule="cosine")
    made = train(
        federation(),
        rounds=2,
        optimizer=optimizer_named("sgd", lr=0.3),
        schedule=Schedule(kind="cosine"),
    )
    assert plain.config["training"] == made.config["training"]
    assert plain.summary["results"] == made.summary["results"]


# ---- directories ---------------------------------------------------------------------------------


def test_a_directory_that_holds_a_run_is_not_overwritten(broken_off):
    before = contents(broken_off)
    with pytest.raises(InputError, match=f"{broken_off} already holds a run; resume it"):
        small_run(broken_off)
    assert contents(broken_off) == before


def test_a_run_is_not_made_shorter(broken_off):
    message = f"^rounds is 6, but the run in {broken_off} was started with 7 rounds"
    with pytest.raises(InputError, match=f"{message} and cannot be made shorter; valid: 7 or more"):
        small_run(broken_off, resume=True, rounds=6)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_second_writer_is_kept_out_while_a_run_goes_on(resumed, broken_off, tmp_path):
    """A second process is refused while the first runs, and the first is not affected."""
    told = []

    def disturb(progress):
        with pytest.raises(
            RunError, match=f"another process is writing to {directory}; wait for it or choose"
        ) as error:
            small_run(directory, resume=True)
        told.append(error)

    directory = broken_off if resumed else tmp_path / "new"
    run = small_run(directory, resume=resumed, on_round=disturb)
    assert len(told) == (4 if resumed else 7)
    undisturbed = small_run(tmp_path / "other")
    assert run.summary["results"] == undisturbed.summary["results"]
    small_run(directory, resume=True)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 4}, "seed is 3 there and 4 here"),
        ({"method": "fedprox"}, "method.name is 'fedavg' there and 'fedprox' here"),
        (
            {"optimizer": optimizer_named("sgd", lr=0.3, momentum=0.5)},
            "training.optimizer.lr is 0.2 there and 0.3 here",
        ),
        ({"model": "mlp"}, r"model.hidden is \[12\] there and None here"),
        ({"evaluation": Evaluation(every=2)}, "evaluation.every is 1 there and 2 here"),
        (
            {"machine": Machine(precision="float64")},
            "machine.precision is 'float32' there and 'float64' here",
        ),
        ({"federation": federation(unseen=(6,))}, "resolved.fingerprint is "),
    ],
)
def test_another_experiment_is_not_resumed_and_the_difference_is_named(
    change, difference, broken_off
):
    before = contents(broken_off)
    with pytest.raises(InputError, match=f"{broken_off} holds another experiment: {difference}"):
        small_run(broken_off, **{"resume": True, **change})
    assert contents(broken_off) == before


def test_a_run_that_came_and_went_while_another_began_is_not_overwritten(tmp_path, monkeypatch):
    begin = Trainer.begin

    def slowly(trainer):
        monkeypatch.setattr(Trainer, "begin", begin)
        small_run(tmp_path / "run")
        begin(trainer)

    monkeypatch.setattr(Trainer, "begin", slowly)
    with pytest.raises(InputError, match="already holds a run"):
        small_run(tmp_path / "run", seed=4)
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["seed"] == 3


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(
            InputError, match=f"{tmp_path} exists and is not a run directory; choose another"
        ):
            small_run(tmp_path, resume=resume)
    with pytest.raises(InputError, match=r"thesis.txt exists and is not a run directory"):
        small_run(tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_mistake_in_the_settings_leaves_no_directory_behind(tmp_path):
    with pytest.raises(InputError):
        small_run(tmp_path / "run", cohort=100)
    with pytest.raises(InputError):
        small_run(tmp_path / "run", "fedper", model=nn.Linear(5, 3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 7, 500])
def test_a_truncated_checkpoint_is_named_and_nothing_is_touched(size, broken_off):
    os.truncate(broken_off / "checkpoint.safetensors", size)
    before = contents(broken_off)
    with pytest.raises(
        RunError, match=r"cannot read .*checkpoint.safetensors: .*truncated"
    ) as caught:
        small_run(broken_off, resume=True)
    assert "\n" not in str(caught.value)
    assert contents(broken_off) == before


def test_a_checkpoint_cut_by_one_byte_is_refused(broken_off):
    path = broken_off / "checkpoint.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(RunError, match=r"cannot read .*checkpoint.safetensors"):
        small_run(broken_off, resume=True)


def test_a_checkpoint_of_something_else_is_refused(broken_off):
    (broken_off / "checkpoint.safetensors").write_bytes(
        b"this is a text, and a rather long one for a header" * 10
    )
    with pytest.raises(
        RunError, match=r"cannot read .*checkpoint.safetensors: .*not written by Equipoise"
    ):
        small_run(broken_off, resume=True)


@pytest.mark.parametrize("name", ["metrics", "rounds", "timings"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_journal_shorter_than_the_checkpoint_says_is_refused(name, gone, broken_off):
    path = broken_off / f"{name}.jsonl"
    if gone:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    before = contents(broken_off)
    with pytest.raises(
        RunError, match=f"{name}.jsonl is shorter than when the checkpoint was written"
    ):
        small_run(broken_off, resume=True)
    assert contents(broken_off) == before


@pytest.mark.parametrize("text", ["", "just words", "method: [", "method: fedavg"])
def test_a_damaged_configuration_is_refused(text, broken_off):
    (broken_off / "config.yaml").write_text(text)
    with pytest.raises(RunError, match="config.yaml differs from what the run wrote"):
        small_run(broken_off, resume=True)
    # As in runs of older versions, which have no checksums.
    (broken_off / "SHA256SUMS").unlink()
    with pytest.raises(InputError, match=f"{broken_off} holds no run: .*config.yaml"):
        small_run(broken_off, resume=True)


def test_the_configuration_holds_what_the_run_depended_on(broken_off):
    config = yaml.safe_load((broken_off / "config.yaml").read_text())
    assert config["method"] == {
        "name": "fedavg",
        "weights": "size",
        "sampling": {"name": "uniform"},
    }
    assert config["data"] == {"name": "clouds"}
    assert config["model"] == MODEL
    assert (config["seed"], config["training"]["cohort"], config["training"]["batch_size"]) == (
        3,
        4,
        8,
    )
    assert config["training"]["optimizer"]["momentum"] == 0.5
    resolved = config["resolved"]
    assert resolved["fingerprint"] == federation().fingerprint()
    assert (resolved["shape"], resolved["outputs"], resolved["torch"]) == (
        [5],
        3,
        torch.__version__,
    )
    # The rule for a CPU: as many clients as fit into two million parameters (5·12 + 12 + 12·3 + 3
    # each).
    assert resolved["chunk"] == 2_000_000 // 111


# ---- training that fails -------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_client_and_round_and_leaves_the_last_checkpoint(tmp_path):
    # Logistic regression stays finite for a few rounds: every step of this size adds a few powers
    # of ten.
    wild = {"optimizer": optimizer_named("sgd", lr=1e37), "method": "fedavg", "model": "logistic"}
    with pytest.raises(RunError) as caught:
        small_run(tmp_path / "run", **wild, cohort=1)
    tensors, note = load_tensors(tmp_path / "run" / "checkpoint.safetensors")
    assert note["round"] >= 1
    found = re.fullmatch(
        r"round (\d+): the (training loss|model) of client (\d+) \((\d+)\) is not finite; "
        r"a smaller learning rate or training.clip may help; the checkpoint of round (\d+) is "
        r"intact",
        str(caught.value),
    )
    assert found is not None, str(caught.value)
    number, _, client, name, saved = found.groups()
    assert (int(number), int(saved)) == (note["round"] + 1, note["round"])
    assert name == federation().client_name(int(client))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    # Resuming fails in the same way: nothing of the failed round was kept.
    with pytest.raises(RunError, match=re.escape(str(caught.value))):
        small_run(tmp_path / "run", **wild, cohort=1, resume=True)
    assert [row["round"] for row in rows_of(tmp_path / "run", "rounds")] == list(
        range(1, note["round"] + 1)
    )


def test_what_was_good_before_a_failure_stays_and_can_be_resumed(tmp_path, monkeypatch):
    wanted = small_run(tmp_path / "whole")
    plain = RoundSteps._refuse_non_finite

    def spoiled(self, finite, cohort, what):
        if self.number == 5:
            finite = finite.clone()
            finite[2] = False
            spoiled.client = int(cohort.ids[2])
        plain(self, finite, cohort, what)

    monkeypatch.setattr(RoundSteps, "_refuse_non_finite", spoiled)
    with pytest.raises(RunError) as caught:
        small_run(tmp_path / "run")
    who = f"client {spoiled.client} ({spoiled.client})"
    assert f"round 5: the training loss of {who} is not finite" in str(caught.value)
    assert str(caught.value).endswith("the checkpoint of round 4 is intact")
    monkeypatch.undo()
    resumed = small_run(tmp_path / "run", resume=True)
    assert resumed.summary == wanted.summary
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


# ---- settings ------------------------------------------------------------------------------------


def test_settings_may_be_mappings():
    given = {
        "training": {"rounds": 1, "optimizer": {"name": "sgd", "lr": 0.3}},
        "evaluation": {"every": 2, "metrics": ["auroc"], "fine_tune": {"epochs": 2}},
        "machine": {"device": "cpu"},
    }
    config = train(federation(), model="mlp", **given).config
    assert (config["training"]["rounds"], config["training"]["optimizer"]["lr"]) == (1, 0.3)
    assert (config["evaluation"]["every"], config["evaluation"]["metrics"]) == (2, ["auroc"])
    assert config["evaluation"]["fine_tune"]["epochs"] == 2
    assert config["machine"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": -1}, "^rounds must be a whole number of at least 0, got -1"),
        ({"rounds": 2.5}, "^rounds must be a whole number of at least 0, got 2.5"),
        ({"epochs": 0}, "^epochs must be a whole number of at least 1, got 0"),
        ({"batch_size": 0}, "^batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": True}, "^batch_size must be a whole number of at least 1, got True"),
        ({"steps": 0}, "^steps must be a whole number of at least 1, got 0"),
        ({"clip": 0}, "^clip must be a finite number above 0, got 0"),
        ({"cohort": 0}, "^cohort must be a number of clients"),
        ({"cohort": 1.5}, "^cohort must be a number of clients"),
        ({"cohort": -0.1}, "^cohort must be a number of clients"),
        ({"cohort": 9}, "^cohort asks for 9 clients, but only 8 are registered"),
        ({"roundz": 3}, r"unknown setting 'roundz' in train\(\); did you mean 'rounds'\?"),
        (
            {"learning_rate": 3},
            r"unknown setting 'learning_rate' in train\(\); .* optimizer={'name': 'sgd', 'lr': 3}$",
        ),
        ({"early_stopping": 3}, r"a setting of the evaluation: evaluation={'patience': 3}$"),
        ({"num_rounds": 3}, r"unknown setting 'num_rounds' in train\(\); did you mean 'rounds'\?"),
        ({"grad_clip": 3}, r"unknown setting 'grad_clip' in train\(\); did you mean 'clip'\?"),
        (
            {"training": {"learning_rate": 3}},
            r"'training.learning_rate' in train\(\); did you mean 'training.optimizer.lr'\?",
        ),
        ({"modle": "mlp"}, r"unknown setting 'modle' in train\(\); did you mean 'model'\?"),
        (
            {"mu": 0.1},
            r"'mu' in train\(\); it is an option of fedprox, moon: method={'name': 'fedprox', "
            r"'mu': 0\.1}$",
        ),
        (
            {"mu": 0.1, "method": {"name": "moon"}},
            r"it is an option of moon: method={'name': 'moon', 'mu': 0\.1}$",
        ),
        ({"every": 2}, r"it is a setting of the evaluation: evaluation={'every': 2}$"),
        ({"device": "cpu"}, r"it is a setting of the machine: machine={'device': 'cpu'}$"),
        (
            {"evaluation": {"evry": 2}},
            r"unknown key 'evaluation.evry' in train\(\); did you mean 'evaluation.every'\?",
        ),
        (
            {"evaluation": {"fine_tune": {"epoch": 2}}},
            "unknown key 'evaluation.fine_tune.epoch' .* 'evaluation.fine_tune.epochs'",
        ),
        ({"machine": 3}, "machine must be a mapping or of the class Machine .*, got 3"),
        (
            {"lr": 0.5},
            r"unknown setting 'lr' in train\(\); .* optimizer={'name': 'sgd', 'lr': 0.5}$",
        ),
        (
            {"training": Training(cohort=9)},
            "^training.cohort asks for 9 clients, but only 8 are registered",
        ),
        ({"method": "fedvag"}, "unknown method 'fedvag'; did you mean 'fedavg'"),
        ({"method": {"mu": 1}}, r"method {'mu': 1} has no name"),
        ({"model": "mpl"}, "unknown model 'mpl'; did you mean 'mlp'"),
        (
            {"model": {"name": "mlp", "hiden": [3]}},
            "unknown option 'hiden' in model 'mlp'; did you mean 'hidden'",
        ),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number of at least 1, got 0"),
        (
            {"checkpoint_every": 1.5},
            "checkpoint_every must be a whole number of at least 1, got 1.5",
        ),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
    ],
)
def test_settings_that_cannot_be_carried_out_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        small_run(None, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"precision": "float23"},
            "unknown precision 'float23' in machine.precision; did you mean 'float32'",
        ),
        ({"device": "gpu"}, "unknown device 'gpu' in machine.device"),
        ({"device": "tpu:0"}, "unknown device 'tpu:0' in machine.device"),
        ({"chunk": 0}, "machine.chunk must be 'auto', 'measure' or a number of clients, got 0"),
        (
            {"chunk": "fast"},
            "machine.chunk must be 'auto', 'measure' or a number of clients, got 'fast'",
        ),
        ({"chunk": 2.0}, "machine.chunk must be 'auto', 'measure' or a number of clients, got 2.0"),
        (
            {"chunk": True},
            "machine.chunk must be 'auto', 'measure' or a number of clients, got True",
        ),
    ],
)
def test_a_machine_that_does_not_exist_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Machine(**settings)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        InputError, match=r"machine.device is 'cuda', but PyTorch sees no GPU here; valid: 'cpu'"
    ):
        Machine(device="cuda")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": -1}, "evaluation.every must be a whole number of at least 0, got -1"),
        ({"every": 1.0}, "evaluation.every must be a whole number of at least 0, got 1.0"),
        (
            {"every": 0, "select": "best"},
            "evaluation.select 'best' and evaluation.patience need evaluation.every",
        ),
        (
            {"every": 0, "patience": 2},
            "evaluation.select 'best' and evaluation.patience need evaluation.every",
        ),
        ({"select": "bset"}, "unknown value 'bset' in evaluation.select; did you mean 'best'"),
        ({"patience": 0}, "evaluation.patience must be a whole number of at least 1, got 0"),
        ({"patience": 1.5}, "evaluation.patience must be a whole number of at least 1, got 1.5"),
        ({"patience": True}, "evaluation.patience must be a whole number of at least 1, got True"),
    ],
)
def test_evaluations_that_contradict_themselves_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Evaluation(**settings)


@pytest.mark.parametrize("evaluation", [Evaluation(select="best"), Evaluation(patience=1)])
def test_choosing_a_round_without_validation_data_is_refused(evaluation, tmp_path):
    x, y = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    bare = type(federation()).from_arrays(x, y, clients=[0] * 10 + [1] * 10, splits=(0.8, 0.0, 0.2))
    with pytest.raises(
        InputError, match="choosing a round needs validation data, but no seen client has any"
    ):
        train(bare, rounds=1, evaluation=evaluation, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", [Evaluation(), Evaluation(every=3, select="best")])
def test_the_loaded_global_model_scores_what_the_metrics_say(evaluation, tmp_path):
    run = small_run(tmp_path / "run", evaluation=evaluation)
    data, module = federation(), load(tmp_path / "run")
    assert not module.training
    checked = 0
    for row in rows_of(tmp_path / "run"):
        if row["round"] == run.summary["round"]:
            loss, accuracy = measure(module, data, row["split"], row["client"])
            assert row["accuracy"] == pytest.approx(accuracy, abs=1e-12)
            assert row["loss"] == pytest.approx(loss, rel=1e-5)
            checked += 1
    assert checked == 2 * data.clients


def test_the_loaded_personal_models_score_what_the_metrics_say(tmp_path):
    run = small_run(tmp_path / "run", "local")
    data, rounds = federation(), run.summary["round"]
    rows = [
        row
        for row in rows_of(tmp_path / "run")
        if row["round"] == rounds and row["split"] == "test"
    ]
    # Clients that were never drawn, and those held out of training, train before they are
    # evaluated.
    assert [row["client"] for row in rows] == list(range(data.clients))
    for row in rows:
        for module in (load(tmp_path / "run", client=row["client"]), run.model(row["client"])):
            loss, accuracy = measure(module, data, "test", row["client"])
            assert row["accuracy"] == pytest.approx(accuracy, abs=1e-12)
            assert row["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("evaluation", [Evaluation(), Evaluation(every=0)])
@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_run_gives_the_models_it_wrote(method, evaluation, tmp_path):
    run = small_run(tmp_path / "run", method, evaluation=evaluation)
    client = 2 if method == "local" else None
    given, written = run.model(client).state_dict(), load(tmp_path / "run", client).state_dict()
    assert list(given) == list(written)
    assert all(torch.equal(given[name], written[name]) for name in written)


@dataclass(frozen=True)
class KeepsHead(LocalRule):
    """Clients that never took part do not adapt the model."""

    name = "keepshead"
    keeps = "head"


@pytest.mark.parametrize(
    "method", ["fedper", "fedrep", "local", build("fedavg", local=KeepsHead())]
)
def test_a_model_that_nobody_has_as_a_whole_is_not_handed_out(method, tmp_path):
    run = small_run(tmp_path / "run", method, cohort=2, rounds=1)
    taken_part = run.trainer.selected().clients
    # Clients with data can adapt a model, unless the rule does not define how.
    absent = [
        client for client in range(run.trainer.federation.clients) if client not in taken_part
    ]
    assert bool(absent) == (not isinstance(method, str))
    valid = f"valid: client= one of {', '.join(map(str, taken_part))}"
    loaded = [lambda client=None: load(tmp_path / "run", client)] if isinstance(method, str) else []
    for give in (run.model, *loaded):
        with pytest.raises(
            InputError, match=f"there is no global model, and clients of this method keep.*{valid}"
        ):
            give()
        for client in absent:
            with pytest.raises(InputError, match=f"client {client} has never taken part.*{valid}"):
                give(client)
        assert isinstance(give(taken_part[0]), nn.Module)


def test_heads_averaged_into_one_make_a_global_model_again(tmp_path):
    run = small_run(tmp_path / "run", "fedper", evaluation=Evaluation(every=0, average_kept=True))
    found, wanted = load(tmp_path / "run").state_dict(), run.model().state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_loaded_model_can_be_trained_on(tmp_path):
    run = small_run(tmp_path / "run")
    for module in (load(tmp_path / "run"), run.model()):
        module(federation().x[:4]).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        with torch.no_grad():
            module.head.bias += 1
    # Changes to a returned model do not affect the run.
    assert torch.equal(run.model().head.bias, load(tmp_path / "run").head.bias)


def test_a_float64_run_is_loaded_in_float64(tmp_path):
    small_run(tmp_path / "run", machine=Machine(precision="float64"))
    assert {tensor.dtype for tensor in load(tmp_path / "run").state_dict().values()} == {
        torch.float64
    }


def test_what_cannot_be_loaded_is_refused(tmp_path):
    run = small_run(tmp_path / "run", "local")
    with pytest.raises(InputError, match="client 9 does not exist; valid: 0 to 8"):
        load(tmp_path / "run", client=9)
    with pytest.raises(InputError, match="client 99 does not exist"):
        run.model(99)
    with pytest.raises(InputError, match=r"nowhere holds no run: cannot read config.yaml"):
        load(tmp_path / "nowhere")


def test_clients_are_known_by_their_names(tmp_path):
    draws = np.random.default_rng(0)
    x, y, hospitals = (
        draws.normal(size=(60, 4)),
        np.arange(60) % 3,
        np.repeat(["Nörd", "South", "West"], 20),
    )
    named = Federation.from_arrays(x, y, clients=hospitals)
    run = train(named, method="local", model="logistic", rounds=1, out=tmp_path / "run")
    for give in (run.model, lambda client: load(tmp_path / "run", client)):
        assert torch.equal(give("South").head.weight, give(1).head.weight)
        assert not torch.equal(give("Nörd").head.weight, give(1).head.weight)
        with pytest.raises(InputError, match="unknown client 'Sauth'; did you mean 'South'"):
            give("Sauth")
    nameless = train(
        load_data("digits", partition={"name": "iid", "clients": 8}),
        method="local",
        rounds=1,
        out=tmp_path / "nameless",
    )
    assert not (tmp_path / "nameless" / "names.json").exists()
    for give in (nameless.model, lambda client: load(tmp_path / "nameless", client)):
        with pytest.raises(
            InputError, match="client 'South': clients of this run have no names; pass a number"
        ):
            give("South")


def test_a_name_that_two_clients_have_is_no_answer(tmp_path):
    train(federation(), method="local", rounds=1, out=tmp_path / "run")
    (tmp_path / "run" / "names.json").write_text('["a", "b", "a"]')
    with pytest.raises(RunError, match="names.json differs from what the run wrote"):
        load(tmp_path / "run", "a")
    (tmp_path / "run" / "SHA256SUMS").unlink()
    with pytest.raises(InputError, match="client 'a': clients 0, 2 have this name; pass a number"):
        load(tmp_path / "run", "a")


def test_names_are_there_from_the_start_and_the_directory_is_valid(tmp_path):
    whole = small_run(tmp_path / "whole").directory
    names = (whole / "names.json").read_bytes()
    with pytest.raises(Stop):
        small_run(tmp_path / "run", on_round=stop_after(1))
    assert (tmp_path / "run" / "names.json").read_bytes() == names
    verify(tmp_path / "run")
    # A run that an older version began has names only at the end, and their checksum, too.
    (tmp_path / "run" / "names.json").unlink()
    begun = tmp_path / "run" / "SHA256SUMS"
    lines = [line for line in begun.read_text().splitlines() if not line.endswith("names.json")]
    begun.write_text("\n".join([*lines, ""]))
    with pytest.raises(Stop):
        small_run(tmp_path / "run", resume=True, on_round=stop_after(3))
    assert (tmp_path / "run" / "names.json").read_bytes() == names
    small_run(tmp_path / "run", resume=True)
    assert promised(tmp_path / "run") == promised(whole)
    verify(tmp_path / "run")
    assert (tmp_path / "run" / "SHA256SUMS").read_text().count("names.json") == 1


def test_names_that_were_damaged_are_noticed_before_the_run_ends(broken_off):
    path = broken_off / "names.json"
    content = path.read_text()
    path.write_text(content.replace("0", "7"))
    for use in (
        lambda: small_run(broken_off, resume=True),
        lambda: write_report([broken_off]),
    ):
        with pytest.raises(RunError, match=r"names.json differs from what the run wrote"):
            use()
    # The process was killed when it had written the checksum, but not the file.
    path.unlink()
    write_report([broken_off])
    small_run(broken_off, resume=True)
    assert path.read_text() == content


def test_names_that_differ_when_a_run_goes_on_replace_the_others(tmp_path):
    """As on Flower, where clients register during a run."""
    with pytest.raises(Stop):
        small_run(tmp_path, on_round=stop_after(1))
    renamed = [f"ward {client}" for client in range(9)]
    data = replace(federation(), client_names=tuple(renamed))
    with pytest.raises(Stop):
        small_run(tmp_path, federation=data, resume=True, on_round=stop_after(2))
    assert json.loads((tmp_path / "names.json").read_text()) == renamed
    verify(tmp_path)
    small_run(tmp_path, federation=data, resume=True)
    assert json.loads((tmp_path / "names.json").read_text()) == renamed
    verify(tmp_path)


def test_an_unfinished_run_has_no_model_to_load(broken_off):
    with pytest.raises(RunError, match=r"cannot read .*model.safetensors"):
        load(broken_off)


def test_a_module_of_ones_own_is_trained_written_and_loaded(tmp_path):
    mine = custom()
    before = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    run = small_run(tmp_path / "run", model=mine)
    assert run.config["model"] == {"name": "custom:Model"}
    # The given module is not changed.
    assert all(torch.equal(tensor, before[name]) for name, tensor in mine.state_dict().items())
    assert isinstance(mine.features[1], nn.BatchNorm1d)

    with pytest.raises(InputError, match=r"used a custom model \(Model\); pass it as module="):
        load(tmp_path / "run")
    with pytest.raises(
        InputError, match=r"does not fit the run: the shape of .* is \(6,\) there and \(4,\) here"
    ):
        load(tmp_path / "run", module=custom(width=4))
    loaded = load(tmp_path / "run", module=mine)
    assert type(mine.features[1]) is nn.BatchNorm1d
    assert type(mine.features[3]) is nn.Dropout
    assert not torch.equal(loaded.head.weight, mine.head.weight)
    for row in rows_of(tmp_path / "run"):
        if row["round"] == TRAINING.rounds and row["split"] == "test":
            loss, accuracy = measure(loaded, federation(), "test", row["client"])
            assert (row["loss"], row["accuracy"]) == pytest.approx((loss, accuracy), rel=1e-5)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 3))],
)
def test_a_method_that_names_the_head_refuses_a_module_without_one(module):
    with pytest.raises(
        InputError, match=r'the part .head., but .* train\(..., head="classifier"\)'
    ):
        small_run(None, "fedper", model=module)


def test_settings_of_a_training_object_can_be_changed_by_name():
    run = small_run(None, training=Training(rounds=5, cohort=2), rounds=2)
    assert (run.summary["rounds"], run.config["training"]["cohort"]) == (2, 2)


def test_resuming_needs_a_directory():
    with pytest.raises(InputError, match="resume=True needs out="):
        train(federation(), resume=True)


@pytest.mark.parametrize("method", ["ditto", "fedrep", "fedbabu"])
def test_an_unseen_client_has_the_model_it_was_evaluated_with(method, tmp_path):
    """The model that the client has adapted, as the method defines it."""
    run = small_run(tmp_path / "run", method, rounds=2)
    data = federation()
    (absent,) = np.flatnonzero(data.unseen).tolist()
    rows = [
        row
        for row in rows_of(tmp_path / "run")
        if (row["round"], row["client"], row["model"]) == (2, absent, "personal")
    ]
    assert {row["split"] for row in rows} == {"val", "test"}
    for row in rows:
        for module in (load(tmp_path / "run", absent), run.model(absent)):
            loss, accuracy = measure(module, data, row["split"], absent)
            assert row["accuracy"] == pytest.approx(accuracy, abs=1e-12)
            assert row["loss"] == pytest.approx(loss, rel=1e-5)


def test_clients_whose_names_are_numbers_are_not_mistaken_for_one_another(tmp_path):
    draws = np.random.default_rng(0)
    x, y, ids = draws.normal(size=(40, 4)), np.arange(40) % 2, np.repeat([3, 1, 2, 0], 10)
    data = Federation.from_arrays(x, y, clients=ids)
    run = train(data, method="local", model="logistic", rounds=1, out=tmp_path / "run")
    for give in (run.model, lambda client: load(tmp_path / "run", client)):
        message = (
            "client 3 is ambiguous: number 3 is called '0', and '3' is number 0; "
            "pass client='3' or client='0'"
        )
        with pytest.raises(InputError, match=re.escape(message)):
            give(3)
        # Each name gives the model of its samples, whatever their order.
        for name in "0123":
            kept = run.trainer.selected()
            row = kept.clients.index(list(dict.fromkeys(ids.tolist())).index(int(name)))
            assert torch.equal(give(name).head.weight, kept.own["head.weight"][row])
        assert torch.equal(give(1).head.weight, give("1").head.weight)
        assert torch.equal(give(np.int64(2)).head.weight, give("2").head.weight)
