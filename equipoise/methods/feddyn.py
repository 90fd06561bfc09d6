"""FedDyn (Acar et al., 2021): dynamic regularization, which aligns the clients' optima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from equipoise.checks import real
from equipoise.client import Client, Finished
from equipoise.method import (
    Aggregation,
    Cohort,
    LocalRule,
    Penalty,
    Phase,
    Sees,
    State,
    Updates,
    mix,
)
from equipoise.methods import register
from equipoise.tree import Tree, tree_map


@register("feddyn", paper="Acar et al., ICLR 2021", sees=Sees.SUMS)
@dataclass(frozen=True)
class FedDyn(LocalRule, Aggregation):
    """Minimise F_k(w) − ⟨λ_k, w⟩ + α/2 ‖w − wᵗ‖² on client k, where λ_k estimates its gradient.

    After training, λ_k ← λ_k − α (w_k − wᵗ). The server updates h ← h − α/m Σ (w_k − wᵗ) over the
    clients that took part, with m the number of all clients, and sends wᵗ⁺¹ = w̄ − h/α, where w̄ is
    the mean of their models. λ_k and h start at 0. Clients that do not take part keep λ_k.

    The evaluated model is w̄, for which the paper proves convergence. w̄ − h/α is only the starting
    point of clients.

    Choices: with unequal weights, the sum over clients is |S|/m Σ a_k (w_k − wᵗ). All clients have
    the same α (the public code divides it by n_k/n̄). Gradient clipping, which the public code uses,
    is ``training.clip``. Buffers of BatchNorm are averaged.

    Parameters
    ----------
    alpha : float
        α, above 0.
    """

    alpha: float = 0.1
    usual_weights = "uniform"
    needs_everyone = True

    def __post_init__(self) -> None:
        """Refuse an α that is not positive."""
        real(self.alpha, "feddyn.alpha")

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the dynamic penalty −⟨λ_k, w⟩ + α/2 ‖w − wᵗ‖²."""
        return (Phase(penalty=Penalty(self.alpha, self.linear)),)

    def linear(self, client: Client) -> Tree:
        """Return −λ_k."""
        return tree_map(torch.neg, client.memory["dual"])

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Start with λ_k = 0."""
        return {"dual": tree_map(torch.zeros_like, model)}

    def finish(self, client: Finished) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """Update λ_k, which stays with the client."""
        old, w, received = client.memory["dual"], client.params, client.received
        return {
            "dual": {name: old[name] - self.alpha * (w[name] - received[name]) for name in old}
        }, {}

    def begin(self, state: State, everyone: Cohort) -> State:
        """Start with h = 0, and store the number of clients."""
        count = torch.tensor(float(len(everyone.ids)))
        return state.with_server(
            h=tree_map(torch.zeros_like, state.model), clients={"count": count}
        )

    def admit(self, state: State, everyone: Cohort) -> State:
        """Rescale h, so that it stays the mean of all λ_k. Those of new clients are 0."""
        count = torch.tensor(float(len(everyone.ids)))
        share = state.server["clients"]["count"] / count
        return state.with_server(
            h=tree_map(lambda h: share * h, state.server["h"]), clients={"count": count}
        )

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Update h, and correct the mean with it."""
        averaged = mix(updates, cohort.prior)
        mean = {name: averaged[name] for name in updates.param_names}
        share = len(cohort.ids) / float(state.server["clients"]["count"])
        h = {
            n: state.server["h"][n] - self.alpha * share * (w - state.model[n])
            for n, w in mean.items()
        }
        corrected = {name: w - h[name] / self.alpha for name, w in mean.items()}
        kept = {**state.server["h"], **h}
        return state.with_global({**averaged, **corrected}).with_server(h=kept, mean=mean)

    def evaluated(self, state: State) -> Tree:
        """Return w̄, the mean of the models of the last round."""
        return {**state.model, **state.server.get("mean", {})}
