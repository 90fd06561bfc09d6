"""Four federations of 20 clients made from the embedded digits, to test ``equipoise advise``.

Each of them differs from an equal division in one respect. Import the file to use them as sources:
``equipoise advise digits_labels --import experiments/advice/federations.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from equipoise import data
from equipoise.data.draws import generator
from equipoise.data.partition import Assignment, Dirichlet, Iid, Partition
from equipoise.data.source import Source

CLIENTS = 20


def plain() -> Source:
    """Return the original digits, without styles and groups."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.tensor(raw.images[:, None] / 16, dtype=torch.float32)
    return Source(x=x, y=torch.tensor(raw.target, dtype=torch.int64), classes=10, name="digits")


@dataclass(frozen=True)
class Unequal:
    """Clients whose numbers of samples are a power law of their rank, with equal label shares."""

    clients: int = CLIENTS
    power: float = 1.5
    least: int = 20

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``."""
        shares = np.arange(1, self.clients + 1) ** -self.power
        rest = len(source.y) - self.clients * self.least
        ends = np.cumsum(self.least + np.floor(rest * shares / shares.sum())).astype(int)
        order = generator(seed, "partition").permutation(len(source.y))[: ends[-1]]
        return Assignment(
            np.split(order, ends[:-1]), groups=[0] * self.clients, group_names=("all",)
        )


@data.register
def digits_iid(*, seed: int) -> tuple[Source, Partition]:
    """Clients that differ only by chance."""
    return plain(), Iid(CLIENTS)


@data.register
def digits_labels(*, seed: int, beta: float = 0.1) -> tuple[Source, Partition]:
    """Clients with different labels."""
    return plain(), Dirichlet(CLIENTS, beta=beta, min_samples=20)


@data.register
def digits_features(*, seed: int) -> tuple[Source, Partition]:
    """Clients whose images have different styles: four clients of each of five styles."""
    source, _ = data.recipe_of("digits")(seed=seed, imbalance=1.0)
    return source, Iid(CLIENTS)


@data.register
def digits_sizes(*, seed: int) -> tuple[Source, Partition]:
    """Clients with different numbers of samples."""
    return plain(), Unequal()
