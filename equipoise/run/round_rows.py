"""What the journals record of a round: bytes, its cohort, the server's notes and seconds."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from equipoise.engine.contract import RoundCohort
from equipoise.method import State
from equipoise.run.records import Row

BYTES = ("bytes_up", "bytes_down", "bytes_overhead")


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


class Clock:
    """Measure seconds between laps, after the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.laps: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the seconds since the last lap under a name."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.laps[name] = round(now - self._start, 6)
        self._start = now
