"""Ten clients of very unequal sizes, with images or text, and the clients of three rounds."""

from __future__ import annotations

import numpy as np
import torch

from equipoise.federation import Federation

SIZES = [1, 3, 7, 20, 53, 8, 2, 16, 9, 31]
THREE_COHORTS = [np.arange(10), np.array([0, 2, 4, 5, 9]), np.array([1, 3, 4, 6, 7, 8])]


def images(seed=0, sizes=SIZES, shape=(2, 5, 5), splits=(1.0, 0.0, 0.0)):
    """Ten clients of very unequal sizes; by default each holds all its samples in train."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    x = torch.randn(total, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (total,), generator=generator)
    y[:4] = torch.arange(4)
    clients = np.repeat(np.arange(len(sizes)), sizes)
    return Federation.from_arrays(x, y, clients=clients, splits=splits, classes=4)


def masks(seed=0, sizes=SIZES, shape=(2, 9, 11)):
    """Ten clients of unequal sizes; two kinds of objects are bright in different channels."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    y = torch.randint(0, 3, (total, *shape[1:]), generator=generator)
    x = torch.randn(total, *shape, generator=generator, dtype=torch.float64)
    x[:, 0] += (y == 1).double()
    x[:, 1] += (y == 2).double()
    clients = np.repeat(np.arange(len(sizes)), sizes)
    return Federation.from_arrays(
        x, y, clients=clients, splits=(1.0, 0.0, 0.0), task="segmentation"
    )


def text(seed=0, sizes=SIZES):
    """Ten clients of unequal sizes in two groups; the next character depends on the last."""
    draws = np.random.default_rng(seed)
    clients = np.repeat(np.arange(len(sizes)), sizes)
    x = draws.integers(0, 7, (len(clients), 9))
    y = np.where(
        draws.random(len(clients)) < 0.7, (x[:, -1] + 1) % 7, draws.integers(0, 7, len(clients))
    )
    y[:7] = np.arange(7)
    groups = {client: ("few", "many")[client % 2] for client in range(len(sizes))}
    return Federation.from_arrays(
        x, y, clients=clients, groups=groups, splits=(1.0, 0.0, 0.0), classes=7
    )


def several_labels(y=None):
    """Four clients of unequal sizes; each of three classes is linear in x by default."""
    clients = np.repeat(np.arange(4), [6, 10, 17, 27])
    x = np.random.default_rng(0).normal(size=(60, 5))
    y = (x @ np.random.default_rng(1).normal(size=(5, 3)) > 0.5) if y is None else y
    return Federation.from_arrays(x, y, clients=clients, splits=(0.6, 0.2, 0.2), task="multilabel")
