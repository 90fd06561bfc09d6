"""Convolution and max-pooling layers of stacked clients, and sequences of them with ReLUs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from equipoise.models import patches
from equipoise.models.cpu_convolutions import convolve
from equipoise.models.dropout import Dropout
from equipoise.models.frozen import transforms
from equipoise.models.kernel_modules import module_with_triton
from equipoise.models.norm_layers import BatchNorm
from equipoise.models.passes import current_pass, kernels_for_pass, stacked_on_gpu, wide_on_gpu
from equipoise.models.replacing import adopt, has_hooks

# From this ratio on, channels innermost pay on a CPU. Measured with ResNet-18, whose layers are
# faster where neighbours have the same layout.
_IMAGES_TO_WEIGHTS = 0.25


class Convolution(nn.Conv2d):
    """A convolution that stacked clients can afford.

    Under ``vmap`` a convolution becomes a grouped one, with a group a client. cuDNN has fast
    grouped kernels for TF32 and bfloat16, but for few channels and in float32 it works through the
    groups one after the other. On a GPU with Triton the kernels of
    :mod:`equipoise.models.convolutions` do the work, also in evaluation, because they compute
    float32 on tensor cores. On one without, float32 images are cut into patches, which is several
    times faster than groups.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            layer.dilation,  # type: ignore[arg-type]
            layer.groups,
            bias=layer.bias is not None,
            device="meta",
        )
        adopt(self, layer)
        # Set by ``convert``: results lie with channels innermost, which not all of PyTorch's
        # functions can stack.
        self.channels_innermost = False

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is an ordinary convolution, which this one can replace."""
        return (
            type(layer) is nn.Conv2d
            and not has_hooks(layer)
            and (layer.groups == 1 or _is_depthwise(layer))
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve a batch ``[samples, channels, height, width]``."""
        return self.convolved(x, relu=False)

    def convolved(self, x: Tensor, *, relu: bool) -> Tensor:
        """Convolve a batch, and set what is negative to zero if asked to."""
        if (kernels := _convolutions(x, self.weight)) is not None:
            how = self.stride, self.padding, self.dilation, _is_depthwise(self)
            geometry = kernels.Geometry(*how)
            made: Tensor = kernels.convolve(x, self.weight, self.bias, geometry, relu=relu)
            return made if self.channels_innermost else made.contiguous()
        y = self._by_pytorch(self._laid_out(x)) if self._in_groups(x) else self._by_patches(x)
        return y.relu() if relu else y

    def convolved_and_pooled(
        self, x: Tensor, window: tuple[int, int], *, flattened: bool
    ) -> Tensor | None:
        """Convolve a batch, apply a ReLU and max-pooling in one kernel; ``None`` if there is none.

        ``flattened``: whether the result is made a vector, for which channels must be outermost.
        """
        size = window[0] * window[1]
        # A tile of the kernel has a power of two of pixels, and whole windows.
        fits = x.dim() == 4 and size in (2, 4, 8, 16) and not _is_depthwise(self)
        if not fits or (kernels := _convolutions(x, self.weight)) is None:
            return None
        geometry = kernels.Geometry(self.stride, self.padding, self.dilation)
        height, width = geometry.size((x.shape[2], x.shape[3]), self.kernel_size)
        if height < window[0] or width < window[1]:
            return None
        innermost = self.channels_innermost and not flattened
        made: Tensor = kernels.convolve_and_pool(
            x, self.weight, self.bias, geometry, window, channels_innermost=innermost
        )
        return made

    def _laid_out(self, x: Tensor) -> Tensor:
        """Lay images out as a CPU convolves them fastest, if results may lie in any layout.

        That is with channels innermost, unless the weights, which PyTorch then copies, are large.
        Under ``vmap`` the layout cannot be chosen.
        """
        in_engine = current_pass() is not None and not transforms()
        plain = x.dim() == 4 and x.device.type == "cpu" and x.dtype == torch.float32
        if not (self.channels_innermost and in_engine and plain):
            return x
        pays = x.numel() >= _IMAGES_TO_WEIGHTS * self.weight.numel()
        layout = torch.channels_last if pays else torch.contiguous_format
        return x.contiguous(memory_format=layout)

    def _in_groups(self, x: Tensor) -> bool:
        """Return whether PyTorch's own convolution is the better one if there are no kernels."""
        stacked = stacked_on_gpu(x) and x.dim() == 4
        lowered = torch.is_autocast_enabled("cuda") or torch.backends.cudnn.allow_tf32
        return not stacked or lowered or self.dilation != (1, 1) or self.groups > 1

    def _by_pytorch(self, x: Tensor) -> Tensor:
        if self.groups > 1 or self.dilation != (1, 1):
            return super().forward(x)
        return convolve(x, self.weight, self.bias, *self._how())

    def _by_patches(self, x: Tensor) -> Tensor:
        y = patches.convolve(x, self.weight, *self._how())
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)

    def _how(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return stride and padding."""
        return cast("tuple[int, int]", self.stride), cast("tuple[int, int]", self.padding)


def _is_depthwise(layer: nn.Conv2d) -> bool:
    """Return whether every channel has a kernel of its own, which reads that channel alone."""
    return 1 < layer.groups == layer.in_channels == layer.out_channels


def _convolutions(x: Tensor, weight: Tensor) -> Any:
    """Return the module of convolutions if they can serve this pass, else ``None``."""
    if not wide_on_gpu(x) or x.dim() != 4:
        return None
    lowered = torch.is_autocast_enabled("cuda")
    types = (torch.float32, torch.bfloat16) if lowered else (torch.float32,)
    if x.dtype not in types or weight.dtype != torch.float32:
        return None
    if lowered and torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return None
    return module_with_triton("convolutions", x.device)


class MaxPool(nn.MaxPool2d):
    """Max-pooling that does not copy the images of stacked clients on a GPU.

    PyTorch's rule for ``vmap`` copies them first, and its gradient is slower than memory allows.
    """

    def __init__(self, layer: nn.MaxPool2d) -> None:
        super().__init__(layer.kernel_size, layer.stride)
        self.window = _pair(layer.kernel_size)

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is max-pooling over adjacent windows without overlap."""
        return (
            type(layer) is nn.MaxPool2d
            and not has_hooks(layer)
            and _pair(layer.stride) == _pair(layer.kernel_size)
            and _pair(layer.padding) == (0, 0)
            and _pair(layer.dilation) == (1, 1)
            and not layer.ceil_mode
            and not layer.return_indices
        )

    def forward(self, x: Tensor) -> Tensor:
        """Take the maximum over the windows of a batch ``[samples, channels, height, width]``."""
        return self.pooled(x, relu=False)

    def pooled(self, x: Tensor, *, relu: bool) -> Tensor:
        """Take the maximum over windows, after a ReLU if asked to."""
        down, across = self.window
        # The kernels store the position of the maximum of a window in a byte.
        fits = x.dim() == 4 and x.shape[2] >= down and x.shape[3] >= across and down * across <= 127
        if fits and (kernels := kernels_for_pass(x)) is not None:
            pooled: Tensor = kernels.max_pool(x, self.window, relu)
            return pooled
        return _with_gradient_in_layout(super().forward(x.relu() if relu else x))


def _with_gradient_in_layout(y: Tensor) -> Tensor:
    """Lay the gradient of pooled images out as they are, if they have channels innermost.

    A flattened result has a gradient with channels outermost. For it, PyTorch's max-pooling copies
    the gradient of the images, which is larger, on a CPU to that layout and back.
    """
    # Inside transforms the layout is not known.
    if y.device.type != "cpu" or y.dim() != 4 or transforms() or not y.requires_grad:
        return y
    if not y.is_contiguous() and y.is_contiguous(memory_format=torch.channels_last):
        # Not a function of autograd: its result could not be changed in place, as a ReLU may do.
        y.register_hook(_channels_innermost)
    return y


def _channels_innermost(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


class Sequential(nn.Sequential):
    """A sequence of layers in which a neighbour does the work of a ReLU, stacked on a GPU.

    The kernels of convolutions and BatchNorm set negative results to zero before they write them.
    Where max-pooling follows, its kernel does: the maximum is the same, and so is the gradient. In
    evaluation of a shared model, which needs no gradient, the kernel of a convolution also pools.
    Dropout before vectors writes them in the order in which they are flattened.
    """

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is an ordinary sequence in which a ReLU has such a neighbour."""
        if type(layer) is not nn.Sequential or has_hooks(layer):
            return False
        return any(
            (_is_relu(second) and (Convolution.replaces(first) or BatchNorm.replaces(first)))
            or (_is_relu(first) and MaxPool.replaces(second))
            for first, second in pairwise(layer)
        )

    @staticmethod
    def on_device(x: Tensor) -> bool:
        """Return whether a batch is on a device that kernels may exist for."""
        return x.is_cuda

    def forward(self, x: Tensor) -> Tensor:
        """Apply one layer after the other."""
        forward = current_pass()
        if forward is None or not forward.wide or not self.on_device(x):
            made: Tensor = super().forward(x)
            return made
        layers: list[nn.Module | None] = [*self, None]
        index = 0
        while (layer := layers[index]) is not None:
            if forward.shared and (pooled := _pooled_at_once(x, layers[index:])) is not None:
                x, index = pooled, index + 3
                continue
            after, index = layers[index + 1], index + 1
            if _is_relu(layer) and type(after) is MaxPool and not has_hooks(after):
                x, index = after.pooled(x, relu=True), index + 1
            elif type(layer) is Dropout and _flattens(after) and not has_hooks(layer):
                x = layer(x, contiguous=True)
            elif not _is_relu(after) or has_hooks(layer) or type(layers[index + 1]) is MaxPool:
                x = layer(x)
            elif type(layer) is Convolution:
                x, index = layer.convolved(x, relu=True), index + 1
            elif type(layer) is BatchNorm:
                x, index = layer.normalised(x, relu=True), index + 1
            else:
                x = layer(x)
        return x


def _pooled_at_once(x: Tensor, layers: list[nn.Module | None]) -> Tensor | None:
    """Return what a convolution, a ReLU and max-pooling make of a batch, if one kernel can do it.

    ``layers`` are all that follow, and ``None``.
    """
    first, relu, pool = (*layers[:3], None, None)[:3]
    if type(first) is not Convolution or not _is_relu(relu) or type(pool) is not MaxPool:
        return None
    if has_hooks(first) or has_hooks(pool) or torch.is_grad_enabled() or transforms():
        return None
    # Dropout does nothing in evaluation.
    behind = next((layer for layer in layers[3:] if type(layer) is not Dropout), None)
    return first.convolved_and_pooled(x, pool.window, flattened=_flattens(behind))


def _flattens(layer: nn.Module | None) -> bool:
    """Return whether a layer flattens samples."""
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def _is_relu(layer: nn.Module | None) -> bool:
    """Return whether a layer is PyTorch's ReLU and nothing else."""
    return type(layer) is nn.ReLU and not has_hooks(layer)


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    """Return height and width, which may be given as one number."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
