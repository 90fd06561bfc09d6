"""The loss over the plane through three clients' local models (FFT-GP, figure 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equipoise.checks import count, real
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.figures.drawing import INK, checked_path, panels, save
from equipoise.figures.opened import OpenedRun, labels_of, open_run


@dataclass(frozen=True)
class Surface:
    """The loss over a plane of models.

    Attributes
    ----------
    x, y : float arrays
        Coordinates of the grid: Euclidean distances between parameters. The origin is the first
        model, and the second is on the x axis.
    loss : float array
        ``[y, x]``.
    models : dict
        The coordinates of the local models, and those of the global model under ``global``.
    off_plane : float
        The distance of the global model from the plane. The figure shows its projection.
    """

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    loss: NDArray[np.float64]
    models: dict[str, tuple[float, float]]
    off_plane: float


def loss_surface(
    run: str | Path,
    *,
    clients: Sequence[int] | None = None,
    steps: int = 21,
    margin: float = 0.3,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    device: str = "auto",
    trust: bool = False,
) -> Surface:
    """Compute the loss of unseen clients over the plane through three local models.

    The plane is that of Garipov et al. (2018): its axes are w₂ − w₁, and the part of w₃ − w₁ that
    is orthogonal to it. The global model of FedAvg, GA and FAA is an average of the local models,
    so with three clients it is in the plane. The loss is the mean over all test samples of the
    unseen clients.

    Parameters
    ----------
    run : path
        The directory of a run with ``evaluation.keep_local``.
    clients : sequence of int, optional
        The three clients; by default all clients with a local model, if there are three.
    steps : int
        Grid points along each axis.
    margin : float
        How far the square grid extends beyond the models, as a fraction of their extent.
    federation, module, device, trust
        As in :func:`equipoise.figures.opened.open_run`.

    Returns
    -------
    Surface
        Grid, losses and models.

    Examples
    --------
    >>> import tempfile
    >>> from equipoise import Evaluation, train
    >>> from equipoise.data import load
    >>> out = tempfile.mkdtemp() + "/run"
    >>> data = {"name": "digits", "leave_out": "textured"}
    >>> evaluation = Evaluation(keep_local=True)
    >>> _ = train(load(**data), data=data, rounds=1, cohort=3, evaluation=evaluation, out=out)
    >>> surface = loss_surface(out, steps=3)
    >>> surface.loss.shape, "global" in surface.models
    ((3, 3), True)
    """
    count(steps, "steps", least=2)
    real(margin, "margin")
    opened = open_run(
        run, federation=federation, module=module, device=device, trust=trust, local=True
    )
    chosen = _three(opened, clients)
    unseen = np.flatnonzero(opened.federation.unseen & (opened.federation.split("test").sizes > 0))
    if not len(unseen):
        raise InputError(
            f"{run}: no unseen client has test data; leave out a group (data.leave_out)"
        )
    plane = _Plane([_flat(opened, opened.mixed([client], np.ones(1))) for client in chosen])
    models = dict(zip(labels_of(run, chosen), plane.corners, strict=True))
    if opened.shared_round != opened.local.round:
        raise InputError(
            f"{run}: the global model is from round {opened.shared_round} (evaluation.select), but "
            f"the local models are from round {opened.local.round}; use evaluation.select: last"
        )
    *at, off_plane = plane.locate(_flat(opened, opened.shared))
    models["global"] = (at[0], at[1])
    corners = np.array(list(models.values()))
    low, high = corners.min(0), corners.max(0)
    # A square, so that all panels have the same shape.
    reach = (0.5 + margin) * (high - low).max()
    x, y = (np.linspace(middle - reach, middle + reach, steps) for middle in (low + high) / 2)
    sizes = opened.federation.split("test").sizes[unseen]

    def loss(across: float, up: float) -> float:
        params = opened.mixed(chosen, plane.factors(across, up))
        return float(np.average(opened.losses(params, "test", unseen), weights=sizes))

    grid = np.array([[loss(across, up) for across in x] for up in y])
    return Surface(x, y, grid, models, off_plane)


class _Plane:
    """The plane through three vectors, with coordinates in Euclidean distances."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self._origin, second, third = vectors
        first_edge, other_edge = second - self._origin, third - self._origin
        length = float(first_edge.norm())
        self._across = first_edge / length if length else first_edge
        along = float(other_edge @ self._across)
        upright = other_edge - along * self._across
        height = float(upright.norm())
        if height <= 1e-9 * float(other_edge.norm()) or not length:
            raise InputError(
                "the three local models are on a line and span no plane; choose other clients"
            )
        self._up = upright / height
        self.corners = [(0.0, 0.0), (length, 0.0), (along, height)]

    def locate(self, vector: torch.Tensor) -> tuple[float, float, float]:
        """Return the coordinates of a vector's projection, and its distance from the plane."""
        difference = vector - self._origin
        across, up = float(difference @ self._across), float(difference @ self._up)
        return across, up, float((difference - across * self._across - up * self._up).norm())

    def factors(self, across: float, up: float) -> NDArray[np.float64]:
        """Return the factors of the three vectors for a point of the plane, which sum to one."""
        _, (length, _), (along, height) = self.corners
        third = up / height
        second = (across - third * along) / length
        return np.array([1 - second - third, second, third])


