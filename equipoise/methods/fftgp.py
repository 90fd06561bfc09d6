"""FFT-GP (FITEE 2024): weights that equalise generalization gaps, and local training by BGP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.checks import count, real
from equipoise.method import Cohort, Sees, State, Updates, mix
from equipoise.methods import register
from equipoise.methods.bgp import BalancedTraining
from equipoise.methods.ga import GeneralizationAdjustment, generalization_adjustment


@register("faa", paper="FFT-GP, FITEE 2024", sees=Sees.SCALARS)
@dataclass(frozen=True)
class FairnessAwareAggregation(GeneralizationAdjustment):
    """Choose the weights that make all generalization gaps equal (eqs. 8-11).

    Each gap is assumed to be linear in its client's weight. The cohort is asked for its validation
    metric twice, inside ``combine``: for the average with weights a, and for the average with
    weights a′ after a step of GA. With slopes K_k = (a′_k − a_k)/(G_k − G′_k) all gaps equal
    G* = Σ K_k G_k / Σ K_k for a*_k = a_k + K_k (G_k − G*). See :func:`equal_gap_weights` for the
    cases in which this is not defined.

    Parameters
    ----------
    step, decay, centred, metric
        As in GA, which computes a′.
    every : int
        Ask in the last of every n rounds, and adjust the weights with GA in the others, which needs
        no further message (table 15).
    slope_limit : float, optional
        Upper limit of K; by default there is none.
    """

    every: int = 1
    slope_limit: float | None = None

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        super().__post_init__()
        count(self.every, f"{self.name}.every")
        if self.slope_limit is not None:
            real(self.slope_limit, f"{self.name}.slope_limit")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return GA's reports, or those of clients' own models only if GA is never used."""
        return super().needs if self.every > 1 else super().needs[-1:]

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Measure gaps with two sets of weights, and solve for weights that equalise them."""
        if (state.round + 1) % self.every:
            return super().combine(state, updates, cohort)
        a = self.weights(state, cohort)
        gap = self._measured(state, updates, cohort, a)
        nudged = generalization_adjustment(a, gap, self.step_in(state, cohort), self.centred)
        nudged_gap = self._measured(state, updates, cohort, nudged)
        slope = slopes(a, gap, nudged, nudged_gap, self.slope_limit)
        fair = equal_gap_weights(a, gap, slope, nudged)
        # Figure 2 plots one against the other. Slopes alone do not show what was clipped at 0.
        changes = {"weight_changes": nudged - a, "gap_changes": nudged_gap - gap}
        return self.finished(state, updates, cohort, fair).with_notes(
            weights=fair, gaps=gap, slopes=slope, **changes
        )

    def _measured(self, state: State, updates: Updates, cohort: Cohort, weights: Tensor) -> Tensor:
        """Return the gaps of the average with some weights."""
        measured = cohort.evaluate({**state.model, **mix(updates, weights)}, "val")
        metric = cohort.score if self.metric == "score" else "loss"
        return self.gap(measured[metric], updates.reports[self.needs[-1]], cohort)


@register("fftgp", paper="FFT-GP, FITEE 2024", sees=Sees.SCALARS)
@dataclass(frozen=True)
class FFTGP(BalancedTraining, FairnessAwareAggregation):
    """Train clients with BGP (algorithm 2), and average with the weights of FAA (algorithm 1).

    Parameters
    ----------
    align, alignment, restore, meta, received
        As in BGP.
    step, decay, centred, metric, every, slope_limit
        As in FAA.
    """

    def __post_init__(self) -> None:
        """Check the hyper-parameters of both parts."""
        BalancedTraining.__post_init__(self)
        FairnessAwareAggregation.__post_init__(self)


def slopes(
    a: Tensor, gap: Tensor, nudged: Tensor, nudged_gap: Tensor, limit: float | None = None
) -> Tensor:
    """Return K_k = (a′_k − a_k)/(G_k − G′_k), the weight that lowers a client's gap by one.

    K_k is 0 if a client has no gap, if the gap did not change, or if the quotient is negative. In
    the last case more weight would increase the gap, which contradicts the linear model.

    Examples
    --------
    >>> a, gap = torch.tensor([0.5, 0.5]), torch.tensor([0.4, 0.2])
    >>> slopes(a, gap, torch.tensor([0.6, 0.4]), torch.tensor([0.2, 0.3]))
    tensor([0.5000, 1.0000])
    """
    change = gap - nudged_gap
    moved = torch.isfinite(change) & (change.abs() > 1e-12)
    slope = torch.where(moved, (nudged - a) / torch.where(moved, change, 1.0), 0.0)
    return slope.clamp(min=0, max=limit)


def equal_gap_weights(a: Tensor, gap: Tensor, slope: Tensor, otherwise: Tensor) -> Tensor:
    """Return the weights a*_k = a_k + K_k (G_k − G*), for which all gaps are G*.

    Parameters
    ----------
    a : Tensor
        The weights, summing to one.
    gap : Tensor
        G with these weights; NaN for clients without a gap, whose K is 0.
    slope : Tensor
        K, none negative; see :func:`slopes`.
    otherwise : Tensor
        What to return if all slopes are 0, so that G* is not defined.

    Returns
    -------
    Tensor
        Weights on the simplex. Values a*_k outside [0, 1] are clipped, and all are then scaled to
        sum to one, so gaps are only approximately equal.

    Examples
    --------
    >>> a, gap, slope = torch.tensor([0.5, 0.5]), torch.tensor([0.4, 0.2]), torch.tensor([0.5, 0.5])
    >>> equal_gap_weights(a, gap, slope, a)
    tensor([0.5500, 0.4500])
    """
    total = slope.sum()
    if not total > 0:
        return otherwise
    gap = torch.where(slope > 0, gap, 0.0)
    fair = (a + slope * (gap - (slope * gap).sum() / total)).clamp(0, 1)
    return fair / fair.sum() if fair.sum() > 0 else otherwise
