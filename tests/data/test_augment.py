"""Augmentation: possible results, their frequencies, and separate random numbers per image."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from equipoise import Federation, train
from equipoise.data.augment import Crop, Flip, augmentation_from, augmentation_to_plain
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.random import fold_tensor
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.small_models import mlp
from tests.rounds import play


def keys(count, key=0):
    return fold_tensor(key, torch.arange(count))


def test_flip_mirrors_about_half_of_the_images():
    x = torch.arange(2 * 3 * 4.0).view(1, 2, 3, 4).expand(2000, -1, -1, -1)
    y = Flip()(x, keys(2000))
    mirrored = (y == x.flip(-1)).flatten(1).all(1)
    same = (y == x).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert chisquare([int(mirrored.sum()), int(same.sum())]).pvalue > 1e-3


def test_crop_shifts_by_every_amount_equally_often():
    """One bright pixel in the middle shows how the image was shifted."""
    x = torch.zeros(4500, 1, 5, 5)
    x[:, :, 2, 2] = 1
    y = Crop(padding=1)(x, keys(4500))
    assert y.sum() == 4500
    places = y.flatten(1).argmax(1).numpy()
    counts = Counter(zip(places // 5 - 2, places % 5 - 2, strict=True))
    assert set(counts) == {(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)}
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_crop_pads_with_zeros_and_moves_all_channels_together():
    x = torch.from_numpy(np.random.default_rng(0).uniform(1, 2, (40, 3, 4, 6)))
    found = Crop(padding=2)(x, keys(40))
    framed = torch.nn.functional.pad(x, [2, 2, 2, 2])
    for image in range(40):
        windows = {
            (i, j): framed[image, :, i : i + 4, j : j + 6] for i in range(5) for j in range(5)
        }
        assert sum(torch.equal(found[image], window) for window in windows.values()) == 1


@pytest.mark.parametrize("augmentation", [Flip(), Crop(padding=2)])
def test_an_image_does_not_depend_on_its_batch(augmentation):
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(12, 2, 5, 5)))
    together = augmentation(x, keys(12))
    for image in (0, 5, 11):
        assert torch.equal(
            augmentation(x[image : image + 1], keys(12)[image : image + 1])[0], together[image]
        )
    assert not torch.equal(augmentation(x, keys(12, key=1)), together)


def test_crop_refuses_to_stand_still():
    with pytest.raises(
        InputError, match="crop.padding must be a whole number of at least 1, got 0"
    ):
        Crop(padding=0)


@pytest.mark.parametrize(
    ("augmentation", "plain"),
    [(Flip(), {"name": "flip"}), (Crop(padding=2), {"name": "crop", "padding": 2})],
)
def test_an_augmentation_survives_its_plain_form(augmentation, plain):
    assert augmentation_to_plain(augmentation) == plain
    assert augmentation_from(plain) == augmentation


def test_an_augmentation_may_be_a_bare_name():
    assert augmentation_from("crop") == Crop(padding=4)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ("flp", "unknown augmentation 'flp' in training.augment; did you mean 'flip'"),
        ({"name": "crop", "pading": 2}, "'pading' in training.augment; did you mean 'padding'"),
        (
            {"padding": 2},
            "training.augment must be a name or a mapping with 'name', got {'padding': 2}",
        ),
        (3, "training.augment must be a name or a mapping with 'name', got 3"),
    ],
)
def test_mistakes_in_the_plain_form_are_named(plain, message):
    with pytest.raises(InputError, match=message):
        augmentation_from(plain)


@pytest.mark.parametrize("augmentation", [Flip(), Crop(padding=2)])
@pytest.mark.parametrize("shape", [(5,), (5, 5), (1, 2, 5, 5)])
def test_samples_that_are_no_images_are_refused_before_training(augmentation, shape, tmp_path):
    x = np.random.default_rng(0).normal(size=(8, *shape))
    data = Federation.from_arrays(x, np.arange(8) % 2, clients=np.arange(8) // 4, splits=(1, 0, 0))
    name = type(augmentation).__name__
    message = (
        f"augment: {name} needs images (channels, height, width), got samples of shape {shape}"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        train(data, model="logistic", rounds=1, augment=(augmentation,), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_augmentation_of_ones_own_may_change_any_samples():
    seen = []

    def noise(x, keys):
        seen.append((x.shape, keys.shape))
        return x + 1

    data = Federation.from_arrays(
        np.ones((6, 5)), np.arange(6) % 2, clients=[0] * 6, splits=(1, 0, 0)
    )
    train(data, model="logistic", rounds=1, batch_size=6, augment=(noise,))
    assert seen == [((6, 5), (6,))]


def test_augmented_training_does_not_depend_on_the_chunk():
    how = {
        "batch_size": 8,
        "epochs": 2,
        "optimizer": Sgd(lr=0.1),
        "augment": (Flip(), Crop(padding=1)),
    }
    models = [
        play(build("fedavg"), images(), mlp(), [range(10)] * 2, chunk=chunk, **how).model
        for chunk in (1, 3, 10)
    ]
    assert distance(models[1], models[0]) <= 1e-9
    assert distance(models[2], models[0]) <= 1e-9
    plain = play(build("fedavg"), images(), mlp(), [range(10)] * 2, **{**how, "augment": ()}).model
    assert distance(plain, models[0]) > 1e-3
