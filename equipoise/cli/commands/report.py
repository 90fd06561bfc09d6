"""``equipoise report``: one HTML file about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.errors import errors_as_lines
from equipoise.cli.options import Debug, Json, Trust
from equipoise.cli.output import name_of, print_json
from equipoise.cli.paths import check_directory, check_file


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or the directory of a study.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write it.", show_default="report.html in the directory"),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write all figures as PNG, PDF and SVG.")
    ] = None,
    trust: Trust = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Write one HTML file about a run, several runs or a study.

    It is made only from the files of runs, so it also works for runs of earlier releases and
    unfinished runs. Several runs are compared side by side.
    """
    with errors_as_lines(debug):
        if out:
            check_file(out, "choose another with --out")
        if figures:
            check_directory(figures, "choose another with --figures")
        from equipoise.cli.show.report import show_report
        from equipoise.report import write_report

        written = write_report(runs, out, figures=figures, trust=trust)
        if json_:
            print_json({"report": str(written), "figures": name_of(figures)})
        else:
            show_report(written, figures)
