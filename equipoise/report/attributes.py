"""The section on attributes of samples: rates by value, demographic parity and equalised odds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from statistics import fmean
from typing import Any

from equipoise.parity import FIGURES, RATES
from equipoise.report.charts import Chart, Series
from equipoise.report.comparison import Comparison
from equipoise.report.html import (
    Cell,
    Section,
    details,
    number,
    paragraph,
    slug,
    spread,
    table,
)
from equipoise.report.reading import Part, RunRecord
from equipoise.text import capital, plural

_TITLE = "Attributes of samples: rates and parity by value"
# With more values, the table of all clients by value is left out.
MOST_COLUMNS = 10
_HEADERS = {"selection_rate": "selection rate", "tpr": "TPR", "fpr": "FPR"}
_OVER_ROUNDS = {
    "score_difference": "difference of the score",
    "demographic_parity_difference": "demographic parity difference",
    "equalized_odds_difference": "equalised odds difference",
}
_INTRO = "All samples of the clients together, by the values of their attributes."
_RATES = (
    "The selection rate is the share of positive predictions. TPR and FPR are the shares of "
    "positive predictions among samples with a positive and with a negative target. Differences "
    "should be 0, ratios 1."
)
_SCORES = "Differences should be 0."
_WITHOUT_POSITIVE = (
    "No class counts as positive. If evaluation.positive names one, there are also selection "
    "rates, TPR and FPR, with their differences and ratios."
)


def of_run(record: RunRecord) -> list[Section]:
    """Return the section of one run; none if its data have no attributes."""
    body, charts = "", []
    shown: list[Mapping[str, Any]] = []
    for who in ("seen", "unseen"):
        part = record.leading(who)
        found = record.parts[part].get("attributes", {}) if part else {}
        if part is None or not found:
            continue
        shown += found.values()
        for name, of in found.items():
            body += _rates_table(record, part, name, of)
            charts.append(_over_rounds(record, part, name))
        body += _figures_table(part, found) + _withheld(found)
        for name, of in found.items():
            body += _within_clients(record, part, name, of)
    if not body:
        return []
    intro = _intro(shown, labels=record.task.labels)
    return [Section("attributes", _TITLE, intro + body, [chart for chart in charts if chart])]


def _intro(found: Iterable[Mapping[str, Any]], *, labels: bool) -> str:
    """Explain what is shown of some attributes; ``labels`` is whether the task has classes."""
    values = [value for of in found for value in of["values"].values()]
    if any(value[rate] is not None for value in values for rate in RATES):
        return paragraph(f"{_INTRO} {_RATES}")
    # Without a positive class, nothing is counted as selected.
    without_positive = labels and values and not any("selected" in value for value in values)
    said = (_INTRO, _SCORES, _WITHOUT_POSITIVE) if without_positive else (_INTRO, _SCORES)
    return paragraph(" ".join(said))


def _rates_table(record: RunRecord, part: Part, name: str, of: Mapping[str, Any]) -> str:
    rates = (
        record.score,
        *(
            rate
            for rate in RATES
            if any(value[rate] is not None for value in of["values"].values())
        ),
    )
    rows = []
    for value, rate in of["values"].items():
        scored = [f"{rate.get('scored', 0):,}"] if of["without_targets"] else []
        numbers = (number(rate[column]) for column in rates)
        rows.append([value, f"{rate['n']:,}", *scored, *numbers])
    counts = ["samples", "scored"] if of["without_targets"] else ["samples"]
    header = [name, *counts, *(_HEADERS.get(rate, rate) for rate in rates)]
    return table(f"By {name}: {part.words}", header, rows)


def _figures_table(part: Part, found: Mapping[str, Any]) -> str:
    rows: list[list[str | Cell]] = [
        [figure, *(number(of[figure]) for of in found.values()), Cell(escape(said), "long")]
        for figure, said in FIGURES.items()
        if any(of[figure] is not None for of in found.values())
    ]
    rows.append(
        [
            "worst value",
            *(str(of["worst_value"] or "–") for of in found.values()),
            Cell("the value with the worst score", "long"),
        ]
    )
    return table(
        f"Between values: {part.words}",
        ["figure", *found, "what it is"],
        rows,
        texts=[len(found) + 1],
    )


def _within_clients(record: RunRecord, part: Part, name: str, of: Mapping[str, Any]) -> str:
    """Return the differences within clients, and the scores of all clients by value."""
    body = ""
    # Runs of earlier releases may lack them.
    over = {
        figure: found
        for figure, found in of.get("over_clients", {}).items()
        if found.get("worst") is not None
    }
    if over:
        rows = [
            [
                figure,
                number(found["mean"]),
                number(found["worst"]),
                record.client_name(found["worst_client_id"]),
                f"{found['clients']:,}",
            ]
            for figure, found in over.items()
        ]
        header = ["figure", "mean over clients", "worst client", "which", "clients with a value"]
        body = table(f"By {name} within each client: {part.words}", header, rows, texts=[3])
    values = list(of["values"])
    if len(values) <= MOST_COLUMNS:
        rows = []
        for client, row in record.rows_of(part).items():
            own = row.get("attributes", {}).get(name, {}).get("values", {})
            cells = (
                f"{number(own[value].get(record.score))} ({own[value]['n']:,})"
                if value in own
                else "–"
                for value in values
            )
            rows.append([record.client_name(client), *cells])
        caption = f"{capital(record.score)} (samples) of each client by {name}: {part.words}"
        all_clients = table(caption, ["client", *values], rows)
        body += details(f"Table of all {part.who} clients by {name}", all_clients)
    return body


def _withheld(found: Mapping[str, Any]) -> str:
    """Describe which counts are withheld."""
    said = [
        f"{name}: {plural(of['withheld'], 'sample')} of {plural(of['withheld_clients'], 'client')} "
        f"not counted, {of['without_targets']:,} more without score, TPR and FPR"
        for name, of in found.items()
        if of["withheld"] or of["without_targets"]
    ]
    return (
        paragraph(
            f"Counts of small cells are withheld by clients. {'; '.join(said)}. Scores and rates "
            "are those of the other samples; – means that there are none."
        )
        if said
        else ""
    )


def _over_rounds(record: RunRecord, part: Part, name: str) -> Chart | None:
    """Return the differences between values over rounds."""
    history = {
        round_: summary["attributes"][name]
        for round_, summary in record.history.get(part, {}).items()
        if name in summary.get("attributes", {})
    }
    series = []
    for hue, (figure, label) in enumerate(_OVER_ROUNDS.items()):
        points = {round_: of[figure] for round_, of in history.items() if of[figure] is not None}
        if points:
            series.append(
                Series(label, list(points), list(points.values()), hue=hue, dashed=not hue)
            )
    if not series:
        return None
    says = (
        ". ".join(
            f"At round {line.x[-1]:g} the {line.label} is {number(line.y[-1])}" for line in series
        )
        + "."
    )
    chart = f"attributes-{slug(name)}-{part.model}-{part.who}"
    return Chart(
        chart,
        f"Differences by {name}: {part.words}",
        says,
        "round",
        "difference",
        series,
        y_range=(0.0, 0.0),
    )


def compared(comparison: Comparison) -> list[Section]:
    """Return the section of several methods; none if their data have no attributes."""
    body, charts = "", []
    shown: list[Mapping[str, Any]] = []
    for who in comparison.whose:
        for name in _names(comparison, who):
            shown += _found(comparison, who, name)
            figures = [
                figure
                for figure in FIGURES
                if any(_values(comparison, label, who, name, figure) for label in comparison.runs)
            ]
            rows = [
                [
                    label,
                    *(
                        spread(_values(comparison, label, who, name, figure))
                        for figure in ("worst", *figures)
                    ),
                ]
                for label in comparison.runs
            ]
            header = [f"{name}, {who}", "score of the worst value", *figures]
            body += table(f"Between values of {name}: {who} clients", header, rows)
            charts.append(_trade_off(comparison, who, name))
    if not body:
        return []
    intro = _intro(shown, labels=comparison.first.task.labels)
    return [Section("attributes", _TITLE, intro + body, [chart for chart in charts if chart])]


def _found(comparison: Comparison, who: str, name: str) -> list[Mapping[str, Any]]:
    """Return what all runs have about an attribute."""
    parts = (
        record.parts[part]
        for records in comparison.runs.values()
        for record in records
        if (part := record.leading(who))
    )
    return [part["attributes"][name] for part in parts if name in part.get("attributes", {})]


def _names(comparison: Comparison, who: str) -> list[str]:
    found: dict[str, None] = {}
    for records in comparison.runs.values():
        for record in records:
            if part := record.leading(who):
                found |= dict.fromkeys(record.parts[part].get("attributes", {}))
    return list(found)


def _values(comparison: Comparison, label: str, who: str, name: str, figure: str) -> list[float]:
    """Return a figure of the clients' final models, one value per seed."""
    found = []
    for record in comparison.runs[label]:
        part = record.leading(who)
        of = record.parts[part].get("attributes", {}).get(name, {}) if part else {}
        if of.get(figure) is not None:
            found.append(float(of[figure]))
    return found


def _trade_off(comparison: Comparison, who: str, name: str) -> Chart | None:
    """Return a chart of the mean over clients against the demographic parity difference."""
    figure = "demographic_parity_difference"
    points = {}
    for label in comparison.runs:
        mean, parity = (
            comparison.mean(label, who, "mean"),
            _values(comparison, label, who, name, figure),
        )
        if mean is not None and parity:
            points[label] = (fmean(parity), mean)
    if not points:
        return None
    x, y = zip(*points.values(), strict=True)
    series = [Series("methods", x, y, line=False, names=list(points), named=True)]
    least, best = (
        min(points, key=lambda label: points[label][0]),
        max(points, key=lambda label: points[label][1]),
    )
    says = (
        f"{least} has the smallest difference ({number(points[least][0])}), {best} the highest "
        f"mean ({number(points[best][1])})."
    )
    score = comparison.first.score
    return Chart(
        f"attributes-{slug(name)}-{who}",
        f"Mean against demographic parity by {name}, {who} clients",
        says,
        f"demographic parity difference by {name}",
        f"mean {score}",
        series,
        whole=False,
    )
