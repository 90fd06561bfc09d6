"""Parts of local rules that several tests use."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from equipoise.method import LocalRule, Penalty, Phase, plain_gradient
from equipoise.tree import inner_product, tree_map


@dataclass(frozen=True)
class Heads(LocalRule):
    """Trains the head, with a given length, loss and gradient."""

    phase: Phase

    def phases(self):
        return (self.phase,)


def by_first_pixel(client):
    return client.task_loss() * client.x[:, 0, 0, 0].abs()


@dataclass(frozen=True)
class Weighted:
    """The gradient of a weighted sum over the batches of a step; weights show the order."""

    weights: tuple = (1.0, 0.5)

    @property
    def batches(self):
        return len(self.weights)

    def __call__(self, values, params):
        def total(moving):
            return sum(
                weight * value(moving) for weight, value in zip(self.weights, values, strict=True)
            )

        return plain_gradient(total, params)


@dataclass(frozen=True)
class Declared(LocalRule):
    """Adds s/2 ‖w − wᵗ‖² + ⟨w, v⟩ to the losses of a phase, as its penalty.

    v differs between clients and rounds: 0.3 times how far a client went in its last round, minus a
    tenth of the received model.
    """

    strength: float = 0.7
    sloped: bool = True
    phase: Phase = field(default_factory=Phase)

    def phases(self):
        penalty = Penalty(self.strength, self.slope if self.sloped else None)
        return (replace(self.phase, penalty=penalty),)

    def slope(self, client):
        way, received = client.memory["way"], client.received
        return tree_map(lambda far, sent: 0.3 * far - 0.1 * sent, way, received)

    def first_memory(self, model):
        return {"way": tree_map(torch.zeros_like, model)}

    def finish(self, client):
        return {"way": tree_map(torch.sub, client.params, client.received)}, {}


@dataclass(frozen=True)
class Written(Declared):
    """The same in the losses themselves."""

    def phases(self):
        return (replace(self.phase, loss=tuple(map(self.with_terms, self.phase.losses))),)

    def with_terms(self, loss):
        def whole(client):
            values = loss(client) + self.strength / 2 * client.distance_to_received()
            return (
                values + inner_product(client.moved(), self.slope(client))
                if self.sloped
                else values
            )

        return whole
