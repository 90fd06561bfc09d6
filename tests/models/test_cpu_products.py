"""Products of large float32 matrices with oneDNN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import train
from equipoise.data import load
from equipoise.engine.settings import Machine, Training
from equipoise.models import cpu_products
from equipoise.models.linear_layers import Linear
from equipoise.models.recurrent import Lstm

pytestmark = pytest.mark.skipif(
    not cpu_products.serves(), reason="this PyTorch has no product of oneDNN"
)


@pytest.fixture(autouse=True)
def _faster(monkeypatch):
    """Use oneDNN on any processor."""
    monkeypatch.setattr(cpu_products, "is_faster", lambda: True)


@pytest.fixture
def calls(monkeypatch):
    """The shapes of all products of oneDNN."""
    seen = []
    multiply = cpu_products.Product.forward

    def counted(x, weight, bias):
        seen.append((*x.shape, len(weight)))
        return multiply(x, weight, bias)

    monkeypatch.setattr(cpu_products.Product, "forward", staticmethod(counted))
    return seen


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def derivatives(multiply, x, weight, bias):
    """Return the result, its gradients, and the gradients of their squares."""
    leaves = [
        tensor.detach().requires_grad_() for tensor in (x, weight, bias) if tensor is not None
    ]
    y = multiply(*leaves)
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
    return [tensor.detach() for tensor in (y, *first, *second)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        (drawn(32, 256), drawn(256, 256, seed=1)),
        (drawn(9, 1000), drawn(300, 1000, seed=1)),
        (drawn(256, 64).mT, drawn(256, 256, seed=1).mT),
        (drawn(1, 256).expand(40, 256), drawn(512, 512, seed=1)[::2, ::2]),
    ],
)
def test_products_and_two_derivatives_are_those_of_pytorch(given, biased, calls):
    bias = drawn(len(given[1]), seed=2) if biased else None
    found = derivatives(cpu_products.linear, *given, bias)
    assert len(calls) > 3
    exact = [None if tensor is None else tensor.double() for tensor in (*given, bias)]
    for own, wanted in zip(found, derivatives(F.linear, *exact), strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(
            own.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())
        )
    # The gradient by the weights lies in memory as contiguous weights do.
    assert found[2].is_contiguous()


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (drawn(32, 64), drawn(64, 64)),
        (drawn(4, 2000), drawn(1000, 2000)),
        (drawn(32, 256).double(), drawn(256, 256).double()),
        (drawn(4, 8, 256), drawn(256, 256)),
    ],
    ids=["small", "few rows", "float64", "three axes"],
)
def test_other_products_are_those_of_pytorch(x, weight, calls):
    assert torch.equal(cpu_products.linear(x, weight), F.linear(x, weight))
    assert not calls


def test_nothing_changes_in_transforms_and_under_autocast(calls):
    x, weight = drawn(2, 32, 256), drawn(2, 256, 256)
    stacked = torch.func.vmap(cpu_products.linear)(x, weight)
    torch.testing.assert_close(stacked, torch.stack(list(map(F.linear, x, weight))))
    with torch.autocast("cpu", torch.bfloat16):
        assert cpu_products.linear(x[0], weight[0]).dtype == torch.bfloat16
    assert not calls


def test_layers_use_it(calls):
    dense, recurrent = Linear(nn.Linear(256, 256)), Lstm(256, 64)
    dense(drawn(4, 8, 256))
    recurrent(drawn(2, 16, 256))
    assert calls == [(32, 256, 256), (32, 256, 256)]


def test_recorded_and_plain_steps_have_the_same_bits(calls):
    """Operations of oneDNN can be recorded, and repeated with the same results."""
    runs = [
        train(
            load("digits"),
            model={"name": "mlp", "hidden": [1024]},
            training=Training(rounds=2, cohort=1, epochs=2, batch_size=32),
            machine=Machine(device="cpu", replay=replay),
        )
        for replay in (True, False)
    ]
    assert calls
    one, two = (run.model().state_dict() for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)
