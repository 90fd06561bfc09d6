"""The plain loop must be FedAvg, and the two sides must do the same work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.machine import Rates
from benchmarks.whole_run import Setting, by_engine, by_loop, compare, in_turn, of_the_way
from equipoise import Federation, Machine, Training
from equipoise.models import build
from equipoise.optimizers import Schedule, Sgd
from equipoise.study import load_study

SIZES = (3, 7, 4, 1)


@pytest.fixture
def setting() -> Setting:
    draws = np.random.default_rng(0)
    clients = np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = draws.normal(size=(len(clients), 5)), draws.integers(0, 3, len(clients))
    federation = Federation.from_arrays(x, y, clients=clients, splits=(1.0, 0.0, 0.0), classes=3)
    training = Training(
        rounds=4,
        cohort=2,
        epochs=2,
        batch_size=3,
        optimizer=Sgd(lr=0.3, momentum=0.9),
        schedule=Schedule(kind="steps", at=(2,), factors=(0.1,)),
    )
    return Setting(
        federation, build("logistic", shape=(5,), classes=3), training, Machine(device="cpu")
    )


def test_clients_take_turns() -> None:
    assert [in_turn(round_, 5, 2).tolist() for round_ in range(3)] == [[0, 1], [2, 3], [4, 0]]


def test_steps_are_counted_client_by_client(setting: Setting) -> None:
    # Batches of 3: 1, 3, 2 and 1 of them, twice over.
    assert [setting.steps(rounds) for rounds in (1, 2, 3)] == [8, 14, 22]
    assert setting.batches(2) == {3: 8, 1: 6}


def test_the_limit_is_counted_batch_by_batch(setting: Setting) -> None:
    """Two products of 5 x 3 weights: forwards, and for their gradient."""
    rates = Rates(operations=10.0, bytes=1e9, device="here", precision="float32")
    samples = 3 * 8 + 1 * 6
    assert setting.fewest_seconds(2, rates) == pytest.approx(2 * 2 * samples * 15 / 10.0)


def test_the_loop_is_federated_averaging(setting: Setting) -> None:
    """One round in numpy: two epochs of momentum SGD in stored order, averaged by size."""
    plain = dataclasses.replace(
        setting, training=dataclasses.replace(setting.training, shuffle=False)
    )
    found = by_loop(plain, 1, lambda: None)
    start = np.column_stack(
        [tensor.detach().numpy() for tensor in setting.model.head.parameters()]
    ).astype(float)
    total = np.zeros_like(start)
    for client in (0, 1):
        rows = setting.federation.train.of(client)
        inputs = np.column_stack([setting.federation.x.numpy()[rows], np.ones(len(rows))])
        targets = np.eye(3)[setting.federation.y.numpy()[rows]]
        head, velocity = start.copy(), np.zeros_like(start)
        for _ in range(2):
            for begin in range(0, len(rows), 3):
                batch = slice(begin, begin + 3)
                scores = np.exp(inputs[batch] @ head.T)
                error = scores / scores.sum(1, keepdims=True) - targets[batch]
                velocity = 0.9 * velocity + error.T @ inputs[batch] / len(error)
                head -= 0.3 * velocity
        total += head * len(rows) / 10
    np.testing.assert_allclose(found["head.weight"].numpy(), total[:, :5], rtol=1e-5)
    np.testing.assert_allclose(found["head.bias"].numpy(), total[:, 5], rtol=1e-5)


def test_both_sides_agree_over_a_whole_run(setting: Setting) -> None:
    plain = dataclasses.replace(
        setting, training=dataclasses.replace(setting.training, shuffle=False)
    )
    engine, loop = by_engine(plain, 4, lambda: None), by_loop(plain, 4, lambda: None)
    for name, tensor in loop.items():
        torch.testing.assert_close(engine[name], tensor, rtol=1e-4, atol=1e-6)
    assert of_the_way(setting) < 1e-5


def test_the_report_extrapolates_by_steps(setting: Setting) -> None:
    rates = Rates(1e6, 1e6, "here", "float32")
    report = compare(setting, rounds=4, loop_rounds=2, rates=rates)
    assert report["client_steps"] == 28
    # Rounds 1 and 2 of the loop are 6 and 8 steps.
    assert report["loop_seconds_extrapolated"] == pytest.approx(
        report["loop_seconds_measured"] * 28 / 14
    )
    assert report["ratio"] == pytest.approx(
        report["loop_seconds_extrapolated"] / report["engine_seconds"]
    )
    for side in ("engine", "loop"):
        rate = report[f"{side}_steps_per_second"]
        share = rate / report["limit_steps_per_second"]
        assert report[f"{side}_share_of_limit"] == pytest.approx(share)


def test_pfls_setting_is_a_study() -> None:
    study = load_study(Path(__file__).with_name("pfl-cifar10.yaml"))
    training = study.jobs[0].experiment.training
    assert (training.rounds, training.cohort, training.batch_size) == (1500, 50, 10)
    assert study.jobs[0].experiment.plain()["data"]["partition"]["clients"] == 1000
