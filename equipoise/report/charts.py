"""Charts: the content of figures, independent of how they are drawn.

A chart is drawn as SVG inside the report (:mod:`equipoise.report.svg`), with the colours of the
page, and with Matplotlib for papers (:mod:`equipoise.report.files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Series:
    """Points of a chart with the same style.

    Attributes
    ----------
    label : str
        The label in the legend; empty for a series that is not in the legend.
    x, y : sequences of float
        The points.
    hue : int
        The number of the colour.
    line : bool
        Whether the points are joined.
    dashed : bool
        Whether the line is dashed.
    low, high : sequences of float
        A band around the line, such as its spread; empty without one.
    names : sequences of str
        The name of each point.
    named : bool
        Whether names are shown beside the points, and not only in tooltips.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    hue: int = 0
    line: bool = True
    dashed: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    names: Sequence[str] = ()
    named: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure with one panel.

    Attributes
    ----------
    name : str
        Unique in the report; the name of its files.
    title : str
        What it shows, in a few words.
    says : str
        A text alternative for screen readers.
    x_label, y_label : str
        The labels of the axes.
    series : list of Series
        The series.
    columns : sequence of str
        Names of the positions 0, 1, ... on the x axis, if they are not numbers.
    y_range : tuple of float, optional
        A range that the y axis must include.
    whole : bool
        Whether positions on the x axis are whole numbers, such as rounds.
    diagonal : bool
        Whether to draw the line y = x.
    """

    name: str
    title: str
    says: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    columns: Sequence[str] = ()
    y_range: tuple[float, float] | None = None
    whole: bool = True
    diagonal: bool = False

    @property
    def limits(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The ranges of both axes, with a margin around the points."""
        xs = np.concatenate([np.asarray(series.x, float) for series in self.series])
        ys = [
            np.asarray(values, float)
            for s in self.series
            for values in (s.y, s.low, s.high)
            if len(values)
        ]
        y = np.concatenate([*ys, np.asarray(self.y_range or (), float)])
        if self.columns:
            return (-0.6, len(self.columns) - 0.4), _widened(y, 0.06)
        if self.diagonal:
            both = _widened(np.concatenate([xs, y]), 0.04)
            return both, both
        # The names of points need space.
        named = any(series.named for series in self.series)
        return _widened(xs, 0.14 if named else 0.02), _widened(y, 0.14 if named else 0.06)


def _widened(values: np.ndarray, share: float) -> tuple[float, float]:
    """Return the range of finite values and a margin that is a share of it."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    margin = share * (high - low) or max(abs(high) * 0.05, 0.05)
    return low - margin, high + margin


def ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Return round numbers between two values.

    Examples
    --------
    >>> ticks(0.03, 0.97)
    [0.2, 0.4, 0.6, 0.8]
    >>> ticks(-4, 510, whole=True)
    [0.0, 100.0, 200.0, 300.0, 400.0, 500.0]
    """
    rough = (high - low) / max(count, 1)
    scale = 10.0 ** np.floor(np.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = min((scale * factor for factor in factors), key=lambda size: abs(size - rough))
    if whole:
        step = max(1.0, step)
    first = int(np.ceil(low / step - 1e-9))
    last = int(np.floor(high / step + 1e-9))
    return [float(round(number * step, 12)) for number in range(first, last + 1)]


def tick_label(value: float) -> str:
    """Format the label of a tick.

    Examples
    --------
    >>> tick_label(0.25), tick_label(500.0), tick_label(-1.0)
    ('0.25', '500', '−1')
    """
    return f"{value:.6g}".replace("-", "−")
