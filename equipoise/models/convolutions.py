"""Convolutions of stacked clients, as Triton kernels for a GPU.

Forward pass, gradient by the input and gradient by the weights are matrix products whose factors
are read from the images as they are needed, so no patches are ever written. Images may lie in
memory in any order; results lie with channels innermost, which is the order these kernels read
fastest.

There are no atomic operations. The sum over samples of a weight's gradient is cut into pieces of a
fixed number of rows, which are added in order. How the work is cut depends on the layer alone, so
the same input gives the same bits, whoever shares the stack. Only imported where Triton is
installed: see ``equipoise.models.layers``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.kernels import _merged, _one_client
from equipoise.models.products import _rounded, pay_on


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over an image: stride, padding and dilation, down and across.

    With ``depthwise`` every channel has a kernel of its own, which reads that channel alone.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    depthwise: bool = False

    def size(self, image: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the result."""
        down, across = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                image, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return down, across


@dataclass(frozen=True)
class Tile:
    """What a program works on: rows and columns of the result, length of a partial product."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Return the tile in the kernels' words."""
        return {
            "M": self.rows,
            "N": self.columns,
            "K": self.inner,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def precision_on(device: torch.device) -> str:
    """Return the precision that PyTorch's settings allow on a device: see :func:`convolve`."""
    if torch.is_autocast_enabled("cuda"):
        return "bfloat16"
    if device.type != "cuda":  # Triton's interpreter.
        return "ieee"
    if torch.backends.cudnn.allow_tf32 and torch.cuda.get_device_capability(device) >= (8, 0):
        return "tf32"
    return "split" if pay_on(device) else "ieee"


# Where entries of a kernel begin to be counted. Places and channels follow from an entry's number
# by division. If the compiler knows that the number is small, it divides in 8 bits, two numbers at
# a time, and results were wrong on an H200 (Triton 3.6).
_ORIGIN = 0


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def _own_work(tiles: tl.tensor) -> tl.tuple:
    """Return which tile of which client a program works on.

    Both are in one axis of the grid, because the others are short.
    """
    return tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)


