"""Gradients that are left as factors: where they are right, and steps that are made with them.

They run on a GPU, or slowly on the CPU in Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from equipoise.engine.replay import Replay
from equipoise.engine.settings import Machine, Training
from equipoise.engine.workshop import Workshop
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.optimizers import Adam, Sgd, steps
from equipoise.optimizers.penalties import Penalties
from equipoise.phases import plain_gradient
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.gpu import needs_gpu
from tests.engine.local_rules import Written
from tests.engine.rerun import Rerun

pytest.importorskip("triton", reason="needs Triton, which is not made for this system")

from equipoise.models import factored, update_kernels
from equipoise.models.update_kernels import Factors, Rule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, SAMPLES = 2, 3
# Largest error over the largest value.
ERROR = {"ieee": 1e-6, "split": 1e-6, "tf32": 1e-3, "bfloat16": 2e-2}


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float().to(DEVICE)


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ERROR)
@pytest.mark.parametrize(
    ("samples", "rows", "columns"), [(3, 5, 7), (1, 1, 1), (17, 70, 66), (16, 16, 64)], ids=str
)
def test_a_step_by_factors(samples, rows, columns, precision):
    upper, x = normal(CLIENTS, samples, rows), normal(CLIENTS, samples, columns, seed=1)
    weight, lr = normal(CLIENTS, rows, columns, seed=2), torch.tensor([0.5, 0.25]).to(DEVICE)
    wanted = weight - lr.view(-1, 1, 1).double() * (upper.double().mT @ x.double())
    update_kernels.descend([weight], [Factors(upper, x, precision)], None, lr.double(), Rule())
    error = (weight - wanted).abs().max() / wanted.abs().max()
    assert error <= ERROR[precision]


@pytest.mark.parametrize(("strength", "sloped"), [(0.0, True), (0.6, False), (0.6, True)])
@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (70, 66)], ids=str)
def test_a_step_by_factors_with_a_penalty(rows, columns, sloped, strength):
    """Its gradient is added before weight decay and momentum, and its value is from before."""
    upper, x = normal(CLIENTS, SAMPLES, rows), normal(CLIENTS, SAMPLES, columns, seed=1)
    weight, lr = normal(CLIENTS, rows, columns, seed=2), torch.tensor([0.5, 0.25]).to(DEVICE)
    anchor, slope = normal(columns, rows, seed=3).mT, normal(CLIENTS, rows, columns, seed=4)
    velocity = normal(CLIENTS, rows, columns, seed=5)
    gradient = upper.double().mT @ x.double() + strength * (weight.double() - anchor)
    gradient += slope.double() if sloped else 0
    moved = 0.5 * velocity.double() + gradient + 0.1 * weight
    wanted = weight - lr.view(-1, 1, 1).double() * moved
    penalty = strength / 2 * (weight.double() - anchor).square().sum((1, 2))
    penalty += (weight.double() * slope).sum((1, 2)) if sloped else 0
    penalties = Penalties(strength, [anchor], [slope] if sloped else None)
    factors, rule = Factors(upper, x, "ieee"), Rule(momentum=0.5, decay=0.1)
    value = update_kernels.descend([weight], [factors], [velocity], lr.double(), rule, penalties)
    torch.testing.assert_close(value, penalty, rtol=1e-5, atol=1e-4)
    for found, own in ((weight, wanted), (velocity, moved)):
        assert (found - own).abs().max() / own.abs().max() <= ERROR["ieee"]


@pytest.mark.parametrize(("samples", "wanted"), [(32, "ieee"), (33, "tf32")])
def test_with_a_penalty_factors_of_few_samples_are_multiplied_in_float32(
    samples, wanted, monkeypatch
):
    class Listed:
        def __getitem__(self, grid):
            return lambda *given, PRECISION, **options: made.append(PRECISION)

    made = []
    monkeypatch.setattr(update_kernels, "_step_by_factors", Listed())
    upper, x = normal(CLIENTS, samples, 4), normal(CLIENTS, samples, 6, seed=1)
    weight, rates = normal(CLIENTS, 4, 6), torch.ones(CLIENTS, dtype=torch.float64, device=DEVICE)
    for precision in ("tf32", "bfloat16"):
        for penalties in (Penalties(0.5, [weight[0]], None), None):
            factors = Factors(upper, x, precision)
            update_kernels.descend([weight], [factors], None, rates, Rule(), penalties)
    assert made == [wanted, "tf32", "bfloat16", "bfloat16"]


@pytest.mark.parametrize("lowered", [False, True])
def test_factors_may_be_views_and_of_fewer_clients_and_in_bfloat16(lowered):
    """Clients that have finished do not change."""
    dtype = torch.bfloat16 if lowered else torch.float32
    upper = normal(CLIENTS, 4, SAMPLES).to(dtype).mT
    x = normal(CLIENTS, 8, 6, seed=1).to(dtype)[:, ::2][:, :SAMPLES]
    weight, before = normal(3, 4, 6, seed=2), normal(3, 4, 6, seed=2)
    rates = torch.ones(CLIENTS, dtype=torch.float64, device=DEVICE)
    given = Factors(upper, x, "bfloat16" if lowered else "ieee")
    update_kernels.descend([weight[:CLIENTS]], [given], None, rates, Rule())
    wanted = before.double()
    wanted[:CLIENTS] -= upper.double().mT @ x.double()
    torch.testing.assert_close(weight.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight[2], before[2])


# ---- the graph of the losses ---------------------------------------------------------------------


def gradients(of_one_client, shape=(4, 4), dtype=torch.float32):
    """Return the gradients by two stacked matrices, plainly and perhaps as factors."""
    params = [normal(CLIENTS, *shape, seed=seed).to(dtype) for seed in (1, 2)]
    x = normal(CLIENTS, SAMPLES, shape[1]).to(dtype)

    def value(leaves):
        return vmap(of_one_client)(x, *leaves)

    return plain_gradient(value, params), factored.gradient(value, params)


def product(x, weight, bias=None):
    return factored.product(x, weight, bias)


def of_sum(y):
    return y.square().sum()


class Reversed(torch.autograd.Function):
    """A function that returns its argument, with another gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, upper):
        return -upper


