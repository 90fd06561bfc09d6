"""The tables of a study."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from equipoise.cli.show.console import LEFT_BEHIND, has_styles, new_console, new_table
from equipoise.study import Results
from equipoise.study.significance import WORSE, Ranking


def show_results(results: Results, directory: Path) -> None:
    """Show a study's tables, failed runs, and the directory of the runs."""
    console = new_console()
    for setting in results.tables:
        console.print(_metrics(results, setting))
        if intervals := results.interval_cells(setting):
            console.print(_intervals(results, intervals))
        groups = results.groups(setting)
        if len(groups) > 1:
            console.print(_left_behind(results, setting, groups))
        elif groups:
            console.print(_worst_clients(results, setting))
        choices = results.choices if results.study.tried else results.study.chosen
        for label, choice in choices.get(setting, {}).items():
            console.print(f"chosen for {label}: {choice.words}", soft_wrap=True)
    for setting in results.study.folds:
        if selection := results.selection_table(setting):
            title, header, rows = selection
            table = new_table(f"\n{title}", *header, numbers=len(header) - 1)
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for setting in results.compared:
        console.print(_differences(results, setting))
    if len(results.study.methods) > 1:
        # Without styles, as in a pipe, nothing is bold or underlined.
        marks = results.about_marks if has_styles(console) else results.about_test
        console.print(f"\n{marks}", soft_wrap=True)
    for message in results.warnings:
        console.print(f"\nwarning: {message}", style="yellow", soft_wrap=True)
    failed: dict[str, list[str]] = {}
    for path, message in results.failures.items():
        failed.setdefault(message, []).append(str(path))
    for message, (first, *others) in failed.items():
        paths = first + (f" and {len(others)} more" if others else "")
        console.print(f"\nfailed: {paths}: {message}", style="red", soft_wrap=True)
    console.print(f"\nfiles: {directory}", soft_wrap=True)


def _metrics(results: Results, setting: str) -> Table:
    metrics = results.columns
    header, first = _methods(results, setting, metrics)
    table = new_table(
        f"\n{results.data(setting)}: {results.caption}",
        *header,
        *metrics,
        numbers=len(metrics),
    )
    rankings = {metric: results.ranking(setting, metric) for metric in metrics}
    for label in results.study.methods:
        cells = (
            _ranked(results.cell(setting, label, metric), rankings[metric], label)
            for metric in metrics
        )
        table.add_row(*first[label], *cells)
    return table


def _ranked(cell: str, ranking: Ranking, label: str) -> Text:
    """Mark a cell. Without styles, mark only values that are significantly worse than the best."""
    style = "bold" if label in ranking.best else "underline" if label in ranking.second else ""
    return Text(f"{cell} {WORSE}" if label in ranking.worse else cell, style=style)


def _intervals(results: Results, cells: dict[str, list[str]]) -> Table:
    metrics = results.columns
    table = new_table(f"\n{results.about_intervals}", "method", *metrics, numbers=len(metrics))
    for label, own in cells.items():
        table.add_row(label, *own)
    return table


def _differences(results: Results, setting: str) -> Table:
    metrics = results.columns
    table = new_table(
        f"\n{results.about_differences(setting)}", "method", *metrics, numbers=len(metrics)
    )
    for label in results.study.others:
        table.add_row(
            label, *(results.difference_cell(setting, label, metric) for metric in metrics)
        )
    return table


def _left_behind(results: Results, setting: str, groups: list[str]) -> Table:
    metrics = {group: f"groups.{group}" for group in groups}
    header, first = _methods(results, setting, metrics.values())
    title = f"\nwho is left behind: {results.about_groups(setting)}"
    table = new_table(title, *header, *groups, numbers=len(groups), last="served worst")
    for label in results.study.methods:
        worst = results.worst_group(setting, label)
        cells = {group: results.cell(setting, label, metric) for group, metric in metrics.items()}
        marked = [
            Text(cell, style=LEFT_BEHIND if group == worst else "") for group, cell in cells.items()
        ]
        table.add_row(*first[label], *marked, worst or "–")
    return table


def _worst_clients(results: Results, setting: str) -> Table:
    """Show which client is the worst, for clients without groups."""
    title = "\nwho is left behind: the worst client, and in how many seeds"
    header, first = _methods(results, setting, ["worst_client"])
    table = new_table(title, *header, last="served worst")
    for label in results.study.methods:
        found = results.worst_clients(setting, label)
        said = (f"{name} ({count} of {found.total()})" for name, count in found.most_common(3))
        table.add_row(*first[label], ", ".join(said) or "–")
    return table


def _methods(
    results: Results, setting: str, metrics: Iterable[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the headers and cells of the first columns: the method, and its model if needed.

    The model is shown if it is not always the global one.
    """
    if models := results.models(setting, metrics):
        return ["method", "model"], {
            label: [label, models[label]] for label in results.study.methods
        }
    return ["method"], {label: [label] for label in results.study.methods}
