"""Options that several commands have, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.errors import InputError

if TYPE_CHECKING:
    from equipoise.config import Override

RUNS = Path("runs")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a key, such as training.epochs=2; may be repeated."
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Do not write a report.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Execute the code that a run directory imports; read it first."),
]
Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        help="Your Python file or module that registers methods, models, data, tasks or metrics.",
    ),
]


def overrides_from(
    flags: dict[str, tuple[str, Any]], assignments: list[str] | None
) -> list[Override]:
    """Return what options and ``--set`` override, with their names for errors."""
    from equipoise.config import Override

    given = [
        Override(key, value, flag) for key, (flag, value) in flags.items() if value is not None
    ]
    return given + [Override.parse(text) for text in assignments or ()]


def leaning_to_study(content: dict[str, Any]) -> int:
    """Return the number of a study's keys in a file minus that of an experiment's."""
    from equipoise.config import SECTIONS
    from equipoise.study.reading import KEYS

    return sum((key in KEYS) - (key in SECTIONS) for key in content)


def refuse_study(content: dict[str, Any], path: Path) -> None:
    """Refuse a study where an experiment is needed."""
    if leaning_to_study(content) > 0:
        raise InputError(
            f"{path} is a study, not an experiment; run it with: equipoise compare {path}"
        )


def runs_at_a_time(given: str) -> int | None:
    """Parse the number of runs at a time; None for ``auto``."""
    if given == "auto":
        return None
    if not given.isdecimal() or int(given) < 1:
        raise InputError(f"--jobs must be a whole number from 1, or auto, got {given!r}")
    return int(given)
