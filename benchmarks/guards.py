"""What one liar of ten costs with each guard: the tables of ``docs/security.md``.

The digits are divided at random among ten clients, and one of them lies in every round. Numbers are
mean accuracies of the global model on the test data of the nine honest clients, over seeds. The
attacks are those of ``tests/attacks.py``.

    python -m benchmarks.guards                 # the first table
    python -m benchmarks.guards --setting slow  # a learning rate of 0.1 without momentum
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

import torch

from equipoise.optimizers import Sgd
from tests.attacks import ATTACKS, LIAR, SGD, accuracy, lying, trained

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    **{
        f"fedavg, guard: {shown}": {"name": "fedavg", "guard": guard}
        for shown, guard in {
            "norm": "norm",
            "{name: norm, multiple: 1.0}": {"name": "norm", "multiple": 1.0},
            "{name: norm, bound: 3.0}": {"name": "norm", "bound": 3.0},
            "{name: norm, multiple: 1.0, drop: null}": {
                "name": "norm",
                "multiple": 1.0,
                "drop": None,
            },
            "krum": "krum",
            "multikrum": "multikrum",
        }.items()
    },
    "median": {"name": "median"},
    "trimmedmean": {"name": "trimmedmean"},
}
# Optimizer, and number of rounds.
SETTINGS: dict[str, tuple[Sgd, int]] = {
    "usual": (SGD, 12),
    "slow": (Sgd(lr=0.1), 12),
    "longer": (Sgd(lr=0.1), 60),
    "momentum": (Sgd(lr=0.3, momentum=0.9), 20),
}


def accuracy_of(method: dict[str, Any], attack: str | None, setting: str, seed: int) -> float:
    """Train with one liar, or without it, and return the accuracy of the honest clients."""
    optimizer, rounds = SETTINGS[setting]
    who: dict[str, Any] = (
        {"unseen": (LIAR,)} if attack is None else {"engine": lying(ATTACKS[attack])}
    )
    return accuracy(trained(method, rounds=rounds, optimizer=optimizer, seed=seed, **who))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=list(SETTINGS), default="usual")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| method | without the liar |", " | ".join(given.attacks), "|")
    print("|---" * (2 + len(given.attacks)) + "|")
    for name in given.methods:
        means = [
            fmean(
                accuracy_of(METHODS[name], attack, given.setting, seed)
                for seed in range(given.seeds)
            )
            for attack in (None, *given.attacks)
        ]
        print(f"| `{name}` |", " | ".join(f"{mean:.3f}" for mean in means), "|", flush=True)


if __name__ == "__main__":
    main()
