"""Rounds whose rows are written while a GPU trains later rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from equipoise.engine.streams import beside
from equipoise.run.records import Row
from equipoise.run.round_rows import BESIDE, Clock, Moment

# Waits for the values of an evaluation and records them; and what launches it.
Finish = Callable[[], None]
Launch = Callable[[], Finish]
# How many evaluations beside the training of later rounds may be outstanding before the host waits
# for the oldest one.
_MOST_LAUNCHED = 4


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
    finish : callable or None
        Writes the rows, once the evaluation has been launched.
    launch : callable or None
        Launches the evaluation, and returns ``finish`` and ``ended``.
    ended : Moment or None
        The end of an evaluation beside the training of later rounds.
    """

    finish: Finish | None = None
    launch: Callable[[], tuple[Finish, Moment]] | None = None
    ended: Moment | None = None


class LaterRounds:
    """Rounds in the order in which their rows will be written.

    Parameters
    ----------
    device : torch.device
        The device that trains and evaluates.
    append : callable
        Writes the row of a round and the laps of its clock.

    Attributes
    ----------
    evaluated_at : float
        When the device had evaluated the latest round for which training had to wait.

    Examples
    --------
    >>> cpu = torch.device("cpu")
    >>> later = LaterRounds(cpu, lambda row, clock: print(row))
    >>> later.add_beside(lambda: lambda: print("values of round 1"), {"round": 1}, Clock(cpu))
    >>> later.launch()
    >>> later.add_row({"round": 2}, Clock(cpu))
    >>> later.finish_ended()
    values of round 1
    {'round': 1}
    {'round': 2}
    """

    def __init__(self, device: torch.device, append: Callable[[Row, Clock], None]) -> None:
        self._device, self._append = device, append
        self._rounds: deque[_Round] = deque()
        self.evaluated_at = 0.0

    def __len__(self) -> int:
        """Count the rounds."""
        return len(self._rounds)

    def add_row(self, row: Row, clock: Clock) -> None:
        """Add a round without evaluation."""
        self._rounds.append(_Round(lambda: self._append(row, clock)))

    def add_launched(self, launch: Launch, row: Row, clock: Clock) -> None:
        """Add a round, and evaluate it before the device trains the next one.

        A round whose evaluation fails has no rows, as if the host had waited at once.
        """
        idle = Moment(self._device)
        finish = launch()
        launched = Moment(self._device)

        def finish_round() -> None:
            finish()
            self.evaluated_at = launched.time_since(idle)
            clock.lap_at("evaluate", self.evaluated_at)
            self._append(row, clock)

        self._rounds.append(_Round(finish_round))

    def add_beside(self, launch: Launch, row: Row, clock: Clock) -> None:
        """Add a round that is evaluated beside the training of later ones.

        The next :meth:`launch` launches the evaluation. It begins when the device has done what was
        launched before, such as the training of the next round. The device evaluates where it would
        be idle otherwise, such as while the host combines updates and chooses clients.
        """

        def launch_beside() -> tuple[Finish, Moment]:
            with beside(self._device):
                began = Moment(self._device)
                finish = launch()
                ended = Moment(self._device)

            def finish_round() -> None:
                finish()
                clock.note(BESIDE, ended.seconds_since(began))
                self._append(row, clock)

            return finish_round, ended

        self._rounds.append(_Round(launch=launch_beside))

    def finish_ended(self) -> None:
        """Finish the first rounds, up to one whose evaluation has not ended.

        If too many are outstanding, wait for the oldest ones.
        """
        launched = sum(each.ended is not None for each in self._rounds)
        while self._rounds and (first := self._rounds[0]).finish is not None:
            if first.ended is not None:
                if launched <= _MOST_LAUNCHED and not first.ended.reached():
                    return
                launched -= 1
            self._finish_first()

    def finish(self) -> None:
        """Finish all rounds. If an evaluation cannot be launched, those before it are finished."""
        self._finish_launched()
        self.launch()
        self._finish_launched()

    def launch(self) -> None:
        """Launch the evaluations that have not been launched."""
        for each in self._rounds:
            if each.launch is not None:
                (each.finish, each.ended), each.launch = each.launch(), None

    def _finish_launched(self) -> None:
        """Finish the first rounds, up to one whose evaluation has not been launched."""
        while self._rounds and self._rounds[0].finish is not None:
            self._finish_first()

    def _finish_first(self) -> None:
        """Finish a round. If that fails or is interrupted, later rounds have no rows either."""
        try:
            finish = self._rounds[0].finish
            if finish is not None:
                finish()
            self._rounds.popleft()
        except BaseException:
            self._rounds.clear()
            raise
