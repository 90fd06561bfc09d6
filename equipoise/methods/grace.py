"""GRACE (Zhang et al., 2023): feature alignment on clients, and weights by gradient alignment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.checks import one_of, real
from equipoise.method import Aggregation, Cohort, Sees, State, Updates, shift
from equipoise.methods import register
from equipoise.methods.bgp import BalancedTraining
from equipoise.methods.fedmgda import cosines, inner_products

SIMILARITIES = ("model", "tensors", "early_tensors")


@register("grace", paper="Zhang et al., MICCAI 2023", sees=Sees.UPDATES)
@dataclass(frozen=True)
class Grace(BalancedTraining, Aggregation):
    """Weight clients by the cosines between their updates, and train them with an alignment loss.

    The server computes g_k = w − w_k and c_k, the mean of cos(g_k, g_j) over the other clients j,
    and steps to w − η_s Σ a_k g_k with a_k ∝ p_k c_k, where p_k is the share of training samples.
    See :func:`agreement_weights` for negative cosines. Buffers are averaged with a. A client with
    g_k = 0 has cosines of 0.

    Clients train as in BGP with ``restore``, as in the authors' code: on halves of batches, with
    the gradient at w′ applied to w. That code aligns features with a contrastive loss. Its CORAL
    loss is not public, so that of BGP is used.

    Parameters
    ----------
    align, alignment, restore, meta, received
        As in BGP. The code's default weight is 1; its documented commands set 0.1.
    similarity : {"model", "tensors", "early_tensors"}
        How cosines are computed: of whole updates; as the mean over their tensors; or as a weighted
        mean over their tensors, with weights that fall linearly from the first tensor to 0 for the
        last.
    server_lr : float
        η_s, above 0.
    """

    restore: bool = True
    similarity: str = "model"
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        real(self.server_lr, f"{self.name}.server_lr")
        one_of(self.similarity, SIMILARITIES, f"{self.name}.similarity")

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Step along the updates, weighted by their agreement."""
        agreement = mean_cosines(state, updates, self.similarity)
        weights = agreement_weights(cohort.prior, agreement)
        moved = shift(state, updates, self.server_lr * weights, weights)
        return state.with_global(moved).with_notes(weights=weights, cosines=agreement)


def mean_cosines(state: State, updates: Updates, similarity: str = "model") -> Tensor:
    """Return the mean cosine between each client's update and those of the others, in float64.

    Parameters
    ----------
    state : State
        Holds the model that the updates start from.
    updates : Updates
        The updates of the cohort.
    similarity : {"model", "tensors", "early_tensors"}
        As in :class:`Grace`.

    Returns
    -------
    Tensor
        ``[K]``; 1 for a single client.

    Examples
    --------
    >>> three = Updates({"w": torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])}, {}, {}, {})
    >>> mean_cosines(State(0, {"w": torch.zeros(2)}), three)
    tensor([0.5000, 0.0000, 0.5000], dtype=torch.float64)
    """
    if similarity == "model":
        compared = [updates]
    else:
        compared = [Updates({name: rows}, {}, {}, {}) for name, rows in updates.params.items()]
    by_tensor = torch.stack([cosines(inner_products(state, part)) for part in compared])
    # The weight of the last tensor is 0, except if it is the only one.
    late = 0.0 if similarity == "early_tensors" and len(compared) > 1 else 1.0
    weights = torch.linspace(1.0, late, len(compared), dtype=torch.float64)
    between = torch.einsum("t,tkj->kj", weights / weights.sum(), by_tensor)
    clients = len(between)
    if clients == 1:
        return torch.ones(1, dtype=torch.float64)
    return (between.sum(1) - between.diagonal()) / (clients - 1)


def agreement_weights(prior: Tensor, agreement: Tensor) -> Tensor:
    """Return weights in proportion to the prior times the cosines, after making these positive.

    If the smallest cosine is negative, it is subtracted from all cosines, and 0.001 is added. (The
    authors' code then divides by the largest if that is above 1. This has no effect, because
    weights are scaled to sum to one.)

    Parameters
    ----------
    prior : Tensor
        p, one weight per client.
    agreement : Tensor
        c; see :func:`mean_cosines`.

    Returns
    -------
    Tensor
        Weights on the simplex; the prior if all cosines are 0.

    Examples
    --------
    >>> agreement_weights(torch.tensor([0.5, 0.5]), torch.tensor([0.6, 0.2]))
    tensor([0.7500, 0.2500])
    """
    if agreement.min() < 0:
        agreement = agreement - agreement.min() + 1e-3
    weighted = prior * agreement
    return weighted / weighted.sum() if weighted.sum() > 0 else prior
