"""Checks before training that a command can write its results."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from equipoise.errors import InputError


def check_directory(path: Path, instead: str) -> None:
    """Refuse a directory that cannot be created or written to.

    Parameters
    ----------
    path : Path
        The directory. It is not created.
    instead : str
        What users can do instead, for the error.

    Examples
    --------
    >>> check_directory(Path("pyproject.toml/runs"), "choose another with --out")
    Traceback (most recent call last):
    equipoise.errors.InputError: cannot make the directory pyproject.toml/runs: pyproject.toml is
    not a directory; choose another with --out
    """
    if obstacle := _obstacle(path):
        todo = "write to" if os.path.exists(path) else "make"
        raise InputError(f"cannot {todo} the directory {path}: {obstacle}; {instead}")


def check_file(path: Path, instead: str) -> None:
    """Refuse a file that cannot be written.

    Parameters
    ----------
    path : Path
        The file. It is neither created nor changed.
    instead : str
        What users can do instead, for the error.

    Examples
    --------
    >>> check_file(Path("."), "choose another with --csv")
    Traceback (most recent call last):
    equipoise.errors.InputError: cannot write .: it is a directory; choose another with --csv
    """
    if os.path.isdir(path):
        obstacle: str | None = "it is a directory"
    elif os.path.exists(path):
        obstacle = None if os.access(path, os.W_OK) else "it exists and may not be changed"
    else:
        obstacle = _obstacle(path.parent)
    if obstacle:
        raise InputError(f"cannot write {path}: {obstacle}; {instead}")


def _obstacle(directory: Path) -> str | None:
    """Try to write a file to a directory, and return why this fails, if it does."""
    missing = [folder for folder in (directory, *directory.parents) if not os.path.exists(folder)]
    there = missing[-1].parent if missing else directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return (
            f"nothing can be made in {there} ({error.strerror})"
            if there.is_dir()
            else f"{there} is not a directory"
        )
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
