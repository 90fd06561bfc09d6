"""MOON (Li, He and Song, 2021): local features stay close to those of the received model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import count, real
from equipoise.client import Client, Finished
from equipoise.errors import InputError
from equipoise.method import LocalRule, Phase
from equipoise.methods import register
from equipoise.models.base import outputs_of, width_of
from equipoise.models.headed import Headed
from equipoise.tree import Tree, select


@register("moon", paper="Li et al., CVPR 2021")
@dataclass(frozen=True)
class Moon(LocalRule):
    """Add μ times a contrastive loss on features to the task's loss.

    The contrastive loss is −log(e^{s(z, z_g)/τ} / (e^{s(z, z_g)/τ} + e^{s(z, z_p)/τ})). s is the
    cosine similarity. z are the features of a sample under the client's model, z_g under the
    received model, and z_p under the client's own model at the end of the last round in which it
    took part. The client keeps the features part of that model. The received and the previous model
    are in evaluation mode. Any aggregation can be used.

    Choices: a client that has never taken part has no previous model, and its contrastive loss is
    0. z is the output of the model's features. In the networks of the paper, the features end with
    a projection head. ``projection`` adds one to any model: two linear layers with ReLU between
    them, the first as wide as the model's own features. Its output is z, and a new linear head
    follows.

    Parameters
    ----------
    mu : float
        μ, at least 0; 0 is FedAvg.
    tau : float
        τ, the temperature, above 0.
    projection : int, optional
        Output size of the projection head, 256 in the paper; by default there is none.
    """

    mu: float = 1.0
    tau: float = 0.5
    projection: int | None = None

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        real(self.mu, "moon.mu", least=0)
        real(self.tau, "moon.tau")
        if self.projection is not None:
            count(self.projection, "moon.projection")

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Add the projection head between features and head, if ``projection`` is set."""
        if self.projection is None:
            return model
        if isinstance(model, Headed):
            raise InputError(
                f"moon.projection={self.projection} replaces the head, but the model has been "
                "divided by the name of its head and keeps it; valid: a module that has this "
                "projection itself, or a model with the parts features and head"
            )
        wide = width_of(model, shape)
        outputs = outputs_of(model, wide)
        layers = nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, self.projection)
        model.features = nn.Sequential(
            model.features,  # type: ignore[arg-type]
            nn.Flatten(1),
            *layers,
        )
        model.head = nn.Linear(self.projection, outputs)
        return model

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the contrastive loss."""
        return (Phase(loss=self.loss),)

    def loss(self, client: Client) -> Tensor:
        """Add the contrastive loss, once there is a previous model."""
        z = client.features()
        near, far = (
            self.similarity(z, client.at(m).features())
            for m in (client.received, client.memory["previous"])
        )
        contrast = F.softplus((far - near) / self.tau)
        return client.task_loss() + self.mu * client.seen.to(z.dtype) * contrast

    @staticmethod
    def similarity(one: Tensor, other: Tensor) -> Tensor:
        """Return the cosine similarity of the features of each sample."""
        return F.cosine_similarity(one.flatten(1), other.flatten(1), dim=1)

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Return placeholders for the features of the previous model."""
        return {"previous": {name: model[name] for name in select(model, "features")}}

    def finish(self, client: Finished) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """Keep the trained features."""
        return {"previous": {name: client.params[name] for name in client.memory["previous"]}}, {}
