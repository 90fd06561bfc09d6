"""BatchNorm of stacked clients, as Triton kernels for a GPU.

What BatchNorm costs is reading and writing its tensors. The forward pass reads its input twice and
writes once; the gradient reads input and upper gradient twice and writes once. Axes may lie in
memory in any order, because a grouped convolution puts samples before clients and those of
``equipoise.models.convolutions`` put channels innermost. Results lie as their input does, so that
no layer has to copy.

A tile is what a program holds in registers. Statistics and sums take two steps if a client has many
tiles: each program goes over some of them, a piece, and a small kernel combines the pieces. Results
have the type of the input, float32 or bfloat16; all arithmetic is float32.

There are no atomic operations. How work is cut, and in which order partial results are combined,
depends on the shape of one client's batch alone. So the same input gives the same bits, whatever
the other clients of the stack. Only imported if Triton is installed: see
``equipoise.models.layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.func import vmap

from equipoise.models.kernel_tools import empty_as, merge_clients, one_client
from equipoise.models.layers import masked_norm

# Values of a tile, 16 of each thread. A tile has a single channel, unless channels are innermost in
# memory. Then it has as many as are in so many bytes, which a warp reads at a time. With a single
# channel it has half the values, because a thread needs more registers for each of them.
_TILE = 4096
_LINE = 128
# Tiles of a piece, unless a client would have more pieces than the number below. Those of some
# channels are combined by one program.
_TILES_OF_PIECE = 4
_MOST_PIECES = 128


# ---- tiles ---------------------------------------------------------------------------------------
# A tile has three axes: channels, rows and columns. If channels are innermost in memory, a row is
# a position of a sample, a sample has ``each`` rows and there is one column. Otherwise rows are
# samples and columns are positions.


@triton.jit
def _own_work(channels: tl.tensor, parts: tl.tensor, TOGETHER: tl.constexpr) -> tl.tuple:
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
) -> tl.tuple:
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
def _combined(count: tl.tensor, mean: tl.tensor, squares: tl.tensor) -> tl.tuple:
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
def _moments(
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
def _combine_moments(
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
def _normalise(
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
def _gradient_sums(
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
def _combine_sums(
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
def _gradient(
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


# ---- what launches them --------------------------------------------------------------------------


def norm(
    x: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    momentum: float,
    eps: float,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise a client's batch by its own statistics.

    :func:`equipoise.models.layers.masked_norm` does the same.

    Parameters
    ----------
    x : Tensor
        A batch ``[samples, channels, ...]``, float32 or bfloat16.
    mask : Tensor or None
        Which rows are samples (one) and which padding (zero), ``[samples]``; all are samples
        without one.
    weight, bias : Tensor or None
        ``[channels]``, float32, both or neither.
    running_mean, running_var : Tensor or None
        Running statistics, ``[channels]``, both or neither. They serve where a channel has a single
        value.
    momentum : float
        Weight of the new values in the running statistics.
    eps : float
        What is added to the variance.
    relu : bool
        Whether negative results become zero.

    Returns
    -------
    tuple
        The normalised batch, in the type of ``x``, and the new running statistics; without old ones
        those of the batch.
    """
    given = (x, weight, bias, mask, running_mean, running_var)
    stacked = (None if tensor is None else tensor.unsqueeze(0) for tensor in given)
    y, new_mean, new_var, _ = StackedNorm.apply(*stacked, momentum, eps, relu)
    return one_client(y), new_mean.squeeze(0), new_var.squeeze(0)


