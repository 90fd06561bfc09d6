"""Models in parts: an optional stem, and parts that forward does not call."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn

from equipoise import Federation, train
from equipoise.errors import InputError
from equipoise.models.base import Model, pooled, width_of


def still(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def test_a_stem_comes_before_the_features() -> None:
    stem, features, head = still(nn.Linear(2, 3)), nn.Linear(3, 4), nn.Linear(4, 5)
    model = Model(features, head, stem=stem)
    x = torch.rand(6, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), head(features(stem(x))))
    assert {name.split(".")[0] for name in model.state_dict()} == {"stem", "features", "head"}


def test_without_a_stem_there_is_none() -> None:
    model = Model(nn.Flatten(), nn.Linear(4, 3))
    assert model.stem is None
    assert copy.deepcopy(model).stem is None
    assert [name for name, _ in model.named_children()] == ["features", "head"]


def test_a_stem_that_moves_is_refused() -> None:
    with pytest.raises(InputError, match="parameter '1.weight' of the stem requires a gradient"):
        Model(nn.Identity(), nn.Linear(3, 2), stem=nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))


def test_forward_ignores_parts_that_were_attached() -> None:
    model = Model(nn.Flatten(), nn.Linear(4, 3))
    x = torch.ones(1, 2, 2)
    before = model(x)
    model.add_module("projection", nn.Linear(4, 2))
    assert torch.equal(model(x), before)
    assert "projection.weight" in model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_width_of_z_is_known_whatever_the_type(dtype: torch.dtype) -> None:
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), nn.Linear(3, 2)).to(dtype)
    assert width_of(model, (2, 2)) == 3


def test_vectors_are_aligned_as_they_are_and_maps_by_their_means() -> None:
    model = Model(nn.Identity(), nn.Identity())
    draws = torch.Generator().manual_seed(0)
    vectors, images, sequences = (torch.rand(5, 3, *s, generator=draws) for s in ((), (4, 2), (7,)))
    assert model.aligned_rows == "samples"
    assert torch.equal(model.aligned(vectors), vectors)
    torch.testing.assert_close(model.aligned(images), images.mean((2, 3)))
    torch.testing.assert_close(model.aligned(sequences), sequences.mean(2))
    assert pooled(torch.rand(5, generator=draws)).shape == (5, 1)


class Listening(Model):
    """A model that refuses samples above 1, and keeps the samples of each check."""

    checked: ClassVar[list[torch.Tensor]] = []

    def check_samples(self, x: torch.Tensor) -> None:
        self.checked.append(x)
        if bool((x > 1).any()):
            raise InputError("too large")


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_checks_all_samples_once_before_training(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listening, "checked", [])
    model: nn.Module = Listening(nn.Flatten(), nn.Linear(2, 2))
    if inside:
        model = nn.Sequential(model, nn.Linear(2, 2))
    x = torch.rand(30, 2)
    federation = Federation.from_arrays(x, torch.arange(30) % 2, clients=[0, 1, 2] * 10)
    train(federation, model=model, rounds=3)
    assert [torch.equal(samples, x) for samples in Listening.checked] == [True]
    x[29, 1] = 1.5
    with pytest.raises(InputError, match="^too large$"):
        train(federation, model=model, rounds=3)
