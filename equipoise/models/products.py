"""Matrix products with float32 accuracy on tensor cores, which round their factors to TF32.

A float32 number is split into a high and a low part, x = h + l, that are TF32 numbers: h is x
rounded to 11 significant bits, l is the remainder rounded to 11 bits. Then x w ≈ l_x h_w + h_x l_w
+ h_x h_w. The omitted term, l_x l_w, is below 2⁻²² of the product.

Tensor cores also round sums towards zero. Therefore they add only 32 products at a time, the small
terms first, and these sums are added in ordinary float32.

This module is imported only if Triton is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.kernel_tools import FUSED, high_part, low_part, split_product

_SPLIT = {"ROWS": 16, "COLUMNS": 128}
_TILE = {"ROWS": 128, "COLUMNS": 128, "INNER": 32, "num_warps": 8}
# Size in bytes of the tiles of x and w that are loaded while others are multiplied.
_STAGE = 4 * _TILE["INNER"] * (_TILE["ROWS"] + 2 * _TILE["COLUMNS"])
# Compute capabilities of GPUs whose TF32 rate is many times the float32 rate: A100, H100 and H200,
# B200. On others, such as consumer GPUs, three TF32 products take longer than one in float32.
_FAST_TF32 = {(8, 0), (9, 0), (10, 0)}


@cache
def pay_on(device: torch.device) -> bool:
    """Return whether split products are faster than float32 products on a device."""
    return torch.cuda.get_device_capability(device) in _FAST_TF32


@cache
def stages(device: torch.device, stage: int, most: int) -> int:
    """Choose how many parts of so many bytes are on their way at a time; memory is limited."""
    if device.type != "cuda":  # Triton's interpreter.
        return 1
    found = torch.cuda.get_device_properties(device)
    # Older versions of PyTorch do not report the maximum shared memory of a kernel.
    memory = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return max(1, min(most, memory // stage))


@triton.jit(do_not_specialize=["rows"])
def _split(
    x: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the high part of a tile, and its low part after all high parts."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * x_row + column * x_column, mask=inside, other=0.0)
    high = high_part(values)
    to = parts + row * columns + column
    tl.store(to, high, mask=inside)
    tl.store(to + rows.to(tl.int64) * columns, low_part(values, high), mask=inside)


@triton.jit
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Write a tile of x wᵀ + b. The weights are split: the high parts, then the low ones."""
    across = tl.cdiv(columns, COLUMNS)
    # Neighbouring tiles read the same rows of x.
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    along = tl.arange(0, INNER)
    left = x + row.to(tl.int64)[:, None] * inner + along[None, :]
    right = weight + column[:, None] * inner + along[None, :]
    low_parts = columns * inner
    row_inside, column_inside = (row < rows)[:, None], (column < columns)[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(0, inner, INNER):
        ahead = (along < inner - done)[None, :]
        values = tl.load(left + done, mask=row_inside & ahead, other=0.0)
        w_high = tl.load(right + done, mask=column_inside & ahead, other=0.0)
        w_low = tl.load(right + low_parts + done, mask=column_inside & ahead, other=0.0)
        total += split_product(values, w_high, w_low)
    inside = row_inside & (column < columns)[None, :]
    if BIASED:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * columns + column[None, :], total, mask=inside)


def split(x: Tensor) -> Tensor:
    """Return the high and the low part of a matrix.

    Parameters
    ----------
    x : Tensor
        ``[rows, columns]``, float32, with any strides.

    Returns
    -------
    Tensor
        ``[2, rows, columns]``, contiguous.
    """
    rows, columns = x.shape
    parts = x.new_empty(2, rows, columns)
    grid = triton.cdiv(rows, _SPLIT["ROWS"]), triton.cdiv(columns, _SPLIT["COLUMNS"])
    with torch.cuda.device_of(x):
        _split[grid](x, parts, rows, columns, *x.stride(), **_SPLIT, **FUSED)
    return parts


class SplitProduct(torch.autograd.Function):
    """x wᵀ + b for a matrix w and a vector b that are never trained.

    The gradient is that towards x only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply ``[rows, inner]`` by the transpose of ``[columns, inner]``."""
        ctx.save_for_backward(weight)
        (rows, inner), columns = x.shape, len(weight)
        y = x.new_empty(rows, columns)
        tiles = triton.cdiv(rows, _TILE["ROWS"]) * triton.cdiv(columns, _TILE["COLUMNS"])
        with torch.cuda.device_of(x):
            _multiply[(tiles,)](
                x.contiguous(),
                split(weight),
                bias,
                y,
                rows,
                columns,
                inner,
                BIASED=bias is not None,
                num_stages=stages(x.device, _STAGE, 4),
                **_TILE,
                **FUSED,
            )
        return y

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor, None, None]:
        """Multiply by the weights. This product can itself be differentiated."""
        (weight,) = ctx.saved_tensors
        return SplitProduct.apply(upper, weight.t(), None), None, None
