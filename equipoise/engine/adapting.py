"""Local rules that adapt a model to a client when personal models are evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equipoise.method import Fact, LocalRule, Phase
from equipoise.tree import Parts, Tree


@dataclass(frozen=True)
class Adapting(LocalRule):
    """Adaptation of the model to a client without a memory; see :meth:`LocalRule.adapt`."""

    rule: LocalRule

    @property
    def keeps(self) -> Parts:  # type: ignore[override]
        """Return the parts that the rule keeps."""
        return self.rule.keeps

    def phases(self) -> Sequence[Phase]:
        """Adapt."""
        return self.rule.adapt()

    def facts(self) -> Mapping[str, Fact]:
        """Return the facts that the rule's losses may read, without those after training."""
        return {name: fact for name, fact in self.rule.facts().items() if fact.model != "trained"}

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Return the first memory of the rule."""
        return self.rule.first_memory(model)


@dataclass(frozen=True)
class FineTuning(LocalRule):
    """Local steps that start from a client's personal model."""

    steps: tuple[Phase, ...]
    keeps = "all"

    def phases(self) -> Sequence[Phase]:
        """Fine-tune."""
        return self.steps
