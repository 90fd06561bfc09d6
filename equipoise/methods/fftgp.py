"""FFT-GP (FITEE 2024): weights under which all clients' generalization gaps are equal, and clients that train by BGP."""

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
    """Take each gap for linear in its client's weight, and choose the weights that make all gaps equal (eqs. 8-11).

    The cohort is asked for its validation metric twice, inside ``combine``: of the average under a,
    and of the average under a′, a step of GA away. With slopes K_k = (a′_k − a_k)/(G_k − G′_k) the
    gaps meet at G* = Σ K_k G_k / Σ K_k, and a*_k = a_k + K_k (G_k − G*). See
    :func:`equal_gap_weights` for what happens where that is not defined.

    Parameters
    ----------
    step, decay, centred, metric
        As in GA, which makes a′.
    every : int
        Ask in the last of every n rounds, and let GA adjust the weights in the others, which costs
        no message (table 15).
    slope_limit : float, optional
        The largest K; by default there is none.
    """

    every: int = 1
    slope_limit: float | None = None

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        super().__post_init__()
        count(self.every, f"{self.name}.every")
        if self.slope_limit is not None:
            real(self.slope_limit, f"{self.name}.slope_limit")

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Measure gaps under two sets of weights, and solve for those that equalise them."""
        if (state.round + 1) % self.every:
            return super().combine(state, updates, cohort)
        a = self.weights(state, cohort)
        gap = self._measured(state, updates, cohort, a)
        nudged = generalization_adjustment(a, gap, self.step_in(state, cohort), self.centred)
        nudged_gap = self._measured(state, updates, cohort, nudged)
        slope = slopes(a, gap, nudged, nudged_gap, self.slope_limit)
        fair = equal_gap_weights(a, gap, slope, nudged)
        # Figure 2 shows one against the other: slopes alone do not say what was cut off at 0.
        changes = {"weight_changes": nudged - a, "gap_changes": nudged_gap - gap}
        return self.finished(state, updates, cohort, fair).with_notes(
            weights=fair, gaps=gap, slopes=slope, **changes
        )

    def _measured(self, state: State, updates: Updates, cohort: Cohort, weights: Tensor) -> Tensor:
        """Return the gaps of the average under some weights."""
        measured = cohort.evaluate({**state.model, **mix(updates, weights)}, "val")
        metric = cohort.score if self.metric == "score" else "loss"
        return self.gap(measured[metric], updates.reports[self.needs[1]], cohort)


@register("fftgp", paper="FFT-GP, FITEE 2024", sees=Sees.SCALARS)
@dataclass(frozen=True)
class FFTGP(BalancedTraining, FairnessAwareAggregation):
    """Let clients train by BGP (algorithm 2), and average their models with the weights of FAA (algorithm 1).

    Parameters
    ----------
    align, alignment, restore, meta
        As in BGP.
    step, decay, centred, metric, every, slope_limit
        As in FAA.
    """

    def __post_init__(self) -> None:
        """Refuse what either part refuses."""
        BalancedTraining.__post_init__(self)
        FairnessAwareAggregation.__post_init__(self)


def slopes(
    a: Tensor, gap: Tensor, nudged: Tensor, nudged_gap: Tensor, limit: float | None = None
) -> Tensor:
    """Return K_k = (a′_k − a_k)/(G_k − G′_k), how much weight lowers a client's gap by one.

    It is 0 where a client has no gap, where the gap did not change, and where it is negative: there
    more weight would widen the gap, which the linear relation rules out.

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
    """Return the weights a*_k = a_k + K_k (G_k − G*), under which all gaps are G*.

    Parameters
    ----------
    a : Tensor
        The weights, summing to one.
    gap : Tensor
        G under those weights; NaN for clients that have none, whose K is 0.
    slope : Tensor
        K, none negative; see :func:`slopes`.
    otherwise : Tensor
        What to return if all slopes are 0, so that no weights are known to equalise anything.

    Returns
    -------
    Tensor
        On the simplex. Where an a*_k lies outside [0, 1] it is clipped and all are scaled, and gaps
        are then not quite equal.

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
