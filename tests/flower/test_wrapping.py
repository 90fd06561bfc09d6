"""Wrapped methods give the same numbers in one process and by messages."""

from __future__ import annotations

import pytest

from tests.flower.loop import write_experiment, write_silos
from tests.flower.parity import compare
from tests.own_wrappers import make_known


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four clients' directories."""
    folder = tmp_path_factory.mktemp("wrapping")
    write_silos(folder / "silos")
    return folder


@pytest.mark.parametrize(
    "host", ["scaffold", "fediir", {"name": "ditto", "aggregation": "faa"}], ids=str
)
def test_a_wrapped_method_gives_the_same(host, folder, monkeypatch):
    make_known(monkeypatch)
    method = {"name": "sharpened", "factor": 0.8, "power": 0.5, "host": host}
    training = {"rounds": 2, "cohort": 3, "optimizer": {"lr": 0.1}}
    compare(write_experiment(folder, method=method, training=training), folder)
