"""Clients with different labels: drawn from a Dirichlet distribution, or given by a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipoise.checks import flag, real
from equipoise.data.partition.base import (
    Assignment,
    Ints,
    check_counts,
    cuts,
    fill_up,
    inside_groups,
    labels_of,
)
from equipoise.data.source import Source
from equipoise.errors import InputError


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: proportions of classes are drawn from a symmetric Dirichlet distribution.

    Two variants are known under this name, and they give different federations. By default, each
    class is divided among the clients in random proportions, so clients also differ in size.
    Clients below ``min_samples`` then get one sample at a time from the client that holds most at
    that moment. With ``equal``, clients have equal sizes, and each draws the proportions of its own
    classes (Hsu et al., 2019), one client after the other. When a class is used up, its share goes
    to the other classes, so the last clients get the remaining samples.

    With a small ``beta`` a client has few classes; a large ``beta`` approaches `Iid`.

    Parameters
    ----------
    clients : int
        Number of clients. Each group gets a number in proportion to its samples.
    beta : float
        Concentration of the Dirichlet distribution, above 0.
    equal : bool
        Whether clients have equal sizes and draw their own proportions.
    min_samples : int
        Minimum number of samples per client.

    Examples
    --------
    >>> import torch
    >>> source = Source(x=torch.zeros(40, 1), y=torch.arange(40) % 4)
    >>> [len(samples) for samples in Dirichlet(5, beta=0.1).assign(source, seed=0).clients]
    [11, 3, 11, 3, 12]
    >>> equal = Dirichlet(5, beta=0.1, equal=True).assign(source, seed=0)
    >>> [len(samples) for samples in equal.clients]
    [8, 8, 8, 8, 8]
    """

    clients: int
    beta: float
    equal: bool = False
    min_samples: int = 3

    def __post_init__(self) -> None:
        check_counts(self, "clients", "min_samples")
        real(self.beta, "beta")
        flag(self.equal, "equal")

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``. The same seed gives the same result."""
        beta, labels = float(self.beta), labels_of(source, "dirichlet")

        def by_class(samples: Ints, draws: np.random.Generator) -> Iterator[Ints]:
            return (
                draws.permutation(samples[labels[samples] == label])
                for label in np.unique(labels[samples])
            )

        def share_classes(
            samples: Ints, first: int, clients: int, draws: np.random.Generator
        ) -> list[Ints]:
            pieces: list[list[Ints]] = [[] for _ in range(clients)]
            for of_class in by_class(samples, draws):
                shares = draws.dirichlet(np.full(clients, beta))
                for client, piece in enumerate(np.split(of_class, cuts(shares, len(of_class)))):
                    pieces[client].append(piece)
            mixed = [draws.permutation(np.concatenate(piece)) for piece in pieces]
            return fill_up(mixed, self.min_samples)

        def fill_clients(
            samples: Ints, first: int, clients: int, draws: np.random.Generator
        ) -> list[Ints]:
            classes = list(by_class(samples, draws))
            left = np.array([len(of_class) for of_class in classes])
            held = []
            for size in [len(part) for part in np.array_split(samples, clients)]:
                taken = _take(draws.dirichlet(np.full(len(classes), beta)), size, left, draws)
                parts = zip(classes, left, taken, strict=True)
                mine = np.concatenate(
                    [of_class[rest - some : rest] for of_class, rest, some in parts]
                )
                held.append(draws.permutation(mine))
                left -= taken
            return held

        divide = fill_clients if self.equal else share_classes
        return inside_groups(source, self.clients, self.min_samples, seed, divide)


@dataclass(frozen=True)
class ClassesPerClient:
    """Label skew by a rule: client k holds classes k, k + 1, ... cyclically.

    The samples of a class are divided equally among the clients that hold it.

    Parameters
    ----------
    clients : int
        Number of clients. Each group gets a number in proportion to its samples.
    classes : int
        Number of classes per client.
    min_samples : int
        Minimum number of samples per client.

    Examples
    --------
    >>> import torch
    >>> source = Source(x=torch.zeros(40, 1), y=torch.arange(40) % 4)
    >>> parts = ClassesPerClient(4, classes=2).assign(source, seed=0).clients
    >>> sorted(set(source.y[parts[3]].tolist()))
    [0, 3]
    """

    clients: int
    classes: int
    min_samples: int = 3

    def __post_init__(self) -> None:
        check_counts(self, "clients", "classes", "min_samples")

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``. The same seed gives the same result."""
        labels = labels_of(source, "classes")
        total = source.classes or 0
        if self.classes > total:
            raise InputError(
                f"classes={self.classes} per client is more than the {total} of source "
                f"{source.name!r}"
            )

        def divide(
            samples: Ints, first: int, clients: int, draws: np.random.Generator
        ) -> list[Ints]:
            pieces: list[list[Ints]] = [[] for _ in range(clients)]
            for label in np.unique(labels[samples]):
                holders = [k for k in range(clients) if (label - first - k) % total < self.classes]
                if not holders:
                    raise InputError(
                        f"none of clients {first} to {first + clients - 1} would hold class "
                        f"{label}: {self.classes} classes per client do not cover all {total}; ask "
                        "for more clients or more classes per client"
                    )
                of_class = draws.permutation(samples[labels[samples] == label])
                for client, piece in zip(
                    holders, np.array_split(of_class, len(holders)), strict=True
                ):
                    pieces[client].append(piece)
            held = [np.concatenate([np.empty(0, np.int64), *piece]) for piece in pieces]
            for client, mine in enumerate(held, start=first):
                if len(mine) < self.min_samples:
                    raise InputError(
                        f"client {client} would hold {len(mine)} samples of its {self.classes} "
                        f"classes, fewer than min_samples={self.min_samples}; ask for fewer clients"
                    )
            return held

        return inside_groups(source, self.clients, self.min_samples, seed, divide)


def _take(shares: NDArray[np.float64], size: int, left: Ints, draws: np.random.Generator) -> Ints:
    """Draw the classes of ``size`` samples in the given proportions, at most ``left`` of each."""
    taken = np.zeros_like(left)
    while (missing := size - taken.sum()) > 0:
        odds = np.where(taken < left, shares, 0.0)
        if not odds.sum() > 0:  # the classes drawn are used up
            odds = (left - taken).astype(float)
        taken = np.minimum(taken + draws.multinomial(missing, odds / odds.sum()), left)
    return taken
