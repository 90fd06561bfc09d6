"""The section on the weights of clients against their losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import numpy as np

from equipoise.report.charts import Chart, Series
from equipoise.report.colours import Palette, group_lines, palette
from equipoise.report.comparison import Comparison
from equipoise.report.html import Section, number, paragraph, slug
from equipoise.report.reading import RunRecord, Weighed

# Charts of weights are drawn for at most this number of methods.
MOST_WEIGHTS = 6


def of_run(record: RunRecord, before: str = "") -> Section:
    """Return the weights of clients against their losses.

    ``before`` makes the names of charts unique.
    """
    title = "Weights against losses"
    if not record.weighed:
        return Section(
            "weights", title, missing="The method wrote no weights into the notes of its rounds."
        )
    colours = palette(record)
    shares = {weighed.round: equal_shares(weighed) for weighed in record.weighed}
    charts = [
        Chart(
            f"{before}weights-by-group",
            "Weight of a client of each group",
            "Mean over the clients that took part; 1 is an equal share.",
            "round",
            "weight × size of the cohort",
            by_group(record, shares, colours),
        )
    ]
    if record.losses and record.loss_part:
        series = group_lines(record.losses, colours)
        says = f"Mean over the clients of each group: {record.loss_part.words}."
        charts.append(
            Chart(f"{before}losses-by-group", "Loss of each group", says, "round", "loss", series)
        )
    charts += correlations(record, shares, before)
    body = paragraph(
        "Fair aggregations raise the weights of clients whose losses, or gaps, are high."
    )
    return Section("weights", title, body, charts)


def equal_shares(weighed: Weighed) -> dict[int, float]:
    """Return weights as multiples of an equal share.

    Examples
    --------
    >>> equal_shares(Weighed(1, {4: 0.25, 7: 0.75}, {}))
    {4: 0.5, 7: 1.5}
    """
    total = sum(weighed.weights.values())
    count = len(weighed.weights)
    return (
        {client: weight * count / total for client, weight in weighed.weights.items()}
        if total
        else {}
    )


def by_group(
    record: RunRecord, values: Mapping[int, Mapping[int, float]], colours: Palette
) -> list[Series]:
    """Return the mean of each group over rounds, of the clients that have a value."""
    points: dict[int, dict[int, float]] = {hue: {} for hue in colours.labels}
    for round_, of_round in values.items():
        known = [client for client in of_round if client in record.groups]
        for hue, members in colours.split(known, record.groups).items():
            points[hue][round_] = fmean(of_round[client] for client in members)
    return [
        Series(colours.labels[hue], list(mine), list(mine.values()), hue=hue)
        for hue, mine in points.items()
        if mine
    ]


def correlations(
    record: RunRecord, shares: Mapping[int, Mapping[int, float]], before: str
) -> list[Chart]:
    """Return the correlation of weights and losses over rounds in which both vary."""
    found = {}
    for weighed in record.weighed:
        both = [client for client in shares[weighed.round] if client in weighed.losses]
        pairs = np.array(
            [[shares[weighed.round][client], weighed.losses[client]] for client in both]
        )
        if len(both) > 2 and (np.ptp(pairs, axis=0) > 1e-12).all():
            found[weighed.round] = float(np.corrcoef(pairs.T)[0, 1])
    if not found:
        return []
    series = [Series("ρ", list(found), list(found.values()))]
    says = (
        f"Pearson's ρ over the clients of each cohort: on average {number(fmean(found.values()))}."
    )
    title = "Correlation of weight and loss"
    return [
        Chart(f"{before}weights-and-losses", title, says, "round", "ρ", series, y_range=(-1.0, 1.0))
    ]


def compared(comparison: Comparison) -> Section:
    """Return the section on the weights of methods, for their first seed."""
    title = "Weights against losses"
    noted = {
        label: next((r for r in runs if r.weighed), None) for label, runs in comparison.runs.items()
    }
    there = {label: record for label, record in noted.items() if record}
    if not there:
        return Section(
            "weights", title, missing="No method wrote weights into the notes of its rounds."
        )
    charts = []
    for label, record in list(there.items())[:MOST_WEIGHTS]:
        own = of_run(record, before=f"{slug(label)}-").charts
        charts += [
            replace(chart, title=f"{label}: {chart.title[0].lower()}{chart.title[1:]}")
            for chart in own
        ]
    shown = list(there)[:MOST_WEIGHTS]
    body = paragraph(f"One run of each method that records weights: {', '.join(shown)}.")
    if len(there) > len(shown):
        body += paragraph(
            f"Not drawn: {', '.join(list(there)[MOST_WEIGHTS:])}. A report on one of their runs "
            "shows them."
        )
    return Section("weights", title, body, charts)
