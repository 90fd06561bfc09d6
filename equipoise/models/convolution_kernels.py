"""Triton kernels of stacked convolutions, without what launches them.

A program works on one tile of one client. :mod:`equipoise.models.convolutions` launches these
kernels, and says what they promise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from equipoise.models.kernel_tools import high_part, low_part, split_product

# Where entries of a kernel begin to be counted. Places and channels follow from an entry's number
# by division. If the compiler knows that the number is small, it divides in 8 bits, two numbers at
# a time, and results were wrong on an H200 (Triton 3.6).
ORIGIN = 0


@triton.jit
def _own_work(tiles: tl.tensor) -> tuple[tl.tensor, ...]:
    """Return which tile of which client a program works on.

    Both are in one axis of the grid, because the others are short.
    """
    return tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)


@triton.jit(do_not_specialize=["tiles"])
def pack(
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
        high = high_part(values)
        tl.store(to + low_parts, low_part(values, high), mask=inside)
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
) -> tuple[tl.tensor, ...]:
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


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the larger of two numbers. What is not a number stays so."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quotient(number: tl.tensor, divisor: tl.constexpr) -> tl.tensor:
    """Divide a number from 0 to 2,047 by one up to 512, without a division.

    See ``ORIGIN``. The compiler also computes this beforehand where it knows the number.
    """
    return number * ((1 << 20) // divisor + 1) >> 20


@triton.jit
def _place_in_window(at: tl.tensor, M: tl.constexpr, WINDOW: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Say at which place of which window of a tile of M pixels a pixel is.

    The four pixels of a window of two by two are where the same thread has them: tensor cores give
    a thread rows that are 8 apart, and 64 if there are that many.
    """
    HALF: tl.constexpr = M // 2
    if WINDOW == 4 and M >= 32:
        place, window = at // HALF * 2 + at // 8 % 2, at % HALF // 16 * 8 + at % 8
    else:
        place, window = at % WINDOW, at // WINDOW
    return place, window


