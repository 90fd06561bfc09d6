"""The clients that the data were collected from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equipoise.data.partition.base import Assignment, check_counts, groups_of
from equipoise.data.source import Source
from equipoise.errors import InputError


@dataclass(frozen=True)
class Natural:
    """Every client holds its own samples; clients with fewer than ``min_samples`` are left out.

    Parameters
    ----------
    min_samples : int
        Minimum number of samples per client.

    Examples
    --------
    >>> import torch
    >>> ids = np.array(["ann"] * 3 + ["bob"] * 4 + ["cleo"])
    >>> source = Source(x=torch.zeros(8, 1), y=torch.zeros(8).long(), ids=ids)
    >>> Natural().assign(source, seed=0).names
    ('ann', 'bob')
    """

    min_samples: int = 3

    def __post_init__(self) -> None:
        check_counts(self, "min_samples")

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``. Nothing is drawn, so the seed is ignored."""
        if source.ids is None:
            raise InputError(
                f"source {source.name!r} has no client ids, which the natural partition needs; "
                "choose another partition"
            )
        names, first, holder, sizes = np.unique(
            source.ids, return_index=True, return_inverse=True, return_counts=True
        )
        held = np.split(np.argsort(holder, kind="stable"), np.cumsum(sizes)[:-1])
        kept = np.flatnonzero(sizes >= self.min_samples)
        if not kept.size:
            raise InputError(
                f"no client of source {source.name!r} holds min_samples={self.min_samples} "
                f"samples; the largest has {sizes.max()}"
            )
        kept = kept[np.argsort(first[kept])]
        group_of, group_names = groups_of(source)
        for client in kept:
            if len(found := np.unique(group_of[held[client]])) > 1:
                both = " and ".join(group_names[group] for group in found[:2])
                raise InputError(
                    f"client {names[client]} of source {source.name!r} has samples in groups {both}"
                )
        return Assignment(
            [held[client] for client in kept],
            group_of[first[kept]].tolist(),
            group_names,
            tuple(str(names[client]) for client in kept),
        )
