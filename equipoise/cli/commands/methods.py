"""``equipoise methods``: the methods."""

from __future__ import annotations

from equipoise.cli.errors import errors_as_lines
from equipoise.cli.options import Debug, Import, Json
from equipoise.cli.output import print_json


def methods(import_: Import = None, json_: Json = False, debug: Debug = False) -> None:
    """List the methods and what the server sees of clients."""
    with errors_as_lines(debug):
        from equipoise.cli.show.methods import method_documents, show_methods
        from equipoise.imports import import_own

        import_own(import_ or ())
        if json_:
            print_json(method_documents())
        else:
            show_methods()
