"""GIFAIR-FL, figure 4: draw the accuracy of each group against λ, from the study ``lambda.yaml``.

``python experiments/gifair/figure4.py runs/lambda --out figure4.svg`` draws one line per group,
with its spread over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

Accuracies = dict[str, dict[float, list[float]]]


def read(runs: Path) -> Accuracies:
    """Return the global model's accuracy by group and λ / λ_max, one value per seed."""
    found: Accuracies = defaultdict(lambda: defaultdict(list))
    for path in sorted(runs.glob("*/*/seed*/summary.json")):
        strength = float(path.parts[-3])
        groups = json.loads(path.read_text(encoding="utf-8"))["results"]["global"]["seen"]["groups"]
        for group, accuracy in groups.items():
            found[group][strength].append(accuracy)
    return found


def draw(accuracies: Accuracies, path: Path) -> None:
    """Draw one line per group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for group, by_strength in accuracies.items():
        strengths = sorted(by_strength)
        values = [by_strength[strength] for strength in strengths]
        spread = [
            float(np.std(of_seeds, ddof=1)) if len(of_seeds) > 1 else 0.0 for of_seeds in values
        ]
        axes.errorbar(
            strengths, [np.mean(of_seeds) for of_seeds in values], spread, label=group, capsize=3
        )
    axes.set(xlabel="λ as a fraction of λ_max", ylabel="test accuracy")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Read, draw, and print the means over seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="the directory of the study")
    parser.add_argument("--out", type=Path, default=Path("runs/gifair-figure4.svg"))
    arguments = parser.parse_args()
    try:
        accuracies = read(arguments.runs)
    except ValueError:
        parser.error(
            f"{arguments.runs} holds runs of another study: its methods are not called by values "
            "of λ"
        )
    if not accuracies:
        parser.error(f"{arguments.runs} holds no runs of a study")
    for group, by_strength in accuracies.items():
        print(
            group,
            ", ".join(
                f"λ {strength}: {np.mean(by_strength[strength]):.4f}"
                for strength in sorted(by_strength)
            ),
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(accuracies, arguments.out)


if __name__ == "__main__":
    main()
