"""ResNet-18: size by hand, both normalisations, the shape of its stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.errors import InputError
from equipoise.models.resnet import BasicBlock, ImageMean, resnet18


def _size_by_hand(depth: int, width: int, classes: int) -> int:
    def norm(channels: int) -> int:
        return 2 * channels

    def block(before: int, after: int) -> int:
        shortcut = before * after + norm(after) if before != after else 0
        return 9 * before * after + norm(after) + 9 * after * after + norm(after) + shortcut

    total = 9 * depth * width + norm(width)
    before = width
    for after in (width, 2 * width, 4 * width, 8 * width):
        total += block(before, after) + block(after, after)
        before = after
    return total + 8 * width * classes + classes


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_size(norm: str) -> None:
    model = resnet18((3, 32, 32), 10, norm=norm, width=8)
    assert sum(p.numel() for p in model.parameters()) == _size_by_hand(3, 8, 10)


def test_full_width_has_the_usual_size() -> None:
    with torch.device("meta"):
        model = resnet18((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == _size_by_hand(3, 64, 10) == 11_173_962


def test_there_are_eighteen_weighted_layers_and_no_pooling_layer() -> None:
    model = resnet18((3, 32, 32), 10, width=4)
    weighted = [
        m
        for m in model.modules()
        if isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3))
    ]
    assert len(weighted) == 18
    assert not any(isinstance(m, nn.MaxPool2d) for m in model.modules())


def test_stages_halve_the_image_three_times() -> None:
    model = resnet18((3, 32, 32), 10, width=4).eval()
    shapes = []
    x = torch.zeros(1, 3, 32, 32)
    for layer in model.features:
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(4, 32, 32)] * 4 + [(8, 16, 16), (16, 8, 8), (32, 4, 4), (32,)]


@pytest.mark.parametrize(
    ("norm", "kind", "absent"),
    [("batch", nn.BatchNorm2d, nn.GroupNorm), ("group", nn.GroupNorm, nn.BatchNorm2d)],
)
def test_one_normalisation_after_each_convolution(
    norm: str, kind: type[nn.Module], absent: type[nn.Module]
) -> None:
    layers = list(resnet18((1, 8, 8), 3, norm=norm, width=4).modules())
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in layers)
    assert sum(isinstance(layer, kind) for layer in layers) == convolutions == 20
    assert not any(isinstance(layer, absent) for layer in layers)


def test_group_norm_keeps_no_buffers_and_does_not_mix_samples() -> None:
    model = resnet18((1, 8, 8), 3, norm="group", width=4).double()
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not list(model.buffers())
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=0, atol=1e-12)


def test_a_block_adds_its_input() -> None:
    block = BasicBlock(2, 2, 1, lambda channels: nn.Identity())
    nn.init.zeros_(block.residual[3].weight)
    x = torch.tensor([-1.0, 2.0]).reshape(1, 2, 1, 1)
    assert block(x).flatten().tolist() == [0.0, 2.0]


def test_image_mean() -> None:
    assert ImageMean()(torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])).tolist() == [[3.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"norm": "grup"},
            "unknown norm 'grup' in the options of model 'resnet18'; did you mean 'group'? Valid: "
            "batch, group",
        ),
        ({"norm": "group", "width": 5}, "groups=2 of model 'resnet18' does not divide width=5"),
        ({"width": 0}, "width of model 'resnet18' must be a whole number of at least 1, got 0"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        resnet18((1, 8, 8), 3, **options)  # type: ignore[arg-type]
    assert str(caught.value) == message
