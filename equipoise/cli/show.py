"""Output of the command line: progress bars, tables and JSON."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from equipoise import methods as registry
from equipoise.client_index import COMPARED, ClientIndex, similarity_by_group
from equipoise.data import draw as draw_federation
from equipoise.data.picture import draw_similarity
from equipoise.errors import InputError
from equipoise.explain import Setting
from equipoise.fairness import METRICS
from equipoise.federation import SPLITS, Federation
from equipoise.parity import FIGURES, RATES
from equipoise.run.api import Run
from equipoise.run.plain import to_plain
from equipoise.run.records import averaged_over
from equipoise.run.trainer import Progress
from equipoise.study import Job, Results
from equipoise.study.significance import WORSE, Ranking
from equipoise.text import LONGEST_MESSAGE, printable

# Wider than any table, so that tables are not cut if the output is not a terminal.
UNLIMITED = 10_000
LEFT_BEHIND = "bold red"


class _Console(Console):
    """A console that escapes control characters, which names from files may contain."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text with control characters escaped, except newlines at the start."""
        begin = len(text) - len(text.lstrip("\n"))
        return super().render_str(
            text[:begin] + printable(text[begin:], LONGEST_MESSAGE), **options
        )


def _console(*, stderr: bool = False) -> Console:
    """Return a console without markup, because names of groups and clients may look like it."""
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = UNLIMITED
    return console


def _bar(console: Console, *more: str) -> Bar:
    """Return a progress bar with further texts after it. It is shown only on terminals."""
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *(TextColumn(text, markup=False) for text in more),
        console=console,
        disable=not console.is_terminal,
    )


def _table(title: str, *columns: str, numbers: int = 0, last: str | None = None) -> Table:
    """Return a table. Its last ``numbers`` columns are numbers, before an optional text column."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=None,
        pad_edge=False,
    )
    for position, column in enumerate(columns):
        # Names are not truncated, because truncated names may be the same.
        table.add_column(
            column,
            justify="right" if position >= len(columns) - numbers else "left",
            overflow="fold",
        )
    if last is not None:
        table.add_column(last, overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


# ---- progress ------------------------------------------------------------------------------------


@contextmanager
def rounds(name: str) -> Iterator[Callable[[Progress], None]]:
    """Show the progress of a run and the scores of the latest finished evaluation."""
    console = _console(stderr=True)
    with _bar(console, "{task.fields[scores]}") as bar:
        task = bar.add_task(name, total=None, scores="")

        def on_round(progress: Progress) -> None:
            bar.update(
                task, completed=progress.round, total=progress.rounds, scores=_scores(progress)
            )

        yield on_round


def _scores(progress: Progress) -> str:
    if progress.mean is None:
        return f"loss {_number(progress.train_loss)}"
    return (
        f"mean {_number(progress.mean)}  worst client {_number(progress.worst)}  "
        f"σ {_number(progress.sigma)}"
    )


@contextmanager
def runs(
    total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Job, str], None]]:
    """Print how each run of a study ended and the time left, and show a bar on a terminal."""
    console = _console(stderr=True)
    columns = (
        TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[left]}")
    )
    with Bar(
        *columns,
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("runs", total=total, left="")
        begun, done, there = clock(), 0, 0

        def watch(job: Job, outcome: str) -> None:
            nonlocal begun, done, there
            if outcome == "begun":
                bar.update(task, description=str(job.path))
                return
            done += 1
            if outcome == "already there":
                there, begun = there + 1, clock()
            left = time_left(clock() - begun, done - there, total - done)
            bar.update(task, advance=1, left=left)
            console.print(
                f"[{done}/{total}] {job.path}: {outcome}{f' ({left})' if left else ''}",
                soft_wrap=True,
            )

        yield watch


def time_left(seconds: float, done: int, left: int) -> str:
    """Estimate the time of the remaining runs from that of the finished runs.

    Examples
    --------
    >>> time_left(30.0, done=2, left=4), time_left(7200.0, done=2, left=3)
    ('about 60 s left', 'about 3 h 0 min left')
    """
    if not done or not left:
        return ""
    expected = round(seconds / done * left)
    if expected < 120:
        return f"about {expected} s left"
    minutes = round(expected / 60)
    return (
        f"about {minutes} min left"
        if minutes < 120
        else f"about {minutes // 60} h {minutes % 60} min left"
    )


# ---- run -----------------------------------------------------------------------------------------


def run_document(run: Run) -> dict[str, Any]:
    """Return what ``equipoise run --json`` prints."""
    directory = str(run.directory) if run.directory else None
    return {**run.summary, "seconds": _seconds(run), "config": run.config, "directory": directory}


def _seconds(run: Run) -> float:
    laps = (value for row in run.trainer.timings for name, value in row.items() if name != "round")
    return round(sum(laps), 3)


def run(run: Run) -> None:
    """Show a finished run."""
    console, summary = _console(), run.summary
    counted = "the last" if summary["select"] == "last" else "the best on validation data"
    at = f"round {summary['round']} of {summary['rounds']} ({counted})"
    if "tail" in summary:
        at = f"{averaged_over(summary['tail']['rounds'])} of {summary['rounds']}, client by client"
    console.print(f"{summary['method']} on {summary['data']}, seed {summary['seed']}, {at}")
    if _parts(summary):
        console.print(_overall(summary))
        if summary.get("metrics"):
            console.print(_further(summary))
        console.print(_groups(run))
        for table in _by_attribute(summary):
            console.print(table)
    else:
        console.print(_why_nothing(run.config))
    for split, values in summary.get("server", {}).items():
        console.print(
            f"server, {split}: {', '.join(f'{name} {value:.4f}' for name, value in values.items())}"
        )
    moved = (
        f"{_bytes(summary['bytes_up'])} sent by clients, {_bytes(summary['bytes_down'])} received"
    )
    console.print(f"moved: {moved}; time: {_seconds(run):.1f} s")
    if "not_replayed" in summary:
        console.print(
            "slow: steps ran from Python and were not replayed on the GPU, because "
            f"{summary['not_replayed']}"
        )
    if run.directory:
        console.print(f"files: {run.directory}", soft_wrap=True)


def _why_nothing(config: dict[str, Any]) -> str:
    """Return why there are no results."""
    if config["evaluation"]["every"] == 0:
        return "nothing was evaluated (evaluation.every is 0)"
    splits = list(config["data"]["splits"])
    return f"no results: no client has test or validation data (data.splits is {splits})"


def _parts(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results by model and clients, on test data or else on validation data.

    Validation data are used for seen clients without test data.
    """
    tested, validated = (
        {
            f"{model}, {who}": part
            for model, whose in summary.get(key, {}).items()
            for who, part in whose.items()
        }
        for key in ("results", "validation")  # runs of earlier releases have only the first
    )
    if any(_of_seen(label) for label in tested):
        return tested
    return tested | {
        f"{label}, validation": part for label, part in validated.items() if _of_seen(label)
    }


