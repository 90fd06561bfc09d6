"""FedBABU (Oh, Kim and Yun, 2022): the head is not trained until a client fine-tunes the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.checks import count
from equipoise.method import LocalRule, Phase
from equipoise.methods import register


@register("fedbabu", paper="Oh et al., ICLR 2022")
@dataclass(frozen=True)
class FedBABU(LocalRule):
    """Train and share the features with a fixed head; fine-tune the global model for each client.

    The head keeps its initial values during training. The paper weights clients by size; its code
    weights them equally, which is ``weights: uniform``.

    Parameters
    ----------
    tunes : str
        The part that a client fine-tunes: ``all`` (the paper's choice), ``head`` or ``features``.
    tune_epochs : int, optional
        Number of epochs of fine-tuning; by default that of the training settings.
    """

    tunes: str = "all"
    tune_epochs: int | None = None

    def __post_init__(self) -> None:
        """Check the number of epochs."""
        if self.tune_epochs is not None:
            count(self.tune_epochs, "fedbabu.tune_epochs")

    def phases(self) -> Sequence[Phase]:
        """Train the features."""
        return (Phase(move="features"),)

    def adapt(self) -> Sequence[Phase]:
        """Fine-tune."""
        return (Phase(move=self.tunes, epochs=self.tune_epochs),)
