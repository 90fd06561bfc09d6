"""Local rules of several parts and several batches a step, replayed on a GPU: the CPU's numbers."""

from __future__ import annotations

import pytest
import torch

from equipoise.engine.settings import Machine, Training
from equipoise.methods import build
from equipoise.run.trainer import Evaluation, Trainer
from tests.engine.test_cuda import OPTIMIZERS, SKIP, model
from tests.engine.test_exactness import distance, images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")

METHODS = {
    "fedcrc": {"tau": 0.5},
    "fedrep": {},
    "fedbn": {},
    "perfedavg": {"alpha": 0.1},
    "perfedavg-hf": {"alpha": 0.1, "hessian": True, "delta": 0.01},
}


def trained(device, chunk, replay, name):
    trainer = Trainer(
        images(),
        build(name.partition("-")[0], **METHODS[name]),
        model(),
        Training(rounds=6, cohort=6, batch_size=8, epochs=2, optimizer=OPTIMIZERS["momentum"]),
        Machine(device=device, precision="float64", chunk=chunk, replay=replay),
        Evaluation(every=0),
        seed=0,
    )
    trainer.run()
    own = trainer.personal_models(trainer.federation.seen)[1]
    return [{name: tensor.cpu() for name, tensor in tree.items()} for tree in (trainer.state.model, own)]


@pytest.mark.parametrize(("chunk", "replay"), [(1, True), (3, True), (10, True), (10, False)])
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_gives_the_cpus_numbers(name, chunk, replay):
    wanted = trained("cpu", 1, False, name)
    for found, tree in zip(trained("cuda", chunk, replay, name), wanted, strict=True):
        assert distance(found, tree, SKIP) <= 1e-9
