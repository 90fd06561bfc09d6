"""Which cases of a test ``make test`` runs; the others run in ``make test-slow``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def only(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter, those that are not quick marked as slow."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
