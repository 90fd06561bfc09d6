"""Functions that several modules of GPU kernels use.

This module is imported only if Triton is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Multiply and add in one instruction. From version 3.10 on, Triton does so only if it is asked to.
FUSED = {"enable_fp_fusion": True}


@triton.jit
def _rounded(x: tl.tensor) -> tl.tensor:
    """Round to the nearest TF32 number: add half a unit, then clear the 13 lowest bits.

    Not a number may become zero.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def high_part(x: tl.tensor) -> tl.tensor:
    """Round to the nearest TF32 number. What is not a number stays so."""
    # All bits of a GPU's own NaN are set except the sign, so adding to them makes a zero.
    return tl.where(x == x, _rounded(x), x)


@triton.jit
def low_part(x: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Round what :func:`high_part` leaves of a number to the nearest TF32 number."""
    return _rounded(x - high)


@triton.jit
def split_product(values: tl.tensor, high_factors: tl.tensor, low_factors: tl.tensor) -> tl.tensor:
    """Multiply ``[rows, summed]`` by the transpose of ``[columns, summed]``, which is split.

    The result has float32 accuracy: see :mod:`equipoise.models.products`.
    """
    high = high_part(values)
    part = tl.dot(low_part(values, high), tl.trans(high_factors), input_precision="tf32")
    part = tl.dot(high, tl.trans(low_factors), part, input_precision="tf32")
    return tl.dot(high, tl.trans(high_factors), part, input_precision="tf32")


def one_client(stacked: Tensor) -> Tensor:
    """Remove the axis of clients, of length 1.

    Autograd does not take the result for a view. A view of a custom function's output must not be
    changed in place, and models may do that: ``y += x`` after BatchNorm.

    Examples
    --------
    >>> one_client(torch.zeros(1, 5, 3)).shape
    torch.Size([5, 3])
    """
    one: Tensor = torch.ops.aten._unsafe_view(stacked, stacked.shape[1:])
    return one


def merge_clients(tensor: Tensor | None, dim: int | None, clients: int) -> Tensor | None:
    """Merge the axis that ``vmap`` hides with the axis of clients, and bring it to the front.

    Examples
    --------
    >>> merge_clients(torch.zeros(5, 2, 3), dim=1, clients=2).shape
    torch.Size([10, 3])
    >>> merge_clients(torch.zeros(1, 3), dim=None, clients=2).shape
    torch.Size([2, 3])
    """
    if tensor is None:
        return None
    stacked = tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return stacked.flatten(0, 1)


def all_merged(
    info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...], *, tensors: int
) -> tuple[Any, ...]:
    """Apply :func:`merge_clients` to the first of a function's inputs, which are tensors."""
    merged = (
        merge_clients(tensor, dim, info.batch_size)
        for tensor, dim in zip(inputs[:tensors], in_dims, strict=False)
    )
    return *merged, *inputs[tensors:]


def memory_order(x: Tensor) -> list[int]:
    """List the axes from the outermost in memory to the innermost.

    Examples
    --------
    >>> memory_order(torch.zeros(2, 3, 4).permute(1, 2, 0))
    [2, 0, 1]
    """
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def empty_as(x: Tensor) -> Tensor:
    """Make an empty tensor whose axes lie in memory as those of ``x``.

    Examples
    --------
    >>> empty_as(torch.zeros(2, 3, 4).permute(1, 2, 0)).stride()
    (4, 1, 12)
    """
    return torch.empty_permuted(x.shape, memory_order(x), dtype=x.dtype, device=x.device)
