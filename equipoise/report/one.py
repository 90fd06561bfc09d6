"""The sections of a report on one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from equipoise.data import SOURCES
from equipoise.fairness import METRICS
from equipoise.report import attributes
from equipoise.report.charts import Chart, Series
from equipoise.report.html import (
    Cell,
    Section,
    details,
    listing,
    number,
    paragraph,
    plural,
    size,
    table,
)
from equipoise.report.reading import Part, RunRecord, Weighed
from equipoise.report.svg import HUES
from equipoise.run.records import averaged_over

TILES = {
    "mean": "mean over clients",
    "worst10": "worst tenth of clients",
    "sigma_clients": "σ over clients",
    "worst_group": "worst group",
    "group_gap": "gap between groups",
}
# With more clients than this, those of each group are drawn side by side.
MOST_IN_A_LINE = 60
HUE = {"mean": 0, "worst10": 1, "sigma_clients": 2}


def sections(record: RunRecord) -> list[Section]:
    """Return the sections of a run, in their order."""
    return [
        headline(record),
        clients(record),
        progress(record),
        groups(record),
        *attributes.of_run(record),
        weights(record),
        sampling(record),
        clusters(record),
        costs(record),
        reproduce([record]),
    ]


# ---- headline ------------------------------------------------------------------------------------


def headline(record: RunRecord) -> Section:
    """Return the main results, with an explanation."""
    lead = record.leading("seen") or record.leading("unseen")
    if lead is None:
        every = record.config.get("evaluation", {}).get("every")
        why = (
            "Nothing was evaluated (evaluation.every is 0)."
            if every == 0
            else "No client has test or validation data."
        )
        return Section("headline", "Results", missing=why)
    part = record.parts[lead]
    tiles = "".join(
        f"<div><dt>{label}</dt><dd>{number(part.get(name))}</dd></div>"
        for name, label in TILES.items()
        if part.get(name) is not None
    )
    worst = [f"Worst: group {part['worst_group_name']} ({number(part['worst_group'])})"]
    worst.append(f"client {worst_client(record, part)} ({number(part['worst_client'])}).")
    body = f'<dl class="tiles">{tiles}</dl>{paragraph(" and ".join(worst))}{which(record, lead)}'
    return Section("headline", "Results", body + metrics_table(record))


def worst_client(record: RunRecord, part: Mapping[str, Any]) -> str:
    """Return the name of the worst client."""
    return str(
        part.get(
            "worst_client_name", record.client_name(part["worst_client_id"]).removeprefix("client ")
        )
    )


def which(record: RunRecord, part: Part) -> str:
    """Return the answers to the four questions of ``docs/metrics.md``."""
    answers = {
        "Which model?": MODELS[part.model],
        "On whose data?": WHOSE[part.who].format(
            split="validation" if part.split == "val" else "test"
        ),
        "Averaged how?": (
            f"Each client has one value, the mean {record.score} over its own samples. The mean is "
            f"over {plural(record.parts[part]['clients'], 'client')}: each client counts once."
        ),
        "At which round?": at_round(record),
    }
    items = "".join(
        f"<div><dt>{question}</dt><dd>{answer}</dd></div>" for question, answer in answers.items()
    )
    return f'<h3>Which {record.score} is it?</h3><dl class="which">{items}</dl>'


MODELS = {
    "global": "The global model, which all clients share.",
    "personal": "The personal models: each client is evaluated with its own.",
    "local": "The local models: as clients trained them in the round, before aggregation.",
}
WHOSE = {
    "seen": "The {split} data of each client that was part of training.",
    "unseen": "The {split} data of clients that were not part of training.",
}


def at_round(record: RunRecord) -> str:
    """Describe the reported round of a run."""
    summary = record.summary
    planned = record.config.get("training", {}).get("rounds", summary["rounds"])
    if "tail" in summary:
        over = capital(averaged_over(summary["tail"]["rounds"]))
        unfinished = (
            ""
            if record.finished
            else f" The run is unfinished ({summary['rounds']} of {planned} rounds)."
        )
        return f"{over} of {planned}: the mean of each client, then summarised.{unfinished}"
    if not record.finished:
        return (
            f"Round {summary['round']}, the last evaluated one; the run is unfinished "
            f"({summary['rounds']} of {planned} rounds)."
        )
    chosen = (
        "the last" if summary.get("select", "last") == "last" else "the best on validation data"
    )
    return f"Round {summary['round']} of {summary['rounds']}, {chosen}."


def metrics_table(record: RunRecord) -> str:
    """Return all metrics of all models and clients."""
    parts = record.parts
    rows: list[list[str | Cell]] = [
        [
            name,
            *(number(part.get(name)) for part in parts.values()),
            Cell(escape(metric.description), "long"),
        ]
        for name, metric in METRICS.items()
        if any(part.get(name) is not None for part in parts.values())
    ]
    header = ["metric", *(part.words for part in parts), "what it is"]
    return table(
        f"All metrics of the {record.score} of clients", header, rows, texts=[len(parts) + 1]
    )


# ---- clients -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Palette:
    """The colours of groups. If there are too few colours, the best groups share one."""

    hues: Mapping[str, int]
    labels: Mapping[int, str]

    def split(self, clients: Iterable[int], groups: Mapping[int, str]) -> dict[int, list[int]]:
        """Return the clients of each colour."""
        found: dict[int, list[int]] = {hue: [] for hue in self.labels}
        for client in clients:
            found[self.hues[groups[client]]].append(client)
        return {hue: members for hue, members in found.items() if members}


def palette(record: RunRecord) -> Palette:
    """Choose colours for the groups of a run."""
    names = record.group_names
    if len(names) <= HUES:
        return Palette({name: hue for hue, name in enumerate(names)}, dict(enumerate(names)))
    lead = record.leading("seen") or record.leading("unseen")
    means = record.parts[lead]["groups"] if lead else {}
    sign = 1 if record.task.higher_is_better else -1
    known = {name: sign * mean for name, mean in means.items() if mean is not None}
    worst = sorted(names, key=lambda name: known.get(name, np.inf))[: HUES - 1]
    hues = {name: worst.index(name) if name in worst else HUES - 1 for name in names}
    return Palette(
        hues, {**dict(enumerate(worst)), HUES - 1: f"the other {len(names) - len(worst)} groups"}
    )


def clients(record: RunRecord) -> Section:
    """Return the score of each client."""
    title = f"Who is left behind: {record.score} of each client"
    values = {part: record.values(part) for part in record.parts}
    if not any(values.values()):
        return Section("clients", title, missing="The journal has no rows of the reported round.")
    every = [value for of_part in values.values() for value in of_part.values()]
    colours = palette(record)
    charts = [
        strip(record, part, of_part, colours, (min(every), max(every)))
        for part, of_part in values.items()
    ]
    both = [
        (Part("global", "seen", split), Part("personal", "seen", split))
        for split in ("test", "val")
    ]
    charts += [
        gained(record, values[a], values[b], colours)
        for a, b in both
        if a in values and b in values
    ]
    intro = (
        "Each mark is one client, from the worst to the best. Colour and shape show its "
        "group. All panels have the same scale, except for that of personal against global models."
    )
    return Section(
        "clients",
        title,
        paragraph(intro),
        charts,
        details("Table of all clients", client_table(record, values)),
    )


def strip(
    record: RunRecord,
    part: Part,
    values: Mapping[int, float],
    colours: Palette,
    scale: tuple[float, float],
) -> Chart:
    """Return the clients of a part, ordered by score."""
    sign = 1 if record.task.higher_is_better else -1
    order = sorted(values, key=lambda client: sign * values[client])
    summary = record.parts[part]
    says = (
        f"{plural(len(order), 'client')}: from {number(values[order[0]])} to "
        f"{number(values[order[-1]])}, mean {number(summary['mean'])}."
    )
    axis = "clients, worst first"
    if len(order) > MOST_IN_A_LINE and len(colours.labels) > 1:
        # With many clients, marks would cover those of other groups.
        means = {
            hue: fmean(values[c] for c in members)
            for hue, members in colours.split(order, record.groups).items()
        }
        order.sort(key=lambda client: sign * means[colours.hues[record.groups[client]]])
        axis = "clients, worst group first"
    series = ranked(record, order, values, colours)
    name = f"clients-{part.model}-{part.who}"
    return Chart(name, capital(part.words), says, axis, record.score, series, y_range=scale)


def ranked(
    record: RunRecord, order: Sequence[int], values: Mapping[int, float], colours: Palette
) -> list[Series]:
    """Return marks for the values of clients in the given order, a series for each colour."""
    rank = {client: position for position, client in enumerate(order, start=1)}
    return [
        Series(
            colours.labels[hue],
            [rank[client] for client in members],
            [values[client] for client in members],
            hue=hue,
            line=False,
            names=[f"{record.client_name(client)}, {record.groups[client]}" for client in members],
        )
        for hue, members in colours.split(order, record.groups).items()
    ]


def gained(
    record: RunRecord, shared: Mapping[int, float], personal: Mapping[int, float], colours: Palette
) -> Chart:
    """Return a chart of each client's personal model against the global one."""
    both = [client for client in shared if client in personal]
    series = [
        Series(
            colours.labels[hue],
            [shared[client] for client in members],
            [personal[client] for client in members],
            hue=hue,
            line=False,
            names=[f"{record.client_name(client)}, {record.groups[client]}" for client in members],
        )
        for hue, members in colours.split(both, record.groups).items()
    ]
    sign = 1 if record.task.higher_is_better else -1
    better = sum(sign * personal[client] > sign * shared[client] for client in both)
    worse = sum(sign * personal[client] < sign * shared[client] for client in both)
    says = (
        f"The personal model is better for {better} of {plural(len(both), 'seen client')}, "
        f"and worse for {worse}."
    )
    axes = (f"{record.score} of the global model", f"{record.score} of the personal model")
    return Chart(
        "personal-against-global",
        "Personal against global",
        says,
        *axes,
        series,
        whole=False,
        diagonal=True,
    )