def _of_seen(label: str) -> bool:
    return "seen" in label.split(", ")


def _overall(summary: dict[str, Any]) -> Table:
    parts = _parts(summary)
    title = f"\n{summary['score']} on each client's test split"
    table = _table(title, "metric", *parts, numbers=len(parts), last="what it is")
    for name, metric in METRICS.items():
        description = Text(metric.description, style="dim")
        table.add_row(name, *(_number(part.get(name)) for part in parts.values()), description)
    return table


def _further(summary: dict[str, Any]) -> Table:
    """Show ``evaluation.metrics``, one row for each metric and model."""
    columns = ("mean", "mean_groups", "sigma_clients", "worst10", "worst_group")
    table = _table(
        "\nfurther metrics of each client",
        "metric",
        "better",
        "of",
        *columns,
        "left out",
        numbers=6,
    )
    for name, declared in summary["metrics"].items():
        for label, part in _parts(summary).items():
            of_metric = part["metrics"][name]
            numbers = (_number(of_metric.get(column)) for column in columns)
            better = "high" if declared["higher_is_better"] else "low"
            table.add_row(name, better, label, *numbers, str(of_metric["left_out"]))
    return table


def _groups(run: Run) -> Table:
    parts, federation = _parts(run.summary), run.trainer.federation
    # Clients use their personal models or the global one in the end, not local ones.
    leading = max(reversed(parts), key=lambda part: (_of_seen(part), not part.startswith("local")))
    others = [part for part in parts if part != leading]
    table = _table(
        "\nwho is left behind: mean over the clients of each group",
        "group",
        "clients",
        *others,
        leading,
        numbers=len(parts) + 1,
        last="",
    )
    scores = parts[leading]["groups"]
    top = max((score for score in scores.values() if score), default=1.0)
    for position, group in enumerate(federation.group_names):
        score = scores.get(group)
        worst = group == parts[leading]["worst_group_name"]
        bar = "█" * round(24 * (score or 0) / top) + (" ← served worst" if worst else "")
        clients = str(int((federation.groups == position).sum()))
        numbers = [_number(parts[part]["groups"].get(group)) for part in others]
        table.add_row(
            group, clients, *numbers, _number(score), bar, style=LEFT_BEHIND if worst else None
        )
    return table