@triton.jit(do_not_specialize=["tiles"])
def _pack(
    weight: tl.tensor,
    packed: tl.tensor,
    tiles: tl.tensor,
    w_client: tl.tensor,
    p_client: tl.tensor,
    p_matrix: tl.tensor,
    p_column: tl.tensor,
    low_parts: tl.tensor,
    MATRICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
    SPLIT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Transpose every matrix of every client's weights; the low parts follow the high ones.

    Columns that are channels and places of the kernel, PLACES of them, are written places first.
    """
    tile, client = _own_work(tiles)
    matrix, tile = tile % MATRICES, tile // MATRICES
    row = (tile % tl.cdiv(ROWS, R)) * R + tl.arange(0, R)
    column = (tile // tl.cdiv(ROWS, R)) * C + tl.arange(0, C)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    own = weight + client * w_client + matrix * (ROWS * COLUMNS)
    values = tl.load(own + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0)
    if PLACES > 1:
        column = column % PLACES * (COLUMNS // PLACES) + column // PLACES
    to = packed + client * p_client + matrix * p_matrix
    to = to + column[None, :] * p_column + row[:, None]
    if SPLIT:
        high = _rounded(values)
        tl.store(to + low_parts, _rounded(values - high), mask=inside)
        values = high
    tl.store(to, values.to(packed.dtype.element_ty), mask=inside)


@triton.jit
def _taps(
    phase: tl.tensor,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tuple:
    """Return the first place of the kernel that meets a pixel, and how many do.

    In the gradient by the input only every STRIDE-th pixel meets the same places.
    """
    first = phase * 0
    number = first + SIZE
    if TRANSPOSED and STRIDE > 1:
        number = first
        for back in tl.static_range(SIZE):
            # From the last place to the first, so that the first one is what is left.
            far = DILATION * (SIZE * (STRIDE - 1) + 1 + back)
            meets = (phase + PADDING + far) % STRIDE == 0
            first = tl.where(meets, SIZE - 1 - back, first)
            number += meets.to(tl.int32)
    return first, number


@triton.jit
def _shift(
    place: tl.tensor,
    phase: tl.tensor,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """Return how far from its own pixel a result reads at a place of the kernel."""
    if TRANSPOSED:
        # Numerator: a multiple of the stride, and not negative.
        far: tl.constexpr = DILATION * SIZE
        return (phase + PADDING - place * DILATION + far * STRIDE) // STRIDE - far
    return place * DILATION - PADDING


@triton.jit(do_not_specialize=["tiles", "samples", "origin"])
def _convolution(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    tiles: tl.tensor,
    samples: tl.tensor,
    origin: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    w_client: tl.tensor,
    low_parts: tl.tensor,
    CHANNELS: tl.constexpr,
    RESULTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE_DOWN: tl.constexpr,
    STRIDE_ACROSS: tl.constexpr,
    PADDING_DOWN: tl.constexpr,
    PADDING_ACROSS: tl.constexpr,
    DILATION_DOWN: tl.constexpr,
    DILATION_ACROSS: tl.constexpr,
    STEP_DOWN: tl.constexpr,
    STEP_ACROSS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIASED: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Write a tile of a convolution, pixels by channels, or of its gradient by the input.

    The gradient is made for one phase of pixels at a time: those whose rows, and columns, leave
    the same remainder after division by the stride meet the same places of the kernel.

    ``origin`` is zero, which the compiler must not know: see ``_ORIGIN``.
    """
    PHASES_DOWN: tl.constexpr = STRIDE_DOWN if TRANSPOSED else 1
    PHASES_ACROSS: tl.constexpr = STRIDE_ACROSS if TRANSPOSED else 1
    MOVE_DOWN: tl.constexpr = 1 if TRANSPOSED else STRIDE_DOWN
    MOVE_ACROSS: tl.constexpr = 1 if TRANSPOSED else STRIDE_ACROSS
    PHASE_ROWS: tl.constexpr = (ROWS + PHASES_DOWN - 1) // PHASES_DOWN
    PHASE_COLUMNS: tl.constexpr = (COLUMNS + PHASES_ACROSS - 1) // PHASES_ACROSS
    TILES: tl.constexpr = (RESULTS + N - 1) // N
    BLOCKS: tl.constexpr = (CHANNELS + K - 1) // K
    tile, client = _own_work(tiles)
    result = (tile % TILES) * N + tl.arange(0, N)
    phase = tile // TILES % (PHASES_DOWN * PHASES_ACROSS)
    pixel = (tile // (TILES * PHASES_DOWN * PHASES_ACROSS)) * M + tl.arange(0, M)
    sample = pixel // (PHASE_ROWS * PHASE_COLUMNS)
    row = pixel % (PHASE_ROWS * PHASE_COLUMNS) // PHASE_COLUMNS
    column = pixel % PHASE_COLUMNS
    phase_down, phase_across = phase // PHASES_ACROSS, phase % PHASES_ACROSS
    exists = (sample < samples)[:, None]
    top, left = (row * MOVE_DOWN)[:, None], (column * MOVE_ACROSS)[:, None]
    own = x + client * x_client + sample.to(tl.int64)[:, None] * x_sample
    own += top * x_row + left * x_column
    first_down, taps_down = _taps(
        phase_down, DOWN, STRIDE_DOWN, PADDING_DOWN, DILATION_DOWN, TRANSPOSED
    )
    first_across, taps_across = _taps(
        phase_across, ACROSS, STRIDE_ACROSS, PADDING_ACROSS, DILATION_ACROSS, TRANSPOSED
    )
    # In full float32 precision the factors are read across, else along what is summed.
    ENTRIES_FIRST: tl.constexpr = PRECISION == "ieee"
    matrix = weight + client * w_client
    along = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    taps = taps_down * taps_across
    steps = tl.cdiv(taps * CHANNELS, K) if PACKED else taps * BLOCKS
    for step in range(0, steps):
        if PACKED:
            # Few channels: several places of the kernel at once.
            entry = origin + step * K + along
            tap, channel = (entry // CHANNELS)[None, :], entry % CHANNELS
            there = entry < taps * CHANNELS
        else:
            tap, channel = step // BLOCKS, (step % BLOCKS) * K + along
            there = channel < CHANNELS
        i = first_down + tap // taps_across * STEP_DOWN
        j = first_across + tap % taps_across * STEP_ACROSS
        if not PACKED:
            entry = (i * ACROSS + j) * CHANNELS + channel
        down = _shift(i, phase_down, DOWN, STRIDE_DOWN, PADDING_DOWN, DILATION_DOWN, TRANSPOSED)
        across = _shift(
            j, phase_across, ACROSS, STRIDE_ACROSS, PADDING_ACROSS, DILATION_ACROSS, TRANSPOSED
        )
        inside = exists & (top + down >= 0) & (top + down < HEIGHT)
        inside &= (left + across >= 0) & (left + across < WIDTH)
        if PACKED or CHANNELS % K != 0:
            inside = inside & there[None, :]
        values = tl.load(
            own + (down * x_row + across * x_column + channel[None, :] * x_channel),
            mask=inside,
            other=0.0,
        )
        if ENTRIES_FIRST:
            at = matrix + (entry[:, None] * RESULTS + result[None, :])
            wanted = there[:, None] & (result < RESULTS)[None, :]
        else:
            at = matrix + (result[:, None] * (DOWN * ACROSS * CHANNELS) + entry[None, :])
            wanted = (result < RESULTS)[:, None] & there[None, :]
        factors = tl.load(at, mask=wanted, other=0.0)
        if PRECISION == "split":
            low = tl.load(at + low_parts, mask=wanted, other=0.0)
            high = _rounded(values)
            part = tl.dot(_rounded(values - high), tl.trans(factors), input_precision="tf32")
            part = tl.dot(high, tl.trans(low), part, input_precision="tf32")
            total += tl.dot(high, tl.trans(factors), part, input_precision="tf32")
        elif PRECISION == "bfloat16":
            total = tl.dot(values.to(tl.bfloat16), tl.trans(factors), total)
        elif PRECISION == "tf32":
            total = tl.dot(values, tl.trans(factors), total, input_precision="tf32")
        else:
            total = tl.dot(values, factors, total, input_precision="ieee")
    if BIASED:
        added = tl.load(bias + client * RESULTS + result, mask=result < RESULTS, other=0.0)
        total += added[None, :]
    if RELU:
        # What is not a number stays so.
        total = tl.where(total <= 0, 0.0, total)
    to_row = row * PHASES_DOWN + phase_down
    to_column = column * PHASES_ACROSS + phase_across
    inside = exists & ((to_row < ROWS) & (to_column < COLUMNS))[:, None]
    to = ((client * samples + sample) * ROWS + to_row) * COLUMNS + to_column
    tl.store(
        y + to[:, None] * RESULTS + result[None, :],
        total.to(y.dtype.element_ty),
        mask=inside & (result < RESULTS)[None, :],
    )


@triton.jit
def _first_part(x: tl.tensor) -> tl.tuple:
    """Round to bfloat16, and return what is left too."""
    first = x.to(tl.bfloat16)
    return first, x - first.to(tl.float32)


@triton.jit
def _place_of(pixel: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tuple:
    """Say of which sample, row and column pixels are that are counted through all samples."""
    sample = (pixel // (ROWS * COLUMNS)).to(tl.int64)
    row, column = pixel % (ROWS * COLUMNS) // COLUMNS, pixel % COLUMNS
    return sample[:, None], row[:, None], column[:, None]


@triton.jit(do_not_specialize=["tiles", "pixels", "length", "origin"])
def _weight_sums(
    x: tl.tensor,
    upper: tl.tensor,
    sums: tl.tensor,
    tiles: tl.tensor,
    pixels: tl.tensor,
    length: tl.tensor,
    origin: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    u_channel: tl.tensor,
    u_row: tl.tensor,
    u_column: tl.tensor,
    CHANNELS: tl.constexpr,
    RESULTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE_DOWN: tl.constexpr,
    STRIDE_ACROSS: tl.constexpr,
    PADDING_DOWN: tl.constexpr,
    PADDING_ACROSS: tl.constexpr,
    DILATION_DOWN: tl.constexpr,
    DILATION_ACROSS: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Write the gradient by a tile of the weights, over one piece of all pixels of all samples.

    Rows of the tile are places of the kernel and channels, columns are channels of the result. The
    gradient by the bias, if there is one, follows that by the weights.
    """
    ALL: tl.constexpr = DOWN * ACROSS * CHANNELS
    TILES: tl.constexpr = (RESULTS + N - 1) // N
    TALL: tl.constexpr = (ALL + M - 1) // M
    tile, client = _own_work(tiles)
    piece = tile // (TILES * TALL)
    pieces = tiles // (TILES * TALL)
    result = (tile % TILES) * N + tl.arange(0, N)
    first = tile // TILES % TALL * M
    if CHANNELS % 16 != 0:
        first += origin
    entry = first + tl.arange(0, M)
    if CHANNELS % M == 0:
        # The whole tile is at one place of the kernel.
        place = first // CHANNELS
        channel = (first % CHANNELS + tl.arange(0, M))[None, :]
    else:
        place = (entry // CHANNELS)[None, :]
        channel = (entry % CHANNELS)[None, :]
    down = (place + origin) // ACROSS * DILATION_DOWN - PADDING_DOWN
    across = (place + origin) % ACROSS * DILATION_ACROSS - PADDING_ACROSS
    images = x + client * x_client + (down * x_row + across * x_column + channel * x_channel)
    changes = upper + client * u_client + (result * u_channel)[None, :]
    here, wanted = (entry < ALL)[None, :], (result < RESULTS)[None, :]
    along = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    begin = piece * length
    end = tl.minimum(begin + length, pixels)
    for done in range(begin, end, K):
        pixel = done + along
        sample, row, column = _place_of(pixel, ROWS, COLUMNS)
        exists = (pixel < end)[:, None]
        top, left = row * STRIDE_DOWN, column * STRIDE_ACROSS
        inside = exists & (top + down >= 0) & (top + down < HEIGHT)
        inside &= (left + across >= 0) & (left + across < WIDTH)
        if ALL % M != 0:
            inside = inside & here
        values = tl.load(
            images + (sample * x_sample + top * x_row + left * x_column), mask=inside, other=0.0
        )
        change = tl.load(
            changes + (sample * u_sample + row * u_row + column * u_column),
            mask=exists & wanted,
            other=0.0,
        )
        if PRECISION == "split" or PRECISION == "tf32":
            # Only 16-bit factors can be transposed on their way to the tensor cores. The first two
            # parts of a number hold 16 bits of it, more than TF32 does; all three hold 24.
            left, left_rest = _first_part(values)
            right, right_rest = _first_part(change)
            left_second, left_rest = _first_part(left_rest)
            right_second, right_rest = _first_part(right_rest)
            part = tl.zeros((M, N), dtype=tl.float32)
            if PRECISION == "split":
                part = tl.dot(tl.trans(left_rest.to(tl.bfloat16)), right, part)
                part = tl.dot(tl.trans(left), right_rest.to(tl.bfloat16), part)
                part = tl.dot(tl.trans(left_second), right_second, part)
            part = tl.dot(tl.trans(left_second), right, part)
            part = tl.dot(tl.trans(left), right_second, part)
            total += tl.dot(tl.trans(left), right, part)
        elif PRECISION == "bfloat16":
            total = tl.dot(tl.trans(values.to(tl.bfloat16)), change.to(tl.bfloat16), total)
        else:
            total = tl.dot(tl.trans(values), change, total, input_precision="ieee")
    own = sums + (client * pieces + piece) * (RESULTS * (ALL + BIASED))
    tl.store(
        own + result[None, :] * ALL + entry[:, None],
        total,
        mask=(entry < ALL)[:, None] & wanted,
    )
    if BIASED:  # noqa: SIM102
        if first == 0:
            of_bias = tl.zeros((N,), dtype=tl.float32)
            for done in range(begin, end, K):
                pixel = done + along
                sample, row, column = _place_of(pixel, ROWS, COLUMNS)
                change = tl.load(
                    changes + (sample * u_sample + row * u_row + column * u_column),
                    mask=(pixel < end)[:, None] & wanted,
                    other=0.0,
                )
                of_bias += tl.sum(change.to(tl.float32), axis=0)
            tl.store(own + RESULTS * ALL + result, of_bias, mask=result < RESULTS)


@triton.jit(do_not_specialize=["tiles", "pieces"])
def _add_pieces(
    sums: tl.tensor,
    of_weight: tl.tensor,
    of_bias: tl.tensor,
    tiles: tl.tensor,
    pieces: tl.tensor,
    RESULTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the pieces of a gradient in order, and write it in the order of the weights."""
    ALL: tl.constexpr = RESULTS * CHANNELS * PLACES
    tile, client = _own_work(tiles)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    result, channel, place = at // (CHANNELS * PLACES), at // PLACES % CHANNELS, at % PLACES
    of = (result * PLACES + place) * CHANNELS + channel
    if BIASED:
        of = tl.where(at < ALL, of, at)
    inside = at < ALL + BIASED * RESULTS
    own = sums + client * pieces * (ALL + BIASED * RESULTS) + of
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for piece in range(0, pieces):
        total += tl.load(own + piece * (ALL + BIASED * RESULTS), mask=inside, other=0.0)
    tl.store(of_weight + client * ALL + at, total, mask=at < ALL)
    if BIASED:
        tl.store(of_bias + client * RESULTS + (at - ALL), total, mask=inside & (at >= ALL))


# ---- depthwise kernels ---------------------------------------------------------------------------
#
# They do little arithmetic, in float32 whatever the precision: what they cost is memory traffic.


@triton.jit(do_not_specialize=["tiles", "samples"])
def _depthwise_convolution(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    tiles: tl.tensor,
    samples: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    w_client: tl.tensor,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE_DOWN: tl.constexpr,
    STRIDE_ACROSS: tl.constexpr,
    PADDING_DOWN: tl.constexpr,
    PADDING_ACROSS: tl.constexpr,
    DILATION_DOWN: tl.constexpr,
    DILATION_ACROSS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIASED: tl.constexpr,
    RELU: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """Write a tile of a depthwise convolution, or of its gradient by the input.

    A tile is pixels by channels.
    """
    TILES: tl.constexpr = (CHANNELS + N - 1) // N
    tile, client = _own_work(tiles)
    channel = (tile % TILES) * N + tl.arange(0, N)
    pixel = (tile // TILES) * M + tl.arange(0, M)
    sample, row, column = _place_of(pixel, ROWS, COLUMNS)
    exists = (sample < samples) & (channel < CHANNELS)[None, :]
    own = x + client * x_client + sample * x_sample + (channel * x_channel)[None, :]
    factors = weight + client * w_client + channel * (DOWN * ACROSS)
    total = tl.zeros((M, N), dtype=tl.float32)
    for place in tl.static_range(DOWN * ACROSS):
        down, across = place // ACROSS * DILATION_DOWN, place % ACROSS * DILATION_ACROSS
        if TRANSPOSED:
            down, across = row + PADDING_DOWN - down, column + PADDING_ACROSS - across
            inside = exists & (down >= 0) & (down % STRIDE_DOWN == 0)
            inside = inside & (across >= 0) & (across % STRIDE_ACROSS == 0)
            down, across = down // STRIDE_DOWN, across // STRIDE_ACROSS
        else:
            down = row * STRIDE_DOWN + down - PADDING_DOWN
            across = column * STRIDE_ACROSS + across - PADDING_ACROSS
            inside = exists & (down >= 0) & (across >= 0)
        inside = inside & (down < HEIGHT) & (across < WIDTH)
        values = tl.load(own + (down * x_row + across * x_column), mask=inside, other=0.0)
        factor = tl.load(factors + place, mask=channel < CHANNELS, other=0.0)
        total += values.to(tl.float32) * factor[None, :]
    if BIASED:
        added = tl.load(bias + client * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        total += added[None, :]
    if RELU:
        total = tl.where(total <= 0, 0.0, total)
    to = ((client * samples + sample) * ROWS + row) * COLUMNS + column
    tl.store(y + to * CHANNELS + channel[None, :], total.to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["tiles", "pixels", "length"])
def _depthwise_weight_sums(
    x: tl.tensor,
    upper: tl.tensor,
    sums: tl.tensor,
    tiles: tl.tensor,
    pixels: tl.tensor,
    length: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    u_channel: tl.tensor,
    u_row: tl.tensor,
    u_column: tl.tensor,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE_DOWN: tl.constexpr,
    STRIDE_ACROSS: tl.constexpr,
    PADDING_DOWN: tl.constexpr,
    PADDING_ACROSS: tl.constexpr,
    DILATION_DOWN: tl.constexpr,
    DILATION_ACROSS: tl.constexpr,
    BIASED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Write the gradient by one place of some channels' kernels, over one piece of all pixels.

    The place after the last is the bias.
    """
    PLACES: tl.constexpr = DOWN * ACROSS
    TILES: tl.constexpr = (CHANNELS + N - 1) // N
    tile, client = _own_work(tiles)
    piece = tile // (TILES * (PLACES + BIASED))
    pieces = tiles // (TILES * (PLACES + BIASED))
    place = tile // TILES % (PLACES + BIASED)
    channel = (tile % TILES) * N + tl.arange(0, N)
    wanted = (channel < CHANNELS)[None, :]
    down = place // ACROSS * DILATION_DOWN - PADDING_DOWN
    across = place % ACROSS * DILATION_ACROSS - PADDING_ACROSS
    # The bias reads no images.
    height = tl.where(place < PLACES, HEIGHT, 0)
    images = x + client * x_client + (channel * x_channel)[None, :]
    changes = upper + client * u_client + (channel * u_channel)[None, :]
    total = tl.zeros((N,), dtype=tl.float32)
    begin = piece * length
    end = tl.minimum(begin + length, pixels)
    for done in range(begin, end, K):
        pixel = done + tl.arange(0, K)
        sample, row, column = _place_of(pixel, ROWS, COLUMNS)
        exists = (pixel < end)[:, None] & wanted
        top, left = row * STRIDE_DOWN + down, column * STRIDE_ACROSS + across
        inside = exists & (top >= 0) & (top < height) & (left >= 0) & (left < WIDTH)
        change = tl.load(
            changes + (sample * u_sample + row * u_row + column * u_column), mask=exists, other=0.0
        )
        values = tl.load(
            images + (sample * x_sample + top * x_row + left * x_column),
            mask=inside,
            other=0.0,
        )
        factor = tl.where(place < PLACES, values.to(tl.float32), 1.0)
        total += tl.sum(change.to(tl.float32) * factor, axis=0)
    entry = tl.where(place < PLACES, channel * PLACES + place, CHANNELS * PLACES + channel)
    own = sums + (client * pieces + piece) * (CHANNELS * (PLACES + BIASED))
    tl.store(own + entry, total, mask=channel < CHANNELS)


# ---- launching -----------------------------------------------------------------------------------

# Pixels and channels of a depthwise tile; entries that a program adds up; few entries of a kernel.
_PIXELS, _CHANNELS, _BLOCK, _FEW = 64, 32, 1024, 32


def packed(weight: Tensor, transposed: bool, precision: str) -> Tensor:
    """Lay weights out as a kernel reads them.

    Returns
    -------
    Tensor
        ``[parts, clients, results * places * channels]``, or results last in full float32
        precision; one client if all share their weights in memory.
    """
    one = (weight[:1] if weight.stride(0) == 0 else weight).contiguous()
    clients, out, channels, *kernel = one.shape
    places = math.prod(kernel)
    entries_first = precision == "ieee"
    # Rows become the last axis. There is one matrix if the weights' first axis becomes the last,
    # else one for each index of that axis.
    single = transposed != entries_first
    rows, columns = (out, channels * places) if single else (channels, places)
    parts = 2 if precision == "split" else 1
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    made = torch.empty(parts, clients, one[0].numel(), dtype=dtype, device=weight.device)
    tile = (32, 64) if columns > 16 else (128, triton.next_power_of_2(columns))
    matrices = 1 if single else out
    tiles = triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]) * matrices
    with torch.cuda.device_of(weight):
        _pack[(tiles * clients,)](
            one,
            made,
            tiles,
            one.stride(0),
            made.stride(1),
            channels if entries_first else channels * places,
            out * channels if entries_first and not single else rows,
            made.stride(0),
            MATRICES=matrices,
            ROWS=rows,
            COLUMNS=columns,
            PLACES=places if entries_first and single else 1,
            SPLIT=parts == 2,
            R=tile[0],
            C=tile[1],
        )
    return made


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    precision: str,
    *,
    size: tuple[int, int] | None = None,
    relu: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Convolve, or with the ``size`` of an image return the gradient by that image."""
    clients, samples, channels, height, width = x.shape
    transposed = size is not None
    kernel = weight.shape[3], weight.shape[4]
    results = channels if geometry.depthwise else weight.shape[2 if transposed else 1]
    rows, columns = geometry.size((height, width), kernel) if size is None else size
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    y = torch.empty(clients, samples, rows, columns, results, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y.permute(0, 1, 4, 2, 3)
    tensors = None if bias is None else bias.contiguous(), y
    options = _named(x, (rows, columns), kernel, geometry)
    options |= {"TRANSPOSED": transposed, "BIASED": bias is not None, "RELU": relu}
    if geometry.depthwise:
        tiles = triton.cdiv(samples * rows * columns, _PIXELS) * triton.cdiv(channels, _CHANNELS)
        # A view of weights that all clients share keeps its stride of zero.
        flat = weight.flatten(1)
        with torch.cuda.device_of(x):
            _depthwise_convolution[(tiles * clients,)](
                x,
                flat,
                *tensors,
                tiles,
                samples,
                *x.stride(),
                flat.stride(0),
                M=_PIXELS,
                N=_CHANNELS,
                **options,
            )
        return y.permute(0, 1, 4, 2, 3)
    tile = tile or convolution_tile(channels, results, rows * columns, precision)
    matrix = packed(weight, transposed, precision)
    down, across = geometry.stride if transposed else (1, 1)
    pixels = samples * triton.cdiv(rows, down) * triton.cdiv(columns, across)
    tiles = triton.cdiv(pixels, tile.rows) * down * across * triton.cdiv(results, tile.columns)
    with torch.cuda.device_of(x):
        _convolution[(tiles * clients,)](
            x,
            matrix,
            *tensors,
            tiles,
            samples,
            _ORIGIN,
            *x.stride(),
            0 if matrix.shape[1] == 1 else matrix.stride(1),
            matrix.stride(0),
            RESULTS=results,
            STEP_DOWN=_step(geometry, 0) if transposed else 1,
            STEP_ACROSS=_step(geometry, 1) if transposed else 1,
            PRECISION=precision,
            PACKED=_packs(channels, tile.inner) and (down, across) == (1, 1),
            **options,
            **tile.options,
        )
    return y.permute(0, 1, 4, 2, 3)


def weight_gradient(
    x: Tensor,
    upper: Tensor,
    kernel: tuple[int, int],
    geometry: Geometry,
    precision: str,
    *,
    biased: bool,
    tile: Tile | None = None,
    piece: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient by weights and bias."""
    clients, samples, channels, *_ = x.shape
    results, rows, columns = upper.shape[2:]
    read = 1 if geometry.depthwise else channels
    places = kernel[0] * kernel[1]
    if read * places <= _FEW and precision in ("split", "tf32"):
        # Tensor cores gain nothing here.
        precision = "ieee"
    if tile is None or piece is None:
        tile, piece = weight_tile(results, read * places, rows * columns, precision)
    pixels = samples * rows * columns
    pieces, entries = triton.cdiv(pixels, piece), results * (read * places + biased)
    sums = torch.empty(clients, pieces, entries, device=x.device)
    of_weight = torch.empty(clients, results, read, *kernel, device=x.device)
    of_bias = torch.empty(clients, results, device=x.device) if biased else None
    if clients == 0:
        return of_weight, of_bias
    images, lengths = (x, upper, sums), (pixels, piece)
    strides = *x.stride(), *upper.stride()
    options = _named(x, (rows, columns), kernel, geometry) | {"BIASED": biased}
    with torch.cuda.device_of(x):
        if pieces and geometry.depthwise:
            tiles = triton.cdiv(channels, _CHANNELS) * (places + biased) * pieces
            _depthwise_weight_sums[(tiles * clients,)](
                *images, tiles, *lengths, *strides, N=_CHANNELS, K=_PIXELS, **options
            )
        elif pieces:
            tiles = triton.cdiv(channels * places, tile.rows) * triton.cdiv(results, tile.columns)
            tiles *= pieces
            _weight_sums[(tiles * clients,)](
                *images,
                tiles,
                *lengths,
                _ORIGIN,
                *strides,
                RESULTS=results,
                PRECISION=precision,
                **options,
                **tile.options,
            )
        tiles = triton.cdiv(entries, _BLOCK)
        _add_pieces[(tiles * clients,)](
            sums,
            of_weight,
            of_bias,
            tiles,
            pieces,
            RESULTS=results,
            CHANNELS=read,
            PLACES=places,
            BIASED=biased,
            BLOCK=_BLOCK,
        )
    return of_weight, of_bias


def _named(
    x: Tensor, size: tuple[int, int], kernel: tuple[int, int], geometry: Geometry
) -> dict[str, int]:
    """Return the sizes of a convolution in the kernels' words.

    ``size`` is height and width of the images that are not ``x``.
    """
    names = ("CHANNELS", "HEIGHT", "WIDTH", "ROWS", "COLUMNS")
    found = dict(zip(names, (*x.shape[2:], *size), strict=True))
    pairs = {
        "": kernel,
        "STRIDE_": geometry.stride,
        "PADDING_": geometry.padding,
        "DILATION_": geometry.dilation,
    }
    for name, (down, across) in pairs.items():
        found |= {f"{name}DOWN": down, f"{name}ACROSS": across}
    return found


def _packs(channels: int, inner: int) -> bool:
    """Return whether much of a partial product would be empty at one place of the kernel."""
    return triton.cdiv(channels, inner) * inner > 1.25 * channels


def _step(geometry: Geometry, axis: int) -> int:
    """Return the distance of the places of a kernel that meet the same pixels of an image."""
    stride = geometry.stride[axis]
    return stride // math.gcd(stride, geometry.dilation[axis])


def convolution_tile(channels: int, results: int, pixels: int, precision: str) -> Tile:
    """Choose the tile of a convolution or its gradient by the input.

    It depends on the layer alone, so that results do not depend on who shares the stack. These
    tiles were the fastest, or within 5 % of them, on an H200 (PyTorch 2.11, Triton 3.6) for the
    convolutions of job *pfl* (50 and 200 clients of 10 images), ``cnn4`` and ``bncnn`` (10 clients
    of 32 images) and ResNet-18 (10 clients of 10 images).

    Parameters
    ----------
    channels, results : int
        Channels that are read and written.
    pixels : int
        Pixels of an image that is written.
    precision : str
        As for :func:`convolve`.
    """
    small, narrow, wide = pixels <= 64, results <= 32, results >= 128
    if precision == "ieee":
        tile = Tile(128 if narrow else 64, 64, 16, 4, 3)
    elif precision == "split":
        tile = Tile(64, 64, 32, 4, 3)
    elif small:
        tile = Tile(64, 64, 64, 4, 3)
    elif wide:
        tile = Tile(128, 128, 32, 8, 3)
    else:
        tile = Tile(128, 64, 32, 4, 3)
    inner = tile.inner
    if channels % 16 == 0:
        # The largest power of two that divides the channels.
        inner = min(inner, channels & -channels)
    columns = min(tile.columns, max(16, triton.next_power_of_2(results)))
    return replace(tile, columns=columns, inner=inner)


def weight_tile(results: int, entries: int, pixels: int, precision: str) -> tuple[Tile, int]:
    """Choose the tile of a gradient by the weights and the pixels of a piece, from the layer alone.

    Measured as for :func:`convolution_tile`.

    Parameters
    ----------
    results : int
        Channels that the layer writes.
    entries : int
        Weights of one of them.
    pixels : int
        Pixels of an image that the layer writes.
    precision : str
        As for :func:`convolve`.
    """
    if precision == "ieee":
        tile, piece = Tile(64, 64, 32, 4, 2), 512
    elif precision == "bfloat16":
        tile, piece = Tile(64, 64, 64, 4, 3), 1024
    else:
        # More stages would let Triton copy single numbers and transpose them on the way.
        tile, piece = Tile(64, 64, 32, 4, 1), 512
    columns, rows = (max(16, triton.next_power_of_2(size)) for size in (results, entries))
    tile = replace(tile, columns=min(tile.columns, columns), rows=min(tile.rows, rows))
    # At most two pieces an image, because each takes as much memory as the weights.
    return tile, max(piece, triton.cdiv(pixels, 2))


# ---- differentiation -----------------------------------------------------------------------------
#
# The gradients of each of the three functions are the other two, and so are theirs.


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    *,
    relu: bool = False,
    precision: str | None = None,
) -> Tensor:
    """Convolve a client's batch with its weights.

    Parameters
    ----------
    x : Tensor
        A batch ``[samples, channels, height, width]``, float32 or bfloat16.
    weight : Tensor
        ``[results, channels, height, width]``, float32.
    bias : Tensor or None
        ``[results]``, float32.
    geometry : Geometry
        Stride, padding and dilation.
    relu : bool
        Whether negative results become zero.
    precision : str, optional
        ``"ieee"``: products and sums in float32. ``"split"``: as accurate, by tensor cores.
        ``"tf32"``: factors rounded to TF32, or to something finer. ``"bfloat16"``: factors and
        result in bfloat16. By default what PyTorch's settings allow.

    Returns
    -------
    Tensor
        ``[samples, results, height, width]``, with channels innermost in memory.
    """
    of_bias = None if bias is None else bias.unsqueeze(0)
    how = geometry, precision or precision_on(x.device), relu
    y = StackedConvolution.apply(x.unsqueeze(0), weight.unsqueeze(0), of_bias, *how)
    return _one_client(y)


class StackedConvolution(torch.autograd.Function):
    """What :func:`convolve` does for clients stacked along a leading axis."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        precision: str,
        relu: bool,
    ) -> Tensor:
        """Convolve."""
        return convolution(x, weight, bias, geometry, precision, relu=relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        x, weight, bias, ctx.geometry, ctx.precision, ctx.relu = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight, output if ctx.relu else None)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by input, weight and bias."""
        x, weight, y = ctx.saved_tensors
        if ctx.relu:
            upper = torch.ops.aten.threshold_backward(upper, y, 0)
        how = ctx.geometry, ctx.precision
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            size = x.shape[3], x.shape[4]
            of_x = StackedInputGradient.apply(upper, weight, *how, size).to(x.dtype)
        if any(ctx.needs_input_grad[1:3]):
            kernel = weight.shape[3], weight.shape[4]
            biased = ctx.biased and ctx.needs_input_grad[2]
            of_weight, of_bias = StackedWeightGradient.apply(x, upper, *how, kernel, biased)
        return of_x, of_weight, of_bias, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Count stacked clients among the clients there already are."""
        made = StackedConvolution.apply(*_all_merged(info, in_dims, inputs, tensors=3))
        return made.unflatten(0, (info.batch_size, -1)), 0


class StackedInputGradient(torch.autograd.Function):
    """The gradient of a convolution by its input.

    It is linear in the upper gradient and in the weights.
    """

    @staticmethod
    def forward(
        upper: Tensor, weight: Tensor, geometry: Geometry, precision: str, size: tuple[int, int]
    ) -> Tensor:
        """Return the gradient by images of a size."""
        return convolution(upper, weight, None, geometry, precision, size=size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep both factors."""
        upper, weight, ctx.geometry, ctx.precision, _ = inputs
        ctx.save_for_backward(upper, weight)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by the upper gradient and by the weights."""
        upper, weight = ctx.saved_tensors
        how = ctx.geometry, ctx.precision
        of_upper = of_weight = None
        if ctx.needs_input_grad[0]:
            of_upper = StackedConvolution.apply(second, weight, None, *how, False)
            of_upper = of_upper.to(upper.dtype)
        if ctx.needs_input_grad[1]:
            kernel = weight.shape[3], weight.shape[4]
            of_weight, _ = StackedWeightGradient.apply(second, upper, *how, kernel, False)
        return of_upper, of_weight, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Count stacked clients among the clients there already are."""
        made = StackedInputGradient.apply(*_all_merged(info, in_dims, inputs, tensors=2))
        return made.unflatten(0, (info.batch_size, -1)), 0


class StackedWeightGradient(torch.autograd.Function):
    """The gradient of a convolution by weights and bias.

    It is linear in the input and in the upper gradient.
    """

    @staticmethod
    def forward(
        x: Tensor,
        upper: Tensor,
        geometry: Geometry,
        precision: str,
        kernel: tuple[int, int],
        biased: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient by weights of a size, and by the bias if there is one."""
        return weight_gradient(x, upper, kernel, geometry, precision, biased=biased)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        """Keep both factors."""
        x, upper, ctx.geometry, ctx.precision, *_ = inputs
        ctx.save_for_backward(x, upper)

    @staticmethod
    def backward(ctx: Any, of_weight: Tensor, of_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient by the input and by the upper gradient."""
        x, upper = ctx.saved_tensors
        how = ctx.geometry, ctx.precision
        of_x = of_upper = None
        if ctx.needs_input_grad[0]:
            size = x.shape[3], x.shape[4]
            of_x = StackedInputGradient.apply(upper, of_weight, *how, size).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_upper = StackedConvolution.apply(x, of_weight, of_bias, *how, False)
            of_upper = of_upper.to(upper.dtype)
        return of_x, of_upper, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[int, int | None]]:
        """Count stacked clients among the clients there already are."""
        of_weight, of_bias = StackedWeightGradient.apply(
            *_all_merged(info, in_dims, inputs, tensors=2)
        )
        of_weight = of_weight.unflatten(0, (info.batch_size, -1))
        if of_bias is None:
            return (of_weight, None), (0, None)
        return (of_weight, of_bias.unflatten(0, (info.batch_size, -1))), (0, 0)


def _all_merged(
    info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...], *, tensors: int
) -> tuple[Any, ...]:
    """Make one axis of stacked clients and the clients there already are, in the first inputs."""
    merged = (
        _merged(tensor, dim, info.batch_size)
        for tensor, dim in zip(inputs[:tensors], in_dims, strict=False)
    )
    return *merged, *inputs[tensors:]
