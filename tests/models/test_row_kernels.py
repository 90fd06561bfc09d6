"""Products of stacked weights and batches of few rows.

They run on a GPU, or slowly on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

pytest.importorskip("triton", reason="needs Triton, which is not made for this system")

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import factored, linear_products, row_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS = 2
# Samples, rows and columns.
SHAPES = [(1, 1, 1), (3, 5, 7), (10, 70, 130), (16, 64, 128), (17, 65, 200), (32, 16, 64)]


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float().to(DEVICE)


def given(samples, rows, columns):
    """Return a batch, weights, a bias and the gradient by the result."""
    return (
        normal(CLIENTS, samples, columns),
        normal(CLIENTS, rows, columns, seed=1),
        normal(CLIENTS, rows, seed=2),
        normal(CLIENTS, samples, rows, seed=3),
    )


def error(found, wanted):
    """Return the largest error over the largest value."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.fixture
def in_pieces(monkeypatch):
    """Cut small products into several pieces, and do not leave them to PyTorch."""
    monkeypatch.setattr(row_kernels, "_PIECE", 64)
    monkeypatch.setattr(row_kernels, "_FEWEST", 1)
    monkeypatch.setattr(row_kernels, "_SHORTEST", 1)


@pytest.fixture
def launched(in_pieces, monkeypatch):
    """List the products that the kernels make."""
    names = []

    def counted(name, function):
        def call(*inputs):
            names.append(name)
            return function(*inputs)

        return call

    for name in ("multiply", "multiply_back"):
        monkeypatch.setattr(row_kernels, name, counted(name, getattr(row_kernels, name)))
    return names


@pytest.mark.parametrize("precision", row_kernels._ARITHMETIC)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape, precision, in_pieces):
    x, weight, bias, upper = given(*shape)
    plain = x.double() @ weight.double().mT
    most = 1e-3 if row_kernels._arithmetic(precision, shape[0]) == "tf32" else 1e-6
    assert error(row_kernels.multiply(x, weight, None, precision), plain) <= most
    biased = row_kernels.multiply(x, weight, bias, precision)
    assert error(biased, plain + bias.double().unsqueeze(1)) <= most
    of_x = row_kernels.multiply_back(upper, weight, precision)
    assert error(of_x, upper.double() @ weight.double()) <= most


def test_only_tf32_with_more_than_few_rows_rounds_factors():
    found = {
        (precision, samples): row_kernels._arithmetic(precision, samples)
        for precision in row_kernels._ARITHMETIC
        for samples in (1, 16, 17, 32)
    }
    assert [case for case, way in found.items() if way == "tf32"] == [("tf32", 17), ("tf32", 32)]
    assert all((way == "ieee") == (case[0] == "ieee") for case, way in found.items())


@pytest.mark.parametrize("shape", SHAPES[2:5], ids=str)
def test_a_client_has_the_same_bits_alone_and_in_a_stack(shape, in_pieces):
    x, weight, bias, upper = given(*shape)
    y = row_kernels.multiply(x, weight, bias, "split")
    of_x = row_kernels.multiply_back(upper, weight, "split")
    for client in range(CLIENTS):
        own = slice(client, client + 1)
        alone = row_kernels.multiply(x[own], weight[own], bias[own], "split")
        assert torch.equal(alone, y[own])
        alone = row_kernels.multiply_back(upper[own], weight[own], "split")
        assert torch.equal(alone, of_x[own])


def test_batches_may_be_views(in_pieces):
    x, weight, bias, upper = given(6, 20, 70)
    wanted = row_kernels.multiply(x[:, ::2].contiguous(), weight, bias, "ieee")
    assert torch.equal(row_kernels.multiply(x[:, ::2], weight, bias, "ieee"), wanted)
    wanted = row_kernels.multiply_back(upper, weight, "ieee")
    turned = upper.mT.contiguous().mT
    assert torch.equal(row_kernels.multiply_back(turned, weight, "ieee"), wanted)


# Padding is multiplied, too, and not written.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("name", ["x", "weight"])
def test_what_is_not_finite_stays_in_its_row(name, in_pieces):
    x, weight, bias, _ = given(3, 5, 70)
    {"x": x, "weight": weight}[name][0, 1, 65] = torch.inf
    found = row_kernels.multiply(x, weight, bias, "split").isfinite()
    wanted = torch.ones_like(found)
    {"x": wanted, "weight": wanted.mT}[name][0, 1] = False
    assert torch.equal(found, wanted)


def test_only_few_rows_of_large_float32_weights_fit():
    batch, weight = torch.zeros(1, 32, 1024), torch.zeros(1, 64, 1024)
    assert row_kernels.fit(batch, weight, "split")
    assert not row_kernels.fit(batch, weight, "bfloat16")
    assert not row_kernels.fit(batch.double(), weight.double(), "ieee")
    assert not row_kernels.fit(torch.zeros(1, 33, 1024), weight, "split")
    assert not row_kernels.fit(batch, weight[:, :63].contiguous(), "split")
    assert not row_kernels.fit(torch.zeros(1, 1, 64), weight.mT.contiguous(), "split")
    assert not row_kernels.fit(batch, torch.zeros(1, 1024, 64).mT, "split")


# ---- in a layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [True, False])
def test_gradients_of_a_layer_are_those_of_pytorch(biased, launched):
    x, weight, bias, _ = given(5, 6, 70)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, *([bias] if biased else []))]

    def linear(x, weight, bias=None):
        return factored.product(x, weight, bias)

    found, wanted = vmap(linear)(*leaves), vmap(F.linear)(*leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    of_found, of_wanted = (torch.autograd.grad(y.square().sum(), leaves) for y in (found, wanted))
    for own, other in zip(of_found, of_wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-3)
    assert launched == ["multiply", "multiply_back"]


def test_layers_whose_gradients_are_no_factors_use_the_kernels_too(launched, monkeypatch):
    x, weight, bias, _ = given(5, 6, 70)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]

    def gradients(linear):
        return torch.autograd.grad(vmap(linear)(*leaves).square().sum(), leaves)

    own = gradients(linear_products.linear)
    assert launched == []
    monkeypatch.setattr(linear_products, "stacked_on_gpu", lambda x: True)
    monkeypatch.setattr(linear_products, "module_with_triton", lambda name, device: row_kernels)
    for found, wanted in zip(gradients(linear_products.linear), own, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
        assert found.stride() == wanted.stride()
    assert launched == ["multiply", "multiply_back"]


@pytest.mark.parametrize("shared", [False, True])
def test_second_derivatives_are_those_of_pytorch(shared, launched):
    x, weight, bias, _ = given(4, 6, 70)
    weight, dim = (weight[0], None) if shared else (weight, 0)

    def of_gradient(linear):
        def of_x(x, weight, bias):
            return grad(lambda x: linear(x, weight, bias).sin().sum())(x).square().sum()

        stacked = vmap(grad(of_x, argnums=(0, 1, 2)), in_dims=(0, dim, 0))
        return stacked(x / 8, weight / 8, bias)

    for own, other in zip(of_gradient(factored.product), of_gradient(F.linear), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    # Shared weights are left to PyTorch: copies of them would have to be made for the kernels.
    assert bool(launched) != shared
