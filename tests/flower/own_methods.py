"""Parts that use what no published method here uses yet: questions, a backbone that never moves, a
sampler with state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.method import Aggregation, LocalRule, Phase, Sampler, mix
from equipoise.methods import register


@dataclass(frozen=True)
class Asking(LocalRule, Aggregation):
    """Weigh clients by how sure the model is on their own data, which each of them is asked."""

    sharpness: float = 2.0

    def confidence(self, client, sharpness, more):
        """Answer with sums over this client's own samples: a number, a vector, how many there are."""
        sure = client.output().softmax(-1)
        ones = torch.ones_like(sure[:, 0])
        score = client.sum(sharpness * sure.amax(1) + client.each["bonus"] + more[0].sum())
        return {"score": score, "mean": (client.sum(sure), client.sum(ones))}

    def combine(self, state, updates, cohort):
        """Ask, and combine with what they say."""
        bonus = torch.from_numpy(cohort.ids / 10)
        about = {"model": state.model, "split": "val", "each": {"bonus": bonus}}
        said = cohort.ask("confidence", self.sharpness, (torch.ones(2), None), **about)
        assert said["mean"][0].shape == (len(cohort.ids), 10)
        return state.with_global(mix(updates, (said["score"] / said["mean"][1]).softmax(0)))


@dataclass(frozen=True)
class HeadOnly(LocalRule):
    """Train the head over features that stay as they came."""

    def phases(self) -> Sequence[Phase]:
        """Move the head."""
        return (Phase(move="head"),)


@dataclass(frozen=True)
class Turns(Sampler):
    """Let clients take turns: those who took part least recently come next."""

    def select(self, state, candidates, count):
        """Go on behind the client that took part last."""
        last = state.server.get("turns", {"last": torch.tensor(-1)})["last"]
        begin = np.searchsorted(candidates.ids, int(last), side="right")
        return candidates.ids[(begin + np.arange(count)) % len(candidates.ids)]

    def learn(self, state, cohort):
        """Take note of who took part."""
        return state.with_server(turns={"last": torch.tensor(int(cohort.ids[-1]))})


def register_all():
    """Make them known by name; not on import, so that other tests see only the library's own parts."""
    for name, part in (("asking", Asking), ("headonly", HeadOnly), ("turns", Turns)):
        register(name, method=False)(part)
