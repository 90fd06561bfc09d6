"""Convolutions of small images with large weights as products, on processors for which that pays.

oneDNN copies weights to a layout of its own before it convolves, and the gradient by the weights
back. Where weights have more numbers than the patches of all images, the copies take longer than
the arithmetic. A product of weights and patches needs none. Results differ by rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.models import cpu_products
from equipoise.models.adjoints import Adjoint

# Copies of fewer weights cost little, and so do copies of weights that are used at many positions.
# Measured with the layers of ResNet-18 and batches of 4 to 32 images.
_FEWEST_WEIGHTS, _WEIGHTS_TO_PATCHES = 1_000_000, 2


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:
    """Do what ``F.conv2d`` does, on a CPU in the faster way.

    Parameters
    ----------
    x : Tensor
        Images ``[samples, channels, height, width]``.
    weight : Tensor
        ``[results, channels, kernel height, kernel width]``.
    bias : Tensor, optional
        ``[results]``.
    stride, padding : tuple of int
        Down and across.

    Returns
    -------
    Tensor
        ``[samples, results, new height, new width]``. Any number of derivatives can be taken.

    Examples
    --------
    >>> convolve(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), None, (1, 1), (0, 0))
    tensor([[[[4.]]]])
    """
    can_pay = x.dim() == 4 and x.shape[1] == weight.shape[1] and weight.numel() >= _FEWEST_WEIGHTS
    if not can_pay or not cpu_products.can_multiply(x, weight):
        return F.conv2d(x, weight, bias, stride, padding)
    windows = Windows(x.shape, weight.shape[2:], stride, padding)
    height, width = windows.positions
    # Weights and patches have a row per result and per position, which are equally long.
    if not 0 < _WEIGHTS_TO_PATCHES * len(x) * height * width <= len(weight):
        return F.conv2d(x, weight, bias, stride, padding)
    patches = Adjoint.apply(x, windows.cut, windows.fold)
    made: Tensor = cpu_products.Product.apply(weight.flatten(1), patches, None)
    y = made.unflatten(1, (height, width, len(x))).permute(3, 0, 1, 2).contiguous()
    return y if bias is None else y + bias.view(-1, 1, 1)


@dataclass(frozen=True)
class Windows:
    """The windows of images that a convolution reads.

    Parameters
    ----------
    images : torch.Size
        The shape of the images.
    kernel : torch.Size
        Height and width of a window.
    stride, padding : tuple of int
        Down and across.
    """

    images: torch.Size
    kernel: torch.Size
    stride: tuple[int, int]
    padding: tuple[int, int]

    @cached_property
    def positions(self) -> tuple[int, int]:
        """The number of positions of a window, down and across; 0 where it does not fit."""
        down, across = (
            max(0, (size + 2 * edge - window) // step + 1)
            for size, window, step, edge in zip(
                self.images[2:], self.kernel, self.stride, self.padding, strict=True
            )
        )
        return down, across

    def cut(self, x: Tensor) -> Tensor:
        """Cut images into patches ``[positions * samples, channels * window]``."""
        (down, across), (top, left) = self.stride, self.padding
        # With samples innermost, long runs of numbers are copied.
        images = F.pad(x.permute(1, 2, 3, 0), [0, 0, left, left, top, top])
        windows = images.unfold(1, self.kernel[0], down).unfold(2, self.kernel[1], across)
        return windows.permute(0, 4, 5, 1, 2, 3).flatten(0, 2).flatten(1).mT

    def fold(self, patches: Tensor) -> Tensor:
        """Add the numbers of patches up where windows overlap, and return images.

        This is the adjoint of :meth:`cut`.
        """
        samples, channels, height, width = self.images
        (top, left), (high, wide) = self.padding, self.positions
        shares = patches.unflatten(1, (channels, *self.kernel))
        shares = shares.unflatten(0, (high, wide, samples))
        padded = patches.new_zeros(height + 2 * top, width + 2 * left, samples, channels)
        for i, j in product(*map(range, self.kernel)):
            down, across = (
                slice(first, first + step * (count - 1) + 1, step)
                for first, step, count in zip((i, j), self.stride, (high, wide), strict=True)
            )
            padded[down, across] += shares[..., i, j]
        images = padded[top : top + height, left : left + width]
        return images.permute(2, 3, 0, 1).contiguous()
