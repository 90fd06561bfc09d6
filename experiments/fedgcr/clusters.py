"""FedGCR, table 3: how well the clusters that runs noted agree with the clients' types.

``python experiments/fedgcr/clusters.py runs/table3-4``: a line for each setting and method, with
means over seeds. Purity is the paper's clustering accuracy; ARI is the adjusted Rand index;
stability is the share of clients that have the same cluster number as in the round before, over all
rounds. The last columns are purities of single rounds.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from sklearn.metrics import adjusted_rand_score

from equipoise.clustering import purity

Rows = dict[tuple[str, str], dict[str, float]]


def read(run: Path) -> dict[str, float] | None:
    """Return the measures of one run, or ``None`` if its method does not cluster."""
    metrics = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    names = {row["client"]: row["group"] for row in metrics}
    numbers = {name: number for number, name in enumerate(sorted(set(names.values())))}
    measured: dict[str, float] = {}
    before: dict[int, int] = {}
    same: list[bool] = []
    for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "clusters" not in row.get("notes", {}):
            return None
        clusters = np.array(row["notes"]["clusters"])
        types = np.array([numbers[names[client]] for client in row["clients"]])
        now = dict(zip(row["clients"], clusters.tolist(), strict=True))
        same += [before[client] == number for client, number in now.items() if client in before]
        before |= now
        measured[f"round {row['round']}"] = measured["purity"] = purity(clusters, types)
        measured["ARI"] = float(adjusted_rand_score(types, clusters))
    return {**measured, "stability": float(np.mean(same)) if same else 1.0}


def collect(runs: Path) -> Rows:
    """Return means over seeds by setting and method. Purity and ARI are those of the last round."""
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for path in sorted(runs.glob("*/*/seed*/rounds.jsonl")):
        setting, method = path.parts[-4:-2]
        if (measured := read(path.parent)) is not None:
            found[setting, method].append(measured)
    return {
        key: {name: float(np.mean([own[name] for own in seeds])) for name in seeds[0]}
        for key, seeds in found.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="the directory of the study")
    parser.add_argument(
        "--rounds", type=int, nargs="*", default=[1, 5, 10, 20], help="rounds whose purity to show"
    )
    options = parser.parse_args()
    shown = ["purity", "ARI", "stability", *(f"round {number}" for number in options.rounds)]
    print("| setting | method |", " | ".join(shown), "|")
    print("|---" * (len(shown) + 2) + "|")
    for (setting, method), row in collect(options.runs).items():
        values = " | ".join(f"{row[name]:.2f}" if name in row else "" for name in shown)
        print(f"| {setting} | {method} | {values} |")


if __name__ == "__main__":
    main()
