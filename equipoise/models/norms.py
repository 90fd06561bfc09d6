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
``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.func import vmap

from equipoise.models import norm_kernels as kernels
from equipoise.models.kernel_tools import FUSED, all_merged, empty_as, one_client
from equipoise.models.norm_layers import masked_norm

# ---- launching -----------------------------------------------------------------------------------

# Values of a tile, 16 of each thread. A tile has a single channel, unless channels are innermost in
# memory. Then it has as many as are in so many bytes, which a warp reads at a time. With a single
# channel it has half the values, because a thread needs more registers for each of them.
_TILE = 4096
_LINE = 128
# Tiles of a piece, unless a client would have more pieces than the number below. Those of some
# channels are combined by one program.
_TILES_OF_PIECE = 4
_MOST_PIECES = 128


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

    def launch(
        self,
        kernel: Any,
        parts: tuple[int, ...],
        images: Sequence[Tensor],
        others: Sequence[Any],
        **options: bool,
    ) -> None:
        """Launch a kernel that works on images.

        Parameters
        ----------
        kernel : Any
            One of those whose arguments are in this order: images, others, parts, sizes, and the
            strides of all images.
        parts : tuple of int
            Parts of each client, one for a program, and tiles of a part if it may have several.
        images : sequence of Tensor
            ``[clients, samples, channels, positions]``.
        others : sequence
            Other tensors and numbers.
        options : bool
            What the kernel is compiled for, besides the tile.
        """
        each = self.sizes[2]
        # Whether rows are equally far apart in all images.
        flat = each > 1 and all(x.stride(1) == each * x.stride(3) for x in images)
        strides = (stride for x in images for stride in x.stride())
        kernel[(self.blocks * parts[0],)](
            *images,
            *others,
            *parts,
            *self.sizes,
            *strides,
            FLAT=flat,
            **self.tile,
            **options,
            **FUSED,
        )

    def combine(self, kernel: Any, *given: Any, **options: bool) -> None:
        """Launch a kernel that combines pieces."""
        kernel[(self.blocks,)](
            *given,
            self.pieces,
            *self.sizes[-2:],
            TOGETHER=self.tile["TOGETHER"],
            PIECES=_power(self.pieces),
            num_warps=self.tile["num_warps"],
            **options,
            **FUSED,
        )


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


# ---- differentiation -----------------------------------------------------------------------------


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

    :func:`equipoise.models.norm_layers.masked_norm` does the same.

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
        tracked = mean is not None
        with torch.cuda.device_of(x):
            work.launch(
                kernels.piece_moments,
                (work.pieces, work.length),
                [values],
                [mask, moments, *statistics],
                MASKED=mask is not None,
                TRACKED=tracked,
                WHOLE=work.whole,
            )
            if not work.whole:
                work.combine(kernels.combine_moments, moments, *statistics, TRACKED=tracked)
            work.launch(
                kernels.normalise,
                (work.tiles,),
                [values, y],
                [weight, bias, used],
                AFFINE=weight is not None,
                RELU=relu,
            )
        return y.view(x.shape), new_mean, new_var, used

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the gradient needs."""
        *tensors, ctx.momentum, ctx.eps, ctx.relu = inputs
        _, *statistics = output
        ctx.mark_non_differentiable(*statistics)
        # Otherwise zeros would be written as the gradients by the statistics.
        ctx.set_materialize_grads(False)
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
        kind = {"AFFINE": weight is not None, "RELU": ctx.relu}
        with torch.cuda.device_of(x):
            work.launch(
                kernels.gradient_sums,
                (work.pieces, work.length),
                [change, values],
                [weight, bias, used, sums],
                **kind,
            )
            if not work.whole:
                work.combine(kernels.combine_sums, sums, totals)
            work.launch(
                kernels.gradient,
                (work.tiles,),
                [change, values, of_x],
                [weight, bias, mask, used, totals],
                MASKED=mask is not None,
                **kind,
            )
        of_affine = (None, None) if weight is None else (totals[1], totals[0])
        return of_x.view(x.shape), *of_affine, *none

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, int, int, int]]:
        """Merge the axis of stacked clients with the existing axis of clients."""
        made = StackedNorm.apply(*all_merged(info, in_dims, inputs, tensors=6))
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
