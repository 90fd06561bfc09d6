"""Changes of gaps and weights against NumPy."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest

from equipoise.errors import InputError
from equipoise.figures import GapChanges, draw_gap_changes, gap_changes, sweep_gaps
from tests.figures.linear_runs import linear_run, weights_of, world
from tests.methods.domains import adjusted_by_hand, first_weights, local_step, loss
from tests.rounds import linear


def test_changes_of_two_rounds_by_hand(tmp_path):
    data = world(unseen=(4,))
    linear_run(tmp_path / "run", data, {"name": "faa", "step": 0.1, "decay": False})
    w, a, wanted = first_weights(), np.full(4, 0.25), []
    for _ in range(2):
        trained = [local_step(data, k, w) for k in range(4)]
        own = np.array([loss(data, k, trained[k], "val") for k in range(4)])

        def gaps(weights, trained=trained, own=own):
            mixed = sum(s * one for s, one in zip(weights, trained, strict=True))
            return np.array([loss(data, k, mixed, "val") for k in range(4)]) - own

        before = gaps(a)
        nudged = adjusted_by_hand(a, before, 0.1)
        after = gaps(nudged)
        wanted.append((nudged - a, after - before))
        slope = np.maximum((nudged - a) / (before - after), 0)
        fair = np.clip(a + slope * (before - (slope * before).sum() / slope.sum()), 0, 1)
        a = fair / fair.sum()
        w = sum(s * one for s, one in zip(a, trained, strict=True))
    found = gap_changes(tmp_path / "run")
    assert [(one.client, one.name) for one in found] == [(k, f"client {k}") for k in range(4)]
    for k, one in enumerate(found):
        np.testing.assert_allclose(one.weight, [changes[0][k] for changes in wanted], atol=1e-10)
        np.testing.assert_allclose(one.gap, [changes[1][k] for changes in wanted], atol=1e-10)


def test_slope_and_correlation_by_hand():
    weight, gap = [-0.2, -0.1, 0.05, 0.1], [0.3, 0.1, 0.02, -0.2]
    one = GapChanges(0, "north", np.array(weight), np.array(gap))
    line = statistics.linear_regression(weight, gap)
    assert (one.slope, one.intercept) == (pytest.approx(line.slope), pytest.approx(line.intercept))
    assert one.correlation == pytest.approx(statistics.correlation(weight, gap))
    still = GapChanges(0, "north", np.zeros(3), np.arange(3.0))
    assert np.isnan([still.slope, still.correlation]).all()


def test_a_client_without_a_gap_in_a_round_has_no_point_there(tmp_path):
    rows = [
        {
            "round": 1,
            "clients": [0, 2],
            "notes": {"weight_changes": [0.1, -0.1], "gap_changes": [None, 0.5]},
        },
        {"round": 2, "clients": [0, 1], "notes": {"weights": [0.5, 0.5]}},  # a round of GA
        {
            "round": 3,
            "clients": [0, 2],
            "notes": {"weight_changes": [0.2, -0.2], "gap_changes": [-0.3, 0.7]},
        },
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "names.json").write_text('["north", "south", "west"]')
    first, second = gap_changes(tmp_path)
    assert (first.name, first.weight.tolist(), first.gap.tolist()) == ("north", [0.2], [-0.3])
    assert (second.name, second.weight.tolist(), second.gap.tolist()) == (
        "west",
        [-0.1, -0.2],
        [0.5, 0.7],
    )
    with pytest.raises(InputError, match="has no measured changes of gaps"):
        gap_changes(tmp_path / "elsewhere")


def test_a_sweep_by_hand(tmp_path):
    """Client 1 gets 1/3 + Δa of the average of three local models, the others the rest."""
    data = world()
    run = linear_run(tmp_path / "run", data)
    found = sweep_gaps(
        tmp_path / "run", federation=data, module=linear(), steps=5, reach=0.5, device="cpu"
    )
    assert [one.client for one in found] == [0, 1, 2]
    own = [weights_of(run.local_model(k)) for k in range(3)]

    def mean_loss(change):
        others = (2 / 3 - change) / 2
        return loss(data, 1, (1 / 3 + change) * own[1] + others * (own[0] + own[2]), "val")

    changes = np.linspace(-1 / 3, 0.5, 5)
    np.testing.assert_allclose(found[1].weight, changes)
    np.testing.assert_allclose(
        found[1].gap, [mean_loss(c) - mean_loss(0.0) for c in changes], atol=1e-12
    )


def test_the_figure_is_written(tmp_path):
    linear_run(tmp_path / "run", world(), "faa", rounds=3)
    path = draw_gap_changes(
        {"one": gap_changes(tmp_path / "run")}, tmp_path / "figures" / "figure2.png"
    )
    assert path.stat().st_size > 5000
    with pytest.raises(InputError, match="cannot draw to"):
        draw_gap_changes({}, tmp_path / "figure2.txt")
    with pytest.raises(InputError, match="nothing to draw"):
        draw_gap_changes({}, tmp_path / "figure2.png")
