"""Checks of labels, lists and overrides in studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from equipoise.config import Override
from equipoise.errors import InputError, unknown

# The longest name of a file or directory on the usual file systems, in bytes.
LONGEST_NAME = 255
# Keys that cannot be set for all runs of a study, and what to use instead.
INSTEAD = {
    **dict.fromkeys(
        ("method", "methods"), "change the methods in the study, or choose among them with --method"
    ),
    **dict.fromkeys(("seed", "seeds"), "use --seed"),
    "settings": "choose among them with --setting",
    "metrics": "use --metrics",
    "baseline": "use --baseline",
}
T = TypeVar("T")


def checked_label(given: Any, key: str, where: str) -> str:
    """Return a label that can name a directory."""
    label = (
        str(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else ""
    )
    if (
        not label
        or label.startswith(".")
        or not label.isprintable()
        or set(label) & set('/\\:|"<>*?')
    ):
        raise InputError(f"{where}: {key} has the label {given!r}, which cannot name a directory")
    if len(label.encode()) > LONGEST_NAME:
        raise InputError(
            f"{where}: {key} has the label {given!r}, which is too long to name a directory"
        )
    return label


def checked_list(given: Any, what: str, kind: type[Any]) -> list[Any]:
    """Return a list of different values of one type, checked."""
    right = isinstance(given, list | tuple) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in given
    )
    if not right or not given or len(set(given)) < len(given):
        kinds = "whole numbers" if kind is int else "names"
        raise InputError(f"{what} must be a list of different {kinds}, got {given!r}")
    return list(given)


def with_labels(there: Mapping[str, T], chosen: Sequence[str] | None, kind: str) -> dict[str, T]:
    """Return those with the given labels, in the study's order; all without labels."""
    for label in chosen or ():
        if label not in there:
            raise unknown(kind, label, there, where=f"--{kind}")
    return {label: value for label, value in there.items() if not chosen or label in chosen}


def for_all_runs(given: Sequence[str | Override]) -> list[Override]:
    """Return the overrides for every run. Keys in which the runs of a study differ are refused."""
    overrides = [item if isinstance(item, Override) else Override.parse(item) for item in given]
    for override in overrides:
        key = override.key.partition(".")[0]
        if key in INSTEAD:
            raise InputError(
                f"{override.origin}: {key} cannot be set for all runs of a study; {INSTEAD[key]}"
            )
    return overrides
