"""Shared code of tests on a GPU: a skip mark, a model, optimizers; and GPUs that are not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.models.base import Model
from equipoise.optimizers import optimizer_named

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"
)
# The true gradient of this bias of ``model`` is zero, because BatchNorm subtracts it.
SKIP = {"features.0.bias"}
OPTIMIZERS = {
    "momentum": optimizer_named("sgd", lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": optimizer_named("sgd", lr=0.05, momentum=0.5, nesterov=True),
    "adamw": optimizer_named("adamw", lr=0.005),
}


def pretend_gpus(monkeypatch, count):
    """Let PyTorch count GPUs that are not there; return a list that gets the chosen ones."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def model():
    torch.manual_seed(2)
    features = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 2, stride=2),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
    )
    return Model(features, nn.Linear(5, 4)).double()
