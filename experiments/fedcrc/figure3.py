"""FedCRC, figure 3: draw the test accuracy by round of the study ``figure3.yaml``.

``python experiments/fedcrc/figure3.py runs/figure3 --out figure3.svg`` draws one panel per setting,
with one curve per method and model.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

Curves = dict[tuple[str, str, str], dict[int, float]]


def read(runs: Path) -> Curves:
    """Return the mean accuracy over clients and seeds by setting, method, model and round."""
    found: dict[tuple[str, str, str], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for path in sorted(runs.glob("*/*/seed*/metrics.jsonl")):
        setting, method = path.parts[-4:-2]
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["split"] == "test":
                found[setting, method, row["model"]][row["round"]].append(row["accuracy"])
    return {
        key: {round_: float(np.mean(v)) for round_, v in sorted(rounds.items())}
        for key, rounds in found.items()
    }


def draw(curves: Curves, path: Path) -> None:
    """Draw one panel per setting."""
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(setting for setting, _, _ in curves))
    figure = Figure(figsize=(5 * len(settings), 3.5), layout="constrained")
    panels = figure.subplots(1, len(settings), squeeze=False, sharey=True)[0]
    for (setting, method, model), rounds in curves.items():
        panel = panels[settings.index(setting)]
        panel.plot(list(rounds), list(rounds.values()), label=f"{method}, {model} model")
        panel.set(title=setting, xlabel="round")
    panels[0].set_ylabel("test accuracy, mean over clients")
    panels[-1].legend()
    figure.savefig(path)


def main() -> None:
    """Read, draw, and print the accuracy at a few rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="the directory of the study")
    parser.add_argument("--out", type=Path, default=Path("runs/fedcrc-figure3.svg"))
    arguments = parser.parse_args()
    curves = read(arguments.runs)
    if not curves:
        parser.error(f"{arguments.runs} holds no runs of a study")
    for key, rounds in curves.items():
        chosen = [round_ for round_ in (1, 5, 10, 25, 50, 75, 100) if round_ in rounds]
        print(
            " ".join(key), ", ".join(f"round {round_}: {rounds[round_]:.4f}" for round_ in chosen)
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, arguments.out)


if __name__ == "__main__":
    main()
