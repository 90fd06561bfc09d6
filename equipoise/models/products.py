"""Matrix products with float32 accuracy from three TF32 products, for a GPU with tensor cores.

A float32 number is split into a high and a low part, x = h + l, each of which TF32 represents: h is x
rounded to 11 significant bits, l is the rest rounded to 11 bits. Then x w ≈ h_x h_w + h_x l_w + l_x h_w,
and the term left out, l_x l_w, is below 2⁻²² of the product. Side by side these are one product of
``[h_x, h_x, l_x]`` and ``[h_w, l_w, h_w]``, whose sums are accumulated in float32.

Only imported where Triton is installed: see ``equipoise.models.layers``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 16, 128


@triton.jit
def _rounded(x: tl.tensor) -> tl.tensor:
    """Round to the nearest TF32 number: half a unit is added, then the 13 lowest bits are cleared."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _split(
    x: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    LOW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the three parts of a tile: the low part to place LOW of three, the high part to the others."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * x_row + column * x_column, mask=inside, other=0.0)
    high = _rounded(values)
    low = _rounded(values - high)
    to = parts + row * (3 * columns) + column
    for part in tl.static_range(3):
        tl.store(to + part * columns, low if part == LOW else high, mask=inside)


def split(x: Tensor, *, low: int) -> Tensor:
    """Return the high and low parts of a matrix side by side.

    Parameters
    ----------
    x : Tensor
        ``[rows, columns]``, float32, with any strides.
    low : int
        Which of the three places has the low part, 1 or 2. The others have the high part.

    Returns
    -------
    Tensor
        ``[rows, 3 * columns]``, contiguous.
    """
    rows, columns = x.shape
    parts = x.new_empty(rows, 3 * columns)
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)
    _split[grid](x, parts, rows, columns, *x.stride(), LOW=low, ROWS=_ROWS, COLUMNS=_COLUMNS)
    return parts


class SplitProduct(torch.autograd.Function):
    """x wᵀ + b for a matrix w and a vector b that are never trained: the gradient towards x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply ``[rows, inner]`` by the transpose of ``[columns, inner]``."""
        ctx.save_for_backward(weight)
        left, right = split(x, low=2), split(weight, low=1).t()
        settings = torch.backends.cuda.matmul
        tf32, settings.allow_tf32 = settings.allow_tf32, True
        try:
            return left @ right if bias is None else torch.addmm(bias, left, right)
        finally:
            settings.allow_tf32 = tf32

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor, None, None]:
        """Multiply by the weights themselves. This product can be differentiated in turn."""
        (weight,) = ctx.saved_tensors
        return SplitProduct.apply(upper, weight.t(), None), None, None
