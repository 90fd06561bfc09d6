"""Stacked clients, one client at a time, and a plain PyTorch loop give the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.engine.cohort import StackedEngine
from equipoise.engine.settings import Machine, Training
from equipoise.federation import Federation
from equipoise.method import State
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.optimizers import optimizer_named
from tests.engine.plain_loop import federated_averaging

SIZES = [1, 3, 7, 20, 53, 8, 2, 16, 9, 31]


def images(seed=0, sizes=SIZES):
    """Ten clients of very unequal sizes; each holds its samples in train, one more in test."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    x = torch.randn(total, 2, 5, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (total,), generator=generator)
    y[:4] = torch.arange(4)
    clients = np.repeat(np.arange(len(sizes)), sizes)
    return Federation.from_arrays(x, y, clients=clients, splits=(1.0, 0.0, 0.0), classes=4)


def mlp(dropout=0.0):
    torch.manual_seed(1)
    layers = [nn.Flatten(), nn.Linear(50, 12), nn.ReLU()]
    return Model(nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else [])), nn.Linear(12, 4)).double()


def batchnorm(running=True):
    torch.manual_seed(2)
    first, second = (nn.BatchNorm2d(channels, track_running_stats=running) for channels in (6, 5))
    features = nn.Sequential(nn.Conv2d(2, 6, 3), first, nn.ReLU(), nn.Conv2d(6, 5, 2), second, nn.ReLU(), nn.Flatten())
    return Model(features, nn.Linear(20, 4)).double()


# A bias that BatchNorm subtracts again has a true gradient of zero; optimizers amplify its rounding noise.
WITHOUT_GRADIENT = {"features.0.bias", "features.3.bias"}

OPTIMIZERS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "weight_decay": 0.01},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
}
TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}


def engine_run(module, federation, cohorts, *, chunk, seed=5, precision="float64", method="fedavg", **training):
    method = build(method)
    settings = Training(rounds=len(cohorts), **training)
    engine = StackedEngine(federation, module, settings, Machine(device="cpu", precision=precision, chunk=chunk), seed)
    state = method.aggregation.begin(State(0, engine.network.initial()), engine.cohort(method, federation.seen, 0))
    for round_, clients in enumerate(cohorts):
        cohort = engine.cohort(method, np.asarray(clients), round_)
        shared, each = method.aggregation.send(state, cohort)
        state = method.aggregation.combine(state, cohort.train(shared, each, method.local), cohort)
        state = replace(state, round=round_ + 1)
        engine.memory.commit()
    return state.model


def distance(found, wanted, skip=frozenset()):
    """The largest relative difference over the model's tensors."""
    assert set(found) == set(wanted)
    return max(
        float((found[n].double() - wanted[n].double()).norm() / wanted[n].double().norm().clamp(min=1e-12))
        for n in wanted
        if n not in skip
    )


THREE_COHORTS = [np.arange(10), np.array([0, 2, 4, 5, 9]), np.array([1, 3, 4, 6, 7, 8])]


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
@pytest.mark.parametrize(("make", "skip"), [(mlp, set()), (batchnorm, WITHOUT_GRADIENT)], ids=["mlp", "bn"])
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
        mlp(), federation, THREE_COHORTS[:1], chunk=chunk, batch_size=8, epochs=2, clip=0.3, optimizer=optimizer
    )
    assert distance(found, wanted) <= 1e-9
    free = engine_run(mlp(), federation, THREE_COHORTS[:1], chunk=chunk, batch_size=8, epochs=2, optimizer=optimizer)
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
    found = engine_run(mlp(), federation, THREE_COHORTS, chunk=7, batch_size=8, epochs=2, optimizer=optimizer)
    assert distance(found, wanted) <= 1e-9


@pytest.mark.parametrize("make", [lambda: mlp(0.3), batchnorm], ids=["dropout", "bn"])
def test_an_update_does_not_depend_on_chunk_mates(make):
    federation = images()
    method = build("fedavg")
    settings = Training(batch_size=8, epochs=2, optimizer=optimizer_named("sgd", lr=0.1, momentum=0.9))

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
    found = engine_run(mlp(), federation, THREE_COHORTS[:1], chunk=10, batch_size=8, steps=9, optimizer=optimizer)
    assert distance(found, wanted) <= 1e-9


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "fedavgm", "fedadam", "fedyogi"])
@pytest.mark.parametrize("make", [mlp, batchnorm], ids=["mlp", "bn"])
def test_stacked_equals_one_by_one_for_every_method(method, make):
    federation = images()
    how = {"batch_size": 8, "epochs": 2, "optimizer": optimizer_named("sgd", lr=0.05), "method": method}
    one_by_one = engine_run(make(), federation, THREE_COHORTS, chunk=1, **how)
    stacked = engine_run(make(), federation, THREE_COHORTS, chunk=10, **how)
    # Server-side Adam divides a gradient of zero plus rounding by its own size, so those biases are left out.
    assert distance(stacked, one_by_one, WITHOUT_GRADIENT) <= 1e-9
