"""FedCLIP (Lu et al., 2023) and PromptFL (Guo et al., 2024): FedAvg of small parts of a CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.method import LocalRule, Phase
from equipoise.methods import register


class _SmallParts(LocalRule):
    """Train the parts of a model that are not frozen."""

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Refuse a model without frozen parts, which FedAvg would train in the same way."""
        if all(parameter.requires_grad for parameter in model.parameters()):
            raise InputError(
                f"method {self.name!r} trains small parts of a model whose other parts are frozen, "
                "but no part of this model is frozen, so its clients would train as in fedavg; "
                f"valid: model {self.usual_model!r}, another model with frozen parts, or method "
                "'fedavg'"
            )
        return model


@register("fedclip", paper="Lu et al., 2023")
@dataclass(frozen=True)
class FedCLIP(_SmallParts):
    """Train an adapter after CLIP's image encoder. The usual model is ``clipadapter``.

    Models without frozen parts are refused, unless the loss is contrastive: FedAvg would train them
    in the same way.

    The loss is cross-entropy over the classes. The authors use CLIP's symmetric contrastive loss
    instead: with s_ij the score of image i and the prompt of image j's class, a batch of n images
    has the loss

        − 1/(2n) Σ_i [ log(exp s_ii / Σ_j exp s_ij) + log(exp s_ii / Σ_j exp s_ji) ],

    in which other images of the same class count as wrong answers. The authors weight all clients
    equally (``weights: uniform``).

    Parameters
    ----------
    contrastive : bool
        Whether to use the contrastive loss.
    """

    contrastive: bool = False
    usual_model = "clipadapter"

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Refuse a model without frozen parts, except with the loss that FedAvg does not have."""
        return model if self.contrastive else super().extend(model, shape)

    def phases(self) -> Sequence[Phase]:
        """Train everything that is not frozen."""
        return (Phase(loss=self.contrastive_loss),) if self.contrastive else super().phases()

    def contrastive_loss(self, client: Client) -> Tensor:
        """Return CLIP's symmetric contrastive loss of each image."""
        client.network.task.require_labels("fedclip compares images with classes")
        output = client.output()
        chosen = (client.y.unsqueeze(1) == torch.arange(output.shape[1], device=output.device)).to(
            output.dtype
        )
        scores = output @ chosen.T
        own = scores.diagonal(dim1=-2, dim2=-1)
        if client.mask is not None:
            # Exclude padding from the wrong prompts and images. Its own score is kept, so that its
            # values are finite.
            beside = ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
            here = client.mask.to(torch.bool)
            scores = scores.masked_fill(
                beside & ~(here.unsqueeze(0) & here.unsqueeze(1)), float("-inf")
            )
        return (scores.logsumexp(1) + scores.logsumexp(0)) / 2 - own


@register("promptfl", paper="Guo et al., IEEE TMC 2024")
@dataclass(frozen=True)
class PromptFL(_SmallParts):
    """Train the context of CLIP's prompts with the task's loss. The usual model is ``clipprompts``.

    Models without frozen parts are refused.

    The context vectors are averaged with the method's client weights. (The authors' code keeps
    references to one model for all clients, so its average is the last client's model.)
    """

    usual_model = "clipprompts"
