"""The runs of a study: one experiment for each method, setting and seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.config import Experiment, Override, experiment_from
from equipoise.study.choice import Choice
from equipoise.study.methods import StudyMethod, refuse_replaced, variant_label
from equipoise.study.plan import Job
from equipoise.study.settings import StudySetting


@dataclass(frozen=True)
class Experiments:
    """Makes the experiments of a study.

    Attributes
    ----------
    base : mapping
        What all of them have in common.
    where : str
        Where the study came from, for errors.
    tuning : list of Override
        What is different in the runs of tuning.
    for_all : list of Override
        What is set for all runs.
    drawn_by : str
        Where the seeds came from.
    on_import : callable or None
        As in :func:`equipoise.config.experiment_from`.
    """

    base: Mapping[str, Any]
    where: str
    tuning: list[Override]
    for_all: list[Override]
    drawn_by: str
    on_import: Callable[[str], None] | None

    def make(
        self, method: StudyMethod, setting: StudySetting, seed: int, *, tuned: bool
    ) -> Experiment:
        """Return the experiment of a run, or of a run of tuning."""
        overrides = [
            Override("method", method.options, f"methods of {self.where}"),
            *method.tuned_options,
            *setting.changes,
            *method.changes,
            *method.tuned_settings,
            *(self.tuning if tuned else ()),
            Override("seed", seed, self.drawn_by),
            *self.for_all,
            *setting.left_out,
        ]
        return experiment_from(
            self.base, f"base of {self.where}", overrides, on_import=self.on_import
        )

    def _checked(
        self, method: StudyMethod, setting: StudySetting, seed: int, *, tuned: bool
    ) -> Experiment:
        """Return the experiment of a run. Anything that replaces a value of a grid is refused."""
        refuse_replaced(method.tuned_options, setting.changes)
        refuse_replaced(method.tuned_settings, [*(self.tuning if tuned else ()), *self.for_all])
        return self.make(method, setting, seed, tuned=tuned)

    def job(
        self,
        setting: tuple[str, StudySetting],
        method: tuple[str, StudyMethod],
        seed: int,
        *,
        tuned: bool,
        choice: Choice | None = None,
    ) -> Job:
        """Return a run of a setting and a method, which are given with their labels.

        With a choice of tuning it runs with the chosen values. If these differ from those in the
        study, the run directory is named after them.
        """
        (named, differing), (label, described) = setting, method
        given = self._checked(described, differing, seed, tuned=tuned)
        if choice is None:
            return Job(named, label, seed, given)
        chosen = self._checked(described.with_values(choice.values), differing, seed, tuned=False)
        variant = variant_label(label, choice.values)
        folder = variant if chosen.plain() != given.plain() else None
        return Job(named, label, seed, chosen, folder, variant)
