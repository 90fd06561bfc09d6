"""Products of three TF32 products against float64.

They run on a GPU, or slowly on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad

from equipoise.models.frozen import Frozen
from equipoise.models.linear_layers import Linear
from equipoise.models.passes import Forward, forward_pass
from tests.engine.gpu import needs_gpu

pytest.importorskip("triton", reason="needs Triton, which only PyTorch's GPU builds bring")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float().to(DEVICE)


def significant_bits(x):
    """The number of bits that the significands of numbers need."""
    significands = (np.frexp(x.cpu().numpy().astype(np.float64))[0] * 2**24).astype(np.int64)
    trailing = [
        (int(s) & -int(s)).bit_length() - 1 for s in np.abs(significands[significands != 0])
    ]
    return 24 - min(trailing)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 200)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_parts_are_tf32_numbers_that_add_up(shape, transposed):
    x = normal(*shape)
    x = x.t() if transposed else x
    high, low = products.split(x)
    assert significant_bits(high) <= 11
    assert significant_bits(low) <= 11
    error = (high.double() + low.double() - x.double()).abs()
    assert (error <= 2.0**-22 * x.double().abs()).all()


def test_a_split_number_worked_out_by_hand():
    # 1 + 2⁻¹⁰ + 2⁻¹³ + 2⁻²³: the first two fit in 11 bits, 2⁻¹³ and 2⁻²³ in the low part's.
    x = torch.tensor([[1 + 2**-10 + 2**-13 + 2**-23]], device=DEVICE)
    assert products.split(x).tolist() == [[[1 + 2**-10]], [[2**-13 + 2**-23]]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000])
def test_what_is_not_finite_is_not_hidden(bits):
    """Two of these are the results that GPUs and CPUs give where there is no number."""
    x, weight = normal(3, 4), normal(2, 4, seed=1)
    x[1, 2] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for given in ((x, weight), (weight, x)):
        found = products.SplitProduct.apply(*given, None).isfinite()
        assert torch.equal(found, (given[0].double() @ given[1].double().t()).isfinite())


def errors(rows, inner, columns):
    """Relative errors against float64 of the split product, its gradient and float32 products."""
    x, weight, bias, upper = (
        normal(rows, inner),
        normal(columns, inner, seed=1),
        normal(columns, seed=2),
        normal(rows, columns, seed=3),
    )
    x.requires_grad_()
    y = products.SplitProduct.apply(x, weight, bias)
    (gradient,) = torch.autograd.grad(y, x, upper)
    right = x.detach().double() @ weight.double().t() + bias.double()
    right_gradient = upper.double() @ weight.double()
    ordinary = nn.functional.linear(x.detach(), weight, bias), upper @ weight

    def relative(found, expected):
        return (
            ((found.double() - expected).square().mean() / expected.square().mean()).sqrt().item()
        )

    return (
        [relative(y, right), relative(gradient, right_gradient)],
        [relative(ordinary[0], right), relative(ordinary[1], right_gradient)],
    )


@pytest.mark.parametrize("shape", [(3, 5, 4), (130, 70, 200), (64, 384, 96)])
def test_products_and_gradients_have_float32_accuracy(shape):
    split, _ = errors(*shape)
    assert max(split) < 6e-7


@needs_gpu
def test_products_on_a_gpu_are_as_accurate_as_its_float32_products():
    split, ordinary = errors(4096, 384, 1536)
    assert max(split) < max(ordinary)


def test_a_product_can_be_differentiated_twice():
    x, weight = normal(3, 4).requires_grad_(), normal(2, 4, seed=1)
    (first,) = torch.autograd.grad(
        products.SplitProduct.apply(x, weight, None).square().sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(first.square().sum(), x)
    w = weight.double()
    expected = 8 * x.detach().double() @ w.t() @ w @ w.t() @ w
    torch.testing.assert_close(second.double(), expected, rtol=1e-5, atol=1e-5)


@needs_gpu
def test_only_frozen_layers_in_full_float32_outside_transforms_use_it(monkeypatch):
    calls = []
    real = products.SplitProduct.apply
    monkeypatch.setattr(
        products.SplitProduct, "apply", lambda *given: calls.append(1) or real(*given)
    )
    layer = Linear(nn.Linear(4, 3)).cuda()
    x = normal(2, 5, 4)
    layer(x)
    assert not calls
    frozen = Frozen(layer)
    y = frozen(x)
    assert len(calls) == 1
    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, layer.bias))
    torch.func.vmap(frozen)(x.unsqueeze(0))
    assert len(calls) == 2
    grad(lambda x: frozen(x).sum())(x)
    frozen.double()(x.double())
    assert len(calls) == 2


@needs_gpu
def test_wide_layers_of_a_shared_model_use_it_in_evaluation(monkeypatch):
    calls = []
    real = products.SplitProduct.apply
    monkeypatch.setattr(
        products.SplitProduct, "apply", lambda *given: calls.append(1) or real(*given)
    )
    wide, narrow = (Linear(nn.Linear(300, width)).cuda() for width in (70, 10))
    x = normal(200, 300)
    with torch.no_grad(), forward_pass(Forward(train=False, shared=True)):
        y = wide(x)
        assert len(calls) == 1
        narrow(x)
        wide.double()(x.double())
    assert len(calls) == 1
    exact = nn.functional.linear(x.double(), wide.weight, wide.bias)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    with forward_pass(Forward(train=False)):
        narrow.float()(x)
        wide.float()(x)
    assert len(calls) == 1
