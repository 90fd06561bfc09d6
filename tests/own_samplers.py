"""Samplers that ask clients before they choose, or keep state between rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from equipoise.method import Sampler, locate
from equipoise.random import choose_by_weight


@dataclass(frozen=True)
class PowerOfChoice(Sampler):
    """Draw candidates by size and choose those with the highest losses (Cho et al., 2022)."""

    candidates: int = 3

    def select(self, state, candidates, count):
        """Ask the candidates for the loss of the global model."""
        drawn = choose_by_weight(
            candidates.key, candidates.sizes.astype(np.float64), self.candidates
        )
        ids = np.sort(candidates.ids[drawn])
        losses = candidates.cohort(ids).evaluate(state.model, "train")["loss"]
        return ids[np.argsort(-losses.numpy(), kind="stable")[:count]]


@dataclass(frozen=True)
class LongestAway(Sampler):
    """Choose the clients whose last round is longest ago; ties go to the smaller number."""

    needs_everyone = True

    def begin(self, state, everyone):
        """Start without any participation."""
        ids = torch.from_numpy(everyone.ids)
        return state.with_server(last={"ids": ids, "round": torch.zeros_like(ids)})

    def select(self, state, candidates, count):
        """Order by the last round."""
        last = state.server["last"]
        rounds = last["round"][locate(last, candidates)]
        return candidates.ids[np.argsort(rounds.numpy(), kind="stable")[:count]]

    def learn(self, state, cohort):
        """Record the round of the clients that took part."""
        last = state.server["last"]
        rounds = last["round"].clone()
        rounds[locate(last, cohort)] = state.round + 1
        return state.with_server(last={**last, "round": rounds})


SAMPLERS = {"powerofchoice": PowerOfChoice, "longestaway": LongestAway}
