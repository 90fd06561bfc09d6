"""FedGCR (Cheng et al., AAAI 2024): prompts for client types, and loss-based weights."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.checks import one_of
from equipoise.method import Cohort, Sees, State, Updates
from equipoise.methods import register
from equipoise.methods.fedgc import Customization
from equipoise.methods.fedgr import FedGR


@register("fedgcr", paper="Cheng et al., AAAI 2024", sees=Sees.REPRESENTATIONS)
@dataclass(frozen=True)
class FedGCR(Customization, FedGR):
    """Customize prompts for clusters of clients, and weight clients by losses (FedGC + FedGR).

    Parameters
    ----------
    lam1, lam2, tau, similarity
        The losses; see :class:`~equipoise.methods.fedgc.Customization`.
    representation, clip, noise, privacy_delta
        The client representations; see :class:`~equipoise.methods.fedgc.Customization`.
    clusters, clustering, choice, soft, index, compare, digest
        The clusters; see :class:`~equipoise.grouping.Grouping`.
    groups : {"representation", "given"}
        The groups of the weights: the clusters, or the federation's own.
    q, delta, gamma
        The weights; see :class:`~equipoise.methods.fedgr.FedGR`.
    """

    groups: str = "representation"
    usual_model = "fedgc"
    sends = ("centres",)
    collects = ("representation",)

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        Customization.__post_init__(self)
        FedGR.__post_init__(self)
        one_of(self.groups, ("representation", "given"), f"{self.name}.groups")

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Weight clients by their losses and those of their clusters."""
        return (
            super()
            .combine(state, updates, cohort)
            .with_notes(**self.spent(state, int(self.needs_everyone)))
        )