def client_table(record: RunRecord, values: Mapping[Part, Mapping[int, float]]) -> str:
    """Return the score of each client as a table."""
    there = sorted({client for of_part in values.values() for client in of_part})
    short = [f"{part.model}, {'validation' if part.split == 'val' else 'test'}" for part in values]
    header = list(dict.fromkeys(short))
    rows = []
    for client in there:
        mine = {
            label: of_part[client]
            for label, of_part in zip(short, values.values(), strict=True)
            if client in of_part
        }
        whose = "unseen" if client in record.unseen else "seen"
        cells = [number(mine.get(label)) for label in header]
        rows.append([record.client_name(client), record.groups[client], whose, *cells])
    return table(
        f"{capital(record.score)} of each client",
        ["client", "group", "in training", *header],
        rows,
        texts=[1, 2],
    )


# ---- over rounds ---------------------------------------------------------------------------------


def progress(record: RunRecord) -> Section:
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
                TILES[name],
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
            + ", ".join(f"{TILES[name]} {number(last[name])}" for name in HUE)
            + "."
        )
        name = f"progress-{part.model}-{part.who}"
        charts.append(Chart(name, capital(part.words), says, "round", record.score, series))
    if not charts:
        return Section("progress", title, missing="No round was evaluated.")
    body = paragraph("A lower σ is better only where mean and worst tenth do not fall with it.")
    return Section("progress", title, body, charts)


