"""The section on mean, worst tenth and σ over rounds."""

from __future__ import annotations

from statistics import fmean, stdev

from equipoise.fairness import METRICS
from equipoise.report.charts import Chart, Series
from equipoise.report.comparison import CRITERIA, Comparison
from equipoise.report.html import Section, number, paragraph
from equipoise.report.reading import RunRecord
from equipoise.report.svg import HUES
from equipoise.text import capital

HUE = {"mean": 0, "worst10": 1, "sigma_clients": 2}
# Bands of more methods than this hide each other.
MOST_BANDS = 6


def of_run(record: RunRecord) -> Section:
    """Return mean, worst tenth and σ over rounds."""
    title = "Over rounds: mean, worst tenth and σ"
    charts = []
    for part in record.parts:
        of_part = record.history.get(part, {})
        if not of_part:
            continue
        numbers = list(of_part)
        series = [
            Series(
                METRICS[name].label,
                numbers,
                [of_part[n][name] for n in numbers],
                hue=hue,
                dashed=name == "sigma_clients",
            )
            for name, hue in HUE.items()
        ]
        last = of_part[numbers[-1]]
        says = (
            f"At round {numbers[-1]}: "
            + ", ".join(f"{METRICS[name].label} {number(last[name])}" for name in HUE)
            + "."
        )
        name = f"progress-{part.model}-{part.who}"
        charts.append(Chart(name, capital(part.words), says, "round", record.score, series))
    if not charts:
        return Section("progress", title, missing="No round was evaluated.")
    body = paragraph("A lower σ is better only where mean and worst tenth do not fall with it.")
    return Section("progress", title, body, charts)


def compared(comparison: Comparison) -> Section:
    """Return mean, worst tenth and σ of all methods over rounds."""
    title = "Over rounds: mean, worst tenth and σ"
    charts = [
        chart
        for who in comparison.whose
        for metric in CRITERIA
        if (chart := over_rounds(comparison, who, metric))
    ]
    if not charts:
        return Section("progress", title, missing="The journals have no evaluated rounds.")
    return Section("progress", title, "", charts)


def over_rounds(comparison: Comparison, who: str, metric: str) -> Chart | None:
    """Return a metric of all methods over rounds: the mean over seeds, and its spread as a band."""
    series = []
    for position, (name, records) in enumerate(comparison.runs.items()):
        curves = [
            {round_: summary[metric] for round_, summary in record.history.get(part, {}).items()}
            for record in records
            if (part := record.leading(who))
        ]
        common = sorted(set.intersection(*map(set, curves))) if curves else []
        if not common:
            continue
        at = [[curve[round_] for curve in curves] for round_ in common]
        means = [fmean(values) for values in at]
        band = len(curves) > 1 and len(comparison.runs) <= MOST_BANDS
        deviations = [stdev(values) for values in at] if band else []
        series.append(
            Series(
                name,
                common,
                means,
                hue=position % HUES,
                dashed=position >= HUES,
                low=[mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
                if band
                else (),
                high=[mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
                if band
                else (),
            )
        )
    if not series:
        return None
    banded = " Bands: ± standard deviation over seeds." if any(len(s.low) for s in series) else ""
    ends = ", ".join(f"{s.label} {number(s.y[-1])}" for s in series)
    label = METRICS[metric].label
    title = f"{capital(label)}, {who} clients"
    name = f"rounds-{metric.replace('_', '-')}-{who}"
    return Chart(name, title, f"At the end: {ends}.{banded}", "round", label, series)
