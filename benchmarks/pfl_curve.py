"""Test accuracy over rounds in pfl-research's own CIFAR-10 setting, by pfl and by Equipoise.

    python -m benchmarks.pfl_curve train --seed 0 --rounds 500 --out runs/curve/pfl-0.jsonl
    equipoise compare benchmarks/pfl-cifar10.yaml --set training.rounds=500 --out runs/curve/ours
    python -m benchmarks.pfl_curve show runs/curve/pfl-*.jsonl --runs runs/curve/ours

``train`` needs pfl (see ``README.md``). It takes model, clients and local training from
``pfl-cifar10.yaml``, pfl's algorithm, backend and random sampler of users, and tests the global
model every ``--every`` rounds. ``show`` prints the mean and the standard deviation over seeds of
both, and writes a picture beside the first file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from equipoise.config import experiment_from
from equipoise.errors import InputError
from equipoise.models import build as build_model
from equipoise.study import load_study

STUDY = Path(__file__).with_name("pfl-cifar10.yaml")
Curve = dict[int, float]
"""Test accuracy by round."""


def train(seed: int, rounds: int, every: int, device: str, out: Path) -> None:
    """Train with pfl, and write a line of JSON for each tested round."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    from benchmarks.peers.pfl_research import WithLoss, average

    plain = load_study(STUDY).jobs[0].experiment.plain()
    experiment = experiment_from({**plain, "seed": seed}, str(STUDY), [])
    federation, training = experiment.federation(), experiment.training
    np.random.seed(seed)  # noqa: NPY002 (pfl's sampler draws from it)
    torch.manual_seed(seed)
    model = build_model(
        shape=federation.shape, classes=federation.outputs, seed=seed, **experiment.model
    )
    module = WithLoss(model.to(device))
    x, y = federation.x.to(device), federation.y.to(device)
    held = [torch.from_numpy(federation.train.of(c)).to(device) for c in range(federation.clients)]
    users = {client: (x[rows], y[rows]) for client, rows in enumerate(held)}
    tested = torch.from_numpy(federation.server["test"]).to(device)
    began = time.perf_counter()

    class Tests(TrainingProcessCallback):
        """Test the global model after some rounds."""

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            number = central_iteration + 1
            if number % every == 0:
                module.eval()
                with torch.no_grad():
                    right = [
                        (module.model(x[part]).argmax(1) == y[part]).sum()
                        for part in tested.split(1000)
                    ]
                module.train()
                line = {
                    "round": number,
                    "accuracy": int(torch.stack(right).sum()) / len(tested),
                    "seconds": time.perf_counter() - began,
                }
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            return False, Metrics()

    dataset = FederatedDataset.from_slices(users, get_user_sampler("random", list(users)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    average(
        module,
        dataset,
        Tests(),
        rounds=rounds,
        cohort=training.cohort_size(federation.clients),
        batch=training.batch_size,
        epochs=training.epochs,
        lr=training.optimizer.lr,
    )


def pfls_curve(path: Path) -> Curve:
    """Read what ``train`` has written."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["round"]: line["accuracy"] for line in lines}


def our_curve(run: Path) -> Curve:
    """Read the server's test accuracy of a run."""
    lines = [json.loads(line) for line in (run / "server.jsonl").read_text().splitlines()]
    return {line["round"]: line["accuracy"] for line in lines if line["split"] == "test"}


def over_seeds(curves: Iterable[Curve]) -> dict[int, tuple[float, float]]:
    """Return mean and standard deviation over seeds, of the rounds that all seeds have.

    Examples
    --------
    >>> over_seeds([{10: 0.5, 20: 0.75}, {10: 0.5}])
    {10: (0.5, 0.0)}
    """
    curves = list(curves)
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = {number: [curve[number] for curve in curves] for number in common}
    spread = {n: float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for n, v in values.items()}
    return {number: (float(np.mean(own)), spread[number]) for number, own in values.items()}


def show(pfls: Sequence[Path], runs: Path) -> str:
    """Return a table of both curves, and draw them."""
    found = sorted(path.parent for path in runs.rglob("server.jsonl"))
    if not found or not pfls:
        raise InputError(f"there is nothing to compare: {len(pfls)} files, and {runs} has no runs")
    both = {
        "pfl": over_seeds(map(pfls_curve, pfls)),
        "Equipoise": over_seeds(map(our_curve, found)),
    }
    common = sorted(set(both["pfl"]) & set(both["Equipoise"]))
    lines = ["| round | pfl | Equipoise |", "|---|---|---|"]
    step = max(len(common) // 10, 1)
    for number in common[step - 1 :: step]:
        cells = (f"{100 * m:.1f} ± {100 * s:.1f}" for m, s in (c[number] for c in both.values()))
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    _picture(both, pfls[0].with_name("pfl-curve.png"))
    return "\n".join(lines)


def _picture(both: dict[str, dict[int, tuple[float, float]]], path: Path) -> None:
    from equipoise.figures.drawing import HUES, panels, save

    figure, (panel,) = panels(["CIFAR-10, 1,000 clients, cohort 50"], width=5.2, height=3.6)
    for (name, curve), hue in zip(both.items(), HUES, strict=False):
        rounds, (mean, spread) = list(curve), np.array(list(curve.values())).T
        panel.plot(rounds, mean, color=hue, label=name)
        panel.fill_between(rounds, mean - spread, mean + spread, color=hue, alpha=0.2, linewidth=0)
    panel.set(xlabel="round", ylabel="test accuracy")
    panel.legend(frameon=False)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train with pfl, or show both curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train with pfl")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--rounds", type=int, default=500)
    training.add_argument("--every", type=int, default=10, help="test every so many rounds")
    training.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    training.add_argument("--out", type=Path, required=True)
    shown = commands.add_parser("show", help="compare curves")
    shown.add_argument("pfls", type=Path, nargs="+", help="files that train has written")
    shown.add_argument("--runs", type=Path, required=True, help="directory with our runs")
    given = parser.parse_args(argv)
    if given.command == "train":
        train(given.seed, given.rounds, given.every, given.device, given.out)
    else:
        print(show(given.pfls, given.runs))


if __name__ == "__main__":
    main()
