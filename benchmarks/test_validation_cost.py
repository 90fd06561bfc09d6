"""What the cost of validation is made of, with a small model."""

from __future__ import annotations

from benchmarks.validation_cost import measure


def test_the_share_follows_from_the_seconds():
    measured = measure([100], repeats=2)
    assert measured["parameters"] == 784 * 100 + 100 + 100 * 10 + 10
    seconds = measured["seconds"]
    assert set(seconds) == {"read", "read and checked", "round"}
    assert all(value > 0 for value in seconds.values())
    share = (
        100
        * measured["clients"]
        * (seconds["read and checked"] - seconds["read"])
        / seconds["round"]
    )
    # Seconds are rounded to 10 µs.
    assert abs(measured["percent_of_a_round"] - share) < 100 * 4 * 2e-5 / seconds["round"]
