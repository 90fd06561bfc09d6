"""TERM (Li et al., 2021): clients or groups are weighted by the exponential of their losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.checks import one_of
from equipoise.errors import InputError
from equipoise.method import Aggregation, Cohort, Sees, State, Updates, mix
from equipoise.methods import register


@register("term", paper="Li et al., ICLR 2021", sees=Sees.SCALARS)
@dataclass(frozen=True)
class Term(Aggregation):
    """Minimise the tilted loss (1/t) log Σ p_k exp(t F_k): w ← Σ a_k w_k with a_k ∝ p_k exp(t F_k).

    F_k is the client's training loss at the received model, and p is the cohort's prior. With
    ``tilts="groups"`` (TERM-Group, the paper's hierarchical form) groups are tilted by t and
    clients within a group by τ: a_k ∝ p_k exp(τ F_k) exp((t − τ) R_g), with R_g = (1/τ) log of the
    p-weighted mean of exp(τ F_k) over the group of k.

    Parameters
    ----------
    t : float
        Above 0 it increases the weights of clients with high losses, below 0 it decreases them; 0
        is the data-weighted mean.
    tilts : {"clients", "groups"}
        What t tilts.
    tau : float
        τ, used with groups only; 0 weights the clients of a group by p.
    """

    t: float = 1.0
    tilts: str = "clients"
    tau: float = 0.0
    needs = ("loss_before",)

    def __post_init__(self) -> None:
        """Refuse tilts that are not finite or would be ignored."""
        one_of(self.tilts, ("clients", "groups"), "term.tilts")
        for name in ("t", "tau"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"term.{name} must be finite, got {getattr(self, name)!r}")
        if self.tau and self.tilts == "clients":
            raise InputError(
                f"term.tau is {self.tau!r}, but it is used only with term.tilts='groups'"
            )

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average with tilted weights."""
        loss = updates.reports["loss_before"]
        exponent = self.t * loss
        if self.tilts == "groups":
            risk = group_risks(loss, cohort.prior, torch.from_numpy(cohort.groups), self.tau)
            exponent = self.tau * loss + (self.t - self.tau) * risk
        return state.with_global(mix(updates, torch.softmax(cohort.prior.log() + exponent, dim=0)))


def group_risks(loss: Tensor, prior: Tensor, groups: Tensor, tau: float) -> Tensor:
    """Return each client's group loss R_g = (1/τ) log of the weighted mean of exp(τ F_k).

    Parameters
    ----------
    loss, prior, groups : Tensor
        Loss, weight and group of every client.
    tau : float
        The tilt; 0 is the weighted mean.

    Returns
    -------
    Tensor
        One value per client, equal within a group.

    Examples
    --------
    >>> loss, prior = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0.25, 0.25, 0.5])
    >>> group_risks(loss, prior, torch.tensor([4, 4, 7]), tau=0.0)
    tensor([2., 2., 5.])
    """
    risks = torch.empty_like(loss)
    for group in groups.unique():
        inside = groups == group
        share, own = prior[inside] / prior[inside].sum(), loss[inside]
        risks[inside] = (
            torch.logsumexp(share.log() + tau * own, dim=0) / tau if tau else share @ own
        )
    return risks
