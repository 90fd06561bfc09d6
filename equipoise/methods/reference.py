"""Two references for comparisons: each client alone, and all data pooled."""

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
    """Each client trains its own model; nothing is sent.

    A client that has never been drawn trains for one round before it is evaluated. So does a client
    that is held out of training but has training samples. Thus no client is evaluated with the
    initial model. All models have trained equally long only if all clients take part in all rounds.
    """

    keeps = "all"
    ignores_prior = "nothing is aggregated"

    def adapt(self) -> Sequence[Phase]:
        """Train for one round."""
        return self.phases()

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Return the global model unchanged."""
        return state


@register("central", sees=Sees.DATA)
@dataclass(frozen=True)
class Central(View):
    """The pooled training data of all clients. This is a reference and not a federated method.

    Parameters
    ----------
    samples : int, optional
        Number of training samples of each client, from the beginning of its split; all by default.
    """

    samples: int | None = None

    def __post_init__(self) -> None:
        """Refuse a number of samples below 1."""
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
