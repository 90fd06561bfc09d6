"""Max-pooling and dropout of stacked clients, as Triton kernels for a GPU.

What these layers cost is reading and writing their tensors, which they do once each way. Axes may
lie in memory in any order, because a grouped convolution puts samples before clients and those of
``equipoise.models.convolutions`` put channels innermost. Results lie as their input does, so that
no layer has to copy.

The same input gives the same bits, whatever the other clients of the stack. Only imported if Triton
is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.kernel_tools import FUSED, merge_clients, one_client
from equipoise.random import _GOLDEN, _MULTIPLIERS
from equipoise.text import one_line, printable


def failure_on(device: torch.device) -> str | None:
    """Return why Triton cannot build and launch kernels for a device; ``None`` if it can.

    It needs a recent GPU and a C compiler.
    """
    try:
        StackedMaxPool.apply(torch.zeros(1, 1, 1, 2, 2, device=device), (2, 2), False)
    except Exception as error:  # A driver, a compiler or Triton itself: each has errors of its own.
        return f"Triton cannot build kernels for {device}: {printable(one_line(error), 300)}"
    return None


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
            value = tl.load(window + (i * WIDTH + j) * INNER, mask=inside, other=0.0).to(tl.float32)
            # As PyTorch has it: the first of equal values, and anything that is not a number.
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            chosen = tl.where(better, i * ACROSS + j, chosen)
    if RELU:
        # The gradient goes nowhere.
        chosen = tl.where(best <= 0, -1, chosen)
        best = tl.where(best <= 0, 0.0, best)
    to = (plane * (ROWS * COLUMNS * INNER))[:, None] + place[None, :]
    tl.store(y + to, best.to(y.dtype.element_ty), mask=inside)
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
    places = upper + (plane * u_plane)[:, None] + above[None, :]
    change = tl.load(places, mask=pooled, other=0.0).to(tl.float32)
    tl.store(
        of_x + (plane * (HEIGHT * WIDTH * INNER))[:, None] + place[None, :],
        tl.where(won, change, 0.0).to(of_x.dtype.element_ty),
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
    return one_client(y)


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
            _pool[grid](planes, y, winner, len(planes), RELU=relu, **options, **FUSED)
        return y, winner

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, tuple[int, int], bool], output: tuple[Tensor, Tensor]
    ) -> None:
        """Keep which values have won."""
        x, ctx.window, _ = inputs
        ctx.size = x.shape[3:]
        ctx.mark_non_differentiable(output[1])
        # Otherwise zeros would be written as the gradient by the second output.
        ctx.set_materialize_grads(False)
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
                **FUSED,
            )
        return of_x, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, window: tuple[int, int], relu: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """Count stacked clients among the clients there already are."""
        made = StackedMaxPool.apply(merge_clients(x, in_dims[0], info.batch_size), window, relu)
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
    return one_client(factors).view(shape)


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
                **FUSED,
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
        merged = merge_clients(keys, in_dims[0], info.batch_size)
        made = StackedDraw.apply(merged, count, threshold)
        return made.unflatten(0, (info.batch_size, -1)), 0
