"""Methods that wrap other methods.

A :class:`Wrapper` has another method as an option, its host, and forwards everything to it. A
wrapping method overrides what it changes: it maps phases to phases, replaces the prior of the
cohort, or chooses clients itself. In experiments a host is written like any method: ``method:
{name: mine, host: {name: fedprox, mu: 0.1}}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.client import Finished
from equipoise.method import (
    Aggregation,
    Candidates,
    Cohort,
    Fact,
    LocalRule,
    Method,
    Phase,
    Sampler,
    State,
    Updates,
    View,
)
from equipoise.tree import Parts, Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation


class Wrapper(Sampler, LocalRule, Aggregation, View):
    """All four parts of a method, each forwarded to the part of the host.

    A subclass is a frozen dataclass with a field ``host: Method``. Questions that the host's
    aggregation asks are answered by the host's local rule.

    Attributes
    ----------
    host : Method
        The wrapped method.

    Examples
    --------
    >>> from dataclasses import dataclass, field
    >>> from equipoise.methods import build
    >>> @dataclass(frozen=True)
    ... class Unchanged(Wrapper):
    ...     host: Method = field(default_factory=lambda: build("fedper"))
    >>> Unchanged().keeps, Unchanged().usual_weights
    ('head', 'size')
    """

    host: Method

    def __getattr__(self, name: str) -> Any:
        """Return questions of the host's local rule, or else of its aggregation."""
        if name == "host" or name.startswith("__"):
            raise AttributeError(name)
        local, aggregation = self.host.local, self.host.aggregation
        return getattr(local if hasattr(local, name) else aggregation, name)

    @property
    def _on_the_server(self) -> tuple[Sampler | Aggregation, ...]:
        """The host's parts that keep state on the server, each once."""
        return tuple(dict.fromkeys((self.host.sampler, self.host.aggregation)))

    # ---- all parts -------------------------------------------------------------------------------

    @property
    def usual_model(self) -> str:  # type: ignore[override]
        """The model that is used by default."""
        return self.host.usual_model

    @property
    def needs_everyone(self) -> bool:  # type: ignore[override]
        """Whether a part must see all registered clients before round 1."""
        return any(part.needs_everyone for part in self._on_the_server)

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Return the model with the parts that the host adds."""
        for part in self.host.distinct_parts:
            model = part.extend(model, shape)
        return model

    def begin(self, state: State, everyone: Cohort) -> State:
        """Set up what the host keeps."""
        for part in self._on_the_server:
            state = part.begin(state, everyone) if part.needs_everyone else state
        return state

    def admit(self, state: State, everyone: Cohort) -> State:
        """Add clients that have registered since :meth:`begin`."""
        for part in self._on_the_server:
            state = part.admit(state, everyone) if part.needs_everyone else state
        return state

    # ---- view and sampler ------------------------------------------------------------------------

    def of(self, federation: Federation) -> Federation:
        """Return the federation to train on."""
        return self.host.view.of(federation)

    @property
    def gathers(self) -> bool:  # type: ignore[override]
        """Whether only the server trains."""
        return self.host.view.gathers

    def gather(self, everyone: Cohort) -> tuple[Tensor, Tensor]:
        """Ask for the samples to train on."""
        return self.host.view.gather(everyone)

    def select(self, state: State, candidates: Candidates, count: int) -> NDArray[np.int64]:
        """Choose clients."""
        return self.host.sampler.select(state, candidates, count)

    def learn(self, state: State, cohort: Cohort) -> State:
        """Return the state after a round."""
        return self.host.sampler.learn(state, cohort)

    # ---- local rule ------------------------------------------------------------------------------

    @property
    def makes_index(self) -> bool:  # type: ignore[override]
        """Whether the trained model makes a client index."""
        return self.host.local.makes_index

    def index_epsilon(self) -> float | None:
        """Return the ε of the index, if clients add noise to it."""
        return self.host.local.index_epsilon()

    @property
    def keeps(self) -> Parts:  # type: ignore[override]
        """Parts that stay with the client."""
        return self.host.local.keeps

    @property
    def receives(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the rule needs in addition to the model."""
        return self.host.local.receives

    @property
    def uploads(self) -> tuple[str, ...]:  # type: ignore[override]
        """What a client sends in addition to the parameters."""
        return self.host.local.uploads

    @property
    def interleaved(self) -> bool:  # type: ignore[override]
        """Whether phases take turns batch by batch."""
        return self.host.local.interleaved

    @property
    def proximal(self) -> float:  # type: ignore[override]
        """The factor of the proximal term in the loss."""
        return self.host.local.proximal

    def phases(self) -> Sequence[Phase]:
        """List the phases of local training."""
        return self.host.local.phases()

    def adapt(self) -> Sequence[Phase]:
        """List the phases that adapt the global model of a client without a memory."""
        return self.host.local.adapt()

    def facts(self) -> Mapping[str, Fact]:
        """Return the facts that a client computes from its own data, by name."""
        return self.host.local.facts()

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Return the memory of a client that has never taken part."""
        return self.host.local.first_memory(model)

    def finish(self, client: Finished) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """Return the client's new memory and its uploads."""
        return self.host.local.finish(client)

    @property
    def finishes(self) -> bool:
        """Whether :meth:`finish` has something to do."""
        return type(self).finish is not Wrapper.finish or self.host.local.finishes

    # ---- aggregation -----------------------------------------------------------------------------

    @property
    def usual_weights(self) -> str:  # type: ignore[override]
        """The cohort's prior."""
        return self.host.weights

    @property
    def ignores_prior(self) -> str | None:  # type: ignore[override]
        """Why the prior does not matter, if it does not."""
        return self.host.aggregation.ignores_prior

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Reports that clients send."""
        return self.host.aggregation.needs

    @property
    def sends(self) -> tuple[str, ...]:  # type: ignore[override]
        """What is sent in addition to the model."""
        return self.host.aggregation.sends

    @property
    def sends_once(self) -> tuple[str, ...]:  # type: ignore[override]
        """What is sent to each client only once."""
        return self.host.aggregation.sends_once

    @property
    def collects(self) -> tuple[str, ...]:  # type: ignore[override]
        """Uploads that the aggregation uses."""
        return self.host.aggregation.collects

    def prepare(self, state: State, cohort: Cohort) -> State:
        """Return the state with which a round begins."""
        return self.host.aggregation.prepare(state, cohort)

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Return what all clients receive, and what each client receives."""
        return self.host.aggregation.send(state, cohort)

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Return the next state."""
        return self.host.aggregation.combine(state, updates, cohort)

    def evaluated(self, state: State) -> Tree:
        """Return the model that is evaluated and saved."""
        return self.host.aggregation.evaluated(state)


class WithPrior:
    """A cohort with other weights. Everything else is that of the given cohort.

    Parameters
    ----------
    cohort : Cohort
        The clients.
    prior : Tensor
        Their weights, summing to one.

    Examples
    --------
    >>> import torch
    >>> from types import SimpleNamespace
    >>> WithPrior(SimpleNamespace(ids=[3, 4], prior=None), torch.tensor([0.5, 0.5])).ids
    [3, 4]
    """

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    groups: NDArray[np.int64]
    names: tuple[str, ...]
    clients: int | None
    key: int
    rounds: int
    score: str
    higher_is_better: bool
    train: Callable[..., Updates]
    evaluate: Callable[..., dict[str, Tensor]]
    ask: Callable[..., Any]

    def __init__(self, cohort: Cohort, prior: Tensor) -> None:
        self._cohort, self.prior = cohort, prior

    def __getattr__(self, name: str) -> Any:
        """Return everything except the prior from the cohort."""
        return getattr(self._cohort, name)
