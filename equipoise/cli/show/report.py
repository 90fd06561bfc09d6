"""The path of a report."""

from __future__ import annotations

from pathlib import Path

from equipoise.cli.show.console import new_console


def show_report(path: Path, figures: Path | None = None) -> None:
    """Print the path of a report."""
    console = new_console()
    console.print(f"report: {path}", soft_wrap=True)
    if figures:
        console.print(f"figures: {figures}", soft_wrap=True)
