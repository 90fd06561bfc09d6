"""Small models in float64, and the names of their parameters whose true gradient is zero."""

from __future__ import annotations

import torch
from torch import nn

from equipoise.models import build
from equipoise.models.base import Model

# A bias that BatchNorm subtracts has a true gradient of zero, and optimizers amplify its rounding
# noise. These are the biases of ``batchnorm``.
WITHOUT_GRADIENT = {"features.0.bias", "features.3.bias"}
# These are the biases of ``normalised``.
NOISE = {"features.0.bias", "head.0.bias"}


def mlp(dropout=0.0):
    torch.manual_seed(1)
    layers = [nn.Flatten(), nn.Linear(50, 12), nn.ReLU()]
    return Model(
        nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else [])), nn.Linear(12, 4)
    ).double()


def batchnorm(running=True):
    torch.manual_seed(2)
    first, second = (nn.BatchNorm2d(channels, track_running_stats=running) for channels in (6, 5))
    features = nn.Sequential(
        nn.Conv2d(2, 6, 3), first, nn.ReLU(), nn.Conv2d(6, 5, 2), second, nn.ReLU(), nn.Flatten()
    )
    return Model(features, nn.Linear(20, 4)).double()


def normalised():
    """A model with BatchNorm in both parts; a sample has several positions, so a variance."""
    torch.manual_seed(3)
    features = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    head = nn.Sequential(nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))
    return Model(features, head).double()


def lstm():
    return build("charlstm", shape=(9,), classes=7, seed=3, embedding=3, hidden=5).double()


def transformer(name="vitprompts", **options):
    """A transformer for images (1, 8, 8). Except for ``vit``, only prompts or adapters train."""
    small = {"patch": 4, "width": 16, "depth": 1, "heads": 2, **options}
    return build(name, shape=(1, 8, 8), classes=4, seed=5, **small).double()


def unet(norm="instance"):
    """A U-Net for images of shape (2, 9, 11) and three classes."""
    return build("unet", shape=(2, 9, 11), classes=3, seed=6, width=2, depth=2, norm=norm).double()


class Tempered(nn.Module):
    """A linear layer whose scores are multiplied by one learned number."""

    def __init__(self, *sizes):
        super().__init__()
        self.linear = nn.Linear(*sizes)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.linear(x) * self.temperature


def single_numbers():
    torch.manual_seed(4)
    return Model(nn.Sequential(nn.Flatten(), Tempered(50, 8), nn.ReLU()), Tempered(8, 4)).double()