def _by_attribute(summary: dict[str, Any]) -> Iterator[Table]:
    """Show rates by value of attributes, and then differences between values."""
    parts = {
        label: part["attributes"] for label, part in _parts(summary).items() if "attributes" in part
    }
    score = summary["score"]
    for name in dict.fromkeys(name for part in parts.values() for name in part):
        columns = ("samples", score, *RATES)
        table = _table(
            f"\nby {name}: samples of all clients together",
            name,
            "of",
            *columns,
            numbers=len(columns),
        )
        for label, part in parts.items():
            found = part.get(name, {"values": {}, "worst_value": None})
            for value, rates in found["values"].items():
                worst = LEFT_BEHIND if value == found["worst_value"] else None
                numbers = (_number(rates[column]) for column in columns[1:])
                table.add_row(value, label, str(rates["n"]), *numbers, style=worst)
        yield table
    if parts:
        compared = {
            f"{name}: {label}": found
            for label, part in parts.items()
            for name, found in part.items()
        }
        table = _table(
            "\nbetween values", "figure", *compared, numbers=len(compared), last="what it is"
        )
        for figure, said in FIGURES.items():
            table.add_row(
                figure,
                *(_number(found[figure]) for found in compared.values()),
                Text(said, style="dim"),
            )
        said = "samples whose counts do not leave their client, because they are few"
        table.add_row(
            "withheld",
            *(str(found["withheld"]) for found in compared.values()),
            Text(said, style="dim"),
        )
        yield table


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


# ---- report --------------------------------------------------------------------------------------


def report(path: Path, figures: Path | None = None) -> None:
    """Print the path of a report."""
    console = _console()
    console.print(f"report: {path}", soft_wrap=True)
    if figures:
        console.print(f"figures: {figures}", soft_wrap=True)


# ---- methods -------------------------------------------------------------------------------------


def method_documents() -> list[dict[str, Any]]:
    """Return what ``equipoise methods --json`` prints."""
    documents = []
    for name in registry.names():
        part, method = registry.part_class(name), registry.build(name)
        documents.append(
            {
                "name": name,
                "summary": (inspect.getdoc(part) or "").partition("\n")[0],
                "paper": part.paper or None,
                "parts": registry.slots_of(part),
                "server_sees": method.sees.words,
                "personal_models": method.personal,
                "hyper_parameters": {
                    key: to_plain(registry.describe_option(value))
                    for key, value in registry.options_of(name).items()
                },
            }
        )
    return documents


def methods() -> None:
    """Show the methods."""
    table = _table("", "method", "paper", "answers", "server sees", "hyper-parameters")
    for document in method_documents():
        table.add_row(
            document["name"],
            document["paper"] or "–",
            ", ".join(document["parts"]),
            document["server_sees"],
            ", ".join(f"{key}={value}" for key, value in document["hyper_parameters"].items())
            or "–",
        )
    console = _console()
    console.print(table)
    console.print(
        "\nEvery method also takes weights, sampling, local, aggregation and guard: parts combine "
        "freely."
    )


# ---- data ----------------------------------------------------------------------------------------


def draw(
    federation: Federation, path: Path, *, asked: bool, index: ClientIndex | None = None
) -> Path | None:
    """Draw a federation or its index.

    Without matplotlib, raise an error only if the picture was requested.
    """
    try:
        return (
            draw_federation(federation, path)
            if index is None
            else draw_similarity(index, federation, path)
        )
    except ModuleNotFoundError as error:
        if asked:
            raise InputError(
                f"--picture needs {error.name}: pip install 'equipoise[report]'"
            ) from error
        return None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def read_index(path: Path, federation: Federation) -> ClientIndex:
    """Read a client index, and check that its clients are those of a federation."""
    index = ClientIndex.read(path)
    if strange := [client for client in index.ids.tolist() if not 0 <= client < federation.clients]:
        raise InputError(
            f"--index {path}: client {strange[0]} is not in {federation.name!r}, which has "
            f"{federation.clients} clients"
        )
    return index


