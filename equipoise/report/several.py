"""The sections of a report that compares several runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape

import numpy as np

from equipoise.report import attributes, one
from equipoise.report.charts import Chart, Series
from equipoise.report.entries import Entry
from equipoise.report.html import (
    Cell,
    Section,
    details,
    number,
    paragraph,
    plural,
    size,
    slug,
    spread,
    table,
)
from equipoise.report.reading import WHO, Part, RunRecord
from equipoise.report.svg import HUES
from equipoise.study.intervals import CONFIDENCE, OF_GROUPS, RESAMPLES, resampled_interval
from equipoise.study.metrics import should_be_high
from equipoise.study.significance import LEAST_SEEDS, LEVEL, TEST, WORSE, Ranking, rank_methods

COLUMNS = (
    "mean",
    "worst10",
    "sigma_clients",
    "mean_groups",
    "worst_group",
    "group_gap",
    "sigma_groups",
)
CRITERIA = ("mean", "worst10", "sigma_clients")
# A chart with more marks than this is slow and unreadable, so it shows only one seed.
MOST_MARKS = 6000
# Bands of more methods than this hide each other.
MOST_BANDS = 6
# With more methods than this, only those of the Pareto set are named in charts.
MOST_NAMES = 8
# Charts of weights are drawn for at most this number of methods.
MOST_WEIGHTS = 6


@dataclass(frozen=True)
class Comparison:
    """The runs of one setting, by method.

    Attributes
    ----------
    setting : str
        Its label; empty for runs that are not from a study.
    runs : dict
        The runs of each method, one per seed.
    """

    setting: str
    runs: Mapping[str, Sequence[RunRecord]]

    @property
    def first(self) -> RunRecord:
        """One of the runs, for what all runs have in common."""
        return next(iter(self.runs.values()))[0]

    @property
    def suffix(self) -> str:
        """A suffix that makes anchors and names of charts unique."""
        return f"-{slug(self.setting)}" if self.setting else ""

    def title(self, text: str) -> str:
        """Return a heading, with the setting."""
        return f"{text}: {self.setting}" if self.setting else text

    def by_seed(self, label: str, who: str, metric: str) -> dict[int, float]:
        """Return a metric of the clients' final models, by seed."""
        found = {}
        for record in self.runs[label]:
            part = record.leading(who)
            value = record.parts[part].get(metric) if part else None
            if value is not None:
                found[record.seed] = float(value)
        return found

    def values(self, label: str, who: str, metric: str) -> list[float]:
        """Return a metric of the clients' final models, one value per seed."""
        return list(self.by_seed(label, who, metric).values())

    def mean(self, label: str, who: str, metric: str) -> float | None:
        """Return the mean over seeds."""
        values = self.values(label, who, metric)
        return statistics.fmean(values) if values else None

    def ranking(self, who: str, metric: str) -> Ranking:
        """Rank the methods, and test the others against the best over seeds."""
        found = {label: self.by_seed(label, who, metric) for label in self.runs}
        return rank_methods(found, higher_is_better=self.should_be_high(metric))

    def interval(
        self, records: Sequence[RunRecord], who: str, metric: str
    ) -> tuple[float, float] | None:
        """Return the bootstrap interval over clients of a method's runs."""
        parts = [(record, part) for record in records if (part := record.leading(who))]
        if not parts:
            return None
        values = [record.values(part) for record, part in parts]
        common = sorted(set.intersection(*map(set, values)))
        groups = [[record.groups[client] for client in common] for record, _ in parts]
        if not common or (metric in OF_GROUPS and any(own != groups[0] for own in groups)):
            return None
        array = np.array([[own[client] for client in common] for own in values])
        return resampled_interval(
            array, groups[0], metric, higher_is_better=self.first.task.higher_is_better
        )

    def cell(self, label: str, who: str, metric: str) -> str:
        """Return mean ± sample standard deviation over seeds as text."""
        return spread(self.values(label, who, metric))

    def should_be_high(self, metric: str) -> bool:
        """Return whether high values are better."""
        return should_be_high(metric, higher_is_better=self.first.task.higher_is_better)

    def pareto(self, who: str) -> list[str]:
        """Return the Pareto set of methods by mean, worst tenth and σ."""
        points = {}
        for label in self.runs:
            values = [self.mean(label, who, metric) for metric in CRITERIA]
            if None not in values:
                points[label] = [
                    value if self.should_be_high(metric) else -value
                    for metric, value in zip(CRITERIA, values, strict=True)
                    if value is not None
                ]
        return pareto_set(points)

    @cached_property
    def whose(self) -> list[str]:
        """Which clients have results: seen, unseen or both."""
        return [
            who
            for who in WHO
            if any(r.leading(who) for records in self.runs.values() for r in records)
        ]

    def part(self, label: str, who: str) -> Part | None:
        """Return the model, clients and data of a method's results."""
        return next((part for record in self.runs[label] if (part := record.leading(who))), None)


