"""Which rounds end with a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

# By default a run that is killed loses about so many seconds, or at most two longer rounds.
SECONDS = 10.0


class SaveTimes:
    """Decides at the beginning of a round whether it ends with a checkpoint.

    By default the first round does, so that there is something to resume, and every round that is
    expected to end :data:`SECONDS` or more after the last checkpoint. The round before it shows how
    long a round takes. So short rounds are not slowed down by files.

    Parameters
    ----------
    every : int or None
        Rounds between checkpoints, if they do not depend on the time.
    now : callable
        The clock, in seconds.

    Examples
    --------
    >>> clock = iter([0.0, 0.0, 4.0, 8.0, 8.5, 12.5])
    >>> times = SaveTimes(None, clock.__next__)
    >>> for number in (1, 2, 3):
    ...     times.begin_round()
    ...     print(number, times.due(number))
    1 True
    2 False
    3 True
    >>> times.saved()
    >>> times.begin_round()
    >>> times.due(4)
    False
    """

    def __init__(self, every: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self.every, self._now = every, now
        self._saved = self._began = self._ends = now()

    def begin_round(self) -> None:
        """Begin a round."""
        began = self._now()
        self._ends = began + (began - self._began)
        self._began = began

    def due(self, number: int) -> bool:
        """Return whether a round ends with a checkpoint; the same until the next round begins."""
        if self.every is not None:
            return number % self.every == 0
        return number == 1 or self._ends - self._saved >= SECONDS

    def saved(self) -> None:
        """Note that a checkpoint has been written."""
        self._saved = self._now()