def _three(opened: OpenedRun, clients: Sequence[int] | None) -> list[int]:
    there = opened.local.clients
    chosen = list(there if clients is None else clients)
    if len(set(chosen)) != 3 or not set(chosen) <= set(there):
        raise InputError(
            f"a plane needs the local models of three clients, got {chosen}; "
            f"valid: clients= three of {', '.join(map(str, there))}"
        )
    return chosen


def _flat(opened: OpenedRun, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the parameters that differ between clients as one vector."""
    names = [name for name in opened.local.own if name not in opened.engine.network.buffers]
    return torch.cat([params[name].double().flatten().cpu() for name in names])


def _said(name: str, surface: Surface) -> str:
    """Return a name with the distance from the plane, if it is visible in the figure."""
    far = surface.off_plane > 0.01 * float(np.ptp(surface.x))
    return f"{name}, {surface.off_plane:.2g} off the plane" if far else name


def draw_surfaces(surfaces: Mapping[str, Surface], path: str | Path) -> Path:
    """Draw surfaces side by side with a common colour scale and the models marked.

    Parameters
    ----------
    surfaces : mapping
        Results of :func:`loss_surface`, by the title of the panel.
    path : path
        Where to write the figure (.png, .svg or .pdf).

    Returns
    -------
    Path
        Where it was written.

    Examples
    --------
    >>> draw_surfaces({}, "loss.jpeg")
    Traceback (most recent call last):
    equipoise.errors.InputError: cannot draw to 'loss.jpeg'; its name must end in .png, .svg, .pdf
    """
    path = checked_path(path)
    figure, axes = panels(list(surfaces))
    values = np.concatenate([surface.loss.ravel() for surface in surfaces.values()])
    levels = np.linspace(values.min(), max(values.max(), values.min() + 1e-6), 25)
    for panel, surface in zip(axes, surfaces.values(), strict=True):
        panel.grid(visible=False)
        filled = panel.contourf(surface.x, surface.y, surface.loss, levels=levels, cmap="viridis_r")
        panel.contour(
            surface.x, surface.y, surface.loss, levels=levels[::2], colors="white", linewidths=0.4
        )
        for name, (across, up) in surface.models.items():
            is_global = name == "global"
            style = {"marker": "*", "s": 170} if is_global else {"marker": "o", "s": 46}
            panel.scatter(
                across,
                up,
                color="#d55e00" if is_global else "white",
                edgecolors=INK,
                zorder=3,
                **style,
            )
            panel.annotate(
                _said(name, surface) if is_global else name,
                (across, up),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=INK,
                bbox={
                    "boxstyle": "round,pad=0.15",
                    "facecolor": "white",
                    "alpha": 0.75,
                    "linewidth": 0,
                },
            )
        panel.set_aspect("equal")
        panel.set_xlabel("distance of parameters", color=INK)
    axes[0].set_ylabel("distance of parameters", color=INK)
    bar = figure.colorbar(filled, ax=axes, fraction=0.05, format="%.2f")
    bar.ax.tick_params(labelsize=8, labelcolor=INK)
    bar.set_label("test loss of unseen clients", color=INK)
    bar.outline.set_visible(False)
    return save(figure, path)
