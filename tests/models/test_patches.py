"""Convolutions as products of patches against PyTorch's, client by client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from equipoise.models.patches import PatchProduct
from tests.models.stacks import operations


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize(
    ("stride", "padding"), [((1, 1), (0, 0)), ((1, 1), (1, 1)), ((2, 1), (0, 2)), ((3, 2), (1, 0))]
)
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (2, 3)])
def test_convolution_by_patches_is_the_convolution_of_every_client(kernel, stride, padding):
    clients, samples = 3, 4
    x = normal(clients, samples, 2, 6, 7).requires_grad_()
    weight = normal(clients, 5, 2, *kernel, seed=1).requires_grad_()
    found = vmap(lambda x, w: PatchProduct.apply(x, w, stride, padding)[0])(x, weight)
    wanted = torch.stack(
        [F.conv2d(a, w, stride=stride, padding=padding) for a, w in zip(x, weight, strict=True)]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    towards = normal(*wanted.shape, seed=2)
    for own, other in zip(
        torch.autograd.grad((found * towards).sum(), (x, weight)),
        torch.autograd.grad((wanted * towards).sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_patches_of_a_batch_all_clients_share():
    x, weight = normal(4, 2, 6, 6), normal(3, 5, 2, 3, 3, seed=1)
    found = vmap(lambda w: PatchProduct.apply(x, w, (1, 1), (1, 1))[0])(weight)
    wanted = torch.stack([F.conv2d(x, w, padding=1) for w in weight])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_no_gradient_by_the_patches_is_written():
    weight = normal(3, 5, 2, 3, 3, seed=1).requires_grad_()
    y = vmap(lambda w: PatchProduct.apply(normal(4, 2, 6, 6), w, (1, 1), (1, 1))[0])(weight)
    called = operations(lambda: torch.autograd.grad(y, weight, y.detach()))
    assert "aten::bmm" in called
    assert "aten::zeros" not in called
