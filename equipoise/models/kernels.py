"""BatchNorm and max-pooling of stacked clients, as Triton kernels for a GPU.

The cost of these layers is reading and writing their tensors. BatchNorm reads its input twice and
writes once; its gradient reads input and upper gradient twice and writes once. Max-pooling reads
each tensor once in both passes. Leading axes may have any memory order, because a grouped
convolution puts samples before clients. Results have the memory order of their input, so that no
layer has to copy.

There are no atomic operations: sums run in a fixed order that depends on samples and positions
alone, so the same input gives the same bits, whatever the other clients of the stack. Only imported
if Triton is installed: see ``equipoise.models.layers``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.func import vmap

from equipoise.models.layers import masked_norm


@cache
def work_on(device: torch.device) -> bool:
    """Return whether Triton works on a device: it needs a recent GPU and a C compiler."""
    try:
        StackedMaxPool.apply(torch.zeros(1, 1, 1, 2, 2, device=device), (2, 2))
    except Exception as error:  # Driver, compiler and Triton raise different errors.
        warnings.warn(
            f"Triton cannot build kernels for {device}, steps will be slower: {error}", stacklevel=2
        )
        return False
    return True


# ---- BatchNorm -----------------------------------------------------------------------------------

# A program holds a tile of one channel of one client, samples by positions, in registers: 16 values
# a thread.
_TILE = 4096


@triton.jit
def _tile(
    tile: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tuple:
    """Return the samples and positions of a tile, and which of its elements exist."""
    across = tl.cdiv(positions, COLUMNS)
    rows = (tile // across) * ROWS + tl.arange(0, ROWS)
    columns = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    return rows, columns, (rows < samples)[:, None] & (columns < positions)[None, :]


@triton.jit
def _places(
    tensor: tl.tensor,
    client: tl.tensor,
    channel: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    by_client: tl.tensor,
    by_sample: tl.tensor,
    by_channel: tl.tensor,
) -> tl.tensor:
    """Return pointers to the elements of a tile."""
    first = tensor + client.to(tl.int64) * by_client + channel.to(tl.int64) * by_channel
    return first + (rows.to(tl.int64) * by_sample)[:, None] + columns[None, :]


@triton.jit
def _kept(
    mask: tl.tensor, client: tl.tensor, rows: tl.tensor, samples: tl.tensor, MASKED: tl.constexpr
) -> tl.tensor:
    """Return which rows are samples and not padding."""
    inside = rows < samples
    if MASKED:
        inside = tl.load(mask + client.to(tl.int64) * samples + rows, mask=inside, other=0.0) > 0
    return inside


@triton.jit
def _total(values: tl.tensor) -> tl.tensor:
    """Sum a tile."""
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit(do_not_specialize=["samples"])
def _moments(
    x: tl.tensor,
    mask: tl.tensor,
    moments: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the count, the mean and the sum of squared deviations of every tile."""
    unit, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    client, channel = unit // channels, unit % channels
    rows, columns, inside = _tile(tile, samples, positions, ROWS, COLUMNS)
    inside = inside & _kept(mask, client, rows, samples, MASKED)[:, None]
    values = tl.load(
        _places(x, client, channel, rows, columns, x_client, x_sample, x_channel),
        mask=inside,
        other=0.0,
    )
    count = _total(inside.to(tl.float32))
    mean = _total(values) / tl.maximum(count, 1.0)
    deviation = tl.where(inside, values - mean, 0.0)
    to = moments + unit.to(tl.int64) * 3 * tiles + tile
    tl.store(to, count)
    tl.store(to + tiles, mean)
    tl.store(to + 2 * tiles, _total(deviation * deviation))


