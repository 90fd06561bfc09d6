"""BatchNorm that ignores padding, and LayerNorm, both with correct second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.models.frozen import transforms
from equipoise.models.passes import current_pass, kernels_for_pass, stacked_on_gpu
from equipoise.models.replacing import adopt, has_hooks


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
        adopt(self, layer)
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
        forward = current_pass()
        if forward is None:
            y = super().forward(x)
            return y.relu() if relu else y
        mask = forward.mask
        lone = mask is None and x.numel() == x.shape[1]
        rests = self.running_mean is not None and (lone or not (forward.train and self.moves))
        fits = self.weight is None or self.weight.dtype == torch.float32
        if not rests and fits and (kernels := kernels_for_pass(x, "norms")) is not None:
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
        if not stacked_on_gpu(x):
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
        if transforms():
            # What changes in place must have the clients' axis, and all clients share the
            # statistics of the received model.
            zero = torch.zeros_like(x.flatten()[:1])
            mean, var = self.running_mean + zero, self.running_var + zero
        else:
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
        adopt(self, layer)

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
