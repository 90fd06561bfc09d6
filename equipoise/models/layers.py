"""Layers whose behaviour must not depend on which clients, or how much padding, share the batch.

``convert`` replaces a model's BatchNorm, LayerNorm, Dropout, linear, convolution, max-pooling and
padded embedding layers by these, sequences of some of them by one that does several in one go, and
recurrent layers by those of :mod:`equipoise.models.sequences`.
Outside the engine they behave exactly like the layers they replace, so a finished model is an
ordinary ``nn.Module``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.models.frozen import Frozen, transforms
from equipoise.models.linear_products import Product
from equipoise.models.patches import PatchProduct
from equipoise.random import fold_tensor, keep_mask

L = TypeVar("L", bound=nn.Module)


@dataclass(frozen=True)
class Forward:
    """What layers must know about a forward pass: set by the engine, read by the layers below.

    Attributes
    ----------
    train : bool
        Whether dropout drops and BatchNorm uses the batch's own statistics.
    mask : Tensor or None
        Which rows of the batch are samples and not padding; ``None`` when all are.
    key : Tensor or None
        Key of the random numbers of this client, phase and step.
    stacked : bool
        Whether this is one of many clients under ``vmap``.
    shared : bool
        Whether one model evaluates the samples of many clients, without gradients.
    factored : bool
        Whether gradients by weights may be left as factors: see
        :mod:`equipoise.models.factored`.
    """

    train: bool
    mask: Tensor | None = None
    key: Tensor | None = None
    stacked: bool = False
    shared: bool = False
    factored: bool = False

    @property
    def wide(self) -> bool:
        """Whether the samples of many clients are processed at a time."""
        return self.stacked or self.shared


_current: Forward | None = None
# How often each layer with dropout has drawn in the current pass, and how often functions have in
# each part.
_calls: dict[nn.Module | str, int] = {}
# The part of the model that is being applied.
_part = ""


@contextmanager
def forward_pass(forward: Forward, part: str = "") -> Iterator[None]:
    """Show the layers of this module ``forward`` while the block applies a part of the model."""
    global _current, _calls, _part
    before, _current, _calls, _part = (_current, _calls, _part), forward, {}, part
    try:
        yield
    finally:
        _current, _calls, _part = before


def enter_part(part: str) -> None:
    """Say that the current pass goes on with another part of the model.

    The functions of each part draw random numbers of their own.
    """
    global _part
    _part = part


def current_pass() -> Forward | None:
    """Return the state of the engine's current forward pass, or ``None`` outside the engine."""
    return _current


def next_key(owner: nn.Module | None, number: int) -> Tensor | None:
    """Return the key of a draw in the current pass. Each call returns another key.

    Keys of layers depend on the layer's number. Those of functions depend on the part of the model
    and on how many of them have drawn before, so that a part draws the same numbers alone and in a
    pass of the whole model.

    Parameters
    ----------
    owner : nn.Module or None
        The layer that draws; ``None`` for a function that is called by a model's own code.
    number : int
        The number of the layer; 0 for a function.
    """
    if _current is None or _current.key is None:
        return None
    who: nn.Module | str = _part if owner is None else owner
    calls = _calls.get(who, 0)
    _calls[who] = calls + 1
    if owner is None:
        return fold_tensor(_current.key, number, zlib.crc32(_part.encode()), calls)
    key = fold_tensor(_current.key, number)
    # A layer that is called again in the same pass draws new numbers.
    return fold_tensor(key, calls) if calls else key


def kept_units(x: Tensor, p: float, key: Tensor, channels: bool) -> tuple[Tensor, float]:
    """Draw which elements, or channels, of a batch dropout keeps; samples are along the first axis.

    Returns
    -------
    tuple
        A boolean mask that broadcasts to the batch, and the probability of keeping, a multiple of
        1/65536.
    """
    threshold = round((1 - p) * 65536)
    shape = x.shape[:2] + (1,) * (x.dim() - 2) if channels else x.shape
    return keep_mask(key, torch.Size(shape), threshold), threshold / 65536


