"""Runs to compare: those of one setting and with one score, by method."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from equipoise.report.entries import Entry
from equipoise.report.html import slug
from equipoise.report.reading import WHO, Part, RunRecord
from equipoise.study.intervals import OF_GROUPS, resampled_interval
from equipoise.study.metrics import own_of, scored, should_be_high, value_of

CRITERIA = ("mean", "worst10", "sigma_clients")


@dataclass(frozen=True)
class Comparison:
    """The runs of one setting and with one score, by method.

    Attributes
    ----------
    setting : str
        Its label, and the score if others have another one; empty if there is nothing to tell
        apart.
    runs : dict
        The runs of each method, one per seed.
    metrics : tuple of str
        The metrics of the study, if the runs are from a study that has written its results.
    """

    setting: str
    runs: Mapping[str, Sequence[RunRecord]]
    metrics: tuple[str, ...] = ()

    @property
    def first(self) -> RunRecord:
        """One of the runs, for what all runs have in common."""
        return next(iter(self.runs.values()))[0]

    @property
    def suffix(self) -> str:
        """A suffix that makes anchors and names of charts unique."""
        return f"-{slug(self.setting)}" if self.setting else ""

    def title(self, text: str) -> str:
        """Return a heading, with the setting."""
        return f"{text}: {self.setting}" if self.setting else text

    def by_seed(self, label: str, who: str, metric: str) -> dict[int, float]:
        """Return a metric of the clients' final models, by seed."""
        found = {}
        for record in self.runs[label]:
            if part := record.leading(who):
                own, name = own_of(metric)
                summary = record.parts[part]
                if own:
                    summary = summary.get("metrics", {}).get(own, {})
                if summary.get(name) is not None:
                    found[record.seed] = float(summary[name])
        return found

    def of_study(self, label: str, metric: str) -> dict[int, float]:
        """Return a metric by its name in studies, by seed."""
        found = {record.seed: value_of(record.summary, metric) for record in self.runs[label]}
        return {seed: value for seed, value in found.items() if value is not None}

    def values(self, label: str, who: str, metric: str) -> list[float]:
        """Return a metric of the clients' final models, one value per seed."""
        return list(self.by_seed(label, who, metric).values())

    def mean(self, label: str, who: str, metric: str) -> float | None:
        """Return the mean over seeds."""
        values = self.values(label, who, metric)
        return fmean(values) if values else None

    def interval(
        self, records: Sequence[RunRecord], who: str, metric: str
    ) -> tuple[float, float] | None:
        """Return the bootstrap interval over clients of a method's runs."""
        parts = [(record, part) for record in records if (part := record.leading(who))]
        if not parts:
            return None
        values = [record.values(part) for record, part in parts]
        common = sorted(set.intersection(*map(set, values)))
        groups = [[record.groups[client] for client in common] for record, _ in parts]
        if not common or (metric in OF_GROUPS and any(own != groups[0] for own in groups)):
            return None
        array = np.array([[own[client] for client in common] for own in values])
        return resampled_interval(
            array, groups[0], metric, higher_is_better=self.first.task.higher_is_better
        )

    def should_be_high(self, metric: str) -> bool:
        """Return whether high values are better."""
        own, _ = own_of(metric)
        records = [record for runs in self.runs.values() for record in runs]
        one = next((r for r in records if own in r.summary.get("metrics", {})), self.first)
        return should_be_high(metric, higher_is_better=scored(one.summary, metric)[1])

    @cached_property
    def further(self) -> list[str]:
        """The names in ``evaluation.metrics`` of the runs."""
        records = (record for runs in self.runs.values() for record in runs)
        return list(dict.fromkeys(m for r in records for m in r.summary.get("metrics", {})))

    def pareto(self, who: str) -> list[str]:
        """Return the Pareto set of methods by mean, worst tenth and σ."""
        points = {}
        for label in self.runs:
            values = [self.mean(label, who, metric) for metric in CRITERIA]
            if None not in values:
                points[label] = [
                    value if self.should_be_high(metric) else -value
                    for metric, value in zip(CRITERIA, values, strict=True)
                    if value is not None
                ]
        return pareto_set(points)

    @cached_property
    def whose(self) -> list[str]:
        """Which clients have results: seen, unseen or both."""
        return [
            who
            for who in WHO
            if any(r.leading(who) for records in self.runs.values() for r in records)
        ]

    def part(self, label: str, who: str) -> Part | None:
        """Return the model, clients and data of a method's results."""
        return next((part for record in self.runs[label] if (part := record.leading(who))), None)

    def group_means(self, label: str, who: str) -> dict[str, list[float]]:
        """Return the means of groups, one value per seed."""
        found: dict[str, list[float]] = {}
        for record in self.runs[label]:
            part = record.leading(who)
            for name, mean in record.parts[part]["groups"].items() if part else ():
                if mean is not None:
                    found.setdefault(name, []).append(mean)
        return found

    def several_groups(self, who: str) -> bool:
        """Return whether the runs of a method have several groups of seen or unseen clients."""
        return any(len(self.group_means(label, who)) > 1 for label in self.runs)


def pareto_set(points: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the labels of points that no other point dominates; higher is better.

    Examples
    --------
    >>> pareto_set({"a": [0.9, 0.2], "b": [0.8, 0.5], "c": [0.8, 0.4]})
    ['a', 'b']
    """

    def beaten(label: str) -> bool:
        mine = points[label]
        return any(
            all(theirs >= own for theirs, own in zip(other, mine, strict=True))
            and list(other) != list(mine)
            for other in points.values()
        )

    return [label for label in points if not beaten(label)]


def comparisons(entries: Iterable[Entry]) -> list[Comparison]:
    """Return the runs by setting and method. Runs with different scores are compared separately."""
    found: dict[tuple[str, str], dict[str, list[RunRecord]]] = {}
    metrics: dict[tuple[str, str], tuple[str, ...]] = {}
    for entry in entries:
        key = entry.setting, entry.record.compared_by
        found.setdefault(key, {}).setdefault(entry.label, []).append(entry.record)
        metrics[key] = entry.metrics
    # The label of a single setting is not needed, and neither is that of a single score.
    needed = [len(set(of)) > 1 for of in zip(*found, strict=True)]
    return [
        Comparison(", ".join(itertools.compress(key, needed)), runs, metrics[key])
        for key, runs in found.items()
    ]
