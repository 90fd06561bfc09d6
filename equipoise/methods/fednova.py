"""FedNova (Wang et al., 2020): updates are normalised by the amount of local work."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.checks import one_of
from equipoise.method import Aggregation, Cohort, Sees, State, Updates, shift
from equipoise.methods import register


@register("fednova", paper="Wang et al., NeurIPS 2020", sees=Sees.SCALARS)
@dataclass(frozen=True)
class FedNova(Aggregation):
    """Average directions instead of differences: w ← w + τ_eff Σ p_k (w_k − w)/‖a_k‖₁.

    The update of a client is −η Σ_t a_{k,t} g_{k,t}, a sum over its gradients. FedAvg therefore
    gives more influence to clients that make more steps, and minimises another objective than
    Σ p_k F_k. Divided by ‖a_k‖₁, the update is a mean of gradients, whatever the number of steps.
    For SGD ‖a_k‖₁ is the number of steps; momentum and FedProx's proximal term are accounted for as
    in the paper (:func:`equipoise.optimizers.gradient_weights`). If all clients do the same amount
    of work, this is FedAvg.

    Choices: with momentum, τ_eff is Σ p_k ‖a_k‖₁, as in the authors' code, so that the steps of the
    server are as long as those of FedAvg. For optimizers other than SGD, ‖a_k‖₁ is the number of
    steps. Buffers of BatchNorm are averaged.

    Parameters
    ----------
    effective : {"weights", "steps"}
        τ_eff, the factor of the server's step: Σ p_k ‖a_k‖₁, or the mean number of steps Σ p_k τ_k.
        Both are equal for SGD without momentum and without a proximal term.
    """

    effective: str = "weights"
    needs = ("gradient_weight",)

    def __post_init__(self) -> None:
        """Refuse an unknown ``effective``."""
        one_of(self.effective, ("weights", "steps"), "fednova.effective")

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Step along the mean of the normalised updates."""
        own = updates.reports["gradient_weight"]
        work = own if self.effective == "weights" else updates.reports["steps"]
        length = (cohort.prior * work).sum()
        return state.with_global(
            shift(state, updates, cohort.prior * length / own, simplex=cohort.prior)
        )
