r"""Table 3: seconds of the index and of training, and the round that reaches the host's best score.

The first run is the host without an index. The score of a round is the mean over clients, on test
data as in the paper. Seconds are those of training and aggregation, without evaluation and without
encoding the samples with CLIP, which is done once and cached. Only evaluated rounds are compared,
so a small ``evaluation.every`` makes the table more exact. Run it in the root of the repository:

    python experiments/client2vec/times.py --index runs/index-domainnet/base/global-500/seed1 \
        runs/table1-domainnet/base/fedavg/seed1 \
        "runs/table1-domainnet/base/fedavg i+ii+iii global/seed1"
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Times:
    """The row of one run.

    Attributes
    ----------
    index : float
        Seconds of making the index; 0 without one.
    training : float
        Seconds of all rounds.
    reached : int or None
        The first round whose score is at least the host's best, if there is one.
    until : float or None
        Seconds of training until this round.
    """

    index: float
    training: float
    reached: int | None
    until: float | None

    @property
    def total(self) -> float | None:
        """Seconds until the host's best score is reached, including those of the index."""
        return None if self.until is None else self.index + self.until


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read a journal."""
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def seconds(run: Path) -> dict[int, float]:
    """Return the seconds of each round, without evaluation."""
    return {
        row["round"]: sum(value for name, value in row.items() if name not in ("round", "evaluate"))
        for row in rows(run / "timings.jsonl")
    }


def scores(run: Path, split: str) -> dict[int, float]:
    """Return the mean score over clients of each evaluated round."""
    found = defaultdict(list)
    score = json.loads((run / "summary.json").read_text(encoding="utf-8"))["score"]
    for row in rows(run / "metrics.jsonl"):
        if (row["model"], row["split"], row["unseen"]) == ("global", split, False):
            found[row["round"]].append(row[score])
    return {number: float(np.mean(values)) for number, values in found.items()}


def times(runs: list[Path], index: Path | None = None, split: str = "test") -> dict[str, Times]:
    """Return the rows of the table.

    Parameters
    ----------
    runs : list of Path
        Directories of finished runs. The first is the host without an index.
    index : Path, optional
        The directory of the run that made the index of all others.
    split : {"test", "val"}
        The split of the scores.

    Returns
    -------
    dict of Times
        By the names of the methods' directories.
    """
    best = max(scores(runs[0], split).values())
    made = sum(seconds(index).values()) if index else 0.0
    table = {}
    for number, run in enumerate(runs):
        took = seconds(run)
        reached = min((r for r, score in scores(run, split).items() if score >= best), default=None)
        until = None if reached is None else sum(value for r, value in took.items() if r <= reached)
        table[run.parent.name] = Times(made if number else 0.0, sum(took.values()), reached, until)
    return table


def main() -> None:
    """Read the command line, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", help="directories of finished runs, the host first"
    )
    parser.add_argument("--index", type=Path, help="the directory of the run that made the index")
    parser.add_argument("--split", choices=["test", "val"], default="test")
    given = parser.parse_args()
    columns = ("index", "training", "round", "until", "total")
    print(f"{'method':40}" + "".join(f"{name:>12}" for name in columns))
    for name, row in times(given.runs, given.index, given.split).items():
        values = (row.index, row.training, row.reached, row.until, row.total)
        shown = ("never" if value is None else f"{value:.0f}" for value in values)
        print(f"{name:40}" + "".join(f"{value:>12}" for value in shown))


if __name__ == "__main__":
    main()
