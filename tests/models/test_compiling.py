"""The GPU kernels compile for GPUs that need not be there, and need no more than these have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.models.compiling import SHARED

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("capability", sorted(SHARED))
def test_every_launched_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Warnings are errors: what a later Triton will do differently, it announces by a warning.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.models.compiling", str(capability)],
        cwd=ROOT,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(found["shared"]) == found["launched"]
    assert found["launched"]
    too_large = {name: size for name, size in found["shared"].items() if size > SHARED[capability]}
    assert not too_large