def index_document(
    index: ClientIndex, federation: Federation, picture: Path | None
) -> dict[str, Any]:
    """Return what ``equipoise data --index FILE --json`` prints; null without pairs of clients."""
    groups = federation.groups[index.ids]

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if math.isnan(value) else value

    compared = {compare: similarity_by_group(index, groups, compare) for compare in COMPARED}
    return {
        "name": federation.name,
        "clients": index.ids.tolist(),
        "made_by": index.made_by,
        "digest": index.digest(),
        "epsilon": index.epsilon,
        "group_names": [federation.group_names[group] for group in sorted(set(groups.tolist()))],
        "similarity": {
            compare: {key: plain(value) for key, value in found.items()}
            for compare, found in compared.items()
        },
        "picture": str(picture) if picture else None,
    }


def index(index: ClientIndex, federation: Federation, picture: Path | None) -> None:
    """Show how similar the indices of clients are."""
    console, document = _console(), index_document(index, federation, picture)
    table = _table(
        f"mean cosines of {len(index.ids)} clients of {federation.name}",
        *("index", "within groups", "between groups", "nearest client in the same group"),
        numbers=3,
    )
    for compare, found in document["similarity"].items():
        share = "–" if found["nearest"] is None else f"{found['nearest']:.1%}"
        table.add_row(compare, _number(found["within"]), _number(found["between"]), share)
    console.print(table)
    names = document["group_names"]
    between = _table(
        "\nbetween groups, both parts of the index", "group", *names, numbers=len(names)
    )
    for name, row in zip(names, document["similarity"]["both"]["groups"], strict=True):
        between.add_row(name, *(_number(value) for value in row))
    console.print(between)
    if picture:
        console.print(f"\npicture: {picture}", soft_wrap=True)


def federation_document(federation: Federation, picture: Path | None) -> dict[str, Any]:
    """Return what ``equipoise data --json`` prints."""
    clients = federation.describe()
    return {
        "name": federation.name,
        "task": federation.task,
        "shape": list(federation.shape),
        "classes": federation.classes,
        "fingerprint": federation.fingerprint(),
        "groups": [_group_total(federation, group) for group in range(len(federation.group_names))],
        "clients": clients,
        "picture": str(picture) if picture else None,
    }


def _group_total(federation: Federation, group: int) -> dict[str, Any]:
    """Return the number of clients of a group, and of all their samples."""
    own = federation.groups == group
    splits = {name: federation.split(name) for name in SPLITS}
    held = {
        name: len(np.unique(split.indices[np.repeat(own, split.sizes)]))
        for name, split in splits.items()
    }
    unseen = int((own & federation.unseen).sum())
    return {
        "name": federation.group_names[group],
        "clients": int(own.sum()),
        "unseen": unseen,
        **held,
    }


def federation(federation: Federation, picture: Path | None) -> None:
    """Show a federation."""
    console, document = _console(), federation_document(federation, picture)
    columns = ("client", "name", "group", "", "train", "val", "test")
    last = "labels" if federation.labelled else ""
    table = _table(f"clients of {federation.name}", *columns, numbers=3, last=last)
    for row in document["clients"]:
        sizes = (str(row[split]) for split in ("train", "val", "test"))
        unseen = "unseen" if row["unseen"] else ""
        table.add_row(
            str(row["id"]),
            row["name"],
            row["group"],
            unseen,
            *sizes,
            _histogram(row.get("labels", [])),
        )
    console.print(table)
    totals = _table("\ngroups", "group", "clients", "unseen", "train", "val", "test", numbers=5)
    for row in document["groups"]:
        totals.add_row(*(str(value) for value in row.values()))
    console.print(totals)
    if picture:
        console.print(f"\npicture: {picture}", soft_wrap=True)
    else:
        console.print(
            "\nno picture: matplotlib is not installed (pip install 'equipoise[report]')",
            soft_wrap=True,
        )


