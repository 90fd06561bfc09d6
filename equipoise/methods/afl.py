"""AFL (Mohri et al., 2019): minimise the loss of the worst mixture of clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.method import Aggregation, Cohort, Sees, State, Updates, locate, mix
from equipoise.methods import register
from equipoise.solvers import project_to_simplex
from equipoise.tree import Tree, tree_map


@register("afl", paper="Mohri et al., ICML 2019", sees=Sees.SCALARS)
@dataclass(frozen=True)
class Afl(Aggregation):
    """Solve min_w max_λ Σ λ_k F_k(w) with w ← Σ λ_k w_k and λ ← Π(λ + γ_λ F(w)).

    Π is the projection onto the simplex of all clients. F is taken at the received w, so w and λ
    are updated simultaneously. λ starts at the clients' prior, their shares of all samples. In the
    authors' experiments it starts uniform, as with ``weights: uniform``. After that only λ weights
    the clients, and their numbers of samples do not matter. If only some clients take part, their λ
    is scaled to sum to one, and their losses are multiplied by K/|S|, which keeps the ascent
    unbiased for uniform sampling. If all of their λ is zero, the model does not change.

    Parameters
    ----------
    ascent : float
        γ_λ, at least 0; 0 leaves λ at the prior.
    average : bool
        Whether the resulting model is the mean of w over all rounds, as in the paper, or the last
        w.
    """

    ascent: float = 0.1
    average: bool = True
    needs = ("loss_before",)
    ignores_prior = "AFL weights clients by λ, which follows their losses"
    needs_everyone = True

    def __post_init__(self) -> None:
        """Refuse a negative step, which would favour the best client."""
        if not 0 <= self.ascent < float("inf"):
            raise InputError(f"afl.ascent must be at least 0 and finite, got {self.ascent!r}")

    def begin(self, state: State, everyone: Cohort) -> State:
        """Start with the clients' prior."""
        clients = {"ids": torch.from_numpy(everyone.ids), "weight": everyone.prior}
        return state.with_server(clients=clients, mean=tree_map(torch.zeros_like, state.model))

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Update the model with λ, and λ with the losses."""
        clients, here = state.server["clients"], locate(state.server["clients"], cohort)
        ours = clients["weight"][here]
        raised = clients["weight"].clone()
        raised[here] += self.ascent * len(raised) / len(here) * updates.reports["loss_before"]
        weight = torch.from_numpy(project_to_simplex(raised.numpy()))
        new = state.with_global(mix(updates, ours / ours.sum())) if ours.sum() > 0 else state
        mean = tree_map(
            lambda old, now: _next_mean(old, now, state.round + 1), state.server["mean"], new.model
        )
        return new.with_server(clients={**clients, "weight": weight}, mean=mean)

    def evaluated(self, state: State) -> Tree:
        """Return the mean of w over the rounds."""
        return (
            {name: state.server["mean"][name] for name in state.model}
            if self.average and state.round
            else state.model
        )


def _next_mean(old: Tensor, now: Tensor, count: int) -> Tensor:
    """Update a running mean with the last of ``count`` tensors; the −∞ of a mask is kept."""
    return torch.where(now == old, old, old + (now - old) / count)