class StackedNorm(torch.autograd.Function):
    """What :func:`norm` does for clients stacked along a leading axis.

    It also returns what the gradient needs.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalise."""
        values = _flat(x)
        weight, bias, mask, mean, var = (
            _dense(tensor) for tensor in (weight, bias, mask, mean, var)
        )
        work = _Work.on(values)
        y = empty_as(values)
        numbers = len(x), x.shape[2]
        new_mean, new_var = _float32(x, *numbers), _float32(x, *numbers)
        used = _float32(x, 3, *numbers)
        moments = None if work.whole else _float32(x, work.pieces, 3, *numbers)
        statistics = mean, var, new_mean, new_var, used, momentum, eps
        with torch.cuda.device_of(x):
            _moments[work.programs(work.pieces)](
                values,
                mask,
                moments,
                *statistics,
                work.pieces,
                work.length,
                *work.sizes,
                *values.stride(),
                MASKED=mask is not None,
                TRACKED=mean is not None,
                WHOLE=work.whole,
                **work.options(values),
            )
            if not work.whole:
                _combine_moments[work.programs(1)](
                    moments, *statistics, **work.combining(), TRACKED=mean is not None
                )
            _normalise[work.programs(work.tiles)](
                values,
                y,
                weight,
                bias,
                used,
                work.tiles,
                *work.sizes,
                *values.stride(),
                *y.stride(),
                AFFINE=weight is not None,
                RELU=relu,
                **work.options(values, y),
            )
        return y.view(x.shape), new_mean, new_var, used

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the gradient needs."""
        *tensors, ctx.momentum, ctx.eps, ctx.relu = inputs
        _, *statistics = output
        ctx.mark_non_differentiable(*statistics)
        ctx.save_for_backward(*tensors, statistics[-1])

    @staticmethod
    def backward(ctx: Any, upper: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        x, weight, bias, mask, mean, var, used = ctx.saved_tensors
        none = (None,) * 6
        if torch.is_grad_enabled():
            # This gradient will be differentiated again, which the kernels do not support.
            affine = () if weight is None else (weight, bias)
            plain = _plain_norm(mask, mean, var, ctx.momentum, ctx.eps, ctx.relu)
            of_x, *of_affine = torch.func.vjp(plain, x, *affine)[1](upper)
            return of_x, *(of_affine or (None, None)), *none
        values, change = _flat(x), _flat(upper)
        weight, bias, mask, used = (_dense(tensor) for tensor in (weight, bias, mask, used))
        work = _Work.on(values)
        of_x = empty_as(values)
        sums = _float32(x, work.pieces, 2, len(x), x.shape[2])
        totals = sums[0] if work.whole else torch.empty_like(sums[0])
        strides = *change.stride(), *values.stride()
        kind = {"AFFINE": weight is not None, "RELU": ctx.relu}
        with torch.cuda.device_of(x):
            _gradient_sums[work.programs(work.pieces)](
                change,
                values,
                weight,
                bias,
                used,
                sums,
                work.pieces,
                work.length,
                *work.sizes,
                *strides,
                **kind,
                **work.options(change, values),
            )
            if not work.whole:
                _combine_sums[work.programs(1)](sums, totals, **work.combining())
            _gradient[work.programs(work.tiles)](
                change,
                values,
                of_x,
                weight,
                bias,
                mask,
                used,
                totals,
                work.tiles,
                *work.sizes,
                *strides,
                *of_x.stride(),
                **kind,
                MASKED=mask is not None,
                **work.options(change, values, of_x),
            )
        of_affine = (None, None) if weight is None else (totals[1], totals[0])
        return of_x.view(x.shape), *of_affine, *none

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, int, int, int]]:
        """Merge the axis of stacked clients with the existing axis of clients."""
        tensors = (
            merge_clients(tensor, dim, info.batch_size)
            for tensor, dim in zip(inputs[:6], in_dims, strict=False)
        )
        made = StackedNorm.apply(*tensors, *inputs[6:])
        axes = 0, 0, 0, 1
        return tuple(
            tensor.unflatten(axis, (info.batch_size, -1))
            for tensor, axis in zip(made, axes, strict=True)
        ), axes


def _plain_norm(
    mask: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> Callable[..., Tensor]:
    """Return the function of input, weight and bias that the kernels compute.

    It consists of operations that can be differentiated.
    """

    def of_one(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
    ) -> Tensor:
        values = x.to(torch.float32)
        y, *_ = masked_norm(values, mask, weight, bias, mean, var, momentum=momentum, eps=eps)
        return (y.relu() if relu else y).to(x.dtype)

    def of_all(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        rows = x.new_ones(x.shape[:2], dtype=torch.float32) if mask is None else mask
        given = (x, weight, bias, rows, mean, var)
        made: Tensor = vmap(
            of_one, in_dims=tuple(None if tensor is None else 0 for tensor in given)
        )(*given)
        return made

    return of_all


@dataclass(frozen=True)
class _Work:
    """How the work on a batch is cut, which depends on the shape of one client's batch alone.

    There are few shapes of tiles, because each is compiled once.

    Attributes
    ----------
    sizes : tuple of int
        Rows, columns, rows of a sample, channels, and channels of all clients.
    tile : dict
        Channels, rows and columns of a tile, and the warps of a program.
    tiles, pieces, length : int
        Tiles of a client, its pieces, and tiles of a piece.
    blocks : int
        In how many blocks the channels of all clients are cut.
    """

    sizes: tuple[int, int, int, int, int]
    tile: dict[str, int]
    tiles: int
    pieces: int
    length: int
    blocks: int

    @classmethod
    def on(cls, x: Tensor) -> _Work:
        """Cut a batch ``[clients, samples, channels, positions]``."""
        clients, samples, channels, positions = x.shape
        innermost = x.stride(2) == 1
        rows, columns, each = (
            (samples * positions, 1, positions) if innermost else (samples, positions, 1)
        )
        together = min(_power(channels), _LINE // x.element_size()) if innermost else 1
        values = _TILE if innermost else _TILE // 2
        across = min(_power(columns), values // 4)
        down = min(_power(rows), values // (together * across))
        tiles = triton.cdiv(rows, down) * triton.cdiv(columns, across)
        length = min(max(_TILES_OF_PIECE, triton.cdiv(tiles, _MOST_PIECES)), tiles)
        warps = min(max(together * down * across // 512, 1), 8)
        return cls(
            (rows, columns, each, channels, clients * channels),
            {"TOGETHER": together, "ROWS": down, "COLUMNS": across, "num_warps": warps},
            tiles,
            triton.cdiv(tiles, length),
            length,
            clients * triton.cdiv(channels, together),
        )

    @property
    def whole(self) -> bool:
        """Whether a piece is all of a client's batch."""
        return self.pieces == 1

    def programs(self, parts: int) -> tuple[int]:
        """Return the grid of a kernel with so many parts of each client."""
        return (self.blocks * parts,)

    def options(self, *tensors: Tensor) -> dict[str, Any]:
        """Return a kernel's tile, and whether rows are equally far apart in all of its tensors."""
        each = self.sizes[2]
        flat = each > 1 and all(x.stride(1) == each * x.stride(3) for x in tensors)
        return {"FLAT": flat, **self.tile}

    def combining(self) -> dict[str, int]:
        """Return the options of a kernel that combines pieces."""
        *_, channels, units = self.sizes
        return {
            "pieces": self.pieces,
            "channels": channels,
            "units": units,
            "TOGETHER": self.tile["TOGETHER"],
            "PIECES": _power(self.pieces),
            "num_warps": self.tile["num_warps"],
        }


def _power(number: int) -> int:
    """Return the next power of two."""
    power: int = triton.next_power_of_2(number)
    return power


def _flat(x: Tensor) -> Tensor:
    """View ``[clients, samples, channels, ...]`` with one axis of positions."""
    return x.unsqueeze(-1) if x.dim() == 3 else x.flatten(3)


def _dense(tensor: Tensor | None) -> Tensor | None:
    """Return a small tensor in contiguous memory."""
    return None if tensor is None else tensor.contiguous()


def _float32(like: Tensor, *shape: int) -> Tensor:
    """Make an empty tensor of float32 numbers on the device of another."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)
