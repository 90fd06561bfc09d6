"""What the journals record of a round: losses, bytes, cohort, the server's notes and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from equipoise.engine.contract import RoundCohort
from equipoise.method import State, Updates
from equipoise.run.records import Row

BYTES = ("bytes_up", "bytes_down", "bytes_overhead")
# The seconds of an evaluation that a GPU made beside the training of later rounds.
BESIDE = "evaluate_beside"


def seconds_of(timings: Iterable[Row]) -> float:
    """Return the seconds of rounds, from rows of ``timings.jsonl``.

    Evaluations beside the training of later rounds are not added, because they take no time of
    their own.

    Examples
    --------
    >>> seconds_of([{"round": 1, "train": 0.5, "combine": 0.25, "evaluate_beside": 0.1}])
    0.75
    """
    return sum(
        value for row in timings for name, value in row.items() if name not in ("round", BESIDE)
    )


def summed(cohorts: Sequence[RoundCohort], names: Iterable[str]) -> dict[str, int]:
    """Return the sums of what cohorts have counted, by name."""
    return {name: sum(getattr(each, name) for each in cohorts) for name in names}


def beginning_of_row(
    number: int, updates: Updates, cohort: RoundCohort, cohorts: Sequence[RoundCohort]
) -> Row:
    """Return what the row of a round records of training.

    Parameters
    ----------
    number : int
        The number of the round, from 1.
    updates : Updates
        The updates that were combined.
    cohort : RoundCohort
        The clients that sent them.
    cohorts : sequence of RoundCohort
        All cohorts that were asked in this round.
    """
    losses: Row = {
        name: float((updates.reports[name] * cohort.prior).sum())
        for name in ("train_loss", "method_terms")
        if name in updates.reports
    }
    row: Row = {"round": number, "cohort": len(cohort.ids), **losses}
    left_out = {
        client: reason for each in cohorts for client, reason in each.left_out.items()
    } | cohort.left_out
    left_out = {client: reason for client, reason in left_out.items() if client not in cohort.ids}
    return row | _by_client("left_out", left_out)


def not_evaluated(absent: Mapping[int, str]) -> Row:
    """Return the clients that did not answer in evaluation, for the row of the round.

    Examples
    --------
    >>> not_evaluated({3: "no answer"}), not_evaluated({})
    ({'not_evaluated': {'3': 'no answer'}}, {})
    """
    return _by_client("not_evaluated", absent)


def _by_client(name: str, reasons: Mapping[int, str]) -> Row:
    """Return the reasons by client, or nothing if there are none."""
    return {name: {str(client): why for client, why in sorted(reasons.items())}} if reasons else {}


def counted(moved: dict[str, int]) -> dict[str, int]:
    """Return the bytes to report. In one process there is no overhead.

    Examples
    --------
    >>> counted({"bytes_up": 8, "bytes_down": 0, "bytes_overhead": 0})
    {'bytes_up': 8, 'bytes_down': 0}
    """
    return {name: count for name, count in moved.items() if count or name != "bytes_overhead"}


def cohort_and_notes(state: State, cohort: RoundCohort, *, everyone: bool) -> Row:
    """Return the cohort, unless all clients take part, and the server's notes."""
    notes = (
        {"notes": {name: _plain(value) for name, value in state.notes.items()}}
        if state.notes
        else {}
    )
    return notes if everyone and not notes else {"clients": cohort.ids.tolist(), **notes}


def _plain(value: Any) -> Any:
    """Return a note for JSON, which has no NaN."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Moment:
    """A moment in the work of a device, which the host need not wait for.

    Examples
    --------
    >>> cpu = torch.device("cpu")
    >>> idle, done = Moment(cpu), Moment(cpu)
    >>> done.time_since(idle) <= time.perf_counter()
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._called = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: Moment) -> float:
        """Wait for the device, and return how long it took from an earlier moment to this one."""
        if self._event is None or earlier._event is None:
            return self._called - earlier._called
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000

    def reached(self) -> bool:
        """Return whether the device has reached this moment, without waiting for it."""
        return self._event is None or self._event.query()

    def time_since(self, idle: Moment) -> float:
        """Wait for the device, and return when it came here, by ``time.perf_counter``.

        ``idle`` is an earlier moment at which the device had nothing to do, so that its time is
        known.
        """
        return idle._called + self.seconds_since(idle)


class Clock:
    """Measure seconds between laps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.laps: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str, *, since: float = 0.0, wait: bool = True) -> None:
        """Record the seconds since the last lap, or since a later time, under a name.

        The device has then finished, unless ``wait`` is False because it works for later rounds.
        """
        if wait and self._device.type == "cuda":
            # Not the whole device, which may evaluate an earlier round beside this one.
            torch.cuda.current_stream(self._device).synchronize()
        self._start = max(self._start, since)
        self.lap_at(name, time.perf_counter())

    def lap_at(self, name: str, end: float) -> None:
        """Record the seconds from the last lap to a time under a name."""
        self.note(name, end - self._start)
        self._start = end

    def note(self, name: str, seconds: float) -> None:
        """Record seconds under a name, without a lap."""
        self.laps[name] = round(seconds, 6)
