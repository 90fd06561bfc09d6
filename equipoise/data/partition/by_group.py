"""Groups of unequal size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise import checks
from equipoise.checks import count, flag, one_of, real, several
from equipoise.data.draws import generator
from equipoise.data.partition.base import (
    Assignment,
    Ints,
    apportion,
    check_counts,
    cuts,
    fill_up,
    members_by_group,
    require_samples,
)
from equipoise.data.source import Source
from equipoise.errors import InputError

WITHIN = ("ratio", "imbalance")


@dataclass(frozen=True)
class ByGroup:
    """Groups of unequal size: the domain imbalance factor of FedGCR.

    With D groups, the largest first, and rho = imbalance^(1/(D-1)), group i gets
    round(rho^(D-1-i)) clients and, unless ``truncate`` is false, 1/rho of the samples of group
    i - 1. Inside a group each client holds rho times as many samples as the one before.
    ``imbalance=1`` means equal groups of two clients that hold samples in the ratio 1 : 3. Clients
    below ``min_samples`` get samples from the largest clients of their group.

    Parameters
    ----------
    imbalance : float
        Ratio of the number of clients (and samples) of the first group to that of the last, 1 or
        more.
    clients : int, optional
        Total number of clients, divided among the groups in the proportions above.
    clients_per_group : sequence of int, optional
        Number of clients of each group.
    truncate : bool
        Leave out samples so that the groups' sizes fall by rho. Set it to false for a source whose
        groups are already unequal.
    ratio : float, optional
        rho itself, to use a rounded value: FedGCR's tables use 1.5 for five groups with imbalance 5
        (not 1.495, which gives the fourth group one client fewer), and 1.6 for six groups with
        imbalance 10 (not 1.585).
    largest : int, optional
        Keep exactly this many samples of the first group, and round the share of every client down,
        as FedGCR does. By default as many are kept as the other groups allow, and all of them are
        assigned to clients.
    within : {"ratio", "imbalance"}
        How sizes increase inside a group: by rho from client to client, or so that the last client
        of a group holds ``imbalance`` times as many samples as the first (FedGCR's rule for PACS).
    order : sequence of str, optional
        All groups, the largest first; by default the order of the source.
    min_samples : int
        Minimum number of samples per client.

    Examples
    --------
    >>> import torch
    >>> groups = {"groups": np.repeat(np.arange(3), 100), "group_names": ("a", "b", "c")}
    >>> source = Source(x=torch.zeros(300, 1), y=torch.zeros(300).long(), **groups)
    >>> assignment = ByGroup(imbalance=4).assign(source, seed=0)
    >>> [(assignment.group_names[g], len(s)) for g, s in zip(assignment.groups, assignment.clients)]
    [('a', 6), ('a', 14), ('a', 26), ('a', 54), ('b', 16), ('b', 34), ('c', 25)]
    """

    imbalance: float
    clients: int | None = None
    clients_per_group: Sequence[int] | None = None
    truncate: bool = True
    ratio: float | None = None
    largest: int | None = None
    within: str = "ratio"
    order: Sequence[str] | None = None
    min_samples: int = 3

    def __post_init__(self) -> None:
        real(self.imbalance, "imbalance", least=1)
        check_counts(self, "clients", "largest", "min_samples")
        if self.clients_per_group is not None:
            several(self.clients_per_group, "clients_per_group", count)
            if self.clients is not None:
                raise InputError(
                    f"clients={self.clients} cannot be used with clients_per_group="
                    f"{list(self.clients_per_group)}; set one of them"
                )
        flag(self.truncate, "truncate")
        if self.largest is not None and not self.truncate:
            raise InputError(
                f"largest={self.largest} leaves out samples, which truncate=False forbids"
            )
        if self.ratio is not None:
            real(self.ratio, "ratio", least=1)
            if self.imbalance == 1:
                raise InputError(
                    f"ratio={self.ratio} cannot be used with imbalance=1, which means equal groups"
                )
        one_of(self.within, WITHIN, "within of the group partition")
        if self.order is not None:
            several(self.order, "order", checks.name)

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``. The same seed gives the same result."""
        if source.groups is None:
            raise InputError(
                f"source {source.name!r} has no groups, so it cannot be partitioned by group"
            )
        ratio = self._ratio(len(source.group_names))
        falling = self._order(source)
        names = [source.group_names[group] for group in falling]
        members = [members_by_group(source)[group] for group in falling]
        counts = self._counts(ratio, names)
        kept = self._kept([len(samples) for samples in members], ratio, names)
        draws = generator(seed, "partition")
        clients: list[Ints] = []
        for place, samples in enumerate(members):
            mixed = draws.permutation(samples)[: kept[place]]
            require_samples(len(mixed), counts[place], self.min_samples, f"group {names[place]!r}")
            steps = np.arange(counts[place])
            shares = self._step(ratio, counts[place]) ** (steps - steps[-1])
            held = np.split(mixed, cuts(shares / shares.sum(), len(mixed)))
            if self.largest is not None:
                sizes = (shares / shares.sum() * len(mixed) + 1e-9).astype(np.int64)
                held = [
                    mixed[end - size : end]
                    for end, size in zip(np.cumsum(sizes), sizes, strict=True)
                ]
            clients += fill_up(held, self.min_samples)
        groups = np.repeat(falling, counts).tolist()
        called = tuple(
            f"{name} {j + 1}" for name, n in zip(names, counts, strict=True) for j in range(n)
        )
        return Assignment(clients, groups, source.group_names, called)

    def _order(self, source: Source) -> list[int]:
        """Return the groups as positions in the source's names, the largest first."""
        if self.order is None:
            return list(range(len(source.group_names)))
        if sorted(self.order) != sorted(source.group_names):
            raise InputError(
                f"order={list(self.order)} must name each of the groups "
                f"{', '.join(source.group_names)} once"
            )
        return [source.group_names.index(name) for name in self.order]

    def _step(self, ratio: float, clients: int) -> float:
        """Return the ratio of the sizes of consecutive clients of a group."""
        if self.imbalance > 1 and self.within == "ratio":
            return ratio
        return float((self.imbalance if self.imbalance > 1 else 3) ** (1 / max(1, clients - 1)))

    def _kept(self, sizes: list[int], ratio: float, names: Sequence[str]) -> list[int]:
        """Return the number of samples used of each group."""
        if not self.truncate:
            return sizes
        if self.largest is None:
            return _falling_sizes(sizes, ratio)
        kept = [self.largest]
        while len(kept) < len(sizes):
            kept.append(int(kept[-1] / ratio + 1e-9))
        for name, size, wanted in zip(names, sizes, kept, strict=True):
            if size < wanted:
                raise InputError(
                    f"group {name!r} has {size} samples, but largest={self.largest} needs {wanted} "
                    "of it"
                )
        return kept

    def _ratio(self, groups: int) -> float:
        if self.imbalance > 1 and groups == 1:
            raise InputError(
                f"imbalance={self.imbalance} needs two or more groups; the source has one"
            )
        if self.ratio is not None:
            return float(self.ratio)
        return float(self.imbalance ** (1 / max(1, groups - 1)))

    def _counts(self, ratio: float, names: Sequence[str]) -> list[int]:
        falling = ratio ** np.arange(len(names) - 1, -1, -1.0)
        if self.clients_per_group is not None:
            if len(self.clients_per_group) != len(falling):
                raise InputError(
                    f"clients_per_group={list(self.clients_per_group)} must name one number for "
                    f"each of the {len(falling)} groups {', '.join(names)}"
                )
            return list(self.clients_per_group)
        if self.clients is not None:
            return apportion(self.clients, falling)
        return (
            [2] * len(falling)
            if self.imbalance == 1
            else [round(weight) for weight in falling.tolist()]
        )


def _falling_sizes(sizes: list[int], ratio: float) -> list[int]:
    """Return the largest sizes such that every group has 1/ratio of the samples of the previous."""
    kept = [int(min(size * ratio**group for group, size in enumerate(sizes)) + 1e-9)]
    for size in sizes[1:]:
        kept.append(min(size, int(kept[-1] / ratio + 1e-9)))
    return kept
