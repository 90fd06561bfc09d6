"""User-defined parts with questions, a fixed backbone, and a sampler with state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.method import Aggregation, LocalRule, Phase, Sampler, mix
from equipoise.methods import register


@dataclass(frozen=True)
class Asking(LocalRule, Aggregation):
    """Weight clients by the model's confidence on their own data, which each client reports."""

    sharpness: float = 2.0

    def confidence(self, client, sharpness, more):
        """Return sums over this client's samples: a number, a vector, and the number of samples."""
        sure = client.output().softmax(-1)
        ones = torch.ones_like(sure[:, 0])
        score = client.sum(sharpness * sure.amax(1) + client.each["bonus"] + more[0].sum())
        return {"score": score, "mean": (client.sum(sure), client.sum(ones))}

    def combine(self, state, updates, cohort):
        """Ask clients, and combine with their answers."""
        bonus = torch.from_numpy(cohort.ids / 10)
        about = {"model": state.model, "split": "val", "each": {"bonus": bonus}}
        said = cohort.ask("confidence", self.sharpness, (torch.ones(2), None), **about)
        assert said["mean"][0].shape == (len(cohort.ids), 10)
        return state.with_global(mix(updates, (said["score"] / said["mean"][1]).softmax(0)))


@dataclass(frozen=True)
class HeadOnly(LocalRule):
    """Train the head on features that do not change."""

    def phases(self) -> Sequence[Phase]:
        """Train the head."""
        return (Phase(move="head"),)


@dataclass(frozen=True)
class Turns(Sampler):
    """Choose the clients that took part least recently."""

    def select(self, state, candidates, count):
        """Continue after the client that took part last."""
        last = state.server.get("turns", {"last": torch.tensor(-1)})["last"]
        begin = np.searchsorted(candidates.ids, int(last), side="right")
        return candidates.ids[(begin + np.arange(count)) % len(candidates.ids)]

    def learn(self, state, cohort):
        """Record which clients took part."""
        return state.with_server(turns={"last": torch.tensor(int(cohort.ids[-1]))})


def register_all():
    """Register the parts; not on import, so that other tests see only the library's own parts."""
    for name, part in (("asking", Asking), ("headonly", HeadOnly), ("turns", Turns)):
        register(name, method=False)(part)
