"""Federated learning that works for every client, and shows which clients are left behind."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.engine.settings import FineTune, Machine, Training
    from equipoise.federation import Federation
    from equipoise.run.api import Run, load, train
    from equipoise.run.callbacks import Callback, Snapshot
    from equipoise.run.evaluation import Evaluation

# Threads of GNU OpenMP spin for a long time while they wait for each other. If another process
# needs the core, this makes the many short operations of stacked clients ten times slower or more.
# A shorter wait has no cost. PyTorch reads the variable when it is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Evaluation",
    "Federation",
    "FineTune",
    "Machine",
    "Run",
    "Snapshot",
    "Training",
    "__version__",
    "load",
    "train",
]

# Imported on first use: PyTorch takes a second to load, and `equipoise --help` does not need it.
_HOMES = {
    "Callback": "equipoise.run.callbacks",
    "Evaluation": "equipoise.run.evaluation",
    "Federation": "equipoise.federation",
    "FineTune": "equipoise.engine.settings",
    "Machine": "equipoise.engine.settings",
    "Run": "equipoise.run.api",
    "Snapshot": "equipoise.run.callbacks",
    "Training": "equipoise.engine.settings",
    "load": "equipoise.run.api",
    "train": "equipoise.run.api",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")
