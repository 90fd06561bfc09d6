"""What the cost of guards is made of, and the table of attacks, with few rounds."""

from __future__ import annotations

from benchmarks import guards
from benchmarks.guard_cost import METHODS, measure


def test_the_share_follows_from_the_seconds():
    measured = measure([8], epochs=1, rounds=2)
    seconds, shares = measured["seconds"], measured["percent_of_a_round"]
    assert set(shares) == set(METHODS) == set(seconds) - {"round"}
    assert all(0 < seconds[guard] < seconds["round"] for guard in ("norm", "krum", "multikrum"))
    for name, share in shares.items():
        assert abs(share - 100 * seconds[name] / seconds["round"]) <= 0.05


def test_the_liar_spoils_the_model_unless_there_is_a_guard(monkeypatch):
    optimizer, _ = guards.SETTINGS["usual"]
    monkeypatch.setitem(guards.SETTINGS, "usual", (optimizer, 4))
    plain, guarded = guards.METHODS["fedavg"], guards.METHODS["fedavg, guard: norm"]
    without = guards.accuracy_of(plain, None, "usual", seed=0)
    assert guards.accuracy_of(plain, "flipped", "usual", seed=0) < without - 0.1
    assert guards.accuracy_of(guarded, "flipped", "usual", seed=0) > without - 0.05
