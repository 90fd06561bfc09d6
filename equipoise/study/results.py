"""The results of a study: values, rankings, intervals and differences of its methods."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.errors import RunError
from equipoise.fairness import GROUP_METRICS
from equipoise.run.directory import read_names
from equipoise.run.left_out import groups_with_fewer, in_runs, missing_in, missing_in_runs
from equipoise.run.records import Row, name_in, several_groups, task_of
from equipoise.study import tables
from equipoise.study.choice import Choices
from equipoise.study.intervals import CONFIDENCE, RESAMPLES, Interval, interval
from equipoise.study.metrics import (
    TOTALS,
    apart,
    kind_of,
    left_out,
    model_of,
    scored,
    should_be_high,
    value_of,
)
from equipoise.study.numbers import USUAL, Difference, mean_and_std, number, style_of, with_spread
from equipoise.study.runs import counted_rows
from equipoise.study.selection import Selected, select_by_rules, selection_table
from equipoise.study.significance import (
    LEAST_SEEDS,
    LEVEL,
    TEST,
    WORSE,
    Ranking,
    against,
    rank_methods,
)
from equipoise.study.tuned import choices_of, reference_mean
from equipoise.text import plural

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
    def caption(self) -> str:
        """Describe the numbers in tables."""
        return f"mean ± {self.spread}" if len(self.study.seeds) > 1 else "one seed"

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The metrics in tables.

        If metrics are those by default and each run has a single group of seen clients, those of
        groups are left out. JSON and CSV have all metrics of the study.
        """
        parts = [
            part["seen"]
            for summary in self.summaries.values()
            for part in summary["results"].values()
            if part.get("seen", {}).get("groups")
        ]
        single = parts and not any(map(several_groups, parts))
        if not (self.study.metrics_by_default and single):
            return self.study.metrics
        return tuple(
            metric for metric in self.study.metrics if kind_of(metric) not in GROUP_METRICS
        )

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
        return f"Bold: best. Underlined: second. {self.about_test}"

    @property
    def about_test(self) -> str:
        """Explain the mark of values that are worse than the best, or why there is none."""
        if len(self.study.seeds) < LEAST_SEEDS:
            return f"Differences are not tested: that needs {LEAST_SEEDS} seeds."
        return f"{WORSE} worse than the best: p < {LEVEL}, {TEST}."

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
            metrics = self.metrics_of(setting)
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
        """Return the intervals of all columns as text, by method; empty if there are none."""
        found = {
            method: [self.interval(setting, method, metric) for metric in self.columns]
            for method in self.study.methods
        }
        if not any(own for row in found.values() for own in row):
            return {}
        styles = [self._style(setting, metric) for metric in self.columns]
        return {
            method: [
                f"[{number(own[0], style)}, {number(own[1], style)}]" if own else "–"
                for own, style in zip(row, styles, strict=True)
            ]
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

    def difference_cell(self, setting: str, method: str, metric: str) -> str:
        """Return the difference from the baseline as text."""
        return self.difference(setting, method, metric).in_style(self._style(setting, metric))

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
        mean, spread, count = mean_and_std(self.values(setting, method, metric).values())
        if mean is None:
            folds = self.study.folds.get(setting, (setting,))
            own = (
                job.path for job in self.study.jobs if job.setting in folds and job.method == method
            )
            lost = any(path in self.failures for path in own)
            return "failed" if lost else "–"
        text = with_spread(mean, spread, self._style(setting, metric))
        return (
            text
            if count == len(self.study.seeds)
            else f"{text} ({count} of {len(self.study.seeds)})"
        )

    def _style(self, setting: str, metric: str) -> str:
        """Return the format of the numbers in the column of a metric."""
        return self._styles.get((setting, metric), USUAL)

    @cached_property
    def _styles(self) -> dict[tuple[str, str], str]:
        found = {}
        for setting in self.tables:
            for metric in self.metrics_of(setting):
                of_methods = (
                    mean_and_std(self.values(setting, method, metric).values())[0]
                    for method in self.study.methods
                )
                found[setting, metric] = style_of(of_methods)
        return found

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
        found = {apart(metric)[1]: self.model(setting, method, metric) for metric in metrics}
        return {who: model for who, model in found.items() if model}

    def model(self, setting: str, method: str, metric: str) -> str | None:
        """Return the model behind a metric; None without a run that has it."""
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

    def metrics_of(self, setting: str) -> list[str]:
        """List the metrics of the study and the means of groups."""
        of_groups = (f"groups.{group}" for group in self.groups(setting))
        return list(dict.fromkeys([*self.study.metrics, *of_groups]))

    def about_groups(self, setting: str) -> str:
        """Return the title of a table of groups."""
        runs = (run for method in self.study.methods for _, run in self._runs(setting, method))
        fewer = groups_with_fewer(missing_in(run).get("seen") for run in runs)
        return f"mean over the clients of each group{fewer}"

    def worst_group(self, setting: str, method: str) -> str | None:
        """Return the worst group of a method, on average over seeds."""
        means = {
            group: mean_and_std(self.values(setting, method, f"groups.{group}").values())[0]
            for group in self.groups(setting)
        }
        scores = {group: mean for group, mean in means.items() if mean is not None}
        if not scores:
            return None
        return (
            max(scores, key=scores.__getitem__)
            if self.lower_is_better
            else min(scores, key=scores.__getitem__)
        )

    def worst_clients(self, setting: str, method: str) -> Counter[str]:
        """Return in how many seeds a client is the worst one, by the name of the client."""
        found: Counter[str] = Counter()
        for _, summary in self._runs(setting, method):
            model = model_of(summary, "worst_client")
            part = summary["results"].get(model, {}).get("seen", {})
            if (number := part.get("worst_client_id")) is not None:
                found[part.get("worst_client_name") or f"client {number}"] += 1
        return found

    @property
    def lower_is_better(self) -> bool:
        """Whether low values of the score are better."""
        return any(not task_of(summary).higher_is_better for summary in self.summaries.values())

    def chosen(self, setting: str) -> dict[str, Mapping[str, Any]]:
        """Return the best values of every method with a grid and a successful run."""
        return {method: choice.values for method, choice in choices_of(self, setting).items()}

    @property
    def choices(self) -> Choices:
        """The choices of tuning, by setting and method."""
        made = {setting: choices_of(self, setting) for setting in self.study.whole_settings}
        return {setting: choices for setting, choices in made.items() if choices}

    def selected(self, setting: str) -> dict[str, dict[str, list[Selected]]]:
        """Return the choices of DomainBed's rules; see :mod:`equipoise.study.selection`."""
        return select_by_rules(self, setting)

    def selection_table(self, setting: str) -> tuple[str, list[str], list[list[str]]] | None:
        """Return title, header and rows of the table of rules; None without tuning or folds."""
        return selection_table(self, setting)

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
        """List what users should know about runs that succeeded, such as missing metrics."""
        summaries, by = self.summaries.values(), self.study.tuning.by
        empty = [
            metric
            for metric in self.study.metrics
            if all(value_of(run, metric) is None for run in summaries)
        ]
        found = [f"no run has a value of {', '.join(empty)}"] if empty and summaries else []
        shown = {"seen", *(apart(metric)[1] for metric in self.study.metrics)}
        missing = [
            {who: entry for who, entry in missing_in(run).items() if who in shown}
            for run in summaries
        ]
        found += [*self.study.warnings, *missing_in_runs(missing), *self._without_value]
        slowed = [what for run in summaries for what in run.get("slowed_by", ())]
        for what, runs in Counter(slowed).items():
            found.append(f"{plural(runs, 'run')} slower than possible: {what}")
        for setting in self.study.whole_settings:
            if self.chosen(setting) and reference_mean(self, setting) is None:
                found.append(
                    f"{setting}: chosen without the tolerance, because "
                    f"{' and '.join(self.study.reference)} has no mean"
                )
        for setting, method in self.undecided:
            if any(any(self._runs(setting, label)) for label in self.study.tried[method]):
                found.append(
                    f"{setting}: nothing chosen for {method}, because none of its runs has a value "
                    f"of {by}"
                )
        return found

    @property
    def _without_value(self) -> list[str]:
        """Say for which of ``evaluation.metrics`` clients have no value, and why."""
        metrics: dict[str, list[str]] = {}
        for metric in self.study.metrics:
            named = Counter(
                (name_in(self._names.get(path), int(client)), why)
                for path, run in self.summaries.items()
                for client, why in left_out(run, metric).items()
            )
            if named:
                metrics.setdefault(in_runs(named, len(self.summaries)), []).append(metric)
        return [
            f"{', '.join(of)}: clients without a value are left out: {listed}"
            for listed, of in metrics.items()
        ]

    @cached_property
    def _names(self) -> dict[Path, list[str] | None]:
        """The names of the clients of each run, if its directory has them."""
        found: dict[Path, list[str] | None] = {}
        if self.directory is not None:
            for path in self.summaries:
                # Without the names, clients have their numbers.
                with suppress(RunError):
                    found[path] = read_names(self.directory / path)
        return found

    def plain(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return tables.as_plain(self)

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        return tables.as_markdown(self)

    def latex(self) -> str:
        """Return the tables as LaTeX, for the package booktabs."""
        return tables.as_latex(self)

    def csv(self) -> str:
        """Return CSV with one row per setting, method and metric, including groups."""
        return tables.as_csv(self)

    def csv_seeds(self) -> str:
        """Return CSV with one row per setting, method, metric and seed."""
        return tables.seeds_as_csv(self)

    def csv_differences(self) -> str:
        """Return CSV of the differences from the baseline by setting, method and metric."""
        return tables.differences_as_csv(self)


def _said(models: Mapping[str, str]) -> str:
    """Describe the models behind metrics of seen and of unseen clients."""
    if len(set(models.values())) > 1:
        return ", ".join(f"{who} {model}" for who, model in models.items())
    return next(iter(models.values()), "–")
