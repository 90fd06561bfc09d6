"""``equipoise cache``: the cache directory."""

from __future__ import annotations

from typing import Annotated

import typer

from equipoise.cli.errors import errors_as_lines
from equipoise.cli.options import Debug, Json
from equipoise.cli.output import print_json


def cache(
    prune: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            help="Remove entries that were not used for so many days, and damaged ones.",
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all entries.")] = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """List or remove what is stored in the cache directory: decoded images, encoded samples.

    Everything in it can be computed again. EQUIPOISE_CACHE sets the directory.
    """
    with errors_as_lines(debug):
        from equipoise.cli import caching

        document = caching.cache(prune, clear)
        if json_:
            print_json(document)
        else:
            caching.print_cache(document)
