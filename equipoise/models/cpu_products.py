"""Products of float32 matrices on processors for which PyTorch's own are slow.

PyTorch multiplies float32 matrices with MKL, which does not use the wide vectors (AVX-512) of
processors that are not Intel's. oneDNN, which PyTorch uses for convolutions, does: on a core of an
AMD EPYC (Zen 5) products of large matrices take half the time. Results differ by rounding only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.models.frozen import transforms

# With fewer operations or rows, the call of oneDNN takes longer than it saves.
_FEWEST_OPERATIONS, _FEWEST_ROWS = 4_000_000, 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do what ``F.linear`` does, on a CPU with the faster library.

    Parameters
    ----------
    x : Tensor
        ``[..., columns]``.
    weight : Tensor
        ``[rows, columns]``.
    bias : Tensor, optional
        ``[rows]``.

    Returns
    -------
    Tensor
        ``[..., rows]``. Any number of derivatives can be taken.

    Examples
    --------
    >>> linear(torch.ones(2, 3), torch.ones(1, 3))
    tensor([[3.],
            [3.]])
    """
    # PyTorch describes shapes that do not fit, oneDNN does not.
    if not _pays_for(x, weight) or (bias is not None and bias.shape != weight.shape[:1]):
        return F.linear(x, weight, bias)
    made: Tensor = Product.apply(x, weight, bias)
    return made


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the batches of clients by their weights, on a CPU with the faster library.

    Parameters
    ----------
    x : Tensor
        ``[clients, samples, columns]``, or the batch of a single client.
    weight : Tensor
        ``[clients, rows, columns]``, or the weights of a single client.

    Returns
    -------
    Tensor
        ``x @ weight.mT``. If PyTorch records derivatives, it is PyTorch's own product.

    Examples
    --------
    >>> product(torch.ones(2, 1, 3), torch.ones(2, 1, 3)).shape
    torch.Size([2, 1, 1])
    """
    # oneDNN has no product of stacks. One call per client takes less time than MKL's for all.
    if x.dim() != 3 or torch.is_grad_enabled() or not _pays_for(x[0], weight[0]):
        return x @ weight.mT
    return torch.stack([_multiplied(*each, None) for each in zip(x, weight, strict=True)])


def _pays_for(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN serves a batch and weights, and takes less time than MKL."""
    return (
        x.dim() == 2
        and x.shape[1] == weight.shape[1]
        and 2 * x.numel() * len(weight) >= _FEWEST_OPERATIONS
        and len(x) >= _FEWEST_ROWS
        and can_multiply(x, weight)
    )


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN can multiply a batch by weights, and is the faster library."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and is_faster()
        and not torch.is_autocast_enabled("cpu")
        and not transforms()
    )


@cache
def is_faster() -> bool:
    """Return whether this machine multiplies faster with oneDNN than with MKL."""
    # Not measured, so that all runs on a machine do the same.
    return (
        torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and not _is_intel()
        and serves()
    )


def serves() -> bool:
    """Return whether this PyTorch has oneDNN's product, which is not part of its public API."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_intel() -> bool:
    """Return whether the processor is Intel's, or that is not known."""
    described = Path("/proc/cpuinfo")
    return not described.exists() or "GenuineIntel" in described.read_text()


class Product(torch.autograd.Function):
    """The product of oneDNN. Its gradients are products of oneDNN, too."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply ``[samples, columns]`` by ``[rows, columns]``, and add the bias ``[rows]``."""
        return _multiplied(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        x, weight, bias = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by the batch, the weights and the bias."""
        x, weight = ctx.saved_tensors
        return (
            Product.apply(upper, weight.mT, None) if ctx.needs_input_grad[0] else None,
            Product.apply(upper.mT, x.mT, None) if ctx.needs_input_grad[1] else None,
            upper.sum(0) if ctx.biased else None,
        )


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # oneDNN reads a bias as if it were contiguous.
    bias = None if bias is None else bias.contiguous()
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, _dense(weight), bias, "none", [], "")
    return made


def _dense(matrix: Tensor) -> Tensor:
    """Copy a matrix with gaps or overlaps between its rows or columns.

    As its second matrix, oneDNN refuses one whose rows overlap, such as windows of a signal. With
    gaps, as in every second column of a matrix, it may take hundreds of times as long.
    """
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()
