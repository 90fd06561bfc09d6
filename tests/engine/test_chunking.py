"""The number of stacked clients, and of samples per pass: computed by hand."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.engine import chunking
from equipoise.engine.chunking import (
    chunk_by_rule,
    chunk_on_gpu,
    even_chunks,
    fits_beside,
    samples_a_pass,
    samples_an_encoding,
)
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen
from equipoise.models.recurrent import Lstm
from tests.engine.federations import SIZES, images

SHAPE = (1, 8, 8)
# The bounds for a CPU: of all stacked parameters, of the activations of a step, and of those of a
# pass without gradient.
PARAMETERS, STEP, PASS = 2_000_000, 2**28, 2**27


class Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x):
        return x.mean(1)


class Sequence(nn.Module):
    """Four numbers of the last output of a recurrent layer that reads the rows of an image."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        rows = x.flatten(1, 2)
        if isinstance(self.layer, Lstm):
            return self.layer(rows)[:, :4]
        return self.layer(rows.transpose(0, 1))[0][-1, :, :4]


def wide(width):
    """Few parameters, many activations: 64 tokens of ``width`` numbers."""
    layers = [nn.Flatten(), nn.Unflatten(1, (64, 1)), nn.Linear(1, width), Mean()]
    return nn.Sequential(*layers)


# Flatten, Unflatten, Linear and Mean, and the Sequential around them.
def activations_of_wide(width):
    return 64 + 64 + 64 * width + width + width


def engine_of(model, batch_size=32, **machine):
    return StackedEngine(
        images(shape=SHAPE),
        model,
        Training(batch_size=batch_size),
        Machine(device="cpu", **machine),
    )


