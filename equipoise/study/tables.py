"""The results of a study as plain values, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from equipoise.study.latex import latex_table
from equipoise.study.metrics import words_of
from equipoise.study.numbers import Difference, Statistics, mean_and_std
from equipoise.study.significance import LEAST_SEEDS, LEVEL, TEST, WORSE, Ranking
from equipoise.text import capital

if TYPE_CHECKING:
    from equipoise.study.results import Results

# The columns of a row: what it is about, its values over seeds, and how it compares.
_WHICH = ("setting", "method", "model", "metric")
_SUMMED = ("mean", "std", "n")
_COMPARED = ("rank", "p", "low", "high")
# Rank (1 or 2), p-value against the best, and the ends of the interval over clients.
_Compared = tuple[int | None, float | None, float | None, float | None]


def as_plain(results: Results) -> dict[str, Any]:
    """Return everything as plain values for JSON."""
    rows = [
        dict(zip(_WHICH, which, strict=True))
        | dict(zip(_SUMMED, summed, strict=True))
        | dict(zip(_COMPARED, compared, strict=True))
        | {"seeds": {str(seed): value for seed, value in seeds.items()}}
        for *which, summed, compared, seeds in _rows(results)
    ]
    failures = {path.as_posix(): message for path, message in results.failures.items()}
    plain: dict[str, Any] = {
        "metrics": list(results.study.metrics),
        "split": results.study.split,
        "std": results.spread,
        "results": rows,
    }
    plain["statistics"] = {
        "marks": results.about_marks,
        "test": TEST,
        "level": LEVEL,
        "least_seeds": LEAST_SEEDS,
        "intervals": results.about_intervals,
    }
    if results.compared:
        named = ("setting", "method", "metric")
        plain["differences"] = [
            {
                **dict(zip(named, which, strict=True)),
                "baseline": results.study.baseline,
                **asdict(difference),
            }
            for *which, difference in _differences(results)
        ]
    chosen = (
        {setting: results.chosen(setting) for setting in results.study.whole_settings}
        if results.study.tried
        else None
    )
    if selections := {
        setting: results.selected(setting) for setting in results.study.folds if results.study.tried
    }:
        plain["selection"] = [
            {"setting": setting, "rule": rule, "method": method, **asdict(one)}
            for setting, by_rule in selections.items()
            for rule, by_method in by_rule.items()
            for method, chosen_for in by_method.items()
            for one in chosen_for
        ]
    how = results.choices if results.study.tried else results.study.chosen
    about = {s: {method: asdict(choice) for method, choice in of.items()} for s, of in how.items()}
    return (
        plain
        | {"failures": failures, "warnings": results.warnings}
        | ({"chosen": chosen} if chosen else {})
        | ({"tuning": about} if about else {})
    )


def as_markdown(results: Results) -> str:
    """Return the tables as Markdown."""
    lines = []
    for setting in results.tables:
        for title, first, columns, rows in _tables(results, setting):
            lines += _table(title, [*first, *columns], rows)
        if intervals := results.interval_cells(setting):
            rows = [[method, *cells] for method, cells in intervals.items()]
            lines += _table(
                f"{setting}: {results.about_intervals}", ["method", *results.columns], rows
            )
    lines += [f"{results.about_marks}\n"] if len(results.study.methods) > 1 else []
    for setting in results.study.folds:
        if selection := results.selection_table(setting):
            lines += _table(*selection)
    for setting in results.compared:
        rows = [
            [
                method,
                *(results.difference_cell(setting, method, metric) for metric in results.columns),
            ]
            for method in results.study.others
        ]
        lines += _table(results.about_differences(setting), ["method", *results.columns], rows)
    lines += [f"Warning: {message}\n" for message in results.warnings]
    lines += [
        f"Failed: `{path.as_posix()}`: {message}\n" for path, message in results.failures.items()
    ]
    return "\n".join(lines)


def as_latex(results: Results) -> str:
    """Return the tables as LaTeX, for the package booktabs, with metrics in words."""
    note = results.about_marks if len(results.study.methods) > 1 else ""
    return "\n".join(
        latex_table(title, [*map(capital, first), *columns], rows, texts=len(first), note=note)
        for setting in results.tables
        for title, first, columns, rows in _tables(results, setting, words_of)
    )


def as_csv(results: Results) -> str:
    """Return CSV with one row per setting, method and metric, including groups."""
    rows = ([*which, *summed, *compared] for *which, summed, compared, _ in _rows(results))
    return _csv([*_WHICH, *_SUMMED, *_COMPARED], rows)


def seeds_as_csv(results: Results) -> str:
    """Return CSV with one row per setting, method, metric and seed."""
    rows = (
        [*which, seed, value]
        for *which, _, _, seeds in _rows(results)
        for seed, value in seeds.items()
    )
    return _csv([*_WHICH, "seed", "value"], rows)


def differences_as_csv(results: Results) -> str:
    """Return CSV of the differences from the baseline by setting, method and metric."""
    rows = (
        [setting, method, results.study.baseline, metric, *asdict(difference).values()]
        for setting, method, metric, difference in _differences(results)
    )
    return _csv(
        ["setting", "method", "baseline", "metric", *(item.name for item in fields(Difference))],
        rows,
    )


def _tables(
    results: Results, setting: str, named: Callable[[str], str] = str
) -> Iterator[tuple[str, list[str], list[str], list[list[str]]]]:
    """Yield the tables of metrics and groups, with marks.

    Each has a title, the heads of columns of text and of numbers, and rows. ``named`` makes the
    head of a column from the name of a metric. Names of groups are heads as they are.
    """
    metrics, groups = list(results.columns), results.groups(setting)
    tables = {f"{results.data(setting)}: {results.caption}": (list(map(named, metrics)), metrics)}
    if len(groups) > 1:
        tables[f"{setting}: {results.about_groups(setting)}"] = (
            groups,
            [f"groups.{group}" for group in groups],
        )
    for title, (heads, columns) in tables.items():
        models = results.models(setting, columns)
        rankings = {metric: results.ranking(setting, metric) for metric in columns}
        rows = []
        for method in results.study.methods:
            cells = (
                _marked(results.cell(setting, method, metric), ranking, method)
                for metric, ranking in rankings.items()
            )
            rows.append([method, *([models[method]] if models else []), *cells])
        yield title, ["method", *(["model"] if models else [])], heads, rows


def _rows(
    results: Results,
) -> Iterator[tuple[str, str, str | None, str, Statistics, _Compared, dict[int, float]]]:
    for setting in results.tables:
        rankings = {
            metric: results.ranking(setting, metric) for metric in results.metrics_of(setting)
        }
        for method in results.study.methods:
            for metric, ranking in rankings.items():
                seeds = results.values(setting, method, metric)
                yield (
                    setting,
                    method,
                    results.model(setting, method, metric),
                    metric,
                    mean_and_std(seeds.values()),
                    _compared(results, setting, method, metric, ranking),
                    seeds,
                )


def _compared(
    results: Results, setting: str, method: str, metric: str, ranking: Ranking
) -> _Compared:
    place = 1 if method in ranking.best else 2 if method in ranking.second else None
    return (
        place,
        (ranking.p or {}).get(method),
        *(results.interval(setting, method, metric) or (None, None)),
    )


def _differences(results: Results) -> Iterator[tuple[str, str, str, Difference]]:
    for setting in results.compared:
        for method in results.study.others:
            for metric in results.study.metrics:
                yield setting, method, metric, results.difference(setting, method, metric)


def _marked(cell: str, ranking: Ranking, method: str) -> str:
    """Mark the best cell, the second, and those worse than the best, in Markdown."""
    if method in ranking.best:
        return f"**{cell}**"
    marked = f"<u>{cell}</u>" if method in ranking.second else cell
    return f"{marked} {WORSE}" if method in ranking.worse else marked


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
