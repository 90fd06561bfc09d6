"""The sections of a report, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from equipoise.report import (
    attributes,
    clients,
    clusters,
    costs,
    groups,
    headline,
    progress,
    reproduce,
    results,
    sampling,
    weights,
)
from equipoise.report.comparison import Comparison
from equipoise.report.html import Section
from equipoise.report.reading import RunRecord


def sections_of_run(record: RunRecord) -> list[Section]:
    """Return the sections of a run, in their order."""
    return [
        headline.of_run(record),
        clients.of_run(record),
        progress.of_run(record),
        groups.of_run(record),
        *attributes.of_run(record),
        weights.of_run(record),
        sampling.of_run(record),
        clusters.of_run(record),
        costs.of_run(record),
        reproduce.of_runs([record]),
    ]


def sections_compared(comparisons: Sequence[Comparison]) -> list[Section]:
    """Return the sections of a comparison for all settings."""
    made = []
    for comparison in comparisons:
        own = [
            results.compared(comparison),
            clients.compared(comparison),
            progress.compared(comparison),
            groups.compared(comparison),
            *attributes.compared(comparison),
            weights.compared(comparison),
            sampling.compared(comparison),
            clusters.compared(comparison),
            costs.compared(comparison),
        ]
        made += [_placed(section, comparison) for section in own]
    records = [
        record for comparison in comparisons for runs in comparison.runs.values() for record in runs
    ]
    return [*made, reproduce.of_runs(records)]


def _placed(section: Section, comparison: Comparison) -> Section:
    charts = [replace(chart, name=chart.name + comparison.suffix) for chart in section.charts]
    title = comparison.title(section.title)
    return replace(section, name=section.name + comparison.suffix, title=title, charts=charts)
