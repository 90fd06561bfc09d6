"""Number of trials of the long tests: a tenth, or all of them (``make trials``)."""

from __future__ import annotations

import os


def trials(full: int) -> int:
    """Return the number of trials to make of a full number."""
    share = float(os.environ.get("EQUIPOISE_TRIALS", "0.1"))
    return max(1, round(full * share))
