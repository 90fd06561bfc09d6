"""What doctests leave out on machines that lack a library."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["equipoise/models/kernels.py"]
