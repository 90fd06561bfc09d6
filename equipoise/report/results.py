"""The section with the results of several methods: tables, Pareto sets and warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import fmean

from equipoise.fairness import GROUP_METRICS, METRICS
from equipoise.report.charts import Chart, Series
from equipoise.report.comparison import Comparison
from equipoise.report.headline import at_round, left_out_names
from equipoise.report.html import (
    Cell,
    Section,
    answered,
    details,
    number,
    paragraph,
    spread,
    table,
)
from equipoise.run.left_out import missing_in, missing_in_runs
from equipoise.study.intervals import CONFIDENCE, RESAMPLES
from equipoise.study.numbers import style_of
from equipoise.study.reading import OWN_COLUMNS
from equipoise.study.significance import LEAST_SEEDS, LEVEL, TEST, WORSE, Ranking, rank_methods
from equipoise.text import capital, plural

COLUMNS = (
    "mean",
    "worst10",
    "sigma_clients",
    "mean_groups",
    "worst_group",
    "group_gap",
    "sigma_groups",
)
# Returns the values of a metric by seed, for the label of a method and the metric.
BySeed = Callable[[str, str], dict[int, float]]
# With more methods than this, only those of the Pareto set are named in charts.
MOST_NAMES = 8


def compared(comparison: Comparison) -> Section:
    """Return tables of methods and metrics, and the Pareto set."""
    if not comparison.whose:
        return Section("results", "Results", missing="No client has test or validation data.")
    body, charts, after = study_table(comparison), [], ""
    for who in comparison.whose:
        best = comparison.pareto(who)
        body += metrics_table(comparison, who, best)
        charts += trade_offs(comparison, who, best)
        names = ", ".join(best) or "none"
        after += paragraph(f"Pareto set, {who} clients: {names}.")
    explained = paragraph(
        "● marks the Pareto set of mean, worst tenth and σ over clients: no other method is at "
        "least as good in all three and better in one."
    )
    marks = paragraph(about_marks(comparison))
    return Section(
        "results",
        "Results",
        which(comparison) + body + marks + explained + after + cautions(comparison),
        charts,
    )


def about_marks(comparison: Comparison) -> str:
    """Explain the marks of the table and the test."""
    ranked = "Best values are bold, second ones underlined."
    if max(map(len, comparison.runs.values())) < LEAST_SEEDS:
        return f"{ranked} Differences are not tested: that needs {LEAST_SEEDS} seeds."
    return f"{ranked} {WORSE} marks values that are worse than the best: p < {LEVEL}, {TEST}."


def which(comparison: Comparison) -> str:
    """Return an explanation of the numbers."""
    record = comparison.first
    counts = {len(runs) for runs in comparison.runs.values()}
    over = plural(max(counts), "seed") if len(counts) == 1 else "the seeds of each method"
    counted = (
        f"mean ± sample standard deviation (n − 1) over {over}" if counts != {1} else "one seed"
    )
    ends = {at_round(run) for runs in comparison.runs.values() for run in runs}
    answers = {
        "Which model?": (
            "The clients' final model: their personal model if the method has one, and otherwise "
            "the global model. It is in the column “model”."
        ),
        "On whose data?": (
            "Each client's own test data, or validation data if this is stated, of clients that "
            "were part of training (seen) and of other clients (unseen)."
        ),
        "Averaged how?": (
            f"Each client has one value, the mean {record.score} over its own samples. Cells: "
            f"{counted}."
        ),
        "At which round?": " ".join(sorted(ends))
        if len(ends) <= 3
        else "At rounds that differ; see the table of runs.",
    }
    return answered(record.score, answers)


def metrics_table(comparison: Comparison, who: str, best: Sequence[str]) -> str:
    """Return the metrics of all methods for seen or unseen clients."""
    several = comparison.several_groups(who)
    metrics = [
        m
        for m in COLUMNS
        if (several or m not in GROUP_METRICS)
        and any(comparison.values(label, who, m) for label in comparison.runs)
    ]
    arrows, cells = ranked_columns(
        comparison, metrics, lambda label, metric: comparison.by_seed(label, who, metric)
    )
    rows: list[list[str | Cell]] = []
    for label, runs in comparison.runs.items():
        part = comparison.part(label, who)
        mark = (
            Cell('<span role="img" aria-label="in the Pareto set">●</span>')
            if label in best
            else Cell("")
        )
        model = (
            f"{part.model}, validation data"
            if part and part.split == "val"
            else part.model
            if part
            else "–"
        )
        rows.append([label, mark, model, f"{len(runs)}", *cells[label]])
    header = ["method", "Pareto", "model", "runs", *arrows]
    named = f"{capital(comparison.first.score)}, {who} clients"
    whole = table(comparison.title(named), header, rows, texts=[2])
    return whole + interval_table(comparison, who, metrics) + further_table(comparison, who)


def further_table(comparison: Comparison, who: str) -> str:
    """Return ``evaluation.metrics`` of all methods for seen or unseen clients; empty without any.

    There are the mean over clients and the worst group of each metric.
    """
    several = comparison.several_groups(who)
    kinds = [kind for kind in OWN_COLUMNS if several or kind not in GROUP_METRICS]
    metrics = [
        metric
        for metric in (f"{name}.{kind}" for name in comparison.further for kind in kinds)
        if any(comparison.by_seed(label, who, metric) for label in comparison.runs)
    ]
    if not metrics:
        return ""
    return ranked_table(
        comparison,
        f"Further metrics, {who} clients",
        metrics,
        lambda label, metric: comparison.by_seed(label, who, metric),
    )


def study_table(comparison: Comparison) -> str:
    """Return the metrics of the study, if the other tables do not have all of them."""
    others = {*COLUMNS, *(f"{name}.{kind}" for name in comparison.further for kind in OWN_COLUMNS)}
    metrics = [
        metric
        for metric in comparison.metrics
        if any(comparison.of_study(label, metric) for label in comparison.runs)
    ]
    if set(metrics) <= others:
        return ""
    return ranked_table(comparison, "Metrics of the study", metrics, comparison.of_study)


def ranked_table(
    comparison: Comparison, caption: str, metrics: Sequence[str], by_seed: BySeed
) -> str:
    """Return a table of methods and metrics; see :func:`ranked_columns`."""
    header, cells = ranked_columns(comparison, metrics, by_seed)
    rows: list[list[str | Cell]] = [[label, *own] for label, own in cells.items()]
    return table(comparison.title(caption), ["method", *header], rows)


def ranked_columns(
    comparison: Comparison, metrics: Sequence[str], by_seed: BySeed
) -> tuple[list[str], dict[str, list[Cell]]]:
    """Return the headers of metrics with their directions, and the marked cells of each method."""
    header: list[str] = []
    cells: dict[str, list[Cell]] = {label: [] for label in comparison.runs}
    for metric in metrics:
        high = comparison.should_be_high(metric)
        header.append(f"{metric}\N{NO-BREAK SPACE}{'↑' if high else '↓'}")
        found = {label: by_seed(label, metric) for label in comparison.runs}
        ranking = rank_methods(found, higher_is_better=high)
        style = _style(found.values())
        for label, values in found.items():
            text = escape(spread(list(values.values()), style))
            cells[label].append(_ranked(text, ranking, label))
    return header, cells


def _style(found: Iterable[Mapping[int, float]]) -> str:
    """Return the format of the numbers in a column, given the values of all methods by seed."""
    return style_of(fmean(values.values()) for values in found if values)


def _ranked(text: str, ranking: Ranking, label: str) -> Cell:
    marked = (
        f'{text}\N{NO-BREAK SPACE}<span role="img" aria-label="worse than the best">{WORSE}</span>'
    )
    look = "best" if label in ranking.best else "second" if label in ranking.second else ""
    return Cell(marked if label in ranking.worse else text, look)


def interval_table(comparison: Comparison, who: str, metrics: Sequence[str]) -> str:
    """Return bootstrap intervals over clients, collapsed; empty if there are too few clients."""
    rows, some = [], False
    styles = {
        metric: _style(comparison.by_seed(label, who, metric) for label in comparison.runs)
        for metric in metrics
    }
    for label, records in comparison.runs.items():
        cells = []
        for metric, style in styles.items():
            found = comparison.interval(records, who, metric)
            some = some or found is not None
            ends = (number(end, style) for end in found or ())
            cells.append(" to ".join(ends) or "–")
        rows.append([label, *cells])
    if not some:
        return ""
    caption = comparison.title(f"{CONFIDENCE:.0%} bootstrap intervals over clients, {who} clients")
    explained = paragraph(
        "How much metrics vary with the choice of clients. Clients are drawn with replacement "
        f"{RESAMPLES:,} times (BCa), each with its values of all seeds, and within groups for "
        "metrics of groups."
    )
    return details("Intervals over clients", explained + table(caption, ["method", *metrics], rows))


def trade_offs(comparison: Comparison, who: str, best: Sequence[str]) -> list[Chart]:
    """Return charts of the mean against the worst tenth and against σ."""
    charts = []
    for metric in ("worst10", "sigma_clients"):
        series = []
        for hue, (label, mine) in enumerate((("others", False), ("Pareto set", True))):
            points = {
                name: (comparison.mean(name, who, "mean"), comparison.mean(name, who, metric))
                for name in comparison.runs
                if (name in best) == mine
            }
            known = {
                name: (x, y) for name, (x, y) in points.items() if x is not None and y is not None
            }
            if known:
                x, y = zip(*known.values(), strict=True)
                # Names of many methods would cover each other.
                named = mine or len(comparison.runs) <= MOST_NAMES
                series.append(
                    Series(label, x, y, hue=hue, line=False, names=list(known), named=named)
                )
        if not series:
            continue
        better = "top right" if comparison.should_be_high(metric) else "bottom right"
        if not comparison.first.task.higher_is_better:
            better = "bottom left"
        says = f"{capital(who)} clients, mean over seeds. Better is to the {better}."
        title = f"Mean against {METRICS[metric].label}, {who} clients"
        axes = (METRICS["mean"].label, METRICS[metric].label)
        name = f"trade-off-{metric.replace('_', '-')}-{who}"
        charts.append(Chart(name, title, says, *axes, series, whole=False))
    return charts


def cautions(comparison: Comparison) -> str:
    """Return warnings about runs whose numbers are not comparable."""
    records = [record for runs in comparison.runs.values() for record in runs]
    missing = [missing_in(record.summary) for record in records]
    said = [f"{capital(text)}." for text in missing_in_runs(missing)]
    prints: dict[int, set[str]] = {}
    for record in records:
        prints.setdefault(record.seed, set()).add(str(record.config["resolved"].get("fingerprint")))
    if any(len(there) > 1 for there in prints.values()):
        said.append(
            "Runs with the same seed were trained on different data, so their numbers are not "
            "comparable."
        )
    if len({tuple(sorted(r.seed for r in runs)) for runs in comparison.runs.values()}) > 1:
        said.append("Methods have different seeds.")
    unfinished = [str(record.directory) for record in records if not record.finished]
    if unfinished:
        said.append(f"Unfinished runs, at their last evaluated round: {', '.join(unfinished)}.")
    for label, runs in comparison.runs.items():
        said += [
            f"Updates of clients were left out of rounds of {label}, seed {record.seed}: "
            f"{left_out_names(found)}."
            for record in runs
            if (found := record.summary.get("updates_left_out"))
        ]
    for who in comparison.whose:
        parts = [part for label in comparison.runs if (part := comparison.part(label, who))]
        if len({part.split for part in parts}) > 1:
            said.append(
                f"Numbers of {who} clients are partly on test and partly on validation data."
            )
    items = "".join(f"<li>{escape(text)}</li>" for text in said)
    return f'<div class="caution"><h3>Compare with care</h3><ul>{items}</ul></div>' if said else ""
