"""Five clients and three rounds, for comparing phases with training by hand."""

from __future__ import annotations

import pytest

SEED, BATCH = 5, 8
SIZES = [3, 7, 20, 17, 9]
EVERYONE = list(range(len(SIZES)))
COHORTS = [EVERYONE, [0, 2, 3], [1, 2, 4]]
CHUNKS = pytest.mark.parametrize("chunk", [1, 3, 10])
