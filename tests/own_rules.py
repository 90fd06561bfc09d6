"""User-defined parts with facts, questions, trees that are sent once, notes and model parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

from equipoise import methods
from equipoise.masked import label_sums
from equipoise.method import Aggregation, Fact, LocalRule, Phase, mix
from equipoise.methods import register
from equipoise.methods.fedavg import FedAvg
from equipoise.models.base import width_of
from equipoise.tree import select, squared_distance, tree_map
from tests.own_samplers import SAMPLERS


@dataclass(frozen=True)
class Calibrated(LocalRule):
    """Shift the score of class c by τ n_c^(-1/4), with n_c the label count (as in FedLC)."""

    tau: float = 0.5

    def phases(self):
        """Train with shifted scores."""
        return (Phase(loss=self.loss),)

    def facts(self):
        """Count the labels once."""
        return {"labels": Fact(sums=self.counts, model="first")}

    def counts(self, client):
        """Count the labels of a batch."""
        classes = len(client.params["head.bias"])
        return {
            "counts": label_sums(
                torch.ones_like(client.x.flatten(1)[:, 0]), client.y, classes, client.mask
            )
        }

    def loss(self, client):
        """Take the cross-entropy of the shifted scores."""
        margin = self.tau * client.memory["labels"]["counts"].clamp(min=1) ** -0.25
        return F.cross_entropy(client.output() - margin, client.y, reduction="none")


@dataclass(frozen=True)
class Aligned(LocalRule, FedAvg):
    """Keep the head's gradient close to a moving average of all clients' (as in FedIIR)."""

    strength: float = 0.5
    decay: float = 0.8
    receives = ("gradient",)
    sends = ("gradient",)

    def phases(self):
        """Train with the penalty."""
        return (Phase(loss=self.loss),)

    def gradient_sums(self, client):
        """Return the gradient of the sum of losses with respect to the head."""
        z = client.features()

        def total(head):
            scores = client.at(head).head(z)
            return client.sum(F.cross_entropy(scores, client.y, reduction="none"))

        return grad(total)(
            {name: client.params[name] for name in select(client.network.initial(), "head")}
        )

    def loss(self, client):
        """Add the squared distance between the batch's mean gradient and the received one."""
        samples = client.sum(torch.ones_like(client.output()[:, 0]))
        own = tree_map(lambda total: total / samples, self.gradient_sums(client))
        return client.task_loss() + self.strength * squared_distance(own, client.sent["gradient"])

    def prepare(self, state, cohort):
        """Ask the cohort for its gradients, and average them with those of earlier rounds."""
        sums = cohort.ask("gradient_sums", model=state.model)
        fresh = tree_map(lambda rows: rows.sum(0) / int(cohort.sizes.sum()), sums)
        before = state.server.get("gradient", fresh)
        mixed = tree_map(lambda old, new: self.decay * old + (1 - self.decay) * new, before, fresh)
        return state.with_server(gradient=mixed)

    def send(self, state, cohort):
        """Send the model and the mean gradient."""
        return {"model": state.model, "gradient": state.server["gradient"]}, {}


@dataclass(frozen=True)
class Mixed(LocalRule, FedAvg):
    """Mix every sample with a client's mean image, another one each round (as in FedMix)."""

    share: float = 0.2
    needs_everyone = True
    receives = ("means",)
    sends = ("means",)
    sends_once = ("means",)

    def phases(self):
        """Train with mixed samples."""
        return (Phase(loss=self.loss),)

    def image_sums(self, client):
        """Sum the samples and count their labels."""
        ones = torch.ones_like(client.x.flatten(1)[:, 0])
        classes = len(client.network.initial()["head.bias"])
        return {"x": client.sum(client.x), "y": label_sums(ones, client.y, classes, client.mask)}

    def begin(self, state, everyone):
        """Ask all clients for their sums, once."""
        sums, samples = everyone.ask("image_sums"), torch.from_numpy(everyone.sizes)
        means = tree_map(lambda rows: rows / samples.view(-1, *(1,) * (rows.dim() - 1)), sums)
        return state.with_server(means=means)

    def send(self, state, cohort):
        """Send the model and all means."""
        return {"model": state.model, "means": state.server["means"]}, {}

    def loss(self, client):
        """Return the loss of the mixed samples, for their own labels and the mean image's."""
        means = client.sent["means"]
        which = (client.round % len(means["x"])).view(1)
        x, y = (means[name].index_select(0, which)[0] for name in ("x", "y"))
        scores = client.at(x=(1 - self.share) * client.x + self.share * x, train=True).output()
        own = F.cross_entropy(scores, client.y, reduction="none")
        return (1 - self.share) * own - self.share * (scores.log_softmax(1) * y).sum(1)


@dataclass(frozen=True)
class Projected(LocalRule):
    """Add a projection of z, and penalize its size."""

    width: int = 3
    strength: float = 0.1

    def extend(self, model, shape):
        """Add the projection to the model."""
        model.add_module("projection", nn.Linear(width_of(model, shape), self.width))
        return model

    def phases(self):
        """Train with the penalty."""
        return (Phase(loss=self.loss),)

    def loss(self, client):
        """Add the squared length of the projected z."""
        return client.task_loss() + self.strength * client.part(
            "projection", client.features()
        ).square().sum(1)


@dataclass(frozen=True)
class Noting(FedAvg):
    """Note the key of the server's random numbers every round, and weights every second."""

    def combine(self, state, updates, cohort):
        """Average, and add notes."""
        notes = {} if state.round % 2 else {"weights": cohort.prior}
        return super().combine(state, updates, cohort).with_notes(key=cohort.key, **notes)


@dataclass(frozen=True)
class Counted(LocalRule, Aggregation):
    """Send facts of the received and of the trained model, which determine clients' weights."""

    uploads = ("before", "after")
    collects = ("before", "after")

    def facts(self):
        """Compute the mean confidence before and after training."""
        about = {"sums": self.confidence, "then": self.mean}
        return {"before": Fact(**about, model="received"), "after": Fact(**about, model="trained")}

    def confidence(self, client):
        """Sum the largest probability of each sample, and count samples."""
        sure = client.output().softmax(1).amax(1)
        return {"sure": client.sum(sure), "samples": client.sum(torch.ones_like(sure))}

    def mean(self, sums):
        """Divide."""
        return {"sure": sums["sure"] / sums["samples"]}

    def combine(self, state, updates, cohort):
        """Weight clients by their increase in confidence."""
        gain = updates.uploads["after"]["sure"] - updates.uploads["before"]["sure"]
        return state.with_global(mix(updates, gain.softmax(0))).with_notes(gain=gain)


RULES = {
    "calibrated": Calibrated,
    "aligned": Aligned,
    "mixed": Mixed,
    "projected": Projected,
    "noting": Noting,
    "counted": Counted,
}


def make_known(monkeypatch):
    """Register the parts and the samplers until the test ends."""
    monkeypatch.setattr(methods, "_PARTS", dict(methods._discover()))
    monkeypatch.setattr(methods, "_METHODS", set(methods._METHODS))
    for name, part in RULES.items():
        register(name)(part)
    for name, part in SAMPLERS.items():
        register(name, method=False)(part)
