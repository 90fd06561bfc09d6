"""Rounds whose rows are written while a GPU trains later rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Waits for the values of an evaluation and writes the rows of its round; and what launches it.
Finish = Callable[[], None]
Launch = Callable[[], Finish]


class Once:
    """Some work that is done when it is first called for.

    Examples
    --------
    >>> once = Once(lambda: print("done"))
    >>> once()
    done
    >>> once()
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def __call__(self) -> None:
        """Do the work, unless it has been done."""
        work, self._work = self._work, None
        if work is not None:
            work()


@dataclass
class _Round:
    """A round whose rows are not written yet.

    Attributes
    ----------
    launch : Launch
        Launches its evaluation.
    finish : Finish or None
        What that has returned.
    """

    launch: Launch
    finish: Finish | None = None


class LaterRounds:
    """Rounds in the order in which their rows will be written.

    Examples
    --------
    >>> later = LaterRounds()
    >>> later.add(lambda: lambda: print("rows of round 1"))
    >>> later.advance()
    >>> later.add_launched(lambda: print("rows of round 2"))
    >>> later.advance()
    rows of round 1
    rows of round 2
    """

    def __init__(self) -> None:
        self._rounds: deque[_Round] = deque()

    def __len__(self) -> int:
        """Count the rounds."""
        return len(self._rounds)

    def add(self, launch: Launch) -> None:
        """Add a round whose evaluation is launched by the next :meth:`advance`."""
        self._rounds.append(_Round(launch))

    def add_launched(self, finish: Finish) -> None:
        """Add a round whose evaluation has been launched, or that has none."""
        self._rounds.append(_Round(lambda: finish, finish))

    def advance(self) -> None:
        """Finish the rounds whose evaluation was launched before, and launch that of the others."""
        while self._rounds and self._rounds[0].finish is not None:
            self._finish_first()
        self._launch()

    def finish(self) -> None:
        """Finish all rounds."""
        self._launch()
        while self._rounds:
            self._finish_first()

    def _launch(self) -> None:
        for each in self._rounds:
            if each.finish is None:
                each.finish = each.launch()

    def _finish_first(self) -> None:
        """Finish a round. If that fails, later rounds have no rows either."""
        finish = self._rounds.popleft().finish
        try:
            if finish is not None:
                finish()
        except BaseException:
            self._rounds.clear()
            raise