@triton.jit(do_not_specialize=["samples"])
def _normalise(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    moments: tl.tensor,
    old_mean: tl.tensor,
    old_var: tl.tensor,
    new_mean: tl.tensor,
    new_var: tl.tensor,
    used: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    y_client: tl.tensor,
    y_sample: tl.tensor,
    y_channel: tl.tensor,
    AFFINE: tl.constexpr,
    TRACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Combine the moments of tiles, and normalise a tile; the first also writes the statistics."""
    unit, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    client, channel = unit // channels, unit % channels
    each = tl.arange(0, TILES)
    of = moments + unit.to(tl.int64) * 3 * tiles + each
    counts = tl.load(of, mask=each < tiles, other=0.0)
    means = tl.load(of + tiles, mask=each < tiles, other=0.0)
    squares = tl.load(of + 2 * tiles, mask=each < tiles, other=0.0)
    count = tl.sum(counts, axis=0)
    some = tl.maximum(count, 1.0)
    mean = tl.sum(counts * means, axis=0) / some
    squares += counts * (means - mean) * (means - mean)
    var = tl.sum(squares, axis=0) / some
    share = 1.0 / some
    after_mean, after_var = mean, var
    if TRACKED:
        # A single value has no variance: use the running statistics, and keep them.
        before_mean, before_var = tl.load(old_mean + unit), tl.load(old_var + unit)
        enough = count > 1
        unbiased = var * count / tl.maximum(count - 1.0, 1.0)
        after_mean = tl.where(enough, before_mean + momentum * (mean - before_mean), before_mean)
        after_var = tl.where(enough, before_var + momentum * (unbiased - before_var), before_var)
        mean, var = tl.where(enough, mean, before_mean), tl.where(enough, var, before_var)
        share = tl.where(enough, share, 0.0)
    scale = 1.0 / tl.sqrt(var + eps)
    if tile == 0:
        tl.store(new_mean + unit, after_mean)
        tl.store(new_var + unit, after_var)
        tl.store(used + unit * 3, mean)
        tl.store(used + unit * 3 + 1, scale)
        tl.store(used + unit * 3 + 2, share)
    rows, columns, inside = _tile(tile, samples, positions, ROWS, COLUMNS)
    values = tl.load(
        _places(x, client, channel, rows, columns, x_client, x_sample, x_channel),
        mask=inside,
        other=0.0,
    )
    values = (values - mean) * scale
    if AFFINE:
        values = values * tl.load(weight + unit) + tl.load(bias + unit)
    tl.store(
        _places(y, client, channel, rows, columns, y_client, y_sample, y_channel),
        values,
        mask=inside,
    )


@triton.jit(do_not_specialize=["samples"])
def _gradient_sums(
    upper: tl.tensor,
    x: tl.tensor,
    used: tl.tensor,
    sums: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    u_channel: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write sums over every tile: of the upper gradient, and of its product with the input."""
    unit, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    client, channel = unit // channels, unit % channels
    rows, columns, inside = _tile(tile, samples, positions, ROWS, COLUMNS)
    change = tl.load(
        _places(upper, client, channel, rows, columns, u_client, u_sample, u_channel),
        mask=inside,
        other=0.0,
    )
    values = tl.load(
        _places(x, client, channel, rows, columns, x_client, x_sample, x_channel),
        mask=inside,
        other=0.0,
    )
    # Elements that do not exist have an upper gradient of zero, so they add nothing.
    normalised = (values - tl.load(used + unit * 3)) * tl.load(used + unit * 3 + 1)
    to = sums + unit.to(tl.int64) * 2 * tiles + tile
    tl.store(to, _total(change))
    tl.store(to + tiles, _total(change * normalised))


@triton.jit(do_not_specialize=["samples"])
def _gradient(
    upper: tl.tensor,
    x: tl.tensor,
    of_x: tl.tensor,
    weight: tl.tensor,
    mask: tl.tensor,
    used: tl.tensor,
    sums: tl.tensor,
    of_weight: tl.tensor,
    of_bias: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    u_channel: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    x_channel: tl.tensor,
    o_client: tl.tensor,
    o_sample: tl.tensor,
    o_channel: tl.tensor,
    AFFINE: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Write the gradient of a tile of the input; the first also writes those of weight and bias."""
    unit, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    client, channel = unit // channels, unit % channels
    each = tl.arange(0, TILES)
    of = sums + unit.to(tl.int64) * 2 * tiles + each
    through_bias = tl.sum(tl.load(of, mask=each < tiles, other=0.0), axis=0)
    through_weight = tl.sum(tl.load(of + tiles, mask=each < tiles, other=0.0), axis=0)
    if tile == 0:
        tl.store(of_bias + unit, through_bias)
        tl.store(of_weight + unit, through_weight)
    mean, scale, share = (
        tl.load(used + unit * 3),
        tl.load(used + unit * 3 + 1),
        tl.load(used + unit * 3 + 2),
    )
    rows, columns, inside = _tile(tile, samples, positions, ROWS, COLUMNS)
    change = tl.load(
        _places(upper, client, channel, rows, columns, u_client, u_sample, u_channel),
        mask=inside,
        other=0.0,
    )
    values = tl.load(
        _places(x, client, channel, rows, columns, x_client, x_sample, x_channel),
        mask=inside,
        other=0.0,
    )
    # Padding is normalised like samples, but statistics do not depend on it.
    through_statistics = share * (through_bias + (values - mean) * scale * through_weight)
    kept = _kept(mask, client, rows, samples, MASKED)
    change -= tl.where(kept[:, None], through_statistics, 0.0)
    if AFFINE:
        scale = scale * tl.load(weight + unit)
    tl.store(
        _places(of_x, client, channel, rows, columns, o_client, o_sample, o_channel),
        change * scale,
        mask=inside,
    )


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise a client's batch, like :func:`equipoise.models.layers.masked_norm`.

    Parameters
    ----------
    x : Tensor
        A batch ``[samples, channels, ...]``.
    mask : Tensor or None
        Which rows are samples (one) and which padding (zero), ``[samples]``; all are samples
        without one.
    weight, bias : Tensor or None
        ``[channels]``, both or neither.
    running_mean, running_var : Tensor or None
        Running statistics, ``[channels]``, both or neither. They serve where a channel has a single
        value.
    momentum : float
        Weight of the new values in the running statistics.
    eps : float
        Constant that is added to the variance.

    Returns
    -------
    tuple
        The normalised batch and the new running statistics; without old ones those of the batch.
    """
    given = (x, weight, bias, mask, running_mean, running_var)
    stacked = (None if tensor is None else tensor.unsqueeze(0) for tensor in given)
    y, new_mean, new_var, _ = StackedNorm.apply(*stacked, momentum, eps)
    return _one_client(y), new_mean.squeeze(0), new_var.squeeze(0)


class StackedNorm(torch.autograd.Function):
    """:func:`norm` for clients stacked along a leading axis, with data for the gradient."""

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalise."""
        values = _flat(x)
        weight, bias, mask, mean, var = (
            _dense(tensor) for tensor in (weight, bias, mask, mean, var)
        )
        clients, samples, channels, positions = values.shape
        tiles, options = _tiling(samples, positions)
        grid = (clients * channels, tiles)
        y = _room(values, (positions,))
        moments = x.new_empty(clients, channels, 3, tiles)
        new_mean, new_var, used = (x.new_empty(clients, channels, *more) for more in ((), (), (3,)))
        sizes = samples, positions, channels
        with torch.cuda.device_of(x):
            _moments[grid](
                values,
                mask,
                moments,
                *sizes,
                *values.stride()[:3],
                MASKED=mask is not None,
                **options,
            )
            _normalise[grid](
                values,
                y,
                weight,
                bias,
                moments,
                mean,
                var,
                new_mean,
                new_var,
                used,
                momentum,
                eps,
                *sizes,
                *values.stride()[:3],
                *y.stride()[:3],
                AFFINE=weight is not None,
                TRACKED=mean is not None,
                TILES=triton.next_power_of_2(tiles),
                **options,
            )
        return y.view(x.shape), new_mean, new_var, used

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the tensors that the gradient needs."""
        *tensors, ctx.momentum, ctx.eps = inputs
        _, *statistics = output
        ctx.mark_non_differentiable(*statistics)
        ctx.save_for_backward(*tensors, statistics[-1])

    @staticmethod
    def backward(ctx: Any, upper: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        x, weight, bias, mask, mean, var, used = ctx.saved_tensors
        none = (None,) * 5
        if torch.is_grad_enabled():
            # This gradient will be differentiated again, which the kernels do not support.
            affine = () if weight is None else (weight, bias)
            plain = _plain_norm(mask, mean, var, ctx.momentum, ctx.eps)
            of_x, *of_affine = torch.func.vjp(plain, x, *affine)[1](upper)
            return of_x, *(of_affine or (None, None)), *none
        values, change = _flat(x), _flat(upper)
        weight, mask, used = (_dense(tensor) for tensor in (weight, mask, used))
        clients, samples, channels, positions = values.shape
        tiles, options = _tiling(samples, positions)
        grid = (clients * channels, tiles)
        of_x = _room(values, (positions,))
        sums = x.new_empty(clients, channels, 2, tiles)
        of_weight, of_bias = (x.new_empty(clients, channels) for _ in range(2))
        sizes = samples, positions, channels
        strides = *change.stride()[:3], *values.stride()[:3]
        with torch.cuda.device_of(x):
            _gradient_sums[grid](change, values, used, sums, *sizes, *strides, **options)
            _gradient[grid](
                change,
                values,
                of_x,
                weight,
                mask,
                used,
                sums,
                of_weight,
                of_bias,
                *sizes,
                *strides,
                *of_x.stride()[:3],
                AFFINE=weight is not None,
                MASKED=mask is not None,
                TILES=triton.next_power_of_2(tiles),
                **options,
            )
        of_affine = (None, None) if weight is None else (of_weight, of_bias)
        return of_x.view(x.shape), *of_affine, *none

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, int, int, int]]:
        """Merge the axis of stacked clients with the existing axis of clients."""
        tensors = (
            _merged(tensor, dim, info.batch_size)
            for tensor, dim in zip(inputs[:6], in_dims, strict=False)
        )
        made = StackedNorm.apply(*tensors, *inputs[6:])
        return tuple(tensor.unflatten(0, (info.batch_size, -1)) for tensor in made), (0, 0, 0, 0)


def _plain_norm(
    mask: Tensor | None, mean: Tensor | None, var: Tensor | None, momentum: float, eps: float
) -> Callable[..., Tensor]:
    """Return the function that the kernels compute, in operations that can be differentiated."""

    def of_one(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
    ) -> Tensor:
        return masked_norm(x, mask, weight, bias, mean, var, momentum=momentum, eps=eps)[0]

    def of_all(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        rows = x.new_ones(x.shape[:2]) if mask is None else mask
        given = (x, weight, bias, rows, mean, var)
        made: Tensor = vmap(
            of_one, in_dims=tuple(None if tensor is None else 0 for tensor in given)
        )(*given)
        return made

    return of_all


def _tiling(samples: int, positions: int) -> tuple[int, dict[str, int]]:
    """Choose tiles from samples and positions, with few shapes, because each is compiled once."""
    columns = min(triton.next_power_of_2(positions), _TILE // 4)
    rows = min(triton.next_power_of_2(samples), _TILE // columns)
    tiles = triton.cdiv(samples, rows) * triton.cdiv(positions, columns)
    warps = min(max(rows * columns // 512, 1), 8)
    return tiles, {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}


def _flat(x: Tensor) -> Tensor:
    """View ``[clients, samples, channels, ...]`` with one axis of contiguous positions."""
    flat = x.unsqueeze(-1) if x.dim() == 3 else x.flatten(3)
    return flat if flat.shape[-1] == 1 or flat.stride(-1) == 1 else flat.contiguous()


def _one_client(stacked: Tensor) -> Tensor:
    """Remove the axis of clients, of length 1.

    Autograd does not take the result for a view. A view of a custom function's output must not be
    changed in place, and models may do that: ``y += x`` after BatchNorm.
    """
    one: Tensor = torch.ops.aten._unsafe_view(stacked, stacked.shape[1:])
    return one


def _dense(tensor: Tensor | None) -> Tensor | None:
    """Return a small tensor in contiguous memory."""
    return None if tensor is None else tensor.contiguous()


def _merged(tensor: Tensor | None, dim: int | None, clients: int) -> Tensor | None:
    """Move the axis of ``vmap`` to the front, and merge it with the axis of clients after it."""
    if tensor is None:
        return None
    stacked = tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return stacked.flatten(0, 1)


# ---- memory order --------------------------------------------------------------------------------


def _order(x: Tensor) -> list[int]:
    """Return the axes of clients, samples and channels in memory order, outermost first."""
    return sorted(range(3), key=x.stride, reverse=True)


def _room(x: Tensor, positions: Sequence[int]) -> Tensor:
    """Return an empty tensor whose clients, samples and channels have the memory order of ``x``."""
    order = _order(x)
    return _in_place(x.new_empty([x.shape[axis] for axis in order] + list(positions)), order)


def _in_place(ordered: Tensor, order: Sequence[int]) -> Tensor:
    """Permute axes in memory order back to clients, samples and channels."""
    return ordered.permute(*(order.index(axis) for axis in range(3)), *range(3, ordered.dim()))


# ---- max-pooling ---------------------------------------------------------------------------------

# Results a program writes, and its warps. A thread takes one window forward, so that a warp's loads
# lie close together, and eight inputs backward, because those it writes in one go.
_WINDOWS, _INPUTS = (256, 8), (1024, 4)


@triton.jit(do_not_specialize=["planes"])
def _pool(
    x: tl.tensor,
    y: tl.tensor,
    winner: tl.tensor,
    planes: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    PLANES: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Write the maximum of every window, and its position in the window."""
    ROWS: tl.constexpr = HEIGHT // DOWN
    COLUMNS: tl.constexpr = WIDTH // ACROSS
    plane = tl.program_id(0).to(tl.int64) * PLANES + tl.arange(0, PLANES)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    inside = (plane < planes)[:, None] & (place < ROWS * COLUMNS)[None, :]
    first = (place // COLUMNS) * (DOWN * WIDTH) + (place % COLUMNS) * ACROSS
    window = x + (plane * (HEIGHT * WIDTH))[:, None] + first[None, :]
    best = tl.full((PLANES, PLACES), float("-inf"), tl.float32)
    chosen = tl.zeros((PLANES, PLACES), tl.int32)
    for i in tl.static_range(DOWN):
        for j in tl.static_range(ACROSS):
            value = tl.load(window + (i * WIDTH + j), mask=inside, other=0.0)
            # As in PyTorch: the first of equal values, and NaN counts as a maximum.
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            chosen = tl.where(better, i * ACROSS + j, chosen)
    to = (plane * (ROWS * COLUMNS))[:, None] + place[None, :]
    tl.store(y + to, best, mask=inside)
    tl.store(winner + to, chosen.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["planes"])
def _pool_gradient(
    upper: tl.tensor,
    winner: tl.tensor,
    of_x: tl.tensor,
    planes: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    PLANES: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Write the gradient of every input: that of its window if it is the maximum, else zero."""
    ROWS: tl.constexpr = HEIGHT // DOWN
    COLUMNS: tl.constexpr = WIDTH // ACROSS
    plane = tl.program_id(0).to(tl.int64) * PLANES + tl.arange(0, PLANES)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    exists = (plane < planes)[:, None]
    inside = exists & (place < HEIGHT * WIDTH)[None, :]
    row, column = place // WIDTH, place % WIDTH
    # The last rows and columns are in no window if the size is not a multiple of the window's.
    pooled = exists & ((row < ROWS * DOWN) & (column < COLUMNS * ACROSS))[None, :]
    window = (row // DOWN) * COLUMNS + column // ACROSS
    own = (row % DOWN) * ACROSS + column % ACROSS
    of = (plane * (ROWS * COLUMNS))[:, None] + window[None, :]
    won = tl.load(winner + of, mask=pooled, other=-1).to(tl.int32) == own[None, :]
    change = tl.load(upper + of, mask=pooled, other=0.0)
    tl.store(
        of_x + (plane * (HEIGHT * WIDTH))[:, None] + place[None, :],
        tl.where(won, change, 0.0),
        mask=inside,
    )


def max_pool(x: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the maximum over adjacent windows without overlap.

    Parameters
    ----------
    x : Tensor
        A batch ``[samples, channels, height, width]``.
    window : tuple of two int
        Height and width of a window; at most 127 values. Rows and columns that fill no window are
        left out.

    Returns
    -------
    Tensor
        ``[samples, channels, height // window[0], width // window[1]]``.
    """
    y, _ = StackedMaxPool.apply(x.unsqueeze(0), window)
    return _one_client(y)


class StackedMaxPool(torch.autograd.Function):
    """:func:`max_pool` for clients stacked along a leading axis. It also returns the positions."""

    @staticmethod
    def forward(x: Tensor, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the maximum of every window."""
        order = _order(x)
        planes = _in_planes(x, order)
        size = x.shape[3] // window[0], x.shape[4] // window[1]
        y = x.new_empty(len(planes), *size)
        winner = torch.empty_like(y, dtype=torch.int8)
        grid, options = _pooling(len(planes), size, x.shape[3:], window, *_WINDOWS)
        with torch.cuda.device_of(x):
            _pool[grid](planes, y, winner, len(planes), **options)
        leading = [x.shape[axis] for axis in order]
        return _in_place(y.unflatten(0, leading), order), _in_place(
            winner.unflatten(0, leading), order
        )

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, tuple[int, int]], output: tuple[Tensor, Tensor]
    ) -> None:
        """Save the positions of the maxima."""
        x, ctx.window = inputs
        ctx.size = x.shape[3:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, upper: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient of every window to its maximum."""
        (winner,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            # This gradient will be differentiated again, which the kernels do not support.
            return _plain_pool_gradient(upper, winner, ctx.size, ctx.window), None
        order = _order(winner)
        of_x = upper.new_empty([winner.shape[axis] for axis in order] + list(ctx.size))
        planes = of_x[..., 0, 0].numel()
        grid, options = _pooling(planes, ctx.size, ctx.size, ctx.window, *_INPUTS)
        with torch.cuda.device_of(upper):
            _pool_gradient[grid](
                _in_planes(upper, order), _in_planes(winner, order), of_x, planes, **options
            )
        return _in_place(of_x, order), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None], x: Tensor, window: tuple[int, int]
    ) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """Merge the axis of stacked clients with the existing axis of clients."""
        made = StackedMaxPool.apply(_merged(x, in_dims[0], info.batch_size), window)
        return tuple(tensor.unflatten(0, (info.batch_size, -1)) for tensor in made), (0, 0)


def _in_planes(x: Tensor, order: Sequence[int]) -> Tensor:
    """View ``[clients, samples, channels, height, width]`` as planes in memory order."""
    return x.permute(*order, 3, 4).reshape(-1, *x.shape[3:]).contiguous()


def _pooling(
    planes: int,
    places: Sequence[int],
    size: Sequence[int],
    window: tuple[int, int],
    results: int,
    warps: int,
) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose the number of planes, and of positions in each, per program."""
    of_plane = places[0] * places[1]
    each = min(triton.next_power_of_2(of_plane), results)
    options = {"HEIGHT": size[0], "WIDTH": size[1], "DOWN": window[0], "ACROSS": window[1]}
    options |= {"PLANES": results // each, "PLACES": each, "num_warps": warps}
    return (triton.cdiv(planes, results // each), triton.cdiv(of_plane, each)), options


def _plain_pool_gradient(
    upper: Tensor, winner: Tensor, size: Sequence[int], window: tuple[int, int]
) -> Tensor:
    """Pass the gradient of every window to its maximum, in differentiable operations."""
    candidates = torch.arange(window[0] * window[1], device=winner.device)
    shares = upper.unsqueeze(-1) * (winner.unsqueeze(-1) == candidates)
    images = shares.unflatten(-1, window).transpose(-3, -2).flatten(-4, -3).flatten(-2)
    return F.pad(images, [0, size[1] - images.shape[-1], 0, size[0] - images.shape[-2]])
