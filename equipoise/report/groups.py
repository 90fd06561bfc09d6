"""The section on groups over rounds: their means and the gaps between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.fairness import METRICS
from equipoise.report.charts import Chart, Series
from equipoise.report.colours import Palette, group_lines, palette
from equipoise.report.comparison import Comparison
from equipoise.report.html import Section, number, paragraph
from equipoise.report.progress import over_rounds
from equipoise.report.reading import Part, RunRecord
from equipoise.run.left_out import groups_with_fewer, missing_in
from equipoise.run.records import several_groups


def of_run(record: RunRecord) -> Section:
    """Return means of groups and the gaps between them over rounds."""
    title = "Groups over rounds"
    charts, single, body = [], True, ""
    for who in ("seen", "unseen"):
        part = record.leading(who)
        of_part = record.history.get(part, {}) if part else {}
        if part is None or not of_part or not any(map(several_groups, of_part.values())):
            continue
        single = False
        colours = palette(record)
        charts += [group_means(record, part, of_part, colours), group_gaps(record, part, of_part)]
        if fewer := groups_with_fewer([missing_in(record.summary).get(who)]):
            body += paragraph(f"Means are over the {who} clients with a result{fewer}.")
    if single:
        why = (
            "All evaluated clients are in one group, so there are no gaps."
            if record.history
            else "No round was evaluated."
        )
        return Section("groups", title, missing=why)
    return Section("groups", title, body, charts)


def group_means(
    record: RunRecord, part: Part, of_part: Mapping[int, Mapping[str, Any]], colours: Palette
) -> Chart:
    """Return the mean of each group over rounds."""
    means = {round_: summary["groups"] for round_, summary in of_part.items()}
    series = group_lines(means, colours)
    last = of_part[max(of_part)]
    says = (
        f"At round {max(of_part)} the best group is {last['best_group_name']} "
        f"({number(last['best_group'])}), the worst {last['worst_group_name']} "
        f"({number(last['worst_group'])})."
    )
    title = f"Mean of each group: {part.words}"
    return Chart(f"groups-{part.model}-{part.who}", title, says, "round", record.score, series)


def group_gaps(record: RunRecord, part: Part, of_part: Mapping[int, Mapping[str, Any]]) -> Chart:
    """Return the gap between groups and σ over groups, over rounds."""
    numbers = list(of_part)
    labels = {
        "group_gap": "gap between the best and the worst group",
        "sigma_groups": METRICS["sigma_groups"].label,
    }
    series = [
        Series(label, numbers, [of_part[n][name] for n in numbers], hue=hue, dashed=bool(hue))
        for hue, (name, label) in enumerate(labels.items())
    ]
    says = f"The gap is {number(of_part[numbers[0]]['group_gap'])} at round {numbers[0]} and "
    says += f"{number(of_part[numbers[-1]]['group_gap'])} at round {numbers[-1]}."
    title = f"Gaps between groups: {part.words}"
    name = f"gaps-{part.model}-{part.who}"
    return Chart(
        name, title, says, "round", f"difference of {record.score}", series, y_range=(0.0, 0.0)
    )


def compared(comparison: Comparison) -> Section:
    """Return the gaps between groups of all methods over rounds."""
    title = "Gaps between groups over rounds"
    several = [who for who in comparison.whose if comparison.several_groups(who)]
    if not several:
        return Section(
            "groups", title, missing="All evaluated clients are in one group, so there are no gaps."
        )
    charts = [
        chart
        for who in several
        for metric in ("group_gap", "sigma_groups")
        if (chart := over_rounds(comparison, who, metric))
    ]
    return Section("groups", title, "", charts)
