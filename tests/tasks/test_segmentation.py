"""Segmentation: Dice by a slow loop, empty masks, refusals, augmentation, and a training run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from equipoise import Evaluation, Federation, Machine, tasks, train
from equipoise.data import Dirichlet, Source, draw, federate, load
from equipoise.data.augment import Crop, Flip
from equipoise.errors import InputError
from equipoise.models.base import Model
from equipoise.optimizers import Adam
from tests.engine.comparison import distance

SEGMENTATION = tasks.build("segmentation")


def dice_of(mask, predicted, classes):
    """Count pixels one by one."""
    values = []
    for label in range(1, classes):
        pairs = list(zip(mask.flatten().tolist(), predicted.flatten().tolist(), strict=True))
        both = sum(a == label and b == label for a, b in pairs)
        either = sum((a == label) + (b == label) for a, b in pairs)
        if either:
            values.append(2 * both / either)
    return sum(values) / len(values) if values else 1.0


def loss_of(mask, scores, classes):
    """Sum probabilities pixel by pixel."""
    total = 0.0
    height, width = mask.shape
    for label in range(1, classes):
        overlap = size = 0.0
        for i in range(height):
            for j in range(width):
                odds = [float(np.exp(scores[c, i, j])) for c in range(classes)]
                p, t = odds[label] / sum(odds), float(mask[i, j] == label)
                overlap, size = overlap + p * t, size + p + t
        total += 1 - (2 * overlap + 1) / (size + 1)
    return total / (classes - 1)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_loss_and_score_equal_a_slow_loop(classes):
    draws = torch.Generator().manual_seed(classes)
    output = torch.randn(6, classes, 4, 5, generator=draws, dtype=torch.float64)
    y = torch.randint(0, max(2, classes - 1), (6, 4, 5), generator=draws, dtype=torch.uint8)
    measured = SEGMENTATION.metrics(output, y)
    assert set(measured) == {"loss", "dice"}
    for sample in range(6):
        assert measured["loss"][sample] == pytest.approx(
            loss_of(y[sample], output[sample].numpy(), classes), rel=1e-12
        )
        wanted = dice_of(y[sample], output[sample].argmax(0), classes)
        assert measured["dice"][sample] == pytest.approx(wanted, rel=1e-12)
    stacked = vmap(SEGMENTATION.metrics)(output.view(2, 3, classes, 4, 5), y.view(2, 3, 4, 5))
    assert all(torch.equal(stacked[name].flatten(), measured[name]) for name in measured)


def certain(mask, classes):
    """Outputs that predict a mask."""
    return 50.0 * (torch.arange(classes).view(-1, 1, 1) == mask.unsqueeze(1)).float()


def test_empty_masks():
    empty, full = torch.zeros(1, 3, 3, dtype=torch.uint8), torch.ones(1, 3, 3, dtype=torch.uint8)
    cases = [(empty, empty), (empty, full), (full, empty), (full, full)]
    measured = [SEGMENTATION.metrics(certain(predicted, 2), mask) for mask, predicted in cases]
    assert [float(m["dice"]) for m in measured] == [1.0, 0.0, 0.0, 1.0]
    # 1 - 1 / (0 + 1); 1 - 1 / (9 + 1); 1 - 1 / (9 + 1); 1 - (18 + 1) / (18 + 1).
    assert [float(m["loss"]) for m in measured] == pytest.approx([0.0, 0.9, 0.9, 0.0], abs=1e-6)


def test_classes_that_are_absent_do_not_count():
    mask = torch.tensor([[[0, 1], [0, 1]]])
    # Class 1 is half found: 2 * 1 / (2 + 1). Class 2 is absent, class 3 is predicted but absent.
    half, wrong = torch.tensor([[[0, 1], [0, 0]]]), torch.tensor([[[0, 1], [3, 0]]])
    assert float(SEGMENTATION.metrics(certain(half, 4), mask)["dice"]) == pytest.approx(2 / 3)
    assert float(SEGMENTATION.metrics(certain(wrong, 4), mask)["dice"]) == pytest.approx(
        (2 / 3 + 0) / 2
    )


def test_a_gradient_of_empty_masks_is_finite_and_lowers_false_positives():
    output = torch.zeros(1, 2, 3, 3, requires_grad=True)
    SEGMENTATION.loss(output, torch.zeros(1, 3, 3, dtype=torch.uint8)).sum().backward()
    assert bool((output.grad[:, 1] > 0).all())


def masks(y, shape=(1, 4, 6), **options):
    return Federation.from_arrays(
        torch.zeros(len(y), *shape), y, clients=[0] * len(y), task="segmentation", **options
    )


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_masks_are_held_as_bytes(kind):
    y = torch.zeros(5, 4, 6)
    y[1, 2, 3] = 1
    federation = masks(y.to(kind))
    assert federation.y.dtype == torch.uint8
    assert torch.equal(federation.y.float(), y)
    assert (federation.classes, federation.outputs) == (2, 2)
    assert federation.fingerprint() == masks(y.long()).fingerprint()


def test_many_classes_are_held_as_they_are():
    y = torch.zeros(5, 4, 6, dtype=torch.int64)
    y[0, 0, 0] = 300
    assert (masks(y).y.dtype, masks(y).classes) == (torch.int64, 301)
    assert masks(torch.zeros(5, 4, 6, dtype=torch.int64)).classes == 2


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (
            torch.zeros(5, 4),
            {},
            r"must be masks of whole numbers of shape \[N, height, width\], not torch.uint8",
        ),
        (
            torch.full((5, 4, 6), 0.5),
            {},
            "sample 0 has label 0.5 in y; labels must be whole numbers",
        ),
        (
            torch.zeros(5, 6, 4),
            {},
            r"masks of shape \(6, 4\) do not fit samples of shape \(1, 4, 6\)",
        ),
        (
            torch.zeros(5, 4, 6),
            {"shape": (24,)},
            r"masks of shape \(4, 6\) do not fit samples of shape \(24,\)",
        ),
        (
            torch.tensor([0, 1, 4]).view(3, 1, 1).expand(3, 4, 6),
            {"classes": 3},
            r"sample 2 of client 0 \('0'\) has label 4 in its mask y; valid: 0 to 2",
        ),
        (torch.full((5, 4, 6), -1), {}, "has label -1 in its mask y; valid: 0 to 1"),
    ],
)
def test_wrong_masks_are_refused(y, options, message):
    with pytest.raises(InputError, match=message):
        masks(y, **options)


def test_labels_are_not_counted_and_not_divided_by(tmp_path):
    source = Source(
        x=torch.zeros(20, 1, 4, 4), y=torch.zeros(20, 4, 4, dtype=torch.uint8), task="segmentation"
    )
    with pytest.raises(
        InputError,
        match="dirichlet partition needs one label per sample, but source .* is a segmentation",
    ):
        federate(source, Dirichlet(2, beta=1.0))
    federation = load("ellipses", images=5, size=8)
    with pytest.raises(
        InputError, match="federation 'ellipses' is a segmentation and has no labels to count"
    ):
        federation.label_counts()
    assert "labels" not in federation.describe()[0]
    assert draw(federation, tmp_path / "sizes.png").exists()
    with pytest.raises(
        InputError, match="fedcrc compares class probabilities, but the task .* is segmentation"
    ):
        train(federation, method="fedcrc", model={"name": "unet", "width": 2, "depth": 1}, rounds=1)


def test_a_model_for_classes_of_samples_is_refused():
    federation = load("ellipses", images=5, size=8)
    with pytest.raises(
        InputError, match=r"shape \(2,\), but the federation has 2 classes for each pixel"
    ):
        train(federation, model="logistic", rounds=1)
    smaller = Model(nn.Conv2d(1, 2, 3), nn.Identity())
    with pytest.raises(
        InputError,
        match=r"shape \(2, 6, 6\), but the federation has 2 classes for each pixel of masks",
    ):
        train(federation, model=smaller, rounds=1)


class Sharpened:
    """Changes brightness only, with or without declaring it."""

    def __call__(self, x, keys):
        return 2 * x


@pytest.mark.parametrize("chunk", [1, 3])
def test_masks_move_with_their_images(chunk):
    """A pixel's class is its value, so a trained 1x1 convolution is right only if both move."""
    draws = np.random.default_rng(0)
    y = draws.integers(0, 2, (24, 5, 7))
    x = torch.tensor(y[:, None], dtype=torch.float64) * 2 - 1
    federation = Federation.from_arrays(x, y, clients=np.arange(24) // 8, task="segmentation")
    head = nn.Conv2d(1, 2, 1)
    head.weight.data, head.bias.data = torch.tensor([-40.0, 40.0]).view(2, 1, 1, 1), torch.zeros(2)
    how = {"rounds": 1, "batch_size": 3, "machine": Machine(chunk=chunk, precision="float64")}
    losses = {}
    for name, augment in {"none": (), "flip": (Flip(),), "both": (Flip(), Flip())}.items():
        run = train(federation, model=Model(nn.Identity(), head), augment=augment, **how)
        losses[name] = next(iter(run.trainer.rounds))["train_loss"]
    assert losses["none"] == pytest.approx(0, abs=1e-6)
    assert losses["flip"] == losses["both"] == pytest.approx(0, abs=1e-6)
    # Crop fills up with zeros, which are background in a mask and undecided in these images.
    cropped = train(federation, model=Model(nn.Identity(), head), augment=(Crop(1),), **how)
    assert 0 < next(iter(cropped.trainer.rounds))["train_loss"] < 0.2


def test_an_augmentation_must_say_whether_it_moves_pixels():
    federation = load("ellipses", images=5, size=8)
    how = {"model": {"name": "unet", "width": 2, "depth": 1}, "rounds": 1}
    with pytest.raises(
        InputError,
        match="Sharpened does not declare whether it moves pixels, so that the targets",
    ):
        train(federation, augment=(Sharpened(),), **how)


@pytest.fixture(scope="module")
def trained():
    """Federated averaging over four sites with different intensities."""
    federation = load("ellipses", images=40, size=24)
    how = {
        "rounds": 3,
        "batch_size": 5,
        "epochs": 2,
        "optimizer": Adam(lr=0.01),
        "evaluation": Evaluation(every=3),
    }
    return federation, train(federation, model={"name": "unet", "width": 8, "depth": 2}, **how)


def test_ellipses_are_found_at_every_site(trained):
    federation, run = trained
    results = run.summary["results"]["global"]["seen"]
    assert run.summary["score"] == "dice"
    assert results["mean"] >= 0.85
    assert min(results["groups"].values()) >= 0.8
    # The reported score is the mean over a client's samples.
    model = run.model()
    mine = federation.test.of(1)
    with torch.no_grad():
        predicted = model(federation.x[mine]).argmax(1)
    scores = [
        dice_of(federation.y[sample], found, 2)
        for sample, found in zip(mine, predicted, strict=True)
    ]
    assert results["groups"]["site 1"] == pytest.approx(np.mean(scores), rel=1e-6)


def test_stacked_sites_equal_sites_one_by_one_with_adam_padding_and_augmentation():
    federation = load("ellipses", sites=3, images=9, size=12, empty=0.3)
    model = {"name": "unet", "width": 2, "depth": 1, "norm": "batch"}
    runs = [
        train(
            federation,
            model=model,
            rounds=2,
            batch_size=4,
            optimizer=Adam(lr=0.01),
            augment=(Flip(), Crop(1)),
            machine=Machine(chunk=chunk, precision="float64"),
        )
        for chunk in (1, 3)
    ]
    assert distance(*(run.trainer.global_model for run in runs)) <= 1e-9
    one, other = (list(run.trainer.metrics) for run in runs)
    assert [row["dice"] for row in one] == pytest.approx([row["dice"] for row in other], abs=1e-12)
