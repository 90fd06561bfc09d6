"""The two references of every comparison: each client alone, and all data in one place."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.federation import Federation
from equipoise.method import Aggregation, Cohort, LocalRule, Sees, State, Updates, View
from equipoise.methods import register


@register("local")
@dataclass(frozen=True)
class Local(LocalRule, Aggregation):
    """Each client trains a model of its own; nothing is sent."""

    keeps = "all"
    ignores_prior = "nothing is aggregated"

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Leave the global model alone."""
        return state


@register("central", sees=Sees.DATA)
@dataclass(frozen=True)
class Central(View):
    """All clients' training data in one place. This is a reference and not a federated method."""

    def of(self, federation: Federation) -> Federation:
        """Pool the data of all seen clients."""
        return federation.pooled()
