"""Network requests of Ray, which runs Flower's simulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from ipaddress import ip_address

import pytest

from equipoise.flower import UNASKED

# Prints every address that Ray's cloud detection looks up or connects to.
PROBE = """
import json, sys
if sys.argv[1] == "with":
    import equipoise.flower
from ray._common.usage.usage_lib import get_cloud_from_metadata_requests, usage_stats_enabled
reached = []
def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect"):
        reached.append(str(arguments[0] if event == "socket.getaddrinfo" else arguments[1][0]))
        if sys.argv[1] == "without":
            raise ConnectionRefusedError("not in a test")
sys.addaudithook(watch)
get_cloud_from_metadata_requests()
print(json.dumps({"reached": sorted(set(reached)), "reports": usage_stats_enabled()}))
"""


def probe(how):
    pytest.importorskip("ray", reason="Flower's simulation is not installed")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and name != "RAY_USAGE_STATS_ENABLED"
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_ray_does_not_ask_the_cloud_where_it_runs():
    usual = probe("without")
    assert "169.254.169.254" in usual["reached"], (
        "Ray does not ask any more: UNASKED has become superfluous"
    )
    assert usual["reports"]
    quiet = probe("with")
    assert quiet["reached"]
    assert all(ip_address(address).is_loopback for address in quiet["reached"])
    assert not quiet["reports"]


def test_the_hosts_are_those_that_requests_looks_for():
    utils = pytest.importorskip("requests.utils")
    for name, proxy in UNASKED.items():
        url = name.removesuffix("_proxy")
        assert utils.select_proxy(f"{url}/latest/meta-data/", {url: proxy}) == proxy
        assert utils.select_proxy("http://127.0.0.1:8000/", {url: proxy}) is None
