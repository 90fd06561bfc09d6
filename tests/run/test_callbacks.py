"""Callbacks: the values that they get, and how they stop a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml

from equipoise import Callback, Evaluation, Training, train
from equipoise.errors import InputError
from tests.run.small import (
    TRAINING,
    Stop,
    federation,
    measure,
    promised,
    rows_of,
    small_run,
    stop_after,
)

SHORT = Training(rounds=3, cohort=4)


class Diary(Callback):
    """Records its calls."""

    def __init__(self):
        self.events, self.losses, self.rows, self.models, self.last = [], [], {}, {}, None

    def begin(self, run):
        self.events.append(("begin", run.round))
        assert (run.rounds, run.record, run.rows) == (run.config["training"]["rounds"], {}, [])

    def evaluated(self, run):
        self.events.append(("evaluated", run.round))
        self.rows[run.round] = run.rows
        self.models[run.round] = run.global_model
        self.groups = run.groups()

    def round(self, run):
        self.events.append(("round", run.round))
        self.losses.append(run.record["train_loss"])
        assert bool(run.rows) == (("evaluated", run.round) in self.events)

    def end(self, run):
        self.events.append(("end", run.round))
        self.last = run


class StopAt(Callback):
    def __init__(self, number, event):
        self.number = number
        setattr(self, event, self._stop)

    def _stop(self, run):
        if run.round == self.number:
            run.stop(f"round {self.number} is enough")


def test_callbacks_follow_the_run_in_order(tmp_path):
    diary = Diary()
    run = small_run(
        tmp_path / "run", training=SHORT, evaluation=Evaluation(every=2), callbacks=[diary]
    )
    assert diary.events == [
        ("begin", 0),
        ("round", 1),
        ("evaluated", 2),
        ("round", 2),
        ("evaluated", 3),
        ("round", 3),
        ("end", 3),
    ]
    assert diary.losses == [row["train_loss"] for row in rows_of(tmp_path / "run", "rounds")]
    assert [row for rows in diary.rows.values() for row in rows] == rows_of(tmp_path / "run")
    assert diary.last.summary == run.summary
    assert diary.last.error is None
    assert (diary.last.directory, diary.last.method) == (run.directory, "fedavg")
    assert diary.last.config == yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    groups = run.summary["results"]["global"]["seen"]["groups"]
    assert diary.groups == {"global": groups}


def test_they_see_the_global_model_of_each_round():
    diary = Diary()
    run = small_run(None, training=SHORT, callbacks=[diary])
    assert set(diary.models) == {1, 2, 3}
    for name, tensor in run.model().state_dict().items():
        assert torch.equal(diary.models[3][name], tensor)
    assert not torch.equal(diary.models[1]["head.bias"], diary.models[3]["head.bias"])
    module = diary.last.model()
    row = next(row for row in diary.rows[3] if (row["split"], row["client"]) == ("test", 4))
    assert measure(module, federation(), "test", 4) == pytest.approx(
        (row["loss"], row["accuracy"]), rel=1e-5
    )


def test_what_they_do_to_the_model_changes_nothing(tmp_path):
    class Vandal(Callback):
        def evaluated(self, run):
            for tensor in run.global_model.values():
                tensor.fill_(7)
            with torch.no_grad():
                next(run.model().parameters()).fill_(7)

    small_run(tmp_path / "one", training=SHORT, callbacks=[Vandal()])
    small_run(tmp_path / "other", training=SHORT)
    assert promised(tmp_path / "one") == promised(tmp_path / "other")


def test_there_is_no_global_model_if_clients_keep_parts():
    diary = Diary()
    small_run(None, "fedper", training=SHORT, callbacks=[diary])
    assert diary.models[3] is None
    assert diary.last.model() is None
    assert set(diary.groups) == {"personal"}


@pytest.mark.parametrize(("event", "every"), [("evaluated", 1), ("round", 1), ("round", 5)])
def test_a_stopped_run_is_a_shorter_one(event, every, tmp_path):
    evaluation = Evaluation(every=every, keep_local=True)
    stopped = small_run(
        tmp_path / "stopped", training=TRAINING, evaluation=evaluation, callbacks=[StopAt(3, event)]
    )
    assert stopped.summary["rounds"] == 3
    assert stopped.summary["stopped"] == "round 3 is enough"
    shorter = small_run(
        tmp_path / "shorter",
        training=Training(**{**vars(TRAINING), "rounds": 3}),
        evaluation=evaluation,
    )
    ours, theirs = promised(tmp_path / "stopped"), promised(tmp_path / "shorter")
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    assert ours["local.safetensors"] == theirs["local.safetensors"]
    # A round that was not to be evaluated has no generalization gaps.
    last = [
        [row for row in rows_of(tmp_path / name) if row["round"] == 3]
        for name in ("stopped", "shorter")
    ]
    strip = [[{k: v for k, v in row.items() if k != "gap"} for row in rows] for rows in last]
    assert strip[0] == strip[1] != []
    assert shorter.summary.get("stopped") is None
    again = Diary()
    small_run(
        tmp_path / "stopped",
        training=TRAINING,
        evaluation=evaluation,
        resume=True,
        callbacks=[again],
    )
    assert again.events == []


def test_a_run_that_was_stopped_and_killed_stays_stopped(tmp_path):
    class Killed(Callback):
        def end(self, run):
            raise Stop

    with pytest.raises(Stop):
        small_run(tmp_path / "run", callbacks=[StopAt(2, "round"), Killed()])
    (tmp_path / "run" / "summary.json").unlink()
    run = small_run(tmp_path / "run", resume=True)
    assert (run.summary["rounds"], run.summary["stopped"]) == (2, "round 2 is enough")


@pytest.mark.parametrize("select", ["last", "best"])
def test_a_stopped_run_is_made_longer_whenever_it_is_interrupted(select, tmp_path):
    how = {"evaluation": Evaluation(every=2, select=select), "checkpoint_every": 5}
    small_run(tmp_path / "run", rounds=4, callbacks=[StopAt(3, "round")], **how)
    assert {row["round"] for row in rows_of(tmp_path / "run")} == {2, 3}
    # Interrupted before the first checkpoint of the longer run.
    with pytest.raises(Stop):
        small_run(tmp_path / "run", rounds=5, resume=True, on_round=stop_after(4), **how)
    small_run(tmp_path / "run", rounds=5, resume=True, **how)
    small_run(tmp_path / "whole", rounds=5, **how)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


def test_a_resumed_run_begins_at_its_checkpoint(tmp_path):
    first, second = Diary(), Diary()
    with pytest.raises(Stop):
        small_run(tmp_path / "run", training=SHORT, on_round=stop_after(2), callbacks=[first])
    assert first.events[-1] == ("end", 2)
    assert isinstance(first.last.error, Stop)
    assert first.last.summary is None
    small_run(tmp_path / "run", training=SHORT, resume=True, callbacks=[second])
    assert second.events == [("begin", 2), ("evaluated", 3), ("round", 3), ("end", 3)]


def test_a_callback_that_cannot_begin_is_not_told_of_the_end(tmp_path):
    class Broken(Diary):
        def begin(self, run):
            raise Stop

    first, broken, last = Diary(), Broken(), Diary()
    with pytest.raises(Stop):
        small_run(tmp_path / "run", training=SHORT, callbacks=[first, broken, last])
    assert (first.events, broken.events, last.events) == ([("begin", 0), ("end", 0)], [], [])


def test_a_run_without_rounds_is_evaluated():
    diary = Diary()
    train(federation(), rounds=0, callbacks=[diary])
    assert diary.events == [("begin", 0), ("evaluated", 0), ("end", 0)]
    assert {row["round"] for row in diary.rows[0]} == {0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Diary], "callbacks has the class Diary; pass an object"),
        (Diary(), "callbacks must be a list of callbacks, got"),
        (
            [print],
            "callbacks has <built-in function print>; valid: objects of classes derived from "
            "equipoise.Callback",
        ),
    ],
)
def test_what_is_no_callback_is_refused(given, message, tmp_path):
    with pytest.raises(InputError, match=message):
        small_run(tmp_path / "run", callbacks=given)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_stopped_without_a_reason():
    class Silent(Callback):
        def round(self, run):
            run.stop("")

    with pytest.raises(InputError, match=r"stop\(\) needs a reason in words, got ''"):
        small_run(None, training=SHORT, callbacks=[Silent()])


def test_callbacks_cost_no_random_numbers(tmp_path):
    class Draws(Callback):
        def round(self, run):
            torch.rand(10)
            np.random.default_rng(0).random()

    small_run(tmp_path / "one", training=SHORT, callbacks=[Draws()])
    small_run(tmp_path / "other", training=SHORT)
    assert promised(tmp_path / "one") == promised(tmp_path / "other")