def dropped(x: Tensor, p: float, key: Tensor, channels: bool = False) -> Tensor:
    """Drop elements, or whole channels, of a batch, and scale what is left.

    Examples
    --------
    >>> dropped(torch.ones(4), 1.0, torch.tensor(0)), dropped(torch.ones(4), 0.0, torch.tensor(0))
    (tensor([0., 0., 0., 0.]), tensor([1., 1., 1., 1.]))
    """
    threshold = round((1 - p) * 65536)
    if threshold == 65536:
        return x
    if threshold == 0:
        return torch.zeros_like(x)
    if not channels and (kernels := _kernels(x)) is not None:
        factors: Tensor = kernels.dropout_factors(key, x.shape, threshold)
        return x * factors.to(x.dtype)
    kept, share = kept_units(x, p, key, channels)
    return x * (kept.to(x.dtype) * (1 / share))


def _kernels(x: Tensor, name: str = "kernels") -> Any:
    """Return a module of GPU kernels if they can serve this pass, else ``None``."""
    if not _wide_on_gpu(x) or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    return _module_with_triton(name, x.device)


@cache
def _module_with_triton(name: str, device: torch.device) -> Any:
    """Import a module of GPU kernels when it is first needed; ``None`` if Triton does not work.

    Triton takes long to import, and builds of PyTorch for CPUs do not have it.
    """
    if find_spec("triton") is None or not import_module("equipoise.models.kernels").work_on(device):
        return None
    return import_module(f"equipoise.models.{name}")


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over the samples of one client, whose statistics ignore padding rows.

    A batch with a single value per channel has no variance. It is normalised with the running
    statistics, which do not change. New statistics are assigned, never written in place, so that
    the caller decides whether to keep them. A layer without running statistics normalises every
    batch by its own, also in evaluation, like PyTorch's.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        if layer.momentum is None:
            raise InputError(
                "BatchNorm with momentum=None (a cumulative average) cannot be federated; give it "
                "a momentum"
            )
        super().__init__(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            device="meta",
        )
        _adopt(self, layer)
        # A count of batches has no meaning after averaging, and nothing reads it while momentum is
        # a number.
        self.num_batches_tracked = None
        # Set by the engine: statistics of a part that does not move in this phase are frozen with
        # it.
        self.moves = True

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer normalises as PyTorch's do, and does nothing else."""
        kind = type(layer)
        usual = (
            kind.forward is nn.modules.batchnorm._BatchNorm.forward
            and kind.train is nn.Module.train
        )
        return kind is nn.SyncBatchNorm or (
            usual and isinstance(layer, nn.modules.batchnorm._BatchNorm)
        )

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise InputError(
                f"BatchNorm needs at least two dimensions (samples, channels), got {x.dim()}"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch ``[samples, channels, ...]``."""
        return self.normalised(x, relu=False)

    def normalised(self, x: Tensor, *, relu: bool) -> Tensor:
        """Normalise a batch, and set what is negative to zero if asked to."""
        if _current is None:
            y = super().forward(x)
            return y.relu() if relu else y
        mask = _current.mask
        lone = mask is None and x.numel() == x.shape[1]
        rests = self.running_mean is not None and (lone or not (_current.train and self.moves))
        fits = self.weight is None or self.weight.dtype == torch.float32
        if not rests and fits and (kernels := _kernels(x, "norms")) is not None:
            return self._followed(partial(kernels.norm, relu=relu), x, mask)
        # Autocast may have lowered the input. Statistics stay in the precision of the parameters;
        # the result has the input's, as PyTorch's has.
        lowered = x.dtype if torch.is_autocast_enabled(x.device.type) else None
        x = x if self.weight is None else x.to(self.weight.dtype)
        if rests:
            y = self._at_rest(x)
        elif mask is None and not lone and not _nested():
            y = self._whole(x)
        else:
            y = self._followed(masked_norm, x, x.new_ones(len(x)) if mask is None else mask)
        y = y if lowered is None else y.to(lowered)
        return y.relu() if relu else y

    def _at_rest(self, x: Tensor) -> Tensor:
        """Normalise by the running statistics."""
        mean, var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        if not _stacked_on_gpu(x):
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        # PyTorch's function cannot be stacked on a GPU if channels are innermost in memory.
        column = (-1,) + (1,) * (x.dim() - 2)
        scale = (var + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        y = (x - mean.view(column)) * scale.view(column)
        return y if self.bias is None else y + self.bias.view(column)

    def _whole(self, x: Tensor) -> Tensor:
        if self.running_mean is None or self.running_var is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum or 0.0, self.eps)
        self.running_mean, self.running_var = mean, var
        return y

    def _followed(
        self, normalise: Callable[..., tuple[Tensor, Any, Any]], x: Tensor, mask: Tensor | None
    ) -> Tensor:
        old = self.running_mean, self.running_var
        y, *new = normalise(
            x, mask, self.weight, self.bias, *old, momentum=self.momentum or 0.0, eps=self.eps
        )
        if self.running_mean is not None:
            self.running_mean, self.running_var = new
        return y


def masked_norm(
    x: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise a batch by the statistics of the rows that are not padding.

    Parameters
    ----------
    x : Tensor
        A batch ``[samples, channels, ...]``.
    mask : Tensor
        Which rows are samples (one) and which padding (zero), ``[samples]``.
    weight, bias : Tensor or None
        ``[channels]``.
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

    Examples
    --------
    >>> x, mask = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([1.0, 1.0, 0.0])
    >>> masked_norm(x, mask, None, None, None, None, momentum=0.1, eps=0.0)[0].flatten()
    tensor([-1.,  1.,  7.])
    """
    across = [0, *range(2, x.dim())]
    column = (1, -1) + (1,) * (x.dim() - 2)
    rows = mask.to(x.dtype).view(-1, *(1,) * (x.dim() - 1))
    positions = x.shape[2:].numel()
    count = mask.sum().to(x.dtype) * positions
    mean = (x * rows).sum(across) / count
    centred = (x - mean.view(column)) * rows
    var = centred.square().sum(across) / count
    new_mean, new_var = mean.detach(), var.detach()
    if running_mean is not None and running_var is not None:
        enough = count > 1
        blend = enough.to(x.dtype) * momentum
        unbiased = new_var * count / (count - 1).clamp(min=1)
        new_mean = running_mean + blend * (new_mean - running_mean)
        new_var = running_var + blend * (unbiased - running_var)
        mean, var = torch.where(enough, mean, running_mean), torch.where(enough, var, running_var)
    y = (x - mean.view(column)) * (var + eps).rsqrt().view(column)
    y = y if weight is None else y * weight.view(column)
    return y if bias is None else y + bias.view(column), new_mean, new_var


class LayerNorm(nn.LayerNorm):
    """LayerNorm with correct second derivatives, also for stacked clients.

    Parameters
    ----------
    layer : nn.LayerNorm
        The layer to replace.

    Examples
    --------
    >>> LayerNorm(nn.LayerNorm(2, eps=0.0, elementwise_affine=False))(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.])
    """

    def __init__(self, layer: nn.LayerNorm) -> None:
        super().__init__(layer.normalized_shape, layer.eps, device="meta")
        _adopt(self, layer)

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is exactly PyTorch's class and not a subclass."""
        return type(layer) is nn.LayerNorm and not has_hooks(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axes of a tensor."""
        if not _nested():
            return super().forward(x)
        x = x if self.weight is None else x.to(self.weight.dtype)
        across = [axis - len(self.normalized_shape) for axis in range(len(self.normalized_shape))]
        centred = x - x.mean(across, keepdim=True)
        y = centred * (centred.square().mean(across, keepdim=True) + self.eps).rsqrt()
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


def _nested() -> bool:
    """Return whether one transform of ``torch.func`` is inside another, as a gradient in ``vmap``.

    PyTorch's rules for the gradients of BatchNorm and LayerNorm under ``vmap`` treat mean and
    variance as constants if they are differentiated again
    (https://github.com/pytorch/functorch/issues/534).
    """
    return len(transforms()) > 1


class Dropout(nn.Module):
    """Dropout whose mask is a hash of the client, phase, step and layer.

    With ``channels`` whole channels are dropped, as ``nn.Dropout2d`` does. The probability is
    rounded to a multiple of 1/65536 and the scale follows the rounded value, so the expectation is
    exact.
    """

    def __init__(self, p: float, layer: int, channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.channels = p, layer, channels
        # Set by the engine: what does not move in this phase sees the features it will see when it
        # is used.
        self.moves = True

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements, or whole channels, of a batch."""
        if _current is None:
            drop = F.dropout2d if self.channels else F.dropout
            return drop(x, self.p, self.training)
        if not (_current.train and self.moves):
            return x
        key = next_key(self, self.layer)
        return x if key is None else dropped(x, self.p, key, self.channels)


class Linear(nn.Linear):
    """A linear layer with one matrix product per client, whatever the leading axes of its input.

    If ``[samples, tokens, width]`` is not contiguous in memory, ``vmap`` multiplies stacked weights
    by it once for every sample, and copies the weights for each. With all leading axes in one there
    is nothing to copy.

    Parameters
    ----------
    layer : nn.Linear
        The layer to replace.

    Examples
    --------
    >>> Linear(nn.Linear(4, 3))(torch.zeros(2, 5, 4)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(
            layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
        )
        _adopt(self, layer)
        # Set by Frozen: weights and bias are never trained.
        self.constant = False

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is an ordinary linear one, without hooks as of ``weight_norm``."""
        return type(layer) is nn.Linear and not has_hooks(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last axis of a tensor by the weights."""
        if x.dim() < 3:
            return self._product(x)
        return self._product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def _product(self, x: Tensor) -> Tensor:
        products = _split_products(x) if self.constant else None
        if products is not None:
            made: Tensor = products.SplitProduct.apply(x, self.weight, self.bias)
            return made
        factored = _current is not None and _current.factored
        if self.constant or x.dim() != 2 or not (factored or _is_stacked()):
            return super().forward(x)
        return _product(x, self.weight, self.bias, factored=factored)


def _is_stacked() -> bool:
    """Return whether this is a pass of stacked clients."""
    return _current is not None and _current.stacked


def _stacked_on_gpu(x: Tensor) -> bool:
    """Return whether this is a pass of stacked clients on a GPU."""
    return _current is not None and _current.stacked and x.is_cuda


def _wide_on_gpu(x: Tensor) -> bool:
    """Return whether this pass, on a GPU, has enough samples for the kernels of stacked clients."""
    return _current is not None and _current.wide and x.is_cuda


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, factored: bool = False) -> Tensor:
    """Do what ``F.linear`` does, with a gradient that lies in memory as the weights do.

    With ``factored`` the gradient by the weights may be left as factors.
    """
    given: tuple[Tensor | None, ...] = (x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        lowered = torch.get_autocast_dtype(x.device.type)
        given = tuple(None if tensor is None else tensor.to(lowered) for tensor in given)
    ours = factored or _has_few_rows(x, weight)
    multiply = import_module("equipoise.models.factored").product if ours else Product.apply
    made: Tensor = multiply(*given)
    return made


def _has_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether a batch has so few rows that there are kernels for it, in float32."""
    in_float32 = x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    if not in_float32 or not _stacked_on_gpu(x):
        return False
    kernels = _module_with_triton("row_kernels", x.device)
    return kernels is not None and kernels.pay_for(len(x), *weight.shape)


def _split_products(x: Tensor) -> Any:
    """Return the module of split products if they can serve a matrix and are faster."""
    in_float32 = x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    if not in_float32 or x.dim() != 2 or torch.backends.cuda.matmul.allow_tf32 or transforms():
        return None
    products = _module_with_triton("products", x.device)
    return products if products is not None and products.pay_on(x.device) else None


# From this ratio on, channels innermost pay on a CPU. Measured with the layers of ResNet-18.
_IMAGES_TO_WEIGHTS = 8


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
        _adopt(self, layer)
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
        y = super().forward(self._laid_out(x)) if self._in_groups(x) else self._by_patches(x)
        return y.relu() if relu else y

    def _laid_out(self, x: Tensor) -> Tensor:
        """Lay images out as a CPU convolves them fastest, if results may lie in any layout.

        That is with channels innermost, unless the weights, which PyTorch then copies, are large.
        Under ``vmap`` the layout cannot be chosen.
        """
        in_engine = _current is not None and not transforms()
        plain = x.dim() == 4 and x.device.type == "cpu" and x.dtype == torch.float32
        if not (self.channels_innermost and in_engine and plain):
            return x
        pays = x.numel() >= _IMAGES_TO_WEIGHTS * self.weight.numel()
        layout = torch.channels_last if pays else torch.contiguous_format
        return x.contiguous(memory_format=layout)

    def _in_groups(self, x: Tensor) -> bool:
        """Return whether PyTorch's own convolution is the better one if there are no kernels."""
        stacked = _stacked_on_gpu(x) and x.dim() == 4
        lowered = torch.is_autocast_enabled("cuda") or torch.backends.cudnn.allow_tf32
        return not stacked or lowered or self.dilation != (1, 1) or self.groups > 1

    def _by_patches(self, x: Tensor) -> Tensor:
        y, _ = PatchProduct.apply(x, self.weight, self.stride, self.padding)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)


def _is_depthwise(layer: nn.Conv2d) -> bool:
    """Return whether every channel has a kernel of its own, which reads that channel alone."""
    return 1 < layer.groups == layer.in_channels == layer.out_channels


def _convolutions(x: Tensor, weight: Tensor) -> Any:
    """Return the module of convolutions if they can serve this pass, else ``None``."""
    if not _wide_on_gpu(x) or x.dim() != 4:
        return None
    lowered = torch.is_autocast_enabled("cuda")
    types = (torch.float32, torch.bfloat16) if lowered else (torch.float32,)
    if x.dtype not in types or weight.dtype != torch.float32:
        return None
    if lowered and torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return None
    return _module_with_triton("convolutions", x.device)


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
        if fits and (kernels := _kernels(x)) is not None:
            pooled: Tensor = kernels.max_pool(x, self.window, relu)
            return pooled
        return super().forward(x.relu() if relu else x)


class Sequential(nn.Sequential):
    """A sequence of layers in which a neighbour does the work of a ReLU, stacked on a GPU.

    The kernels of convolutions and BatchNorm set negative results to zero before they write them.
    Where max-pooling follows, its kernel does: the maximum is the same, and so is the gradient.
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
        if _current is None or not _current.wide or not self.on_device(x):
            made: Tensor = super().forward(x)
            return made
        layers: list[nn.Module | None] = [*self, None]
        index = 0
        while (layer := layers[index]) is not None:
            after, index = layers[index + 1], index + 1
            if _is_relu(layer) and type(after) is MaxPool and not has_hooks(after):
                x, index = after.pooled(x, relu=True), index + 1
            elif not _is_relu(after) or has_hooks(layer) or type(layers[index + 1]) is MaxPool:
                x = layer(x)
            elif type(layer) is Convolution:
                x, index = layer.convolved(x, relu=True), index + 1
            elif type(layer) is BatchNorm:
                x, index = layer.normalised(x, relu=True), index + 1
            else:
                x = layer(x)
        return x


def _is_relu(layer: nn.Module | None) -> bool:
    """Return whether a layer is PyTorch's ReLU and nothing else."""
    return type(layer) is nn.ReLU and not has_hooks(layer)


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    """Return height and width, which may be given as one number."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


class Embedding(nn.Embedding):
    """An embedding whose padding row never moves, stacked or not.

    PyTorch's rule for ``vmap`` moves it.
    """

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__(
            layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta"
        )
        _adopt(self, layer)

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is an embedding with padding and no other special options."""
        return (
            type(layer) is nn.Embedding
            and layer.padding_idx is not None
            and layer.max_norm is None
            and not (layer.sparse or layer.scale_grad_by_freq)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Look up the vectors of a batch of integers."""
        numbers = torch.arange(self.num_embeddings, device=self.weight.device).unsqueeze(1)
        padding = numbers.eq(cast(int, self.padding_idx))
        return F.embedding(x, torch.where(padding, self.weight.detach(), self.weight))


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def convert(module: nn.Module) -> nn.Module:
    """Replace PyTorch's layers, at any depth, by their counterparts in this module.

    Parameters and buffers keep their names, their values and their identity, so shared ones stay
    shared. Subclasses of PyTorch's classes are not replaced if they behave differently. Nothing
    inside a ``Frozen`` is replaced, because it gets the samples of all clients as one ordinary
    batch, in evaluation mode.

    Examples
    --------
    >>> module = convert(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.5)))
    >>> [type(layer).__module__ for layer in module]
    ['equipoise.models.layers', 'torch.nn.modules.activation', 'equipoise.models.layers']
    """
    # Imported here, because that module imports this one.
    from equipoise.models.sequences import Recurrent

    dropouts = 0
    # A layer that is used in two places stays one layer.
    done: dict[nn.Module, nn.Module] = {}

    def replaced(layer: nn.Module) -> nn.Module:
        if layer not in done:
            done[layer] = counterpart(layer)
            if isinstance(layer, Frozen):
                return layer
            for name, child in done[layer]._modules.items():
                done[layer]._modules[name] = None if child is None else replaced(child)
        return done[layer]

    def counterpart(layer: nn.Module) -> nn.Module:
        nonlocal dropouts
        if type(layer) in DROPOUTS:
            dropouts += 1
            probability, channels = cast(nn.Dropout, layer).p, type(layer) is not nn.Dropout
            return _watch(Dropout(probability, dropouts, channels), layer)
        if Recurrent.replaces(layer):
            recurrent = cast(nn.RNNBase, layer)
            dropouts += bool(recurrent.dropout)
            return Recurrent(recurrent, dropouts)
        if Sequential.replaces(layer):
            sequence = Sequential()
            sequence._modules.update(layer._modules)  # type: ignore[arg-type]
            sequence.training = layer.training
            return sequence
        for kind in (BatchNorm, LayerNorm, Linear, Convolution, MaxPool, Embedding):
            if not isinstance(layer, kind) and kind.replaces(layer):
                return cast(nn.Module, kind(layer))  # type: ignore[arg-type]
        return layer

    made = replaced(module)
    parts = list(made.modules())
    channels_innermost = all(map(_takes_any_layout, parts))
    for part in parts:
        if isinstance(part, Convolution):
            part.channels_innermost = channels_innermost
    return made


# Layers of PyTorch that can be stacked however images lie in memory. GroupNorm and adaptive pooling
# cannot.
_ANY_LAYOUT = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardtanh, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.Linear),
)
# Where code is that calls such layers only.
_ANY_LAYOUT_IN = ("equipoise.models.", "transformers.models.resnet.")


def _takes_any_layout(part: nn.Module) -> bool:
    """Return whether a module can be stacked however images lie in memory.

    A model's own code may call anything.
    """
    return type(part) in _ANY_LAYOUT or type(part).__module__.startswith(_ANY_LAYOUT_IN)


_HOOKS = [name for name in vars(nn.Identity()) if name.startswith(("_forward", "_backward"))]


def has_hooks(layer: nn.Module) -> bool:
    """Return whether a layer has hooks, which may change its output."""
    return any(getattr(layer, hooks) for hooks in _HOOKS)


def _watch(new: L, old: nn.Module) -> L:
    """Make one layer call the hooks of another."""
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(old, hooks))
    return new


def _adopt(new: nn.Module, old: nn.Module) -> None:
    """Make one layer use the parameters, buffers and hooks of another."""
    new._parameters.update(old._parameters)
    new._buffers.update(old._buffers)
    _watch(new, old)
