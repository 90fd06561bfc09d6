"""The section on clients: the score of each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from statistics import fmean

from equipoise.report.charts import Chart, Series
from equipoise.report.colours import Palette, marks, palette, ranked
from equipoise.report.comparison import Comparison
from equipoise.report.html import (
    Cell,
    Section,
    details,
    number,
    paragraph,
    spread,
    table,
)
from equipoise.report.reading import WHO, Part, RunRecord
from equipoise.report.svg import HUES
from equipoise.run.few_samples import about_few
from equipoise.run.left_out import groups_with_fewer, missing_in
from equipoise.study.numbers import style_of
from equipoise.text import capital, plural

# With more clients than this, those of each group are drawn side by side.
MOST_IN_A_LINE = 60
# A chart with more marks than this is slow and unreadable, so it shows only one seed.
MOST_MARKS = 6000


def of_run(record: RunRecord) -> Section:
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
    coloured = "Colour and shape show its group. " if len(record.group_names) > 1 else ""
    intro = (
        f"Each mark is one client, from the worst to the best. {coloured}All panels have the same "
        "scale, except for that of personal against global models."
    )
    few = (
        about_few(sizes_of(record, [part]).values(), part.data)
        for who in WHO
        if (part := record.leading(who))
    )
    return Section(
        "clients",
        title,
        paragraph(" ".join([intro, *filter(None, few)])) + without_result(record),
        charts,
        details("Table of all clients", client_table(record, values)),
    )


def without_result(record: RunRecord) -> str:
    """Return the clients without a result as a table; empty without any."""
    pieces = ""
    for who, entry in missing_in(record.summary).items():
        listed = entry["listed"]
        shown = plural(entry["clients"], f"{who} client")
        if len(listed) < entry["clients"]:
            shown = f"{len(listed)} of {shown}"
        rows = [[one["name"], one["group"] or "–", one["reason"]] for one in listed]
        header = ["client", "group", "reason"]
        pieces += table(f"Without a result: {shown}", header, rows, texts=[1, 2])
    return pieces


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


def gained(
    record: RunRecord, shared: Mapping[int, float], personal: Mapping[int, float], colours: Palette
) -> Chart:
    """Return a chart of each client's personal model against the global one."""
    both = [client for client in shared if client in personal]
    series = marks(record, both, shared, personal, colours)
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


def sizes_of(record: RunRecord, parts: Iterable[Part]) -> dict[int, int]:
    """Return the number of evaluated samples of each client."""
    # Seen and unseen clients are different ones, and models are evaluated on the same samples.
    return {client: row["n"] for part in parts for client, row in record.rows_of(part).items()}


def client_table(record: RunRecord, values: Mapping[Part, Mapping[int, float]]) -> str:
    """Return the score of each client as a table."""
    there = sorted({client for of_part in values.values() for client in of_part})
    short = [f"{part.model}, {part.data}" for part in values]
    header = list(dict.fromkeys(short))
    sizes, counted = sizes_of(record, values), dict.fromkeys(part.data for part in values)
    several, samples = len(record.group_names) > 1, f"{' or '.join(counted)} samples"
    style = style_of(value for of_part in values.values() for value in of_part.values())
    rows = []
    for client in there:
        mine = {
            label: of_part[client]
            for label, of_part in zip(short, values.values(), strict=True)
            if client in of_part
        }
        whose = "unseen" if client in record.unseen else "seen"
        cells = [number(mine.get(label), style) for label in header]
        group = [record.groups[client]] if several else []
        rows.append([record.client_name(client), *group, whose, f"{sizes[client]:,}", *cells])
    return table(
        f"{capital(record.score)} of each client",
        ["client", *(["group"] if several else []), "in training", samples, *header],
        rows,
        texts=[1, 2] if several else [1],
    )


def compared(comparison: Comparison) -> Section:
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
    says = f"{capital(who)} clients of {plural(len(runs), 'method')}, {plural(len(seeds), 'seed')}."
    name, axis = f"clients-{who}", comparison.first.score
    return Chart(name, f"Clients of each method, {who}", says, "", axis, series, columns=list(runs))


def group_tables(comparison: Comparison) -> str:
    """Return tables of the mean of each group for all methods, with the worst one marked."""
    pieces = ""
    for who in comparison.whose:
        found = {label: comparison.group_means(label, who) for label in comparison.runs}
        names = list(dict.fromkeys(name for means in found.values() for name in means))
        if len(names) < 2:
            continue
        style = style_of(fmean(values) for means in found.values() for values in means.values())
        rows: list[list[str | Cell]] = []
        for label, means in found.items():
            averages = {name: fmean(values) for name, values in means.items()}
            sign = 1 if comparison.first.task.higher_is_better else -1
            worst = min(averages, key=lambda name: sign * averages[name], default=None)
            cells = [
                Cell(escape(spread(means.get(name, []), style)), "worst" if name == worst else "")
                for name in names
            ]
            rows.append([label, *cells, worst or "–"])
        runs = (record for records in comparison.runs.values() for record in records)
        fewer = groups_with_fewer(missing_in(record.summary).get(who) for record in runs)
        caption = comparison.title(f"Mean over the clients of each group, {who} clients{fewer}")
        pieces += table(caption, ["method", *names, "served worst"], rows, texts=[len(names) + 1])
    return pieces
