"""Charts as SVG inside a page, in the colours of its light or dark scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from equipoise.report.charts import Chart, Series, tick_label, ticks

WIDTH, HEIGHT = 400.0, 264.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 10.0, 8.0, 40.0
HUES = 8
# Longer names of columns are cut.
LONGEST = 18
# With more points than this, markers on a line hide it.
MARKED = 25
# Series differ in shape and colour.
MARKERS = (
    '<circle r="3.2"/>',
    '<path d="M-2.9-2.9h5.8v5.8h-5.8z"/>',
    '<path d="M0-3.9 3.6 2.6h-7.2z"/>',
    '<path d="M0-4.1 4.1 0 0 4.1-4.1 0z"/>',
    '<path d="M0 3.9 3.6-2.6h-7.2z"/>',
    '<path d="M-4-1.3h2.7V-4h2.6v2.7H4v2.6H1.3V4h-2.6V1.3H-4z"/>',
    '<path d="M-3.9 0 2.6-3.6v7.2z"/>',
    '<path d="M3.9 0-2.6-3.6v7.2z"/>',
)
DEFINITIONS = (
    '<svg width="0" height="0" class="defs" aria-hidden="true" focusable="false"><defs>'
    + "".join(f'<g id="marker{number}">{shape}</g>' for number, shape in enumerate(MARKERS))
    + "</defs></svg>"
)
"""The shapes of all charts of a page. The page must contain them once."""

Scale = Callable[[float], float]


def figure(chart: Chart) -> str:
    """Return a chart as an HTML figure: title, drawing and legend.

    Examples
    --------
    >>> series = Series("mean", [1, 2], [0.2, 0.5])
    >>> chart = Chart("progress", "Mean", "rises to 0.5", "round", "mean", [series])
    >>> 'role="img"' in figure(chart), "rises to 0.5" in figure(chart)
    (True, True)
    """
    said = escape(f"{chart.title}. {chart.says}", quote=True)
    drawing = (
        f'<svg viewBox="0 0 {WIDTH:g} {_height(chart):g}" role="img" aria-label="{said}">'
        f"{_drawing(chart)}</svg>"
    )
    caption = f"<figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.says)}</p></figcaption>"
    return (
        f'<figure id="{escape(chart.name, quote=True)}">{caption}{drawing}{_legend(chart)}</figure>'
    )


def _height(chart: Chart) -> float:
    return HEIGHT + _room(chart) - BOTTOM


def _room(chart: Chart) -> float:
    """Return the space below the panel, which depends on the names of columns."""
    if _slanted(chart):
        return 24 + 5.4 * min(LONGEST, max(map(len, chart.columns)))
    return BOTTOM if chart.x_label else 26.0


def _slanted(chart: Chart) -> bool:
    room = (WIDTH - LEFT - RIGHT) / max(1, len(chart.columns))
    return any(6.2 * len(name) > room for name in chart.columns)


def _drawing(chart: Chart) -> str:
    (left, right), (low, high) = chart.limits
    bottom = HEIGHT - BOTTOM

    def across(value: float) -> float:
        return LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - TOP)

    pieces = [_axes(chart, across, up)]
    if chart.diagonal:
        ends = (left, right)
        pieces.append(f'<path class="reference" d="{_path(ends, ends, across, up)}"/>')
    pieces += [_band(series, across, up) for series in chart.series if len(series.low)]
    pieces += [_series(series, across, up) for series in chart.series]
    pieces += [_names(series, across, up) for series in chart.series if series.named]
    return "".join(pieces)


def _axes(chart: Chart, across: Scale, up: Scale) -> str:
    (left, right), (low, high) = chart.limits
    bottom = HEIGHT - BOTTOM
    lines, labels = [], []
    for value in ticks(low, high):
        lines.append(f"M{LEFT:g} {up(value):.1f}H{WIDTH - RIGHT:g}")
        labels.append(
            f'<text x="{LEFT - 6:g}" y="{up(value) + 3.6:.1f}" '
            f'text-anchor="end">{tick_label(value)}</text>'
        )
    if chart.columns:
        for position, name in enumerate(chart.columns):
            shown = escape(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")
            shown += f"<title>{escape(name)}</title>" if len(name) > LONGEST else ""
            at = f"{across(position):.1f}"
            turn = (
                f' text-anchor="end" transform="rotate(-60 {at} {bottom + 14:g})"'
                if _slanted(chart)
                else ""
            )
            labels.append(f'<text x="{at}" y="{bottom + 14:g}"{turn or MIDDLE}>{shown}</text>')
    else:
        for value in ticks(left, right, whole=chart.whole):
            lines.append(f"M{across(value):.1f} {TOP:g}V{bottom:g}")
            labels.append(
                f'<text x="{across(value):.1f}" '
                f'y="{bottom + 15:g}"{MIDDLE}>{tick_label(value)}</text>'
            )
    middle = (TOP + bottom) / 2
    names = (
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:g}" '
        f'y="{_height(chart) - 6:g}"{MIDDLE}>{escape(chart.x_label)}</text><text class="axis" '
        f'transform="rotate(-90 11 {middle:g})" x="11" '
        f'y="{middle:g}"{MIDDLE}>{escape(chart.y_label)}</text>'
    )
    return f'<path class="grid" d="{"".join(lines)}"/>{"".join(labels)}{names}'


MIDDLE = ' text-anchor="middle"'


def _path(x: Sequence[float], y: Sequence[float], across: Scale, up: Scale) -> str:
    points = [f"{across(a):.1f} {up(b):.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b)]
    return "M" + "L".join(points) if points else ""


def _band(series: Series, across: Scale, up: Scale) -> str:
    edge = _path(series.x, series.low, across, up)
    back = _path(list(series.x)[::-1], list(series.high)[::-1], across, up).replace("M", "L", 1)
    return f'<path class="band h{series.hue % HUES}" d="{edge}{back}Z"/>'


def _series(series: Series, across: Scale, up: Scale) -> str:
    hue, pieces = series.hue % HUES, []
    if series.line:
        dashed = " dashed" if series.dashed else ""
        pieces.append(
            f'<path class="line{dashed} h{hue}" d="{_path(series.x, series.y, across, up)}"/>'
        )
    if not series.line or len(series.x) <= MARKED:
        names = series.names or [""] * len(series.x)
        for x, y, name in zip(series.x, series.y, names, strict=True):
            if np.isfinite(y):
                hint = f"<title>{escape(name)}: {y:.4g}</title>" if name else ""
                pieces.append(
                    f'<use href="#marker{hue}" x="{across(x):.1f}" y="{up(y):.1f}">{hint}</use>'
                )
    return f'<g class="points h{hue}">{"".join(pieces)}</g>'


def _names(series: Series, across: Scale, up: Scale) -> str:
    return "".join(
        f'<text x="{across(x):.1f}" y="{up(y) - 7:.1f}"{MIDDLE}>{escape(name)}</text>'
        for x, y, name in zip(series.x, series.y, series.names, strict=True)
    )


def _legend(chart: Chart) -> str:
    entries = [series for series in chart.series if series.label]
    if len(entries) < 2:
        return ""
    items = "".join(f"<li>{_key(series)}{escape(series.label)}</li>" for series in entries)
    return f'<ul class="legend">{items}</ul>'


def _key(series: Series) -> str:
    hue = series.hue % HUES
    dashed = " dashed" if series.dashed else ""
    line = f'<path class="line{dashed} h{hue}" d="M1 6H21"/>' if series.line else ""
    marker = (
        f'<use href="#marker{hue}" x="11" y="6"/>'
        if not series.line or len(series.x) <= MARKED
        else ""
    )
    drawn = f'<g class="points h{hue}">{line}{marker}</g>'
    return f'<svg viewBox="0 0 22 12" aria-hidden="true">{drawn}</svg>'
