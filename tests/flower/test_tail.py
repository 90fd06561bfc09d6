"""Results averaged over the last evaluated rounds are the same on Flower."""

from __future__ import annotations

import pytest

from tests.flower.loop import write_experiment, write_silos
from tests.flower.parity import compare


def test_averages_over_rounds_are_the_same(tmp_path):
    write_silos(tmp_path / "silos")
    path = write_experiment(tmp_path, training={"rounds": 3}, evaluation={"last": 2})
    alone, run, _ = compare(path, tmp_path)
    assert alone.summary["tail"]["rounds"] == run.summary["tail"]["rounds"] == [2, 3]
    for which in ("selected", "each"):
        ours, theirs = (
            one.summary["tail"][which]["results"]["global"]["seen"] for one in (alone, run)
        )
        assert ours["sigma_clients"] == pytest.approx(theirs["sigma_clients"], rel=1e-9)
    ours, theirs = (one.summary["results"]["global"]["seen"] for one in (alone, run))
    for name in ("mean", "sigma_clients", "worst10", "loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9)
