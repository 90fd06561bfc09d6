"""User-defined methods that wrap another one, or have a part as an option."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from equipoise import methods
from equipoise.method import LocalRule, Method
from equipoise.methods import build, register
from equipoise.methods.fedavg import PlainTraining
from equipoise.wrapping import WithPrior, Wrapper


@dataclass(frozen=True)
class Unchanged(Wrapper):
    """Forward to the host."""

    host: Method = field(default_factory=lambda: build("fedavg"))


@dataclass(frozen=True)
class Sharpened(Wrapper):
    """Multiply every loss, and raise the prior to a power."""

    host: Method = field(default_factory=lambda: build("fedavg"))
    factor: float = 1.0
    power: float = 1.0
    uses: tuple[str, ...] = ()

    def phases(self):
        """Multiply the losses of all phases."""
        return [replace(phase, loss=self.scaled(phase.loss)) for phase in self.host.local.phases()]

    def scaled(self, loss):
        """Multiply one loss."""
        return lambda client: self.factor * loss(client)

    def combine(self, state, updates, cohort):
        """Combine with other weights."""
        raised = cohort.prior**self.power
        return super().combine(state, updates, WithPrior(cohort, raised / raised.sum()))


@dataclass(frozen=True)
class Twice(LocalRule):
    """Train by another rule, twice."""

    inner: LocalRule = field(default_factory=PlainTraining)

    def phases(self):
        """Repeat the phases."""
        return [*self.inner.phases(), *self.inner.phases()]


def make_known(monkeypatch):
    """Register them for one test."""
    methods.names()
    monkeypatch.setattr(methods, "_PARTS", dict(methods._PARTS))
    monkeypatch.setattr(methods, "_METHODS", set(methods._METHODS))
    for name, part in (("unchanged", Unchanged), ("sharpened", Sharpened), ("twice", Twice)):
        register(name, paper="ours")(part)
