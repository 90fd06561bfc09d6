"""The methods, their parts and hyper-parameters."""

from __future__ import annotations

import inspect
from typing import Any

from equipoise import methods as registry
from equipoise.cli.show.console import new_console, new_table
from equipoise.run.plain import to_plain


def method_documents() -> list[dict[str, Any]]:
    """Return what ``equipoise methods --json`` prints."""
    documents = []
    for name in registry.names():
        part, method = registry.part_class(name), registry.build(name)
        documents.append(
            {
                "name": name,
                "summary": (inspect.getdoc(part) or "").partition("\n")[0],
                "paper": part.paper or None,
                "parts": registry.slots_of(part),
                "server_sees": method.sees.words,
                "personal_models": method.personal,
                "hyper_parameters": {
                    key: to_plain(registry.describe_option(value))
                    for key, value in registry.options_of(name).items()
                },
            }
        )
    return documents


def show_methods() -> None:
    """Show the methods."""
    table = new_table("", "method", "paper", "answers", "server sees", "hyper-parameters")
    for document in method_documents():
        table.add_row(
            document["name"],
            document["paper"] or "–",
            ", ".join(document["parts"]),
            document["server_sees"],
            ", ".join(f"{key}={value}" for key, value in document["hyper_parameters"].items())
            or "–",
        )
    console = new_console()
    console.print(table)
    console.print(
        "\nEvery method also takes weights, sampling, local, aggregation and guard: parts combine "
        "freely. `equipoise explain NAME` explains the hyper-parameters of a method, `equipoise "
        "explain method` what every method takes."
    )
