"""Parts of local rules that several tests use."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.method import LocalRule, Phase, plain_gradient


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
