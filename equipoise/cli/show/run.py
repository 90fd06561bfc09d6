"""A finished run: its results, and which clients are left behind."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from rich.table import Table
from rich.text import Text

from equipoise.cli.show.console import LEFT_BEHIND, new_console, new_table
from equipoise.fairness import METRICS
from equipoise.federation import Federation
from equipoise.parity import FIGURES, RATES
from equipoise.run.api import Run
from equipoise.run.few_samples import about_few, about_worst
from equipoise.run.left_out import listed, missing_in, missing_words, rounds_left_out
from equipoise.run.records import averaged_over, further_metrics, task_of, telling
from equipoise.run.round_rows import seconds_of
from equipoise.study.numbers import number, numbers, style_of
from equipoise.study.runs import counted_rows
from equipoise.text import plural, size

K = TypeVar("K", bound=Hashable)

# How many clients the table of a run lists. Its report has all of them.
MOST_CLIENTS = 10


def run_document(run: Run) -> dict[str, Any]:
    """Return what ``equipoise run --json`` prints."""
    directory = str(run.directory) if run.directory else None
    return {**run.summary, "seconds": _seconds(run), "config": run.config, "directory": directory}


def _seconds(run: Run) -> float:
    return round(seconds_of(run.trainer.timings), 3)


def show_run(run: Run) -> None:
    """Show a finished run."""
    console, summary = new_console(), run.summary
    counted = "the last" if summary["select"] == "last" else "the best on validation data"
    at = f"round {summary['round']} of {summary['rounds']} ({counted})"
    if "tail" in summary:
        at = f"{averaged_over(summary['tail']['rounds'])} of {summary['rounds']}, client by client"
    console.print(f"{summary['method']} on {summary['data']}, seed {summary['seed']}, {at}")
    if ended := _ended_early(run):
        console.print(ended)
    if _parts(summary):
        console.print(_overall(summary))
        if summary.get("metrics"):
            console.print(_further(summary))
        for served in _served(run):
            console.print(served)
        for who, entry in missing_in(summary).items():
            console.print(missing_words(who, entry), style="yellow", soft_wrap=True)
        for table in _by_attribute(summary):
            console.print(table)
    else:
        console.print(_why_nothing(run.config))
    if left_out := summary.get("updates_left_out"):
        console.print(_left_out(left_out))
    for split, values in summary.get("server", {}).items():
        console.print(
            f"server, {split}: {', '.join(f'{name} {value:.4f}' for name, value in values.items())}"
        )
    moved = f"{size(summary['bytes_up'])} sent by clients, {size(summary['bytes_down'])} received"
    console.print(f"moved: {moved}; time: {_seconds(run):.1f} s")
    for what in summary.get("slowed_by", ()):
        console.print(f"slower than it could be: {what}")
    if run.directory:
        console.print(f"files: {run.directory}", soft_wrap=True)


def _ended_early(run: Run) -> str:
    """Say why a run has fewer rounds than its settings say; nothing if it has all of them."""
    made, planned = run.summary["rounds"], run.config["training"]["rounds"]
    if made >= planned:
        return ""
    why = run.summary.get("stopped") or (
        f"no better value in {plural(run.config['evaluation']['patience'], 'evaluation')} "
        "(evaluation.patience)"
    )
    return f"ended after {made} of {planned} rounds: {why}"


def _left_out(found: dict[str, Any]) -> Table:
    """Show the clients whose updates were left out of rounds."""
    title = f"\nupdates left out of rounds: {listed(found)}"
    table = new_table(title, "client", "rounds", last="last reason")
    for entry in found["worst"]:
        table.add_row(entry["name"], rounds_left_out(entry), entry["reason"])
    return table


def _why_nothing(config: dict[str, Any]) -> str:
    """Return why there are no results."""
    if config["evaluation"]["every"] == 0:
        return "nothing was evaluated (evaluation.every is 0)"
    splits = list(config["data"]["splits"])
    return f"no results: no client has test or validation data (data.splits is {splits})"


def _parts(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results by model and clients, on test data or else on validation data.

    Validation data are used for seen clients without test data.
    """
    tested, validated = (
        {
            f"{model}, {who}": part
            for model, whose in summary.get(key, {}).items()
            for who, part in whose.items()
        }
        for key in ("results", "validation")  # runs of earlier releases have only the first
    )
    if any(_of_seen(label) for label in tested):
        return tested
    return tested | {
        f"{label}, validation": part for label, part in validated.items() if _of_seen(label)
    }


