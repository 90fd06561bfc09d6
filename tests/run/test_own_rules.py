"""Runs of user-defined rules: notes, facts and server state in checkpoints, and model parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from equipoise import load
from equipoise.methods import build
from equipoise.random import Purpose, choose, fold
from equipoise.run.files import load_tensors
from equipoise.tree import size_in_bytes
from tests.own_rules import Noting, make_known
from tests.run.small import Stop, federation, promised, rows_of, small_run, stop_after


@pytest.fixture(autouse=True)
def known(monkeypatch):
    make_known(monkeypatch)


NOTING = {"name": "fedavg", "aggregation": "noting"}


def test_notes_are_in_the_record_of_their_round_with_the_clients(tmp_path):
    run = small_run(tmp_path / "run", method=NOTING)
    rows = rows_of(tmp_path / "run", "rounds")
    data = federation()
    for round_, row in enumerate(rows):
        sizes = data.train.sizes[row["clients"]]
        assert row["clients"] == sorted(row["clients"])
        assert len(row["clients"]) == row["cohort"] == 4
        assert row["notes"]["key"] == fold(3, round_, Purpose.SERVER)
        if round_ % 2:
            assert set(row["notes"]) == {"key"}, "notes last one round"
        else:
            assert row["notes"]["weights"] == pytest.approx(sizes / sizes.sum())
    assert rows == list(run.trainer.rounds)


def test_notes_may_be_taken_before_training_too():
    @dataclass(frozen=True)
    class Early(Noting):
        def prepare(self, state, cohort):
            return state.with_notes(before=state.round, **{f"round {state.round}": True})

    rows = small_run(method=build("fedavg", aggregation=Early()), rounds=3).trainer.rounds
    for round_, row in enumerate(rows):
        assert row["notes"]["before"] == round_
        assert {name for name in row["notes"] if name.startswith("round")} == {f"round {round_}"}


def test_without_notes_only_partial_cohorts_are_written_down(tmp_path):
    small_run(tmp_path / "some", rounds=2)
    small_run(tmp_path / "all", rounds=2, cohort=1.0)
    some, everyone = (rows_of(tmp_path / name, "rounds") for name in ("some", "all"))
    assert all(len(row["clients"]) == row["cohort"] and "notes" not in row for row in some)
    assert all(not {"clients", "notes"} & set(row) for row in everyone)


def test_another_seed_has_other_keys(tmp_path):
    keys = [
        {
            row["notes"]["key"]
            for row in small_run(method=NOTING, seed=seed, rounds=2).trainer.rounds
        }
        for seed in (3, 4)
    ]
    assert len(keys[0] | keys[1]) == 4


# ---- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["calibrated", "counted", "aligned", "mixed", "projected"])
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_happened(name, tmp_path):
    small_run(tmp_path / "whole", method=name)
    for finished in (1, 4):
        with pytest.raises(Stop):
            small_run(tmp_path / "run", method=name, resume=True, on_round=stop_after(finished))
    small_run(tmp_path / "run", method=name, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")
    one, other = (
        load_tensors(tmp_path / run / "checkpoint.safetensors")[0] for run in ("run", "whole")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_checkpoint_holds_facts_of_those_who_took_part(tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", method="calibrated", on_round=stop_after(1))
    tensors, _ = load_tensors(tmp_path / "run" / "checkpoint.safetensors")
    data, clients = federation(), tensors["memory/clients"].tolist()
    assert len(clients) == 4
    wanted = [
        np.bincount(data.y[torch.from_numpy(data.train.of(client))], minlength=3).tolist()
        for client in clients
    ]
    assert tensors["memory/labels/counts"].tolist() == wanted


def test_the_means_count_once_for_each_client_before_and_after_a_stop(tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", method={"name": "mixed"}, on_round=stop_after(2))
    run = small_run(tmp_path / "run", method={"name": "mixed"}, resume=True)
    model = size_in_bytes(run.trainer.state.model)
    # Eight registered clients; a mean of five numbers and shares of three classes for each, in
    # float32.
    means = 8 * (5 + 3) * 4
    had = set()
    for round_, row in enumerate(run.trainer.rounds):
        cohort = set(choose(fold(3, round_, Purpose.SAMPLE), 8, 4).tolist())
        assert row["bytes_down"] == 4 * model + len(cohort - had) * means
        had |= cohort
    assert len(had) == 8


# ---- parts of a model ----------------------------------------------------------------------------


def test_a_part_is_drawn_from_the_seed_trained_and_loaded(tmp_path):
    run = small_run(tmp_path / "run", method="projected", rounds=2)
    before = run.trainer.engine.network.initial()
    torch.manual_seed(99)
    again, other = (
        small_run(method="projected", rounds=1, seed=seed).trainer.engine.network for seed in (3, 4)
    )
    assert torch.equal(before["projection.weight"], again.initial()["projection.weight"])
    assert not torch.equal(before["projection.weight"], other.initial()["projection.weight"])
    after = run.trainer.state.model
    assert not torch.equal(before["projection.weight"], after["projection.weight"])
    module = load(tmp_path / "run")
    assert module.projection.weight.shape == (3, 12)
    assert all(torch.equal(tensor, after[name]) for name, tensor in module.state_dict().items())
    x = federation().x[:5]
    assert torch.equal(module(x), run.model()(x))


def test_a_part_does_not_change_how_the_rest_of_the_model_begins():
    with_part, without = (
        small_run(method=name, rounds=1).trainer.engine.network for name in ("projected", "fedavg")
    )
    assert all(
        torch.equal(tensor, with_part.initial()[name]) for name, tensor in without.initial().items()
    )
