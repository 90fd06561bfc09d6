"""Ditto (Li et al., 2021): a personal model that is kept close to the global one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.errors import InputError
from equipoise.method import LocalRule, Penalty, Phase, personal_loss
from equipoise.methods import register


@register("ditto", paper="Li et al., ICML 2021")
@dataclass(frozen=True)
class Ditto(LocalRule):
    """Minimise F_k(v_k) + λ/2 ‖v_k − wᵗ‖² over the personal model v_k, and F_k(w) over the global.

    On every batch v_k is updated first, then the client's copy of w. The anchor wᵗ is the received
    global model, so it is constant during a round. v_k never leaves the client, and does not change
    while the client does not take part. Any aggregation can be used for the global model.

    v_k starts as a copy of the global model that the client receives when it first takes part. In
    the authors' code all v_k start at the first global model w⁰; with all clients in round 1 this
    is the same. By default clients are weighted by their numbers of samples. The authors sample
    clients in proportion to these numbers and weight them equally: ``{name: ditto, sampling: size,
    weights: uniform}``.

    Parameters
    ----------
    lam : float
        λ, at least 0; 0 is local training.
    """

    lam: float = 1.0
    keeps = "personal"
    interleaved = True

    def __post_init__(self) -> None:
        """Refuse a negative penalty."""
        if not 0 <= self.lam < float("inf"):
            raise InputError(f"ditto.lam must be at least 0 and finite, got {self.lam!r}")

    def phases(self) -> Sequence[Phase]:
        """Update the personal model, then the global one, on the same batch."""
        return self._personal_phase(), Phase(move="all", batch="same")

    def adapt(self) -> Sequence[Phase]:
        """Train a new client's personal model from the global one, with the same penalty."""
        return (self._personal_phase(),)

    def _personal_phase(self) -> Phase:
        return Phase(move="personal", loss=personal_loss, penalty=Penalty(self.lam))
