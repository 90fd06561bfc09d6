"""Local rules by which clients make a model their own when it is evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equipoise.method import Fact, LocalRule, Phase
from equipoise.tree import Parts, Tree


@dataclass(frozen=True)
class Adapting(LocalRule):
    """What a client without a memory does to make the received model its own; see :meth:`LocalRule.adapt`."""

    rule: LocalRule

    @property
    def keeps(self) -> Parts:  # type: ignore[override]
        """Keep what the rule keeps."""
        return self.rule.keeps

    def phases(self) -> Sequence[Phase]:
        """Adapt."""
        return self.rule.adapt()

    def facts(self) -> Mapping[str, Fact]:
        """Know the facts that the rule's losses may read; nothing reads those made after training."""
        return {name: fact for name, fact in self.rule.facts().items() if fact.model != "trained"}

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Begin with what the rule begins with."""
        return self.rule.first_memory(model)


@dataclass(frozen=True)
class FineTuning(LocalRule):
    """Local steps that start from a client's personal model."""

    steps: tuple[Phase, ...]
    keeps = "all"

    def phases(self) -> Sequence[Phase]:
        """Fine-tune."""
        return self.steps
