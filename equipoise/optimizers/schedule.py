"""The learning rate over rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from equipoise import schedules
from equipoise.checks import UNLESS_DEFAULT, count, real, within
from equipoise.errors import InputError, unknown

_KINDS = ("constant", "exponential", "steps", "cosine")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over rounds, as a factor of the optimizer's learning rate.

    Parameters
    ----------
    kind : str
        ``constant``; ``exponential`` multiplies by ``decay`` every round; ``steps`` sets the factor
        to ``factors[i]`` from round ``at[i]`` on; ``cosine`` falls from 1 to ``floor``; or the name
        of a custom function, see :func:`equipoise.schedules.register`.
    decay : float
        Factor per round of ``exponential``.
    at : tuple of int
        Rounds (counted from 0) from which the factors of ``steps`` apply.
    factors : tuple of float
        Factors of ``steps``.
    floor : float
        Last factor of ``cosine``.
    warmup : int
        The number of warm-up rounds. In round r, counted from 0, the factor is (r + 1) / warmup.
        The schedule begins after these rounds, but ``at`` always counts from the first round of the
        run.
    over : int, optional
        The number of rounds over which ``cosine`` falls, without warm-up. Afterwards the factor
        stays at ``floor``. By default it falls until the end of the run, and the run cannot be made
        longer.

    Examples
    --------
    >>> fedcrc = Schedule(kind="steps", at=(50, 75), factors=(0.2, 0.02))
    >>> [fedcrc.factor(r, 100) for r in (0, 50, 99)]
    [1.0, 0.2, 0.02]
    >>> [Schedule(kind="cosine", warmup=4, over=2).factor(r, 100) for r in (0, 3, 4, 5, 6, 99)]
    [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    kind: str = "constant"
    decay: float = 0.99
    at: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    floor: float = 0.0
    warmup: int = field(default=0, metadata={UNLESS_DEFAULT: True})
    over: int | None = field(default=None, metadata={UNLESS_DEFAULT: True})

    def __post_init__(self) -> None:
        """Refuse unknown kinds, steps that do not match, and negative factors."""
        kinds = (*_KINDS, *schedules.names())
        if self.kind not in kinds:
            raise unknown("schedule", self.kind, kinds)
        count(self.warmup, "schedule.warmup", least=0)
        if self.over is not None:
            count(self.over, "schedule.over")
            if self.kind != "cosine":
                raise InputError(
                    f"schedule.over={self.over} is valid only for the kind 'cosine', got "
                    f"{self.kind!r}"
                )
        if len(self.at) != len(self.factors) or list(self.at) != sorted(self.at):
            raise InputError(
                f"schedule.at {self.at} and schedule.factors {self.factors} must have the same "
                "length, and rounds must be in ascending order"
            )
        if not within(self.decay, "schedule.decay", 0, 1):
            raise InputError("schedule.decay must be above 0, got 0")
        within(self.floor, "schedule.floor", 0, 1)
        for factor in self.factors:
            real(factor, "each of schedule.factors", least=0)
        for start in self.at:
            count(start, "each of schedule.at", least=0)

    @property
    def needs_total(self) -> str | None:
        """Why the factors depend on the number of rounds; None if they do not."""
        if self.kind == "cosine" and self.over is None:
            return (
                "its schedule 'cosine' falls until the end of the run, because "
                "training.schedule.over is not set"
            )
        if self.kind not in _KINDS and schedules.takes_rounds(self.kind):
            return f"its schedule {self.kind!r} depends on the number of rounds"
        return None

    def factor(self, round_: int, rounds: int) -> float:
        """Return the factor of a round, counted from 0."""
        if round_ < self.warmup:
            return (round_ + 1) / self.warmup
        since, left = round_ - self.warmup, max(1, rounds - self.warmup)
        if self.kind == "exponential":
            return float(self.decay**since)
        if self.kind == "steps":
            passed = [
                factor
                for start, factor in zip(self.at, self.factors, strict=True)
                if round_ >= start
            ]
            return passed[-1] if passed else 1.0
        if self.kind == "cosine":
            progress = since / left if self.over is None else min(1.0, since / self.over)
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2
        if self.kind == "constant":
            return 1.0
        return schedules.factor(self.kind, since, left)
