"""FedRep (Collins et al., 2021): train a personal head first, then the shared features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.checks import count
from equipoise.method import LocalRule, Phase
from equipoise.methods import register


@register("fedrep", paper="Collins et al., ICML 2021")
@dataclass(frozen=True)
class FedRep(LocalRule):
    """Train the client's head on the received features, then the features with that head.

    The head stays with the client. The paper has n local epochs, the last of which trains the
    features; here the two numbers are set separately. All heads start equal, and there is no global
    head. ``evaluation.average_kept`` evaluates a global model with the mean of the clients' heads.
    A client that has never taken part makes only the first of the two steps.

    Parameters
    ----------
    head_epochs : int, optional
        Number of epochs of the head; by default that of the training settings.
    features_epochs : int
        Number of epochs of the features.
    """

    head_epochs: int | None = None
    features_epochs: int = 1
    keeps = "head"

    def __post_init__(self) -> None:
        """Check the numbers of epochs."""
        for name in ("head_epochs", "features_epochs"):
            if (epochs := getattr(self, name)) is not None:
                count(epochs, f"fedrep.{name}")

    def phases(self) -> Sequence[Phase]:
        """Train the head, then the features."""
        return *self.adapt(), Phase(move="features", epochs=self.features_epochs)

    def adapt(self) -> Sequence[Phase]:
        """Fit a head."""
        return (Phase(move="head", epochs=self.head_epochs),)
