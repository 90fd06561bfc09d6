"""The small convolutional models: parameter counts by hand, small images, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from equipoise.errors import InputError
from equipoise.models.base import Model
from equipoise.models.cnn import bncnn, cnn2, cnn4, pflcnn


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_cnn2_has_the_published_size_on_mnist() -> None:
    # McMahan et al. (2017) report 1,663,370 parameters for this network.
    assert _size(cnn2((1, 28, 28), 10)) == 1_663_370


def test_cnn2_adapts_to_small_colour_images() -> None:
    convolutions = (3 * 25 * 32 + 32) + (32 * 25 * 64 + 64)
    assert _size(cnn2((3, 8, 8), 10)) == convolutions + (64 * 2 * 2 * 512 + 512) + (512 * 10 + 10)


def test_cnn4_counts() -> None:
    convolutions = (1 * 9 * 32 + 32) + (32 * 9 * 32 + 32) + (32 * 9 * 64 + 64) + (64 * 9 * 64 + 64)
    model = cnn4((1, 28, 28), 10)
    assert _size(model.features) == convolutions
    assert _size(model.head) == 64 * 7 * 7 * 10 + 10
    assert sum(isinstance(layer, nn.Conv2d) for layer in model.modules()) == 4


def test_bncnn_has_the_published_layers() -> None:
    # Li et al. (2021), appendix D.1: three 5x5 convolutions, two hidden layers, BatchNorm after
    # each of the five.
    model = bncnn((3, 28, 28), 10, channels=(64, 64, 128), hidden=(2048, 512))
    convolutions = 25 * (3 * 64 + 64 * 64 + 64 * 128)
    hidden = 128 * 7 * 7 * 2048 + 2048 * 512
    assert _size(model.features) == convolutions + hidden + 2 * (64 + 64 + 128 + 2048 + 512)
    assert _size(model.head) == 512 * 10 + 10
    norms = [
        layer.num_features
        for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    assert norms == [64, 64, 128, 2048, 512]


def test_bncnn_with_four_convolutions_halves_the_image_after_each() -> None:
    model = bncnn((3, 32, 32), 10, channels=(64, 64, 64, 64), hidden=(), kernel=3, pools=4)
    assert _size(model.features) == 9 * (3 * 64 + 3 * 64 * 64) + 4 * 2 * 64
    assert _size(model.head) == 64 * 2 * 2 * 10 + 10
    kinds = [type(layer) for layer in model.features]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d] * 4 + [nn.Flatten]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    bare = bncnn((3, 32, 32), 10, hidden=(8,), running=False)
    assert not list(bare.buffers())
    with pytest.raises(
        InputError, match="running of model 'bncnn' must be true or false, got 'no'"
    ):
        bncnn((3, 32, 32), 10, running="no")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="images must be at least 16 x 16"):
        bncnn((3, 15, 16), 10, pools=4)
    with pytest.raises(InputError, match="kernel of model 'bncnn' must be odd, got 4"):
        bncnn((3, 16, 16), 10, kernel=4)


def test_pflcnn_counts() -> None:
    convolutions = (3 * 9 * 32 + 32) + (32 * 9 * 64 + 64)
    # 32 x 32 loses two pixels to each convolution and half to the pool: 14 x 14.
    assert (
        _size(pflcnn((3, 32, 32), 10))
        == convolutions + (64 * 14 * 14 * 128 + 128) + (128 * 10 + 10)
        == 1_626_442
    )


def test_pflcnn_drops_after_the_pool_and_after_the_hidden_layer() -> None:
    layers = list(pflcnn((3, 32, 32), 10).features)
    drops = [
        (type(layers[i - 1]), layer.p)
        for i, layer in enumerate(layers)
        if isinstance(layer, nn.Dropout)
    ]
    assert drops == [(nn.MaxPool2d, 0.25), (nn.ReLU, 0.5)]


@pytest.mark.parametrize(("make", "smallest"), [(cnn2, 4), (cnn4, 4), (bncnn, 4), (pflcnn, 6)])
def test_the_smallest_image_works_and_a_smaller_one_is_refused(
    make: Callable[..., Model], smallest: int
) -> None:
    assert make((1, smallest, smallest), 3)(torch.zeros(2, 1, smallest, smallest)).shape == (2, 3)
    too_small = (1, smallest, smallest - 1)
    with pytest.raises(InputError) as caught:
        make(too_small, 3)
    name = make.__name__
    assert str(caught.value) == (
        f"shape {too_small} is too small for model '{name}': images must be at least {smallest} x "
        f"{smallest}"
    )


@pytest.mark.parametrize("make", [cnn2, cnn4, pflcnn])
def test_samples_that_are_no_images_are_refused(make: Callable[..., Model]) -> None:
    with pytest.raises(
        InputError, match=r"needs images of shape \(channels, height, width\), got shape \(64,\)"
    ):
        make((64,), 3)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            cnn2,
            {"channels": (8,)},
            "channels of model 'cnn2' must be a list of 2 numbers, got (8,)",
        ),
        (
            cnn2,
            {"hidden": 1.5},
            "hidden of model 'cnn2' must be a whole number of at least 1, got 1.5",
        ),
        (
            cnn4,
            {"channels": (8, 8, 8, -1)},
            "each of channels of model 'cnn4' must be a whole number of at least 1, got -1",
        ),
        (
            pflcnn,
            {"dropout": (0.1,)},
            "dropout of model 'pflcnn' must be a list of 2 numbers, got (0.1,)",
        ),
    ],
)
def test_option_refusals(
    make: Callable[..., Model], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        make((1, 8, 8), 3, **options)
    assert str(caught.value) == message
