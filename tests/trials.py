"""How many trials the long tests make: a tenth of the full number, or all of them (``make
trials``).
"""

from __future__ import annotations

import os


def trials(full: int) -> int:
    """Return how many of a full number of trials to make."""
    share = float(os.environ.get("EQUIPOISE_TRIALS", "0.1"))
    return max(1, round(full * share))
