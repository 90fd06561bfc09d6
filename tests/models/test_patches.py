"""Convolutions as products of patches against PyTorch's, client by client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev, vjp, vmap

from equipoise.models.patches import convolve
from tests.models.stacks import operations

GEOMETRIES = pytest.mark.parametrize(
    ("stride", "padding"), [((1, 1), (0, 0)), ((1, 1), (1, 1)), ((2, 1), (0, 2)), ((3, 2), (1, 0))]
)
KERNELS = pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (2, 3)])


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


@GEOMETRIES
@KERNELS
def test_convolution_by_patches_is_the_convolution_of_every_client(kernel, stride, padding):
    clients, samples = 3, 4
    x = normal(clients, samples, 2, 6, 7).requires_grad_()
    weight = normal(clients, 5, 2, *kernel, seed=1).requires_grad_()
    found = vmap(lambda x, w: convolve(x, w, stride, padding))(x, weight)
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
    found = vmap(lambda w: convolve(x, w, (1, 1), (1, 1)))(weight)
    wanted = torch.stack([F.conv2d(x, w, padding=1) for w in weight])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_weights_that_all_clients_share():
    x, weight = normal(3, 4, 2, 6, 6), normal(5, 2, 3, 3, seed=1)
    found = vmap(lambda x: convolve(x, weight, (1, 1), (1, 1)))(x)
    wanted = torch.stack([F.conv2d(own, weight, padding=1) for own in x])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_no_gradient_by_images_without_one_is_computed():
    weight = normal(3, 5, 2, 3, 3, seed=1).requires_grad_()
    y = vmap(lambda w: convolve(normal(4, 2, 6, 6), w, (1, 1), (1, 1)))(weight)
    called = operations(lambda: torch.autograd.grad(y, weight, y.detach()))
    assert "aten::bmm" in called
    assert not {"aten::add_.Tensor", "aten::zeros", "aten::new_zeros"} & called


def nestings(loss):
    """Derivatives of a loss ``loss(x, weight)`` of one client, in all nestings a method may use."""

    def by_both(x, weight):
        return grad(loss, (0, 1))(x, weight)

    def penalty(x, weight):
        return sum(tensor.square().sum() for tensor in by_both(x, weight))

    def alone(x, weight):
        return loss(x.unsqueeze(0), weight)

    def of_a_sample(x, weight):
        return grad(alone)(x, weight).square().sum()

    def mixed(x, weight):
        # As FedMix: the derivative of one loss, from the pass that another is made of.
        y, derivative = vjp(lambda x: loss(x, weight), x)
        (by_image,) = derivative(y)
        return y + (by_image * x).sum()

    return {
        "gradient": by_both,
        "gradient of the gradient": grad(penalty, (0, 1)),
        "gradients of samples": lambda x, w: vmap(grad(alone, 1), (0, None))(x, w),
        "gradient of the gradients of samples": grad(
            lambda x, w: vmap(of_a_sample, (0, None))(x, w).sum(), (0, 1)
        ),
        "gradient of a mixed loss": grad(mixed, (0, 1)),
        "jacobian": jacrev(grad(loss, 1)),
        "third derivative": grad(lambda x, w: grad(penalty)(x, w).square().sum(), (0, 1)),
    }


def of_convolution(convolved):
    """A loss of two convolutions, so that derivatives by weights depend on other weights."""

    def loss(x, weight):
        y = convolved(convolved(x, weight).tanh(), weight)
        return y.tanh().square().sum()

    return loss


@pytest.mark.parametrize("nesting", nestings(None))
@GEOMETRIES
def test_every_derivative_is_that_of_pytorch(stride, padding, nesting):
    own = of_convolution(lambda x, w: convolve(x, w, stride, padding))
    other = of_convolution(lambda x, w: F.conv2d(x, w, None, stride, padding))
    x, weight = normal(3, 2, 2, 9, 8), normal(3, 2, 2, 3, 2, seed=1) / 3
    derivative, wanted = (nestings(loss)[nesting] for loss in (own, other))
    each = [wanted(*given) for given in zip(x, weight, strict=True)]
    stacked = torch.utils._pytree.tree_map(lambda *tensors: torch.stack(tensors), *each)
    torch.testing.assert_close(vmap(derivative)(x, weight), stacked, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(derivative(x[0], weight[0]), each[0], rtol=1e-9, atol=1e-9)


@GEOMETRIES
@pytest.mark.parametrize("nesting", ["gradient", "gradient of a mixed loss"])
def test_gradients_of_stacked_clients_around_derivatives(stride, padding, nesting):
    """As the engine takes them: by leaves, outside ``vmap``."""
    found = []
    for convolved in (
        lambda x, w: convolve(x, w, stride, padding),
        lambda x, w: F.conv2d(x, w, None, stride, padding),
    ):
        x = normal(3, 2, 2, 9, 8).requires_grad_()
        weight = (normal(3, 2, 2, 3, 2, seed=1) / 3).requires_grad_()
        made = vmap(nestings(of_convolution(convolved))[nesting])(x, weight)
        sums = sum(tensor.square().sum() for tensor in made)
        found.append(torch.autograd.grad(sums, (x, weight)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
