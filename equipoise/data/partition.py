"""Partitions: the ways to divide a source's samples among clients.

Every partition is a frozen dataclass that only stores what it is told and answers ``assign(source, seed)``. Where the
source has groups, clients are made inside each group, so that a client always belongs to exactly one.

``min_samples`` is the least a client may hold. It is 3 unless told otherwise, because a client needs one sample each to
train, to validate and to test on. What cannot be met is refused before anything is drawn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from equipoise.checks import count, real
from equipoise.data.draws import generator
from equipoise.data.source import Source
from equipoise.errors import InputError, flag

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Assignment:
    """Who got which samples.

    Parameters
    ----------
    clients : list of int arrays
        Sample positions of every client.
    groups : list of int
        Every client's group, as a position in ``group_names``.
    group_names : tuple of str
        Names of the groups.
    names : tuple of str, optional
        Names of the clients, where they have any.

    Examples
    --------
    >>> Assignment([np.array([0, 2]), np.array([1])], groups=[0, 0], group_names=("all",)).clients[0].tolist()
    [0, 2]
    """

    clients: list[Ints]
    groups: list[int]
    group_names: tuple[str, ...]
    names: tuple[str, ...] | None = None


class Partition(Protocol):
    """Anything that can divide a source among clients."""

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``; the same seed always gives the same answer."""
        ...


