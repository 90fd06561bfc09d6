"""Convolutions of stacked clients, as Triton kernels for a GPU.

Forward pass, gradient by the input and gradient by the weights are matrix products whose factors
are read from the images as they are needed, so no patches are ever written. Images may lie in
memory in any order; results lie with channels innermost, which is the order these kernels read
fastest.

There are no atomic operations. The sum over samples of a weight's gradient is cut into pieces of a
fixed number of rows, which are added in order. How the work is cut depends on the layer alone, so
the same input gives the same bits, whoever shares the stack. Only imported where Triton is
installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from equipoise.models import convolution_kernels as kernels
from equipoise.models.kernel_tools import FUSED, all_merged, one_client
from equipoise.models.products import pay_on


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
        kernels.pack[(tiles * clients,)](
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
            **FUSED,
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
    window: tuple[int, int] = (1, 1),
    channels_innermost: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """Convolve, or with the ``size`` of an image return the gradient by that image.

    With a ``window`` of several pixels the result is the maximum over windows, for which no
    gradient can be computed. Its product must be a power of two.
    """
    clients, samples, channels, height, width = x.shape
    transposed = size is not None
    kernel = weight.shape[3], weight.shape[4]
    results = channels if geometry.depthwise else weight.shape[2 if transposed else 1]
    rows, columns = geometry.size((height, width), kernel) if size is None else size
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    pooled = rows // window[0], columns // window[1]
    shape = (*pooled, results) if channels_innermost else (results, *pooled)
    y = torch.empty(clients, samples, *shape, dtype=dtype, device=x.device)
    laid_out = y.permute(0, 1, 4, 2, 3) if channels_innermost else y
    if y.numel() == 0:
        return laid_out
    tensors = None if bias is None else bias.contiguous(), y
    options = _named(x, (rows, columns), kernel, geometry)
    options |= {"TRANSPOSED": transposed, "BIASED": bias is not None, "RELU": relu}
    if geometry.depthwise:
        tiles = triton.cdiv(samples * rows * columns, _PIXELS) * triton.cdiv(channels, _CHANNELS)
        # A view of weights that all clients share keeps its stride of zero.
        flat = weight.flatten(1)
        with torch.cuda.device_of(x):
            kernels.depthwise_convolution[(tiles * clients,)](
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
                **FUSED,
            )
        return laid_out
    if tile is None:
        pools = window != (1, 1)
        tile = convolution_tile(channels, results, rows * columns, precision, pools=pools)
    matrix = packed(weight, transposed, precision)
    down, across = geometry.stride if transposed else (1, 1)
    pixels = samples * triton.cdiv(rows, down) * triton.cdiv(columns, across)
    if window != (1, 1):
        # The last rows and columns may be in no window.
        pixels = samples * math.prod(pooled) * math.prod(window)
    tiles = triton.cdiv(pixels, tile.rows) * down * across * triton.cdiv(results, tile.columns)
    with torch.cuda.device_of(x):
        kernels.convolution[(tiles * clients,)](
            x,
            matrix,
            *tensors,
            tiles,
            samples,
            *x.stride(),
            0 if matrix.shape[1] == 1 else matrix.stride(1),
            matrix.stride(0),
            RESULTS=results,
            STEP_DOWN=_step(geometry, 0) if transposed else 1,
            STEP_ACROSS=_step(geometry, 1) if transposed else 1,
            POOL_DOWN=window[0],
            POOL_ACROSS=window[1],
            CHANNELS_INNERMOST=channels_innermost,
            PRECISION=precision,
            PACKED=packs(channels, kernel, tile.inner) and (down, across) == (1, 1),
            **options,
            **tile.options,
            **FUSED,
        )
    return laid_out


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
            kernels.depthwise_weight_sums[(tiles * clients,)](
                *images, tiles, *lengths, *strides, N=_CHANNELS, K=_PIXELS, **options, **FUSED
            )
        elif pieces:
            tiles = triton.cdiv(channels * places, tile.rows) * triton.cdiv(results, tile.columns)
            tiles *= pieces
            kernels.weight_sums[(tiles * clients,)](
                *images,
                tiles,
                *lengths,
                kernels.ORIGIN,
                *strides,
                RESULTS=results,
                PRECISION=precision,
                **options,
                **tile.options,
                **FUSED,
            )
        tiles = triton.cdiv(entries, _BLOCK)
        kernels.add_pieces[(tiles * clients,)](
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
            **FUSED,
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


def packs(channels: int, kernel: tuple[int, int], inner: int) -> bool:
    """Return whether several places of the kernel are multiplied at once.

    That pays if much of a partial product would be empty at one place. Numbers of entries, and the
    width of the kernel, must be small enough for the kernels' division.

    Examples
    --------
    >>> packs(3, (3, 3), 32), packs(32, (3, 3), 32), packs(1, (1, 1500), 32)
    (True, False, False)
    """
    pays = triton.cdiv(channels, inner) * inner > 1.25 * channels
    return pays and channels * math.prod(kernel) + inner <= 2048 and kernel[1] <= 512


def _step(geometry: Geometry, axis: int) -> int:
    """Return the distance of the places of a kernel that meet the same pixels of an image."""
    stride = geometry.stride[axis]
    return stride // math.gcd(stride, geometry.dilation[axis])


def convolution_tile(
    channels: int, results: int, pixels: int, precision: str, *, pools: bool = False
) -> Tile:
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
    pools : bool
        Whether the maximum over windows is written, in evaluation of one model on many images.
    """
    small, narrow, wide = pixels <= 64, results <= 32, results >= 128
    if precision == "ieee":
        tile = Tile(128 if narrow else 64, 64, 16, 4, 3)
    elif precision == "split":
        tile = Tile(128 if pools or channels < 16 else 64, 64, 32, 4, 3)
    elif small:
        tile = Tile(64, 64, 64, 4, 3)
    elif precision == "bfloat16" and pools:
        tile = Tile(256, 64, 32, 4, 3)
    elif precision == "bfloat16" and wide:
        tile = Tile(128, 64, 32, 4, 4)
    elif precision == "bfloat16" and not narrow:
        tile = Tile(128, 64, 32, 8, 4)
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
    return one_client(y)


