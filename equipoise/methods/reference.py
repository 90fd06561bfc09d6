"""The two references of every comparison: each client alone, and all data in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from equipoise.checks import count
from equipoise.federation import Federation, Split
from equipoise.method import Aggregation, Cohort, LocalRule, Phase, Sees, State, Updates, View
from equipoise.methods import register


@register("local")
@dataclass(frozen=True)
class Local(LocalRule, Aggregation):
    """Each client trains a model of its own; nothing is sent.

    A client that has never been drawn trains for one round before it is evaluated, and so does one
    that is held out of training but has training samples. So nobody is evaluated with the initial
    model. For models that have trained equally long, all clients must take part in all rounds.
    """

    keeps = "all"
    ignores_prior = "nothing is aggregated"

    def adapt(self) -> Sequence[Phase]:
        """Train for one round."""
        return self.phases()

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Leave the global model alone."""
        return state


@register("central", sees=Sees.DATA)
@dataclass(frozen=True)
class Central(View):
    """All clients' training data in one place. This is a reference and not a federated method.

    Parameters
    ----------
    samples : int, optional
        How many training samples of each client are pooled, the first of its split; all by default.
    """

    samples: int | None = None

    def __post_init__(self) -> None:
        """Refuse to pool nothing."""
        if self.samples is not None:
            count(self.samples, "central.samples")

    def of(self, federation: Federation) -> Federation:
        """Pool the data of all seen clients."""
        if self.samples is None:
            return federation.pooled()
        first = [
            federation.train.of(client)[: self.samples] for client in range(federation.clients)
        ]
        return replace(federation, train=Split.from_lists(first)).pooled()
