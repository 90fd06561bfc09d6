"""The section on bytes and seconds."""

from __future__ import annotations

from statistics import fmean

from equipoise.report.charts import Chart, Series
from equipoise.report.comparison import Comparison
from equipoise.report.html import Section, paragraph, table
from equipoise.report.reading import RunRecord
from equipoise.run.records import Row
from equipoise.run.round_rows import BESIDE
from equipoise.text import size

_LAPS = {
    "train": "local training",
    "guard": "checks by the guard",
    "combine": "aggregation",
    "evaluate": "evaluation",
    "callbacks": "callbacks",
    "wait": "waiting for evaluations of earlier rounds",
    BESIDE: "evaluation, during training",
}


def of_run(record: RunRecord) -> Section:
    """Return bytes and seconds."""
    title = "Bytes and seconds"
    summary, rounds = record.summary, len(record.rounds)
    if not rounds:
        return Section("costs", title, missing="The run has no finished round.")
    rows = [
        ["sent by clients", size(summary["bytes_up"]), size(summary["bytes_up"] / rounds)],
        ["received by clients", size(summary["bytes_down"]), size(summary["bytes_down"] / rounds)],
    ]
    laps = {name: [row[name] for row in record.timings if name in row] for name in _LAPS}
    for name, label in _LAPS.items():
        if laps[name]:
            rows.append([label, f"{sum(laps[name]):.2f} s", f"{fmean(laps[name]):.3f} s"])
    after = table("In total and for each round", ["what", "total", "each round"], rows)
    if "messages" in record.rounds[0]:
        messages, evaluations = (
            fmean(row[name] / _asked(row) for row in record.rounds)
            for name in ("messages", "evaluations")
        )
        after += paragraph(
            f"A client that is asked gets {messages:.1f} messages per round, and evaluates models "
            f"on its splits {evaluations:.1f} times per round for the method. Evaluation for this "
            "report is not included."
        )
    else:
        after += paragraph("The run was made by a release that did not count messages.")
    for what in _slowed_by(record):
        after += paragraph(f"The run was slower than it could be: {what}.")
    series = [
        Series(name, [row["round"] for row in record.timings if name in row], values, hue=hue)
        for hue, (name, values) in enumerate(laps.items())
        if values
    ]
    if not series:
        return Section("costs", title, after + paragraph("The run has no timings."))
    device = record.config["resolved"].get("device", "an unknown device")
    says = f"{record.seconds:.1f} s in total, on {device}."
    chart = Chart(
        "seconds", "Seconds of each round", says, "round", "seconds", series, y_range=(0.0, 0.0)
    )
    return Section("costs", title, after, [chart])


def _asked(row: Row) -> int:
    """Return how many clients were asked in a round, also those whose updates were left out."""
    return int(row["cohort"]) + len(row.get("left_out", ()))


def compared(comparison: Comparison) -> Section:
    """Return bytes and seconds of all methods."""
    title = "Bytes and seconds"
    rows, slowed = [], []
    for label, records in comparison.runs.items():
        moved = [fmean(r.summary[name] for r in records) for name in ("bytes_up", "bytes_down")]
        seconds = [record.seconds for record in records if record.seconds is not None]
        rounds = fmean(len(record.rounds) for record in records)
        taken = f"{fmean(seconds):.2f}" if seconds else "–"
        each = f"{fmean(seconds) / rounds:.3f}" if seconds and rounds else "–"
        rows.append([label, f"{rounds:g}", *map(size, moved), taken, each])
        slowed += [f"{label}: {what}" for record in records for what in _slowed_by(record)]
    header = ["method", "rounds", "sent by clients", "received", "seconds", "seconds per round"]
    body = paragraph("Means over seeds. Seconds include evaluation for this report, bytes do not.")
    body += table(comparison.title("Cost of a run"), header, rows)
    if slowed:
        told = "; ".join(dict.fromkeys(slowed))
        body += paragraph(f"Some runs were slower than they could be. {told}.")
    return Section("costs", title, body)


def _slowed_by(record: RunRecord) -> list[str]:
    """List what made a run on a GPU slower than it could be."""
    return list(record.summary.get("slowed_by", ()))
