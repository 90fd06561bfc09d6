"""The convolution of stacked clients as a matrix product of patches of their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class PatchProduct(torch.autograd.Function):
    """The convolution of stacked clients as one matrix product of patches and weights a client.

    Written for ``vmap`` alone: its batching rule is the only way in, and the tensors have a leading
    axis of clients.
    """

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Convolve the images of all clients; return the result and the patches."""
        images = x.permute(0, 1, 3, 4, 2).contiguous()
        if any(padding):
            images = F.pad(images, [0, 0, padding[1], padding[1], padding[0], padding[0]])
        patches, (height, width) = _cut(images, weight.shape[-2:], stride)
        y = torch.bmm(patches, _weight_matrix(weight))
        return y.view(*x.shape[:2], height, width, -1).permute(0, 1, 4, 2, 3).contiguous(), patches

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the gradients need."""
        x, weight, ctx.stride, ctx.padding = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(output[1], weight)
        ctx.mark_non_differentiable(output[1])
        # Otherwise zeros would be written as the gradient by the patches, which are large.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, upper: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients by images and by weights."""
        patches, weight = ctx.saved_tensors
        clients, samples, channels, *size = ctx.shape
        kernel = weight.shape[-2:]
        rows = upper.permute(0, 1, 3, 4, 2).reshape(clients, -1, weight.shape[1])
        for_x = for_weight = None
        if ctx.needs_input_grad[1]:
            for_weight = torch.bmm(patches.transpose(1, 2), rows)
            for_weight = for_weight.view(clients, *kernel, channels, -1).permute(0, 4, 3, 1, 2)
        if ctx.needs_input_grad[0]:
            height, width = upper.shape[-2:]
            shares = torch.bmm(rows, _weight_matrix(weight).transpose(1, 2))
            shares = shares.view(clients, samples, height, width, *kernel, channels)
            top, left = ctx.padding
            padded = shares.new_zeros(
                clients, samples, size[0] + 2 * top, size[1] + 2 * left, channels
            )
            for i, j in _places(kernel):
                window = _window(padded, (i, j), ctx.stride, (height, width))
                window += shares[..., i, j, :]
            for_x = padded[:, :, top : top + size[0], left : left + size[1]].permute(0, 1, 4, 2, 3)
        return for_x, for_weight, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        stride: Any,
        padding: Any,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Make clients the leading axis of images and weights."""
        x, weight = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((x, weight), in_dims, strict=False)
        )
        return PatchProduct.apply(x, weight, stride, padding), (0, 0)


def _weight_matrix(weight: Tensor) -> Tensor:
    """Reorder weights to ``[clients, height * width * in, out]``."""
    return weight.permute(0, 3, 4, 2, 1).flatten(1, 3)


def _places(kernel: Sequence[int]) -> list[tuple[int, int]]:
    """List the positions in a kernel, row by row."""
    return [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]


def _window(
    images: Tensor, first: Sequence[int], stride: Sequence[int], size: Sequence[int]
) -> Tensor:
    """View ``size`` pixels from ``first`` on, in steps of ``stride``.

    Images are ``[..., height, width, channels]``.
    """
    down, across = (
        slice(f, f + s * (n - 1) + 1, s) for f, s, n in zip(first, stride, size, strict=True)
    )
    return images[..., down, across, :]


def _cut(
    images: Tensor, kernel: Sequence[int], stride: Sequence[int]
) -> tuple[Tensor, tuple[int, int]]:
    """Cut channels-last images into patches.

    These are ``[clients, samples * height * width, kernel * channels]``.
    """
    height, width = (
        (n - k) // s + 1 for n, k, s in zip(images.shape[2:4], kernel, stride, strict=True)
    )
    windows = [_window(images, place, stride, (height, width)) for place in _places(kernel)]
    patches = torch.cat(windows, dim=-1) if len(windows) > 1 else windows[0]
    return patches.reshape(images.shape[0], -1, patches.shape[-1]), (height, width)
