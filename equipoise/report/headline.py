"""The section with the main results of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from equipoise.fairness import METRICS
from equipoise.report.html import Cell, Section, answered, number, numbers, paragraph, table
from equipoise.report.reading import Part, RunRecord
from equipoise.run.few_samples import about_worst
from equipoise.run.left_out import missing_in, missing_words, rounds_left_out
from equipoise.run.records import averaged_over, further_metrics, several_groups, telling
from equipoise.text import capital, plural

# The metrics that reports show first.
FIRST = ("mean", "worst10", "sigma_clients", "worst_group", "group_gap")
# How many clients whose updates were left out are named in a line.
MOST_NAMED = 3
SAMPLING = "Who took part how often"
MODELS = {
    "global": "The global model, which all clients share.",
    "personal": "The personal models: each client is evaluated with its own.",
    "local": "The local models: as clients trained them in the round, before aggregation.",
}
WHOSE = {
    "seen": "The {split} data of each client that was part of training.",
    "unseen": "The {split} data of clients that were not part of training.",
}


def of_run(record: RunRecord) -> Section:
    """Return the main results, with an explanation."""
    lead = record.leading("seen") or record.leading("unseen")
    if lead is None:
        every = record.config.get("evaluation", {}).get("every")
        why = (
            "Nothing was evaluated (evaluation.every is 0)."
            if every == 0
            else "No client has test or validation data."
        )
        return Section("headline", "Results", missing=why)
    part = record.parts[lead]
    tiles = "".join(
        f"<div><dt>{METRICS[name].label}</dt><dd>{number(part.get(name))}</dd></div>"
        for name in telling(FIRST, [part])
        if part.get(name) is not None
    )
    served = paragraph(f"Worst: {worst(record, lead)}.")
    body = f'<dl class="tiles">{tiles}</dl>{served}{missing(record)}{left_out(record)}'
    tables = metrics_table(record) + further_table(record)
    return Section("headline", "Results", body + which(record, lead) + tables)


def missing(record: RunRecord) -> str:
    """Return lines about clients without a result, if there are any."""
    said = [missing_words(who, entry) for who, entry in missing_in(record.summary).items()]
    lines = "".join(paragraph(f"{text}.") for text in said)
    return f'<div class="caution">{lines}</div>' if lines else ""


def left_out(record: RunRecord) -> str:
    """Return a line about clients whose updates were left out of rounds, if there are any."""
    found = record.summary.get("updates_left_out")
    if not found:
        return ""
    text = f"Updates of clients were left out of rounds: {left_out_names(found)}."
    link = f'The reasons are in <a href="#sampling">{escape(SAMPLING)}</a>.'
    return f'<div class="caution"><p>{escape(text)} {link}</p></div>'


def left_out_names(found: Mapping[str, Any]) -> str:
    """Return the clients whose updates were left out most often.

    Examples
    --------
    >>> north = {"name": "north", "rounds_left_out": 2, "rounds_asked": 3}
    >>> left_out_names({"clients": 1, "worst": [north]})
    'north (2 of 3 rounds)'
    """
    named = [
        f"{entry['name']} ({rounds_left_out(entry)} rounds)"
        for entry in found["worst"][:MOST_NAMED]
    ]
    more = found["clients"] - len(named)
    return ", ".join(named) + (f" and {plural(more, 'other client')}" if more else "")


def worst(record: RunRecord, lead: Part) -> str:
    """Return the worst group, if there are several, and the worst client, with their values."""
    part, rows = record.parts[lead], record.rows_of(lead)
    sizes = {client: row["n"] for client, row in rows.items()}
    scores, client = record.values(lead), part["worst_client_id"]
    added = about_worst(client, scores, sizes, what="client", data=lead.data)
    value = "; ".join(filter(None, [number(part["worst_client"]), added]))
    said = f"client {worst_client(record, part)} ({value})"
    if not several_groups(part):
        return said
    by_group: Counter[str] = Counter()
    for row in rows.values():
        by_group[row["group"]] += row["n"]
    group = part["worst_group_name"]
    added = about_worst(group, part["groups"], by_group, what="group", data=lead.data)
    value = "; ".join(filter(None, [number(part["worst_group"]), added]))
    return f"group {group} ({value}) and {said}"


def worst_client(record: RunRecord, part: Mapping[str, Any]) -> str:
    """Return the name of the worst client."""
    return str(
        part.get(
            "worst_client_name", record.client_name(part["worst_client_id"]).removeprefix("client ")
        )
    )


def which(record: RunRecord, part: Part) -> str:
    """Return the answers to the four questions of ``docs/metrics.md``."""
    answers = {
        "Which model?": MODELS[part.model],
        "On whose data?": WHOSE[part.who].format(split=part.data),
        "Averaged how?": (
            f"Each client has one value, the mean {record.score} over its own samples. The mean is "
            f"over {plural(record.parts[part]['clients'], 'client')}: each client counts once."
        ),
        "At which round?": at_round(record),
    }
    return answered(record.score, answers)


def at_round(record: RunRecord) -> str:
    """Describe the reported round of a run."""
    summary = record.summary
    planned = record.config.get("training", {}).get("rounds", summary["rounds"])
    if "tail" in summary:
        over = capital(averaged_over(summary["tail"]["rounds"]))
        unfinished = (
            ""
            if record.finished
            else f" The run is unfinished ({summary['rounds']} of {planned} rounds)."
        )
        return f"{over} of {planned}: the mean of each client, then summarised.{unfinished}"
    if not record.finished:
        return (
            f"Round {summary['round']}, the last evaluated one; the run is unfinished "
            f"({summary['rounds']} of {planned} rounds)."
        )
    chosen = (
        "the last" if summary.get("select", "last") == "last" else "the best on validation data"
    )
    return f"Round {summary['round']} of {summary['rounds']}, {chosen}."


def metrics_table(record: RunRecord) -> str:
    """Return all metrics of all models and clients."""
    parts = record.parts
    rows: list[list[str | Cell]] = [
        [
            name,
            *numbers(part.get(name) for part in parts.values()),
            Cell(escape(METRICS[name].description), "long"),
        ]
        for name in telling(METRICS, parts.values())
        if any(part.get(name) is not None for part in parts.values())
    ]
    header = ["metric", *(part.words for part in parts), "what it is"]
    return table(
        f"All metrics of the {record.score} of clients", header, rows, texts=[len(parts) + 1]
    )


def further_table(record: RunRecord) -> str:
    """Return ``evaluation.metrics`` of all models and clients; empty without any."""
    columns, rows = further_metrics(record.summary, record.parts)
    if not rows:
        return ""
    cells = []
    for name, better, part, own in rows:
        spreads = numbers(own.get(column) for column in columns)
        cells.append([name, better, part.words, *spreads, f"{own['left_out']:,}"])
    header = ["metric", "better", "of", *columns, "clients without a value"]
    return table("Further metrics of each client", header, cells, texts=[1, 2])
