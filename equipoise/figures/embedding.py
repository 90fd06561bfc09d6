"""Features of the global model in two dimensions by t-SNE (FFT-GP, figure 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equipoise.checks import count, one_of
from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.chunking import samples_a_pass
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.figures.drawing import GRID, HUES, INK, checked_path, panels, save
from equipoise.figures.opened import OpenedRun, open_run
from equipoise.models.passes import Forward
from equipoise.random import choose, fold

COLOURS = ("domain", "group", "label")


@dataclass(frozen=True)
class Embedding:
    """Samples as points in the plane.

    Attributes
    ----------
    points : float array
        ``[samples, 2]``.
    features : float array
        The features that were embedded, ``[samples, z]``.
    samples : int array
        Positions of the samples in the federation.
    groups, labels : int arrays
        Group and label of each sample. The label is 0 if samples have no class.
    unseen : bool array
        Whether the sample belongs to a client held out of training.
    group_names : tuple of str
        The names of the groups.
    """

    points: NDArray[np.float64]
    features: NDArray[np.float64]
    samples: NDArray[np.int64]
    groups: NDArray[np.int64]
    labels: NDArray[np.int64]
    unseen: NDArray[np.bool_]
    group_names: tuple[str, ...]


def embed_features(
    run: str | Path,
    *,
    samples: int = 300,
    perplexity: float = 30.0,
    seed: int = 0,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    device: str = "auto",
    trust: bool = False,
) -> Embedding:
    """Compute the global model's features of samples of all groups, and embed them by t-SNE.

    Seen clients contribute training samples, and unseen clients test samples.

    Parameters
    ----------
    run : path
        The run directory.
    samples : int
        The largest number of samples of each group, drawn with ``seed``. Samples of seen and unseen
        clients of a group are drawn separately.
    perplexity : float
        The perplexity of t-SNE, at most a third of the number of samples.
    seed : int
        Seed of the draw and of t-SNE.
    federation, module, device, trust
        As in :func:`equipoise.figures.opened.open_run`.

    Returns
    -------
    Embedding
        Points, features, groups and labels.

    Examples
    --------
    >>> import tempfile
    >>> from equipoise import train
    >>> from equipoise.data import load
    >>> out = tempfile.mkdtemp() + "/run"
    >>> _ = train(load("digits"), rounds=1, out=out)
    >>> embed_features(out, samples=4).points.shape
    (20, 2)
    """
    from sklearn.manifold import TSNE

    count(samples, "samples")
    opened = open_run(run, federation=federation, module=module, device=device, trust=trust)
    chosen, groups, unseen = _drawn(opened.federation, samples, seed)
    if len(chosen) < 4:
        raise InputError(f"{run}: t-SNE needs at least 4 samples, there are {len(chosen)}")
    features = _features(opened, chosen)
    tsne = TSNE(perplexity=min(perplexity, len(chosen) / 3), init="pca", random_state=seed)
    labelled = bool(opened.federation.classes) and opened.federation.y.dim() == 1
    y = opened.federation.y.numpy()[chosen] if labelled else np.zeros(len(chosen), np.int64)
    return Embedding(
        points=np.asarray(tsne.fit_transform(features.astype(np.float32)), dtype=np.float64),
        features=features,
        samples=chosen,
        groups=groups,
        labels=y,
        unseen=unseen,
        group_names=tuple(opened.federation.group_names),
    )


def _drawn(
    federation: Federation, limit: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Draw samples of each group. Return their positions, groups, and whether they are unseen."""
    positions, groups, unseen = [], [], []
    for group in range(len(federation.group_names)):
        for held_out, split in ((False, "train"), (True, "test")):
            clients = np.flatnonzero((federation.groups == group) & (federation.unseen == held_out))
            held = [federation.split(split).of(int(client)) for client in clients]
            own = np.concatenate(held) if held else np.zeros(0, np.int64)
            key = fold(seed, group, int(held_out))
            positions.append(np.sort(own[choose(key, len(own), min(limit, len(own)))]))
            groups.append(np.full(len(positions[-1]), group))
            unseen.append(np.full(len(positions[-1]), held_out))
    return np.concatenate(positions), np.concatenate(groups), np.concatenate(unseen)


