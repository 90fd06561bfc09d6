"""Ordinary modules, several labels and custom losses: on Flower as in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch.nn.functional as F
from torch import nn

from equipoise import models
from equipoise.models.headed import with_head
from tests.engine.own_models import image_classifier
from tests.flower.loop import write_experiment, write_silos
from tests.flower.parity import compare


class Dense(nn.Module):
    """A network with functional dropout and unusual names of layers."""

    def __init__(self, classes):
        super().__init__()
        self.first, self.classifier = nn.Linear(64, 12), nn.Linear(12, classes)

    def forward(self, x):
        x = F.dropout(F.relu(self.first(x.flatten(1))), 0.4, self.training)
        return self.classifier(x)


class Rows(nn.Module):
    """Reads the rows of an image one after the other, with dropout between the layers."""

    def __init__(self, classes):
        super().__init__()
        self.layers = nn.GRU(8, 6, num_layers=2, dropout=0.4, batch_first=True)
        self.classifier = nn.Linear(6, classes)

    def forward(self, x):
        return self.classifier(self.layers(x.squeeze(1))[0][:, -1])


class Patches(nn.Module):
    """A transformer encoder of the rows of an image."""

    def __init__(self, classes):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True)
        self.classifier = nn.Linear(8, classes)

    def forward(self, x):
        return self.classifier(self.encoder(x.squeeze(1)).mean(1))


@models.register
def plain_dense(shape, classes):
    """Build a module without features and head."""
    return Dense(classes)


@models.register
def rows(shape, classes):
    """Build a recurrent module."""
    return Rows(classes)


@models.register
def patches(shape, classes):
    """Build a transformer with a named head."""
    return with_head(Patches(classes), "classifier")


@models.register
def tiny_vit(shape, classes):
    """Build a ViT of Hugging Face."""
    return with_head(image_classifier(shape=shape, classes=classes, patch=4), "classifier")


@pytest.mark.parametrize(
    ("model", "method", "loss"),
    [
        ("tiny_vit", "fedper", None),
        ("plain_dense", "fedavg", "focal"),
        ("rows", "qffl", None),
        ("patches", "fedrep", {"name": "focal", "gamma": 1.0}),
    ],
)
def test_results_are_those_of_one_process(tmp_path, model, method, loss):
    write_silos(tmp_path / "silos")
    training = {"rounds": 2, "batch_size": 64, **({"loss": loss} if loss else {})}
    path = write_experiment(tmp_path, model=model, method=method, training=training)
    alone, run, _ = compare(path, tmp_path)
    assert run.config["training"] == alone.config["training"]


def test_several_labels_are_learned_as_in_one_process(tmp_path):
    """Each digit is one class, and odd digits have a second one."""
    for file in sorted(write_silos(tmp_path / "silos").glob("*/data.npz")):
        with np.load(file) as held:
            x, y = held["x"], held["y"]
        np.savez(file, x=x, y=np.concatenate([np.eye(10)[y], (y % 2)[:, None]], 1))
    data = {"task": "multilabel", "classes": 11}
    path = write_experiment(
        tmp_path, data=data, model="mlp", training={"rounds": 2, "loss": "focal"}
    )
    alone, run, _ = compare(path, tmp_path)
    assert run.summary["score"] == alone.summary["score"] == "f1"
