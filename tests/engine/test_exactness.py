"""Stacked clients, one client at a time, and a plain PyTorch loop give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.methods import build
from equipoise.optimizers import optimizer_named
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.optimizers import OPTIMIZERS, TORCH
from tests.engine.plain_loop import federated_averaging
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.rounds import engine_run


@pytest.mark.parametrize("chunk", [1, 3, 7, 10])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("make", "skip"),
    [(mlp, set()), (lambda: mlp(0.3), set()), (batchnorm, WITHOUT_GRADIENT)],
    ids=["mlp", "dropout", "bn"],
)
def test_three_rounds_equal_the_plain_loop_in_float64(make, skip, optimizer, chunk):
    federation, options = images(), OPTIMIZERS[optimizer]
    wanted = federated_averaging(
        make(),
        federation,
        THREE_COHORTS,
        seed=5,
        make_optimizer=lambda params: TORCH[optimizer](params, **options),
        batch_size=8,
        epochs=2,
    )
    found = engine_run(
        make(),
        federation,
        THREE_COHORTS,
        chunk=chunk,
        batch_size=8,
        epochs=2,
        optimizer=optimizer_named(optimizer, **options),
    )
    assert distance(found, wanted, skip) <= 1e-9


@pytest.mark.parametrize("chunk", [1, 3, 10])
@pytest.mark.parametrize(
    ("make", "skip"), [(mlp, set()), (batchnorm, WITHOUT_GRADIENT)], ids=["mlp", "bn"]
)
def test_one_step_equals_the_plain_loop_in_float32(make, skip, chunk):
    federation, options = images(), OPTIMIZERS["sgd"]
    everyone = [np.arange(10)]
    wanted = federated_averaging(
        make().float(),
        federation,
        everyone,
        seed=5,
        make_optimizer=lambda params: torch.optim.SGD(params, **options),
        batch_size=8,
        epochs=1,
        max_steps=1,
    )
    optimizer = optimizer_named("sgd", **options)
    found = engine_run(
        make().float(),
        federation,
        everyone,
        chunk=chunk,
        precision="float32",
        batch_size=8,
        steps=1,
        optimizer=optimizer,
    )
    assert distance(found, wanted, skip) <= 1e-5


@pytest.mark.parametrize("chunk", [1, 4])
def test_gradient_clipping_is_per_client(chunk):
    federation = images()
    wanted = federated_averaging(
        mlp(),
        federation,
        THREE_COHORTS[:1],
        seed=5,
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        batch_size=8,
        epochs=2,
        clip=0.3,
    )
    optimizer = optimizer_named("sgd", lr=0.5)
    found = engine_run(
        mlp(),
        federation,
        THREE_COHORTS[:1],
        chunk=chunk,
        batch_size=8,
        epochs=2,
        clip=0.3,
        optimizer=optimizer,
    )
    assert distance(found, wanted) <= 1e-9
    free = engine_run(
        mlp(),
        federation,
        THREE_COHORTS[:1],
        chunk=chunk,
        batch_size=8,
        epochs=2,
        optimizer=optimizer,
    )
    assert distance(free, wanted) > 1e-3


def test_an_optimizer_without_stacked_form_runs_one_client_at_a_time():
    federation = images()
    wanted = federated_averaging(
        mlp(),
        federation,
        THREE_COHORTS,
        seed=5,
        make_optimizer=lambda params: torch.optim.RMSprop(params, lr=0.01, alpha=0.9, momentum=0.5),
        batch_size=8,
        epochs=2,
    )
    optimizer = optimizer_named("rmsprop", lr=0.01, alpha=0.9, momentum=0.5)
    found = engine_run(
        mlp(), federation, THREE_COHORTS, chunk=7, batch_size=8, epochs=2, optimizer=optimizer
    )
    assert distance(found, wanted) <= 1e-9


@pytest.mark.parametrize("make", [lambda: mlp(0.3), batchnorm], ids=["dropout", "bn"])
def test_an_update_does_not_depend_on_chunk_mates(make):
    federation = images()
    method = build("fedavg")
    settings = Training(
        batch_size=8, epochs=2, optimizer=optimizer_named("sgd", lr=0.1, momentum=0.9)
    )

    def update_of_client_4(cohort_ids, chunk):
        machine = Machine(device="cpu", precision="float64", chunk=chunk)
        engine = StackedEngine(federation, make(), settings, machine, seed=5)
        cohort = engine.cohort(method, np.array(cohort_ids), 0)
        updates = cohort.train({"model": engine.network.initial()}, {}, method.local)
        row = list(cohort.ids).index(4)
        return {name: stack[row] for name, stack in {**updates.params, **updates.buffers}.items()}

    alone = update_of_client_4([4], 1)
    for cohort_ids, chunk in [([4, 0, 9], 10), ([1, 2, 3, 4, 5, 6], 3), (range(10), 7)]:
        assert distance(update_of_client_4(cohort_ids, chunk), alone, WITHOUT_GRADIENT) <= 1e-9


def test_fixed_steps_run_through_epochs_alike_for_all_clients():
    federation = images()
    optimizer = optimizer_named("sgd", lr=0.1)
    wanted = federated_averaging(
        mlp(),
        federation,
        THREE_COHORTS[:1],
        seed=5,
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        epochs=20,
        max_steps=9,
    )
    found = engine_run(
        mlp(), federation, THREE_COHORTS[:1], chunk=10, batch_size=8, steps=9, optimizer=optimizer
    )
    assert distance(found, wanted) <= 1e-9


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "fedavgm", "fedadam", "fedyogi"])
@pytest.mark.parametrize("make", [mlp, batchnorm], ids=["mlp", "bn"])
def test_stacked_equals_one_by_one_for_every_method(method, make):
    federation = images()
    how = {
        "batch_size": 8,
        "epochs": 2,
        "optimizer": optimizer_named("sgd", lr=0.05),
        "method": method,
    }
    one_by_one = engine_run(make(), federation, THREE_COHORTS, chunk=1, **how)
    stacked = engine_run(make(), federation, THREE_COHORTS, chunk=10, **how)
    # Server-side Adam divides a zero gradient plus rounding by its own size, so these biases are
    # left out.
    assert distance(stacked, one_by_one, WITHOUT_GRADIENT) <= 1e-9
