"""Checks of the description that a client sends when it registers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from equipoise import tasks
from equipoise.federation import SPLITS
from equipoise.flower.checks import (
    LARGEST_SHAPE,
    LONGEST_NAME,
    MOST_AXES,
    MOST_NAMES,
    Misfit,
    several,
    shown,
)
from equipoise.flower.roster import Description
from equipoise.flower.settings import FlowerSettings

# The sum of the sizes of all clients fits in an int64.
LARGEST_SIZE = 10**12
_MOST_OUTPUTS = 10**7
_LONGEST_REGISTRATION = 4_000_000


def read_registration(content: RecordDict, settings: FlowerSettings) -> Description:
    """Read the description that a client sends when it registers.

    Parameters
    ----------
    content : RecordDict
        The message.
    settings : FlowerSettings
        The settings, with the valid client numbers.

    Returns
    -------
    Description
        The description, with valid values. The roster checks whether it fits the other clients.

    Raises
    ------
    Misfit
        If something is missing, is of another type, or is out of range.

    Examples
    --------
    >>> from equipoise.data import load
    >>> said = Description.of(load("digits"), 3)
    >>> message = RecordDict({"about": ConfigRecord({"text": said.text()})})
    >>> read_registration(message, FlowerSettings()) == said
    True
    """
    record = content.get("about")
    text = record.get("text") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise Misfit("it registered without a description")
    if len(text) > _LONGEST_REGISTRATION:
        raise Misfit(
            f"it registered with {len(text)} characters; valid: {_LONGEST_REGISTRATION} or fewer"
        )
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Misfit(f"it registered with a description that is no JSON: {shown(text)}") from error
    if not isinstance(plain, dict):
        raise Misfit(f"it registered with {shown(plain)} instead of a description")
    fields = {each.name: each for each in dataclasses.fields(Description)}
    if strays := set(plain) - set(fields):
        raise Misfit(f"it registered with values that were not requested: {several(strays)}")
    for name, each in fields.items():
        if name not in plain and each.default is dataclasses.MISSING:
            raise Misfit(f"it registered without {name}")
    checks = _registration_checks(settings)
    for name, value in plain.items():
        if wrong := checks.get(name, _no_text)(value):
            given = f"'{shown(value)}'" if isinstance(value, str) else shown(value)
            raise Misfit(f"it registered with {name} {given}; valid: {wrong}")
    said = Description.read(text)
    _check_together(said)
    return said


def _registration_checks(settings: FlowerSettings) -> dict[str, Callable[[Any], str | None]]:
    """Return a check for each value of a registration, which returns what is valid, or ``None``."""
    return {
        "client": lambda value: _no_count(
            value, 0, settings.largest_client, " (flower.max_client)"
        ),
        "group_names": lambda value: _no_names(value, MOST_NAMES),
        "unseen": lambda value: None if isinstance(value, bool) else "true or false",
        "sizes": _no_sizes,
        "task": lambda value: (
            None if isinstance(value, str) and value in tasks.names() else ", ".join(tasks.names())
        ),
        "shape": _no_shape,
        "outputs": lambda value: _no_count(value, 1, _MOST_OUTPUTS),
        "class_names": lambda value: (
            None if value is None else _no_names(value, _MOST_OUTPUTS, unique=False)
        ),
    }


def _no_text(value: Any) -> str | None:
    fits = isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()
    return None if fits else f"up to {LONGEST_NAME} printable characters"


def _no_count(value: Any, least: int, most: int, where: str = "") -> str | None:
    fits = type(value) is int and least <= value <= most
    return None if fits else f"a whole number from {least} to {most}{where}"


def _no_names(value: Any, most: int, *, unique: bool = True) -> str | None:
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= most
        or any(_no_text(name) for name in value)
    ):
        return f"a list of up to {most} names of up to {LONGEST_NAME} printable characters"
    return None if not unique or len(set(value)) == len(value) else "names that are all different"


def _no_sizes(value: Any) -> str | None:
    fits = isinstance(value, dict) and set(value) == set(SPLITS)
    if fits and not any(_no_count(size, 0, LARGEST_SIZE) for size in value.values()):
        return None
    return f"for each of {', '.join(SPLITS)} a whole number from 0 to {LARGEST_SIZE:g}"


def _no_shape(value: Any) -> str | None:
    fits = isinstance(value, list) and len(value) <= MOST_AXES
    if (
        fits
        and not any(_no_count(length, 1, LARGEST_SHAPE) for length in value)
        and math.prod(value) < LARGEST_SHAPE
    ):
        return None
    return f"up to {MOST_AXES} whole numbers from 1 whose product is below {LARGEST_SHAPE:g}"


def _check_together(said: Description) -> None:
    """Refuse values that are valid by themselves but not together."""
    if said.group not in said.group_names:
        raise Misfit(
            f"it registered with the unknown group {shown(said.group)}; valid: "
            f"{several(said.group_names)}"
        )
    if not said.unseen and not said.sizes["train"]:
        raise Misfit(
            "it registered without training samples; valid: one or more, or unseen=true for a "
            "client to test on"
        )
    if said.class_names is not None and len(said.class_names) != said.outputs:
        raise Misfit(
            f"it registered with {len(said.class_names)} class_names for {said.outputs} outputs"
        )


def usual_first(newcomers: Iterable[Description]) -> list[Description]:
    """Order new clients by number, but first those whose data need the most frequent model.

    The first client that is admitted decides which model all others must fit; a single one must not
    decide that.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from equipoise.data import load
    >>> digits = [Description.of(load("digits"), client) for client in range(3)]
    >>> [said.client for said in usual_first([replace(digits[0], outputs=9), *digits[1:]])]
    [1, 2, 0]
    """
    needs = {
        said.client: (said.task, said.shape, said.outputs, said.class_names) for said in newcomers
    }
    newcomers = sorted(newcomers, key=lambda said: said.client)
    counted = Counter(needs[said.client] for said in newcomers)
    usual = max(counted, key=lambda need: counted[need], default=None)
    return sorted(newcomers, key=lambda said: needs[said.client] != usual)
