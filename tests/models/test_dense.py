"""Logistic regression and the multilayer perceptron, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.errors import InputError
from equipoise.models.dense import logistic, mlp


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_logistic_has_a_weight_and_a_bias_a_class_and_nothing_else() -> None:
    model = logistic((1, 8, 8), 10)
    assert _size(model) == 64 * 10 + 10
    assert _size(model.features) == 0


def test_mlp_counts() -> None:
    assert _size(mlp((1, 8, 8), 10)) == (64 * 64 + 64) + (64 * 10 + 10)
    assert _size(mlp((3,), 2, hidden=(5, 4))) == (3 * 5 + 5) + (5 * 4 + 4) + (4 * 2 + 2)


def test_mlp_without_hidden_layers_is_logistic() -> None:
    assert _size(mlp((6,), 2, hidden=())) == _size(logistic((6,), 2))


def test_mlp_by_hand() -> None:
    model = mlp((2,), 1, hidden=(2,))
    layer = model.features[1]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 0.5]]))
        layer.bias.copy_(torch.tensor([0.0, 1.0]))
        model.head.weight.copy_(torch.tensor([[3.0, 10.0]]))
        model.head.bias.copy_(torch.tensor([0.25]))
    # x = (1, 2): hidden = relu(-1, 4) = (0, 4); output = 40 + 0.25
    assert model(torch.tensor([[1.0, 2.0]])).item() == pytest.approx(40.25)


def test_dropout_follows_every_hidden_layer_and_only_when_asked() -> None:
    rates = [
        layer.p
        for layer in mlp((4,), 2, hidden=(3, 3), dropout=0.2).modules()
        if isinstance(layer, nn.Dropout)
    ]
    assert rates == [0.2, 0.2]
    assert not any(isinstance(layer, nn.Dropout) for layer in mlp((4,), 2).modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 64}, "hidden of model 'mlp' must be a list, got 64"),
        ({"hidden": "64"}, "hidden of model 'mlp' must be a list, got '64'"),
        (
            {"hidden": (8, 0)},
            "each of hidden of model 'mlp' must be a whole number of at least 1, got 0",
        ),
        ({"dropout": 1.0}, "dropout of model 'mlp' must be a number from 0 to below 1, got 1.0"),
        (
            {"dropout": float("nan")},
            "dropout of model 'mlp' must be a number from 0 to below 1, got nan",
        ),
        (
            {"dropout": "0.1"},
            "dropout of model 'mlp' must be a number from 0 to below 1, got '0.1'",
        ),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        mlp((4,), 2, **options)  # type: ignore[arg-type]
    assert str(caught.value) == message
