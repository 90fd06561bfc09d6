"""Descriptions and valid values of parameters, read from docstrings."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any


def descriptions_in(made_from: Any) -> dict[str, str]:
    """Return the descriptions of parameters and attributes in a docstring.

    Those of a class include the ones of its base classes. ``See `name`.`` is replaced by the
    description of that name in the same module.
    """
    found: dict[str, str] = {}
    for described in reversed(getattr(made_from, "__mro__", (made_from,))):
        found |= _sections(inspect.getdoc(described) or "")
    for name, text in found.items():
        if seen := re.match(r"See `(\w+)`\.", text):
            there = getattr(sys.modules[made_from.__module__], seen[1], None)
            if there is not None and there is not made_from:
                found[name] = descriptions_in(there).get(name, text)
    return found


def summary_in(made_from: Any) -> str:
    """Return the first paragraph of a docstring in one line."""
    paragraph = (inspect.getdoc(made_from) or "").partition("\n\n")[0]
    return _prose(" ".join(paragraph.split()))


def choices_in(made_from: Any) -> dict[str, str]:
    """Return the valid values that a docstring lists, such as ``kind : {"a", "b"}``."""
    found = re.findall(r"^(\w+) : \{(.+)\}", inspect.getdoc(made_from) or "", re.MULTILINE)
    return {name: values.replace('"', "'") for name, values in found}


def _sections(text: str) -> dict[str, str]:
    lines, section = text.splitlines(), ""
    names: list[str] = []
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        under = lines[number + 1] if number + 1 < len(lines) else ""
        if line and under and set(under) == {"-"}:
            section, names = line, []
        elif section in ("Parameters", "Attributes") and line and set(line) != {"-"}:
            if not line.startswith(" "):
                names = [name.strip() for name in line.partition(" : ")[0].split(",")]
            for name in names if line.startswith(" ") else ():
                found.setdefault(name, []).append(line.strip())
    return {name: _prose(" ".join(said)) for name, said in found.items()}


def _prose(text: str) -> str:
    """Convert the markup of docstrings to Markdown."""
    text = re.sub(r":(?:class:`|\w+:`~)(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return re.sub(r":\w+:`", "`", text).replace("``", "`")
