"""The progress of a run, and of the runs of a study."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from equipoise.cli.show.console import new_console, number
from equipoise.run.trainer import Progress
from equipoise.study import Job

# In a log, where no bar can be shown, a run prints a line after so many seconds.
SECONDS = 60.0


class LinesOfRun:
    """Print the round of a run, its scores and the time left, once a minute.

    The time left follows from the rounds after the first, which also records or compiles steps.

    Parameters
    ----------
    name : str
        What the lines begin with.
    say : callable
        Prints a line.
    clock : callable
        Returns the time in seconds.

    Examples
    --------
    >>> clock = iter([0.0, 40.0, 70.0, 100.0]).__next__
    >>> ended = LinesOfRun("fedavg", print, clock)
    >>> for number in (1, 2, 3):
    ...     ended(Progress(number, rounds=9, train_loss=0.5))
    fedavg: round 2 of 9, loss 0.500 (about 4 min left)
    """

    def __init__(
        self, name: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._say, self._clock = name, say, clock
        self._said = clock()
        self._first: tuple[int, float] | None = None

    def __call__(self, progress: Progress) -> None:
        """Print a line, if it is time for one."""
        now = self._clock()
        if self._first is None:
            self._first = progress.round, now
        if now - self._said < SECONDS or progress.round == progress.rounds:
            return
        self._said = now
        first, then = self._first
        left = time_left(now - then, progress.round - first, progress.rounds - progress.round)
        self._say(
            f"{self._name}: round {progress.round} of {progress.rounds}, {_scores(progress)}"
            f"{f' ({left})' if left else ''}"
        )


def _say(line: str) -> None:
    new_console(stderr=True).print(line, soft_wrap=True)


def rounds_in_log(job: Job) -> Callable[[Progress], None] | None:
    """Return what a run of a study calls after each round; ``None`` on a terminal, with its bar.

    Other processes can get this function and call it.
    """
    return None if new_console(stderr=True).is_terminal else LinesOfRun(str(job.path), _say)


@contextmanager
def progress_of_run(name: str) -> Iterator[Callable[[Progress], None]]:
    """Show the progress of a run and the scores of the latest finished evaluation.

    On a terminal this is a bar, and in a log a line per minute.
    """
    console = new_console(stderr=True)
    if not console.is_terminal:
        yield LinesOfRun(name, _say)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[scores]}", markup=False),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(name, total=None, scores="")

        def on_round(progress: Progress) -> None:
            bar.update(
                task, completed=progress.round, total=progress.rounds, scores=_scores(progress)
            )

        yield on_round


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
