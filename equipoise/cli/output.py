"""What several commands write: JSON documents and reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from equipoise.cli.errors import one_line


def print_json(document: Any) -> None:
    """Print a JSON document."""
    typer.echo(json.dumps(document, indent=2))


def name_of(path: Path | None) -> str | None:
    """Return a path as JSON documents have it."""
    return None if path is None else str(path)


def report_on(directory: Path) -> Path | None:
    """Write the report of a finished run or study. If this fails, only print the reason."""
    from equipoise.report import write_report

    try:
        return write_report([directory])
    except Exception as error:
        said = one_line(f"{type(error).__name__}: {error}")
        print(
            f"no report: {said} (equipoise report {directory} --debug shows where)", file=sys.stderr
        )
        return None
