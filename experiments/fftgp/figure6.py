r"""FFT-GP, figure 6: the variance of generalization gaps under FedAvg, GA and FAA by round.

The method ``fairnesscurves`` trains with FAA and measures the gaps of the same local models under
all three aggregations in every round. With the local rule of BGP it is the paper's setting. On the
embedded digits, with one client per style and one style left out:

    equipoise run --import experiments/fftgp/figure6.py --method fairnesscurves --data digits \
        --set 'data.partition={name: group, imbalance: 1, clients_per_group: [1, 1, 1, 1, 1]}' \
        --set data.imbalance=1 --set data.leave_out=textured \
        --set 'data.splits=[0.6, 0.2, 0.2]' --rounds 20 --out runs/figure6
    python experiments/fftgp/figure6.py runs/figure6 --out figure6.png

The paper does not specify the following, which is our choice: GA has its own weights and adjusts
them by the gaps under its own average, not under that of FAA. FedAvg uses the weights of the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from equipoise.errors import unknown
from equipoise.figures.drawing import HUES, INK, panels, save
from equipoise.method import Cohort, Sees, State, Updates, locate, mix
from equipoise.methods import register
from equipoise.methods.fftgp import FairnessAwareAggregation
from equipoise.methods.ga import generalization_adjustment
from equipoise.run.directory import read_config
from equipoise.run.files import Journal

AGGREGATIONS = {"fedavg": "FedAvg", "ga": "GA", "faa": "FAA"}


@register("fairnesscurves", paper="FFT-GP, FITEE 2024, figure 6", sees=Sees.SCALARS)
@dataclass(frozen=True)
class FairnessCurves(FairnessAwareAggregation):
    """FAA that also records the variance of gaps under FedAvg, GA and FAA.

    Parameters
    ----------
    step, decay, centred, metric, every, slope_limit
        As in FAA. GA also uses the first four.
    follow : {"faa", "fedavg", "ga"}
        The average that becomes the next global model.
    """

    follow: str = "faa"

    def __post_init__(self) -> None:
        """Refuse an unknown aggregation."""
        super().__post_init__()
        if self.follow not in AGGREGATIONS:
            raise unknown("value", self.follow, AGGREGATIONS, where=f"{self.name}.follow")

    def begin(self, state: State, everyone: Cohort) -> State:
        """Start with equal weights."""
        begun = super().begin(state, everyone)
        clients = begun.server["clients"]
        return begun.with_server(
            adjusted={name: clients[name].clone() for name in ("ids", "weight")}
        )

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Aggregate by FAA, and measure the gaps under all three aggregations."""
        combined = super().combine(state, updates, cohort)
        kept = combined.server["adjusted"]
        here = locate(kept, cohort)
        adjusted = kept["weight"][here] / kept["weight"][here].sum()
        weights = {"fedavg": cohort.prior, "ga": adjusted, "faa": combined.notes["weights"]}
        gaps = {
            name: self._measured(state, updates, cohort, of_clients)
            for name, of_clients in weights.items()
        }
        variances = torch.stack([_variance(gaps[name]) for name in AGGREGATIONS])
        following = generalization_adjustment(
            adjusted, gaps["ga"], self.step_in(state, cohort), self.centred
        )
        changed = kept["weight"].index_put((here,), following * kept["weight"][here].sum())
        if self.follow != "faa":
            combined = combined.with_global(mix(updates, weights[self.follow]))
        return combined.with_server(adjusted={**kept, "weight": changed}).with_notes(
            gap_variances=variances
        )


def _variance(gaps: torch.Tensor) -> torch.Tensor:
    """Return the population variance over clients that have a gap."""
    return gaps[torch.isfinite(gaps)].var(unbiased=False)


def read(run: Path) -> dict[str, list[float]]:
    """Return the variance of gaps by aggregation, one value per round."""
    rows = [
        row["notes"]["gap_variances"] for row in Journal(run / "rounds.jsonl") if "notes" in row
    ]
    return {name: [row[position] for row in rows] for position, name in enumerate(AGGREGATIONS)}


def draw(curves: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """Draw one panel per run, with one curve per aggregation."""
    figure, axes = panels(list(curves), height=3.4)
    for panel, of_run in zip(axes, curves.values(), strict=True):
        for (name, label), hue in zip(AGGREGATIONS.items(), HUES, strict=False):
            median = np.median(of_run[name])
            rounds = np.arange(1, len(of_run[name]) + 1)
            panel.plot(
                rounds,
                of_run[name],
                color=hue,
                linewidth=1.6,
                label=f"{label} (median {median:.2g})",
            )
        panel.set_xlabel("round", color=INK)
        panel.set_yscale("log")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.legend(fontsize=8, labelcolor=INK, framealpha=0.9, edgecolor="none")
    axes[0].set_ylabel("variance of the generalization gap", color=INK)
    save(figure, path)


def main() -> None:
    """Read, draw, and print the medians over rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", help="directories of runs with the method fairnesscurves"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/fftgp-figure6.png"))
    arguments = parser.parse_args()
    curves = {}
    for run in arguments.runs:
        if (method := read_config(run)["method"]["name"]) != "fairnesscurves":
            parser.error(f"{run} is a run of {method}; train with the method fairnesscurves")
        curves[run.name] = read(run)
        medians = {
            AGGREGATIONS[name]: float(np.median(values))
            for name, values in curves[run.name].items()
        }
        print(run, ", ".join(f"{name}: {median:.3g}" for name, median in medians.items()))
    draw(curves, arguments.out)


if __name__ == "__main__":
    main()
