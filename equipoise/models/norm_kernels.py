"""Triton kernels of BatchNorm of stacked clients, without what launches them.

A program works on some channels of one client. :mod:`equipoise.models.norms` launches these
kernels, and says what they promise.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ---- tiles ---------------------------------------------------------------------------------------
# A tile has three axes: channels, rows and columns. If channels are innermost in memory, a row is
# a position of a sample, a sample has ``each`` rows and there is one column. Otherwise rows are
# samples and columns are positions.


@triton.jit
def _own_work(
    channels: tl.tensor, parts: tl.tensor, TOGETHER: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return which client, which part of its rows and which channels a program works on.

    All are in one axis of the grid, because the others are short. Programs that follow each other
    work on channels that do. Also return the channels' numbers among those of all clients, and
    which of the channels exist.
    """
    blocks = tl.cdiv(channels, TOGETHER)
    channel = (tl.program_id(0) % blocks) * TOGETHER + tl.arange(0, TOGETHER)
    part = tl.program_id(0) // blocks
    client = part // parts
    return client, part % parts, channel, client * channels + channel, channel < channels


@triton.jit
def _tile(
    tile: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the rows and columns of a tile, and which of its places exist."""
    across = tl.cdiv(columns, COLUMNS)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column, ((row < rows)[:, None] & (column < columns)[None, :])[None, :, :]


@triton.jit
def _places(
    tensor: tl.tensor,
    client: tl.tensor,
    channel: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    each: tl.tensor,
    by_client: tl.tensor,
    by_sample: tl.tensor,
    by_channel: tl.tensor,
    by_position: tl.tensor,
    FLAT: tl.constexpr,
) -> tl.tensor:
    """Point at the places of a tile. FLAT says that rows are equally far apart in memory."""
    of_channel = tensor + client.to(tl.int64) * by_client + channel.to(tl.int64) * by_channel
    if FLAT:
        of_row = row.to(tl.int64) * by_position
    else:
        of_row = (row // each).to(tl.int64) * by_sample + (row % each) * by_position
    of_place = of_row[:, None] + (column * by_position)[None, :]
    return of_channel[:, None, None] + of_place[None, :, :]


@triton.jit
def _kept(
    inside: tl.tensor,
    mask: tl.tensor,
    client: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    each: tl.tensor,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return which places of a tile belong to samples and not to padding."""
    if MASKED:
        first = mask + client.to(tl.int64) * (rows // each)
        kept = tl.load(first + row // each, mask=row < rows, other=0.0) > 0
        inside = inside & kept[None, :, None]
    return inside


@triton.jit
def _total(values: tl.tensor) -> tl.tensor:
    """Sum each channel of a tile."""
    return tl.sum(tl.sum(values, axis=2), axis=1)


@triton.jit
def _spread(values: tl.tensor) -> tl.tensor:
    """Broadcast values of channels over the places of a tile."""
    return values[:, None, None]


@triton.jit
def _of_channels(
    table: tl.tensor,
    unit: tl.tensor,
    exists: tl.tensor,
    DEFAULT: tl.constexpr,
    GIVEN: tl.constexpr,
) -> tl.tensor:
    """Load a number for each channel, to broadcast over a tile; all are DEFAULT if not GIVEN."""
    values = tl.full(unit.shape, DEFAULT, tl.float32)
    if GIVEN:
        values = tl.load(table + unit, mask=exists, other=DEFAULT)
    return _spread(values)


@triton.jit
def _of_pieces(
    table: tl.tensor,
    number: tl.tensor,
    pieces: tl.tensor,
    unit: tl.tensor,
    units: tl.tensor,
    exists: tl.tensor,
    NUMBERS: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """Load one of the NUMBERS of every piece of each channel, as a tile with a row for a piece."""
    piece = tl.arange(0, PIECES)
    of_piece = (piece.to(tl.int64) * NUMBERS + number) * units
    inside = exists[:, None, None] & (piece < pieces)[None, :, None]
    places = (unit[:, None] + of_piece[None, :])[:, :, None]
    return tl.load(table + places, mask=inside, other=0.0)


# ---- forward -------------------------------------------------------------------------------------


@triton.jit
def _combined(count: tl.tensor, mean: tl.tensor, squares: tl.tensor) -> tuple[tl.tensor, ...]:
    """Combine counts, means and sums of squared deviations of a tile's places, channel by channel.

    These are the formulas of Chan, Golub and LeVeque (1979).
    """
    counts = _total(count)
    middle = _total(count * mean) / tl.maximum(counts, 1.0)
    apart = mean - _spread(middle)
    return counts, middle, _total(squares + count * apart * apart)


@triton.jit
def _write_statistics(
    count: tl.tensor,
    mean: tl.tensor,
    squares: tl.tensor,
    old_mean: tl.tensor,
    old_var: tl.tensor,
    new_mean: tl.tensor,
    new_var: tl.tensor,
    used: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    unit: tl.tensor,
    units: tl.tensor,
    exists: tl.tensor,
    TRACKED: tl.constexpr,
) -> None:
    """Write the running statistics, and what normalises: mean, scale and share of a value."""
    some = tl.maximum(count, 1.0)
    var = squares / some
    share = 1.0 / some
    after_mean, after_var = mean, var
    if TRACKED:
        # A single value has no variance: the running statistics serve, and stay.
        before_mean = tl.load(old_mean + unit, mask=exists, other=0.0)
        before_var = tl.load(old_var + unit, mask=exists, other=1.0)
        enough = count > 1
        unbiased = var * count / tl.maximum(count - 1.0, 1.0)
        after_mean = tl.where(enough, before_mean + momentum * (mean - before_mean), before_mean)
        after_var = tl.where(enough, before_var + momentum * (unbiased - before_var), before_var)
        mean, var = tl.where(enough, mean, before_mean), tl.where(enough, var, before_var)
        share = tl.where(enough, share, 0.0)
    tl.store(new_mean + unit, after_mean, mask=exists)
    tl.store(new_var + unit, after_var, mask=exists)
    tl.store(used + unit, mean, mask=exists)
    tl.store(used + units + unit, 1.0 / tl.sqrt(var + eps), mask=exists)
    tl.store(used + 2 * units + unit, share, mask=exists)


@triton.jit(do_not_specialize=["rows", "units", "pieces", "length"])
def piece_moments(
    x: tl.tensor,
    mask: tl.tensor,
    moments: tl.tensor,
    old_mean: tl.tensor,
    old_var: tl.tensor,
    new_mean: tl.tensor,
    new_var: tl.tensor,
    used: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    pieces: tl.tensor,
    length: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    each: tl.tensor,
    channels: tl.tensor,
    units: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    x_position: tl.tensor,
    MASKED: tl.constexpr,
    TRACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    FLAT: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the count, the mean and the sum of squared deviations of a piece.

    Write the statistics if the piece is the WHOLE batch of a client.
    """
    client, piece, channel, unit, exists = _own_work(channels, pieces, TOGETHER)
    # Every place of the tile has moments of its own until the last tile (Welford, 1962).
    count = tl.zeros((1, ROWS, COLUMNS), tl.float32)
    mean = tl.zeros((TOGETHER, ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((TOGETHER, ROWS, COLUMNS), tl.float32)
    for number in range(0, length):
        row, column, inside = _tile(piece * length + number, rows, columns, ROWS, COLUMNS)
        inside = _kept(inside, mask, client, row, rows, each, MASKED)
        places = _places(
            x, client, channel, row, column, each, x_client, x_sample, x_channel, x_position, FLAT
        )
        values = tl.load(places, mask=inside & _spread(exists), other=0.0).to(tl.float32)
        count += inside.to(tl.float32)
        apart = tl.where(inside, values - mean, 0.0)
        mean += apart * (1.0 / tl.maximum(count, 1.0))
        squares += apart * (values - mean)
    count, mean, squares = _combined(count, mean, squares)
    if WHOLE:
        _write_statistics(
            count,
            mean,
            squares,
            old_mean,
            old_var,
            new_mean,
            new_var,
            used,
            momentum,
            eps,
            unit,
            units,
            exists,
            TRACKED,
        )
    else:
        to = moments + piece.to(tl.int64) * 3 * units + unit
        tl.store(to, count, mask=exists)
        tl.store(to + units, mean, mask=exists)
        tl.store(to + 2 * units, squares, mask=exists)


@triton.jit(do_not_specialize=["units", "pieces"])
def combine_moments(
    moments: tl.tensor,
    old_mean: tl.tensor,
    old_var: tl.tensor,
    new_mean: tl.tensor,
    new_var: tl.tensor,
    used: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    pieces: tl.tensor,
    channels: tl.tensor,
    units: tl.tensor,
    TRACKED: tl.constexpr,
    TOGETHER: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """Combine the pieces' moments, and write the statistics."""
    _, _, _, unit, exists = _own_work(channels, 1, TOGETHER)
    count = _of_pieces(moments, 0, pieces, unit, units, exists, 3, PIECES)
    mean = _of_pieces(moments, 1, pieces, unit, units, exists, 3, PIECES)
    squares = _of_pieces(moments, 2, pieces, unit, units, exists, 3, PIECES)
    count, mean, squares = _combined(count, mean, squares)
    _write_statistics(
        count,
        mean,
        squares,
        old_mean,
        old_var,
        new_mean,
        new_var,
        used,
        momentum,
        eps,
        unit,
        units,
        exists,
        TRACKED,
    )


@triton.jit(do_not_specialize=["rows", "units", "tiles"])
def normalise(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    used: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    each: tl.tensor,
    channels: tl.tensor,
    units: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    x_position: tl.tensor,
    y_client: tl.tensor,
    y_sample: tl.tensor,
    y_channel: tl.tensor,
    y_position: tl.tensor,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    FLAT: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Normalise a tile."""
    client, tile, channel, unit, exists = _own_work(channels, tiles, TOGETHER)
    row, column, inside = _tile(tile, rows, columns, ROWS, COLUMNS)
    inside = inside & _spread(exists)
    places = _places(
        x, client, channel, row, column, each, x_client, x_sample, x_channel, x_position, FLAT
    )
    values = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    mean = _of_channels(used, unit, exists, 0.0, True)
    scale = _of_channels(used + units, unit, exists, 0.0, True)
    values = (values - mean) * scale * _of_channels(weight, unit, exists, 1.0, AFFINE)
    values += _of_channels(bias, unit, exists, 0.0, AFFINE)
    if RELU:
        # What is not a number stays so.
        values = tl.where(values <= 0, 0.0, values)
    tl.store(
        _places(
            y, client, channel, row, column, each, y_client, y_sample, y_channel, y_position, FLAT
        ),
        values.to(y.dtype.element_ty),
        mask=inside,
    )


# ---- backward ------------------------------------------------------------------------------------


@triton.jit
def _before_relu(
    change: tl.tensor,
    normalised: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    RELU: tl.constexpr,
) -> tl.tensor:
    """Return the gradient before the ReLU if there is one; its input is computed once more."""
    if RELU:
        change = tl.where(normalised * weight + bias <= 0, 0.0, change)
    return change


@triton.jit(do_not_specialize=["rows", "units", "pieces", "length"])
def gradient_sums(
    upper: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    used: tl.tensor,
    sums: tl.tensor,
    pieces: tl.tensor,
    length: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    each: tl.tensor,
    channels: tl.tensor,
    units: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    u_channel: tl.tensor,
    u_position: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    x_position: tl.tensor,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    FLAT: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write two sums over a piece.

    They are those of the upper gradient, and of its product with the normalised input.
    """
    client, piece, channel, unit, exists = _own_work(channels, pieces, TOGETHER)
    mean = _of_channels(used, unit, exists, 0.0, True)
    scale = _of_channels(used + units, unit, exists, 0.0, True)
    weights = _of_channels(weight, unit, exists, 1.0, AFFINE)
    biases = _of_channels(bias, unit, exists, 0.0, AFFINE)
    through_bias = tl.zeros((TOGETHER, ROWS, COLUMNS), tl.float32)
    through_weight = tl.zeros((TOGETHER, ROWS, COLUMNS), tl.float32)
    for number in range(0, length):
        row, column, inside = _tile(piece * length + number, rows, columns, ROWS, COLUMNS)
        inside = inside & _spread(exists)
        # Where a place does not exist the upper gradient is zero, and so is what it adds.
        places = _places(
            upper,
            client,
            channel,
            row,
            column,
            each,
            u_client,
            u_sample,
            u_channel,
            u_position,
            FLAT,
        )
        change = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        places = _places(
            x, client, channel, row, column, each, x_client, x_sample, x_channel, x_position, FLAT
        )
        values = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        normalised = (values - mean) * scale
        change = _before_relu(change, normalised, weights, biases, RELU)
        through_bias += change
        through_weight += change * normalised
    to = sums + piece.to(tl.int64) * 2 * units + unit
    tl.store(to, _total(through_bias), mask=exists)
    tl.store(to + units, _total(through_weight), mask=exists)


@triton.jit(do_not_specialize=["units", "pieces"])
def combine_sums(
    sums: tl.tensor,
    totals: tl.tensor,
    pieces: tl.tensor,
    channels: tl.tensor,
    units: tl.tensor,
    TOGETHER: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """Add the pieces' sums."""
    _, _, _, unit, exists = _own_work(channels, 1, TOGETHER)
    through_bias = _of_pieces(sums, 0, pieces, unit, units, exists, 2, PIECES)
    through_weight = _of_pieces(sums, 1, pieces, unit, units, exists, 2, PIECES)
    tl.store(totals + unit, _total(through_bias), mask=exists)
    tl.store(totals + units + unit, _total(through_weight), mask=exists)


@triton.jit(do_not_specialize=["rows", "units", "tiles"])
def gradient(
    upper: tl.tensor,
    x: tl.tensor,
    of_x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mask: tl.tensor,
    used: tl.tensor,
    totals: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    each: tl.tensor,
    channels: tl.tensor,
    units: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    u_channel: tl.tensor,
    u_position: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    x_position: tl.tensor,
    o_client: tl.tensor,
    o_sample: tl.tensor,
    o_channel: tl.tensor,
    o_position: tl.tensor,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    MASKED: tl.constexpr,
    FLAT: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the gradient by a tile of the input."""
    client, tile, channel, unit, exists = _own_work(channels, tiles, TOGETHER)
    row, column, inside = _tile(tile, rows, columns, ROWS, COLUMNS)
    kept = _kept(inside, mask, client, row, rows, each, MASKED)
    inside = inside & _spread(exists)
    places = _places(
        upper, client, channel, row, column, each, u_client, u_sample, u_channel, u_position, FLAT
    )
    change = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    places = _places(
        x, client, channel, row, column, each, x_client, x_sample, x_channel, x_position, FLAT
    )
    values = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    mean = _of_channels(used, unit, exists, 0.0, True)
    scale = _of_channels(used + units, unit, exists, 0.0, True)
    share = _of_channels(used + 2 * units, unit, exists, 0.0, True)
    weights = _of_channels(weight, unit, exists, 1.0, AFFINE)
    biases = _of_channels(bias, unit, exists, 0.0, AFFINE)
    through_bias = _of_channels(totals, unit, exists, 0.0, True)
    through_weight = _of_channels(totals + units, unit, exists, 0.0, True)
    normalised = (values - mean) * scale
    change = _before_relu(change, normalised, weights, biases, RELU)
    # Padding is normalised like samples, but statistics do not depend on it.
    through_statistics = share * (through_bias + normalised * through_weight)
    change -= tl.where(kept, through_statistics, 0.0)
    tl.store(
        _places(
            of_x,
            client,
            channel,
            row,
            column,
            each,
            o_client,
            o_sample,
            o_channel,
            o_position,
            FLAT,
        ),
        (change * (scale * weights)).to(of_x.dtype.element_ty),
        mask=inside,
    )
