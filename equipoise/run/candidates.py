"""The registered clients from which a sampler chooses a cohort."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equipoise.engine.contract import RoundCohort
from equipoise.federation import Federation


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