@dataclass(frozen=True)
class Iid:
    """Every client gets an equal share of samples drawn at random.

    Parameters
    ----------
    clients : int
        How many clients, over all groups in proportion to their samples.
    min_samples : int
        The least a client may hold.

    Examples
    --------
    >>> import torch
    >>> source = Source(x=torch.zeros(10, 1), y=torch.zeros(10, dtype=torch.int64))
    >>> [len(samples) for samples in Iid(3).assign(source, seed=0).clients]
    [4, 3, 3]
    """

    clients: int
    min_samples: int = 3

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``; the same seed always gives the same answer."""

        def divide(samples: Ints, first: int, clients: int, draws: np.random.Generator) -> list[Ints]:
            return np.array_split(draws.permutation(samples), clients)

        return _inside_groups(source, self.clients, self.min_samples, seed, divide)


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: proportions of classes are drawn from a symmetric Dirichlet.

    Two ways are in use under this name, and they make unlike federations. As it stands, each class is shared out among the
    clients in drawn proportions, so clients differ in size too; those left below ``min_samples`` are then filled up one
    sample at a time, each from whoever holds most at that moment. With ``equal``, clients are of equal size and each draws
    the proportions of its own classes (Hsu et al., 2019), one client after the other; a class that has run out leaves its
    share to the rest, so the last clients take what there is.

    Small ``beta`` gives few classes to a client, large ``beta`` approaches `Iid`.

    Parameters
    ----------
    clients : int
        How many clients, over all groups in proportion to their samples.
    beta : float
        Concentration of the Dirichlet, above 0.
    equal : bool
        Whether clients are of equal size and draw their own proportions.
    min_samples : int
        The least a client may hold.

    Examples
    --------
    >>> import torch
    >>> source = Source(x=torch.zeros(40, 1), y=torch.arange(40) % 4)
    >>> [len(samples) for samples in Dirichlet(5, beta=0.1).assign(source, seed=0).clients]
    [11, 3, 11, 3, 12]
    >>> [len(samples) for samples in Dirichlet(5, beta=0.1, equal=True).assign(source, seed=0).clients]
    [8, 8, 8, 8, 8]
    """

    clients: int
    beta: float
    equal: bool = False
    min_samples: int = 3

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``; the same seed always gives the same answer."""
        beta, labels = real(self.beta, "beta"), _labels(source, "dirichlet")

        def by_class(samples: Ints, draws: np.random.Generator) -> Iterator[Ints]:
            return (draws.permutation(samples[labels[samples] == label]) for label in np.unique(labels[samples]))

        def share_classes(samples: Ints, first: int, clients: int, draws: np.random.Generator) -> list[Ints]:
            pieces: list[list[Ints]] = [[] for _ in range(clients)]
            for of_class in by_class(samples, draws):
                shares = draws.dirichlet(np.full(clients, beta))
                for client, piece in enumerate(np.split(of_class, _cuts(shares, len(of_class)))):
                    pieces[client].append(piece)
            mixed = [draws.permutation(np.concatenate(piece)) for piece in pieces]
            return _fill_up(mixed, self.min_samples)

        def fill_clients(samples: Ints, first: int, clients: int, draws: np.random.Generator) -> list[Ints]:
            classes = list(by_class(samples, draws))
            left = np.array([len(of_class) for of_class in classes])
            held = []
            for size in [len(part) for part in np.array_split(samples, clients)]:
                taken = _take(draws.dirichlet(np.full(len(classes), beta)), size, left, draws)
                parts = zip(classes, left, taken, strict=True)
                mine = np.concatenate([of_class[rest - some : rest] for of_class, rest, some in parts])
                held.append(draws.permutation(mine))
                left -= taken
            return held

        divide = fill_clients if flag(self.equal, "equal") else share_classes
        return _inside_groups(source, self.clients, self.min_samples, seed, divide)


@dataclass(frozen=True)
class ClassesPerClient:
    """Label skew by rule: client k holds classes k, k + 1, ... in a circle, each shared equally by its holders.

    Parameters
    ----------
    clients : int
        How many clients, over all groups in proportion to their samples.
    classes : int
        How many classes each client holds.
    min_samples : int
        The least a client may hold.

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

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``; the same seed always gives the same answer."""
        labels = _labels(source, "classes")
        total = source.classes or 0
        if count(self.classes, "classes") > total:
            raise InputError(f"classes={self.classes} a client is more than the {total} of source {source.name!r}")

        def divide(samples: Ints, first: int, clients: int, draws: np.random.Generator) -> list[Ints]:
            pieces: list[list[Ints]] = [[] for _ in range(clients)]
            for label in np.unique(labels[samples]):
                holders = [k for k in range(clients) if (label - first - k) % total < self.classes]
                if not holders:
                    raise InputError(
                        f"none of clients {first} to {first + clients - 1} would hold class {label}: {self.classes} "
                        f"classes a client do not cover all {total}; ask for more clients or more classes a client"
                    )
                of_class = draws.permutation(samples[labels[samples] == label])
                for client, piece in zip(holders, np.array_split(of_class, len(holders)), strict=True):
                    pieces[client].append(piece)
            held = [np.concatenate([np.empty(0, np.int64), *piece]) for piece in pieces]
            for client, mine in enumerate(held, start=first):
                if len(mine) < self.min_samples:
                    raise InputError(
                        f"client {client} would hold {len(mine)} samples of its {self.classes} classes, fewer than "
                        f"min_samples={self.min_samples}; ask for fewer clients"
                    )
            return held

        return _inside_groups(source, self.clients, self.min_samples, seed, divide)


@dataclass(frozen=True)
class ByGroup:
    """Groups of very unequal weight: the domain imbalance factor of FedGCR.

    With D groups, the commonest first, and rho = imbalance^(1/(D-1)), group i gets round(rho^(D-1-i)) clients and,
    unless ``truncate`` is off, 1/rho of the samples of group i - 1. Inside a group each client holds rho times as many
    samples as the one before. ``imbalance=1`` means equal groups of two clients that hold samples 1 : 3. Clients left
    below ``min_samples`` are filled up from the largest ones of their group.

    Parameters
    ----------
    imbalance : float
        How many times more clients (and samples) the first group has than the last, 1 or more.
    clients : int, optional
        Total number of clients, divided among the groups in the proportions above.
    clients_per_group : sequence of int, optional
        Exactly how many clients each group gets.
    truncate : bool
        Leave samples out so that the groups' sizes fall by rho. Off for a source whose groups are unequal already.
    ratio : float, optional
        rho itself, where a rounded one is wanted: FedGCR's tables use 1.5 for five groups with imbalance 5 (not 1.495,
        which gives the fourth group one client fewer), and 1.6 for six with imbalance 10 (not 1.585).
    min_samples : int
        The least a client may hold.

    Examples
    --------
    >>> import torch
    >>> groups = np.repeat(np.arange(3), 100)
    >>> source = Source(x=torch.zeros(300, 1), y=torch.zeros(300).long(), groups=groups, group_names=("a", "b", "c"))
    >>> assignment = ByGroup(imbalance=4).assign(source, seed=0)
    >>> [(assignment.group_names[g], len(s)) for g, s in zip(assignment.groups, assignment.clients)]
    [('a', 6), ('a', 14), ('a', 26), ('a', 54), ('b', 16), ('b', 34), ('c', 25)]
    """

    imbalance: float
    clients: int | None = None
    clients_per_group: Sequence[int] | None = None
    truncate: bool = True
    ratio: float | None = None
    min_samples: int = 3

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``; the same seed always gives the same answer."""
        if source.groups is None:
            raise InputError(f"source {source.name!r} has no groups, so it cannot be partitioned by group")
        ratio = self._ratio(len(source.group_names))
        members = _by_group(source)
        counts = self._counts(ratio, source)
        kept = _falling_sizes([len(samples) for samples in members], ratio) if flag(self.truncate, "truncate") else None
        draws = generator(seed, "partition")
        clients: list[Ints] = []
        for group, samples in enumerate(members):
            mixed = draws.permutation(samples)[: kept[group] if kept else None]
            _enough(len(mixed), counts[group], self.min_samples, f"group {source.group_names[group]!r}")
            steps = np.arange(counts[group])
            step = ratio if self.imbalance > 1 else 3 ** (1 / max(1, counts[group] - 1))
            shares = step ** (steps - steps[-1])
            clients += _fill_up(np.split(mixed, _cuts(shares / shares.sum(), len(mixed))), self.min_samples)
        groups = np.repeat(np.arange(len(counts)), counts).tolist()
        names = tuple(f"{name} {j + 1}" for name, n in zip(source.group_names, counts, strict=True) for j in range(n))
        return Assignment(clients, groups, source.group_names, names)

    def _ratio(self, groups: int) -> float:
        if real(self.imbalance, "imbalance", least=1) > 1 and groups == 1:
            raise InputError(f"imbalance={self.imbalance} needs two or more groups; the source has one")
        if self.ratio is not None:
            if self.imbalance == 1:
                raise InputError(f"ratio={self.ratio} makes no sense with imbalance=1, which means equal groups")
            return real(self.ratio, "ratio", least=1)
        return float(self.imbalance ** (1 / max(1, groups - 1)))

    def _counts(self, ratio: float, source: Source) -> list[int]:
        falling = ratio ** np.arange(len(source.group_names) - 1, -1, -1.0)
        if self.clients_per_group is not None:
            if self.clients is not None:
                raise InputError("give clients or clients_per_group to the group partition, not both")
            if len(self.clients_per_group) != len(falling):
                raise InputError(
                    f"clients_per_group={list(self.clients_per_group)} must name one number for each of the "
                    f"{len(falling)} groups {', '.join(source.group_names)}"
                )
            return [count(clients, "each of clients_per_group") for clients in self.clients_per_group]
        if self.clients is not None:
            return _apportion(self.clients, falling)
        return [2] * len(falling) if self.imbalance == 1 else [round(weight) for weight in falling.tolist()]


