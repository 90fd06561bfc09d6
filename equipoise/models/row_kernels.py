"""Products of stacked weights and batches of few rows, as Triton kernels for a GPU.

With few rows a product takes as long as reading the weights does. Every program reads a part of one
client's weights once and multiplies it by all rows of the client's batch.

How work is cut depends on the layer alone, and partial sums are added in a fixed order, so a
client's results do not depend on the others. Only imported if Triton is installed: see
``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.kernel_tools import FUSED

# A program multiplies its weights by all rows of a client's batch at once. There may be this many.
_MOST_ROWS = 32
# Weights of a client from which on these kernels are used, and the shortest rows of weights. The
# work is cut along these rows, so short ones leave a GPU idle.
_FEWEST, _SHORTEST = 1 << 16, 1024
# Rows and columns of the weights that a program reads at a time.
_FORWARD = {"ROWS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 4}
_BACKWARD = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4, "num_stages": 4}
# Columns of a piece that one program of a forward product adds up, a multiple of those above; and
# results whose pieces one program adds.
_PIECE, _BLOCK = 896, 128
# How products are made, by the precision that is asked for. Three TF32 products of parts of the
# factors are as accurate as one in float32. With few rows they take no longer than one, because
# memory is the limit.
_ARITHMETIC = {"ieee": "ieee", "split": "tf32x3", "tf32": "tf32"}
_FEW_ROWS = 16


@triton.jit(do_not_specialize=["samples", "tiles", "pieces"])
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    sums: tl.tensor,
    samples: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    tiles: tl.tensor,
    pieces: tl.tensor,
    ARITHMETIC: tl.constexpr,
    PIECE: tl.constexpr,
    SAMPLES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Multiply a client's batch by some rows of its weights, over one piece of the columns."""
    client = (tl.program_id(0) // (tiles * pieces)).to(tl.int64)
    # Neighbouring programs read the same part of the batch.
    tile, piece = tl.program_id(0) % tiles, tl.program_id(0) // tiles % pieces
    row, along = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    sample = tl.arange(0, SAMPLES).to(tl.int64)
    row_inside, exists = row < rows, sample < samples
    values = x + client * x_client + sample[:, None] * x_sample + along[None, :]
    factors = weight + client * rows * columns + row[:, None] * columns + along[None, :]
    first = piece * PIECE
    total = tl.zeros((SAMPLES, ROWS), dtype=tl.float32)
    for done in range(first, tl.minimum(first + PIECE, columns), COLUMNS):
        inside = (done + along < columns)[None, :]
        given = tl.load(values + done, mask=exists[:, None] & inside, other=0.0)
        factor = tl.load(factors + done, mask=row_inside[:, None] & inside, other=0.0)
        total = tl.dot(given, tl.trans(factor), total, input_precision=ARITHMETIC)
    own = sums + (client * pieces + piece) * samples * rows
    tl.store(
        own + sample[:, None] * rows + row[None, :],
        total,
        mask=exists[:, None] & row_inside[None, :],
    )


@triton.jit(do_not_specialize=["tiles", "pieces", "size"])
def _add_pieces(
    sums: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    tiles: tl.tensor,
    pieces: tl.tensor,
    size: tl.tensor,
    rows: tl.tensor,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the pieces of some of a client's results in order, and the bias."""
    client = (tl.program_id(0) // tiles).to(tl.int64)
    at = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    own = sums + client * pieces * size + at
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for piece in range(0, pieces):
        total += tl.load(own + piece * size, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + client * rows + at % rows, mask=inside, other=0.0)
    tl.store(y + client * size + at, total, mask=inside)


@triton.jit(do_not_specialize=["samples", "tiles"])
def _multiply_back(
    upper: tl.tensor,
    weight: tl.tensor,
    of_x: tl.tensor,
    samples: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    tiles: tl.tensor,
    ARITHMETIC: tl.constexpr,
    SAMPLES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write some columns of the gradient by a client's batch."""
    client = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    sample, down = tl.arange(0, SAMPLES).to(tl.int64), tl.arange(0, ROWS)
    exists, inside = (sample < samples)[:, None], (column < columns)[None, :]
    changes = upper + client * u_client + sample[:, None] * u_sample + down[None, :]
    factors = weight + client * rows * columns + down[:, None] * columns + column[None, :]
    total = tl.zeros((SAMPLES, COLUMNS), dtype=tl.float32)
    for done in range(0, rows, ROWS):
        row_inside = done + down < rows
        change = tl.load(changes + done, mask=exists & row_inside[None, :], other=0.0)
        factor = tl.load(factors + done * columns, mask=row_inside[:, None] & inside, other=0.0)
        total = tl.dot(change, factor, total, input_precision=ARITHMETIC)
    own = of_x + client * samples * columns
    tl.store(own + sample[:, None] * columns + column[None, :], total, mask=exists & inside)


def pay_for(samples: int, rows: int, columns: int) -> bool:
    """Return whether the kernels are meant for a client's batch and weights of these sizes.

    Examples
    --------
    >>> pay_for(10, 128, 4096), pay_for(100, 128, 4096), pay_for(10, 128, 64)
    (True, False, False)
    """
    return (
        0 < samples <= _MOST_ROWS
        and columns >= _SHORTEST
        # Places in a client's weights, and in tiles beyond their end, are numbers of 32 bits.
        and _FEWEST <= rows * columns < 1 << 30
    )


def fit(batch: Tensor, weight: Tensor, precision: str) -> bool:
    """Return whether the kernels can multiply stacked batches by weights, and are meant for them.

    Parameters
    ----------
    batch : Tensor
        ``[clients, samples, ...]``.
    weight : Tensor
        ``[clients, rows, columns]``.
    precision : str
        As for :func:`equipoise.models.convolutions.convolve`.

    Examples
    --------
    >>> batch, weight = torch.zeros(2, 10, 2048), torch.zeros(2, 64, 2048)
    >>> fit(batch, weight, "ieee"), fit(batch.repeat(1, 9, 1), weight, "ieee")
    (True, False)
    """
    return (
        precision in _ARITHMETIC
        and batch.dtype == weight.dtype == torch.float32
        and weight.is_contiguous()
        and pay_for(batch.shape[1], *weight.shape[1:])
    )


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """Multiply each client's batch by the transpose of its weights, and add the bias.

    Parameters
    ----------
    x : Tensor
        ``[clients, samples, columns]``; see :func:`fit`.
    weight : Tensor
        ``[clients, rows, columns]``.
    bias : Tensor or None
        ``[clients, rows]``.
    precision : str
        As for :func:`equipoise.models.convolutions.convolve`, without ``"bfloat16"``.

    Returns
    -------
    Tensor
        ``[clients, samples, rows]``.
    """
    x = _rows_in_one(x)
    (clients, samples, columns), rows = x.shape, weight.shape[1]
    y = x.new_empty(clients, samples, rows)
    if y.numel() == 0:
        return y
    pieces = triton.cdiv(columns, _PIECE)
    sums = x.new_empty(clients, pieces, samples, rows)
    tiles = triton.cdiv(rows, _FORWARD["ROWS"])
    with torch.cuda.device_of(x):
        _multiply[(tiles * pieces * clients,)](
            x,
            weight,
            sums,
            samples,
            rows,
            columns,
            *x.stride()[:2],
            tiles,
            pieces,
            ARITHMETIC=_arithmetic(precision, samples),
            PIECE=_PIECE,
            SAMPLES=_padded(samples),
            **_FORWARD,
            **FUSED,
        )
        tiles = triton.cdiv(samples * rows, _BLOCK)
        _add_pieces[(tiles * clients,)](
            sums,
            None if bias is None else bias.contiguous(),
            y,
            tiles,
            pieces,
            samples * rows,
            rows,
            BIASED=bias is not None,
            BLOCK=_BLOCK,
            **FUSED,
        )
    return y


def multiply_back(upper: Tensor, weight: Tensor, precision: str) -> Tensor:
    """Multiply the gradient by each client's results by its weights.

    Parameters
    ----------
    upper : Tensor
        ``[clients, samples, rows]``; see :func:`fit`.
    weight : Tensor
        ``[clients, rows, columns]``.
    precision : str
        As for :func:`multiply`.

    Returns
    -------
    Tensor
        The gradient by the batches, ``[clients, samples, columns]``.
    """
    upper = _rows_in_one(upper)
    (clients, samples, rows), columns = upper.shape, weight.shape[2]
    of_x = upper.new_empty(clients, samples, columns)
    if of_x.numel() == 0:
        return of_x
    tiles = triton.cdiv(columns, _BACKWARD["COLUMNS"])
    with torch.cuda.device_of(upper):
        _multiply_back[(tiles * clients,)](
            upper,
            weight,
            of_x,
            samples,
            rows,
            columns,
            *upper.stride()[:2],
            tiles,
            ARITHMETIC=_arithmetic(precision, samples),
            SAMPLES=_padded(samples),
            **_BACKWARD,
            **FUSED,
        )
    return of_x


def _arithmetic(precision: str, samples: int) -> str:
    """Return how products of batches with so many rows are made."""
    return _ARITHMETIC["split" if precision == "tf32" and samples <= _FEW_ROWS else precision]


def _rows_in_one(batch: Tensor) -> Tensor:
    """Return a batch whose rows are contiguous; a view of a larger tensor may stay where it is."""
    return batch if batch.stride(2) == 1 else batch.contiguous()


def _padded(samples: int) -> int:
    """Return the number of rows that a kernel multiplies: a power of two, and 16 at least."""
    return max(16, triton.next_power_of_2(samples))
