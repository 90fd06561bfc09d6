"""The convolution of stacked clients as a matrix product of patches of their images."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.models.adjoints import Adjoint
from equipoise.models.cpu_convolutions import Windows


def convolve(
    x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Convolve a client's batch by one product of patches and weights.

    All clients under ``vmap`` are one batched product. Each operation has a rule for every
    transform of ``torch.func``, so a loss may take derivatives of any order.

    Parameters
    ----------
    x : Tensor
        Images ``[samples, channels, height, width]``.
    weight : Tensor
        ``[results, channels, kernel height, kernel width]``.
    stride, padding : tuple of int
        Down and across.

    Returns
    -------
    Tensor
        ``[samples, results, new height, new width]``.

    Examples
    --------
    >>> convolve(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), (1, 1), (0, 0))
    tensor([[[[4.]]]])
    """
    windows = Windows(x.shape, weight.shape[2:], stride, padding)
    patches: Tensor = Adjoint.apply(x, partial(_cut, windows), partial(_fold, windows))
    y = patches.flatten(0, 2) @ weight.permute(2, 3, 1, 0).flatten(0, 2)
    return y.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2).contiguous()


def _cut(windows: Windows, x: Tensor) -> Tensor:
    """Cut images into patches ``[samples, *positions, window * channels]``.

    With channels innermost, long runs of numbers are copied.
    """
    images = x.permute(0, 2, 3, 1).contiguous()
    down, across = windows.padding
    if down or across:
        images = F.pad(images, [0, 0, across, across, down, down])
    patches = [_at(images, windows, place) for place in _places(windows)]
    return torch.cat(patches, dim=-1) if len(patches) > 1 else patches[0]


def _fold(windows: Windows, patches: Tensor) -> Tensor:
    """Add the numbers of patches up where windows overlap: the adjoint of :func:`_cut`."""
    channels, height, width = windows.images[1:]
    top, left = windows.padding
    padded = patches.new_zeros(len(patches), height + 2 * top, width + 2 * left, channels)
    places = _places(windows)
    for place, share in zip(places, patches.chunk(len(places), dim=-1), strict=True):
        _at(padded, windows, place).add_(share)
    return padded[:, top : top + height, left : left + width].permute(0, 3, 1, 2)


def _places(windows: Windows) -> list[tuple[int, int]]:
    """List the places in a window, row by row."""
    height, width = windows.kernel
    return list(product(range(height), range(width)))


def _at(images: Tensor, windows: Windows, place: tuple[int, int]) -> Tensor:
    """View the pixels at a place of every window of ``[samples, height, width, channels]``."""
    down, across = (
        slice(first, first + step * (count - 1) + 1, step)
        for first, step, count in zip(place, windows.stride, windows.positions, strict=True)
    )
    return images[:, down, across]