def groups(record: RunRecord) -> Section:
    """Return means of groups and the gaps between them over rounds."""
    title = "Groups over rounds"
    charts, single = [], True
    for who in ("seen", "unseen"):
        part = record.leading(who)
        of_part = record.history.get(part, {}) if part else {}
        if (
            part is None
            or not of_part
            or max(len(summary["groups"]) for summary in of_part.values()) < 2
        ):
            continue
        single = False
        colours = palette(record)
        charts += [group_means(record, part, of_part, colours), group_gaps(record, part, of_part)]
    if single:
        why = (
            "All evaluated clients are in one group, so there are no gaps."
            if record.history
            else "No round was evaluated."
        )
        return Section("groups", title, missing=why)
    return Section("groups", title, "", charts)


def group_means(
    record: RunRecord, part: Part, of_part: Mapping[int, Mapping[str, Any]], colours: Palette
) -> Chart:
    """Return the mean of each group over rounds; groups of one colour are averaged."""
    series = []
    for hue, label in colours.labels.items():
        points = {}
        for round_, summary in of_part.items():
            means = [
                mean for group, mean in summary["groups"].items() if colours.hues[group] == hue
            ]
            if means:
                points[round_] = fmean(means)
        if points:
            series.append(Series(label, list(points), list(points.values()), hue=hue))
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
        "sigma_groups": "σ over groups",
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


