"""How commands end: errors as one line, with the right exit code."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from equipoise.errors import InputError, RunError
from equipoise.text import LONGEST_MESSAGE, printable


@contextmanager
def errors_as_lines(debug: bool) -> Iterator[None]:
    """End a command that fails with one line and the right exit code."""
    try:
        yield
    except typer.Exit:
        raise
    except InputError as error:
        _end(f"error: {error}", 2, debug)
    except RunError as error:
        _end(f"error: {error}", 1, debug)
    except KeyboardInterrupt as error:
        _end(f"interrupted; {error}" if str(error) else "interrupted", 130, debug)
    except Exception as error:
        _end(f"error: {type(error).__name__}: {error} ({_place_of(error)})", 1, debug)


def _place_of(error: Exception) -> str:
    """Say where in the user's own code an error was raised, and how to see its traceback."""
    ours, libraries = str(Path(__file__).parents[1]), sysconfig.get_paths().values()
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file() and not frame.filename.startswith((ours, *libraries))
    ]
    place = f"line {own[-1].lineno} of {own[-1].filename}; " if own else ""
    return f"{place}run again with --debug to see {'more' if own else 'where'}"


def _end(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    print(one_line(message), file=sys.stderr)
    raise typer.Exit(code) from None


def say_import(what: str) -> None:
    """Print which code of the user is imported."""
    print(one_line(f"importing {what}"), file=sys.stderr)


def one_line(message: str) -> str:
    """Make a message safe for a terminal. It may contain names and values from files."""
    return printable(" ".join(message.split()), LONGEST_MESSAGE)
