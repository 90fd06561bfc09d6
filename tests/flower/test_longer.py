"""Runs on Flower that are extended, and clients with user-defined schedules."""

from __future__ import annotations

import pytest

from equipoise.errors import InputError
from tests.flower.loop import own_nodes, run_on_loop, write_experiment, write_silos
from tests.flower.parity import assert_same_rows, differ


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four clients' directories."""
    folder = tmp_path_factory.mktemp("longer")
    write_silos(folder / "silos")
    return folder


@pytest.mark.parametrize("method", ["scaffold", "fedper"])
def test_a_run_is_made_longer(method, folder, tmp_path):
    path = write_experiment(folder, method=method, training={"cohort": 3}, evaluation={"every": 3})
    whole, _ = run_on_loop(
        path, own_nodes(folder), tmp_path / "whole", settings="training.rounds=4"
    )
    run_on_loop(path, own_nodes(folder), tmp_path / "run", settings="training.rounds=2")
    run, _ = run_on_loop(path, own_nodes(folder), tmp_path / "run", settings="training.rounds=4")
    assert differ(whole.trainer.state.model, run.trainer.state.model) == 0
    assert_same_rows(list(whole.trainer.metrics), list(run.trainer.metrics))
    counted = ("round", "cohort", "train_loss", "bytes_up", "bytes_down", "messages")
    rows = [
        [{name: row[name] for name in counted} for row in each.trainer.rounds]
        for each in (whole, run)
    ]
    assert rows[0] == rows[1]


def test_memories_of_a_last_round_that_counted_are_not_given_back(folder, tmp_path):
    path = write_experiment(folder, method="ditto", evaluation={"every": 2, "select": "best"})
    run, _ = run_on_loop(path, own_nodes(folder), tmp_path / "run", settings="training.rounds=1")
    assert run.summary["round"] == 1
    with pytest.raises(
        InputError,
        match="cannot be made longer: clients have kept their memories of its last round",
    ):
        run_on_loop(path, own_nodes(folder), tmp_path / "run", settings="training.rounds=3")


def test_both_sides_follow_a_schedule_of_ones_own(folder, tmp_path):
    (folder / "own_schedule.py").write_text(
        "from equipoise.schedules import register\n\n\n@register\ndef sharp(round):\n    return "
        "0.0 if round else 1.0\n"
    )
    path = write_experiment(
        folder, imports="own_schedule.py", training={"rounds": 2, "schedule": "sharp"}
    )
    run, _ = run_on_loop(path, own_nodes(folder))
    rows = [
        row for row in run.trainer.metrics if row["model"] == "global" and row["split"] == "test"
    ]
    first, second = ([row["loss"] for row in rows if row["round"] == number] for number in (1, 2))
    assert first == pytest.approx(second, rel=1e-12), (
        "with a learning rate of 0 nothing moves in round 2"
    )
