"""The other client indices of table 2: feature average, class prototypes and weights of heads.

The first two are made from the embeddings and label vectors of a finished stage. The weights of
heads are those of one round of FedAvg in which all clients take part. Run it in the root of the
repository:

    python experiments/client2vec/other_indices.py runs/index-cifar10/base/global-500/seed1
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import equipoise
from equipoise.config import Override, experiment_from, load_experiment
from equipoise.other_indices import class_prototypes, feature_average, head_weights

HEADS: dict[str, Any] = {
    "method": "fedavg",
    "data": {"name": "cifar", "seed": 0},
    "model": {"name": "cnn4"},
    "training": {
        "rounds": 1,
        "epochs": 5,
        "batch_size": 32,
        "optimizer": {"name": "sgd", "lr": 1e-2, "weight_decay": 5e-5},
    },
    "evaluation": {"every": 0, "keep_local": True},
    "seed": 1,
}


def make(stage: Path, out: Path, overrides: list[Override]) -> list[Path]:
    """Write the three indices, and return their files.

    Parameters
    ----------
    stage : Path
        The directory of a finished run of ``index-cifar10.yaml``.
    out : Path
        Where the indices are written.
    overrides : list of Override
        Overrides for the training of heads.

    Returns
    -------
    list of Path
        The files.
    """
    federation = load_experiment(stage / "config.yaml").federation()
    vectors = equipoise.load(stage).head.vectors
    made = {
        "feature-average": feature_average(federation, vectors),
        "class-prototypes": class_prototypes(federation, vectors),
        "head-weights": head_weights(experiment_from(HEADS, "other_indices.py", overrides).run()),
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.safetensors" for name in made]
    for path, index in zip(paths, made.values(), strict=True):
        index.write(path)
    return paths


def main() -> None:
    """Read the command line, and write the indices."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", type=Path, help="the directory of a finished stage")
    parser.add_argument("--out", type=Path, default=Path("runs/client2vec-indices"))
    parser.add_argument(
        "--set", action="append", default=[], help="a setting of the training of heads, key=value"
    )
    given = parser.parse_args()
    for path in make(given.stage, given.out, [Override.parse(text) for text in given.set]):
        print(path)


if __name__ == "__main__":
    main()
