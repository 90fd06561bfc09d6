"""FedRep (Collins et al., 2021): a head fitted to the shared features first, then a short step of the features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.checks import count
from equipoise.method import LocalRule, Phase
from equipoise.methods import register


@register("fedrep", paper="Collins et al., ICML 2021")
@dataclass(frozen=True)
class FedRep(LocalRule):
    """Train the client's own head on the received features, then the features under that head; the head stays.

    The paper counts n local epochs of which the last is the features'; here they are said apart.
    All heads begin alike, and there is no global head: ``evaluation.average_kept`` measures a
    global model with the mean of the clients' heads. A client that has never taken part does the
    first of the two steps.

    Parameters
    ----------
    head_epochs : int, optional
        Epochs of the head; by default what the training settings say.
    features_epochs : int
        Epochs of the features.
    """

    head_epochs: int | None = None
    features_epochs: int = 1
    keeps = "head"

    def __post_init__(self) -> None:
        """Refuse what is no number of epochs."""
        for name in ("head_epochs", "features_epochs"):
            if (epochs := getattr(self, name)) is not None:
                count(epochs, f"fedrep.{name}")

    def phases(self) -> Sequence[Phase]:
        """Move the head, then the features."""
        return *self.adapt(), Phase(move="features", epochs=self.features_epochs)

    def adapt(self) -> Sequence[Phase]:
        """Fit a head."""
        return (Phase(move="head", epochs=self.head_epochs),)
