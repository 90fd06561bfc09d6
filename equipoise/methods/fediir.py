"""FedIIR (Guo et al., 2023): features for which the head has the same gradient on every client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from equipoise.checks import real
from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.method import (
    Aggregation,
    Cohort,
    LocalRule,
    Phase,
    Sees,
    State,
    Updates,
    mix,
    mix_tree,
)
from equipoise.methods import register
from equipoise.tree import Tree, select, squared_distance


@register("fediir", paper="Guo et al., ICML 2023", sees=Sees.SUMS)
@dataclass(frozen=True)
class FedIIR(LocalRule, Aggregation):
    """Add γ ‖∇_h F_k − ḡ‖² to the loss.

    ∇_h F_k is the gradient of the head on the batch, and ḡ its mean over clients.

    Before a round, the server asks every client of the cohort for the gradient of the head on all
    its training samples, at the model it is about to send, and updates ḡ ← β ḡ + (1 − β) Σ a_k ∇_h
    F_k. ḡ starts at 0, without bias correction. Clients are weighted equally by default. The
    penalty is differentiated through the gradient, so it also trains the features.

    Choices: a client's gradient is the mean over its samples, with the model in evaluation mode.
    The public code averages over batches.

    Parameters
    ----------
    gamma : float
        γ, at least 0; 0 is FedAvg with equal weights.
    ema : float
        β in [0, 1), the decay of the moving average ḡ.
    """

    gamma: float = 1e-3
    ema: float = 0.95
    usual_weights = "uniform"
    receives = sends = ("mean_gradient",)

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        real(self.gamma, "fediir.gamma", least=0)
        if not 0 <= self.ema < 1:
            raise InputError(f"fediir.ema must be in [0, 1), got {self.ema!r}")

    def prepare(self, state: State, cohort: Cohort) -> State:
        """Update ḡ with the gradients of the cohort at the global model."""
        sums, _ = cohort.ask("head_gradient", model=state.model)
        # Use the registered sizes, which are checked. A count in an answer could be 0.
        counts = torch.from_numpy(cohort.sizes)
        means = {
            name: rows / counts.to(rows).view(-1, *(1,) * (rows.dim() - 1))
            for name, rows in sums.items()
        }
        new = mix_tree(means, cohort.prior)
        old = state.server.get("mean_gradient") or {
            name: torch.zeros_like(tensor) for name, tensor in new.items()
        }
        return state.with_server(
            mean_gradient={n: self.ema * old[n] + (1 - self.ema) * g for n, g in new.items()}
        )

    def head_gradient(self, client: Client) -> tuple[Tree, Tensor]:
        """Return the sum of the gradients of the head, and the number of samples; a question."""
        z = client.features()

        def total(head: Tree) -> Tensor:
            return client.sum(client.network.task.loss(client.at(head).head(z), client.y))

        return grad(total)(_head(client)), client.sum(torch.ones_like(z.flatten(1)[:, 0]))

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Send ḡ with the model."""
        return {"model": state.model, "mean_gradient": state.server["mean_gradient"]}, {}

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the penalty."""
        return (Phase(loss=self.loss),)

    def loss(self, client: Client) -> Tensor:
        """Add the squared distance between the head's gradient on the batch and ḡ."""
        z = client.features()

        def mean(head: Tree) -> Tensor:
            return client.mean(
                client.network.task.loss(client.at(head, train=True).head(z), client.y)
            )

        penalty = squared_distance(grad(mean)(_head(client)), client.sent["mean_gradient"])
        return client.task_loss() + self.gamma * penalty

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average."""
        return state.with_global(mix(updates, cohort.prior))


def _head(client: Client) -> Tree:
    """Return the parameters of the head."""
    names = select(client.params, "head")
    return {name: client.params[name] for name in names if name not in client.network.buffers}