def _of_seen(label: str) -> bool:
    return "seen" in label.split(", ")


def _overall(summary: dict[str, Any]) -> Table:
    parts = _parts(summary)
    title = f"\n{summary['score']} on each client's test split"
    table = new_table(title, "metric", *parts, numbers=len(parts), last="what it is")
    for name in telling(METRICS, parts.values()):
        description = Text(METRICS[name].description, style="dim")
        table.add_row(name, *numbers(part.get(name) for part in parts.values()), description)
    return table


def _further(summary: dict[str, Any]) -> Table:
    """Show ``evaluation.metrics``, one row for each metric and model."""
    columns, rows = further_metrics(summary, _parts(summary))
    table = new_table(
        "\nfurther metrics of each client",
        "metric",
        "better",
        "of",
        *columns,
        "left out",
        numbers=len(columns) + 1,
    )
    for name, better, label, own in rows:
        spreads = numbers(own.get(column) for column in columns)
        table.add_row(name, better, label, *spreads, str(own["left_out"]))
    return table


def _served(run: Run) -> Iterator[Table | str]:
    """Show the groups, or the clients if all are in one group; nothing for a single client."""
    federation, parts = run.trainer.federation, _parts(run.summary)
    # Clients use their personal models or the global one in the end, not local ones.
    leading = max(reversed(parts), key=lambda part: (_of_seen(part), not part.startswith("local")))
    data = "validation" if leading.endswith("validation") else "test"
    sizes = _sizes(federation, data, seen=_of_seen(leading))
    if len(federation.group_names) > 1:
        yield _by_group(federation, parts, leading, sizes, data)
    else:
        scores = _by_client(run, parts)
        if len(scores[leading]) < 2:
            return
        yield _worst_clients(run, scores, leading, sizes, data)
    if said := about_few(sizes.values(), data):
        yield said


def _sizes(federation: Federation, data: str, *, seen: bool) -> dict[int, int]:
    """Return the numbers of samples of the seen or unseen clients that have any."""
    counts = federation.split("val" if data == "validation" else data).sizes
    return {
        int(client): int(counts[client])
        for client in np.flatnonzero((federation.unseen != seen) & (counts > 0))
    }


def _by_group(
    federation: Federation,
    parts: Mapping[str, Mapping[str, Any]],
    leading: str,
    sizes: Mapping[int, int],
    data: str,
) -> Table:
    scores = {part: summary["groups"] for part, summary in parts.items()}
    names = federation.group_names
    whose = federation.unseen != _of_seen(leading)
    every, counted = (
        np.bincount(federation.groups[clients], minlength=len(names)).tolist()
        for clients in (whose, list(sizes))
    )
    samples = dict.fromkeys(names, 0)
    for client, count in sizes.items():
        samples[names[federation.groups[client]]] += count
    groups = {
        name: (name, f"{some} of {of}" if some < of else f"{of}", str(samples[name]))
        for name, some, of in zip(names, counted, every, strict=True)
    }
    worst = parts[leading]["worst_group_name"]
    title = "mean over the clients of each group"
    added = about_worst(worst, scores[leading], samples, what="group", data=data)
    clients = f"{'seen' if _of_seen(leading) else 'unseen'} clients"
    columns = ("group", "clients" if whose.all() else clients, f"{data} samples")
    return _bars(title, columns, groups, scores, leading, worst, added)


def _worst_clients(
    run: Run,
    scores: Mapping[str, Mapping[int, float]],
    leading: str,
    sizes: Mapping[int, int],
    data: str,
) -> Table:
    own = scores[leading]
    order = sorted(own, key=own.__getitem__, reverse=not task_of(run.summary).higher_is_better)
    rows = {
        client: (run.trainer.federation.client_name(client), str(sizes[client]))
        for client in order[:MOST_CLIENTS]
    }
    title = (
        "clients, the worst first"
        if len(rows) == len(own)
        else f"the worst {MOST_CLIENTS} of {len(own)} clients"
    )
    added = about_worst(order[0], own, sizes, what="client", data=data)
    columns = ("client", f"{data} samples")
    return _bars(title, columns, rows, scores, leading, order[0], added)