@torch.no_grad()
def _features(opened: OpenedRun, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    engine = opened.engine
    parts = []
    with exact_arithmetic(engine.machine):
        for part in torch.from_numpy(positions).split(samples_a_pass(engine.network, 1)):
            x, _ = engine.data.fetch(part)
            z = engine.network.apply(opened.shared, x, Forward(train=False), part="features").z
            parts.append(z.double().flatten(1).cpu())
    return torch.cat(parts).numpy()


def draw_embeddings(
    embeddings: Mapping[str, Embedding], path: str | Path, *, by: str = "domain"
) -> Path:
    """Draw embeddings side by side.

    Parameters
    ----------
    embeddings : mapping
        Results of :func:`embed_features`, by the title of the panel.
    path : path
        Where to write the figure (.png, .svg or .pdf).
    by : {"domain", "group", "label"}
        What to colour by: ``domain``, training data of seen clients or test data of unseen ones, as
        in the paper; the group; or the label. For the last two, unseen samples are crosses.

    Returns
    -------
    Path
        Where it was written.

    Examples
    --------
    >>> draw_embeddings({}, "figure7.png", by="colour")
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown value 'colour' in by. Valid: domain, group, label
    """
    path = checked_path(path)
    one_of(by, COLOURS, "by")
    figure, axes = panels(list(embeddings), height=4.9)
    shown: dict[str, str] = {}
    crossed = False
    for panel, embedding in zip(axes, embeddings.values(), strict=True):
        _frame(panel)
        for kind in _kinds(embedding, by):
            style: dict[str, Any] = (
                {"marker": "x", "linewidths": 1.0} if kind.crosses else {"linewidths": 0}
            )
            panel.scatter(
                *embedding.points[kind.where].T, s=16, color=kind.hue, alpha=0.75, **style
            )
            shown[kind.label] = kind.hue
            crossed |= kind.crosses
    _legend(figure, shown, crossed=crossed)
    return save(figure, path)


@dataclass(frozen=True)
class _Kind:
    """Points with the same style."""

    label: str
    hue: str
    where: NDArray[np.bool_]
    crosses: bool = False


def _kinds(embedding: Embedding, by: str) -> list[_Kind]:
    unseen = embedding.unseen
    if by == "domain":
        kinds = [
            _Kind("in-domain, training data", HUES[0], ~unseen),
            _Kind("unseen, test data", HUES[1], unseen),
        ]
    else:
        values = embedding.groups if by == "group" else embedding.labels
        kinds = [
            _Kind(
                embedding.group_names[value] if by == "group" else str(value),
                _hue(value, int(values.max())),
                (values == value) & (unseen == held_out),
                crosses=held_out,
            )
            for value in np.unique(values).tolist()
            for held_out in (False, True)
        ]
    return [kind for kind in kinds if kind.where.any()]


def _hue(value: int, largest: int) -> str:
    """Return a colour, from the usual ones if there are enough, else from a colour map."""
    if largest < len(HUES):
        return HUES[value]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return str(
        to_hex(colormaps["tab10"](value) if largest < 10 else colormaps["turbo"](value / largest))
    )


def _frame(panel: Any) -> None:
    """Remove the ticks of a panel, which have no meaning in t-SNE, and draw a thin frame."""
    panel.grid(visible=False)
    panel.set(xticks=[], yticks=[])
    panel.set_box_aspect(1)
    for side in panel.spines.values():
        side.set_visible(True)
        side.set_color(GRID)


def _legend(figure: Any, hues: Mapping[str, str], *, crossed: bool) -> None:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 6}
    handles = [Line2D([], [], color=hue, label=label, **dot) for label, hue in hues.items()]
    if crossed:
        handles.append(
            Line2D([], [], color=INK, label="unseen, test data", **{**dot, "marker": "x"})
        )
    # The number of rows that the labels need, in inches.
    needed = sum(0.4 + 0.085 * len(str(handle.get_label())) for handle in handles)
    rows = math.ceil(needed / figure.get_figwidth())
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / rows),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        columnspacing=1.2,
        handletextpad=0.1,
    )
