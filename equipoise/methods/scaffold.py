"""SCAFFOLD (Karimireddy et al., 2020): control variates that correct client drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


@register("scaffold", paper="Karimireddy et al., ICML 2020", sees=Sees.SUMS)
@dataclass(frozen=True)
class Scaffold(LocalRule, Aggregation):
    """Correct every local gradient by c − c_k, where c_k is the client's mean gradient (option II).

    A client steps along ∇F_k(y) + c − c_k. Then c_k⁺ = c_k − c + (x − y)/(K η), after K steps with
    learning rate η. The server updates x by η_g times the mean of y − x, and c by |S|/N times the
    mean of c_k⁺ − c_k. For plain SGD, (x − y)/(K η) is the mean gradient; with momentum or Adam it
    is the mean step divided by η. With η = 0, c_k stays as it is.

    Parameters
    ----------
    lr : float
        η_g, the server's learning rate.
    """

    lr: float = 1.0
    usual_weights = "uniform"
    needs_everyone = True
    receives = sends = ("control",)
    uploads = collects = ("control_change",)

    def __post_init__(self) -> None:
        """Check the learning rate."""
        real(self.lr, "scaffold.lr", least=0)

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the penalty ⟨y, c − c_k⟩, whose gradient is the correction."""
        return (Phase(penalty=Penalty(linear=self.correction)),)

    def correction(self, client: Client) -> Tree:
        """Return c − c_k."""
        return tree_map(torch.sub, client.sent["control"], client.memory["control"])

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Start with c_k = 0."""
        return {"control": tree_map(torch.zeros_like, model)}

    def finish(self, client: Finished) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """Update c_k and send its change."""
        old = client.memory["control"]
        drift = tree_map(
            lambda x, y: (x - y) / (client.steps * client.lr), client.received, client.params
        )
        found = {name: old[name] - client.sent["control"][name] + drift[name] for name in old}
        # With a learning rate of 0, x − y does not show the gradient.
        new = tree_map(lambda c, before: torch.where(client.lr > 0, c, before), found, old)
        return {"control": new}, {"control_change": tree_map(torch.sub, new, old)}

    def begin(self, state: State, everyone: Cohort) -> State:
        """Start with c = 0, and store the number of clients."""
        count = torch.tensor(float(len(everyone.ids)))
        return state.with_server(
            control=tree_map(torch.zeros_like, state.model), clients={"count": count}
        )

    def admit(self, state: State, everyone: Cohort) -> State:
        """Rescale c, so that it stays the mean of all c_k. Those of new clients are 0."""
        count = torch.tensor(float(len(everyone.ids)))
        share = state.server["clients"]["count"] / count
        control = tree_map(lambda c: share * c, state.server["control"])
        return state.with_server(control=control, clients={"count": count})

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Send c with the model."""
        return {"model": state.model, "control": state.server["control"]}, {}

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Update the model and the control variate."""
        averaged = mix(updates, cohort.prior)
        moved = {
            name: state.model[name] + self.lr * (averaged[name] - state.model[name])
            for name in updates.param_names
        }
        share = len(cohort.ids) / float(state.server["clients"]["count"])
        change = mix(
            updates,
            torch.full_like(cohort.prior, 1 / len(cohort.ids)),
            upload="control_change",
        )
        control = tree_map(lambda c, d: c + share * d, state.server["control"], change)
        return state.with_global({**averaged, **moved}).with_server(control=control)
