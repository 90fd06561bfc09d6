"""FedLC (Zhang et al., 2022): logits calibrated by the client's own label counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.checks import real
from equipoise.client import Client
from equipoise.masked import label_sums
from equipoise.method import Fact, LocalRule, Phase
from equipoise.methods import register
from equipoise.tree import Tree

# A class without samples counts as this many samples, so its shift is 100 τ instead of infinite.
_ABSENT = 1e-8


@register("fedlc", paper="Zhang et al., ICML 2022")
@dataclass(frozen=True)
class FedLC(LocalRule):
    """Train with cross-entropy of the logits f_c − τ n_c^(−1/4).

    n_c is the number of the client's samples of class c. Rare classes get a larger margin, and
    classes that a client does not have are not forgotten. Label counts stay with the client. The
    trained model is used without the shift. Any aggregation can be used.

    Choices: the denominator of the softmax contains the true class, as in the public code. The
    paper's equation leaves it out; that loss has no lower bound, and training with it can diverge.
    A class without samples counts as 1e-8 samples.

    Parameters
    ----------
    tau : float
        τ, at least 0; 0 is FedAvg.
    true_class : bool
        Whether the denominator contains the true class.
    """

    tau: float = 1.0
    true_class: bool = True

    def __post_init__(self) -> None:
        """Refuse a negative τ."""
        real(self.tau, "fedlc.tau", least=0)

    def facts(self) -> Mapping[str, Fact]:
        """Count labels once. The counts do not depend on the model."""
        return {"labels": Fact(sums=self.counts, then=self.shifts, model="first")}

    def counts(self, client: Client) -> Tree:
        """Count the samples of each class."""
        client.network.task.require_labels("fedlc counts labels")
        scores = client.output()
        return {
            "count": label_sums(
                torch.ones_like(scores[:, 0]), client.y, scores.shape[1], client.mask
            )
        }

    def shifts(self, sums: Tree) -> Tree:
        """Return τ n_c^(−1/4)."""
        return {"shift": self.tau * sums["count"].clamp(min=_ABSENT) ** -0.25}

    def phases(self) -> Sequence[Phase]:
        """Return one phase with calibrated logits."""
        return (Phase(loss=self.loss),)

    def loss(self, client: Client) -> Tensor:
        """Return the cross-entropy of the calibrated logits."""
        logits = client.output() - client.memory["labels"]["shift"]
        if self.true_class:
            return client.task_loss(logits)
        own = torch.arange(logits.shape[1], device=logits.device) == client.y.unsqueeze(1)
        others = logits.masked_fill(own, float("-inf")).logsumexp(1)
        return others - torch.where(own, logits, 0.0).sum(1)
