"""``equipoise data``: a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.errors import errors_as_lines
from equipoise.cli.options import RUNS, Debug, Import, Json
from equipoise.cli.output import print_json
from equipoise.cli.paths import check_file


def data(
    name: Annotated[str, typer.Argument(help="Source of the data, such as digits.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the data, such as imbalance=5; may be repeated.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the partition and the splits.", show_default="0")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Where to draw the federation (.png, .svg or .pdf).", show_default="runs/NAME.png"
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(
            help="A client index: draw and show how similar clients are, within and between groups."
        ),
    ] = None,
    download: Annotated[
        bool,
        typer.Option(
            "--download", help="Download the files of mnist, emnist or cifar if they are missing."
        ),
    ] = False,
    import_: Import = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Show a federation: its clients, groups, samples and labels."""
    with errors_as_lines(debug):
        from equipoise.cli.show.federation import (
            draw,
            federation_document,
            index_document,
            read_index,
            show_federation,
            show_index,
        )
        from equipoise.config import Override, experiment_from

        overrides = [Override("imports", import_, "--import")] if import_ else []
        overrides += [Override("data", name, f"equipoise data {name}")]
        overrides += [Override("data.seed", seed, "--seed")] if seed is not None else []
        overrides += [Override.parse(text, below="data") for text in set_ or ()]
        overrides += [Override("data.download", True, "--download")] if download else []
        made = experiment_from({}, "", overrides)
        # With --json nothing is drawn unless a picture is requested.
        where = picture or (None if json_ else RUNS / f"{name}{'-index' if index else ''}.png")
        if where:
            check_file(where, "choose another with --picture")
        federation = made.federation()
        found, digest = read_index(index, federation) if index else (None, "")
        drawn = draw(federation, where, asked=picture is not None, index=found) if where else None
        if found is not None and json_:
            print_json(index_document(found, digest, federation, drawn))
        elif found is not None:
            show_index(found, digest, federation, drawn)
        elif json_:
            print_json(federation_document(federation, drawn))
        else:
            show_federation(federation, drawn)