def _by_client(run: Run, parts: Iterable[str]) -> dict[str, dict[int, float]]:
    """Return the scores of clients by part of the results."""
    score = run.summary["score"]
    scores: dict[str, dict[int, float]] = {part: {} for part in parts}
    for row in counted_rows(run.directory, run.summary) if run.directory else ():
        part = f"{row['model']}, {'unseen' if row['unseen'] else 'seen'}"
        part += ", validation" if row["split"] == "val" else ""
        if part in scores and score in row:
            scores[part][row["client"]] = row[score]
    return scores


def _bars(
    title: str,
    columns: tuple[str, ...],
    rows: Mapping[K, tuple[str, ...]],
    scores: Mapping[str, Mapping[K, float | None]],
    leading: str,
    worst: K,
    added: str,
) -> Table:
    """Show the scores of groups or clients, with bars for the leading part of the results.

    ``added`` is what to say about the worst one.
    """
    others = [part for part in scores if part != leading and rows.keys() & scores[part].keys()]
    table = new_table(
        f"\nwho is left behind: {title}",
        *columns,
        *others,
        leading,
        numbers=len(others) + len(columns),
        last="",
    )
    top = max((scores[leading].get(key) or 0 for key in rows), default=0) or 1.0
    shown = style_of(score for own in scores.values() for score in own.values())
    mark = f" ← served worst{f' ({added})' if added else ''}"
    for key, first in rows.items():
        score = scores[leading].get(key)
        bar = "█" * round(24 * (score or 0) / top) + (mark if key == worst else "")
        others_own = (number(scores[part].get(key), shown) for part in others)
        style = LEFT_BEHIND if key == worst else None
        table.add_row(*first, *others_own, number(score, shown), bar, style=style)
    return table


_WITHHELD = {
    "withheld": "samples whose counts do not leave their client, because they are few",
    "without_targets": "further samples that are not scored, because few of them have one of the "
    "targets (evaluation.min_cell)",
}


def _by_attribute(summary: dict[str, Any]) -> Iterator[Table]:
    """Show rates by value of attributes, and then differences between values."""
    parts = {
        label: part["attributes"] for label, part in _parts(summary).items() if "attributes" in part
    }
    score = summary["score"]
    for name in dict.fromkeys(name for part in parts.values() for name in part):
        fewer = any(part[name]["without_targets"] for part in parts.values() if name in part)
        counts = ("samples", "scored") if fewer else ("samples",)
        every = [
            rates
            for part in parts.values()
            if name in part
            for rates in part[name]["values"].values()
        ]
        # A task without a positive class has no rates.
        scores = [score, *(rate for rate in RATES if any(one[rate] is not None for one in every))]
        columns = (*counts, *scores)
        table = new_table(
            f"\nby {name}: samples of all clients together",
            name,
            "of",
            *columns,
            numbers=len(columns),
        )
        for label, part in parts.items():
            found = part.get(name, {"values": {}, "worst_value": None})
            for value, rates in found["values"].items():
                worst = LEFT_BEHIND if value == found["worst_value"] else None
                sizes = [str(rates["n"]), str(rates.get("scored", 0))][: len(counts)]
                own = (number(rates[column]) for column in scores)
                table.add_row(value, label, *sizes, *own, style=worst)
        yield table
    if parts:
        compared = {
            f"{name}: {label}": found
            for label, part in parts.items()
            for name, found in part.items()
        }
        table = new_table(
            "\nbetween values", "figure", *compared, numbers=len(compared), last="what it is"
        )
        for figure, said in FIGURES.items():
            values = [found[figure] for found in compared.values()]
            if any(value is not None for value in values):
                table.add_row(figure, *map(number, values), Text(said, style="dim"))
        for count, said in _WITHHELD.items():
            table.add_row(
                count,
                *(str(found[count]) for found in compared.values()),
                Text(said, style="dim"),
            )
        yield table
