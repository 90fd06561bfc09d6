"""What the cost of guards is made of, and the table of attacks, with few rounds."""

from __future__ import annotations

import pytest

from benchmarks import guards
from benchmarks.guard_cost import ENGINES, METHODS, measure, trained
from equipoise.engine.stacked import StackedEngine
from tests.attacks import LIAR


def test_the_share_follows_from_the_seconds():
    measured = measure([8], epochs=1, rounds=2)
    seconds, shares = measured["seconds"], measured["percent_of_a_round"]
    assert set(shares) == set(METHODS) == set(seconds) - {"round"}
    guarded = [name for name, method in METHODS.items() if "guard" in method]
    assert all(0 < seconds[name] < seconds["round"] for name in guarded)
    for name, share in shares.items():
        assert abs(share - 100 * seconds[name] / seconds["round"]) <= 0.05


@pytest.mark.parametrize("name", ["norm", "norm, one scaled"])
def test_the_norm_bound_scales_the_client_that_it_should_and_keeps_all(name):
    engine = ENGINES.get(name, StackedEngine)
    scaled = [LIAR] if name in ENGINES else []
    for row in trained(METHODS[name], [64], epochs=1, rounds=20, engine=engine).rounds:
        assert row["notes"]["guard_scaled"] == scaled
        assert row["cohort"] == 10


def test_the_liar_spoils_the_model_unless_there_is_a_guard(monkeypatch):
    optimizer, _ = guards.SETTINGS["usual"]
    monkeypatch.setitem(guards.SETTINGS, "usual", (optimizer, 4))
    plain, guarded = guards.METHODS["fedavg"], guards.METHODS["fedavg, guard: norm"]
    without = guards.accuracy_of(plain, None, "usual", seed=0)
    assert guards.accuracy_of(plain, "flipped", "usual", seed=0) < without - 0.1
    assert guards.accuracy_of(guarded, "flipped", "usual", seed=0) > without - 0.05
