"""Values that override a file, and where each value came from, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import yaml

from equipoise.documents import yaml_from
from equipoise.errors import InputError
from equipoise.text import one_line


@dataclass(frozen=True)
class Override:
    """One value that overrides a file.

    Attributes
    ----------
    key : str
        Dotted, such as ``training.optimizer.lr``.
    value : object
        The new value.
    origin : str
        Where it came from, for error messages.

    Examples
    --------
    >>> Override.parse("method.q=2").value
    2
    """

    key: str
    value: Any
    origin: str

    @classmethod
    def parse(cls, text: str, *, below: str = "") -> Override:
        """Parse ``key=value``, with the value in YAML. ``below`` is the section of the key."""
        key, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError(
                f"--set {text!r} is not of the form key=value, such as training.rounds=20"
            )
        try:
            parsed = yaml_from(value)
        except yaml.YAMLError as error:
            raise InputError(
                f"--set {text}: {value!r} is not valid YAML ({one_line(error)})"
            ) from error
        return cls(f"{below}.{key.strip()}" if below else key.strip(), parsed, f"--set {text}")


@dataclass(frozen=True)
class Origins:
    """Where values came from: a file and its overrides.

    Examples
    --------
    >>> Origins("a.yaml", (Override("seed", 3, "--seed"),)).of("seed")
    '--seed'
    """

    where: str
    overrides: tuple[Override, ...] = ()

    def of(self, key: str) -> str:
        """Return where the value of a dotted key came from.

        It is the last override at, above or below the key, or the file.
        """
        at = f"{key}."
        related = [
            item
            for item in self.overrides
            if at.startswith(f"{item.key}.") or item.key.startswith(at)
        ]
        return related[-1].origin if related else self.where

    @contextmanager
    def named(self, section: str | None = None) -> Iterator[None]:
        """Prefix errors raised inside with where the values of a section came from.

        Without a section, the overrides that the message mentions are used, or else the file.
        """
        try:
            yield
        except InputError as error:
            if section:
                places = [
                    self.where,
                    *(
                        item.origin
                        for item in self.overrides
                        if item.key.partition(".")[0] == section
                    ),
                ]
            else:
                words = set(re.findall(r"\w+", str(error)))
                set_for_it = [
                    item.origin for item in self.overrides if item.key.rpartition(".")[2] in words
                ]
                places = set_for_it or [self.where]
            named = ", ".join(filter(None, dict.fromkeys(places)))
            raise InputError(f"{named}: {error}" if named else str(error)) from error


@contextmanager
def keyed(path: str, options: Iterable[str]) -> Iterator[None]:
    """Put the whole key before messages that begin with an option, or with the end of its path."""
    try:
        yield
    except InputError as error:
        above, _, last = path.rpartition(".")
        said = re.match(rf"(?:({re.escape(last)})\.)?(\w+) ", str(error))
        if said is None or said[2] not in options:
            raise
        raise InputError(f"{above if said[1] else path}.{error}") from error


def apply_override(content: dict[str, Any], override: Override) -> None:
    """Set the value of a dotted key, and copy the mappings that contain it.

    A name that contains the key becomes a mapping with this name.
    """
    *way, last = override.key.split(".")
    for depth, key in enumerate(way):
        inner = content.get(key)
        if isinstance(inner, str):
            inner = {"kind" if key == "schedule" else "name": inner}
        if not isinstance(inner, Mapping | NoneType):
            raise InputError(
                f"{override.origin}: {'.'.join(way[: depth + 1])} is {inner!r} and has no keys of "
                "its own"
            )
        content[key] = dict(inner or {})
        content = content[key]
    content[last] = override.value
