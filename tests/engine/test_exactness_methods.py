"""Every method, with images and with text: stacked clients and one client at a time give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.engine.settings import Machine, Training
from equipoise.federation import Federation
from equipoise.methods import build, names
from equipoise.models import build as build_model
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from equipoise.run.trainer import Evaluation, Trainer
from tests.engine.plain_loop import federated_averaging
from tests.engine.test_exactness import SIZES, THREE_COHORTS, WITHOUT_GRADIENT, batchnorm, distance, engine_run, images


def text(seed=0, sizes=SIZES):
    """Ten clients of very unequal sizes in two groups; the next of seven characters depends on the last."""
    draws = np.random.default_rng(seed)
    clients = np.repeat(np.arange(len(sizes)), sizes)
    x = draws.integers(0, 7, (len(clients), 9))
    y = np.where(draws.random(len(clients)) < 0.7, (x[:, -1] + 1) % 7, draws.integers(0, 7, len(clients)))
    y[:7] = np.arange(7)
    groups = {client: ("few", "many")[client % 2] for client in range(len(sizes))}
    return Federation.from_arrays(x, y, clients=clients, groups=groups, splits=(1.0, 0.0, 0.0), classes=7)


def lstm():
    return build_model("charlstm", shape=(9,), classes=7, seed=3, embedding=3, hidden=5).double()


class Tempered(nn.Module):
    """A linear layer whose scores are multiplied by one learnable number."""

    def __init__(self, *sizes):
        super().__init__()
        self.linear = nn.Linear(*sizes)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.linear(x) * self.temperature


def single_numbers():
    torch.manual_seed(4)
    return Model(nn.Sequential(nn.Flatten(), Tempered(50, 8), nn.ReLU()), Tempered(8, 4)).double()


SETTINGS = {
    "images": (images, batchnorm, 0.05),
    "images, own statistics": (images, lambda: batchnorm(running=False), 0.05),
    "text": (text, lstm, 0.5),
    "single numbers": (images, single_numbers, 0.05),
}
# FedBN is for models with BatchNorm that keeps statistics.
PAIRS = [(method, what) for method in names() for what in SETTINGS if (method, what == "images") != ("fedbn", False)]


def trained(method, what, *, chunk, device="cpu", replay=False, rounds=3):
    """Train six of ten clients a round, and give the global model and the personal ones, if there are any."""
    federation, model, lr = SETTINGS[what]
    trainer = Trainer(
        federation(),
        build(method),
        model(),
        Training(rounds=rounds, cohort=6, batch_size=8, epochs=2, optimizer=Sgd(lr=lr, momentum=0.5)),
        Machine(device=device, precision="float64", chunk=chunk, replay=replay),
        Evaluation(every=0),
        seed=0,
    )
    trainer.run()
    models = {f"global {name}": tensor for name, tensor in trainer.global_model.items()}
    if trainer.layout.kept:
        _, own = trainer.personal_models(trainer.federation.seen)
        models |= {f"own {name}": stack for name, stack in own.items()}
    return {name: tensor.cpu() for name, tensor in models.items()}


def skipped(models, what):
    """Name the tensors whose true gradient is zero, which optimizers fill with rounding noise."""
    return {name for name in models if what != "text" and name.split()[1] in WITHOUT_GRADIENT}


@pytest.mark.parametrize(("method", "what"), PAIRS)
def test_stacked_equals_one_by_one(method, what):
    wanted = trained(method, what, chunk=1)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in wanted.values())
    assert distance(trained(method, what, chunk=10), wanted, skipped(wanted, what)) <= 1e-9
    # A round less is far away: the numbers compared are not those of the first model.
    assert distance(trained(method, what, chunk=10, rounds=2), wanted, skipped(wanted, what)) > 1e-5


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_single_numbers_equal_the_plain_loop(chunk):
    how = {"batch_size": 8, "epochs": 2, "clip": 0.5}
    wanted = federated_averaging(
        single_numbers(),
        images(),
        THREE_COHORTS,
        seed=5,
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
        **how,
    )
    optimizer = Sgd(lr=0.1, momentum=0.5)
    found = engine_run(single_numbers(), images(), THREE_COHORTS, chunk=chunk, optimizer=optimizer, **how)
    assert found["head.temperature"].shape == ()
    assert abs(found["head.temperature"].item() - 1.5) > 1e-3
    assert distance(found, wanted) <= 1e-9
