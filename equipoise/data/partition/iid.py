"""Equal shares, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equipoise.data.partition.base import Assignment, Ints, check_counts, inside_groups
from equipoise.data.source import Source


@dataclass(frozen=True)
class Iid:
    """Every client gets an equal share of samples drawn at random.

    Parameters
    ----------
    clients : int
        Number of clients. Each group gets a number in proportion to its samples.
    min_samples : int
        Minimum number of samples per client.

    Examples
    --------
    >>> import torch
    >>> source = Source(x=torch.zeros(10, 1), y=torch.zeros(10, dtype=torch.int64))
    >>> [len(samples) for samples in Iid(3).assign(source, seed=0).clients]
    [4, 3, 3]
    """

    clients: int
    min_samples: int = 3

    def __post_init__(self) -> None:
        check_counts(self, "clients", "min_samples")

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``. The same seed gives the same result."""

        def divide(
            samples: Ints, first: int, clients: int, draws: np.random.Generator
        ) -> list[Ints]:
            return np.array_split(draws.permutation(samples), clients)

        return inside_groups(source, self.clients, self.min_samples, seed, divide)
