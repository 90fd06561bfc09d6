"""FedBN (Li et al., 2021): BatchNorm layers stay with the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from equipoise.method import LocalRule, Phase
from equipoise.methods import register


@register("fedbn", paper="Li et al., ICLR 2021")
@dataclass(frozen=True)
class FedBN(LocalRule):
    """Train all parts; keep parameters and statistics of BatchNorm layers on the client.

    The paper weights clients equally. A client that has never taken part fits the BatchNorm layers
    to its own data, without changing the received parts.
    """

    keeps = "batchnorm"
    usual_weights: ClassVar[str] = "uniform"
    usual_model = "bncnn"

    def adapt(self) -> Sequence[Phase]:
        """Fit BatchNorm layers."""
        return (Phase(move="batchnorm"),)
