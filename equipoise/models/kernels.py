"""BatchNorm, max-pooling and dropout of stacked clients, as Triton kernels for a GPU.

What these layers cost is reading and writing their tensors. BatchNorm reads its input twice and
writes once; its gradient reads input and upper gradient twice and writes once. Max-pooling goes
over its tensors once each way. Axes may lie in memory in any order, because a grouped convolution
puts samples before clients and those of ``equipoise.models.convolutions`` put channels innermost.
Results lie as their input does, so that no layer has to copy.

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
from equipoise.random import _GOLDEN, _MULTIPLIERS


@cache
def work_on(device: torch.device) -> bool:
    """Return whether Triton can build and launch kernels for a device.

    It needs a recent GPU and a C compiler.
    """
    try:
        StackedMaxPool.apply(torch.zeros(1, 1, 1, 2, 2, device=device), (2, 2), False)
    except Exception as error:  # A driver, a compiler or Triton itself: each has errors of its own.
        warnings.warn(
            f"Triton cannot build kernels for {device}, steps will be slower: {error}", stacklevel=2
        )
        return False
    return True


# ---- BatchNorm -----------------------------------------------------------------------------------

# A program holds a tile of one client, channels by samples by positions, in registers: 16 values a
# thread. It has a single channel, unless channels are innermost in memory.
_TILE = 4096
_CHANNELS_OF_TILE = 32


@triton.jit
def _channels(channels: tl.tensor, TOGETHER: tl.constexpr) -> tl.tuple:
    """Say which client and channels a program works on, and which of the channels exist."""
    blocks = tl.cdiv(channels, TOGETHER)
    client = tl.program_id(0) // blocks
    channel = (tl.program_id(0) % blocks) * TOGETHER + tl.arange(0, TOGETHER)
    return client, channel, client * channels + channel, channel < channels


@triton.jit
def _tile(
    tile: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    exists: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tuple:
    """Return the samples and positions of a tile, and which of its elements exist."""
    across = tl.cdiv(positions, COLUMNS)
    rows = (tile // across) * ROWS + tl.arange(0, ROWS)
    columns = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < samples)[:, None] & (columns < positions)[None, :]
    return rows, columns, exists[:, None, None] & inside[None, :, :]


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
    by_position: tl.tensor,
) -> tl.tensor:
    """Point at the places of a tile."""
    of_channel = tensor + client.to(tl.int64) * by_client + channel.to(tl.int64) * by_channel
    of_sample = rows.to(tl.int64) * by_sample
    of_position = columns * by_position
    return of_channel[:, None, None] + (of_sample[:, None] + of_position[None, :])[None, :, :]


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
    """Sum each channel of a tile."""
    return tl.sum(tl.sum(values, axis=2), axis=1)


@triton.jit
def _spread(values: tl.tensor) -> tl.tensor:
    """Broadcast values of channels over the places of a tile."""
    return values[:, None, None]


@triton.jit
def _of_tiles(
    table: tl.tensor,
    unit: tl.tensor,
    exists: tl.tensor,
    number: tl.tensor,
    LENGTH: tl.constexpr,
    TILES: tl.constexpr,
) -> tl.tensor:
    """Load one number of every tile of each channel, from a table of LENGTH numbers by tiles."""
    tiles, each = tl.num_programs(1), tl.arange(0, TILES)
    of = unit.to(tl.int64)[:, None] * LENGTH * tiles + number * tiles + each[None, :]
    return tl.load(table + of, mask=exists[:, None] & (each < tiles)[None, :], other=0.0)


@triton.jit
def _through_relu(
    change: tl.tensor,
    normalised: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    unit: tl.tensor,
    exists: tl.tensor,
    AFFINE: tl.constexpr,
) -> tl.tensor:
    """Return the gradient before a ReLU, whose input is computed once more."""
    values = normalised
    if AFFINE:
        values = values * _spread(tl.load(weight + unit, mask=exists, other=0.0))
        values += _spread(tl.load(bias + unit, mask=exists, other=0.0))
    return tl.where(values <= 0, 0.0, change)


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
    x_position: tl.tensor,
    MASKED: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the count, the mean and the sum of squared deviations of every tile."""
    tile, tiles = tl.program_id(1), tl.num_programs(1)
    client, channel, unit, exists = _channels(channels, TOGETHER)
    rows, columns, inside = _tile(tile, samples, positions, exists, ROWS, COLUMNS)
    inside = inside & _kept(mask, client, rows, samples, MASKED)[None, :, None]
    values = tl.load(
        _places(x, client, channel, rows, columns, x_client, x_sample, x_channel, x_position),
        mask=inside,
        other=0.0,
    )
    count = _total(inside.to(tl.float32))
    mean = _total(values) / tl.maximum(count, 1.0)
    deviation = tl.where(inside, values - _spread(mean), 0.0)
    to = moments + unit.to(tl.int64) * 3 * tiles + tile
    tl.store(to, count, mask=exists)
    tl.store(to + tiles, mean, mask=exists)
    tl.store(to + 2 * tiles, _total(deviation * deviation), mask=exists)


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
    x_position: tl.tensor,
    y_client: tl.tensor,
    y_sample: tl.tensor,
    y_channel: tl.tensor,
    y_position: tl.tensor,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    TRACKED: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Combine the tiles' moments, and normalise a tile.

    The first tile also writes the statistics.
    """
    tile = tl.program_id(1)
    client, channel, unit, exists = _channels(channels, TOGETHER)
    counts = _of_tiles(moments, unit, exists, 0, 3, TILES)
    means = _of_tiles(moments, unit, exists, 1, 3, TILES)
    squares = _of_tiles(moments, unit, exists, 2, 3, TILES)
    count = tl.sum(counts, axis=1)
    some = tl.maximum(count, 1.0)
    mean = tl.sum(counts * means, axis=1) / some
    apart = means - mean[:, None]
    var = tl.sum(squares + counts * apart * apart, axis=1) / some
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
    scale = 1.0 / tl.sqrt(var + eps)
    if tile == 0:
        tl.store(new_mean + unit, after_mean, mask=exists)
        tl.store(new_var + unit, after_var, mask=exists)
        tl.store(used + unit * 3, mean, mask=exists)
        tl.store(used + unit * 3 + 1, scale, mask=exists)
        tl.store(used + unit * 3 + 2, share, mask=exists)
    rows, columns, inside = _tile(tile, samples, positions, exists, ROWS, COLUMNS)
    values = tl.load(
        _places(x, client, channel, rows, columns, x_client, x_sample, x_channel, x_position),
        mask=inside,
        other=0.0,
    )
    values = (values - _spread(mean)) * _spread(scale)
    if AFFINE:
        values = values * _spread(tl.load(weight + unit, mask=exists, other=0.0))
        values += _spread(tl.load(bias + unit, mask=exists, other=0.0))
    if RELU:
        # What is not a number stays so.
        values = tl.where(values <= 0, 0.0, values)
    tl.store(
        _places(y, client, channel, rows, columns, y_client, y_sample, y_channel, y_position),
        values,
        mask=inside,
    )


@triton.jit(do_not_specialize=["samples"])
def _gradient_sums(
    upper: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    used: tl.tensor,
    sums: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    channels: tl.tensor,
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
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write two sums over every tile.

    They are those of the upper gradient, and of its product with the normalised input.
    """
    tile, tiles = tl.program_id(1), tl.num_programs(1)
    client, channel, unit, exists = _channels(channels, TOGETHER)
    rows, columns, inside = _tile(tile, samples, positions, exists, ROWS, COLUMNS)
    change = tl.load(
        _places(upper, client, channel, rows, columns, u_client, u_sample, u_channel, u_position),
        mask=inside,
        other=0.0,
    )
    values = tl.load(
        _places(x, client, channel, rows, columns, x_client, x_sample, x_channel, x_position),
        mask=inside,
        other=0.0,
    )
    # Where a place does not exist the upper gradient is zero, and so is what it adds.
    mean = tl.load(used + unit * 3, mask=exists, other=0.0)
    scale = tl.load(used + unit * 3 + 1, mask=exists, other=0.0)
    normalised = (values - _spread(mean)) * _spread(scale)
    if RELU:
        change = _through_relu(change, normalised, weight, bias, unit, exists, AFFINE)
    to = sums + unit.to(tl.int64) * 2 * tiles + tile
    tl.store(to, _total(change), mask=exists)
    tl.store(to + tiles, _total(change * normalised), mask=exists)