# What losses do with the first matrix; the second is a usual layer.
FACTORED = {
    "used once": lambda x, w: product(x, w),
    "read without a gradient": lambda x, w: product(x, w) + F.linear(x, w.detach()) * x.sum(),
    "seen in another shape": lambda x, w: product(x, w.view(2, 8).view(4, 4)),
}
WHOLE = {
    "used twice": lambda x, w: product(product(x, w), w),
    "regularised": lambda x, w: product(x, w) + w.square().sum(),
    "not by our function": lambda x, w: F.linear(x, w),
    "transposed": lambda x, w: product(x, w.t()),
    "permuted": lambda x, w: product(x, w.permute(1, -2)),
    "transposed and copied": lambda x, w: product(
        x, w.permute(1, 0).to(torch.float64, memory_format=torch.contiguous_format).float()
    ),
    "scaled": lambda x, w: product(x, 2 * w),
    "a part": lambda x, w: product(x, w[:2]).repeat(1, 2),
    "with a gradient of its own": lambda x, w: product(x, Reversed.apply(w)),
    "as the input": lambda x, w: product(w, x).t(),
    "not at all": lambda x, w: x,
    "differentiated twice": lambda x, w: (
        product(x, w) + grad(lambda w: product(x, w).pow(3).sum())(w).sum()
    ),
}


@pytest.mark.parametrize("case", FACTORED | WHOLE)
def test_only_weights_that_one_product_uses_have_factors(case):
    use = (FACTORED | WHOLE)[case]
    plain, found = gradients(lambda x, first, second: of_sum(product(use(x, first), second)))
    assert torch.equal(plain[0], found[0])
    assert [isinstance(each, Factors) for each in found[1]] == [case in FACTORED, True]
    for own, wanted in zip(found[1], plain[1], strict=True):
        made = own.upper.mT @ own.x if isinstance(own, Factors) else own
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_only_float32_and_few_samples_have_factors(monkeypatch):
    def loss(x, first, second):
        return of_sum(product(product(x, first), second))

    assert all(isinstance(each, Tensor) for each in gradients(loss, dtype=torch.float64)[1][1])
    monkeypatch.setattr(factored, "_MOST_ROWS", SAMPLES - 1)
    assert all(isinstance(each, Tensor) for each in gradients(loss)[1][1])


@pytest.mark.parametrize("few", [SAMPLES, SAMPLES - 1])
@pytest.mark.parametrize("precision", ["tf32", "split", "bfloat16"])
def test_factors_of_few_rows_are_multiplied_in_float32(precision, few, monkeypatch):
    monkeypatch.setattr(factored, "precision_on", lambda device: precision)
    limits = {"tf32": few, "split": few, "bfloat16": 0}
    monkeypatch.setattr(factored, "_FEW_ROWS", limits)
    _, found = gradients(lambda x, first, second: of_sum(product(product(x, first), second)))
    wanted = "ieee" if precision != "bfloat16" and few == SAMPLES else precision
    assert [each.precision for each in found[1]] == [wanted, wanted]


def test_weights_that_are_lowered_have_factors():
    def loss(x, first, second):
        return of_sum(product(x.bfloat16(), first.bfloat16()).float()) + of_sum(second)

    plain, found = gradients(loss)
    factors = found[1][0]
    assert factors.upper.dtype == factors.x.dtype == torch.bfloat16
    made = factors.upper.double().mT @ factors.x.double()
    assert float((made - plain[1][0]).abs().max() / made.abs().max()) <= ERROR["bfloat16"]


