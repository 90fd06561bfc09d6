"""The results of a study, as tables."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.run.records import Row, task_of
from equipoise.study.choice import Choice, Choices
from equipoise.study.intervals import CONFIDENCE, RESAMPLES, Interval, interval
from equipoise.study.latex import latex_table
from equipoise.study.metrics import (
    TOTALS,
    apart,
    left_out,
    model_of,
    own_of,
    scored,
    should_be_high,
    value_of,
)
from equipoise.study.runs import counted_rows
from equipoise.study.selection import RULES, Selected, select_by_rules
from equipoise.study.significance import (
    LEAST_SEEDS,
    LEVEL,
    TEST,
    WORSE,
    Ranking,
    against,
    rank_methods,
)

if TYPE_CHECKING:
    from equipoise.study.plan import Job, Study


@dataclass(frozen=True)
class Results:
    """The results of a study.

    Attributes
    ----------
    study : Study
        The study.
    summaries : dict
        The summary of every run that succeeded, by its path.
    failures : dict
        The reason why a run failed, by its path.
    directory : Path, optional
        The directory of the runs. Without it there are no intervals over clients.
    """

    study: Study
    summaries: Mapping[Path, Mapping[str, Any]]
    failures: Mapping[Path, str]
    directory: Path | None = None

    @property
    def spread(self) -> str:
        """Describe the numbers after ±."""
        count = len(self.study.seeds)
        return f"sample standard deviation (n - 1) over {count} seed{'s' * (count > 1)}"

    @property
    def tables(self) -> tuple[str, ...]:
        """The labels that have a table: the settings, then those of means over folds."""
        return (*self.study.settings, *self.study.folds)

    def data(self, setting: str) -> str:
        """Describe the data of a setting's numbers."""
        folds = self.study.folds
        if setting in folds:
            setting = f"{setting}: mean over left-out groups ({', '.join(folds[setting])})"
        elif any(setting in labels for labels in folds.values()):
            setting = f"{setting} left out"
        return setting if self.study.split == "test" else f"{setting}, validation data"

    def values(self, setting: str, method: str, metric: str) -> dict[int, float]:
        """Return a metric's value by seed, without seeds that have no value.

        For the label of folds, it is the mean over the folds, for the seeds for which all folds
        have a value.
        """
        found = self._by_fold(setting, method, metric)
        folds = self.study.folds.get(setting, (setting,))
        complete = [
            seed for seed in self.study.seeds if all((fold, seed) in found for fold in folds)
        ]
        return {seed: statistics.fmean(found[fold, seed] for fold in folds) for seed in complete}

    def _by_fold(self, setting: str, method: str, metric: str) -> dict[tuple[str, int], float]:
        """Return a metric's value by fold and seed. A setting without folds is one fold."""
        found = {
            (job.setting, job.seed): value_of(summary, metric)
            for job, summary in self._runs(setting, method)
        }
        return {which: value for which, value in found.items() if value is not None}

    def ranking(self, setting: str, metric: str) -> Ranking:
        """Rank the methods, and test the others against the best.

        Pairs are runs with the same seed. For the label of folds, they are the means over folds.
        """
        found = {method: self.values(setting, method, metric) for method in self.study.methods}
        high = self._should_be_high(setting, metric)
        return Ranking() if high is None else rank_methods(found, higher_is_better=high)

    def _should_be_high(self, setting: str, metric: str) -> bool | None:
        """Return whether high values are better; None without a run."""
        runs = (
            summary for method in self.study.methods for _, summary in self._runs(setting, method)
        )
        summary = next(runs, None)
        return (
            None
            if summary is None
            else should_be_high(metric, higher_is_better=scored(summary, metric)[1])
        )

    @property
    def about_marks(self) -> str:
        """Explain the marks in tables."""
        ranked = "Bold: best. Underlined: second."
        if len(self.study.seeds) < LEAST_SEEDS:
            return f"{ranked} Differences are not tested: that needs {LEAST_SEEDS} seeds."
        return f"{ranked} {WORSE} worse than the best: p < {LEVEL}, {TEST}."

    @property
    def about_intervals(self) -> str:
        """Return the title of a table of intervals."""
        return (
            f"{CONFIDENCE:.0%} bootstrap intervals over clients (BCa, {RESAMPLES:,} resamples), "
            "mean over seeds"
        )

    @cached_property
    def _counted(self) -> dict[Path, list[Row]]:
        """The rows behind the summary of each run."""
        if self.directory is None:
            return {}
        return {
            path: counted_rows(self.directory / path, summary)
            for path, summary in self.summaries.items()
        }

    @cached_property
    def _intervals(self) -> dict[tuple[str, str, str], Interval]:
        found = {}
        for setting in self.study.settings if self._counted else ():
            metrics = dict.fromkeys(
                [*self.study.metrics, *(f"groups.{group}" for group in self.groups(setting))]
            )
            for method in self.study.methods:
                runs = [
                    (summary, self._counted[job.path])
                    for job, summary in self._runs(setting, method)
                ]
                for metric in metrics:
                    if (own := interval(runs, metric, split=self.study.split)) is not None:
                        found[setting, method, metric] = own
        return found

    def interval(self, setting: str, method: str, metric: str) -> Interval | None:
        """Return the bootstrap interval over clients; see :mod:`equipoise.study.intervals`."""
        return self._intervals.get((setting, method, metric))

    def interval_cells(self, setting: str) -> dict[str, list[str]]:
        """Return the intervals of all metrics as text, by method; empty if there are none."""
        found = {
            method: [self.interval(setting, method, metric) for metric in self.study.metrics]
            for method in self.study.methods
        }
        if not any(own for row in found.values() for own in row):
            return {}
        return {
            method: [f"[{_number(own[0])}, {_number(own[1])}]" if own else "–" for own in row]
            for method, row in found.items()
        }

    def difference(self, setting: str, method: str, metric: str) -> Difference:
        """Compare a method with the baseline in all folds and seeds in which both have a value."""
        baseline = self.study.baseline
        theirs = self._by_fold(setting, baseline, metric) if baseline else {}
        ours = self._by_fold(setting, method, metric)
        p = None
        if baseline:
            others = {other: self.values(setting, other, metric) for other in self.study.others}
            p = against(self.values(setting, baseline, metric), others).get(method)
        return Difference.of([ours[which] - theirs[which] for which in ours if which in theirs], p)

    @property
    def compared(self) -> tuple[str, ...]:
        """The settings in which methods are compared with the baseline, with folds as one."""
        return self.study.whole_settings if self.study.baseline and self.study.others else ()

    def about_differences(self, setting: str) -> str:
        """Return the title of a table of differences."""
        over = "left-out groups and seeds" if setting in self.study.folds else "seeds"
        enough = len(self.study.seeds) >= LEAST_SEEDS
        tested = (
            "; p of a two-sided paired t-test over seeds, Holm correction over methods"
            if enough
            else ""
        )
        return (
            f"{setting}: difference from {self.study.baseline}, paired over {over}: "
            f"mean ± standard error (standard deviation; number of pairs{tested})"
        )

    def cell(self, setting: str, method: str, metric: str) -> str:
        """Return mean ± standard deviation over seeds as text."""
        mean, spread, count = _statistics(self.values(setting, method, metric).values())
        if mean is None:
            folds = self.study.folds.get(setting, (setting,))
            own = (
                job.path for job in self.study.jobs if job.setting in folds and job.method == method
            )
            lost = any(path in self.failures for path in own)
            return "failed" if lost else "–"
        text = _number(mean) if spread is None else f"{_number(mean)} ± {_number(spread)}"
        return (
            text
            if count == len(self.study.seeds)
            else f"{text} ({count} of {len(self.study.seeds)})"
        )

    def models(self, setting: str, metrics: Iterable[str]) -> dict[str, str]:
        """Return the model of each method's metrics without a model in their names.

        Empty if it is always the global model.
        """
        unnamed = [
            metric for metric in metrics if metric not in TOTALS and apart(metric)[0] is None
        ]
        found = {method: self._models(setting, method, unnamed) for method in self.study.methods}
        if {model for models in found.values() for model in models.values()} <= {"global"}:
            return {}
        return {method: _said(models) for method, models in found.items()}

    def _models(self, setting: str, method: str, metrics: Iterable[str]) -> dict[str, str]:
        """Return the model behind metrics of seen and of unseen clients, if there is one."""
        found = {apart(metric)[1]: self._model(setting, method, metric) for metric in metrics}
        return {who: model for who, model in found.items() if model}

    def _model(self, setting: str, method: str, metric: str) -> str | None:
        models = (model_of(summary, metric) for _, summary in self._runs(setting, method))
        return next((model for model in models if model), None)

    def _runs(self, setting: str, method: str) -> Iterator[tuple[Job, Mapping[str, Any]]]:
        folds = self.study.folds.get(setting, (setting,))
        for job in self.study.jobs:
            if job.setting in folds and job.method == method and job.path in self.summaries:
                yield job, self.summaries[job.path]

    def groups(self, setting: str) -> list[str]:
        """List the groups of seen clients."""
        names: dict[str, None] = {}
        for job in self.study.jobs:
            if job.setting == setting and job.path in self.summaries:
                for model in self.summaries[job.path]["results"].values():
                    names |= dict.fromkeys(model.get("seen", {}).get("groups", ()))
        return list(names)

    def worst_group(self, setting: str, method: str) -> str | None:
        """Return the worst group of a method, on average over seeds."""
        means = {
            group: _statistics(self.values(setting, method, f"groups.{group}").values())[0]
            for group in self.groups(setting)
        }
        scores = {group: mean for group, mean in means.items() if mean is not None}
        if not scores:
            return None
        return (
            max(scores, key=scores.__getitem__)
            if self._lower_is_better
            else min(scores, key=scores.__getitem__)
        )

    @property
    def _lower_is_better(self) -> bool:
        return any(not task_of(summary).higher_is_better for summary in self.summaries.values())

    def chosen(self, setting: str) -> dict[str, Mapping[str, Any]]:
        """Return the best values of every method with a grid and a successful run."""
        return {method: choice.values for method, choice in self._choices(setting).items()}

    @property
    def choices(self) -> Choices:
        """The choices of tuning, by setting and method."""
        made = {setting: self._choices(setting) for setting in self.study.whole_settings}
        return {setting: choices for setting, choices in made.items() if choices}

    def _choices(self, setting: str) -> dict[str, Choice]:
        tuning, best = self.study.tuning, {}
        mean_of_first = self._tuned(setting, self.study.methods[0], "mean")
        reference = mean_of_first
        if reference is None:
            reference = math.inf if self._lower_is_better else -math.inf
        for method, variants in self.study.tried.items():
            measured = {}
            for label in variants:
                mean, by = (self._tuned(setting, label, metric) for metric in ("mean", tuning.by))
                if mean is not None and by is not None:
                    measured[label] = (mean, by)
            if measured:
                higher = not self._lower_is_better
                label = tuning.best(
                    measured, reference, higher_is_better=higher, by_higher=self._by_higher
                )
                similar = tuning.similar(measured, reference, higher_is_better=higher)
                mean, by = measured[label]
                decided = [measured[other] for other in similar] or [(mean, by)]
                best[method] = Choice(
                    values=variants[label],
                    by=tuning.by,
                    split=self.study.split,
                    seed=tuning.seed,
                    tolerance=tuning.tolerance,
                    among=len(measured),
                    within_tolerance=len(similar),
                    tied=sum(value == by for _, value in decided),
                    mean=mean,
                    value=by,
                    reference=mean_of_first,
                )
        return best

    @property
    def _by_higher(self) -> bool | None:
        """Whether the metric of tuning should be high; None if it is the task's score."""
        own = own_of(self.study.tuning.by)[0]
        declared = (summary.get("metrics", {}).get(own) for summary in self.summaries.values())
        return next((bool(metric["higher_is_better"]) for metric in declared if metric), None)

    def selected(self, setting: str) -> dict[str, dict[str, list[Selected]]]:
        """Return the choices of DomainBed's rules; see :mod:`equipoise.study.selection`."""
        return select_by_rules(self, setting)

    def selection_table(self, setting: str) -> tuple[str, list[str], list[list[str]]] | None:
        """Return title, header and rows of the table of rules; None without tuning or folds."""
        found = self.selected(setting)
        if not found:
            return None
        folds = len(self.study.folds[setting])
        rows = []
        for method in next(iter(found.values())):
            tested = [[one.tested for one in by_method[method]] for by_method in found.values()]
            rows.append(
                [
                    method,
                    *(
                        _number(statistics.fmean(own)) if len(own) == folds else "–"
                        for own in tested
                    ),
                ]
            )
        title = f"{setting}: mean over left-out groups, hyper-parameters chosen for each by"
        return title, ["method", *(RULES[rule] for rule in found)], rows

    def _tuned(self, setting: str, method: str, metric: str) -> float | None:
        return self.values(setting, method, metric).get(self.study.tuning.seed)

    @property
    def undecided(self) -> list[tuple[str, str]]:
        """List the settings and methods with a grid for which nothing could be chosen."""
        settings, tried = self.study.whole_settings, self.study.tried
        return [
            (setting, method)
            for setting in settings
            for method in tried
            if method not in self.chosen(setting)
        ]

    @property
    def warnings(self) -> list[str]:
        """List the metrics that are missing although their runs succeeded."""
        summaries, by = self.summaries.values(), self.study.tuning.by
        empty = [
            metric
            for metric in self.study.metrics
            if all(value_of(run, metric) is None for run in summaries)
        ]
        found = [f"no run has a value of {', '.join(empty)}"] if empty and summaries else []
        for metric in self.study.metrics:
            if most := max((left_out(run, metric) for run in summaries), default=0):
                found.append(
                    f"{metric}: up to {most} client{'s' * (most > 1)} of a run have no value and "
                    "are left out; left_out_clients in summary.json names them"
                )
        for setting in self.study.whole_settings:
            first, chosen = self.study.methods[0], self.chosen(setting)
            if chosen and self._tuned(setting, first, "mean") is None:
                found.append(
                    f"{setting}: chosen without the tolerance, because {first} has no mean"
                )
        for setting, method in self.undecided:
            if any(any(self._runs(setting, label)) for label in self.study.tried[method]):
                found.append(
                    f"{setting}: nothing chosen for {method}, because none of its runs has a value "
                    f"of {by}"
                )
        return found

    def plain(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        names = ("setting", "method", "model", "metric")
        rows = [
            dict(zip(names, which, strict=True))
            | dict(zip(("mean", "std", "n"), summed, strict=True))
            | dict(zip(("rank", "p", "low", "high"), compared, strict=True))
            | {"seeds": {str(seed): value for seed, value in seeds.items()}}
            for *which, summed, compared, seeds in self._rows()
        ]
        failures = {path.as_posix(): message for path, message in self.failures.items()}
        plain: dict[str, Any] = {
            "metrics": list(self.study.metrics),
            "split": self.study.split,
            "std": self.spread,
            "results": rows,
        }
        plain["statistics"] = {
            "marks": self.about_marks,
            "test": TEST,
            "level": LEVEL,
            "least_seeds": LEAST_SEEDS,
            "intervals": self.about_intervals,
        }
        if self.compared:
            named = ("setting", "method", "metric")
            plain["differences"] = [
                {
                    **dict(zip(named, which, strict=True)),
                    "baseline": self.study.baseline,
                    **asdict(difference),
                }
                for *which, difference in self._differences()
            ]
        chosen = (
            {setting: self.chosen(setting) for setting in self.study.whole_settings}
            if self.study.tried
            else None
        )
        if selections := {
            setting: self.selected(setting) for setting in self.study.folds if self.study.tried
        }:
            plain["selection"] = [
                {"setting": setting, "rule": rule, "method": method, **asdict(one)}
                for setting, by_rule in selections.items()
                for rule, by_method in by_rule.items()
                for method, chosen_for in by_method.items()
                for one in chosen_for
            ]
        how = self.choices if self.study.tried else self.study.chosen
        about = {
            s: {method: asdict(choice) for method, choice in of.items()} for s, of in how.items()
        }
        return (
            plain
            | {"failures": failures, "warnings": self.warnings}
            | ({"chosen": chosen} if chosen else {})
            | ({"tuning": about} if about else {})
        )

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        lines = []
        for setting in self.tables:
            for title, header, rows in self._written(setting):
                lines += _table(title, header, rows)
            if intervals := self.interval_cells(setting):
                rows = [[method, *cells] for method, cells in intervals.items()]
                lines += _table(
                    f"{setting}: {self.about_intervals}", ["method", *self.study.metrics], rows
                )
        lines += [f"{self.about_marks}\n"] if len(self.study.methods) > 1 else []
        for setting in self.study.folds:
            if selection := self.selection_table(setting):
                lines += _table(*selection)
        for setting in self.compared:
            rows = [
                [
                    method,
                    *(
                        self.difference(setting, method, metric).cell
                        for metric in self.study.metrics
                    ),
                ]
                for method in self.study.others
            ]
            lines += _table(self.about_differences(setting), ["method", *self.study.metrics], rows)
        lines += [f"Warning: {message}\n" for message in self.warnings]
        lines += [
            f"Failed: `{path.as_posix()}`: {message}\n" for path, message in self.failures.items()
        ]
        return "\n".join(lines)

    def _written(self, setting: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Yield title, header and rows of the tables of metrics and groups, with marks."""
        tables = {
            f"{self.data(setting)}: mean ± {self.spread}": {
                metric: metric for metric in self.study.metrics
            }
        }
        if groups := self.groups(setting):
            tables[f"{setting}: mean over the clients of each group"] = {
                group: f"groups.{group}" for group in groups
            }
        for title, columns in tables.items():
            models = self.models(setting, columns.values())
            rankings = {metric: self.ranking(setting, metric) for metric in columns.values()}
            rows = []
            for method in self.study.methods:
                cells = (
                    _marked(self.cell(setting, method, metric), ranking, method)
                    for metric, ranking in rankings.items()
                )
                rows.append([method, *([models[method]] if models else []), *cells])
            yield title, ["method", *(["model"] if models else []), *columns], rows

    def latex(self) -> str:
        """Return the tables as LaTeX, for the package booktabs."""
        return "\n".join(
            latex_table(
                title, header, rows, note=self.about_marks if len(self.study.methods) > 1 else ""
            )
            for setting in self.tables
            for title, header, rows in self._written(setting)
        )

    def csv(self) -> str:
        """Return CSV with one row per setting, method and metric, including groups."""
        rows = ([*which, *summed, *compared] for *which, summed, compared, _ in self._rows())
        return _csv(
            [
                "setting",
                "method",
                "model",
                "metric",
                "mean",
                "std",
                "n",
                "rank",
                "p",
                "low",
                "high",
            ],
            rows,
        )

    def csv_seeds(self) -> str:
        """Return CSV with one row per setting, method, metric and seed."""
        rows = (
            [*which, seed, value]
            for *which, _, _, seeds in self._rows()
            for seed, value in seeds.items()
        )
        return _csv(["setting", "method", "model", "metric", "seed", "value"], rows)

    def csv_differences(self) -> str:
        """Return CSV of the differences from the baseline by setting, method and metric."""
        rows = (
            [setting, method, self.study.baseline, metric, *asdict(difference).values()]
            for setting, method, metric, difference in self._differences()
        )
        return _csv(
            [
                "setting",
                "method",
                "baseline",
                "metric",
                *(item.name for item in fields(Difference)),
            ],
            rows,
        )

    def _differences(self) -> Iterator[tuple[str, str, str, Difference]]:
        for setting in self.compared:
            for method in self.study.others:
                for metric in self.study.metrics:
                    yield setting, method, metric, self.difference(setting, method, metric)

    def _rows(
        self,
    ) -> Iterator[tuple[str, str, str | None, str, _Statistics, _Compared, dict[int, float]]]:
        for setting in self.tables:
            metrics = dict.fromkeys(
                [*self.study.metrics, *(f"groups.{group}" for group in self.groups(setting))]
            )
            rankings = {metric: self.ranking(setting, metric) for metric in metrics}
            for method in self.study.methods:
                for metric, ranking in rankings.items():
                    seeds = self.values(setting, method, metric)
                    yield (
                        setting,
                        method,
                        self._model(setting, method, metric),
                        metric,
                        _statistics(seeds.values()),
                        self._compared(setting, method, metric, ranking),
                        seeds,
                    )

    def _compared(self, setting: str, method: str, metric: str, ranking: Ranking) -> _Compared:
        place = 1 if method in ranking.best else 2 if method in ranking.second else None
        return (
            place,
            (ranking.p or {}).get(method),
            *(self.interval(setting, method, metric) or (None, None)),
        )


@dataclass(frozen=True)
class Difference:
    """The difference between two methods, from pairs of runs that differ only in the method.

    Attributes
    ----------
    mean : float or None
        The mean difference; None without pairs.
    std : float or None
        The sample standard deviation (n - 1) of the differences; None for fewer than two pairs.
    standard_error : float or None
        ``std`` divided by √n.
    pairs : int
        The number n of pairs.
    p : float or None
        The p-value of a two-sided paired t-test over seeds, after Holm's correction over all
        methods except the baseline; None for fewer than ``LEAST_SEEDS`` seeds. Left-out groups are
        averaged first, because pairs of one seed share clients.

    Examples
    --------
    >>> Difference.of([0.03, 0.01, 0.02, 0.02]).cell
    '+0.020 ± 0.004 (0.008; 4)'
    """

    mean: float | None
    std: float | None
    standard_error: float | None
    pairs: int
    p: float | None = None

    @classmethod
    def of(cls, differences: Sequence[float], p: float | None = None) -> Difference:
        """Summarize the differences of all pairs."""
        mean, std, pairs = _statistics(differences)
        return cls(mean, std, None if std is None else std / math.sqrt(pairs), pairs, p)

    @property
    def cell(self) -> str:
        """The difference as a cell of a table."""
        if self.mean is None:
            return "–"
        mean = f"+{_number(self.mean)}" if self.mean >= 0 else _number(self.mean)
        if self.std is None or self.standard_error is None:
            return f"{mean} ({self.pairs})"
        tested = "" if self.p is None else f"; p = {self.p:.3f}"
        return (
            f"{mean} ± {_number(self.standard_error)} ({_number(self.std)}; {self.pairs}{tested})"
        )


_Statistics = tuple[float | None, float | None, int]
# Rank (1 or 2), p-value against the best, and the ends of the interval over clients.
_Compared = tuple[int | None, float | None, float | None, float | None]


def _statistics(values: Iterable[float]) -> _Statistics:
    """Return mean, sample standard deviation and number of values; None if undefined."""
    numbers = list(values)
    mean = statistics.fmean(numbers) if numbers else None
    return mean, statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def _marked(cell: str, ranking: Ranking, method: str) -> str:
    """Mark the best cell, the second, and those worse than the best, in Markdown."""
    if method in ranking.best:
        return f"**{cell}**"
    marked = f"<u>{cell}</u>" if method in ranking.second else cell
    return f"{marked} {WORSE}" if method in ranking.worse else marked


def _said(models: Mapping[str, str]) -> str:
    """Describe the models behind metrics of seen and of unseen clients."""
    if len(set(models.values())) > 1:
        return ", ".join(f"{who} {model}" for who, model in models.items())
    return next(iter(models.values()), "–")


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, with its title before and an empty line after it."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return [f"**{title}**", "", lines[0], "|---" * len(header) + "|", *lines[1:], ""]


def _csv(header: Sequence[str], rows: Iterator[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
