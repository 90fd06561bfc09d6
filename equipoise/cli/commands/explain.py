"""``equipoise explain``: keys of experiments and studies."""

from __future__ import annotations

from typing import Annotated

import typer

from equipoise.cli.errors import errors_as_lines
from equipoise.cli.options import Debug, Import, Json
from equipoise.cli.output import print_json


def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="A key, such as training.schedule, data or grid, or the name of a method, a "
            "model, a source or a partition, such as ditto; studies for the keys of studies; by "
            "default the keys of the first level."
        ),
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/settings.md, which has all keys.")
    ] = False,
    import_: Import = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Explain the keys of experiments and studies.

    Shows the valid values, the default, the meaning and an example.
    """
    with errors_as_lines(debug):
        from dataclasses import asdict

        from equipoise.cli.show.keys import show_keys
        from equipoise.explain import explain as keys_of
        from equipoise.explain import page
        from equipoise.imports import import_own

        import_own(import_ or ())
        if markdown:
            typer.echo(page(), nl=False)
        elif json_:
            print_json([asdict(setting) for setting in keys_of(key)])
        else:
            show_keys(keys_of(key))
