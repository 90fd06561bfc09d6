"""Common code of partitions: the assignment they return, and dividing samples inside groups."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from equipoise import tasks
from equipoise.checks import count
from equipoise.data.draws import generator
from equipoise.data.source import Source
from equipoise.errors import InputError

Ints = NDArray[np.int64]
Divide = Callable[[Ints, int, int, np.random.Generator], list[Ints]]


@dataclass(frozen=True, eq=False)
class Assignment:
    """The samples and the group of each client.

    Parameters
    ----------
    clients : list of int arrays
        Sample positions of every client.
    groups : list of int
        Every client's group, as a position in ``group_names``.
    group_names : tuple of str
        Names of the groups.
    names : tuple of str, optional
        Names of the clients, if they have any.

    Examples
    --------
    >>> clients = [np.array([0, 2]), np.array([1])]
    >>> Assignment(clients, groups=[0, 0], group_names=("all",)).clients[0].tolist()
    [0, 2]
    """

    clients: list[Ints]
    groups: list[int]
    group_names: tuple[str, ...]
    names: tuple[str, ...] | None = None


class Partition(Protocol):
    """A way to divide a source among clients."""

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``. The same seed gives the same result."""
        ...


def check_counts(partition: Partition, *options: str) -> None:
    """Check options of a partition that must be whole numbers of at least 1, or None by default.

    Parameters
    ----------
    partition : Partition
        With an attribute for each option.
    *options : str
        Their names.

    Examples
    --------
    >>> from equipoise.data.partition import Iid
    >>> check_counts(Iid(3), "clients")
    >>> Iid(0)
    Traceback (most recent call last):
    equipoise.errors.InputError: clients must be a whole number of at least 1, got 0
    """
    for option in options:
        value = getattr(partition, option)
        if value is not None or getattr(type(partition), option, 1) is not None:
            count(value, option)


def inside_groups(
    source: Source, clients: int, min_samples: int, seed: int, divide: Divide
) -> Assignment:
    """Divide the samples of each group among clients of that group.

    Parameters
    ----------
    source : Source
        The samples. Without groups, all are in one group.
    clients : int
        Number of clients. Each group gets a number in proportion to its samples.
    min_samples : int
        Minimum number of samples per client.
    seed : int
        Seed of the random draws.
    divide : callable
        Called for each group with its samples, the index of its first client, its number of
        clients, and a random generator. Returns the samples of each of these clients.

    Returns
    -------
    Assignment
        The clients of all groups.

    Examples
    --------
    >>> import torch
    >>> source = Source(x=torch.zeros(6, 1), y=torch.zeros(6).long())
    >>> def halves(samples, first, clients, draws):
    ...     return np.array_split(samples, clients)
    >>> parts = inside_groups(source, 2, 3, 0, halves)
    >>> [part.tolist() for part in parts.clients]
    [[0, 1, 2], [3, 4, 5]]
    """
    _, group_names = groups_of(source)
    members = members_by_group(source)
    sizes = [len(samples) for samples in members]
    require_samples(len(source.x), clients, min_samples, f"source {source.name!r}")
    counts = apportion(clients, np.array(sizes, float))
    draws = generator(seed, "partition")
    held: list[Ints] = []
    for samples, clients_in_group, name in zip(members, counts, group_names, strict=True):
        require_samples(len(samples), clients_in_group, min_samples, f"group {name!r}")
        held += divide(samples, len(held), clients_in_group, draws)
    return Assignment(held, np.repeat(np.arange(len(counts)), counts).tolist(), group_names)


def apportion(clients: int, weights: NDArray[np.float64]) -> list[int]:
    """Divide clients among groups in proportion to weights, with at least one client per group.

    This is D'Hondt's method of highest averages. It maximises the smallest weight per client, so
    ``min_samples`` is met whenever that is possible.

    Parameters
    ----------
    clients : int
        Number of clients.
    weights : array of shape [groups]
        The weight of each group.

    Returns
    -------
    list of int
        Number of clients of each group.

    Examples
    --------
    >>> apportion(10, np.array([100.0, 60.0, 40.0]))
    [5, 3, 2]
    """
    if count(clients, "clients") < len(weights):
        raise InputError(
            f"clients={clients} is fewer than the {len(weights)} groups, which need one client each"
        )
    counts = np.ones(len(weights), np.int64)
    averages = [(-weight / 2, group) for group, weight in enumerate(weights.tolist())]
    heapq.heapify(averages)
    for _ in range(clients - len(weights)):
        group = averages[0][1]
        counts[group] += 1
        heapq.heapreplace(averages, (-weights[group] / (counts[group] + 1), group))
    return [int(number) for number in counts]


