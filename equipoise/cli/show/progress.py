"""The progress of a run, and of the runs of a study."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from equipoise.cli.show.console import new_console, number
from equipoise.run.trainer import Progress
from equipoise.study import Job


@contextmanager
def progress_of_run(name: str) -> Iterator[Callable[[Progress], None]]:
    """Show the progress of a run and the scores of the latest finished evaluation."""
    console = new_console(stderr=True)
    with _bar(console, "{task.fields[scores]}") as bar:
        task = bar.add_task(name, total=None, scores="")

        def on_round(progress: Progress) -> None:
            bar.update(
                task, completed=progress.round, total=progress.rounds, scores=_scores(progress)
            )

        yield on_round


def _bar(console: Console, *more: str) -> Bar:
    """Return a progress bar with further texts after it. It is shown only on terminals."""
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *(TextColumn(text, markup=False) for text in more),
        console=console,
        disable=not console.is_terminal,
    )


def _scores(progress: Progress) -> str:
    if progress.mean is None:
        return f"loss {number(progress.train_loss)}"
    return (
        f"mean {number(progress.mean)}  worst client {number(progress.worst)}  "
        f"σ {number(progress.sigma)}"
    )


@contextmanager
def progress_of_study(
    total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Job, str], None]]:
    """Print how each run of a study ended and the time left, and show a bar on a terminal."""
    console = new_console(stderr=True)
    columns = (
        TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[left]}")
    )
    with Bar(
        *columns,
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("runs", total=total, left="")
        begun, done, there = clock(), 0, 0

        def watch(job: Job, outcome: str) -> None:
            nonlocal begun, done, there
            if outcome == "begun":
                bar.update(task, description=str(job.path))
                return
            done += 1
            if outcome == "already there":
                there, begun = there + 1, clock()
            left = time_left(clock() - begun, done - there, total - done)
            bar.update(task, advance=1, left=left)
            console.print(
                f"[{done}/{total}] {job.path}: {outcome}{f' ({left})' if left else ''}",
                soft_wrap=True,
            )

        yield watch


def time_left(seconds: float, done: int, left: int) -> str:
    """Estimate the time of the remaining runs from that of the finished runs.

    Examples
    --------
    >>> time_left(30.0, done=2, left=4), time_left(7200.0, done=2, left=3)
    ('about 60 s left', 'about 3 h 0 min left')
    """
    if not done or not left:
        return ""
    expected = round(seconds / done * left)
    if expected < 120:
        return f"about {expected} s left"
    minutes = round(expected / 60)
    return (
        f"about {minutes} min left"
        if minutes < 120
        else f"about {minutes // 60} h {minutes % 60} min left"
    )