@dataclass(frozen=True)
class Natural:
    """Every client holds what came from it; clients with fewer than ``min_samples`` samples are left out.

    Parameters
    ----------
    min_samples : int
        The least a client may hold.

    Examples
    --------
    >>> import torch
    >>> ids = np.array(["ann"] * 3 + ["bob"] * 4 + ["cleo"])
    >>> Natural().assign(Source(x=torch.zeros(8, 1), y=torch.zeros(8).long(), ids=ids), seed=0).names
    ('ann', 'bob')
    """

    min_samples: int = 3

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``; nothing is drawn, so the seed changes nothing."""
        if source.ids is None:
            raise InputError(
                f"source {source.name!r} does not know which client a sample came from; partition it another way"
            )
        names, first, holder, sizes = np.unique(source.ids, return_index=True, return_inverse=True, return_counts=True)
        held = np.split(np.argsort(holder, kind="stable"), np.cumsum(sizes)[:-1])
        kept = np.flatnonzero(sizes >= count(self.min_samples, "min_samples"))
        if not kept.size:
            raise InputError(
                f"no client of source {source.name!r} holds min_samples={self.min_samples} samples; "
                f"the largest has {sizes.max()}"
            )
        kept = kept[np.argsort(first[kept])]
        group_of, group_names = _groups(source)
        for client in kept:
            if len(found := np.unique(group_of[held[client]])) > 1:
                both = " and ".join(group_names[group] for group in found[:2])
                raise InputError(f"client {names[client]} of source {source.name!r} has samples in groups {both}")
        return Assignment(
            [held[client] for client in kept],
            group_of[first[kept]].tolist(),
            group_names,
            tuple(str(names[client]) for client in kept),
        )


Divide = Callable[[Ints, int, int, np.random.Generator], list[Ints]]


def _inside_groups(source: Source, clients: int, min_samples: int, seed: int, divide: Divide) -> Assignment:
    """Let ``divide(samples, number of the first client, clients, generator)`` act inside each group of the source."""
    _, group_names = _groups(source)
    members = _by_group(source)
    sizes = [len(samples) for samples in members]
    _enough(len(source.x), clients, min_samples, f"source {source.name!r}")
    counts = _apportion(clients, np.array(sizes, float))
    draws = generator(seed, "partition")
    held: list[Ints] = []
    for samples, clients_in_group, name in zip(members, counts, group_names, strict=True):
        _enough(len(samples), clients_in_group, min_samples, f"group {name!r}")
        held += divide(samples, len(held), clients_in_group, draws)
    return Assignment(held, np.repeat(np.arange(len(counts)), counts).tolist(), group_names)


def _apportion(clients: int, weights: NDArray[np.float64]) -> list[int]:
    """Divide clients among groups in proportion to weights, at least one each, by D'Hondt's highest averages.

    It makes the smallest weight per client as large as possible, so ``min_samples`` is met whenever it can be.
    """
    if count(clients, "clients") < len(weights):
        raise InputError(f"clients={clients} is fewer than the {len(weights)} groups, which need one client each")
    counts = np.ones(len(weights), np.int64)
    averages = [(-weight / 2, group) for group, weight in enumerate(weights.tolist())]
    heapq.heapify(averages)
    for _ in range(clients - len(weights)):
        group = averages[0][1]
        counts[group] += 1
        heapq.heapreplace(averages, (-weights[group] / (counts[group] + 1), group))
    return [int(number) for number in counts]


def _fill_up(clients: list[Ints], least: int) -> list[Ints]:
    """Move the last samples of whoever holds most, one at a time, to the clients that hold fewer than ``least``."""
    sizes = [len(mine) for mine in clients]
    largest = [(-size, client) for client, size in enumerate(sizes) if size > least]
    heapq.heapify(largest)
    gains: dict[int, list[np.int64]] = {client: [] for client, size in enumerate(sizes) if size < least}
    for client, gained in gains.items():
        while sizes[client] + len(gained) < least:
            donor = largest[0][1]
            sizes[donor] -= 1
            gained.append(clients[donor][sizes[donor]])
            heapq.heapreplace(largest, (-sizes[donor], donor))
    kept = [mine[:size] for mine, size in zip(clients, sizes, strict=True)]
    for client, gained in gains.items():
        kept[client] = np.concatenate([kept[client], np.array(gained)])
    return kept


def _falling_sizes(sizes: list[int], ratio: float) -> list[int]:
    """Keep as many samples of each group as let every group have 1/ratio of the samples of the one before."""
    kept = [int(min(size * ratio**group for group, size in enumerate(sizes)) + 1e-9)]
    for size in sizes[1:]:
        kept.append(min(size, int(kept[-1] / ratio + 1e-9)))
    return kept


def _cuts(shares: NDArray[np.float64], size: int) -> Ints:
    return (np.cumsum(shares)[:-1] * size + 1e-9).astype(np.int64).clip(max=size)


def _take(shares: NDArray[np.float64], size: int, left: Ints, draws: np.random.Generator) -> Ints:
    """Draw the classes of ``size`` samples in the given proportions, never more of a class than are left of it."""
    taken = np.zeros_like(left)
    while (missing := size - taken.sum()) > 0:
        odds = np.where(taken < left, shares, 0.0)
        if not odds.sum() > 0:  # nothing is left of the classes drawn
            odds = (left - taken).astype(float)
        taken = np.minimum(taken + draws.multinomial(missing, odds / odds.sum()), left)
    return taken


def _groups(source: Source) -> tuple[Ints, tuple[str, ...]]:
    if source.groups is None:
        return np.zeros(len(source.x), np.int64), ("all",)
    return source.groups, source.group_names


def _by_group(source: Source) -> list[Ints]:
    group_of, names = _groups(source)
    members = [np.flatnonzero(group_of == group) for group in range(len(names))]
    for name, samples in zip(names, members, strict=True):
        if not samples.size:
            raise InputError(f"group {name!r} of source {source.name!r} has no samples; leave it out of group_names")
    return members


def _labels(source: Source, partition: str) -> Ints:
    if source.task != "classification":
        raise InputError(f"the {partition} partition needs labels, but source {source.name!r} is a {source.task}")
    return source.y.cpu().numpy()


def _enough(samples: int, clients: int, min_samples: int, where: str) -> None:
    wanted = count(clients, "clients") * count(min_samples, "min_samples")
    if samples < wanted:
        raise InputError(
            f"{where} has {samples} samples, too few for {clients} clients with min_samples={min_samples} each"
        )
