"""Samples encoded by a model's stem: the same numbers as without, computed once and cached."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import Evaluation, Federation, Machine, Training, train
from equipoise.data.augment import Flip
from equipoise.data.cache import MappedArray
from equipoise.engine.stacked import StackedEngine
from equipoise.methods import build as build_method
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen
from equipoise.models.passes import Forward
from equipoise.optimizers import Sgd
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.federations import SIZES, images
from tests.engine.small_models import transformer

SAMPLES = sum(SIZES)
# The model is tested on three samples, in its original and its converted form, and the first sample
# is part of the key.
TRIED = 3 + 3 + 1
SHAPE = (1, 8, 8)


@pytest.fixture(autouse=True)
def entries(tmp_path, monkeypatch):
    """A cache directory for the test; return the arrays in it."""
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return lambda: sorted((tmp_path / "cache" / "arrays").glob("*.npy"))


class Counting(nn.Module):
    """Counts the samples that pass through it, over all copies."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        Counting.samples += len(x)
        return x * self.scale


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Return how many samples have passed since the last call."""
    monkeypatch.setattr(Counting, "samples", 0, raising=False)

    def since():
        passed, Counting.samples = Counting.samples, 0
        return passed

    return since


class Reordered(nn.Module):
    """Takes numbers in an order given by integers."""

    def __init__(self, order):
        super().__init__()
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x):
        return x[:, self.order]


def model(seed=0, scale=1.0, order=range(12)):
    """A frozen stem that counts samples, then trained layers."""
    torch.manual_seed(seed)
    stem = nn.Sequential(
        Counting(scale), nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Dropout(0.4)
    )
    nn.init.normal_(stem[3].running_mean)
    torch.manual_seed(1)
    features = nn.Sequential(nn.Linear(12, 8), nn.ReLU())
    return Model(
        features, nn.Linear(8, 4), stem=Frozen(nn.Sequential(stem, Reordered(list(order))))
    )


def trainer(module=None, federation=None, method="fedavg", rounds=3, augment=(), **machine):
    machine = {"device": "cpu", "precision": "float64", "chunk": 10, **machine}
    training = Training(
        rounds=rounds,
        cohort=6,
        batch_size=8,
        epochs=2,
        optimizer=Sgd(lr=0.1, momentum=0.5),
        augment=augment,
    )
    made = Trainer(
        federation or images(shape=SHAPE),
        build_method(method),
        module or model().double(),
        training,
        Machine(**machine),
        Evaluation(every=0),
        seed=0,
    )
    made.run()
    return made


@pytest.mark.parametrize("make", [lambda: model().double(), transformer], ids=["linear", "prompts"])
@pytest.mark.parametrize("method", ["fedavg", "fedcrc", "fedrep"])
@pytest.mark.parametrize("chunk", [1, 10])
def test_encoded_runs_are_as_plain_ones(make, method, chunk):
    found, wanted = (
        trainer(make(), method=method, chunk=chunk, encode=encode) for encode in (True, False)
    )
    assert (found.engine.network.encoded, wanted.engine.network.encoded) == (True, False)
    assert distance(found.state.model, wanted.state.model) <= 1e-9
    assert distance(found.state.model, wanted.engine.network.initial()) > 1e-3


def test_encoded_runs_in_float32_are_near_plain_ones():
    found, wanted = (
        trainer(model(), precision="float32", encode=encode).state.model for encode in (True, False)
    )
    assert distance(found, wanted) <= 1e-5


def test_metrics_of_encoded_runs_are_those_of_the_model_as_a_whole():
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(100, *SHAPE, generator=draws), torch.arange(100) % 4
    federation = Federation.from_arrays(x, y, clients=np.arange(100) // 10, classes=4)
    run = train(federation, model=model(), rounds=2, machine=Machine(device="cpu"))
    whole = run.model()
    with torch.no_grad():
        hits = whole(x).argmax(1) == federation.y
    rows = [row for row in run.trainer.metrics if row["split"] == "test" and row["round"] == 2]
    assert len(rows) == 10
    for row in rows:
        assert row["accuracy"] == pytest.approx(
            float(hits[federation.test.of(row["client"])].double().mean())
        )


def test_the_stem_runs_once_a_sample_and_in_the_next_start_not_at_all(counted, entries):
    first = trainer()
    assert counted() == SAMPLES + TRIED
    assert len(entries()) == 1
    second = trainer()
    assert counted() == TRIED
    assert distance(second.state.model, first.state.model) == 0
    trainer(encode=False)
    assert counted() > 3 * SAMPLES
    assert len(entries()) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"module": lambda: model(seed=1).double()},
        # Neither of these is a floating point tensor.
        {"module": lambda: model(scale=2.0).double()},
        {"module": lambda: model(order=range(11, -1, -1)).double()},
        {"federation": lambda: images(seed=1, shape=SHAPE)},
        {"precision": lambda: "float32"},
        {"frozen": lambda: "bfloat16"},
    ],
    ids=["weights", "code", "order", "data", "precision", "frozen"],
)
def test_what_differs_has_an_entry_of_its_own(other, counted, entries):
    trainer(rounds=1)
    counted()
    made = trainer(rounds=1, **{name: make() for name, make in other.items()})
    assert counted() == SAMPLES + TRIED
    assert len(entries()) == 2
    x = made.federation.x[:4].to(made.engine.network.dtype)
    assert torch.equal(made.engine.data.inputs(torch.arange(4)), made.engine.network.encode(x))


def test_a_value_of_a_moving_tensor_is_no_part_of_the_key(counted, entries):
    trainer(rounds=1)
    counted()
    other = model().double()
    nn.init.zeros_(other.head.bias)
    trainer(other, rounds=1)
    assert counted() == TRIED
    assert len(entries()) == 1


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-100], lambda content: content[:500] + b"\x07" * 8 + content[508:]],
)
def test_a_damaged_entry_is_made_again(damage, counted, entries):
    wanted = trainer(rounds=1).state.model
    (entry,) = entries()
    intact = entry.read_bytes()
    entry.write_bytes(damage(intact))
    counted()
    assert distance(trainer(rounds=1).state.model, wanted) == 0
    assert counted() == SAMPLES + TRIED
    # The end of the file holds the time at which it was written.
    assert entry.read_bytes()[:-64] == intact[:-64]


@pytest.mark.parametrize("chunk", [1, 10])
def test_augmented_samples_are_encoded_in_every_step(chunk, counted, entries):
    # A tape would not call the model's code, where passes are counted.
    trainer(augment=(Flip(),), chunk=chunk, rounds=1, replay=False)
    in_one_round = counted()
    made = trainer(augment=(Flip(),), chunk=chunk, replay=False)
    assert not made.engine.network.encoded
    # The six smallest clients hold 30 samples, and use each in both epochs.
    assert counted() >= in_one_round + 2 * (2 * 30)
    assert entries() == []
    assert distance(made.state.model, made.engine.network.initial()) > 1e-3
    assert distance(made.state.model, trainer(encode=False).state.model) > 1e-6


def test_augmented_clients_are_the_same_stacked_and_alone():
    wanted, *others = (trainer(augment=(Flip(),), chunk=chunk).state.model for chunk in (1, 3, 10))
    for found in others:
        assert distance(found, wanted) <= 1e-9


def test_samples_on_disk_are_encoded(tmp_path, counted, entries):
    federation = images(shape=SHAPE)
    array = MappedArray.write(
        tmp_path / "x.npy", tuple(federation.x.shape), federation.x.dtype, [federation.x]
    )
    on_disk = replace(federation, x=array)
    found = trainer(federation=on_disk)
    assert counted() == SAMPLES + TRIED
    assert distance(found.state.model, trainer(federation=federation).state.model) == 0
    counted()
    trainer(federation=on_disk)
    assert counted() == TRIED
    assert len(entries()) == 2


def test_encoded_samples_may_stay_on_disk(monkeypatch):
    """Encoded samples that are too large for memory are read batch by batch."""
    wanted = trainer().state.model
    monkeypatch.setattr("equipoise.data.encode._IN_MEMORY", 1000)
    found = trainer()
    assert isinstance(found.engine.data.x, MappedArray)
    assert distance(found.state.model, wanted) == 0


def test_bytes_are_encoded_as_they_are():
    """The stem gets integers, and may scale them itself."""
    federation = images(shape=SHAPE)
    as_bytes = replace(federation, x=(40 * federation.x + 128).clamp(0, 255).to(torch.uint8))
    module = transformer()
    module.stem.module.prepare = Scaled()
    found, wanted = (
        trainer(module, as_bytes, encode=encode).state.model for encode in (True, False)
    )
    assert distance(found, wanted) <= 1e-9


class Scaled(nn.Module):
    """Bytes as numbers from 0 to 1."""

    def forward(self, x):
        return x.double() / 255


def test_a_model_with_a_forward_of_its_own_is_not_encoded(counted, entries):
    class Doubled(Model):
        def forward(self, x):
            return 2 * super().forward(x)

    given = model().double()
    made = trainer(Doubled(given.features, given.head, stem=given.stem), rounds=1)
    assert not made.engine.network.encoded
    assert entries() == []
    assert counted() > SAMPLES
    network, x = made.engine.network, made.federation.x[:3]
    torch.testing.assert_close(
        network.apply(network.initial(), x, Forward(train=False)).output, 2 * given.eval()(x)
    )


def test_an_engine_over_encoded_samples_knows_what_they_take():
    engine = StackedEngine(
        images(shape=SHAPE), transformer(), Training(), Machine(device="cpu", precision="float64")
    )
    assert engine.data.inputs(torch.arange(2)).shape == (2, 5, 16)
    # Five tokens of sixteen numbers, which the stem, the Frozen around it and its layers each
    # return in part.
    assert 2 * 5 * 16 <= engine.network.stem_activations <= 5 * 5 * 16 + 64
