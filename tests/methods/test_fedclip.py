"""FedCLIP and PromptFL: FedAvg of an adapter or of prompts, and the contrastive loss by a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import Federation, Machine, train
from equipoise.config import experiment_from
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.models.frozen import Frozen
from tests.engine.federations import images

SMALL = {"patch": 4, "width": 8, "depth": 1, "heads": 2}
EXACT = Machine(device="cpu", precision="float64")


def pictures():
    """Ten clients of unequal sizes with images of four classes."""
    return images(shape=(1, 8, 8))


def with_splits():
    data = images(shape=(1, 8, 8), sizes=[12] * 6)
    clients = np.repeat(np.arange(6), 12)
    return Federation.from_arrays(
        data.x, data.y, clients=clients, splits=(0.5, 0.25, 0.25), classes=4
    )


@pytest.mark.parametrize(
    ("method", "model"), [("fedclip", "clipadapter"), ("promptfl", "clipprompts")]
)
def test_they_are_fedavg_with_a_model_of_their_own(method, model):
    assert build(method).usual_model == model
    assert experiment_from({"data": "digits", "method": method}).model["name"] == model
    ours, fedavg = (
        train(
            pictures(), method=name, model={"name": model, **SMALL}, rounds=2, machine=EXACT
        ).trainer.state.model
        for name in (method, "fedavg")
    )
    assert ours.keys() == fedavg.keys()
    assert all(torch.equal(tensor, fedavg[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    ("method", "model", "numbers"),
    [
        ("fedclip", {"name": "clipadapter", "width_factor": 2.0}, 2 * 8 * 16 + 16 + 8),
        ("promptfl", {"name": "clipprompts", "context": 5}, 5 * 8),
    ],
)
def test_only_the_adapter_or_the_context_is_sent(method, model, numbers):
    run = train(
        pictures(), method=method, model={**model, **SMALL}, rounds=2, machine=Machine(device="cpu")
    )
    for row in run.trainer.rounds:
        # A client adds its training loss, its steps and a validation loss, of eight bytes each.
        assert (row["bytes_down"], row["bytes_up"]) == (10 * 4 * numbers, 10 * (4 * numbers + 24))


def linear(frozen):
    """Two linear layers, of which the first one may be frozen."""
    first = nn.Linear(64, 8)
    return nn.Sequential(nn.Flatten(), Frozen(first) if frozen else first, nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("method", "usual"), [("fedclip", "clipadapter"), ("promptfl", "clipprompts")]
)
@pytest.mark.parametrize("model", ["mlp", linear(frozen=False)], ids=["by name", "own"])
def test_models_without_frozen_parts_are_refused(method, usual, model):
    said = f"method '{method}' .* no part of this model is frozen, .* valid: model '{usual}'"
    with pytest.raises(InputError, match=said):
        train(pictures(), method=method, model=model, rounds=1)
    with pytest.raises(InputError, match=said):
        train(pictures(), method={"name": "ga", "local": method}, model=model, rounds=1)


@pytest.mark.parametrize("method", ["fedclip", "promptfl"])
def test_own_models_with_frozen_parts_are_trained(method):
    run = train(pictures(), method=method, model=linear(frozen=True), rounds=1)
    assert set(run.trainer.state.model) == {"2.weight", "2.bias"}


def test_the_contrastive_loss_trains_any_model():
    method = {"name": "fedclip", "contrastive": True}
    assert train(pictures(), method=method, model="mlp", rounds=1).summary["method"] == "fedclip"


@pytest.mark.parametrize("model", ["clipadapter", "clipprompts"])
@pytest.mark.parametrize("method", ["fedprox", "ditto", "perfedavg", "ga", "faa"])
def test_other_methods_train_these_models(method, model):
    run = train(
        with_splits(), method=method, model={"name": model, **SMALL}, rounds=2, machine=EXACT
    )
    first = run.trainer.engine.network.initial()
    assert all(
        not torch.equal(tensor, first[name]) for name, tensor in run.trainer.state.model.items()
    )
    assert run.summary["results"]["global"]["seen"]["mean"] >= 0


def test_the_server_half_can_be_another_one():
    method = build("promptfl", aggregation="faa")
    assert (method.usual_model, method.aggregation.name) == ("clipprompts", "faa")


def by_a_loop(scores, y):
    """FedCLIP's loss of a batch, image by image."""
    total = 0.0
    for i in range(len(y)):
        own = math.exp(scores[i][y[i]])
        of_prompts = sum(math.exp(scores[i][label]) for label in y)
        of_images = sum(math.exp(row[y[i]]) for row in scores)
        total -= (math.log(own / of_prompts) + math.log(own / of_images)) / 2
    return total / len(y)


@pytest.mark.parametrize("chunk", [1, 10])
def test_the_contrastive_loss_of_unequal_clients_by_a_loop(chunk):
    """One step with all samples of each client. Stacked, all but the largest client are padded."""
    data = pictures()
    run = train(
        data,
        method={"name": "fedclip", "contrastive": True},
        model={"name": "clipadapter", **SMALL},
        rounds=1,
        batch_size=64,
        machine=Machine(device="cpu", precision="float64", chunk=chunk),
    )
    network = run.trainer.engine.network
    model = network.blank().double()
    losses = []
    with torch.no_grad():
        for client in range(data.clients):
            rows = data.train.of(client)
            losses.append(by_a_loop(model(data.x[rows]).tolist(), data.y[rows].tolist()))
    weights = data.train.sizes / data.train.sizes.sum()
    first = next(iter(run.trainer.rounds))
    assert first["train_loss"] + first["method_terms"] == pytest.approx(
        float(weights @ losses), rel=1e-9
    )


def test_the_contrastive_loss_needs_classes():
    targets = Federation.from_arrays(
        torch.rand(12, 3), torch.rand(12), clients=[0, 1] * 6, task="regression"
    )
    with pytest.raises(InputError, match="fedclip compares images with classes, .* regression"):
        train(targets, method={"name": "fedclip", "contrastive": True}, model="logistic", rounds=1)


def test_methods_that_treat_the_parts_apart_refuse_these_models():
    with pytest.raises(
        InputError,
        match="uses the part 'head', but the model has no trainable tensors there",
    ):
        train(pictures(), method="fedrep", model={"name": "clipadapter", **SMALL}, rounds=1)