def fill_up(clients: list[Ints], least: int) -> list[Ints]:
    """Move samples to clients that hold fewer than ``least``.

    Each sample is taken from the client that holds most at that moment.

    Parameters
    ----------
    clients : list of int arrays
        The samples of every client.
    least : int
        Minimum number of samples per client. There must be enough for all.

    Returns
    -------
    list of int arrays
        The samples of every client.

    Examples
    --------
    >>> [mine.tolist() for mine in fill_up([np.arange(5), np.array([7])], least=3)]
    [[0, 1, 2], [7, 4, 3]]
    """
    sizes = [len(mine) for mine in clients]
    largest = [(-size, client) for client, size in enumerate(sizes) if size > least]
    heapq.heapify(largest)
    gains: dict[int, list[np.int64]] = {
        client: [] for client, size in enumerate(sizes) if size < least
    }
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


def cuts(shares: NDArray[np.float64], size: int) -> Ints:
    """Return where `numpy.split` must cut ``size`` samples to get pieces of the given shares.

    Parameters
    ----------
    shares : array of shape [pieces]
        Shares that sum to 1.
    size : int
        Number of samples.

    Returns
    -------
    int array of shape [pieces - 1]
        Where each piece except the first begins.

    Examples
    --------
    >>> cuts(np.array([0.5, 0.3, 0.2]), 10).tolist()
    [5, 8]
    """
    return (np.cumsum(shares)[:-1] * size + 1e-9).astype(np.int64).clip(max=size)


def groups_of(source: Source) -> tuple[Ints, tuple[str, ...]]:
    """Return the group of every sample and the names of the groups.

    Parameters
    ----------
    source : Source
        The samples. Without groups, all are in one group named ``"all"``.

    Returns
    -------
    tuple
        The groups [N], as positions in the names, and the names.

    Examples
    --------
    >>> import torch
    >>> groups_of(Source(x=torch.zeros(2, 1), y=torch.zeros(2).long()))
    (array([0, 0]), ('all',))
    """
    if source.groups is None:
        return np.zeros(len(source.x), np.int64), ("all",)
    return source.groups, source.group_names


def members_by_group(source: Source) -> list[Ints]:
    """Return the positions of the samples of each group.

    Parameters
    ----------
    source : Source
        The samples. Every group must have some.

    Returns
    -------
    list of int arrays
        One array per group.

    Examples
    --------
    >>> import torch
    >>> groups = {"groups": np.array([1, 0, 1]), "group_names": ("a", "b")}
    >>> source = Source(x=torch.zeros(3, 1), y=torch.zeros(3).long(), **groups)
    >>> [members.tolist() for members in members_by_group(source)]
    [[1], [0, 2]]
    """
    group_of, names = groups_of(source)
    members = [np.flatnonzero(group_of == group) for group in range(len(names))]
    for name, samples in zip(names, members, strict=True):
        if not samples.size:
            raise InputError(
                f"group {name!r} of source {source.name!r} has no samples; leave it out of "
                "group_names"
            )
    return members


def labels_of(source: Source, partition: str) -> Ints:
    """Return the labels of a source. Its samples must have one label each.

    Parameters
    ----------
    source : Source
        The samples.
    partition : str
        The name of the partition that needs labels, for the message.

    Returns
    -------
    int array of shape [N]
        The labels.

    Examples
    --------
    >>> import torch
    >>> labels_of(Source(x=torch.zeros(2, 1), y=torch.tensor([3, 1])), "dirichlet").tolist()
    [3, 1]
    """
    if not tasks.build(source.task).labels:
        raise InputError(
            f"the {partition} partition needs one label per sample, but source {source.name!r} is "
            f"a {source.task}"
        )
    return source.y.cpu().numpy()


def require_samples(samples: int, clients: int, min_samples: int, where: str) -> None:
    """Refuse a number of clients for which there are too few samples.

    Parameters
    ----------
    samples : int
        Number of samples.
    clients, min_samples : int
        Number of clients, and minimum number of samples per client.
    where : str
        What has the samples, for the message.

    Examples
    --------
    >>> require_samples(5, 2, 3, "group 'a'")
    Traceback (most recent call last):
    equipoise.errors.InputError: group 'a' has 5 samples, too few for 2 clients with min_samples=3
    each
    """
    wanted = count(clients, "clients") * count(min_samples, "min_samples")
    if samples < wanted:
        raise InputError(
            f"{where} has {samples} samples, too few for {clients} clients with "
            f"min_samples={min_samples} each"
        )
