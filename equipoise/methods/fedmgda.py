"""FedMGDA+ (Hu et al., 2022): step in a direction that lowers the loss of every client."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.method import Aggregation, Cohort, Sees, State, Updates, shift
from equipoise.methods import register
from equipoise.solvers import shortest_mixture
from equipoise.tree import flat_rows


@register("fedmgda", paper="Hu et al., IEEE TNSE 2022", sees=Sees.UPDATES)
@dataclass(frozen=True)
class FedMgda(Aggregation):
    """Step w ← w − η Σ λ_k Δ_k along the shortest mixture of normalised updates.

    Δ_k is (w − w_k)/‖w − w_k‖. λ minimises ‖Σ λ_k Δ_k‖² over non-negative weights that sum to one
    and differ from 1/|S| by at most ε. A client whose update is zero has Δ_k = 0. With ε = 1 no
    step then improves all clients, and w does not change. The length of a step is at most η,
    whatever the clients' learning rate. Buffers are averaged with λ.

    Parameters
    ----------
    epsilon : float
        ε in [0, 1]; 0 is the plain mean of normalised updates, 1 the multiple-gradient descent
        algorithm.
    lr : float
        η, the length of a step if all normalised updates are equal.
    decay : float
        Factor by which η is multiplied every round.
    """

    epsilon: float = 0.1
    lr: float = 1.0
    decay: float = 1.0
    ignores_prior = "FedMGDA+ weights clients by the shortest mixture of their updates"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        if not 0 <= self.epsilon <= 1:
            raise InputError(f"fedmgda.epsilon must be in [0, 1], got {self.epsilon!r}")
        if not 0 < self.lr < float("inf"):
            raise InputError(f"fedmgda.lr must be above 0 and finite, got {self.lr!r}")
        if not 0 < self.decay <= 1:
            raise InputError(f"fedmgda.decay must be above 0 and at most 1, got {self.decay!r}")

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Compute the mixture and step along it."""
        gram = inner_products(state, updates)
        mixture = torch.from_numpy(shortest_mixture(cosines(gram).numpy(), radius=self.epsilon))
        step = self.lr * self.decay**state.round * mixture * _inverse_lengths(gram)
        return state.with_global(shift(state, updates, step, mixture))


def inner_products(state: State, updates: Updates) -> Tensor:
    """Return the inner products of all pairs of updates w_k − w, in float64.

    Examples
    --------
    >>> two = Updates({"w": torch.tensor([[1.0], [4.0]])}, {}, {}, {})
    >>> inner_products(State(0, {"w": torch.tensor([2.0])}), two)
    tensor([[ 1., -2.],
            [-2.,  4.]], dtype=torch.float64)
    """
    differences = (
        flat_rows(rows - state.model[name]).double() for name, rows in updates.params.items()
    )
    return torch.stack([rows @ rows.T for rows in differences]).sum(0).cpu()


def cosines(gram: Tensor) -> Tensor:
    """Return the cosines of all pairs of vectors from their inner products; 0 for zero vectors.

    Examples
    --------
    >>> cosines(torch.tensor([[1.0, -2.0], [-2.0, 4.0]]))
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    inverse = _inverse_lengths(gram)
    return gram * inverse.unsqueeze(0) * inverse.unsqueeze(1)


def _inverse_lengths(gram: Tensor) -> Tensor:
    length = gram.diagonal().sqrt()
    return torch.where(length > 0, 1 / length, 0.0)
