"""FedAvg (McMahan et al., 2017) and the default parts of other methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from equipoise.method import (
    Aggregation,
    Candidates,
    Cohort,
    LocalRule,
    Sampler,
    Sees,
    State,
    Updates,
    View,
    mix,
)
from equipoise.methods import register
from equipoise.random import choose, choose_by_weight


@register("uniform", method=False)
@dataclass(frozen=True)
class UniformSampler(Sampler):
    """Every set of clients is equally likely."""

    reads_state: ClassVar[bool] = False

    def select(self, state: State, candidates: Candidates, count: int) -> NDArray[np.int64]:
        """Draw clients without replacement."""
        return candidates.ids[choose(candidates.key, len(candidates.ids), count)]


@register("size", method=False)
@dataclass(frozen=True)
class SizeSampler(Sampler):
    """Clients are drawn in proportion to their numbers of samples, without replacement."""

    reads_state: ClassVar[bool] = False

    def select(self, state: State, candidates: Candidates, count: int) -> NDArray[np.int64]:
        """Draw one client after the other, without replacement."""
        return candidates.ids[
            choose_by_weight(candidates.key, candidates.sizes.astype(np.float64), count)
        ]


@register("plain", method=False)
@dataclass(frozen=True)
class PlainTraining(LocalRule):
    """Train all parts with the task's loss."""


@register("everyone", method=False)
@dataclass(frozen=True)
class Everyone(View):
    """The unchanged federation."""


@register("fedavg", paper="McMahan et al., AISTATS 2017", sees=Sees.SUMS)
@dataclass(frozen=True)
class FedAvg(Aggregation):
    """The weighted mean of the clients' models: w ← Σ a_k w_k, with a the cohort's prior."""

    reads_reports: ClassVar[bool] = False

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average."""
        return state.with_global(mix(updates, cohort.prior))
