"""The command ``equipoise cache``: list and remove entries of the cache directory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from equipoise.cli.show.console import new_console, new_table
from equipoise.data.cache import cache_directory
from equipoise.data.cache_entries import Entry, entries, older, remove
from equipoise.errors import InputError
from equipoise.text import size

# Enough of a key to find its files.
_SHOWN_OF_KEY = 12


def cache(prune: float | None, clear: bool) -> dict[str, Any]:
    """Carry out the command.

    Parameters
    ----------
    prune : float, optional
        Remove entries that were not used for so many days, and damaged ones.
    clear : bool
        Whether to remove all entries.

    Returns
    -------
    dict
        The directory, the entries that are there now, those that were removed, and those that could
        not be removed because a process computes them.

    Examples
    --------
    >>> cache(prune=-1, clear=False)
    Traceback (most recent call last):
    equipoise.errors.InputError: --prune must be a number of days of at least 0, got -1
    """
    if prune is not None and clear:
        raise InputError("--prune and --clear cannot be used together; --clear removes everything")
    if prune is not None and not (math.isfinite(prune) and prune >= 0):
        raise InputError(f"--prune must be a number of days of at least 0, got {prune:g}")
    found = entries()
    wanted = found if clear else [] if prune is None else older(found, prune)
    removed = [entry for entry in wanted if remove(entry)]
    return {
        "directory": str(cache_directory()),
        "entries": [_document(entry) for entry in found if entry not in removed],
        "removed": [_document(entry) for entry in removed],
        "in_use": [entry.key for entry in wanted if entry not in removed],
    }


def print_cache(document: dict[str, Any]) -> None:
    """Print what :func:`cache` returned."""
    out = new_console()
    if document["removed"]:
        _print(out, "Removed:", document["removed"])
        out.print()
    if document["entries"]:
        _print(out, f"Cache directory {document['directory']}:", document["entries"])
    else:
        out.print(f"The cache directory {document['directory']} has no entries.")
    for key in document["in_use"]:
        out.print(f"\n{key[:_SHOWN_OF_KEY]} was not removed: a process is computing it.")


def _print(out: Any, title: str, documents: Sequence[dict[str, Any]]) -> None:
    out.print(title)
    rows = new_table("", "key", "state", "size", "days", numbers=2, last="what it is")
    for document in documents:
        shape = f", {' x '.join(map(str, document['shape']))}" if document["shape"] else ""
        rows.add_row(
            document["key"][:_SHOWN_OF_KEY],
            document["state"],
            size(document["bytes"]),
            f"{document['days']:.1f}",
            f"{document['about'] or 'not recorded'}{shape}",
        )
    out.print(rows)
    total = sum(document["bytes"] for document in documents)
    number = "1 entry" if len(documents) == 1 else f"{len(documents)} entries"
    out.print(f"{number}, {size(total)}; days since the last use")


def _document(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "state": entry.state,
        "bytes": entry.bytes,
        "days": entry.days,
        "about": entry.about,
        "shape": None if entry.shape is None else list(entry.shape),
        "files": [str(path) for path in entry.files],
    }
