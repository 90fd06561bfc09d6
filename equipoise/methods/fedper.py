"""FedPer (Arivazhagan et al., 2019): shared features, and a personal head per client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.method import LocalRule, Phase
from equipoise.methods import register


@register("fedper", paper="Arivazhagan et al., 2019")
@dataclass(frozen=True)
class FedPer(LocalRule):
    """Train features and head together; the head stays with the client.

    All heads start equal, and there is no global head. ``evaluation.average_kept`` evaluates a
    global model with the mean of the clients' heads. A client that has never taken part trains a
    head on the received features.
    """

    keeps = "head"

    def adapt(self) -> Sequence[Phase]:
        """Train a head."""
        return (Phase(move="head"),)
