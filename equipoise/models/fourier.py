"""Fourier transforms of images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.base import pixels

# Coefficients smaller than this share of an image's largest one are rounding errors, so their phase
# is arbitrary.
_NEGLIGIBLE = 1e-6


def amplitudes(x: Tensor, low: int | None = None) -> Tensor:
    """Return the amplitudes of images: the absolute values of their Fourier coefficients.

    Images are real, so half of the horizontal frequencies determine the other half, which is left
    out.

    Parameters
    ----------
    x : Tensor
        Images ``[..., height, width]``.
    low : int, optional
        Return only the vertical and horizontal frequencies from -low to low; by default all.

    Returns
    -------
    Tensor
        ``[..., vertical frequencies, horizontal frequencies]``, in the order 0, 1, ..., -1 and
        0, 1, ....

    Examples
    --------
    >>> amplitudes(torch.ones(2, 2))
    tensor([[4., 0.],
            [0., 0.]])
    >>> amplitudes(torch.ones(2, 2), low=0)
    tensor([[4.]])
    """
    found = torch.fft.rfft2(x).abs()
    if low is None:
        return found
    height = found.shape[-2]
    rising = found[..., : low + 1, : low + 1]
    falling = min(low, height - rising.shape[-2])
    return torch.cat([rising, found[..., height - falling :, : rising.shape[-1]]], -2)


class AmplitudeNorm(nn.Module):
    """A layer that sets the amplitudes of images and keeps their phases (HarmoFL's Ψ).

    A coefficient F of an image becomes Ã F/|F|, where Ã is the amplitude at its frequency.
    Coefficients that are 0 up to rounding have no phase and do not change.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of an image.
    low : int, optional
        Change only the frequencies from -low to low; see :func:`amplitudes`.

    Attributes
    ----------
    amplitude : Tensor
        Ã; zero until it is set.

    Examples
    --------
    >>> layer = AmplitudeNorm((1, 2, 2), low=0)
    >>> layer.amplitude.fill_(8.0)
    tensor([[[8.]]])
    >>> layer(torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]]))
    tensor([[[[2.5000, 1.5000],
              [1.5000, 2.5000]]]])
    """

    amplitude: Tensor
    chosen: Tensor

    def __init__(self, shape: tuple[int, ...], low: int | None = None) -> None:
        super().__init__()
        some = amplitudes(torch.zeros(shape), low)
        self.rising = some.shape[-2] if low is None else min(low + 1, some.shape[-2])
        self.frequencies = shape[-2], shape[-1] // 2 + 1
        self.register_buffer("amplitude", torch.zeros_like(some))
        self.register_buffer("chosen", self._spread(torch.ones_like(some)) > 0)

    def _spread(self, some: Tensor) -> Tensor:
        """Place the chosen frequencies among all frequencies, and fill up with zeros."""
        height, width = self.frequencies
        rising, falling = some[..., : self.rising, :], some[..., self.rising :, :]
        tall = torch.cat([F.pad(rising, (0, 0, 0, height - some.shape[-2])), falling], -2)
        return F.pad(tall, (0, width - some.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return images ``[samples, channels, height, width]`` with the amplitudes of the layer."""
        images = pixels(x, self.amplitude.dtype)
        if not images.numel():
            # Some libraries do not accept empty tensors.
            return images
        spectrum = torch.fft.rfft2(images)
        size = spectrum.abs()
        changed = self.chosen & (size > _NEGLIGIBLE * size.amax((-2, -1), keepdim=True))
        factor = torch.where(
            changed, self._spread(self.amplitude) / torch.where(changed, size, 1.0), 1.0
        )
        return torch.fft.irfft2(spectrum * factor, s=x.shape[-2:])
