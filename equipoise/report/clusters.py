"""The section on the clusters that a method found, against the groups."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from equipoise.report.comparison import Comparison
from equipoise.report.html import Cell, Section, number, paragraph, spread, table
from equipoise.report.reading import RunRecord


def of_run(record: RunRecord) -> Section:
    """Return a table of the clusters that a method found against the true groups."""
    title = "Clusters against groups"
    known = [client for client in record.clusters if client in record.groups]
    if not known:
        return Section(
            "clusters", title, missing="The method wrote no clusters into the notes of its rounds."
        )
    body = paragraph(
        "Rows are the true groups, columns the clusters that the method found, each client in the "
        f"last round in which it took part. Adjusted Rand index: {number(rand_index(record))} (1 "
        "if clusters and groups agree, about 0 by chance)."
    )
    return Section("clusters", title, body + contingency(record, known))


def rand_index(record: RunRecord) -> float:
    """Return how well clusters and groups agree."""
    from sklearn.metrics import adjusted_rand_score

    known = [client for client in record.clusters if client in record.groups]
    return float(
        adjusted_rand_score([record.groups[c] for c in known], [record.clusters[c] for c in known])
    )


def contingency(
    record: RunRecord, known: Sequence[int], caption: str = "Clients of each group in each cluster"
) -> str:
    """Return how many clients of each group are in each cluster."""
    names = [
        group
        for group in record.group_names
        if any(record.groups[client] == group for client in known)
    ]
    numbers = sorted({record.clusters[client] for client in known})
    rows: list[list[str | Cell]] = []
    for group in names:
        mine = [record.clusters[client] for client in known if record.groups[client] == group]
        cells = [
            Cell(f"{mine.count(n)}", f"heat{round(4 * mine.count(n) / len(mine))}") for n in numbers
        ]
        rows.append([group, *cells])
    return table(caption, ["group", *(f"cluster {n}" for n in numbers)], rows)


def compared(comparison: Comparison) -> Section:
    """Return clusters against groups, for the first seed of each method that has them."""
    title = "Clusters against groups"
    body = ""
    for label, records in comparison.runs.items():
        noted = [
            record
            for record in records
            if any(client in record.groups for client in record.clusters)
        ]
        if noted:
            indices = [rand_index(record) for record in noted]
            body += f"<h3>{escape(label)}</h3>"
            body += paragraph(
                f"Adjusted Rand index {spread(indices)}; the table is of seed {noted[0].seed}."
            )
            known = [client for client in noted[0].clusters if client in noted[0].groups]
            caption = comparison.title(f"Clients of each group in each cluster of {label}")
            body += contingency(noted[0], known, caption)
    if not body:
        return Section(
            "clusters", title, missing="No method wrote clusters into the notes of its rounds."
        )
    return Section("clusters", title, body)
