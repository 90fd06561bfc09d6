"""Pictures of a federation: the size, labels and group of each client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import InputError
from equipoise.federation import SPLITS, Federation

if TYPE_CHECKING:
    from equipoise.client_index import ClientIndex

FORMATS = (".png", ".svg", ".pdf")
INK, GRID, PAPER = "#2b2d33", "#e6e8ec", "#f6f7f9"
# Okabe and Ito's colours, which are suitable for colour-blind readers.
HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c6d31")


def draw(federation: Federation, path: str | Path) -> Path:
    """Draw every client as a column: its size above and its labels below.

    Clients are ordered and coloured by group. In the lower panel, a darker cell means a larger
    share of that label among the client's samples. Unseen clients are hatched. The picture is
    intended for up to about 200 clients.

    Parameters
    ----------
    federation : Federation
        What to draw.
    path : str or Path
        Where to write it; the suffix (.png, .svg or .pdf) decides the format.

    Returns
    -------
    Path
        Where it was written.

    Examples
    --------
    >>> import tempfile
    >>> from equipoise.data import load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw(load("digits"), Path(folder) / "digits.png").stat().st_size > 10_000
    True
    """
    path = checked_path(path)
    from matplotlib.figure import Figure

    sizes = np.sum([federation.split(name).sizes for name in SPLITS], axis=0)
    order = np.lexsort((sizes, federation.groups))
    rows = (federation.classes or 0) if federation.labelled else 0
    label_height = min(6.0, 0.7 + 0.24 * rows) if rows else 0.0
    figure = Figure(
        figsize=(min(20.0, max(7.5, 3.0 + 0.16 * len(order))), 3.4 + label_height),
        layout="constrained",
    )
    if rows:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, label_height))
        _draw_labels(below, federation, order)
    else:
        above = below = figure.subplots()
    _draw_sizes(above, federation, order, sizes)
    _name_clients(below, order)
    _title_and_groups(figure, federation, sizes)
    return save(figure, path)


def draw_similarity(index: ClientIndex, federation: Federation, path: str | Path) -> Path:
    """Draw the similarities of clients' indices as matrices, ordered by group.

    There is one panel for the whole index, one for its feature part and one for its label part.

    Parameters
    ----------
    index : ClientIndex
        Of clients of the federation.
    federation : Federation
        The federation, which has the groups of the clients.
    path : str or Path
        Where to write it; the suffix (.png, .svg or .pdf) decides the format.

    Returns
    -------
    Path
        Where it was written.

    Examples
    --------
    >>> import tempfile, torch
    >>> from equipoise.client_index import make_index
    >>> from equipoise.data import load
    >>> digits = load("digits")
    >>> index = make_index(digits, lambda x, y: (x.flatten(1), torch.eye(10)[y]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_similarity(index, digits, Path(folder) / "index.png").stat().st_size > 10_000
    True
    """
    path = checked_path(path)
    from matplotlib.figure import Figure

    groups = federation.groups[index.ids]
    order = np.argsort(groups, kind="stable")
    figure = Figure(figsize=(13.0, 4.6), layout="constrained")
    for axes, (compare, title) in zip(
        figure.subplots(1, len(_TITLES)), _TITLES.items(), strict=True
    ):
        shown = axes.imshow(
            index.similarity(compare).numpy()[np.ix_(order, order)], vmin=-1, vmax=1, cmap="RdBu_r"
        )
        for edge in np.flatnonzero(np.diff(groups[order])) + 0.5:
            axes.axhline(edge, color=INK, linewidth=0.8)
            axes.axvline(edge, color=INK, linewidth=0.8)
        middles = [
            float(np.flatnonzero(groups[order] == group).mean()) for group in np.unique(groups)
        ]
        axes.set_yticks(middles, [federation.group_names[group] for group in np.unique(groups)])
        axes.set_xticks([])
        axes.set_title(title, color=INK, fontsize=10)
        quiet(axes)
    figure.colorbar(shown, ax=figure.axes, label="mean cosine", shrink=0.8)
    return save(figure, path)


_TITLES = {"both": "client index", "features": "feature index", "labels": "label index"}


def checked_path(path: str | Path) -> Path:
    """Refuse a path whose suffix is not a picture format.

    Examples
    --------
    >>> checked_path("runs/digits.png").suffix
    '.png'
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"cannot draw to {str(path)!r}; its name must end in {', '.join(FORMATS)}")
    return Path(path)


def save(figure: Any, path: Path) -> Path:
    """Write a Matplotlib figure. The same figure gives the same file."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "equipoise"}):
        figure.savefig(
            path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None
        )
    return path


def _draw_sizes(
    axes: Any, federation: Federation, order: NDArray[np.int64], sizes: NDArray[np.int64]
) -> None:
    for column, client in enumerate(order):
        hue, unseen = _hue(federation.groups[client]), federation.unseen[client]
        style = {"facecolor": "white", "hatch": "//////"} if unseen else {"facecolor": hue}
        axes.bar(
            column,
            sizes[client],
            width=0.84,
            edgecolor=hue,
            linewidth=0.8 if unseen else 0,
            **style,
        )
    axes.set_ylabel("samples", color=INK)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    quiet(axes)


def _draw_labels(axes: Any, federation: Federation, order: NDArray[np.int64]) -> None:
    from matplotlib.colors import to_rgb

    counts = federation.label_counts()[order]
    shares = (counts / np.maximum(1, counts.sum(axis=1, keepdims=True))).T
    hues = np.array([to_rgb(_hue(group)) for group in federation.groups[order]])
    strength = (shares / shares.max())[..., None] ** 0.7  # lifts small shares into view
    paper = np.array(to_rgb(PAPER))
    axes.imshow(
        paper + strength * (hues - paper), aspect="auto", interpolation="nearest", origin="lower"
    )
    step = -(-len(shares) // 16)
    axes.set_yticks(range(0, len(shares), step))
    axes.set_ylabel("label", color=INK)
    for edge in np.arange(len(shares) - 1) + 0.5:
        axes.axhline(edge, color="white", linewidth=0.8 if len(shares) <= 20 else 0.3)
    for edge in np.arange(len(order) - 1) + 0.5:
        axes.axvline(edge, color="white", linewidth=0.8 if len(order) <= 80 else 0.3)
    quiet(axes)


def _title_and_groups(figure: Any, federation: Federation, sizes: NDArray[np.int64]) -> None:
    from matplotlib.patches import Patch

    handles = []
    for group, name in enumerate(federation.group_names):
        mine = federation.groups == group
        clients = "1 client" if mine.sum() == 1 else f"{mine.sum()} clients"
        handles.append(
            Patch(color=_hue(group), label=f"{name}\n{clients}, {sizes[mine].sum():,} samples")
        )
    if federation.unseen.any():
        label = f"unseen\n{federation.unseen.sum()} of {federation.clients} clients"
        handles.append(
            Patch(facecolor="white", edgecolor=INK, hatch="//////", linewidth=0.8, label=label)
        )
    columns = max(1, int(figure.get_figwidth() / 1.8))
    title = f"{federation.name}: {federation.clients} clients, {sizes.sum():,} samples"
    legend = figure.legend(
        handles=handles,
        title=title,
        title_fontproperties={"size": 13, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=min(columns, len(handles)),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1.2,
        handleheight=1.2,
    )
    legend.get_title().set_color(INK)


def _name_clients(axes: Any, order: NDArray[np.int64]) -> None:
    step = -(-len(order) // 50)
    columns = range(0, len(order), step)
    axes.set_xticks(columns, [str(order[column]) for column in columns], fontsize=7)
    axes.set_xlim(-0.5, len(order) - 0.5)
    axes.set_xlabel("client", color=INK)


def quiet(axes: Any) -> None:
    """Remove frame and ticks of a panel."""
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def _hue(group: int | np.integer[Any]) -> str:
    return HUES[int(group) % len(HUES)]