@triton.jit
def _maxima(total: tl.tensor, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Return the maximum over the pixels of each window; see :func:`_place_in_window`."""
    if WINDOW == 4 and M >= 32:
        pairs = tl.reduce(tl.reshape(total, (M // 16, 2, 8, N)), 1, _larger)
        maxima = tl.reduce(tl.reshape(pairs, (2, M // 4, N)), 0, _larger)
    else:
        maxima = tl.reduce(tl.reshape(total, (M // WINDOW, WINDOW, N)), 1, _larger)
    return maxima


@triton.jit(do_not_specialize=["tiles", "samples"])
def convolution(
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
    POOL_DOWN: tl.constexpr,
    POOL_ACROSS: tl.constexpr,
    CHANNELS_INNERMOST: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Write a tile of a convolution, pixels by channels, or of its gradient by the input.

    The gradient is made for one phase of pixels at a time: those whose rows, and columns, leave
    the same remainder after division by the stride meet the same places of the kernel.

    With windows of more than one pixel, POOL_DOWN by POOL_ACROSS, only the maximum of each is
    written. The pixels of a window follow one another in the tile.
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
    first = (tile // (TILES * PHASES_DOWN * PHASES_ACROSS)) * M
    pixel = first + tl.arange(0, M)
    WINDOW: tl.constexpr = POOL_DOWN * POOL_ACROSS
    POOLED_ROWS: tl.constexpr = ROWS // POOL_DOWN
    POOLED_COLUMNS: tl.constexpr = COLUMNS // POOL_ACROSS
    if WINDOW > 1:
        place, window = _place_in_window(tl.arange(0, M), M, WINDOW)
        window += first // WINDOW
        sample = window // (POOLED_ROWS * POOLED_COLUMNS)
        row = window % (POOLED_ROWS * POOLED_COLUMNS) // POOLED_COLUMNS * POOL_DOWN
        row += place // POOL_ACROSS
        column = window % POOLED_COLUMNS * POOL_ACROSS + place % POOL_ACROSS
    else:
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
            entry = step * K + along
            tap = _quotient(entry, CHANNELS)
            there, channel = entry < taps * CHANNELS, entry - tap * CHANNELS
            # The places of a line of the kernel are as many as it is wide: there are no phases.
            i = _quotient(tap, ACROSS)[None, :]
            j = tap[None, :] - i * ACROSS
        else:
            tap, channel = step // BLOCKS, (step % BLOCKS) * K + along
            there = channel < CHANNELS
            i = first_down + tap // taps_across * STEP_DOWN
            j = first_across + tap % taps_across * STEP_ACROSS
            entry = (i * ACROSS + j) * CHANNELS + channel
        down = _shift(i, phase_down, DOWN, STRIDE_DOWN, PADDING_DOWN, DILATION_DOWN, TRANSPOSED)
        across = _shift(
            j, phase_across, ACROSS, STRIDE_ACROSS, PADDING_ACROSS, DILATION_ACROSS, TRANSPOSED
        )
        inside = exists
        # Without padding all pixels are inside.
        if TRANSPOSED or PADDING_DOWN > 0:
            inside = inside & (top + down >= 0) & (top + down < HEIGHT)
        if TRANSPOSED or PADDING_ACROSS > 0:
            inside = inside & (left + across >= 0) & (left + across < WIDTH)
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
            total += split_product(values, factors, low)
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
        total = _larger(total, 0.0)
    if WINDOW > 1:
        total = _maxima(total, M, N, WINDOW)
        PLACES: tl.constexpr = POOLED_ROWS * POOLED_COLUMNS
        window = first // WINDOW + tl.arange(0, M // WINDOW)
        sample, place = (window // PLACES).to(tl.int64), window % PLACES
        inside = (sample < samples)[:, None]
        to = ((client * samples + sample) * (PLACES * RESULTS))[:, None]
        if CHANNELS_INNERMOST:
            to += place[:, None] * RESULTS + result[None, :]
        else:
            to += result[None, :] * PLACES + place[:, None]
    elif PHASES_DOWN * PHASES_ACROSS == 1:
        inside = exists
        # Pixels are written in the order in which they are counted.
        y += (client * samples * (ROWS * COLUMNS) + first) * RESULTS
        to = tl.arange(0, M)[:, None] * RESULTS + result[None, :]
    else:
        to_row = row * PHASES_DOWN + phase_down
        to_column = column * PHASES_ACROSS + phase_across
        inside = exists & ((to_row < ROWS) & (to_column < COLUMNS))[:, None]
        of_pixel = ((client * samples + sample) * ROWS + to_row) * COLUMNS + to_column
        to = of_pixel[:, None] * RESULTS + result[None, :]
    tl.store(y + to, total.to(y.dtype.element_ty), mask=inside & (result < RESULTS)[None, :])


@triton.jit
def _first_part(x: tl.tensor) -> tuple[tl.tensor, ...]:
    """Round to bfloat16, and return what is left too."""
    first = x.to(tl.bfloat16)
    return first, x - first.to(tl.float32)


@triton.jit
def _two_parts(x: tl.tensor) -> tuple[tl.tensor, ...]:
    """Cut a number after 8 bits, which bfloat16 holds, and round the rest to bfloat16.

    A GPU makes both conversions for two numbers at a time. Those of ``_first_part`` it makes
    singly, because it also converts their results back.
    """
    x = x.to(tl.float32)
    first = (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    # Not a number if x is infinite or not a number, so the sum will not be a number either.
    return first.to(tl.bfloat16), (x - first).to(tl.bfloat16)


@triton.jit
def add_products(
    total: tl.tensor, values: tl.tensor, change: tl.tensor, PRECISION: tl.constexpr
) -> tl.tensor:
    """Add the product of the transpose of ``values`` and ``change``, both ``[summed, ...]``."""
    if PRECISION == "tf32":
        # Only 16-bit factors can be transposed on their way to the tensor cores. Two parts hold
        # 16 bits of a number, 5 more than TF32. The product of the second parts is left out: it is
        # below 2^-14 of the product, and 2^-17 on average. A single product of float16 factors has
        # the precision of TF32 too, but their range needs a scale from the largest of the numbers
        # that are summed, and to find that takes more instructions than the parts do.
        left, left_rest = _two_parts(values)
        right, right_rest = _two_parts(change)
        total = tl.dot(tl.trans(left_rest), right, total)
        total = tl.dot(tl.trans(left), right_rest, total)
        total = tl.dot(tl.trans(left), right, total)
    elif PRECISION == "split":
        # Three parts hold all 24 bits of a number.
        left, left_rest = _first_part(values)
        right, right_rest = _first_part(change)
        left_second, left_rest = _first_part(left_rest)
        right_second, right_rest = _first_part(right_rest)
        part = tl.zeros(total.shape, dtype=tl.float32)
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
    return total


@triton.jit
def _place_of(pixel: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Say of which sample, row and column pixels are that are counted through all samples."""
    # Numbers are not negative, and unsigned ones are divided in fewer instructions.
    rows = pixel.to(tl.uint32) // COLUMNS
    sample, column = rows // ROWS, pixel - (rows * COLUMNS).to(tl.int32)
    row = (rows - sample * ROWS).to(tl.int32)
    return sample.to(tl.int64)[:, None], row[:, None], column[:, None]


@triton.jit(do_not_specialize=["tiles", "pixels", "length", "origin"])
def weight_sums(
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
        # Only after the multiplication the compiler knows a multiple of M, and that it may load
        # several neighbours at once.
        channel = (first % CHANNELS // M * M + tl.arange(0, M))[None, :]
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
        inside = exists
        # Without padding all pixels are inside. A negative number is large if taken as unsigned.
        if PADDING_DOWN > 0:
            inside = inside & ((top + down).to(tl.uint32) < HEIGHT)
        if PADDING_ACROSS > 0:
            inside = inside & ((left + across).to(tl.uint32) < WIDTH)
        if ALL % M != 0:
            inside = inside & here
        # Places within an image are added in 32 bits, which they fit.
        values = tl.load(
            images + (sample * x_sample + (top * x_row + left * x_column)), mask=inside, other=0.0
        )
        change = tl.load(
            changes + (sample * u_sample + (row * u_row + column * u_column)),
            mask=exists & wanted,
            other=0.0,
        )
        total = add_products(total, values, change, PRECISION)
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
def add_pieces(
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
def depthwise_convolution(
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
def depthwise_weight_sums(
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
