"""``equipoise advise``: which methods fit a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.errors import errors_as_lines
from equipoise.cli.options import (
    RUNS,
    Debug,
    Device,
    Import,
    Json,
    Set,
    overrides_from,
    runs_at_a_time,
)
from equipoise.cli.output import print_json
from equipoise.cli.paths import check_directory


def advise(
    data_: Annotated[
        str,
        typer.Argument(
            metavar="DATA|RUN", help="A source of data, an experiment file, or a run directory."
        ),
    ],
    set_: Set = None,
    import_: Import = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the data and of the trial.", show_default="0")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of the trial.", show_default="a third of training.rounds"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the trial.")] = 2,
    by: Annotated[
        str, typer.Option(help="The metric for the choice, such as mean or worst10.")
    ] = "mean",
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Only measure and advise, without training.")
    ] = False,
    jobs: Annotated[str, typer.Option(metavar="N|auto", help="Runs of the trial at a time.")] = "1",
    out: Annotated[
        Path | None, typer.Option(help="Directory of the trial.", show_default="runs/advise-NAME")
    ] = None,
    device: Device = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Recommend a family of methods for a federation, and try it.

    Measures how clients differ in labels, inputs and sizes, and how many take part. Explains which
    methods fit and why, and compares one or two methods of each family on validation data. The
    cost of the comparison is shown before it starts.
    """
    with errors_as_lines(debug):
        at_a_time = runs_at_a_time(jobs)
        from equipoise.cli import advising

        flags = {
            "imports": ("--import", import_ or None),
            "seed": ("--seed", seed),
            "machine.device": ("--device", device),
        }
        request = advising.Request(
            data_,
            tuple(overrides_from(flags, set_)),
            rounds=rounds,
            seeds=seeds,
            by=by,
            jobs=at_a_time,
            trial=not no_trial,
        )
        directory = out or RUNS / f"advise-{Path(data_).stem}"
        if not no_trial:
            check_directory(directory, "choose another with --out")
        document = advising.advise(request, directory, quiet=json_)
        if json_:
            print_json(document)
