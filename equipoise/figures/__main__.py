"""Figures from the command line: ``python -m equipoise.figures NAME RUN [RUN ...] --out FILE``.

A run is a directory, or ``TITLE=DIRECTORY``. The title is that of its panel, by default the name of
its method.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from equipoise.errors import InputError, RunError
from equipoise.figures import (
    cost,
    cost_table,
    draw_embeddings,
    draw_gap_changes,
    draw_surfaces,
    embed_features,
    gap_changes,
    loss_surface,
    sweep_gaps,
)
from equipoise.figures.embedding import COLOURS
from equipoise.run.directory import read_config
from equipoise.text import LONGEST_MESSAGE, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a figure, or print a table.

    Examples
    --------
    >>> main(["cost", "no/such/run"])
    1
    """
    given = _parser().parse_args(arguments)
    try:
        runs = _titled(given.runs)
        if given.figure == "cost":
            print(cost_table({title: cost(run) for title, run in runs.items()}))
            return 0
        if given.figure == "gaps":
            changes = {
                title: sweep_gaps(run, trust=given.trust) if given.sweep else gap_changes(run)
                for title, run in runs.items()
            }
            path = draw_gap_changes(changes, given.out)
        elif given.figure == "surface":
            surfaces = {
                title: loss_surface(
                    run, clients=given.clients, steps=given.steps, trust=given.trust
                )
                for title, run in runs.items()
            }
            path = draw_surfaces(surfaces, given.out)
        else:
            embeddings = {
                title: embed_features(run, samples=given.samples, trust=given.trust)
                for title, run in runs.items()
            }
            path = draw_embeddings(embeddings, given.out, by=given.by)
    except (InputError, RunError) as error:
        print(f"error: {printable(str(error), LONGEST_MESSAGE)}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m equipoise.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    figures = parser.add_subparsers(dest="figure", required=True)
    gaps = figures.add_parser("gaps", help="ΔG against Δa, with slopes and correlations")
    gaps.add_argument(
        "--sweep",
        action="store_true",
        help="change weights of the kept local models, instead of FAA's notes",
    )
    surface = figures.add_parser(
        "surface", help="the loss of unseen clients over the plane of three local models"
    )
    surface.add_argument("--clients", type=int, nargs=3, help="the three clients")
    surface.add_argument("--steps", type=int, default=21, help="grid points along each axis")
    embedding = figures.add_parser("embedding", help="features of the global model by t-SNE")
    embedding.add_argument("--by", choices=COLOURS, default=COLOURS[0], help="what to colour by")
    embedding.add_argument("--samples", type=int, default=300, help="samples of each group")
    costs = figures.add_parser(
        "cost", help="messages, bytes and evaluations of a round, as a table"
    )
    for figure in (gaps, surface, embedding, costs):
        figure.add_argument(
            "runs", nargs="+", metavar="RUN", help="a run directory, or TITLE=DIRECTORY"
        )
    for figure in (gaps, surface, embedding):
        figure.add_argument(
            "--trust", action="store_true", help="execute the code that the runs import"
        )
        figure.add_argument(
            "--out", type=Path, required=True, help="the file to write (.png, .svg or .pdf)"
        )
    return parser


def _titled(runs: Sequence[str]) -> dict[str, Path]:
    """Return run directories by their titles."""
    titled: dict[str, Path] = {}
    for run in runs:
        title, _, directory = run.rpartition("=")
        title = title or read_config(Path(directory))["method"]["name"]
        # Two runs of one method have their directories as titles.
        titled[title if title not in titled else directory] = Path(directory)
    return titled


if __name__ == "__main__":
    sys.exit(main())
