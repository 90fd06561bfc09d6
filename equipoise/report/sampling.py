"""The section on how often clients took part."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

from equipoise.report.charts import Chart
from equipoise.report.colours import palette, ranked
from equipoise.report.comparison import Comparison
from equipoise.report.headline import SAMPLING
from equipoise.report.html import Section, paragraph, table
from equipoise.report.reading import RunRecord
from equipoise.run.left_out import listed, rounds_left_out
from equipoise.text import plural


def of_run(record: RunRecord) -> Section:
    """Return how often each client took part, and whose updates were left out."""
    left_out = left_out_table(record)
    missing, body, charts, after = "", "", [], ""
    rounds = len(record.rounds)
    sampled = record.sampled or {}
    counts = {client: count for client, count in sampled.items() if client in record.groups}
    if record.sampled is None:
        missing = "The run did not record which clients took part."
    elif not counts:
        missing = "No client that took part was evaluated."
    elif set(sampled.values()) == {rounds}:
        every = f"All {len(sampled):,} clients took part in each of the {plural(rounds, 'round')}."
        body = paragraph(every)
    else:
        charts, after = [chart_of(record, counts)], group_table(record, counts)
    if missing and not left_out:
        return Section("sampling", SAMPLING, missing=missing)
    said = paragraph(missing) if missing else ""
    return Section("sampling", SAMPLING, said + body + left_out, charts, after)


def left_out_table(record: RunRecord) -> str:
    """Return the clients whose updates were left out of rounds as a table; empty without any."""
    found = record.summary.get("updates_left_out")
    if not found:
        return ""
    about = paragraph(
        "The server did not use these updates: the model was trained without the data of the "
        "client in these rounds. They do not count as rounds in which the client took part."
    )
    rows = [[entry["name"], rounds_left_out(entry), entry["reason"]] for entry in found["worst"]]
    header = ["client", "rounds left out", "last reason"]
    return about + table(f"Updates left out: {listed(found)}", header, rows, texts=[2])


def chart_of(record: RunRecord, counts: Mapping[int, int]) -> Chart:
    """Return a chart of the number of rounds of each client."""
    order = sorted(counts, key=counts.__getitem__)
    series = ranked(record, order, counts, palette(record))
    rounds = plural(len(record.rounds), "round")
    return Chart(
        "sampled",
        "Rounds of each client",
        f"From {counts[order[0]]} to {counts[order[-1]]} of {rounds}.",
        "clients, fewest rounds first",
        "rounds",
        series,
        y_range=(0, 0),
    )


def group_table(record: RunRecord, counts: Mapping[int, int]) -> str:
    """Return how often clients of each group took part, as a table."""
    rows = []
    for group in record.group_names:
        mine = [count for client, count in counts.items() if record.groups[client] == group]
        if mine:
            rows.append(
                [group, f"{len(mine)}", f"{fmean(mine):.1f}", f"{min(mine)}", f"{max(mine)}"]
            )
    return table(
        "Rounds in which a client of each group took part",
        ["group", "clients", "mean", "fewest", "most"],
        rows,
    )


def compared(comparison: Comparison) -> Section:
    """Return how often clients took part."""
    rows = []
    for label, records in comparison.runs.items():
        for record in records:
            if record.sampled:
                counts = list(record.sampled.values())
                numbers = (
                    f"{min(counts)}",
                    f"{median(counts):g}",
                    f"{max(counts)}",
                    f"{counts.count(0)}",
                )
                rows.append(
                    [label, f"{record.seed}", f"{len(record.rounds)}", f"{len(counts)}", *numbers]
                )
    if not rows:
        return Section("sampling", SAMPLING, missing="The runs did not record who took part.")
    header = [
        "method",
        "seed",
        "rounds",
        "clients",
        "fewest",
        "median",
        "most",
        "clients never chosen",
    ]
    return Section(
        "sampling",
        SAMPLING,
        table(comparison.title("Rounds in which a client took part"), header, rows),
    )
