"""U-Net for segmentation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.checks import count, image
from equipoise.errors import InputError, unknown
from equipoise.models.base import Model

Norm = Callable[[int], nn.Module]


def unet(
    shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 16,
    depth: int = 4,
    norm: str = "instance",
    groups: int = 2,
) -> Model:
    """Build a U-Net (Ronneberger et al., 2015) that returns one number for each class and pixel.

    Convolutions keep the image size, so outputs always have the size of the inputs; the original
    crops instead. Feature maps are enlarged by repeating pixels, which has a deterministic gradient
    on a GPU, followed by a 1x1 convolution. The default width and norm are those of FedDG's public
    code (Liu et al., 2021), whose settings FFT-GP uses; the original has width 64 and no
    normalization.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image, at least ``2**depth`` pixels high and wide; with
        ``norm="instance"`` twice that, because a single pixel cannot be normalized.
    classes : int
        Number of classes, including the background.
    width : int
        Channels at the full resolution; they double each time the resolution is halved.
    depth : int
        Number of times that the resolution is halved.
    norm : {"instance", "group", "batch"}
        Normalization after each 3x3 convolution. ``"instance"`` normalizes each channel of an
        image, ``"group"`` groups of channels, ``"batch"`` each channel over the batch.
    groups : int
        Number of groups of channels with ``norm="group"``.

    Returns
    -------
    Model
        ``features`` returns maps ``[samples, width, rows, columns]``; ``head`` is the last 1x1
        convolution.

    Examples
    --------
    >>> model = unet((1, 21, 30), 2, width=4, depth=2)
    >>> model(torch.zeros(3, 1, 21, 30)).shape
    torch.Size([3, 2, 21, 30])
    """
    halvings = count(depth, "depth of model 'unet'", least=0)
    channels, _, _ = image(shape, "unet", smallest=2 ** (halvings + (norm == "instance")))
    width = count(width, "width of model 'unet'")
    normalize = _norm(norm, width, count(groups, "groups of model 'unet'"))
    return Model(UNetFeatures(channels, width, halvings, normalize), nn.Conv2d(width, classes, 1))


class UNetFeatures(nn.Module):
    """A U-Net without its last convolution.

    Parameters
    ----------
    channels : int
        Channels of the images.
    width : int
        Channels at the full resolution.
    depth : int
        Number of times that the resolution is halved.
    norm : callable
        Returns a normalization layer for a number of channels.

    Examples
    --------
    >>> UNetFeatures(3, 4, 1, nn.BatchNorm2d)(torch.zeros(1, 3, 5, 5)).shape
    torch.Size([1, 4, 5, 5])
    """

    def __init__(self, channels: int, width: int, depth: int, norm: Norm) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        before = [channels, *widths[:-1]]
        self.down = nn.ModuleList(
            _convolutions(old, new, norm) for old, new in zip(before, widths, strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        # From the lowest resolution to the highest.
        self.narrow = nn.ModuleList(nn.Conv2d(2 * wide, wide, 1) for wide in reversed(widths[:-1]))
        self.up = nn.ModuleList(
            _convolutions(2 * wide, wide, norm) for wide in reversed(widths[:-1])
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return one map for each channel, of the size of the images."""
        kept: list[Tensor] = []
        z = x
        for level, block in enumerate(self.down):
            z = block(self.pool(z) if level else z)
            kept.append(z)
        kept.pop()
        for narrow, block in zip(self.narrow, self.up, strict=True):
            beside = kept.pop()
            # Apply the 1x1 convolution before enlarging: same result on a quarter of the pixels.
            z = block(
                torch.cat([beside, enlarged(narrow(z), beside.shape[-2], beside.shape[-1])], dim=-3)
            )
        return z


def enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """Double height and width by repeating pixels.

    If the requested size is odd, the last row or column is repeated once more.

    Parameters
    ----------
    x : Tensor
        Maps ``[..., height // 2, width // 2]``.
    height, width : int
        The requested size.

    Returns
    -------
    Tensor
        Maps ``[..., height, width]``.

    Examples
    --------
    >>> enlarged(torch.tensor([[[[1.0, 2.0]]]]), 3, 4)
    tensor([[[[1., 1., 2., 2.],
              [1., 1., 2., 2.],
              [1., 1., 2., 2.]]]])
    """
    *first, down, across = x.shape
    doubled = (
        x.unsqueeze(-1)
        .unsqueeze(-3)
        .expand(*first, down, 2, across, 2)
        .reshape(*first, 2 * down, 2 * across)
    )
    if height > 2 * down:
        doubled = torch.cat([doubled, doubled[..., -1:, :]], dim=-2)
    if width > 2 * across:
        doubled = torch.cat([doubled, doubled[..., -1:]], dim=-1)
    return doubled


def _convolutions(channels_in: int, channels_out: int, norm: Norm) -> nn.Sequential:
    # Normalization subtracts the mean, so a bias before it would have no effect.
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        norm(channels_out),
        nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        norm(channels_out),
        nn.ReLU(),
    )


def _norm(name: str, width: int, groups: int) -> Norm:
    if name == "batch":
        return nn.BatchNorm2d
    if name == "instance":
        return lambda channels: nn.GroupNorm(channels, channels)
    if name != "group":
        raise unknown(
            "norm", name, ("instance", "group", "batch"), where="the options of model 'unet'"
        )
    if width % groups:
        raise InputError(f"groups={groups} of model 'unet' does not divide width={width}")
    return lambda channels: nn.GroupNorm(groups, channels)
