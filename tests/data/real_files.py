"""The folder of the real data, and a mark that skips tests without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("EQUIPOISE_SHARED", Path(__file__).parents[3] / "shared"), "data")


def needs_shared(folder: str) -> pytest.MarkDecorator:
    """Skip a test if the real data are not available."""
    return pytest.mark.skipif(
        not (SHARED / folder).exists(), reason=f"{SHARED / folder} is not here"
    )
