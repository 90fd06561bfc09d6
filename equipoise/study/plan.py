"""What a study runs, and how it chooses between the values of a grid."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.config import Experiment
from equipoise.errors import RunError, unknown
from equipoise.run.files import write_atomically
from equipoise.study.choice import Choices, write_choices
from equipoise.study.metrics import group_of, of_validation, should_be_high
from equipoise.study.results import Results
from equipoise.study.runs import (
    Rounds,
    Watch,
    carry_out,
    carry_over,
    check_directories,
    finished,
)


@dataclass(frozen=True)
class Job:
    """One run of a study.

    Examples
    --------
    >>> from equipoise.study import study_from
    >>> study_from({"base": {"data": "digits"}, "methods": ["fedavg"], "seeds": [3]}).jobs[0].path
    PosixPath('base/fedavg/seed3')
    """

    setting: str
    method: str
    seed: int
    experiment: Experiment
    folder: str | None = None
    tried_as: str | None = None

    @property
    def path(self) -> Path:
        """The run directory, relative to that of the study.

        If tuning has changed the values of the method, ``folder`` is used instead of its label.
        """
        return Path(self.setting) / (self.folder or self.method) / f"seed{self.seed}"

    @property
    def path_in_tuning(self) -> Path:
        """The directory of the same run in that of tuning."""
        return Path(self.setting) / (self.tried_as or self.method) / f"seed{self.seed}"


@dataclass(frozen=True)
class Tuning:
    """How to choose between the values of a grid, as in the q-FFL and GIFAIR-FL papers.

    Among the values whose mean is at most ``tolerance`` worse than that of the study's first
    method, the one with the best ``by`` is chosen. If there is none, the one with the best mean is
    chosen. If the first method has a grid, its best mean counts. ``fairness.METRICS`` defines
    whether high or low is better. Among equally good values, the first in the order of the grid is
    chosen. The last hyper-parameter of the grid varies fastest.

    Attributes
    ----------
    seed : int
        The seed for tuning, preferably one that the study does not use.
    by : str
        The metric to optimize, such as ``sigma_clients`` (the lowest), ``jain`` (the highest), or
        ``ece.worst_group`` of a metric in ``evaluation.metrics``.
    tolerance : float
        How much worse than that of the study's first method the mean may be.
    selection : tuple of str
        The rules of :mod:`equipoise.study.selection` to compare, if groups are left out in turn.

    Examples
    --------
    >>> measured = {"a": (0.90, 0.10), "b": (0.89, 0.05), "c": (0.70, 0.01)}
    >>> Tuning(tolerance=0.01).best(measured, reference=0.895)
    'b'
    >>> Tuning(by="jain").best({"a": (0.90, 0.97), "b": (0.89, 0.99)}, reference=0.89)
    'b'
    """

    seed: int = 0
    by: str = "sigma_clients"
    tolerance: float = 0.01
    selection: tuple[str, ...] = ("training-domain", "oracle")

    def best(
        self,
        measured: Mapping[str, tuple[float, float]],
        reference: float,
        *,
        higher_is_better: bool = True,
        by_higher: bool | None = None,
    ) -> str:
        """Return the best label by mean and value of ``by``.

        Parameters
        ----------
        measured : mapping
            Mean and value of ``by`` of each label.
        reference : float
            The mean of the study's first method.
        higher_is_better : bool
            Whether means should be high.
        by_higher : bool, optional
            The same for the metric of ``by``, if it is not the task's score.

        Returns
        -------
        str
            The label.
        """
        similar = self.similar(measured, reference, higher_is_better=higher_is_better)
        if not similar:
            sign = 1 if higher_is_better else -1
            return max(measured, key=lambda label: sign * measured[label][0])
        of_clients = higher_is_better if by_higher is None else by_higher
        choose = max if should_be_high(self.by, higher_is_better=of_clients) else min
        return choose(similar, key=lambda label: measured[label][1])

    def similar(
        self,
        measured: Mapping[str, tuple[float, float]],
        reference: float,
        *,
        higher_is_better: bool = True,
    ) -> list[str]:
        """Return the labels whose mean is within the tolerance; see :meth:`best`."""
        sign = 1 if higher_is_better else -1
        return [
            label
            for label, (mean, _) in measured.items()
            if sign * mean >= sign * reference - self.tolerance
        ]


@dataclass(frozen=True)
class Study:
    """The runs of a study, checked, and the metrics and split to show.

    ``tried`` and ``tuning`` are for tuning: the values of each method's grid, by the labels of its
    variants, and how to choose between them. ``reference`` are the labels of the first method and
    its variants in tuning. ``origins`` has the origin of each metric, for errors. ``folds`` are the
    settings that each leave out one group, by the label of their setting. ``baseline`` is the
    method with which the others are compared pair by pair, if any. ``chosen`` has the values that
    tuning has chosen and the study uses. ``metrics_by_default`` is whether the metrics are those
    that are shown if none are named. ``warnings`` say what the results do not show, such as a grid
    that is not used.

    Examples
    --------
    >>> from equipoise.study import study_from
    >>> base = {"data": "digits"}
    >>> study = study_from({"base": base, "methods": ["fedavg", "local"], "seeds": [0, 1]})
    >>> len(study.jobs), study.settings
    (4, ('base',))
    """

    settings: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    jobs: tuple[Job, ...]
    split: str = "test"
    tuning: Tuning = Tuning()
    tried: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    reference: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    folds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: str | None = None
    chosen: Choices = field(default_factory=dict)
    metrics_by_default: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[str, ...]:
        """All methods except the baseline."""
        return tuple(method for method in self.methods if method != self.baseline)

    @property
    def whole_settings(self) -> tuple[str, ...]:
        """The settings, with one label for all folds of a setting."""
        origin = {fold: label for label, folds in self.folds.items() for fold in folds}
        return tuple(dict.fromkeys(origin.get(setting, setting) for setting in self.settings))

    def run(
        self,
        out: str | Path,
        *,
        jobs: int | None = 1,
        watch: Watch | None = None,
        rounds: Rounds | None = None,
        reuse: str | Path | None = None,
    ) -> Results:
        """Run what is missing. If a run fails, the others still run.

        Nothing runs if a run directory holds another experiment, such as after changes to the
        study.

        Parameters
        ----------
        out : path
            Directory of all runs. The results are also written to its ``results.json``.
        jobs : int or None
            The number of runs at a time, each in its own process if more than one. With None, it is
            chosen to fill the cores or the GPU. On a GPU a first run measures the memory.
        watch : callable, optional
            Called for every job when it starts (``"begun"``), and with its outcome when it ends.
        rounds : callable, optional
            Called with every job that starts, in the process in which it runs. Returns what is
            called after each of its rounds, or None. With several jobs at a time, it must be
            possible to pickle it.
        reuse : path, optional
            The directory of the runs of tuning. Finished runs of the same experiments are copied
            from there.

        Returns
        -------
        Results
            The results of runs that succeeded, and the reasons why others failed.

        Examples
        --------
        >>> import tempfile
        >>> from equipoise.study import study_from
        >>> base = {"data": "digits", "training": {"rounds": 1}}
        >>> results = study_from({"base": base, "methods": ["fedavg"]}).run(tempfile.mkdtemp())
        >>> results.failures
        {}
        """
        out, tell = Path(out), watch or (lambda job, outcome: None)
        summaries: dict[Path, dict[str, Any]] = {}
        failures: dict[Path, str] = {}
        missing = []
        check_directories(self.jobs, out)
        for job in self.jobs:
            copied = reuse is not None and carry_over(job, Path(reuse), out)
            try:
                summary = finished(
                    out / job.path, self.split, validation=any(map(of_validation, self.metrics))
                )
            except RunError as error:
                failures[job.path] = str(error)
                tell(job, f"failed: {error}")
                continue
            if summary:
                summaries[job.path] = summary
                tell(job, "copied from tuning" if copied else "already there")
            else:
                missing.append(job)
        self._check_groups(Results(self, summaries, failures))
        for job, result in carry_out(missing, out, jobs, self.split, tell, rounds):
            if isinstance(result, str):
                failures[job.path] = result
                tell(job, f"failed: {result}")
            else:
                summaries[job.path] = result
                tell(job, "done")
        results = Results(self, summaries, failures, out)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(
            out / "results.json", json.dumps(results.plain(), indent=2).encode() + b"\n"
        )
        if chosen := results.choices if self.tried else self.chosen:
            write_choices(out, chosen)
        return results

    def _check_groups(self, finished: Results) -> None:
        """Refuse a metric of a group that no setting has."""
        named = {metric: group for metric in self.origins if (group := group_of(metric))}
        there = {group for setting in self.settings for group in finished.groups(setting)}
        for setting in self.settings:
            if there.issuperset(named.values()):
                return
            try:
                first = next(job for job in self.jobs if job.setting == setting)
                there.update(first.experiment.federation().group_names)
            except (
                Exception
            ):  # Its own runs raise the error. It must not stop runs of other settings.
                return
        for metric, group in named.items():
            if group not in there:
                raise unknown("group", group, there, where=self.origins[metric])