def convolve_and_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    window: tuple[int, int],
    *,
    channels_innermost: bool,
    precision: str | None = None,
) -> Tensor:
    """Convolve a batch, set negative results to zero, and take the maximum over windows.

    For evaluation: it writes what follows max-pooling only, so there is no gradient. The numbers
    are those of :func:`convolve` and max-pooling.

    Parameters
    ----------
    x, weight, bias, geometry, precision
        As for :func:`convolve`. Convolutions that are depthwise are not supported.
    window : tuple of int
        Height and width of a window, whose product is a power of two. Windows neither overlap nor
        leave gaps.
    channels_innermost : bool
        Whether channels are innermost in memory in the result, or outermost.

    Returns
    -------
    Tensor
        ``[samples, results, height, width]``.
    """
    of_bias = None if bias is None else bias.unsqueeze(0)
    y = convolution(
        x.unsqueeze(0),
        weight.unsqueeze(0),
        of_bias,
        geometry,
        precision or precision_on(x.device),
        relu=True,
        window=window,
        channels_innermost=channels_innermost,
    )
    return y.squeeze(0)


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
        made = StackedConvolution.apply(*all_merged(info, in_dims, inputs, tensors=3))
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
        made = StackedInputGradient.apply(*all_merged(info, in_dims, inputs, tensors=2))
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
            *all_merged(info, in_dims, inputs, tensors=2)
        )
        of_weight = of_weight.unflatten(0, (info.batch_size, -1))
        if of_bias is None:
            return (of_weight, None), (0, None)
        return (of_weight, of_bias.unflatten(0, (info.batch_size, -1))), (0, 0)
