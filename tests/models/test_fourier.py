"""Amplitudes and phases of images, against NumPy's Fourier transform of all frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.models.fourier import AmplitudeNorm, amplitudes

SIZES = [(4, 4), (5, 5), (4, 6), (7, 3)]
LOWS = [None, 0, 1, 2, 9]


def pictures(size, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(3, 2, *size, generator=draws, dtype=torch.float64)


def chosen_frequencies(size, low):
    """Which of all frequencies are at most ``low``, vertically and horizontally."""
    down, across = (np.abs(np.round(np.fft.fftfreq(n) * n)) for n in size)
    limit = np.inf if low is None else low
    return (down[:, None] <= limit) & (across[None, :] <= limit)


def layer_for(size, low, reference):
    layer = AmplitudeNorm((2, *size), low).double()
    layer.amplitude.copy_(amplitudes(reference, low).mean(0))
    return layer


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("size", SIZES)
def test_chosen_amplitudes_are_replaced_and_everything_else_stays(size, low):
    x, others = pictures(size), pictures(size, seed=1)
    found = np.fft.fft2(layer_for(size, low, others)(x).numpy())
    before = np.fft.fft2(x.numpy())
    wanted = np.abs(np.fft.fft2(others.numpy())).mean(0)
    chosen = chosen_frequencies(size, low)
    np.testing.assert_allclose(
        np.abs(found)[..., chosen], np.broadcast_to(wanted, found.shape)[..., chosen], atol=1e-12
    )
    np.testing.assert_allclose(found[..., ~chosen], before[..., ~chosen], atol=1e-12)
    np.testing.assert_allclose(found / np.abs(found), before / np.abs(before), atol=1e-9)


def test_images_with_their_own_amplitudes_stay_as_they_are():
    x = pictures((5, 6))[:1]
    torch.testing.assert_close(layer_for((5, 6), None, x)(x), x, rtol=0, atol=1e-13)


def test_the_lowest_frequency_is_the_mean_brightness():
    x, others = pictures((4, 4)), pictures((4, 4), seed=1)
    wanted = x - x.mean((-2, -1), keepdim=True) + others.mean((0, -2, -1)).view(1, 2, 1, 1)
    torch.testing.assert_close(layer_for((4, 4), 0, others)(x), wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coefficients_without_a_phase_stay_zero(dtype):
    """A constant image has one coefficient; the others are rounding errors, whatever its size."""
    x = torch.full((2, 1, 24, 24), 0.3, dtype=dtype)
    layer = layer_for((24, 24), None, pictures((24, 24)))
    found = AmplitudeNorm((1, 24, 24)).to(dtype)
    found.amplitude.copy_(layer.amplitude[:1])
    constant = found(x)
    torch.testing.assert_close(
        constant, constant[:1, :, :1, :1].expand_as(constant), rtol=0, atol=1e-5
    )
    assert torch.equal(found(torch.zeros_like(x)), torch.zeros_like(x))


def test_bytes_are_pixels_from_0_to_1():
    x = (pictures((4, 5)) * 255).to(torch.uint8)
    layer = layer_for((4, 5), None, pictures((4, 5), seed=1))
    assert torch.equal(layer(x), layer(x.double() / 255))


def test_stacked_clients_give_the_same():
    x = torch.stack([pictures((5, 4)), pictures((5, 4), seed=2)])
    layer = layer_for((5, 4), 1, pictures((5, 4), seed=1))
    torch.testing.assert_close(
        torch.func.vmap(layer)(x), torch.stack([layer(own) for own in x]), rtol=0, atol=1e-14
    )
