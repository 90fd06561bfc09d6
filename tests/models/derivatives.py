"""Comparison of float32 functions and two of their derivatives with exact ones."""

from __future__ import annotations

import torch


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def derivatives(function, given):
    """Return the result, its gradients, and the gradients of their squares."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    y = function(*leaves)
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
    return [tensor.detach() for tensor in (y, *first, *second)]


def agreeing_derivatives(function, reference, given):
    """Return what :func:`derivatives` does, after a comparison with a reference in float64."""
    found = derivatives(function, given)
    exact = derivatives(reference, [tensor.double() for tensor in given])
    for own, wanted in zip(found, exact, strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(
            own.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())
        )
    return found
