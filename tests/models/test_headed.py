"""Modules divided into features and head."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from equipoise import Federation, train
from equipoise.errors import InputError
from equipoise.models.base import width_of
from equipoise.models.headed import with_head
from equipoise.models.pretrained_backbones import Normalise


class Net(nn.Module):
    """A network whose head is inside another module, and is called in one of several ways."""

    def __init__(self, call=lambda head, z: head(z)):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU())
        self.top = nn.ModuleDict({"norm": nn.LayerNorm(6), "out": nn.Linear(6, 3)})
        self.call = call

    def forward(self, x):
        return self.call(self.top["out"], self.top["norm"](self.body(x)))


def test_features_head_and_the_whole_agree():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 2, 2)
    wanted = net(x)
    model = with_head(copy.deepcopy(net), "top.out")
    assert torch.equal(model(x), wanted)
    assert torch.equal(model.head(model.features(x)), wanted)
    assert width_of(model, (2, 2)) == 6
    assert {name.partition(".")[0] for name in model.state_dict()} == {"features", "head"}
    whole = model.whole()
    assert isinstance(whole, Net)
    assert torch.equal(whole(x), wanted)
    assert list(whole.state_dict()) == list(net.state_dict())


def test_a_copy_has_a_head_of_its_own():
    torch.manual_seed(0)
    model, x = with_head(Net(), "top.out"), torch.randn(5, 2, 2)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.head.weight)
    nn.init.zeros_(other.head.bias)
    assert not other(x).any()
    assert model(x).any()


def test_gradients_reach_both_parts():
    model = with_head(Net(), "top.out")
    model(torch.randn(5, 2, 2)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_head_that_is_called_with_a_keyword():
    model = with_head(Net(lambda head, z: head(input=z)), "top.out")
    assert model.features(torch.zeros(2, 2, 2)).shape == (2, 6)


class Scaled(nn.Linear):
    """A head with more inputs than z."""

    def forward(self, z, scale):
        return super().forward(z) * scale


def test_a_head_that_takes_more_than_z_can_be_kept_but_not_looked_at():
    net = Net(lambda head, z: head(z, 2.0))
    net.top["out"] = Scaled(6, 3)
    model = with_head(copy.deepcopy(net), "top.out")
    assert torch.equal(model(torch.ones(2, 2, 2)), net(torch.ones(2, 2, 2)))
    with pytest.raises(
        InputError,
        match="the head is called with 2 arguments; valid: a layer that takes one tensor",
    ):
        model.features(torch.zeros(2, 2, 2))
    x, y = torch.randn(20, 2, 2), torch.arange(20) % 3
    federation = Federation.from_arrays(x, y, clients=[0, 1] * 10)
    assert (
        train(federation, model=net, head="top.out", method="fedper", rounds=1)
        .trainer.selected()
        .own
    )
    with pytest.raises(InputError, match="features and head separately, but Net has its own"):
        train(federation, model=net, head="top.out", method="moon", rounds=1)


@pytest.mark.parametrize("head", [None, "top.out"])
def test_bytes_for_a_model_that_does_not_scale_them_are_refused(head):
    class Transformer(Net):
        main_input_name = "pixel_values"

        def forward(self, x):
            return super().forward(x.float())

    x = torch.zeros(20, 2, 2, dtype=torch.uint8)
    federation = Federation.from_arrays(x, torch.arange(20) % 3, clients=[0, 1] * 10)
    with pytest.raises(InputError, match="bytes from 0 to 255, but Transformer does not scale"):
        train(federation, model=Transformer(), head=head, rounds=1)
    scaled = nn.Sequential(Normalise([0.5] * 2, [0.5] * 2), Transformer())
    assert train(federation, model=scaled, head=head and f"1.{head}", rounds=1).summary


@pytest.mark.parametrize(
    ("module", "head", "says"),
    [
        (Net(), "top.ou", "unknown head 'top.ou' in the model Net; did you mean 'top.out'"),
        (
            Net(),
            None,
            "head must be the name of a layer of the model, such as 'classifier', got None",
        ),
        ("net", "top.out", "a head belongs to an nn.Module, got 'net'"),
    ],
)
def test_what_has_no_such_layer_is_refused(module, head, says):
    with pytest.raises(InputError, match=says):
        with_head(module, head)