# ---- weights -------------------------------------------------------------------------------------


def weights(record: RunRecord, before: str = "") -> Section:
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
        series = []
        for hue, label in colours.labels.items():
            points = {}
            for round_, means in record.losses.items():
                mine = [loss for group, loss in means.items() if colours.hues[group] == hue]
                if mine:
                    points[round_] = fmean(mine)
            if points:
                series.append(Series(label, list(points), list(points.values()), hue=hue))
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


# ---- sampling and clusters -----------------------------------------------------------------------


def sampling(record: RunRecord) -> Section:
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


def clusters(record: RunRecord) -> Section:
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


# ---- cost and configuration ----------------------------------------------------------------------


def costs(record: RunRecord) -> Section:
    """Return bytes and seconds."""
    title = "Bytes and seconds"
    summary, rounds = record.summary, len(record.rounds)
    if not rounds:
        return Section("costs", title, missing="The run has no finished round.")
    rows = [
        ["sent by clients", size(summary["bytes_up"]), size(summary["bytes_up"] / rounds)],
        ["received by clients", size(summary["bytes_down"]), size(summary["bytes_down"] / rounds)],
    ]
    laps = {
        name: [row[name] for row in record.timings if name in row]
        for name in ("train", "combine", "evaluate")
    }
    for name, label in (
        ("train", "local training"),
        ("combine", "aggregation"),
        ("evaluate", "evaluation"),
    ):
        if laps[name]:
            rows.append([label, f"{sum(laps[name]):.2f} s", f"{fmean(laps[name]):.3f} s"])
    after = table("In total and for each round", ["what", "total", "each round"], rows)
    if "messages" in record.rounds[0]:
        messages, evaluations = (
            fmean(row[name] / row["cohort"] for row in record.rounds)
            for name in ("messages", "evaluations")
        )
        after += paragraph(
            f"A client of a cohort gets {messages:.1f} messages per round, and evaluates models on "
            f"its splits {evaluations:.1f} times per round for the method. Evaluation for this "
            "report is not included."
        )
    else:
        after += paragraph("The run was made by a release that did not count messages.")
    series = [
        Series(name, [row["round"] for row in record.timings if name in row], values, hue=hue)
        for hue, (name, values) in enumerate(laps.items())
        if values
    ]
    if not series:
        return Section("costs", title, after + paragraph("The run has no timings."))
    device = record.config["resolved"].get("device", "an unknown device")
    says = f"{sum(map(sum, laps.values())):.1f} s in total, on {device}."
    chart = Chart(
        "seconds", "Seconds of each round", says, "round", "seconds", series, y_range=(0.0, 0.0)
    )
    return Section("costs", title, after, [chart])


def reproduce(records: Sequence[RunRecord]) -> Section:
    """Return configurations, and how to reproduce the runs."""
    body = ""
    for record in records[:1]:
        resolved = record.config["resolved"]
        body += paragraph(
            f"Equipoise {resolved.get('equipoise', '?')}, PyTorch {resolved.get('torch', '?')}, on "
            f"{resolved.get('device', '?')} with "
            f"{plural(int(resolved.get('threads', 1)), 'thread')}. The same versions, device, "
            "number of threads and configuration give the same numbers."
        )
    for record in records:
        known = record.config["data"]["name"] in SOURCES or record.config.get("imports")
        command = f"equipoise run {record.directory}/config.yaml --out NEW"
        if known:
            how = f'<pre class="command"><code>{escape(command)}</code></pre>'
        else:
            how = paragraph(
                "The run was started from Python with custom data. To reproduce it, use the same "
                f"data: their fingerprint is "
                f"{record.config['resolved'].get('fingerprint', 'unknown')}."
            )
        written = yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True)
        title = f"Configuration of {record.directory}"
        body += how + details(title, listing(title, written))
    return Section("reproduce", "Configuration and how to reproduce", body)


def capital(text: str) -> str:
    """Capitalize the first letter.

    Examples
    --------
    >>> capital("global model"), capital("σ over clients")
    ('Global model', 'σ over clients')
    """
    # Symbols such as σ have another meaning as capital letters.
    return text[:1].upper() + text[1:] if text[:1].isascii() else text
