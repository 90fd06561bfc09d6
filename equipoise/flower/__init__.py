"""The same methods across machines, on Flower.

The round loop runs inside a Flower ``ServerApp`` and asks clients by messages; a ``ClientApp``
answers with the same local code that trains clients in one process. ``docs/flower.md`` shows how to
deploy it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.flower.client import client_app
    from equipoise.flower.server import server_app

__all__ = ["QUIET", "UNASKED", "client_app", "server_app"]

# Flower reports its use, looks for updates and installs what an app depends on, unless it is told
# not to. Ray, on which Flower's simulation runs, reports its use too.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Even so, Ray asks the metadata services of clouds where it runs, and has no setting against it. It
# does so with requests, which has a proxy for each host: this one does not exist, so the question
# never leaves the machine.
_NO_PROXY_THERE = "http://127.0.0.1:9"
UNASKED = {
    f"http://{host}_proxy": _NO_PROXY_THERE
    for host in ("169.254.169.254", "metadata.google.internal")
}
for _name, _value in (QUIET | UNASKED).items():
    os.environ.setdefault(_name, _value)

# Imported when first used: reading an experiment needs the settings in this folder, and not Flower.
_HOMES = {"client_app": "equipoise.flower.client", "server_app": "equipoise.flower.server"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'equipoise.flower' has no attribute {name!r}")
