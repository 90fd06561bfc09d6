"""How generalization gaps change with the weights of clients (FFT-GP, figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from equipoise.checks import count, real
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.figures.drawing import HUES, INK, checked_path, panels, save
from equipoise.figures.opened import labels_of, open_run
from equipoise.run.files import Journal


@dataclass(frozen=True)
class GapChanges:
    """Changes of a client's aggregation weight, and of its generalization gap.

    Attributes
    ----------
    client : int
        The client's number.
    name : str
        Its name.
    weight, gap : float arrays
        Δa and ΔG, one pair per measurement.
    """

    client: int
    name: str
    weight: NDArray[np.float64]
    gap: NDArray[np.float64]

    @property
    def slope(self) -> float:
        """The least-squares slope of ΔG on Δa, −1/K in FAA; NaN if Δa does not vary."""
        if len(self.weight) < 2 or np.ptp(self.weight) == 0:
            return float("nan")
        return float(np.polyfit(self.weight, self.gap, 1)[0])

    @property
    def intercept(self) -> float:
        """The value of the least-squares line at Δa = 0."""
        return float(self.gap.mean() - self.slope * self.weight.mean())

    @property
    def correlation(self) -> float:
        """Pearson's ρ of Δa and ΔG; NaN if one of them does not vary."""
        if len(self.weight) < 2 or np.ptp(self.weight) == 0 or np.ptp(self.gap) == 0:
            return float("nan")
        return float(np.corrcoef(self.weight, self.gap)[0, 1])


def gap_changes(run: str | Path) -> list[GapChanges]:
    """Read the changes that FAA measured during training.

    These are Δa = a′ − a and ΔG = G′ − G, one pair per client and round.

    Parameters
    ----------
    run : path
        The directory of a run with FAA or FFT-GP.

    Returns
    -------
    list of GapChanges
        One per client that took part and has validation data.

    Examples
    --------
    >>> import tempfile
    >>> from equipoise import train
    >>> from equipoise.data import load
    >>> out = tempfile.mkdtemp() + "/run"
    >>> _ = train(load("digits"), method="faa", rounds=3, out=out)
    >>> len(gap_changes(out)[0].gap)
    3
    """
    measured: dict[int, list[tuple[float, float]]] = {}
    for row in Journal(Path(run) / "rounds.jsonl"):
        notes = row.get("notes", {})
        if "gap_changes" not in notes:
            continue
        for client, weight, gap in zip(
            row["clients"], notes["weight_changes"], notes["gap_changes"], strict=True
        ):
            if weight is not None and gap is not None:
                measured.setdefault(client, []).append((weight, gap))
    if not measured:
        raise InputError(
            f"{run} has no measured changes of gaps; they are noted in rounds of the methods faa "
            "and fftgp"
        )
    clients = sorted(measured)
    return [
        GapChanges(client, label, *np.array(measured[client]).T)
        for client, label in zip(clients, labels_of(run, clients), strict=True)
    ]


def sweep_gaps(
    run: str | Path,
    *,
    reach: float = 0.2,
    steps: int = 9,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    device: str = "auto",
    trust: bool = False,
) -> list[GapChanges]:
    """Change the weight of each client, and measure its gap under the average of local models.

    This is the measurement of the paper's figure 2. It starts from equal weights. The weight of the
    client is changed by Δa from −``reach`` to ``reach``, within [0, 1], and the other weights are
    scaled. The gap is the validation loss of the average minus that of the client's own local
    model.

    Parameters
    ----------
    run : path
        The directory of a run with ``evaluation.keep_local``.
    reach : float
        The largest Δa.
    steps : int
        How many values of Δa are measured.
    federation, module, device, trust
        As in :func:`equipoise.figures.opened.open_run`.

    Returns
    -------
    list of GapChanges
        One for each client with a local model and validation data.

    Examples
    --------
    >>> import tempfile
    >>> from equipoise import Evaluation, train
    >>> from equipoise.data import load
    >>> out = tempfile.mkdtemp() + "/run"
    >>> evaluation = Evaluation(keep_local=True)
    >>> _ = train(load("digits"), rounds=1, cohort=3, evaluation=evaluation, out=out)
    >>> [len(changes.gap) for changes in sweep_gaps(out, steps=5)]
    [5, 5, 5]
    """
    real(reach, "reach")
    count(steps, "steps", least=2)
    opened = open_run(
        run, federation=federation, module=module, device=device, trust=trust, local=True
    )
    clients = [c for c in opened.local.clients if opened.federation.split("val").sizes[c]]
    everyone = opened.local.clients
    if len(everyone) < 2 or not clients:
        raise InputError(f"{run}: changing weights needs two or more clients with validation data")
    equal = 1 / len(everyone)
    changes = np.linspace(-min(reach, equal), min(reach, 1 - equal), steps)

    def loss(client: int, change: float) -> float:
        factors = np.full(len(everyone), (1 - equal - change) / (len(everyone) - 1))
        factors[everyone.index(client)] = equal + change
        return float(opened.losses(opened.mixed(everyone, factors), "val", np.array([client]))[0])

    # The loss of the client's own model is the same for all weights, so it is not part of ΔG.
    return [
        GapChanges(
            client,
            label,
            changes,
            np.array([loss(client, change) for change in changes]) - loss(client, 0.0),
        )
        for client, label in zip(clients, labels_of(run, clients), strict=True)
    ]


def draw_gap_changes(changes: Mapping[str, Sequence[GapChanges]], path: str | Path) -> Path:
    """Draw ΔG against Δa, one panel per run, with a line, its slope and ρ for each client.

    Parameters
    ----------
    changes : mapping
        Results of :func:`gap_changes` or :func:`sweep_gaps`, by the title of the panel.
    path : path
        Where to write the figure (.png, .svg or .pdf).

    Returns
    -------
    Path
        Where it was written.

    Examples
    --------
    >>> import tempfile
    >>> made = GapChanges(0, "north", np.array([-0.1, 0.1]), np.array([0.02, -0.03]))
    >>> path = draw_gap_changes({"by hand": [made]}, Path(tempfile.mkdtemp()) / "figure2.svg")
    >>> path.stat().st_size > 1000
    True
    """
    path = checked_path(path)
    figure, axes = panels(list(changes))
    for panel, of_run in zip(axes, changes.values(), strict=True):
        panel.axhline(0, color=INK, linewidth=0.6)
        panel.axvline(0, color=INK, linewidth=0.6)
        for position, one in enumerate(of_run):
            _draw_client(panel, one, HUES[position % len(HUES)])
        panel.set_xlabel("change of the weight, Δa", color=INK)
        legend = panel.legend(
            fontsize=8, labelcolor=INK, framealpha=0.9, edgecolor="none", handletextpad=0.3
        )
        legend.set_zorder(5)
    axes[0].set_ylabel("change of the generalization gap, ΔG", color=INK)
    return save(figure, path)


def _draw_client(panel: Any, changes: GapChanges, hue: str) -> None:
    numbers = f"slope {changes.slope:.2f}, ρ {changes.correlation:.2f}".replace("-", "−")
    label = f"{changes.name}: {numbers}"
    panel.scatter(
        changes.weight, changes.gap, s=18, color=hue, alpha=0.75, linewidths=0, label=label
    )
    if np.isfinite(changes.slope):
        ends = np.array([changes.weight.min(), changes.weight.max()])
        panel.plot(ends, changes.intercept + changes.slope * ends, color=hue, linewidth=1.4)
