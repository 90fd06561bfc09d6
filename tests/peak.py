"""Peak memory of a program that a test starts."""

from __future__ import annotations

# To be put before the program. On Linux ru_maxrss counts the process that started this one, too.
PEAK = """
import resource, sys
from pathlib import Path

def peak():
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
"""
