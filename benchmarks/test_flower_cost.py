"""What the cost of a round on Flower is made of, with a model small enough to count by hand."""

from __future__ import annotations

from benchmarks.flower_cost import CLIENTS, measure


def test_bytes_and_seconds_of_a_small_round():
    measured = measure([100], rounds=1)
    parameters = 784 * 100 + 100 + 100 * 10 + 10
    assert measured["parameters"] == parameters
    assert measured["bytes_of_parameters"] == CLIENTS * parameters * 4
    assert 1 <= measured["bytes_down"] / measured["bytes_of_parameters"] < 1.01
    assert 1 <= measured["bytes_up"] / measured["bytes_of_parameters"] < 1.01
    assert 0 < measured["overhead_percent"] < 1
    assert set(measured["seconds"]) == {"serialise", "combine", "client", "flower"}
    assert all(seconds >= 0 for seconds in measured["seconds"].values())
