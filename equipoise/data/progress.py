"""A progress bar for long operations, on terminals only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(
    name: str, total: int | None, *, in_bytes: bool = False
) -> Iterator[Callable[[int], object]]:
    """Show a progress bar, if the output is a terminal.

    Parameters
    ----------
    name : str
        What is being done.
    total : int or None
        The total amount of work, if known.
    in_bytes : bool
        Whether the amount is in bytes.

    Yields
    ------
    callable
        Call it with the amount of work done since the last call.

    Examples
    --------
    >>> with progress("counting", 3) as advance:
    ...     for _ in range(3):
    ...         _ = advance(1)
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    counted = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    console = Console(stderr=True)
    shown = sys.stderr.isatty()
    with Progress(
        TextColumn(name), BarColumn(), *counted, console=console, transient=True, disable=not shown
    ) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.advance(task, done)
