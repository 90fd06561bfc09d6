"""Layers whose behaviour must not depend on which clients, or how much padding, share the batch.

``convert`` replaces a model's BatchNorm and Dropout layers by these. Outside the engine they behave exactly like the
layers they replace, so a finished model is an ordinary ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.engine.random import fold_tensor, keep_mask
from equipoise.errors import InputError


@dataclass(frozen=True)
class Forward:
    """What a layer must know about the forward pass it takes part in: set by the engine, read by the layers below.

    Attributes
    ----------
    train : bool
        Whether dropout drops and BatchNorm uses the batch's own statistics.
    mask : Tensor or None
        Which rows of the batch are samples and not padding; ``None`` when all are.
    key : Tensor or None
        Key of the random numbers of this client, phase and step.
    """

    train: bool
    mask: Tensor | None = None
    key: Tensor | None = None


_current: Forward | None = None


@contextmanager
def forward_pass(forward: Forward) -> Iterator[None]:
    """Make ``forward`` what the layers of this module see while the block runs."""
    global _current
    before, _current = _current, forward
    try:
        yield
    finally:
        _current = before


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over the samples of one client: padding rows never enter its statistics.

    A batch that leaves a channel a single value has no variance; it is normalised with the running statistics, and leaves
    them alone. New statistics are assigned, never written in place, so that the caller decides whether to keep them.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        if layer.momentum is None:
            raise InputError("BatchNorm with momentum=None (a cumulative average) cannot be federated; give it a momentum")
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self.load_state_dict(layer.state_dict())
        # A count of batches has no meaning after averaging, and nothing reads it while momentum is a number.
        self.num_batches_tracked = None
        # Set by the engine: statistics of a part that does not move in this phase are frozen with it.
        self.moves = True

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise InputError(f"BatchNorm needs at least two dimensions (samples, channels), got {x.dim()}")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch ``[samples, channels, ...]``."""
        if _current is None:
            return super().forward(x)
        if not (_current.train and self.moves):
            return self._with_running_statistics(x)
        if _current.mask is None:
            return self._whole(x)
        return self._masked(x, _current.mask)

    def _with_running_statistics(self, x: Tensor) -> Tensor:
        use_batch = self.running_mean is None
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, use_batch, 0.0, self.eps)

    def _whole(self, x: Tensor) -> Tensor:
        if x.numel() == x.shape[1]:
            return self._with_running_statistics(x)
        if self.running_mean is None or self.running_var is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum or 0.0, self.eps)
        self.running_mean, self.running_var = mean, var
        return y

    def _masked(self, x: Tensor, mask: Tensor) -> Tensor:
        across = [0, *range(2, x.dim())]
        column = (1, -1) + (1,) * (x.dim() - 2)
        rows = mask.to(x.dtype).view(-1, *(1,) * (x.dim() - 1))
        positions = x.shape[2:].numel()
        count = mask.sum().to(x.dtype) * positions
        mean = (x * rows).sum(across) / count
        centred = (x - mean.view(column)) * rows
        var = centred.square().sum(across) / count
        if self.running_mean is not None and self.running_var is not None:
            enough = count > 1
            blend = enough.to(x.dtype) * (self.momentum or 0.0)
            unbiased = var.detach() * count / (count - 1).clamp(min=1)
            old_mean, old_var = self.running_mean, self.running_var
            self.running_mean = old_mean + blend * (mean.detach() - old_mean)
            self.running_var = old_var + blend * (unbiased - old_var)
            mean, var = torch.where(enough, mean, old_mean), torch.where(enough, var, old_var)
        y = (x - mean.view(column)) * (var + self.eps).rsqrt().view(column)
        return y if self.weight is None else y * self.weight.view(column) + self.bias.view(column)


class Dropout(nn.Module):
    """Dropout whose mask is a hash of the client, phase, step and layer.

    With ``channels`` whole channels are dropped, as ``nn.Dropout2d`` does. The probability is rounded to a multiple of
    1/65536 and the scale follows the rounded value, so the expectation is exact.
    """

    def __init__(self, p: float, layer: int, channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.channels = p, layer, channels

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements, or whole channels, of a batch."""
        if _current is None:
            drop = F.dropout2d if self.channels else F.dropout
            return drop(x, self.p, self.training)
        threshold = round((1 - self.p) * 65536)
        if not _current.train or _current.key is None or threshold == 65536:
            return x
        if threshold == 0:
            return torch.zeros_like(x)
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channels else x.shape
        kept = keep_mask(fold_tensor(_current.key, self.layer), torch.Size(shape), threshold)
        return x * (kept.to(x.dtype) * (65536 / threshold))


def convert(module: nn.Module) -> nn.Module:
    """Replace BatchNorm and Dropout layers, at any depth, by the ones above; parameters and buffers keep their names.

    Examples
    --------
    >>> convert(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
    Sequential(
      (0): Linear(in_features=2, out_features=3, bias=True)
      (1): BatchNorm(3, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
      (2): Dropout()
    )
    """
    dropouts = 0

    def replaced(layer: nn.Module) -> nn.Module:
        nonlocal dropouts
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, BatchNorm):
            return BatchNorm(layer).to(next(layer.buffers()).dtype if layer.track_running_stats else None)
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            dropouts += 1
            return Dropout(layer.p, dropouts, channels=not isinstance(layer, nn.Dropout))
        for name, child in layer.named_children():
            if (new := replaced(child)) is not child:
                setattr(layer, name, new)
        return layer

    return replaced(module)
