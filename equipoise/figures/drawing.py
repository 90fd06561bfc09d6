"""The common style of all figures."""

from __future__ import annotations

from typing import Any

from equipoise.data.picture import GRID, HUES, INK, checked_path, quiet, save
from equipoise.errors import InputError

__all__ = ["GRID", "HUES", "INK", "checked_path", "new_figure", "panels", "quiet", "save"]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of matplotlib, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "drawing needs matplotlib; install it with pip install 'equipoise[report]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def panels(
    titles: list[str], *, width: float = 4.6, height: float = 4.0, **shared: Any
) -> tuple[Any, list[Any]]:
    """Return a figure with one panel for each title, side by side."""
    if not titles:
        raise InputError("there is nothing to draw; at least one panel is needed")
    figure = new_figure(width * len(titles), height)
    axes = figure.subplots(1, len(titles), squeeze=False, **shared)[0]
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, color=INK, fontsize=11)
        panel.grid(color=GRID, linewidth=0.8)
        quiet(panel)
    return figure, list(axes)
