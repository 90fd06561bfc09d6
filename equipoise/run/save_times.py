"""Which rounds end with a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# By default checkpoints are at least so many seconds apart, ...
SECONDS = 10.0
# ... and at least so many times the seconds that the last one took.
TIMES = 10.0


class SaveTimes:
    """Decides at the beginning of a round whether it ends with a checkpoint.

    By default the first round does, so that there is something to resume, and every round that is
    expected to end :data:`SECONDS` or more after the last checkpoint. The round before it shows how
    long a round takes. So short rounds are not slowed down by files.

    A checkpoint of many gigabytes takes longer than that. The next one is therefore due when at
    least :data:`TIMES` times the seconds have passed that the last one took. So checkpoints take
    about a tenth of the time at most, however large they are. A run that is killed loses the longer
    of the two times, or at most two longer rounds.

    Parameters
    ----------
    every : int or None
        Rounds between checkpoints, if they do not depend on the time.
    now : callable
        The clock, in seconds.

    Examples
    --------
    >>> clock = iter([0.0, 0.0, 4.0, 8.0, 8.0, 9.5, 9.5, 20.0, 24.5])
    >>> times = SaveTimes(None, clock.__next__)
    >>> for number in (1, 2, 3):
    ...     times.begin_round()
    ...     print(number, times.due(number))
    1 True
    2 False
    3 True

    The checkpoint takes 1.5 seconds. So the next one is due 15 seconds later.

    >>> with times.saving():
    ...     pass
    >>> for number in (4, 5, 6):
    ...     times.begin_round()
    ...     print(number, times.due(number))
    4 False
    5 True
    6 True
    """

    def __init__(self, every: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self.every, self._now = every, now
        self._saved = self._began = self._ends = now()
        self._apart = SECONDS

    def begin_round(self) -> None:
        """Begin a round."""
        began = self._now()
        self._ends = began + (began - self._began)
        self._began = began

    def due(self, number: int) -> bool:
        """Return whether a round ends with a checkpoint; the same until the next round begins."""
        if self.every is not None:
            return number % self.every == 0
        return number == 1 or self._ends - self._saved >= self._apart

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the block takes, which writes a checkpoint."""
        began = self._now()
        yield
        self._saved = self._now()
        self._apart = max(SECONDS, TIMES * (self._saved - began))
