"""The section on how often clients took part."""

from __future__ import annotations

from statistics import fmean, median

from equipoise.report.charts import Chart
from equipoise.report.colours import palette, ranked
from equipoise.report.comparison import Comparison
from equipoise.report.html import Section, paragraph, plural, table
from equipoise.report.reading import RunRecord


def of_run(record: RunRecord) -> Section:
    """Return how often each client took part."""
    title = "Who took part how often"
    if record.sampled is None:
        why = "The run did not record which clients took part."
        return Section("sampling", title, missing=why)
    rounds = len(record.rounds)
    counts = {client: count for client, count in record.sampled.items() if client in record.groups}
    if not counts:
        return Section("sampling", title, missing="No client that took part was evaluated.")
    if set(record.sampled.values()) == {rounds}:
        clients = f"All {len(record.sampled):,} clients"
        every = f"{clients} took part in each of the {plural(rounds, 'round')}."
        return Section("sampling", title, paragraph(every))
    colours = palette(record)
    order = sorted(counts, key=counts.__getitem__)
    series = ranked(record, order, counts, colours)
    says = f"From {counts[order[0]]} to {counts[order[-1]]} of {plural(rounds, 'round')}."
    chart = Chart(
        "sampled",
        "Rounds of each client",
        says,
        "clients, fewest rounds first",
        "rounds",
        series,
        y_range=(0, 0),
    )
    rows = []
    for group in record.group_names:
        mine = [count for client, count in counts.items() if record.groups[client] == group]
        if mine:
            rows.append(
                [group, f"{len(mine)}", f"{fmean(mine):.1f}", f"{min(mine)}", f"{max(mine)}"]
            )
    by_groups = table(
        "Rounds in which a client of each group took part",
        ["group", "clients", "mean", "fewest", "most"],
        rows,
    )
    return Section("sampling", title, "", [chart], by_groups)


def compared(comparison: Comparison) -> Section:
    """Return how often clients took part."""
    title = "Who took part how often"
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
        return Section("sampling", title, missing="The runs did not record who took part.")
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
        title,
        table(comparison.title("Rounds in which a client took part"), header, rows),
    )