@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_that_of_pytorch(biased):
    x, weight = normal(CLIENTS, SAMPLES, 5), normal(CLIENTS, 4, 5, seed=1)
    bias = normal(CLIENTS, 4, seed=2)
    given = [tensor.requires_grad_() for tensor in (x, weight, *([bias] if biased else []))]
    found, wanted = vmap(product)(*given), vmap(F.linear)(*given)
    torch.testing.assert_close(found, wanted)
    for own, other in zip(
        *(torch.autograd.grad(y.pow(3).sum(), given) for y in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_clients_may_share_weights_or_samples():
    x, weight, bias = normal(CLIENTS, SAMPLES, 5), normal(4, 5, seed=1), normal(4, seed=2)
    for dims, given in (
        ((0, None, None), (x, weight, bias)),
        ((None, 0, None), (x[0], torch.stack([weight, 2 * weight]), bias)),
        ((1, None, None), (x.movedim(0, 1), weight, None)),
    ):
        own = [None if tensor is None else tensor.clone().requires_grad_() for tensor in given]
        found, wanted = (vmap(each, in_dims=dims)(*own) for each in (product, F.linear))
        torch.testing.assert_close(found, wanted)
        leaves = [tensor for tensor in own if tensor is not None]
        for one, other in zip(
            *(torch.autograd.grad(y.pow(3).sum(), leaves) for y in (found, wanted)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


# ---- in the engine -------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Use the kernels on this device, and list the matrices that are updated by factors."""
    shapes = []

    def counted(group, *given, launch=update_kernels._launch_factors):
        shapes.append(tuple(group[0][0].shape))
        launch(group, *given)

    monkeypatch.setattr(update_kernels, "_launch_factors", counted)
    monkeypatch.setattr(
        steps, "kernels_for", lambda lr: update_kernels if isinstance(lr, Tensor) else None
    )
    return shapes


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(50, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.again(self.again(self.first(x.flatten(1))).relu())


def one_layer():
    return nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.ReLU())


def trained(method="fedavg", features=one_layer, recorder=None, device="cpu", **training):
    torch.manual_seed(1)
    trainer = Trainer(
        images(sizes=[1, 3, 5, 4]),
        build(**({"name": method} if isinstance(method, str) else method)),
        Model(features(), nn.Linear(6, 4)),
        Training(
            **{"rounds": 2, "cohort": 4, "batch_size": 2, "optimizer": Sgd(lr=0.1)} | training
        ),
        Machine(device=device, precision="float32", chunk=10),
        Evaluation(every=0),
        seed=0,
    )
    if recorder is not None:
        trainer.engine.workshop = Workshop(Replay(recorder))
    trainer.run()
    return trainer.global_model


CASES = {
    "fedavg": ({}, True),
    "momentum": ({"optimizer": Sgd(lr=0.1, momentum=0.5, weight_decay=0.1)}, True),
    "nesterov": ({"optimizer": Sgd(lr=0.1, momentum=0.5, nesterov=True)}, True),
    "fedprox": ({"method": {"name": "fedprox", "mu": 0.5}}, True),
    "feddyn": ({"method": "feddyn", "optimizer": Sgd(lr=0.1, weight_decay=0.1)}, True),
    "scaffold": ({"method": "scaffold"}, True),
    "ditto": ({"method": "ditto"}, True),
    "a distance in the loss": (
        {"method": {"name": "fedavg", "local": Written(0.5, sloped=False)}},
        False,
    ),
    "clipping": ({"clip": 0.1}, False),
    "another gradient": ({"method": "perfedavg"}, False),
    "another optimizer": ({"optimizer": Adam(lr=0.01)}, False),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="the engine runs on the CPU here")
@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_give_the_numbers_of_ordinary_gradients(case, launched, monkeypatch):
    options, serves = CASES[case]
    found = trained(recorder=Rerun(), **options)
    assert bool(launched) == serves
    assert {shape[1:] for shape in launched} == ({(6, 50), (4, 6)} if serves else set())
    monkeypatch.setattr(steps, "kernels_for", lambda lr: None)
    assert distance(found, trained(**options)) <= 2e-6


@pytest.mark.skipif(DEVICE == "cuda", reason="the engine runs on the CPU here")
def test_a_layer_that_is_called_twice_has_an_ordinary_gradient(launched, monkeypatch):
    found = trained(features=Twice, recorder=Rerun())
    assert {shape[1:] for shape in launched} == {(6, 50), (4, 6)}
    monkeypatch.setattr(steps, "kernels_for", lambda lr: None)
    assert distance(found, trained(features=Twice)) <= 2e-6


@pytest.mark.skipif(DEVICE == "cuda", reason="the engine runs on the CPU here")
def test_steps_that_are_not_recorded_have_ordinary_gradients(launched):
    trained()
    assert launched == []


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_cpus_numbers(case):
    """The steps of later rounds are replayed."""
    options, _ = CASES[case]
    found = trained(device="cuda", rounds=4, **options)
    on_cpu = {name: tensor.cpu() for name, tensor in found.items()}
    assert distance(on_cpu, trained(rounds=4, **options)) <= 1e-3
