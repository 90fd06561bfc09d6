"""Parts of local rules that several tests train with."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.method import LocalRule, Phase, plain_gradient


@dataclass(frozen=True)
class Heads(LocalRule):
    """Moves the head, for a while and with a loss and a gradient of choice."""

    phase: Phase

    def phases(self):
        return (self.phase,)


def by_first_pixel(client):
    return client.task_loss() * client.x[:, 0, 0, 0].abs()


@dataclass(frozen=True)
class Weighted:
    """The gradient of a sum over the batches of a step, each with a weight of its own so that their
    order shows.
    """

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
