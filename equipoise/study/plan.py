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
from equipoise.study.runs import Watch, carry_out, carry_over, check_directories, finished


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
        """Its run directory inside the study's.

        ``folder`` stands for the method if tuning has changed its values.
        """
        return Path(self.setting) / (self.folder or self.method) / f"seed{self.seed}"

    @property
    def path_in_tuning(self) -> Path:
        """The directory of the same run inside that of tuning, if it has been made there."""
        return Path(self.setting) / (self.tried_as or self.method) / f"seed{self.seed}"


@dataclass(frozen=True)
class Tuning:
    """How to choose between the values of a grid, by the criterion of the q-FFL and GIFAIR-FL papers.

    Of the values whose mean is at most ``tolerance`` worse than that of the study's first method,
    the one with the best ``by`` is chosen; if there is none, the one with the best mean. Which way
    is better is what ``fairness.METRICS`` says. The limit itself is still good enough. Of values
    that are equally good, the first in the order of the grid is chosen: the last hyper-parameter of
    the grid varies fastest.

    Attributes
    ----------
    seed : int
        The seed to tune with; preferably one that the study does not use.
    by : str
        What should be best, such as ``sigma_clients`` (the lowest), ``jain`` (the highest), or
        ``ece.worst_group`` of a metric in ``evaluation.metrics``.
    tolerance : float
        How much worse the mean may be.
    selection : tuple of str
        Where groups are left out in turn, the rules of :mod:`equipoise.study.selection` to compare.

    Examples
    --------
    >>> Tuning(tolerance=0.01).best({"a": (0.90, 0.10), "b": (0.89, 0.05), "c": (0.70, 0.01)}, reference=0.895)
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
        """Choose by the mean and the value of ``by`` of each.

        Parameters
        ----------
        measured : mapping
            Mean and value of ``by`` of each label.
        reference : float
            The mean of the study's first method.
        higher_is_better : bool
            Whether means should be high.
        by_higher : bool, optional
            The same of the metric that ``by`` is of, if it is not the task's score.

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
        """Return the labels whose mean is at most ``tolerance`` worse than the reference; see :meth:`best`."""
        sign = 1 if higher_is_better else -1
        return [
            label
            for label, (mean, _) in measured.items()
            if sign * mean >= sign * reference - self.tolerance
        ]


@dataclass(frozen=True)
class Study:
    """What to run, checked, and which metrics of which split to show.

    ``tried`` and ``tuning`` belong to a study that is being tuned: what each method's grid stands
    for, by the labels of its variants, and how to choose between them. ``origins`` says where each
    metric came from. ``folds`` are the settings that each leave out one group, by the label of the
    setting they were made from. ``baseline`` is the method that the others are compared with pair
    by pair, if any. ``chosen`` is what tuning has chosen and the study runs.

    Examples
    --------
    >>> from equipoise.study import study_from
    >>> study = study_from({"base": {"data": "digits"}, "methods": ["fedavg", "local"], "seeds": [0, 1]})
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
    origins: Mapping[str, str] = field(default_factory=dict)
    folds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: str | None = None
    chosen: Choices = field(default_factory=dict)

    @property
    def others(self) -> tuple[str, ...]:
        """All methods but the baseline."""
        return tuple(method for method in self.methods if method != self.baseline)

    @property
    def whole_settings(self) -> tuple[str, ...]:
        """The settings, with one label in place of all folds that were made from it."""
        origin = {fold: label for label, folds in self.folds.items() for fold in folds}
        return tuple(dict.fromkeys(origin.get(setting, setting) for setting in self.settings))

    def run(
        self,
        out: str | Path,
        *,
        jobs: int | None = 1,
        watch: Watch | None = None,
        reuse: str | Path | None = None,
    ) -> Results:
        """Run what is missing; if a run fails, the others still run.

        Nothing runs if a run directory holds another experiment, as it does after changes to the
        study.

        Parameters
        ----------
        out : path
            Directory of all runs. What came out is also written to its ``results.json``.
        jobs : int or None
            How many runs at a time, each in a process of its own if more than one; None for as many
            as fill the cores or, after a first run that shows how much memory they need, the GPU.
        watch : callable, optional
            Called for every job when it begins (``"begun"``) and with its outcome when it ends.
        reuse : path, optional
            The directory of the runs of tuning. Finished runs of the same experiments are copied
            from there.

        Returns
        -------
        Results
            Of the runs that succeeded, and why others did not.

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
        for job, result in carry_out(missing, out, jobs, self.split, tell):
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
            ):  # Its own runs raise the error; runs of other settings must not be stopped by it.
                return
        for metric, group in named.items():
            if group not in there:
                raise unknown("group", group, there, where=self.origins[metric])
