"""The product of a batch and the weights of a linear layer, for clients under ``vmap``.

PyTorch's own gradient by stacked weights is a transposed view. Adding it to the weights takes two
times as long as a GPU's memory allows, and five times as long on a CPU. Here it lies in memory as
the weights do.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.models import cpu_products
from equipoise.models.kernel_modules import module_with_triton
from equipoise.models.passes import stacked_on_gpu


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, factored: bool = False) -> Tensor:
    """Do what ``F.linear`` does, with a gradient that lies in memory as the weights do.

    With ``factored`` the gradient by the weights may be left as factors.
    """
    given: tuple[Tensor | None, ...] = (x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        lowered = torch.get_autocast_dtype(x.device.type)
        given = tuple(None if tensor is None else tensor.to(lowered) for tensor in given)
    ours = factored or _has_few_rows(x, weight)
    multiply = import_module("equipoise.models.factored").product if ours else Product.apply
    made: Tensor = multiply(*given)
    return made


def _has_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether a batch has so few rows that there are kernels for it, in float32."""
    in_float32 = x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    if not in_float32 or not stacked_on_gpu(x):
        return False
    kernels = module_with_triton("row_kernels", x.device)
    return kernels is not None and kernels.pay_for(len(x), *weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the gradients need."""
    x, weight, bias = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, upper: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient by input, weights and bias, of one client or of many."""
    x, weight = ctx.saved_tensors
    of_x = cpu_products.product(upper, weight.mT) if ctx.needs_input_grad[0] else None
    of_weight = cpu_products.product(upper.mT, x.mT) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, upper.sum(-2) if ctx.biased else None


class Product(torch.autograd.Function):
    """What ``F.linear`` does with the batch ``[samples, columns]`` of one client."""

    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the weights ``[rows, columns]``, and add the bias ``[rows]``."""
        return F.linear(x, weight, bias)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Multiply the batch of each client by its weights."""
        if in_dims[1:] == (None, None):
            # All clients have the same weights: one product for all of them.
            x, weight, bias = inputs
            return F.linear(x.movedim(in_dims[0], 0), weight, bias), 0
        stacks = (
            _stacked(tensor, dim, info.batch_size)
            for tensor, dim in zip(inputs, in_dims, strict=True)
        )
        made: Tensor = StackedProduct.apply(*stacks)
        return made, 0


class StackedProduct(torch.autograd.Function):
    """What :class:`Product` does, for clients stacked along a leading axis."""

    generate_vmap_rule = True
    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply ``[clients, samples, columns]`` by the weights of each client."""
        y = cpu_products.product(x, weight)
        return y if bias is None else y.add_(bias.unsqueeze(1))


def _stacked(tensor: Tensor | None, dim: int | None, clients: int) -> Tensor | None:
    """Bring the axis of clients to the front; a tensor that all share is expanded."""
    if tensor is None:
        return None
    return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
