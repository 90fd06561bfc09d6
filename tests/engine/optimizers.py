"""Options of optimizers by name, and PyTorch's optimizers of the same names."""

from __future__ import annotations

import torch

OPTIMIZERS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "weight_decay": 0.01},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
}
TORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
