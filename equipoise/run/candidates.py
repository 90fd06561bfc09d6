"""The registered clients from which a sampler chooses a cohort, and its choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equipoise.engine.contract import RoundCohort
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.method import Sampler, State


@dataclass
class Registered:
    """The clients from which a sampler chooses; see :class:`equipoise.method.Candidates`.

    Attributes
    ----------
    asked : list of RoundCohort
        The cohorts that the sampler has asked. Their bytes count in the round.
    """

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    key: int
    federation: Federation
    gather: Callable[[NDArray[np.int64]], RoundCohort]
    asked: list[RoundCohort] = field(default_factory=list)

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """The group of each client."""
        groups: NDArray[np.int64] = self.federation.groups[self.ids]
        return groups

    def cohort(self, ids: NDArray[np.int64]) -> RoundCohort:
        """Return a cohort of some clients, to ask them before the choice."""
        self.asked.append(self.gather(np.asarray(ids)))
        return self.asked[-1]

    def without(self, lost: Iterable[int]) -> Registered:
        """Return the clients without those that did not answer."""
        there = ~np.isin(self.ids, list(lost))
        return replace(self, ids=self.ids[there], sizes=self.sizes[there])


def chosen_ids(
    sampler: Sampler, state: State, candidates: Registered, count: int
) -> NDArray[np.int64]:
    """Return the clients that a sampler chooses, in ascending order.

    Parameters
    ----------
    sampler : Sampler
        The sampler.
    state : State
        The state that the sampler may read.
    candidates : Registered
        The clients to choose from.
    count : int
        The size of the cohort.

    Raises
    ------
    InputError
        If the choice is not ``count`` distinct ids of candidates.
    """
    answer = sampler.select(state, candidates, count)
    chosen: NDArray[np.int64] = np.asarray(answer)
    fits = chosen.ndim == 1 and len(chosen) == count and np.issubdtype(chosen.dtype, np.integer)
    if fits:
        chosen = np.sort(chosen)
        found = np.searchsorted(candidates.ids, chosen) % len(candidates.ids)
        fits = bool((np.diff(chosen) > 0).all() and (candidates.ids[found] == chosen).all())
    if not fits:
        shown = chosen.tolist()[:8] if chosen.ndim == 1 else answer
        raise InputError(
            f"sampler {sampler.name or type(sampler).__name__!r} chose {shown!r}; "
            f"valid: {count} distinct ids of registered clients"
        )
    return chosen