def _histogram(counts: list[int]) -> str:
    """Return counts as a row of blocks of different heights; a dot for 0."""
    blocks, top = "▁▂▃▄▅▆▇█", max(counts, default=0)
    return "".join(
        "·" if not count else blocks[(count * len(blocks) - 1) // top] for count in counts
    )


# ---- compare -------------------------------------------------------------------------------------


def results(results: Results, directory: Path) -> None:
    """Show a study's tables, failed runs, and the directory of the runs."""
    console = _console()
    for setting in results.tables:
        console.print(_metrics(results, setting))
        if intervals := results.interval_cells(setting):
            console.print(_intervals(results, intervals))
        if groups := results.groups(setting):
            console.print(_left_behind(results, setting, groups))
        choices = results.choices if results.study.tried else results.study.chosen
        for label, choice in choices.get(setting, {}).items():
            console.print(f"chosen for {label}: {choice.words}", soft_wrap=True)
    for setting in results.study.folds:
        if selection := results.selection_table(setting):
            title, header, rows = selection
            table = _table(f"\n{title}", *header, numbers=len(header) - 1)
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for setting in results.compared:
        console.print(_differences(results, setting))
    if len(results.study.methods) > 1:
        console.print(f"\n{results.about_marks}", soft_wrap=True)
    for message in results.warnings:
        console.print(f"\nwarning: {message}", style="yellow", soft_wrap=True)
    for path, message in results.failures.items():
        console.print(f"\nfailed: {path}: {message}", style="red", soft_wrap=True)
    console.print(f"\nfiles: {directory}", soft_wrap=True)


def _metrics(results: Results, setting: str) -> Table:
    metrics = results.study.metrics
    header, first = _methods(results, setting, metrics)
    table = _table(
        f"\n{results.data(setting)}: mean ± {results.spread}",
        *header,
        *metrics,
        numbers=len(metrics),
    )
    rankings = {metric: results.ranking(setting, metric) for metric in metrics}
    for label in results.study.methods:
        cells = (
            _ranked(results.cell(setting, label, metric), rankings[metric], label)
            for metric in metrics
        )
        table.add_row(*first[label], *cells)
    return table


def _ranked(cell: str, ranking: Ranking, label: str) -> Text:
    """Mark a cell. Without styles, mark only values that are significantly worse than the best."""
    style = "bold" if label in ranking.best else "underline" if label in ranking.second else ""
    return Text(f"{cell} {WORSE}" if label in ranking.worse else cell, style=style)


def _intervals(results: Results, cells: dict[str, list[str]]) -> Table:
    metrics = results.study.metrics
    table = _table(f"\n{results.about_intervals}", "method", *metrics, numbers=len(metrics))
    for label, own in cells.items():
        table.add_row(label, *own)
    return table


def _differences(results: Results, setting: str) -> Table:
    metrics = results.study.metrics
    table = _table(
        f"\n{results.about_differences(setting)}", "method", *metrics, numbers=len(metrics)
    )
    for label in results.study.others:
        table.add_row(
            label, *(results.difference(setting, label, metric).cell for metric in metrics)
        )
    return table


def _left_behind(results: Results, setting: str, groups: list[str]) -> Table:
    metrics = {group: f"groups.{group}" for group in groups}
    header, first = _methods(results, setting, metrics.values())
    title = "\nwho is left behind: mean over the clients of each group"
    table = _table(title, *header, *groups, numbers=len(groups), last="served worst")
    for label in results.study.methods:
        worst = results.worst_group(setting, label)
        cells = {group: results.cell(setting, label, metric) for group, metric in metrics.items()}
        marked = [
            Text(cell, style=LEFT_BEHIND if group == worst else "") for group, cell in cells.items()
        ]
        table.add_row(*first[label], *marked, worst or "–")
    return table


def _methods(
    results: Results, setting: str, metrics: Iterable[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the headers and cells of the first columns: the method, and its model if needed.

    The model is shown if it is not always the global one.
    """
    if models := results.models(setting, metrics):
        return ["method", "model"], {
            label: [label, models[label]] for label in results.study.methods
        }
    return ["method"], {label: [label] for label in results.study.methods}


def settings(found: Sequence[Setting]) -> None:
    """Print keys with their types, defaults, meanings and examples."""
    console = _console()
    for setting in found:
        of = f" (with {setting.of})" if setting.of else ""
        usual = f"default {setting.default}" if setting.default else "no default"
        default = "needed" if setting.default is None else usual
        console.print(
            Text(setting.key, style="bold") + Text(f"{of}: {setting.kind}; {default}"),
            soft_wrap=True,
        )
        console.print(Padding(Text(setting.meaning.replace("`", "")), (0, 0, 0, 4), expand=False))
        console.print(f"    example: {setting.example}", soft_wrap=True)
