"""Dropout whose random numbers are hashes, as functions and as a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.passes import current_pass, kernels_for_pass, next_key
from equipoise.random import keep_mask


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


def dropped(
    x: Tensor, p: float, key: Tensor, channels: bool = False, *, contiguous: bool = False
) -> Tensor:
    """Drop elements, or whole channels, of a batch, and scale what is left.

    With ``contiguous``, the result of the GPU kernels is contiguous, so that flattening it needs no
    copy.

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
    if not channels and (kernels := kernels_for_pass(x)) is not None:
        factors: Tensor = kernels.dropout_factors(key, x.shape, threshold).to(x.dtype)
        # The result has the layout of the first operand. The factors are contiguous.
        return factors * x if contiguous else x * factors
    kept, share = kept_units(x, p, key, channels)
    return x * (kept.to(x.dtype) * (1 / share))


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

    def forward(self, x: Tensor, *, contiguous: bool = False) -> Tensor:
        """Drop elements, or whole channels, of a batch; see :func:`dropped`."""
        forward = current_pass()
        if forward is None:
            drop = F.dropout2d if self.channels else F.dropout
            return drop(x, self.p, self.training)
        if not (forward.train and self.moves):
            return x
        key = next_key(self, self.layer)
        if key is None:
            return x
        return dropped(x, self.p, key, self.channels, contiguous=contiguous)
