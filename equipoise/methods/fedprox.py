"""FedProx (Li et al., 2020): local training that stays close to the received model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.errors import InputError
from equipoise.method import LocalRule, Penalty, Phase
from equipoise.methods import register


@register("fedprox", paper="Li et al., MLSys 2020")
@dataclass(frozen=True)
class FedProx(LocalRule):
    """Minimise F_k(w) + μ/2 ‖w − wᵗ‖², with wᵗ the received global model.

    Parameters
    ----------
    mu : float
        μ, at least 0; 0 is FedAvg.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        """Refuse a μ that is negative or not finite."""
        if not 0 <= self.mu < float("inf"):
            raise InputError(f"fedprox.mu must be at least 0 and finite, got {self.mu!r}")

    @property
    def proximal(self) -> float:  # type: ignore[override]
        """Return μ, which FedNova needs."""
        return self.mu

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the proximal term."""
        return (Phase(penalty=Penalty(self.mu)),)