def pareto_set(points: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the labels of points that no other point dominates; higher is better.

    Examples
    --------
    >>> pareto_set({"a": [0.9, 0.2], "b": [0.8, 0.5], "c": [0.8, 0.4]})
    ['a', 'b']
    """

    def beaten(label: str) -> bool:
        mine = points[label]
        return any(
            all(theirs >= own for theirs, own in zip(other, mine, strict=True))
            and list(other) != list(mine)
            for other in points.values()
        )

    return [label for label in points if not beaten(label)]


def comparisons(entries: Iterable[Entry]) -> list[Comparison]:
    """Return the runs by setting and method."""
    found: dict[str, dict[str, list[RunRecord]]] = {}
    for entry in entries:
        found.setdefault(entry.setting, {}).setdefault(entry.label, []).append(entry.record)
    # The label of a single setting is not needed.
    return [Comparison(setting if len(found) > 1 else "", runs) for setting, runs in found.items()]


def sections(compared: Sequence[Comparison]) -> list[Section]:
    """Return the sections of a comparison for all settings."""
    made = []
    for comparison in compared:
        own = [
            results(comparison),
            clients(comparison),
            progress(comparison),
            groups(comparison),
            *attributes.compared(comparison),
            weights(comparison),
            sampling(comparison),
            clusters(comparison),
            costs(comparison),
        ]
        made += [_placed(section, comparison) for section in own]
    records = [
        record for comparison in compared for runs in comparison.runs.values() for record in runs
    ]
    return [*made, one.reproduce(records)]


def _placed(section: Section, comparison: Comparison) -> Section:
    charts = [replace(chart, name=chart.name + comparison.suffix) for chart in section.charts]
    title = comparison.title(section.title)
    return replace(section, name=section.name + comparison.suffix, title=title, charts=charts)


# ---- results -------------------------------------------------------------------------------------


def results(comparison: Comparison) -> Section:
    """Return tables of methods and metrics, and the Pareto set."""
    if not comparison.whose:
        return Section("results", "Results", missing="No client has test or validation data.")
    body, charts, after = "", [], ""
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
    ends = {one.at_round(run) for runs in comparison.runs.values() for run in runs}
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
    items = "".join(
        f"<div><dt>{question}</dt><dd>{escape(answer)}</dd></div>"
        for question, answer in answers.items()
    )
    return f'<h3>Which {record.score} is it?</h3><dl class="which">{items}</dl>'


def metrics_table(comparison: Comparison, who: str, best: Sequence[str]) -> str:
    """Return the metrics of all methods for seen or unseen clients."""
    metrics = [
        m for m in COLUMNS if any(comparison.values(label, who, m) for label in comparison.runs)
    ]
    rankings = {metric: comparison.ranking(who, metric) for metric in metrics}
    rows: list[list[str | Cell]] = []
    for label, runs in comparison.runs.items():
        part = comparison.part(label, who)
        cells = [
            _ranked(escape(comparison.cell(label, who, metric)), rankings[metric], label)
            for metric in metrics
        ]
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
        rows.append([label, mark, model, f"{len(runs)}", *cells])
    arrows = [
        f"{metric}\N{NO-BREAK SPACE}{'↑' if comparison.should_be_high(metric) else '↓'}"
        for metric in metrics
    ]
    header = ["method", "Pareto", "model", "runs", *arrows]
    named = f"{one.capital(comparison.first.score)}, {who} clients"
    whole = table(comparison.title(named), header, rows, texts=[2])
    return whole + interval_table(comparison, who, metrics)


def _ranked(text: str, ranking: Ranking, label: str) -> Cell:
    marked = (
        f'{text}\N{NO-BREAK SPACE}<span role="img" aria-label="worse than the best">{WORSE}</span>'
    )
    look = "best" if label in ranking.best else "second" if label in ranking.second else ""
    return Cell(marked if label in ranking.worse else text, look)


def interval_table(comparison: Comparison, who: str, metrics: Sequence[str]) -> str:
    """Return bootstrap intervals over clients, collapsed; empty if there are too few clients."""
    rows, some = [], False
    for label, records in comparison.runs.items():
        cells = []
        for metric in metrics:
            found = comparison.interval(records, who, metric)
            some = some or found is not None
            cells.append(f"{number(found[0])} to {number(found[1])}" if found else "–")
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
        says = f"{one.capital(who)} clients, mean over seeds. Better is to the {better}."
        title = f"Mean against {one.TILES[metric]}, {who} clients"
        axes = (one.TILES["mean"], one.TILES[metric])
        name = f"trade-off-{metric.replace('_', '-')}-{who}"
        charts.append(Chart(name, title, says, *axes, series, whole=False))
    return charts


def cautions(comparison: Comparison) -> str:
    """Return warnings about runs whose numbers are not comparable."""
    records = [record for runs in comparison.runs.values() for record in runs]
    said = []
    if len({record.score for record in records}) > 1:
        said.append(
            "Runs have different scores: "
            f"{', '.join(sorted({record.score for record in records}))}."
        )
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
    for who in comparison.whose:
        parts = [part for label in comparison.runs if (part := comparison.part(label, who))]
        if len({part.split for part in parts}) > 1:
            said.append(
                f"Numbers of {who} clients are partly on test and partly on validation data."
            )
    items = "".join(f"<li>{escape(text)}</li>" for text in said)
    return f'<div class="caution"><h3>Compare with care</h3><ul>{items}</ul></div>' if said else ""


# ---- clients -------------------------------------------------------------------------------------


def clients(comparison: Comparison) -> Section:
    """Return the section on the clients of each method, side by side."""
    title = f"Who is left behind: {comparison.first.score} of each client"
    charts = [chart for who in comparison.whose if (chart := columns(comparison, who))]
    if not charts:
        return Section(
            "clients", title, missing="The journals have no rows of the selected rounds."
        )
    return Section(
        "clients",
        title,
        paragraph("Each mark is one client of one run."),
        charts,
        group_tables(comparison),
    )


def columns(comparison: Comparison, who: str) -> Chart | None:
    """Return a chart with a column of clients for each method, coloured by group."""
    runs = {
        label: [(r, part) for r in records if (part := r.leading(who))]
        for label, records in comparison.runs.items()
    }
    if sum(len(r.rows) for pairs in runs.values() for r, _ in pairs) > MOST_MARKS:
        runs = {label: pairs[:1] for label, pairs in runs.items()}
    names = list(
        dict.fromkeys(
            name for pairs in runs.values() for record, _ in pairs for name in record.group_names
        )
    )
    coloured = len(names) <= HUES
    marks: dict[int, list[tuple[float, float, str]]] = {}
    for position, pairs in enumerate(runs.values()):
        for record, part in pairs:
            for rank, (client, value) in enumerate(
                sorted(record.values(part).items(), key=lambda item: item[1])
            ):
                group = record.groups[client]
                # Offsets by the golden ratio, so that neighbours do not cover each other.
                aside = 0.56 * ((rank * 0.618034) % 1 - 0.5)
                said = f"{record.client_name(client)}, {group}, seed {record.seed}"
                marks.setdefault(names.index(group) if coloured else 0, []).append(
                    (position + aside, value, said)
                )
    if not marks:
        return None
    series = []
    for hue, mine in sorted(marks.items()):
        x, y, called = zip(*mine, strict=True)
        series.append(
            Series(names[hue] if coloured else "", x, y, hue=hue, line=False, names=called)
        )
    seeds = {record.seed for pairs in runs.values() for record, _ in pairs}
    says = (
        f"{one.capital(who)} clients of {plural(len(runs), 'method')}, "
        f"{plural(len(seeds), 'seed')}."
    )
    name, axis = f"clients-{who}", comparison.first.score
    return Chart(name, f"Clients of each method, {who}", says, "", axis, series, columns=list(runs))


def group_tables(comparison: Comparison) -> str:
    """Return tables of the mean of each group for all methods, with the worst one marked."""
    pieces = ""
    for who in comparison.whose:
        found = {label: _group_means(comparison, label, who) for label in comparison.runs}
        names = list(dict.fromkeys(name for means in found.values() for name in means))
        if len(names) < 2:
            continue
        rows: list[list[str | Cell]] = []
        for label, means in found.items():
            averages = {name: statistics.fmean(values) for name, values in means.items()}
            sign = 1 if comparison.first.task.higher_is_better else -1
            worst = min(averages, key=lambda name: sign * averages[name], default=None)
            cells = [
                Cell(escape(spread(means.get(name, []))), "worst" if name == worst else "")
                for name in names
            ]
            rows.append([label, *cells, worst or "–"])
        caption = comparison.title(f"Mean over the clients of each group, {who} clients")
        pieces += table(caption, ["method", *names, "served worst"], rows, texts=[len(names) + 1])
    return pieces


def _group_means(comparison: Comparison, label: str, who: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for record in comparison.runs[label]:
        part = record.leading(who)
        for name, mean in record.parts[part]["groups"].items() if part else ():
            if mean is not None:
                found.setdefault(name, []).append(mean)
    return found


# ---- over rounds ---------------------------------------------------------------------------------


def progress(comparison: Comparison) -> Section:
    """Return mean, worst tenth and σ of all methods over rounds."""
    title = "Over rounds: mean, worst tenth and σ"
    charts = [
        chart
        for who in comparison.whose
        for metric in CRITERIA
        if (chart := over_rounds(comparison, who, metric, one.TILES[metric]))
    ]
    if not charts:
        return Section("progress", title, missing="The journals have no evaluated rounds.")
    return Section("progress", title, "", charts)


def groups(comparison: Comparison) -> Section:
    """Return the gaps between groups of all methods over rounds."""
    title = "Gaps between groups over rounds"
    several = [
        who
        for who in comparison.whose
        if any(len(_group_means(comparison, label, who)) > 1 for label in comparison.runs)
    ]
    if not several:
        return Section(
            "groups", title, missing="All evaluated clients are in one group, so there are no gaps."
        )
    charts = [
        chart
        for who in several
        for metric, label in (
            ("group_gap", one.TILES["group_gap"]),
            ("sigma_groups", "σ over groups"),
        )
        if (chart := over_rounds(comparison, who, metric, label))
    ]
    return Section("groups", title, "", charts)


def over_rounds(comparison: Comparison, who: str, metric: str, label: str) -> Chart | None:
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
        means = [statistics.fmean(values) for values in at]
        band = len(curves) > 1 and len(comparison.runs) <= MOST_BANDS
        deviations = [statistics.stdev(values) for values in at] if band else []
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
    title = f"{one.capital(label)}, {who} clients"
    name = f"rounds-{metric.replace('_', '-')}-{who}"
    return Chart(name, title, f"At the end: {ends}.{banded}", "round", label, series)


# ---- the server ----------------------------------------------------------------------------------


def weights(comparison: Comparison) -> Section:
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
        own = one.weights(record, before=f"{slug(label)}-").charts
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


def sampling(comparison: Comparison) -> Section:
    """Return how often clients took part."""
    title = "Who took part how often"
    rows = []
    for label, records in comparison.runs.items():
        for record in records:
            if record.sampled:
                counts = list(record.sampled.values())
                numbers = (
                    f"{min(counts)}",
                    f"{statistics.median(counts):g}",
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


def clusters(comparison: Comparison) -> Section:
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
            indices = [one.rand_index(record) for record in noted]
            body += f"<h3>{escape(label)}</h3>"
            body += paragraph(
                f"Adjusted Rand index {spread(indices)}; the table is of seed {noted[0].seed}."
            )
            known = [client for client in noted[0].clusters if client in noted[0].groups]
            caption = comparison.title(f"Clients of each group in each cluster of {label}")
            body += one.contingency(noted[0], known, caption)
    if not body:
        return Section(
            "clusters", title, missing="No method wrote clusters into the notes of its rounds."
        )
    return Section("clusters", title, body)


def costs(comparison: Comparison) -> Section:
    """Return bytes and seconds of all methods."""
    title = "Bytes and seconds"
    rows = []
    for label, records in comparison.runs.items():
        moved = [
            statistics.fmean(r.summary[name] for r in records)
            for name in ("bytes_up", "bytes_down")
        ]
        seconds = [record.seconds for record in records if record.seconds is not None]
        rounds = statistics.fmean(len(record.rounds) for record in records)
        taken = f"{statistics.fmean(seconds):.2f}" if seconds else "–"
        each = f"{statistics.fmean(seconds) / rounds:.3f}" if seconds and rounds else "–"
        rows.append([label, f"{rounds:g}", *map(size, moved), taken, each])
    header = ["method", "rounds", "sent by clients", "received", "seconds", "seconds per round"]
    body = paragraph("Means over seeds. Seconds include evaluation for this report, bytes do not.")
    return Section("costs", title, body + table(comparison.title("Cost of a run"), header, rows))