def deep(wrapped):
    """A hundred thousand parameters before a small head, frozen or not."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 1400), nn.ReLU(), nn.Linear(1400, 6))
    return Model(nn.Sequential(wrapped(body), nn.Linear(6, 5)), nn.Linear(5, 4))


def fixed(module):
    return module.requires_grad_(False)


@pytest.mark.parametrize("freeze", [Frozen, fixed])
def test_frozen_parameters_do_not_count(freeze):
    moving = 6 * 5 + 5 + 5 * 4 + 4
    free = 64 * 1400 + 1400 + 1400 * 6 + 6
    engine, whole = engine_of(deep(freeze)), engine_of(deep(lambda body: body))
    assert whole.chunk == PARAMETERS // (free + moving) == 20
    by_parameters, by_activations = PARAMETERS // moving, STEP // (32 * engine.network.activations)
    assert engine.chunk == min(by_parameters, by_activations) > 1000


@pytest.mark.parametrize("batch_size", [4, 32, 1000])
def test_activations_of_a_step_are_bounded(batch_size):
    width = 2048
    engine = engine_of(Model(wide(width), nn.Linear(width, 4)), batch_size)
    # The head, and the output of the whole model, which is not called.
    activations = activations_of_wide(width) + 4
    assert engine.network.activations == activations
    parameters = 2 * width + width * 4 + 4
    samples = min(batch_size, max(SIZES))
    assert engine.chunk == min(PARAMETERS // parameters, STEP // (samples * activations))
    assert (engine.chunk == PARAMETERS // parameters) == (batch_size == 4)
    assert chunk_by_rule(engine.network, 10**9) == 1


@pytest.mark.parametrize(
    ("layer", "alone"),
    [
        (nn.LSTM(8, 32), True),
        (nn.LSTM(8, 64, bidirectional=True), True),
        (Lstm(8, 32), True),
        (nn.LSTM(8, 31), False),
        (Lstm(8, 31), False),
        (nn.LSTM(8, 64, num_layers=2, dropout=0.1), True),
        (nn.LSTM(8, 64, proj_size=4), False),
        (nn.GRU(8, 64), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_cpu_trains_wide_lstms_one_by_one(layer, alone, precision):
    """Others are slower alone, and oneDNN is used in float32 only."""
    model = Model(Sequence(copy.deepcopy(layer)), nn.Linear(4, 4))
    engine = engine_of(model, precision=precision)
    assert (engine.chunk == 1) == (alone and precision == "float32")


def test_a_chunk_that_is_given_is_used_as_it_is():
    assert engine_of(Model(wide(2048), nn.Linear(2048, 4)), chunk=7).chunk == 7


@pytest.mark.parametrize("models", [1, 10])
def test_passes_without_gradient_are_bounded_too(models):
    small = engine_of(Model(wide(16), nn.Linear(16, 4))).network
    assert samples_a_pass(small, models) == 4096
    large = engine_of(Model(wide(8192), nn.Linear(8192, 4))).network
    assert samples_a_pass(large, models) == PASS // (activations_of_wide(8192) + 4) == 248


@pytest.mark.parametrize(
    ("samples", "fixed", "fits"), [(1000, 0, True), (1001, 0, False), (1000, 1, False)]
)
def test_an_evaluation_beside_training_takes_an_eighth_of_a_gpu(samples, fixed, fits, monkeypatch):
    memory = SimpleNamespace(total_memory=8 * 4 * 50_000 * 1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    network = SimpleNamespace(
        device=torch.device("cuda"),
        dtype=torch.float32,
        activations=50_000,
        fixed_activations=fixed,
        module=nn.ReLU(),
    )
    assert fits_beside(network, samples) == fits


def test_stems_encode_as_many_samples_as_their_own_activations_allow():
    torch.manual_seed(0)
    stem = Frozen(wide(8192))
    network = engine_of(Model(nn.Linear(8192, 8), nn.Linear(8, 4), stem=stem)).network
    # The Frozen returns the output of the Sequential in it once more.
    stem_activations = activations_of_wide(8192) + 8192
    assert network.stem_activations == stem_activations
    assert samples_an_encoding(network) == PASS // stem_activations
    # Encoded samples are not computed again.
    assert network.activations == 8 + 4
    assert samples_a_pass(network, 1) == 4096
    plain = engine_of(Model(nn.Linear(8192, 8), nn.Linear(8, 4), stem=stem), encode=False).network
    assert plain.activations == stem_activations + 8 + 4


class Constant(nn.Module):
    """A head whose weights come from a frozen layer with fixed inputs, whatever the batch."""

    def __init__(self, rows):
        super().__init__()
        self.inputs = nn.Parameter(torch.ones(rows, 64))
        self.layer = Frozen(nn.Linear(64, 64))

    def forward(self, z):
        return z @ self.layer(self.inputs)[:4].T


def test_what_does_not_grow_with_the_batch_counts_once():
    rows = 2**14
    engine = engine_of(Model(nn.Flatten(), Constant(rows)), batch_size=1000)
    # Features and scores of each sample; the frozen layer and the one inside it for the batch.
    assert (engine.network.activations, engine.network.fixed_activations) == (64 + 4, 2 * 64 * rows)
    assert engine.chunk == min(PARAMETERS // (64 * rows), STEP // (1000 * 68 + 2 * 64 * rows)) == 1
    assert samples_a_pass(engine.network, 1) == 4096


@pytest.mark.parametrize("arithmetic", ["float32", "tf32", "bfloat16"])
def test_a_gpu_stacks_as_many_clients_as_fill_it_and_fit_into_it(arithmetic):
    parameters, activations = 1_600_000, 2_000_000
    full = chunking._GPU_FULL[arithmetic] // (parameters + activations)
    assert chunk_on_gpu(parameters, activations, 10**15, arithmetic) == full > 10
    # Half of the memory, in numbers of four bytes, with the copies that a step holds.
    memory = 2 * 4 * 7 * (8 * parameters + 12 * activations)
    assert chunk_on_gpu(parameters, activations, memory, arithmetic) == 7
    assert chunk_on_gpu(10**12, 10**12, memory, arithmetic) == 1


@pytest.mark.parametrize(
    ("machine", "arithmetic"),
    [
        ({}, "float32"),
        ({"tf32": True}, "tf32"),
        ({"precision": "bfloat16", "tf32": True}, "bfloat16"),
        ({"precision": "float64", "tf32": True}, "float64"),
    ],
)
def test_the_rule_knows_every_arithmetic(machine, arithmetic):
    engine = engine_of(Model(wide(16), nn.Linear(16, 4)), **machine)
    found = chunking._arithmetic(engine.network, engine.machine.tf32)
    assert found == arithmetic
    assert found in chunking._GPU_FULL


def test_a_cohort_is_divided_into_equal_chunks():
    for clients in range(1, 60):
        for most in range(1, 60):
            size = even_chunks(clients, most)
            assert size <= most
            # As few chunks as with the largest size, and none of them smaller than it must be.
            assert -(-clients // size) == -(-clients // most)
            assert size == 1 or -(-clients // (size - 1)) > -(-clients // size)


def test_training_follows_equal_chunks(monkeypatch):
    engine = engine_of(Model(wide(16), nn.Linear(16, 4)), chunk=6)
    sizes = []
    whole = engine.workshop.train

    def counted(chunk, *rest):
        sizes.append(len(chunk.seen))
        return whole(chunk, *rest)

    monkeypatch.setattr(engine.workshop, "train", counted)
    method = build("fedavg")
    cohort = engine.cohort(method, np.arange(10), 0)
    cohort.train({"model": engine.network.initial()}, {}, method.local)
    assert sizes == [5, 5]
