"""Local rules with several parts and batches per step: the same numbers on a GPU and a CPU."""

from __future__ import annotations

import pytest
import torch

from equipoise.engine import frozen
from equipoise.engine.settings import Machine, Training
from equipoise.method import Phase
from equipoise.methods import build
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.gpu import OPTIMIZERS, SKIP, model, needs_gpu
from tests.engine.local_rules import Heads, by_first_pixel

pytestmark = needs_gpu

METHODS = {
    "fedcrc": {"tau": 0.5},
    "fedrep": {},
    "fedbn": {},
    "perfedavg": {"alpha": 0.1},
    "perfedavg-hf": {"alpha": 0.1, "hessian": True, "delta": 0.01},
}


class OwnHeads(Heads):
    keeps = "head"


# A loss that reads the samples of a batch whose features are frozen.
LOOKS = OwnHeads(Phase(move="head", loss=by_first_pixel))


def trained(device, chunk, replay, name, precision="float64"):
    trainer = Trainer(
        images(),
        build("fedavg", local=LOOKS)
        if name == "looks"
        else build(name.partition("-")[0], **METHODS[name]),
        model(),
        Training(rounds=6, cohort=6, batch_size=8, epochs=2, optimizer=OPTIMIZERS["momentum"]),
        Machine(device=device, precision=precision, chunk=chunk, replay=replay),
        Evaluation(every=0),
        seed=0,
    )
    trainer.run()
    own = trainer.personal_models(trainer.federation.seen)[1]
    return [
        {name: tensor.cpu() for name, tensor in tree.items()} for tree in (trainer.state.model, own)
    ]


@pytest.mark.parametrize(("chunk", "replay"), [(1, True), (3, True), (10, True), (10, False)])
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_gives_the_cpus_numbers(name, chunk, replay):
    wanted = trained("cpu", 1, False, name)
    for found, tree in zip(trained("cuda", chunk, replay, name), wanted, strict=True):
        assert distance(found, tree, SKIP) <= 1e-9


@pytest.mark.parametrize(("chunk", "replay"), [(1, True), (3, True), (10, True), (10, False)])
@pytest.mark.parametrize("name", ["fedcrc", "fedrep", "looks"])
def test_frozen_features_give_the_numbers_of_computing_them_in_every_step(
    name, chunk, replay, monkeypatch
):
    """Cohorts of different sizes in turn: recorded steps must notice a reallocation of z."""
    found = trained("cuda", chunk, replay, name)
    monkeypatch.setattr(frozen, "_LARGEST", 0)
    for tree, wanted in zip(found, trained("cuda", chunk, False, name), strict=True):
        assert distance(tree, wanted, SKIP) <= 1e-9


def test_frozen_features_give_the_same_bits_twice():
    first, second = (trained("cuda", 10, True, "fedcrc", "bfloat16") for _ in range(2))
    for tree, again in zip(first, second, strict=True):
        assert all(torch.equal(tree[name], again[name]) for name in tree)
