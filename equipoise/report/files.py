"""Charts as files for papers, drawn with Matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.errors import InputError
from equipoise.figures.drawing import GRID, HUES, INK, new_figure, quiet, save
from equipoise.report.charts import Chart, Series
from equipoise.report.svg import MARKED

FORMATS = ("png", "pdf", "svg")
# The shapes of :data:`equipoise.report.svg.MARKERS`.
SHAPES = ("o", "s", "^", "D", "v", "P", "<", ">")


def save_figures(charts: Iterable[Chart], directory: str | Path) -> list[Path]:
    """Write each chart as PNG, PDF and SVG.

    Parameters
    ----------
    charts : iterable of Chart
        The charts.
    directory : path
        Where to write the files. They are named after the charts.

    Returns
    -------
    list of Path
        The files.

    Examples
    --------
    >>> import tempfile
    >>> chart = Chart("mean", "Mean", "", "round", "mean", [Series("mean", [1, 2], [0.2, 0.5])])
    >>> [path.name for path in save_figures([chart], tempfile.mkdtemp())]
    ['mean.png', 'mean.pdf', 'mean.svg']
    """
    directory = Path(directory)
    written = []
    for chart in charts:
        figure = _drawn(chart)
        for suffix in FORMATS:
            try:
                written.append(save(figure, directory / f"{chart.name}.{suffix}"))
            except OSError as error:
                raise InputError(
                    f"cannot write figures to {directory}: {error.strerror}"
                ) from error
    return written


def _drawn(chart: Chart) -> Any:
    figure = new_figure(max(5.2, 0.45 * len(chart.columns)), 3.8)
    panel = figure.subplots()
    panel.set_title(chart.title, color=INK, fontsize=11)
    panel.grid(color=GRID, linewidth=0.8)
    quiet(panel)
    (left, right), (low, high) = chart.limits
    panel.set_xlim(left, right)
    panel.set_ylim(low, high)
    panel.set_xlabel(chart.x_label, color=INK)
    panel.set_ylabel(chart.y_label, color=INK)
    if chart.columns:
        panel.set_xticks(
            range(len(chart.columns)), chart.columns, rotation=35, ha="right", fontsize=8
        )
    elif chart.whole:
        panel.xaxis.get_major_locator().set_params(integer=True)
    if chart.diagonal:
        panel.plot((left, right), (left, right), color=INK, linewidth=0.8, linestyle=":")
    for series in chart.series:
        _draw_series(panel, series)
        if series.named:
            for x, y, name in zip(series.x, series.y, series.names, strict=True):
                panel.annotate(
                    name,
                    (x, y),
                    xytext=(0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=INK,
                )
    if sum(bool(series.label) for series in chart.series) > 1:
        # Outside the panel, where it does not cover marks.
        figure.legend(
            loc="outside lower center",
            ncols=4,
            fontsize=8,
            labelcolor=INK,
            edgecolor="none",
            handletextpad=0.4,
        )
    return figure


def _draw_series(panel: Any, series: Series) -> None:
    hue, shape = HUES[series.hue % len(HUES)], SHAPES[series.hue % len(SHAPES)]
    x, y = np.asarray(series.x, float), np.asarray(series.y, float)
    if len(series.low):
        panel.fill_between(
            x,
            np.asarray(series.low, float),
            np.asarray(series.high, float),
            color=hue,
            alpha=0.18,
            linewidth=0,
        )
    marker = shape if not series.line or len(x) <= MARKED else None
    style = ("--" if series.dashed else "-") if series.line else "none"
    panel.plot(
        x,
        y,
        color=hue,
        linestyle=style,
        linewidth=1.5,
        marker=marker,
        markersize=4 if series.line else 4.5,
        markeredgewidth=0,
        label=series.label or "_",
    )
