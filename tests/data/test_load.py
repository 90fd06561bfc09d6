"""Loading by name, and the embedded digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from equipoise.data import PARTITIONS, SOURCES, Dirichlet, Iid, load, make_partition, recipe_of
from equipoise.data.digits import digits
from equipoise.errors import InputError


def test_digits_use_every_image_once_in_its_style() -> None:
    """Undo every style with a slow loop and compare with the raw images, one by one."""
    source, raw = digits(imbalance=10), load_digits()
    assert source.x.shape == (1797, 1, 8, 8)
    assert source.x.dtype == torch.float32
    assert float(source.x.min()) >= 0
    assert float(source.x.max()) <= 1
    assert source.y.tolist() == raw.target.tolist()
    assert source.groups is not None
    for image, original, style in zip(
        source.x[:, 0].numpy(), raw.images / 16, source.groups, strict=True
    ):
        match source.group_names[style]:
            case "plain":
                assert np.allclose(image, original)
            case "inverted":
                assert np.allclose(1 - image, original)
            case "rotated":
                assert all(
                    image[7 - column, row] == original[row, column]
                    for row in range(8)
                    for column in range(8)
                )
            case "blurred":
                middle = sum(
                    weight * original[4 + i, 3 + j]
                    for (i, j), weight in np.ndenumerate(np.outer([1, 2, 1], [1, 2, 1]) / 16)
                    for i, j in [(i - 1, j - 1)]
                )
                assert image[4, 3] == pytest.approx(middle, abs=1e-6)
            case "textured":
                even = np.indices((8, 8)).sum(axis=0) % 2 == 0
                assert np.allclose(image[even], original[even])
                assert (image[~even & (original == 0)] >= 0.5).all()


@pytest.mark.parametrize(
    ("imbalance", "sizes"),
    [
        (None, [359, 360, 359, 360, 359]),
        (10, [833, 469, 263, 149, 83]),
        (1, [359, 360, 359, 360, 359]),
    ],
)
def test_digits_shares(imbalance: float | None, sizes: list[int]) -> None:
    groups = digits(imbalance=imbalance).groups
    assert groups is not None
    assert np.bincount(groups).tolist() == sizes


def test_digits_seed() -> None:
    assert torch.equal(digits(seed=3).x, digits(seed=3).x)
    assert not torch.equal(digits(seed=3).x, digits(seed=4).x)


def test_load_digits_as_usual() -> None:
    federation = load("digits")
    assert federation.fingerprint() == load("digits", imbalance=10, seed=0).fingerprint()
    assert np.bincount(federation.groups).tolist() == [10, 6, 3, 2, 1]
    assert sum(sum(row["labels"]) for row in federation.describe()) == 1797
    assert federation.test.sizes.min() >= 4
    assert federation.fingerprint() != load("digits", seed=1).fingerprint()
    assert np.bincount(load("digits", imbalance=None).groups).tolist() == [2, 2, 2, 2, 2]


def test_load_with_another_partition() -> None:
    expected = load("digits", partition=Dirichlet(20, 0.3), unseen=0.1).fingerprint()
    named = {"name": "dirichlet", "clients": 20, "beta": 0.3}
    assert load("digits", partition=named, unseen=0.1).fingerprint() == expected
    assert load("digits", partition={"name": "iid", "clients": 9}).clients == 9
    assert not load("digits", leave_out="textured").unseen[:21].any()


def test_every_registered_name_resolves() -> None:
    ours = {name for name, place in SOURCES.items() if isinstance(place, str)}
    assert ours == {
        "digits",
        "mnist",
        "emnist",
        "digitfive",
        "cifar",
        "leaf",
        "shakespeare",
        "arrays",
        "table",
        "silos",
        "imagefolder",
        "prostate",
        "ellipses",
        "adult",
    }
    assert set(PARTITIONS) == {
        "iid",
        "dirichlet",
        "classes",
        "group",
        "natural",
        "skewed",
        "threegroups",
    }
    assert all(callable(recipe_of(name)) for name in SOURCES)
    assert make_partition("iid", clients=4) == Iid(4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, "unknown data 'digit'; did you mean 'digits'"),
        (
            "digits",
            {"imbalanc": 3},
            "unknown option 'imbalanc' in data 'digits'; did you mean 'imbalance'",
        ),
        ("digits", {"imbalance": 0.1}, "imbalance must be a finite number of at least 1, got 0.1"),
        (
            "digits",
            {"imbalance": "ten"},
            "imbalance must be a finite number of at least 1, got 'ten'",
        ),
        ("digits", {"partition": "diriclet"}, "did you mean 'dirichlet'"),
        ("digits", {"partition": "dirichlet"}, "partition 'dirichlet' needs clients and beta"),
        ("digits", {"partition": "iid"}, r"needs clients \(data.partition.clients\)$"),
        ("digits", {"partition": {"clients": 3}}, "needs a name"),
        ("digits", {"partition": {"name": "iid", "client": 3}}, "did you mean 'clients'"),
        ("digits", {"partition": "natural"}, "has no client ids"),
        ("digits", {"leave_out": "blured"}, "did you mean 'blurred'"),
    ],
)
def test_refuses(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(name, **options)


def test_styles_differ_in_difficulty() -> None:
    """Trained on plain digits, logistic regression reads blurred ones but not the rare styles."""
    from sklearn.linear_model import LogisticRegression

    source = digits()
    assert source.groups is not None
    x, y = source.x.flatten(1).numpy(), source.y.numpy()
    reader = LogisticRegression(max_iter=500).fit(x[source.groups == 0], y[source.groups == 0])
    accuracy = [
        reader.score(x[source.groups == style], y[source.groups == style]) for style in range(5)
    ]
    assert min(accuracy[:2]) > 0.7
    assert max(accuracy[2:]) < 0.5