@triton.jit(do_not_specialize=["samples"])
def _gradient(
    upper: tl.tensor,
    x: tl.tensor,
    of_x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
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
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Write the gradient by a tile of the input.

    The first tile also writes the gradients by weight and bias.
    """
    tile = tl.program_id(1)
    client, channel, unit, exists = _channels(channels, TOGETHER)
    through_bias = tl.sum(_of_tiles(sums, unit, exists, 0, 2, TILES), axis=1)
    through_weight = tl.sum(_of_tiles(sums, unit, exists, 1, 2, TILES), axis=1)
    if tile == 0:
        tl.store(of_bias + unit, through_bias, mask=exists)
        tl.store(of_weight + unit, through_weight, mask=exists)
    mean = tl.load(used + unit * 3, mask=exists, other=0.0)
    scale = tl.load(used + unit * 3 + 1, mask=exists, other=0.0)
    share = tl.load(used + unit * 3 + 2, mask=exists, other=0.0)
    rows, columns, inside = _tile(tile, samples, positions, exists, ROWS, COLUMNS)
    change = tl.load(
        _places(upper, client, channel, rows, columns, u_client, u_sample, u_channel, u_position),
        mask=inside,
        other=0.0,
    )
    values = tl.load(
        _places(x, client, channel, rows, columns, x_client, x_sample, x_channel, x_position),
        mask=inside,
        other=0.0,
    )
    # Padding is normalised like samples, but statistics do not depend on it.
    normalised = (values - _spread(mean)) * _spread(scale)
    if RELU:
        change = _through_relu(change, normalised, weight, bias, unit, exists, AFFINE)
    through_statistics = _spread(through_bias) + normalised * _spread(through_weight)
    kept = _kept(mask, client, rows, samples, MASKED)
    change -= tl.where(kept[None, :, None], _spread(share) * through_statistics, 0.0)
    if AFFINE:
        scale = scale * tl.load(weight + unit, mask=exists, other=0.0)
    tl.store(
        _places(of_x, client, channel, rows, columns, o_client, o_sample, o_channel, o_position),
        change * _spread(scale),
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
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise a client's batch by its own statistics.

    :func:`equipoise.models.layers.masked_norm` does the same.

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
        What is added to the variance.
    relu : bool
        Whether negative results become zero.

    Returns
    -------
    tuple
        The normalised batch and the new running statistics; without old ones those of the batch.
    """
    given = (x, weight, bias, mask, running_mean, running_var)
    stacked = (None if tensor is None else tensor.unsqueeze(0) for tensor in given)
    y, new_mean, new_var, _ = StackedNorm.apply(*stacked, momentum, eps, relu)
    return _one_client(y), new_mean.squeeze(0), new_var.squeeze(0)


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
        clients, samples, channels, positions = values.shape
        grid, options = _tiling(values)
        tiles = grid[1]
        y = _room(values)
        moments = x.new_empty(clients, channels, 3, tiles)
        new_mean, new_var, used = (x.new_empty(clients, channels, *more) for more in ((), (), (3,)))
        sizes = samples, positions, channels
        with torch.cuda.device_of(x):
            _moments[grid](
                values,
                mask,
                moments,
                *sizes,
                *values.stride(),
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
                *values.stride(),
                *y.stride(),
                AFFINE=weight is not None,
                RELU=relu,
                TRACKED=mean is not None,
                TILES=triton.next_power_of_2(tiles),
                **options,
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
        clients, samples, channels, positions = values.shape
        grid, options = _tiling(values)
        tiles = grid[1]
        of_x = _room(values)
        sums = x.new_empty(clients, channels, 2, tiles)
        of_weight, of_bias = (x.new_empty(clients, channels) for _ in range(2))
        sizes = samples, positions, channels
        strides = *change.stride(), *values.stride()
        with torch.cuda.device_of(x):
            kind = {"AFFINE": weight is not None, "RELU": ctx.relu}
            _gradient_sums[grid](
                change, values, weight, bias, used, sums, *sizes, *strides, **kind, **options
            )
            _gradient[grid](
                change,
                values,
                of_x,
                weight,
                bias,
                mask,
                used,
                sums,
                of_weight,
                of_bias,
                *sizes,
                *strides,
                *of_x.stride(),
                **kind,
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
        y, *_ = masked_norm(x, mask, weight, bias, mean, var, momentum=momentum, eps=eps)
        return y.relu() if relu else y

    def of_all(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        rows = x.new_ones(x.shape[:2]) if mask is None else mask
        given = (x, weight, bias, rows, mean, var)
        made: Tensor = vmap(
            of_one, in_dims=tuple(None if tensor is None else 0 for tensor in given)
        )(*given)
        return made

    return of_all


def _tiling(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose tiles from one client's shape alone.

    There are few shapes of tiles, because each is compiled once.
    """
    clients, samples, channels, positions = x.shape
    together = min(triton.next_power_of_2(channels), _CHANNELS_OF_TILE) if x.stride(2) == 1 else 1
    columns = min(triton.next_power_of_2(positions), max(_TILE // (4 * together), 1))
    rows = min(triton.next_power_of_2(samples), max(_TILE // (together * columns), 1))
    tiles = triton.cdiv(samples, rows) * triton.cdiv(positions, columns)
    warps = min(max(together * rows * columns // 512, 1), 8)
    options = {"TOGETHER": together, "ROWS": rows, "COLUMNS": columns, "num_warps": warps}
    return (clients * triton.cdiv(channels, together), tiles), options


def _flat(x: Tensor) -> Tensor:
    """View ``[clients, samples, channels, ...]`` with one axis of positions."""
    return x.unsqueeze(-1) if x.dim() == 3 else x.flatten(3)


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
    """Merge the axis that ``vmap`` hides with the axis of clients, and bring it to the front."""
    if tensor is None:
        return None
    stacked = tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return stacked.flatten(0, 1)


# ---- memory order --------------------------------------------------------------------------------


def _order(x: Tensor) -> list[int]:
    """List the axes from the outermost in memory to the innermost."""
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def _room(x: Tensor) -> Tensor:
    """Make an empty tensor whose axes lie in memory as those of ``x``."""
    return torch.empty_permuted(x.shape, _order(x), dtype=x.dtype, device=x.device)


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
    INNER: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    RELU: tl.constexpr,
    PLANES: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Write the maximum of every window, and which of its values that is.

    A plane is an image with all its channels if they are innermost, INNER of them, or one channel.
    """
    ROWS: tl.constexpr = HEIGHT // DOWN
    COLUMNS: tl.constexpr = WIDTH // ACROSS
    plane = tl.program_id(0).to(tl.int64) * PLANES + tl.arange(0, PLANES)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    inside = (plane < planes)[:, None] & (place < ROWS * COLUMNS * INNER)[None, :]
    row, column = place // (COLUMNS * INNER), place // INNER % COLUMNS
    first = (row * (DOWN * WIDTH) + column * ACROSS) * INNER + place % INNER
    window = x + (plane * (HEIGHT * WIDTH * INNER))[:, None] + first[None, :]
    best = tl.full((PLANES, PLACES), float("-inf"), tl.float32)
    chosen = tl.zeros((PLANES, PLACES), tl.int32)
    for i in tl.static_range(DOWN):
        for j in tl.static_range(ACROSS):
            value = tl.load(window + (i * WIDTH + j) * INNER, mask=inside, other=0.0)
            # As PyTorch has it: the first of equal values, and anything that is not a number.
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            chosen = tl.where(better, i * ACROSS + j, chosen)
    if RELU:
        # The gradient goes nowhere.
        chosen = tl.where(best <= 0, -1, chosen)
        best = tl.where(best <= 0, 0.0, best)
    to = (plane * (ROWS * COLUMNS * INNER))[:, None] + place[None, :]
    tl.store(y + to, best, mask=inside)
    tl.store(winner + to, chosen.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["planes"])
def _pool_gradient(
    upper: tl.tensor,
    winner: tl.tensor,
    of_x: tl.tensor,
    planes: tl.tensor,
    u_plane: tl.tensor,
    u_row: tl.tensor,
    u_column: tl.tensor,
    u_inner: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
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
    inside = exists & (place < HEIGHT * WIDTH * INNER)[None, :]
    row, column, inner = place // (WIDTH * INNER), place // INNER % WIDTH, place % INNER
    # The last rows and columns belong to no window if the size is not a multiple of the window's.
    pooled = exists & ((row < ROWS * DOWN) & (column < COLUMNS * ACROSS))[None, :]
    window = ((row // DOWN) * COLUMNS + column // ACROSS) * INNER + inner
    own = (row % DOWN) * ACROSS + column % ACROSS
    of = (plane * (ROWS * COLUMNS * INNER))[:, None] + window[None, :]
    won = tl.load(winner + of, mask=pooled, other=-1).to(tl.int32) == own[None, :]
    above = (row // DOWN) * u_row + (column // ACROSS) * u_column + inner * u_inner
    change = tl.load(upper + (plane * u_plane)[:, None] + above[None, :], mask=pooled, other=0.0)
    tl.store(
        of_x + (plane * (HEIGHT * WIDTH * INNER))[:, None] + place[None, :],
        tl.where(won, change, 0.0),
        mask=inside,
    )


def max_pool(x: Tensor, window: tuple[int, int], relu: bool = False) -> Tensor:
    """Take the maximum over windows that neither overlap nor leave gaps.

    Parameters
    ----------
    x : Tensor
        A batch ``[samples, channels, height, width]``.
    window : tuple of two int
        Height and width of a window; at most 127 values. Rows and columns that fill no window are
        left out.
    relu : bool
        Whether negative values become zero first.

    Returns
    -------
    Tensor
        ``[samples, channels, height // window[0], width // window[1]]``.
    """
    y, _ = StackedMaxPool.apply(x.unsqueeze(0), window, relu)
    return _one_client(y)


class StackedMaxPool(torch.autograd.Function):
    """What :func:`max_pool` does for clients stacked along a leading axis.

    It also returns which value has won.
    """

    @staticmethod
    def forward(x: Tensor, window: tuple[int, int], relu: bool) -> tuple[Tensor, Tensor]:
        """Take the maximum of every window."""
        order = _order_of_planes(x)
        planes = _in_planes(x, order).contiguous()
        shape = *x.shape[:3], x.shape[3] // window[0], x.shape[4] // window[1]
        y = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)
        winner = torch.empty_permuted(shape, order, dtype=torch.int8, device=x.device)
        grid, options = _pooling(planes, shape[3:], window, *_WINDOWS)
        with torch.cuda.device_of(x):
            _pool[grid](planes, y, winner, len(planes), RELU=relu, **options)
        return y, winner

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, tuple[int, int], bool], output: tuple[Tensor, Tensor]
    ) -> None:
        """Keep which values have won."""
        x, ctx.window, _ = inputs
        ctx.size = x.shape[3:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, upper: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        """Return every window's gradient to the value that has won."""
        (winner,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            # This gradient will be differentiated in turn, which the kernels cannot be.
            return _plain_pool_gradient(upper, winner, ctx.size, ctx.window), None, None
        order = _order_of_planes(winner)
        shape = *winner.shape[:3], *ctx.size
        of_x = torch.empty_permuted(shape, order, dtype=upper.dtype, device=upper.device)
        planes, above = _in_planes(of_x, order), _in_planes(upper, order)
        grid, options = _pooling(planes, ctx.size, ctx.window, *_INPUTS)
        with torch.cuda.device_of(upper):
            _pool_gradient[grid](
                above,
                _in_planes(winner, order).contiguous(),
                of_x,
                len(planes),
                *above.stride(),
                **options,
            )
        return of_x, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, window: tuple[int, int], relu: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """Count stacked clients among the clients there already are."""
        made = StackedMaxPool.apply(_merged(x, in_dims[0], info.batch_size), window, relu)
        return tuple(tensor.unflatten(0, (info.batch_size, -1)) for tensor in made), (0, 0)


def _order_of_planes(x: Tensor) -> list[int]:
    """List the axes in the order of memory, with height and width side by side.

    Channels may follow them.
    """
    leading = sorted(range(3), key=x.stride, reverse=True)
    if leading[2] == 2 and x.shape[2] > 1 and x.stride(2) < x.stride(4):
        return [*leading[:2], 3, 4, 2]
    return [*leading, 3, 4]


def _in_planes(x: Tensor, order: Sequence[int]) -> Tensor:
    """View images as ``[planes, height, width, inner]``; ``inner`` is 1 or the channels."""
    laid_out = x.permute(*order)
    if order[-1] == 2:
        return laid_out.flatten(0, 1)
    return laid_out.flatten(0, 2).unsqueeze(-1)


def _pooling(
    planes: Tensor, results: Sequence[int], window: tuple[int, int], of_program: int, warps: int
) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose how many planes, and how many places of each, a program works on."""
    number, height, width, inner = planes.shape
    of_plane = results[0] * results[1] * inner
    each = min(triton.next_power_of_2(of_plane), of_program)
    options = {"HEIGHT": height, "WIDTH": width, "INNER": inner}
    options |= {"DOWN": window[0], "ACROSS": window[1]}
    options |= {"PLANES": of_program // each, "PLACES": each, "num_warps": warps}
    return (triton.cdiv(number, of_program // each), triton.cdiv(of_plane, each)), options


def _plain_pool_gradient(
    upper: Tensor, winner: Tensor, size: Sequence[int], window: tuple[int, int]
) -> Tensor:
    """Return every window's gradient to its winner, by operations that can be differentiated."""
    candidates = torch.arange(window[0] * window[1], device=winner.device)
    shares = upper.unsqueeze(-1) * (winner.unsqueeze(-1) == candidates)
    images = shares.unflatten(-1, window).transpose(-3, -2).flatten(-4, -3).flatten(-2)
    return F.pad(images, [0, size[1] - images.shape[-1], 0, size[0] - images.shape[-2]])


# ---- dropout -------------------------------------------------------------------------------------

# Hashes that a program makes.
_HASHES = 512


@triton.jit(do_not_specialize=["tiles", "threshold"])
def _draw(
    keys: tl.tensor,
    factors: tl.tensor,
    tiles: tl.tensor,
    count: tl.tensor,
    threshold: tl.tensor,
    scale: tl.tensor,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    HASHES: tl.constexpr,
) -> None:
    """Write zero or the scale for four elements a hash: what ``random.keep_mask`` draws."""
    client = (tl.program_id(0) // tiles).to(tl.int64)
    number = (tl.program_id(0) % tiles) * HASHES + tl.arange(0, HASHES)
    key = tl.load(keys + client).to(tl.uint64, bitcast=True)
    mixed = key + (number.to(tl.uint64) + 1) * GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    mixed = mixed ^ (mixed >> 31)
    lane = tl.arange(0, 4)[None, :]
    bits = ((mixed[:, None] >> (lane * 16).to(tl.uint64)) & 0xFFFF).to(tl.int32)
    element = number[:, None] * 4 + lane
    tl.store(
        factors + client * count + element,
        tl.where(bits < threshold, scale, 0.0),
        mask=element < count,
    )


def dropout_factors(key: Tensor, shape: torch.Size, threshold: int) -> Tensor:
    """Draw the factors by which dropout multiplies a client's batch.

    Parameters
    ----------
    key : Tensor
        The key of the draw, a number.
    shape : torch.Size
        The shape of the batch.
    threshold : int
        An element is kept with probability ``threshold / 65536``, as
        :func:`equipoise.random.keep_mask` does, and scaled by the inverse.

    Returns
    -------
    Tensor
        float32 of that shape.
    """
    factors = StackedDraw.apply(key.reshape(1), shape.numel(), threshold)
    return _one_client(factors).view(shape)


class StackedDraw(torch.autograd.Function):
    """What :func:`dropout_factors` does for clients stacked along a leading axis."""

    @staticmethod
    def forward(keys: Tensor, count: int, threshold: int) -> Tensor:
        """Draw ``[clients, count]`` factors."""
        keys = keys.contiguous()
        factors = torch.empty(len(keys), count, device=keys.device)
        tiles = triton.cdiv(count, 4 * _HASHES)
        with torch.cuda.device_of(keys):
            _draw[(tiles * len(keys),)](
                keys,
                factors,
                tiles,
                count,
                threshold,
                65536 / threshold,
                GOLDEN=_GOLDEN,
                FIRST=_MULTIPLIERS[0],
                SECOND=_MULTIPLIERS[1],
                HASHES=_HASHES,
            )
        return factors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Say that there is nothing to differentiate."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[None, None, None]:
        """Return no gradient."""
        return None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], keys: Tensor, count: int, threshold: int
    ) -> tuple[Tensor, int]:
        """Count stacked clients among the clients there already are."""
        merged = _merged(keys, in_dims[0], info.batch_size)
        made = StackedDraw.apply(merged, count, threshold)
        return made.unflatten(0, (info.batch_size, -1)), 0
