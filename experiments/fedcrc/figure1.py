"""FedCRC, figure 1: the distance between the heads of two clients, with IID data and label skew.

``python experiments/fedcrc/figure1.py --root DIR`` trains one model on the 60,000 training digits
of MNIST. Two clients, which share the 10,000 test digits, continue to train it separately. After
every step the L2 distance of their heads is recorded. The paper does not specify the following,
which is our choice: the test digits are divided equally or by a Dirichlet draw with β = 0.1 for
each class; the whole model is trained, as by clients of FedAvg; plain SGD; means over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import nn

from equipoise import Federation, train
from equipoise.data import Dirichlet, Iid, Partition, load
from equipoise.engine.settings import Machine, Training
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer

PARTITIONS: dict[str, Partition] = {"IID": Iid(2), "β = 0.1": Dirichlet(2, beta=0.1)}
WHOLE = (1.0, 0.0, 0.0)
MODEL = {"name": "bncnn", "channels": [64, 64, 64, 64], "hidden": [], "kernel": 3, "pools": 4}


def pretrained(federation: Federation, *, seed: int = 0) -> nn.Module:
    """Train a model on all the data of a federation for an epoch."""
    settings = Training(rounds=1, batch_size=50, optimizer=Sgd(lr=0.05))
    run = train(
        federation,
        method="central",
        model=MODEL,
        training=settings,
        evaluation=Evaluation(every=0),
        seed=seed,
    )
    return run.model()


def distances(
    federation: Federation, model: nn.Module, *, updates: int, seed: int = 0
) -> list[float]:
    """Return the L2 distance of two clients' heads after every step, from the same model."""
    settings = Training(rounds=updates, steps=1, batch_size=50, optimizer=Sgd(lr=0.05))
    trainer = Trainer(
        federation, build("local"), model, settings, Machine(), Evaluation(every=0), seed
    )
    measured: list[float] = []

    def measure(progress: object) -> None:
        _, own = trainer.personal_models(np.array([0, 1]))
        apart = [heads[0] - heads[1] for name, heads in own.items() if name.startswith("head.")]
        measured.append(
            float(sum(difference.double().square().sum() for difference in apart)) ** 0.5
        )

    trainer.run(measure)
    return measured


def draw(curves: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw one curve per partition."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for label, curve in curves.items():
        axes.plot(np.arange(1, len(curve) + 1), curve, label=label)
    axes.set(xlabel="local updates", ylabel="L2 distance of the two heads")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Measure, write the numbers and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", help="the data directory, if it is not in EQUIPOISE_DATA")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/fedcrc-figure1"))
    arguments = parser.parse_args()
    try:
        everything = load(
            "mnist", root=arguments.root, portion="train", partition=Iid(1), splits=WHOLE
        )
    except InputError as error:
        parser.error(str(error))
    model = pretrained(everything)
    curves = {}
    for label, partition in PARTITIONS.items():
        measured = [
            distances(
                load(
                    "mnist",
                    root=arguments.root,
                    portion="test",
                    partition=partition,
                    splits=WHOLE,
                    seed=seed,
                ),
                model,
                updates=arguments.updates,
                seed=seed,
            )
            for seed in range(arguments.seeds)
        ]
        curves[label] = np.mean(measured, axis=0)
        print(
            f"{label}: {curves[label][0]:.4f} after one update, {curves[label][-1]:.4f} after "
            f"{arguments.updates}"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "figure1.json").write_text(
        json.dumps({label: list(c) for label, c in curves.items()})
    )
    draw(curves, arguments.out / "figure1.svg")


if __name__ == "__main__":
    main()
