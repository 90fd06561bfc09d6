"""Settings: what they refuse, their meaning, and their plain form."""

from __future__ import annotations

import json

import pytest
import torch

from equipoise.data.augment import Crop, Flip
from equipoise.engine.settings import Machine, Training
from equipoise.errors import InputError
from equipoise.optimizers import Adam, Schedule, Sgd, optimizer_named
from equipoise.run.plain import optimizer_from, schedule_from, to_plain
from tests.engine.gpu import pretend_gpus


@pytest.mark.parametrize("name", ["epochs", "batch_size", "steps"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_lengths_are_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(
        InputError, match=f"training.{name} must be a whole number of at least 1, got {value!r}"
    ):
        Training(**{name: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_rounds_are_a_whole_number(value):
    with pytest.raises(
        InputError, match=f"training.rounds must be a whole number of at least 0, got {value!r}"
    ):
        Training(rounds=value)


def test_steps_may_be_left_open():
    assert Training(steps=None).steps is None


@pytest.mark.parametrize("cohort", [0, -2, 0.0, 1.5, True, float("nan")])
def test_a_cohort_is_a_number_or_a_fraction_of_clients(cohort):
    with pytest.raises(InputError, match="training.cohort must be"):
        Training(cohort=cohort)


@pytest.mark.parametrize(
    ("cohort", "registered", "wanted"),
    [(1.0, 7, 7), (0.5, 7, 4), (0.1, 50, 5), (0.001, 50, 1), (3, 7, 3), (1, 7, 1)],
)
def test_cohort_sizes_by_hand(cohort, registered, wanted):
    assert Training(cohort=cohort).cohort_size(registered) == wanted


def test_a_cohort_larger_than_the_federation_is_refused():
    with pytest.raises(InputError, match="asks for 8 clients, but only 7 are registered"):
        Training(cohort=8).cohort_size(7)


@pytest.mark.parametrize("clip", [0, -1.0, float("nan")])
def test_a_gradient_limit_is_positive(clip):
    with pytest.raises(InputError, match="training.clip must be a finite number above 0"):
        Training(clip=clip)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu' in machine.device"),
        (
            {"device": "cpu:x"},
            "unknown device 'cpu:x' in machine.device.*Valid: auto, cpu, cuda, cuda:N",
        ),
        ({"device": "cpu:3"}, "unknown device 'cpu:3'"),
        ({"device": "cuda:"}, "unknown device 'cuda:'"),
        ({"device": "cuda:-1"}, "unknown device 'cuda:-1'"),
        ({"device": "auto:0"}, "unknown device 'auto:0'"),
        ({"precision": "float16"}, "unknown precision 'float16'.*did you mean"),
        ({"chunk": 0}, "machine.chunk must be"),
        (
            {"chunk": "atuo"},
            "machine.chunk must be 'auto', 'measure' or a number of clients, got 'atuo'",
        ),
    ],
)
def test_machines_that_are_not_there_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Machine(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named():
    with pytest.raises(InputError, match="PyTorch sees no GPU"):
        Machine(device="cuda:0")
    assert Machine(device="auto").torch_device == torch.device("cpu")


def test_a_gpu_with_a_number_that_is_too_high_is_refused_with_the_numbers_there_are(monkeypatch):
    pretend_gpus(monkeypatch, 2)
    for number in (2, 9999):
        with pytest.raises(
            InputError,
            match=f"machine.device is 'cuda:{number}', but there are 2 GPUs, numbered from 0",
        ):
            Machine(device=f"cuda:{number}")
    assert Machine(device="cuda:1").torch_device == torch.device("cuda", 1)
    assert Machine(device="auto").torch_device == torch.device("cuda")


@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [
        ("float32", torch.float32, None),
        ("float64", torch.float64, None),
        ("bfloat16", torch.float32, torch.bfloat16),
    ],
)
def test_precisions(precision, dtype, autocast):
    machine = Machine(device="cpu", precision=precision)
    assert (machine.dtype, machine.autocast) == (dtype, autocast)


# ---- plain form ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        Sgd(lr=0.3, momentum=0.9, nesterov=True),
        Adam(lr=0.01, betas=(0.8, 0.9)),
        optimizer_named("adamw", lr=0.01, weight_decay=0.2),
        optimizer_named("rmsprop", lr=0.01, alpha=0.9),
    ],
    ids=["sgd", "adam", "adamw", "rmsprop"],
)
def test_an_optimizer_survives_its_plain_form(optimizer):
    plain = json.loads(json.dumps(to_plain(optimizer)))
    assert optimizer_from(plain) == optimizer


def test_plain_forms_by_hand():
    assert to_plain(Sgd(lr=0.5)) == {
        "name": "sgd",
        "lr": 0.5,
        "momentum": 0.0,
        "dampening": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
    }
    assert to_plain(optimizer_named("adamw"))["name"] == "adamw"
    assert to_plain(optimizer_named("rmsprop", lr=0.1, alpha=0.9)) == {
        "name": "rmsprop",
        "lr": 0.1,
        "alpha": 0.9,
    }
    assert to_plain(Crop(padding=2)) == {"name": "crop", "padding": 2}
    assert to_plain(3) == 3


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(),
        Schedule(kind="cosine", floor=0.1),
        Schedule(kind="steps", at=(2, 5), factors=(0.5, 0.1)),
    ],
)
def test_a_schedule_survives_its_plain_form(schedule):
    assert schedule_from(json.loads(json.dumps(to_plain(schedule)))) == schedule


def test_a_schedule_may_be_a_bare_kind():
    assert schedule_from("cosine") == Schedule(kind="cosine")


def test_whole_training_settings_become_plain():
    training = Training(rounds=3, optimizer=Adam(), augment=(Flip(), Crop(padding=1)), clip=1.0)
    plain = json.loads(json.dumps(to_plain(training)))
    assert plain["optimizer"]["name"] == "adam"
    assert plain["augment"] == [{"name": "flip"}, {"name": "crop", "padding": 1}]
    assert (plain["rounds"], plain["clip"], plain["schedule"]["kind"]) == (3, 1.0, "constant")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optimizer_from({"lr": 0.1}),
            "training.optimizer must be a name or a mapping with 'name'",
        ),
        (lambda: optimizer_from("sdg"), "did you mean 'sgd'"),
        (
            lambda: schedule_from({"kindd": "cosine"}),
            "unknown key 'kindd' in training.schedule; did you mean 'kind'",
        ),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(InputError, match=message):
        make()
