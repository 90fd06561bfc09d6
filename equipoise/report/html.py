"""Pieces of HTML: sections, tables, numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from equipoise.report.charts import Chart
from equipoise.report.svg import figure
from equipoise.study import numbers as cells


@dataclass(frozen=True)
class Section:
    """A section of a report, or the reason why it is left out.

    Attributes
    ----------
    name : str
        Its anchor.
    title : str
        Its heading.
    body : str
        HTML before the charts.
    charts : list of Chart
        Its figures.
    after : str
        HTML after the charts.
    missing : str
        Why there is nothing to show; empty if there is something.
    """

    name: str
    title: str
    body: str = ""
    charts: list[Chart] = field(default_factory=list)
    after: str = ""
    missing: str = ""

    def html(self) -> str:
        """Return the section as HTML."""
        figures = "".join(figure(chart) for chart in self.charts)
        drawn = f'<div class="figures">{figures}</div>' if figures else ""
        heading = f'<h2 id="{self.name}-title">{escape(self.title)}</h2>'
        inner = heading + self.body + drawn + self.after
        return f'<section id="{self.name}" aria-labelledby="{self.name}-title">{inner}</section>'


@dataclass(frozen=True)
class Cell:
    """A cell of a table: HTML, and a CSS class."""

    html: str
    look: str = ""


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    *,
    texts: Iterable[int] = (),
) -> str:
    """Return a table whose first column has the headers of its rows.

    Parameters
    ----------
    caption : str
        The caption.
    header : sequence of str
        Headers of the columns.
    rows : iterable of sequences
        Plain text, or cells.
    texts : iterable of int
        The columns with text instead of numbers, besides the first.

    Returns
    -------
    str
        HTML. A wide table can be scrolled, also with the keyboard.

    Examples
    --------
    >>> "a &amp; b</th><td>1</td>" in table("sizes", ["name", "size"], [["a & b", "1"]])
    True
    """
    textual = set(texts)
    head = "".join(
        f'<th scope="col"{TEXT if position in textual or not position else ""}>'
        f"{escape(name).replace('_', '_<wbr>')}</th>"
        for position, name in enumerate(header)
    )
    body = "".join(f"<tr>{_row(row, textual)}</tr>" for row in rows)
    said = escape(caption, quote=True)
    return (
        f'<div class="scroll" role="region" aria-label="{said}" '
        f'tabindex="0"><table><caption><span>{escape(caption)}</span></caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


TEXT = ' class="text"'


def _row(row: Sequence[str | Cell], textual: set[int]) -> str:
    cells = [cell if isinstance(cell, Cell) else Cell(escape(cell)) for cell in row]
    pieces = [f'<th scope="row">{cells[0].html}</th>']
    for position, cell in enumerate(cells[1:], start=1):
        look = " ".join(filter(None, ["text" if position in textual else "", cell.look]))
        pieces.append(f'<td class="{look}">{cell.html}</td>' if look else f"<td>{cell.html}</td>")
    return "".join(pieces)


def listing(label: str, text: str) -> str:
    """Return text as it is written. Long lines scroll, also with the keyboard.

    Examples
    --------
    >>> listing("settings", "a < b")
    '<pre role="region" aria-label="settings" tabindex="0"><code>a &lt; b</code></pre>'
    """
    said = escape(label, quote=True)
    return f'<pre role="region" aria-label="{said}" tabindex="0"><code>{escape(text)}</code></pre>'


def details(summary: str, body: str) -> str:
    """Return an element that is collapsed at first."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def answered(score: str, answers: Mapping[str, str]) -> str:
    """Return questions about a score with their answers."""
    items = "".join(
        f"<div><dt>{question}</dt><dd>{escape(answer)}</dd></div>"
        for question, answer in answers.items()
    )
    return f'<h3>Which {escape(score)} is it?</h3><dl class="which">{items}</dl>'


def number(value: float | None, style: str = cells.USUAL) -> str:
    """Format a value of a metric; see :func:`equipoise.study.numbers.number`.

    Examples
    --------
    >>> number(0.12345), number(None), number(12345.6), number(-0.00027)
    ('0.123', '–', '12,346', '−0.00027')
    """
    return cells.number(value, style).replace("-", "−")


def numbers(values: Iterable[float | None]) -> list[str]:
    """Format values that are shown together.

    Examples
    --------
    >>> numbers([0.0031, -0.00027])
    ['0.0031', '−0.0003']
    """
    return [cell.replace("-", "−") for cell in cells.numbers(values)]


def spread(values: Sequence[float], style: str = cells.USUAL) -> str:
    """Format mean ± sample standard deviation.

    Examples
    --------
    >>> spread([0.5, 0.7]), spread([0.5]), spread([])
    ('0.600 ± 0.141', '0.500', '–')
    """
    mean, deviation, _ = cells.mean_and_std(values)
    return "–" if mean is None else cells.with_spread(mean, deviation, style).replace("-", "−")


def slug(text: str) -> str:
    """Convert a label to an anchor or a file name.

    Examples
    --------
    >>> slug("qffl, q=0.5")
    'qffl-q-0-5'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"
