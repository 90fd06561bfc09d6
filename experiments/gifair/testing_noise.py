"""GIFAIR-FL, table 1: how much of the spread over clients is noise from testing on few images.

``python experiments/gifair/testing_noise.py runs/skewed-cifar10`` prints σ over clients, the noise,
and σ without the noise for every method of a study, as mean ± standard deviation over seeds.

For a client with accuracy a on n test images, the choice of images alone causes a variance of
a(1 − a)/(n − 1). The noise is the root of its mean over clients, and σ² − noise² is the variance
without it. For accuracies that are means over rounds the noise is an upper bound: the images are
the same in all rounds, but models of different rounds do not make all the same mistakes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

from equipoise.study import model_of
from equipoise.study.runs import counted_rows

Measured = dict[str, list[tuple[float, float, float]]]


def measure(accuracies: list[float], images: list[int]) -> tuple[float, float, float]:
    """Return σ over clients, the noise of testing, and σ without it (0 if the noise is larger)."""
    variance = statistics.pvariance(accuracies)
    noise = statistics.fmean(a * (1 - a) / (n - 1) for a, n in zip(accuracies, images, strict=True))
    return math.sqrt(variance), math.sqrt(noise), math.sqrt(max(0.0, variance - noise))


def read(study: Path) -> Measured:
    """Measure the clients' final models of all finished runs of a study, by setting and method."""
    found: Measured = defaultdict(list)
    for path in sorted(study.glob("*/*/seed*/summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        wanted = (model_of(summary, "mean"), "test", False)
        rows = [
            r
            for r in counted_rows(path.parent, summary)
            if (r["model"], r["split"], r["unseen"]) == wanted
        ]
        if rows:
            label = "/".join(path.parent.relative_to(study).parts[:2])
            found[label].append(
                measure([row["accuracy"] for row in rows], [row["n"] for row in rows])
            )
    return dict(found)


def table(found: Measured) -> str:
    """Return a Markdown table, in per cent."""
    lines = [
        "| method | σ over clients | testing noise | σ without it | seeds |",
        "|---|---|---|---|---|",
    ]
    for label, runs in found.items():
        cells = [_cell([100 * run[column] for run in runs]) for column in range(3)]
        lines.append(f"| {label} | {' | '.join(cells)} | {len(runs)} |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def main() -> None:
    """Read a study and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", type=Path, help="directory of the study's runs")
    study = parser.parse_args().study
    found = read(study)
    if not found:
        parser.error(f"{study} holds no finished run of a study")
    print(table(found))


if __name__ == "__main__":
    main()
