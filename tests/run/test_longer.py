"""A run that is extended leaves the same bytes as a run of that length, or is refused."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest
import yaml

from equipoise import Evaluation
from equipoise.errors import InputError
from equipoise.metrics import Metric
from equipoise.optimizers import Schedule
from equipoise.run import api
from equipoise.run.api import read_config
from equipoise.run.checksums import read_sums, verify
from equipoise.run.trainer import Trainer
from equipoise.schedules import register
from tests.run.small import Stop, promised, rows_of, small_run, stop_after


@register
def halving(round):
    return 0.5**round


@register
def linear(round, rounds):
    return 1 - round / rounds


def assert_same(directory, whole):
    assert promised(directory) == promised(whole)
    assert yaml.safe_load((directory / "config.yaml").read_text()) == yaml.safe_load(
        (whole / "config.yaml").read_text()
    )


@pytest.mark.parametrize(
    "how",
    [
        {"method": "fedavg"},
        {"method": "scaffold", "schedule": "exponential"},
        {"method": "local", "schedule": {"kind": "cosine", "over": 4, "warmup": 1}},
        {"method": "fedavg", "schedule": halving, "checkpoint_every": 2},
        # The short run evaluates after round 3 only because that is its last round.
        {"method": "fedavg", "evaluation": Evaluation(every=2)},
        {"method": "local", "evaluation": Evaluation(every=2, select="best")},
        {"method": "fedavg", "evaluation": Evaluation(every=2, select="best", patience=2)},
        {"method": {"name": "ga", "decay": False}, "evaluation": Evaluation(every=4)},
        {"method": "fedavg", "evaluation": Evaluation(every=5, local=True, keep_local=True)},
        {"method": {"name": "fedper", "guard": "norm"}, "evaluation": Evaluation(every=2)},
    ],
)
def test_a_finished_run_is_made_longer(how, tmp_path):
    small_run(tmp_path / "whole", **how, rounds=6)
    small_run(tmp_path / "run", **how, rounds=3)
    run = small_run(tmp_path / "run", **how, rounds=6, resume=True)
    assert (
        run.summary["rounds"]
        == small_run(tmp_path / "whole", **how, rounds=6, resume=True).summary["rounds"]
    )
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_an_evaluation_of_the_last_round_alone_is_forgotten(tmp_path):
    how = {"evaluation": Evaluation(every=2, select="best")}
    small_run(tmp_path / "run", **how, rounds=3)
    assert {row["round"] for row in rows_of(tmp_path / "run")} == {2, 3}
    small_run(tmp_path / "run", **how, rounds=4, resume=True)
    assert {row["round"] for row in rows_of(tmp_path / "run")} == {2, 4}


def test_a_run_is_made_longer_twice_and_after_an_interruption(tmp_path):
    how = {"method": "scaffold", "evaluation": Evaluation(every=4)}
    small_run(tmp_path / "whole", **how, rounds=9)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, rounds=3, on_round=stop_after(2))
    small_run(tmp_path / "run", **how, rounds=5, resume=True)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, rounds=9, resume=True, on_round=stop_after(6))
    small_run(tmp_path / "run", **how, rounds=9, resume=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("at", ["restore_checkpoint", "_round"])
def test_a_run_that_is_stopped_while_it_is_made_longer_can_be_resumed(at, tmp_path, monkeypatch):
    """The first round after the change has no checkpoint yet, but the journals were rewound."""
    how = {"evaluation": Evaluation(every=2)}
    small_run(tmp_path / "whole", **how, rounds=6)
    small_run(tmp_path / "run", **how, rounds=3)

    def stop(trainer, *args, **options):
        raise Stop

    monkeypatch.setattr(Trainer, at, stop)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, rounds=6, resume=True)
    monkeypatch.undo()
    assert not (tmp_path / "run" / "summary.json").exists()
    small_run(tmp_path / "run", **how, rounds=6, resume=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


def stop_before(monkeypatch, step):
    """Stop before one of the steps that change files while the configuration is replaced.

    A killed process leaves the same files: nothing is written or removed because of the exception.
    """
    real, count = api.write_other_config, 0

    def counted(change):
        def stepped(*arguments, **options):
            nonlocal count
            count += 1
            if count == step:
                raise Stop
            return change(*arguments, **options)

        return stepped

    def lengthen(*arguments):
        with monkeypatch.context() as patched:
            for name in ("fsync", "replace", "unlink"):
                patched.setattr(os, name, counted(getattr(os, name)))
            real(*arguments)

    monkeypatch.setattr(api, "write_other_config", lengthen)


@pytest.mark.parametrize("rounds", [3, 2], ids=["longer", "as before"])
def test_a_run_keeps_its_checksums_wherever_its_lengthening_is_stopped(
    rounds, tmp_path, monkeypatch
):
    """It is resumed with the larger number of rounds, or with that from before."""
    small_run(tmp_path / "short", rounds=2)
    small_run(tmp_path / "whole", rounds=rounds)
    names = set(read_sums(tmp_path / "whole"))
    assert {"config.yaml", "summary.json"} <= names
    found = []
    for step in itertools.count(1):
        directory = tmp_path / str(step)
        shutil.copytree(tmp_path / "short", directory)
        with monkeypatch.context() as patched:
            stop_before(patched, step)
            try:
                small_run(directory, rounds=3, resume=True)
                break  # there are fewer steps
            except Stop:
                found.append(read_config(directory)["training"]["rounds"])
        # A run is not made shorter.
        if found[-1] <= rounds:
            small_run(directory, rounds=rounds, resume=True)
            assert_same(directory, tmp_path / "whole")
            verify(directory)
            assert set(read_sums(directory)) == names
            lines = (directory / "SHA256SUMS").read_text().splitlines()
            assert len(lines) == len(names), "only one configuration has a checksum"
    assert set(found) == {2, 3}, "stopped before and after the configuration was replaced"


def test_a_run_that_patience_ended_says_that_nothing_is_left(tmp_path, caplog):
    how = {"evaluation": Evaluation(patience=1)}
    made = small_run(tmp_path / "run", **how, rounds=100).summary["rounds"]
    assert made < 100
    before = promised(tmp_path / "run")
    small_run(tmp_path / "run", **how, rounds=200, resume=True)
    assert promised(tmp_path / "run") == before
    (said,) = caplog.messages
    assert said.startswith(f"nothing is left to train in {tmp_path / 'run'}: with training.rounds")
    assert f"ends after round {made}, because 1 evaluation brought no better value" in said


def test_patience_that_only_the_shorter_run_has_lost_is_not_mentioned(tmp_path, caplog):
    """The longer run does not make the last evaluation of the shorter one."""
    constant = Metric(function=lambda output, y: 1.0, name="constant", higher_is_better=True)
    how = {"evaluation": Evaluation(every=2, metrics=[constant], select_by="constant", patience=1)}
    assert small_run(tmp_path / "run", **how, rounds=3).summary["rounds"] == 3
    assert small_run(tmp_path / "run", **how, rounds=8, resume=True).summary["rounds"] == 4
    assert caplog.messages == []


def test_an_evaluated_initial_model_is_trained(tmp_path):
    small_run(tmp_path / "whole", rounds=2)
    small_run(tmp_path / "run", rounds=0)
    small_run(tmp_path / "run", rounds=2, resume=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            {"schedule": "cosine"},
            "its schedule 'cosine' falls until the end of the run, because .*over is not set",
        ),
        ({"schedule": linear}, "its schedule 'linear' depends on the number of rounds"),
        (
            {"method": {"name": "ga", "decay": True}},
            "its method 'ga' has used the number of rounds",
        ),
    ],
)
def test_a_run_that_depends_on_its_length_is_refused(how, reason, tmp_path):
    small_run(tmp_path / "run", **how, rounds=2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(
        InputError, match=f"the run in {tmp_path / 'run'} cannot be made longer: {reason}"
    ):
        small_run(tmp_path / "run", **how, rounds=4, resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_warmup_comes_before_other_kinds():
    exponential = Schedule(kind="exponential", decay=0.5, warmup=2)
    assert [exponential.factor(r, 9) for r in range(5)] == [0.5, 1.0, 1.0, 0.5, 0.25]
    steps = Schedule(kind="steps", at=(3,), factors=(0.1,), warmup=2)
    assert [steps.factor(r, 9) for r in range(4)] == [0.5, 1.0, 1.0, 0.1]
    assert [Schedule(kind="linear", warmup=1).factor(r, 5) for r in range(5)] == [
        1.0,
        1.0,
        0.75,
        0.5,
        0.25,
    ]
    assert [Schedule(kind="halving").factor(r, 5) for r in range(3)] == [1.0, 0.5, 0.25]
    until_the_end = Schedule(kind="cosine", warmup=2, floor=0.2)
    assert [until_the_end.factor(r, 6) for r in (0, 1, 2, 4)] == pytest.approx([0.5, 1.0, 1.0, 0.6])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(kind="haling"), "did you mean 'halving'"),
        (lambda: Schedule(warmup=-1), "schedule.warmup"),
        (
            lambda: Schedule(kind="steps", over=3),
            "schedule.over=3 is valid only for the kind 'cosine'",
        ),
        (
            lambda: small_run(rounds=1, schedule=lambda round: 1.0),
            "a schedule needs the name of its function",
        ),
        (
            lambda: small_run(rounds=1, schedule=3),
            "schedule must be a Schedule or a function of the round",
        ),
        (
            lambda: register(stop_after),
            "schedule 'stop_after' takes number; valid: round, or round and rounds",
        ),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_schedule_of_ones_own_must_return_a_factor():
    @register
    def negative(round):
        return -1.0

    with pytest.raises(InputError, match="schedule 'negative' returned -1.0 for round 0"):
        small_run(rounds=1, schedule=negative)
