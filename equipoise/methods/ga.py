"""GA (Zhang et al., 2023): clients with large generalization gaps get larger weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.checks import one_of, real
from equipoise.method import Aggregation, Cohort, Sees, State, Updates, locate, mix
from equipoise.methods import register


@register("ga", paper="Zhang et al., CVPR 2023", sees=Sees.SCALARS)
@dataclass(frozen=True)
class GeneralizationAdjustment(Aggregation):
    """Increase a_k by d_r (G_k − Ḡ) / max_j |G_j − Ḡ|, where G_k is client k's generalization gap.

    The gap G_k is the loss of the global model minus that of the client's own model. Both are
    measured on the client's validation split: the own model θ_k after training in round r − 1, and
    the global model that the client receives in round r. Therefore a round needs no further
    message. Weights start equal and stay on the simplex: they are clipped at 0 and scaled to their
    previous sum. (The public code also clips them at 1.) With centred gaps they do not change if
    all gaps are equal.

    A client that has no validation data, or did not take part in the previous round, has no gap and
    keeps its weight. If only some clients take part, their weights are scaled to sum to one.

    Parameters
    ----------
    step : float
        d, above 0.
    decay : bool
        Whether d_r = d (1 − (r − 1)/R) in round r of R, or d throughout.
    centred : bool
        Whether gaps are centred (the paper), or not (its public code).
    metric : {"loss", "score"}
        The metric of the gaps. If a higher score is better, the gap is the client's own score minus
        that of the global model.
    """

    step: float = 0.2
    decay: bool = True
    centred: bool = True
    metric: str = "loss"
    ignores_prior = "weights follow the clients' generalization gaps"
    needs_everyone = True

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        real(self.step, f"{self.name}.step")
        one_of(self.metric, ("loss", "score"), f"{self.name}.metric")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the validation metrics of the received model and of the client's own."""
        return f"val_{self.metric}_before", f"val_{self.metric}_after"

    def begin(self, state: State, everyone: Cohort) -> State:
        """Start with equal weights."""
        ids = torch.from_numpy(everyone.ids)
        weight = torch.full((len(ids),), 1 / len(ids), dtype=torch.float64)
        # ``round`` is the last round in which the client took part, counted from 1.
        clients = {
            "ids": ids,
            "weight": weight,
            "own": torch.full_like(weight, torch.nan),
            "round": ids * 0,
        }
        return state.with_server(clients=clients)

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Adjust the weights by the gaps of the previous round, and average with them."""
        clients, here = state.server["clients"], locate(state.server["clients"], cohort)
        gap = self.gap(updates.reports[self.needs[0]], clients["own"][here], cohort)
        gap = torch.where(clients["round"][here] == state.round, gap, torch.nan)
        adjusted = generalization_adjustment(
            self.weights(state, cohort), gap, self.step_in(state, cohort), self.centred
        )
        return self.finished(state, updates, cohort, adjusted).with_notes(
            weights=adjusted, gaps=gap
        )

    def weights(self, state: State, cohort: Cohort) -> Tensor:
        """Return the cohort's weights, summing to one; equal ones if all are 0."""
        weight = state.server["clients"]["weight"][locate(state.server["clients"], cohort)]
        return (
            weight / weight.sum() if weight.sum() > 0 else torch.full_like(weight, 1 / len(weight))
        )

    def gap(self, together: Tensor, alone: Tensor, cohort: Cohort) -> Tensor:
        """Return the gaps ``[K]`` between the global model and the clients' own."""
        higher_is_better = self.metric == "score" and cohort.higher_is_better
        return alone - together if higher_is_better else together - alone

    def step_in(self, state: State, cohort: Cohort) -> float:
        """Return d_r."""
        return self.step * (1 - state.round / cohort.rounds) if self.decay else self.step

    def finished(self, state: State, updates: Updates, cohort: Cohort, weights: Tensor) -> State:
        """Average, and store the weights and the reported metrics of the clients' own models."""
        clients, here = state.server["clients"], locate(state.server["clients"], cohort)
        kept = {
            "weight": weights * clients["weight"][here].sum(),
            "own": updates.reports[self.needs[-1]],
            "round": torch.full_like(here, state.round + 1),
        }
        changed = {name: clients[name].index_put((here,), values) for name, values in kept.items()}
        return state.with_global(mix(updates, weights)).with_server(clients={**clients, **changed})


def generalization_adjustment(
    weights: Tensor, gaps: Tensor, step: float, centred: bool = True
) -> Tensor:
    """Increase the weights of clients with large gaps, and decrease those of the others.

    Parameters
    ----------
    weights : Tensor
        a, one per client.
    gaps : Tensor
        G; NaN for clients without a gap, whose weights do not change.
    step : float
        The largest increase of a weight, before all are scaled.
    centred : bool
        Whether to subtract the mean of the gaps first.

    Returns
    -------
    Tensor
        The new weights, non-negative, with the same sum as the old ones.

    Examples
    --------
    >>> thirds = torch.full((3,), 1 / 3, dtype=torch.float64)
    >>> generalization_adjustment(thirds, torch.tensor([0.4, 0.1, 0.25]).double(), 0.2)
    tensor([0.5333, 0.1333, 0.3333], dtype=torch.float64)
    """
    known = torch.isfinite(gaps)
    if not known.any():
        return weights
    deviations = gaps[known] - gaps[known].mean() if centred else gaps[known]
    largest = deviations.abs().max()
    # Equal gaps deviate from their mean only by rounding, which the division would magnify.
    if largest <= 1e-12 * gaps[known].abs().max():
        return weights
    raised = (weights[known] + step * deviations / largest).clamp(min=0)
    if not raised.sum() > 0:
        return weights
    return weights.masked_scatter(known, raised * weights[known].sum() / raised.sum())
