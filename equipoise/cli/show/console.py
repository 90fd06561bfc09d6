"""Consoles, tables and numbers for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def new_console(*, stderr: bool = False) -> Console:
    """Return a console without markup, because names of groups and clients may look like it."""
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = UNLIMITED
    return console


def has_styles(console: Console) -> bool:
    """Return whether a console shows bold and underlined text."""
    return console.color_system is not None


def new_table(title: str, *columns: str, numbers: int = 0, last: str | None = None) -> Table:
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


def number(value: float | None) -> str:
    """Return a number as a cell of a table."""
    return "–" if value is None else f"{value:.3f}"
