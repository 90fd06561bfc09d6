"""Sums over clients and copies of rows on a GPU against PyTorch's operations.

They run on a GPU, or slowly on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which only PyTorch's GPU builds bring")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import stack_kernels
from equipoise.models.stack_kernels import copy_rows, weighted_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS = 5
# Numbers, empty rows, less than a block, a whole one, and more than two.
SHAPES = [(), (3,), (0, 4), (1024,), (2, 3, 5), (2049,), (1,), (4097,)]
TYPES = [torch.float32, torch.float64]


def normal(*shape, seed=0, dtype=torch.float32):
    drawn = np.random.default_rng(seed).normal(size=shape)
    return torch.as_tensor(drawn).to(dtype).to(DEVICE)


def stacks(dtype=torch.float32, clients=CLIENTS):
    return [normal(clients, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(SHAPES)]


def sequential(stack, weights):
    """The weighted sum in float64, client after client."""
    total = torch.zeros(stack.shape[1:], dtype=torch.float64)
    for weight, row in zip(weights.tolist(), stack.cpu().double(), strict=True):
        total += weight * row
    return total.to(stack.dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("clients", [1, CLIENTS, 16])
def test_weighted_sums_are_those_of_float64_in_the_order_of_clients(dtype, clients):
    given = stacks(dtype, clients)
    weights = torch.linspace(-0.3, 1, clients, dtype=torch.float64)
    for found, stack in zip(weighted_sums(given, weights), given, strict=True):
        wanted = sequential(stack, weights)
        assert (found.dtype, found.shape) == (dtype, stack.shape[1:])
        # Only a GPU fuses the product with the sum, which rounds once.
        tolerance = {"rtol": 1e-14, "atol": 1e-14} if dtype == torch.float64 else {}
        torch.testing.assert_close(found.cpu(), wanted, **tolerance)


def test_types_are_mixed_and_more_tensors_than_a_launch_serves(monkeypatch):
    monkeypatch.setattr(stack_kernels, "_MOST_TENSORS", 2)
    given = [tensor for dtype in TYPES for tensor in stacks(dtype)]
    weights = torch.full((CLIENTS,), 0.2)
    for found, stack in zip(weighted_sums(given, weights), given, strict=True):
        torch.testing.assert_close(found.cpu(), sequential(stack, weights.double()))


def test_rows_may_lie_apart_in_memory():
    wide = normal(2 * CLIENTS, 40)
    views = [wide[::2, 3:20], wide[:CLIENTS, 30:], wide[:1].expand(CLIENTS, 40)]
    weights = torch.rand(CLIENTS, generator=torch.Generator().manual_seed(0))
    for found, stack in zip(weighted_sums(views, weights), views, strict=True):
        torch.testing.assert_close(found.cpu(), sequential(stack, weights.double()))


def test_a_client_with_weight_zero_is_left_out_whatever_it_has():
    stack = torch.tensor([[1.0, 2.0], [torch.inf, torch.nan], [3.0, -torch.inf]], device=DEVICE)
    assert weighted_sums([stack], torch.tensor([1.0, 0.0, 0.5]))[0].tolist() == [2.5, -torch.inf]
    assert weighted_sums([stack], torch.zeros(3))[0].tolist() == [0.0, 0.0]
    (unknown,) = weighted_sums([stack], torch.tensor([torch.nan, 0.0, 0.0]))
    assert unknown.isnan().all()


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_rows_are_copied_bit_by_bit_in_any_order(dtype):
    sources = [(100 * stack).to(dtype) for stack in stacks()]
    targets = [torch.zeros_like(source) for source in sources]
    rows = torch.tensor([3, 0, 4, 4, 1])
    copy_rows(targets, sources, rows)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source[rows.to(DEVICE)])


def test_rows_are_copied_to_their_places_and_nothing_else_is_written():
    sources = stacks()
    targets = [torch.full_like(source, 7.0) for source in sources]
    copy_rows(targets, sources, torch.tensor([4, 0]), torch.tensor([1, 3]))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target[[1, 3]], source[[4, 0]])
        assert (target[[0, 2, 4]] == 7).all()


def test_one_row_is_copied_for_every_client_and_nothing_else_is_written():
    models = [normal(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    room = [torch.full((CLIENTS + 2, *shape), 7.0, device=DEVICE) for shape in SHAPES]
    expanded = [model.expand(CLIENTS, *model.shape) for model in models]
    copy_rows([stack[1:-1] for stack in room], expanded, torch.arange(CLIENTS))
    for stack, model in zip(room, models, strict=True):
        assert torch.equal(stack[1:-1], model.expand(CLIENTS, *model.shape))
        assert (stack[[0, -1]] == 7).all()
