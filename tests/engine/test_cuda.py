"""On a GPU: the same numbers as on the CPU, replayed or not, and the same bits in two runs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from equipoise.engine.settings import Machine, Training
from equipoise.methods import build
from equipoise.models.recurrent import Lstm
from equipoise.optimizers import optimizer_named
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.every_method import PAIRS, skipped, trained_by
from tests.engine.federations import images, text
from tests.engine.gpu import OPTIMIZERS, SKIP, model, needs_gpu
from tests.engine.small_models import lstm

pytestmark = needs_gpu


def trained(device, chunk, replay, method, optimizer, precision="float64", tf32=False):
    trainer = Trainer(
        images(),
        build(method),
        model(),
        Training(rounds=6, cohort=6, batch_size=8, epochs=2, optimizer=optimizer),
        Machine(device=device, precision=precision, chunk=chunk, replay=replay, tf32=tf32),
        Evaluation(every=0),
        seed=0,
    )
    trainer.run()
    return trainer


@pytest.mark.parametrize(("chunk", "replay"), [(1, True), (3, True), (10, True), (10, False)])
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        ("fedavg", "momentum"),
        ("scaffold", "momentum"),
        ("fedprox", "nesterov"),
        ("fedavg", "adamw"),
    ],
)
def test_a_gpu_gives_the_cpus_numbers(method, optimizer, chunk, replay):
    wanted = trained("cpu", 1, False, method, OPTIMIZERS[optimizer]).state.model
    found = trained("cuda", chunk, replay, method, OPTIMIZERS[optimizer]).state.model
    assert distance({n: t.cpu() for n, t in found.items()}, wanted, SKIP) <= 1e-9


def test_personal_parts_are_replayed_too():
    wanted = trained("cpu", 1, False, "local", OPTIMIZERS["momentum"])
    found = trained("cuda", 10, True, "local", OPTIMIZERS["momentum"])
    own = {
        name: stack.cpu() for name, stack in found.personal_models(found.federation.seen)[1].items()
    }
    assert distance(own, wanted.personal_models(wanted.federation.seen)[1], SKIP) <= 1e-9


@pytest.mark.parametrize(
    ("precision", "tf32"), [("float32", False), ("float32", True), ("bfloat16", False)]
)
def test_the_same_bits_twice(precision, tf32):
    first, second = (
        trained("cuda", 10, True, "fedavg", OPTIMIZERS["momentum"], precision, tf32).state.model
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in first.values())


@cache
def on_the_cpu(method, what):
    return trained_by(method, what, chunk=1)


@pytest.mark.parametrize(("chunk", "replay"), [(1, True), (10, True), (10, False)])
@pytest.mark.parametrize(("method", "what"), PAIRS)
def test_every_method_gives_the_cpus_numbers(method, what, chunk, replay):
    wanted = on_the_cpu(method, what)
    found = trained_by(method, what, chunk=chunk, device="cuda", replay=replay)
    assert distance(found, wanted, skipped(wanted, what)) <= 1e-9


def test_the_lstm_of_the_paper_step_by_step():
    torch.manual_seed(0)
    layer = Lstm(8, 256, layers=2).cuda()
    x = torch.randn(10, 80, 8, device="cuda")

    def gradients(dtype, device):
        own = Lstm(8, 256, layers=2).to(dtype=dtype, device=device)
        own.load_state_dict({name: tensor.to(dtype) for name, tensor in layer.state_dict().items()})
        last = own(x.to(dtype=dtype, device=device))
        made = torch.autograd.grad(last.square().sum(), list(own.parameters()))
        return {"output": last.detach(), **dict(zip(own.state_dict(), made, strict=True))}

    # On a CPU this is PyTorch's own loop.
    wanted = gradients(torch.float64, "cpu")
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        found = gradients(dtype, "cuda")
        assert distance({name: tensor.cpu() for name, tensor in found.items()}, wanted) <= tolerance


@pytest.mark.parametrize("tf32", [False, True])
def test_text_gives_the_same_bits_twice(tf32):
    def model_after_training():
        trainer = Trainer(
            text(),
            build("gifair"),
            lstm(),
            Training(rounds=4, cohort=6, batch_size=8, optimizer=optimizer_named("sgd", lr=0.5)),
            Machine(device="cuda", chunk=10, tf32=tf32),
            Evaluation(every=0),
            seed=0,
        )
        trainer.run()
        return trainer.state.model

    first, second = model_after_training(), model_after_training()
    assert all(torch.equal(first[name], second[name]) for name in first)
