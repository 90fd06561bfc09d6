"""Residual networks for small images."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from equipoise.checks import count, image
from equipoise.errors import InputError, unknown
from equipoise.models.base import Model

Norm = Callable[[int], nn.Module]


def resnet18(
    shape: tuple[int, ...], classes: int, *, norm: str = "batch", width: int = 64, groups: int = 2
) -> Model:
    """Build ResNet-18 for small images: it begins with a 3x3 convolution and no max-pool.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image.
    classes : int
        Number of classes, or of outputs in regression.
    norm : {"batch", "group"}
        Normalisation after each convolution. ``"group"`` keeps no statistics of a client's data
        that would be averaged into the global model.
    width : int
        Channels of the first stage; the later stages have 2, 4 and 8 times as many.
    groups : int
        Number of groups of channels with ``norm="group"``. It must divide ``width``.

    Returns
    -------
    Model
        ``features`` ends with the mean over the image, of size ``8 * width``; ``head`` is the
        linear layer.

    Examples
    --------
    >>> resnet18((3, 32, 32), 10).head
    Linear(in_features=512, out_features=10, bias=True)
    """
    depth, _, _ = image(shape, "resnet18", smallest=1)
    width = count(width, "width of model 'resnet18'")
    normalise = _norm(norm, width, count(groups, "groups of model 'resnet18'"))
    features = nn.Sequential(
        nn.Conv2d(depth, width, 3, padding=1, bias=False),
        normalise(width),
        nn.ReLU(),
        _stage(width, width, 1, normalise),
        _stage(width, 2 * width, 2, normalise),
        _stage(2 * width, 4 * width, 2, normalise),
        _stage(4 * width, 8 * width, 2, normalise),
        ImageMean(),
    )
    for layer in features.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return Model(features, nn.Linear(8 * width, classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions whose result is added to the input.

    Parameters
    ----------
    channels_in, channels_out : int
        Channels before and after.
    stride : int
        Stride of the first convolution.
    norm : callable
        Returns a normalisation layer for a number of channels.

    Examples
    --------
    >>> import torch
    >>> BasicBlock(4, 8, 2, nn.BatchNorm2d)(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
            norm(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            norm(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
                norm(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(residual(x) + shortcut(x))``."""
        total: Tensor = self.residual(x) + self.shortcut(x)
        return total.relu()


class ImageMean(nn.Module):
    """The mean of each channel over height and width, with a deterministic gradient.

    Examples
    --------
    >>> import torch
    >>> ImageMean()(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Average over the last two dimensions."""
        return x.mean((-2, -1))


def _stage(channels_in: int, channels_out: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(channels_in, channels_out, stride, norm),
        BasicBlock(channels_out, channels_out, 1, norm),
    )


def _norm(name: str, width: int, groups: int) -> Norm:
    if name == "batch":
        return nn.BatchNorm2d
    if name != "group":
        raise unknown("norm", name, ("batch", "group"), where="the options of model 'resnet18'")
    if width % groups:
        raise InputError(f"groups={groups} of model 'resnet18' does not divide width={width}")
    return lambda channels: nn.GroupNorm(groups, channels)
