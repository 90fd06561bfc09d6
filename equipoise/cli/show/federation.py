"""A federation and its client index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from equipoise.cli.show.console import new_console, new_table, number
from equipoise.client_index import COMPARED, ClientIndex, similarity_by_group
from equipoise.data import draw as draw_federation
from equipoise.data.columns import Overview
from equipoise.data.picture import draw_similarity
from equipoise.errors import InputError, few
from equipoise.federation import SPLITS, Federation


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
        "columns": [asdict(column) for column in federation.columns.overview]
        if federation.columns
        else None,
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


def show_federation(federation: Federation, picture: Path | None) -> None:
    """Show a federation."""
    console, document = new_console(), federation_document(federation, picture)
    columns = ("client", "name", "group", "", "train", "val", "test")
    last = "labels" if federation.labelled else ""
    table = new_table(f"clients of {federation.name}", *columns, numbers=3, last=last)
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
    totals = new_table("\ngroups", "group", "clients", "unseen", "train", "val", "test", numbers=5)
    for row in document["groups"]:
        totals.add_row(*(str(value) for value in row.values()))
    console.print(totals)
    if federation.columns and federation.columns.overview:
        console.print(_columns(federation.columns.overview))
    if picture:
        console.print(f"\npicture: {picture}", soft_wrap=True)
    else:
        console.print(
            "\nno picture: matplotlib is not installed (pip install 'equipoise[report]')",
            soft_wrap=True,
        )


def _columns(overview: Sequence[Overview]) -> Table:
    """Return a table of what a file has in its columns."""
    names = ("column", "role", "kind", "different", "missing")
    table = new_table("\ncolumns of the file", *names, numbers=2, last="values")
    for column in overview:
        counts = (str(column.different), str(column.missing))
        shown = (
            few(column.values)
            if column.range is None
            else " to ".join(f"{number:g}" for number in column.range)
        )
        table.add_row(column.name, column.role, column.kind, *counts, shown)
    return table


def _histogram(counts: list[int]) -> str:
    """Return counts as a row of blocks of different heights; a dot for 0."""
    blocks, top = "▁▂▃▄▅▆▇█", max(counts, default=0)
    return "".join(
        "·" if not count else blocks[(count * len(blocks) - 1) // top] for count in counts
    )


def read_index(path: Path, federation: Federation) -> tuple[ClientIndex, str]:
    """Read the rows that a client index has of the clients of a federation, and its hash."""
    index = ClientIndex.read(path)
    ids, names = index.ids, []
    if index.names is not None:
        every = [federation.client_name(client) for client in range(federation.clients)]
        ids = np.flatnonzero(np.isin(every, index.names))
        names = [every[client] for client in ids]
        if not names:
            raise InputError(
                f"--index {path}: none of its clients ({few(index.names)}) is in "
                f"{federation.name!r}, which has {few(every)}"
            )
    try:
        found = index.matched(ids, names, federation.clients)
    except InputError as error:
        raise InputError(f"--index {path}: {error}") from error
    return found, index.digest()


def index_document(
    index: ClientIndex, digest: str, federation: Federation, picture: Path | None
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
        "digest": digest,
        "epsilon": index.epsilon,
        "group_names": [federation.group_names[group] for group in sorted(set(groups.tolist()))],
        "similarity": {
            compare: {key: plain(value) for key, value in found.items()}
            for compare, found in compared.items()
        },
        "picture": str(picture) if picture else None,
    }


def show_index(
    index: ClientIndex, digest: str, federation: Federation, picture: Path | None
) -> None:
    """Show how similar the indices of clients are."""
    console, document = new_console(), index_document(index, digest, federation, picture)
    table = new_table(
        f"mean cosines of {len(index.ids)} clients of {federation.name}",
        *("index", "within groups", "between groups", "nearest client in the same group"),
        numbers=3,
    )
    for compare, found in document["similarity"].items():
        share = "–" if found["nearest"] is None else f"{found['nearest']:.1%}"
        table.add_row(compare, number(found["within"]), number(found["between"]), share)
    console.print(table)
    names = document["group_names"]
    between = new_table(
        "\nbetween groups, both parts of the index", "group", *names, numbers=len(names)
    )
    for name, row in zip(names, document["similarity"]["both"]["groups"], strict=True):
        between.add_row(name, *(number(value) for value in row))
    console.print(between)
    if picture:
        console.print(f"\npicture: {picture}", soft_wrap=True)
