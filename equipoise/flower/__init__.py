"""The same methods on several machines, with Flower.

The round loop runs inside a Flower ``ServerApp`` and sends messages to clients. A ``ClientApp``
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
    from equipoise.flower.strategy import AggregationStrategy

__all__ = ["QUIET", "UNASKED", "AggregationStrategy", "client_app", "server_app"]

# By default Flower sends usage statistics, checks for updates and installs the dependencies of an
# app. Ray, which runs Flower's simulation, also sends usage statistics.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Ray also contacts the metadata services of cloud providers, and has no setting to turn this off.
# It uses requests, which supports a proxy for each host. This proxy does not exist, so no request
# leaves the machine.
_NO_PROXY_THERE = "http://127.0.0.1:9"
UNASKED = {
    f"http://{host}_proxy": _NO_PROXY_THERE
    for host in ("169.254.169.254", "metadata.google.internal")
}
for _name, _value in (QUIET | UNASKED).items():
    os.environ.setdefault(_name, _value)

# Imported on first use: reading an experiment needs the settings in this folder, but not Flower.
_HOMES = {
    "AggregationStrategy": "equipoise.flower.strategy",
    "client_app": "equipoise.flower.client",
    "server_app": "equipoise.flower.server",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'equipoise.flower' has no attribute {name!r}")
