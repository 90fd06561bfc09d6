"""Checkpoints by a clock: neither rare nor a large part of the time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from equipoise.run.save_times import SaveTimes


def follow(round_takes, save_takes, until):
    """Return when checkpoints begin, and the seconds that all of them take."""
    clock = [0.0]
    times = SaveTimes(None, lambda: clock[0])
    began, spent, number = [], 0.0, 0
    while clock[0] < until:
        number += 1
        times.begin_round()
        due = times.due(number)
        clock[0] += round_takes(number)
        if due:
            began.append(clock[0])
            with times.saving():
                clock[0] += save_takes(len(began))
                spent += save_takes(len(began))
    return began, spent, clock[0]


@pytest.mark.parametrize("save_takes", [0.001, 0.1, 1.0, 4.0, 20.0, 60.0])
@pytest.mark.parametrize("round_takes", [0.01, 0.7, 3.0, 45.0])
def test_checkpoints_take_a_tenth_of_the_time_at_most(round_takes, save_takes):
    began, spent, end = follow(lambda _: round_takes, lambda _: save_takes, 10_000)
    assert began[0] == round_takes
    # After the first one, which must not be late, and but for one that has just been written.
    assert spent - 2 * save_takes <= end / 10
    # What a crash can lose.
    promised = max(10, 10 * save_takes, 2 * round_takes)
    gaps = [later - earlier for earlier, later in pairwise(began)]
    assert gaps
    assert max(gaps) <= promised + save_takes + round_takes


def test_six_rounds_of_three_seconds_and_checkpoints_of_twenty():
    """FedDyn with ResNet-18 spent most of its time on checkpoints."""
    began, spent, _ = follow(lambda _: 3.0, lambda _: 20.0, 3 + 20 + 5 * 3)
    assert (began, spent) == ([3.0], 20.0)


def test_the_distance_follows_the_last_checkpoint():
    """The first checkpoint may be slow because a disk was busy."""
    began, _, _ = follow(lambda _: 1.0, lambda number: 8.0 if number == 1 else 0.1, 200)
    assert began[1] - began[0] > 80
    assert began[2] - began[1] < 12


def test_a_checkpoint_that_failed_is_due_again():
    clock = [0.0]
    times = SaveTimes(None, lambda: clock[0])
    clock[0] = 30.0
    with pytest.raises(OSError, match="disk full"), times.saving():
        raise OSError("disk full")
    times.begin_round()
    assert times.due(2)
