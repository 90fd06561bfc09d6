"""Rounds that begin before the host has checked the updates of the round before.

Without a GPU, an engine that defers work is the usual one that says so.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

from equipoise import Evaluation, Machine
from equipoise.engine.cohort import StackedCohort
from equipoise.errors import RunError
from equipoise.method import mix
from equipoise.methods import build
from equipoise.methods.fedavg import FedAvg, UniformSampler
from equipoise.optimizers import optimizer_named
from equipoise.run.round_steps import RoundSteps
from equipoise.run.round_training import RoundTraining
from tests.engine.gpu import needs_gpu
from tests.run.deferring import ROUNDS, deferring, files, run
from tests.run.small import TRAINING, rows_of


@pytest.fixture
def ahead(monkeypatch):
    """The rounds that were ahead: begun before the round before them had been checked."""
    deferring(monkeypatch)
    return noting(monkeypatch)


def noting(monkeypatch):
    begun, original = [], RoundTraining._launch

    def launching(training, state, *, ahead=False):
        begun.extend([state.round + 1] * ahead)
        return original(training, state, ahead=ahead)

    monkeypatch.setattr(RoundTraining, "_launch", launching)
    return begun


class Reading(FedAvg):
    """It does not say that it reads no reports, although its base class does."""

    name: ClassVar[str] = "reading"


class Learning(UniformSampler):
    """It learns from every round."""

    reads_state: ClassVar[bool] = False

    def learn(self, state, cohort):
        return state.with_notes(learned=cohort.ids)


WILD = dataclasses.replace(TRAINING, optimizer=optimizer_named("sgd", lr=1e30))
LATER_ROUNDS = list(range(2, ROUNDS + 1))


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("fedavg", LATER_ROUNDS),
        ("fedprox", LATER_ROUNDS),
        ("fedavgm", LATER_ROUNDS),
        ("fedadam", LATER_ROUNDS),
        ("fedyogi", LATER_ROUNDS),
        ("qffl", []),
        ("afl", []),
        ("scaffold", []),
        ("fedper", []),
        ("perfedavg", []),
        ({"name": "fedavg", "guard": "norm"}, []),
        (dataclasses.replace(build("fedavg"), aggregation=Reading()), []),
        (dataclasses.replace(build("fedavg"), sampler=Learning()), []),
    ],
    ids=str,
)
def test_rounds_run_ahead_if_nothing_reads_what_is_checked(method, wanted, ahead):
    run(None, method=method)
    assert ahead == wanted


def test_rounds_do_not_run_ahead_without_a_gpu(monkeypatch):
    ahead = noting(monkeypatch)
    run(None)
    assert ahead == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"checkpoint_every": 3}, [2, 3, 5, 6]),
        ({"evaluation": Evaluation(every=2)}, LATER_ROUNDS),
        ({"evaluation": Evaluation(every=2, metrics=["auroc"])}, [2, 4, 6]),
        ({"evaluation": Evaluation(local=True)}, []),
        ({"evaluation": Evaluation(select="best")}, []),
        ({"evaluation": Evaluation(patience=5)}, []),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else next(iter(value)),
)
def test_rounds_with_checkpoints_or_what_the_next_one_waits_for_end_first(
    options, wanted, ahead, tmp_path
):
    run(tmp_path / "run", **{"checkpoint_every": 100, **options})
    assert ahead == wanted


def spoiled(monkeypatch, number, client, value):
    """Let a client send a number that cannot be used in one round."""
    launch = StackedCohort.launch

    def launching(cohort, *given):
        sent, uploads, reports = launch(cohort, *given)
        if cohort.round == number - 1 and client in cohort.ids:
            next(iter(sent.values()))[list(cohort.ids).index(client)] = value
        return sent, uploads, reports

    monkeypatch.setattr(StackedCohort, "launch", launching)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e20])
@pytest.mark.parametrize("number", [1, 4, ROUNDS - 1])
def test_a_round_that_began_with_an_update_that_cannot_be_used_begins_again(
    number, value, tmp_path, monkeypatch
):
    how = {"checkpoint_every": 100}
    whole = rows_of(run(tmp_path / "whole", **how).directory, "rounds")
    client = whole[number - 1]["clients"][1]
    spoiled(monkeypatch, number, client, value)
    run(tmp_path / "now", **how)
    deferring(monkeypatch)
    ahead = noting(monkeypatch)
    launched, launch = [], RoundSteps.launch

    def launching(steps, *given):
        launched.append(steps.number)
        return launch(steps, *given)

    monkeypatch.setattr(RoundSteps, "launch", launching)
    run(tmp_path / "ahead", **how)
    assert ahead == LATER_ROUNDS
    assert launched == sorted([*range(1, ROUNDS + 1), number + 1])
    assert files(tmp_path / "ahead") == files(tmp_path / "now")
    rows = rows_of(tmp_path / "ahead", "rounds")
    assert list(rows[number - 1]["left_out"]) == [str(client)]


def test_a_loss_that_is_not_finite_is_named_as_without_running_ahead(tmp_path, monkeypatch):
    messages = []
    for name in ("now", "ahead"):
        with monkeypatch.context() as patch:
            if name == "ahead":
                deferring(patch)
            with pytest.raises(RunError, match=r"round \d: ") as caught:
                run(tmp_path / name, checkpoint_every=100, training=WILD)
            messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert files(tmp_path / "ahead") == files(tmp_path / "now")


def test_a_round_that_cannot_begin_ahead_begins_when_the_one_before_has_ended(
    ahead, tmp_path, monkeypatch
):
    how = {"checkpoint_every": 100}
    run(tmp_path / "whole", **how)
    launch, launched = RoundSteps.launch, []

    def launching(steps, *given):
        launched.append(steps.number)
        if launched == [1, 2, 3, 4]:
            raise torch.OutOfMemoryError("two cohorts")
        return launch(steps, *given)

    monkeypatch.setattr(RoundSteps, "launch", launching)
    ahead.clear()
    run(tmp_path / "run", **how)
    assert launched == [1, 2, 3, 4, 4, 5, 6, 7]
    # After that, no round runs ahead.
    assert ahead == [2, 3, 4]
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_an_aggregation_that_reads_reports_after_all_waits_for_them(ahead, tmp_path):
    @dataclasses.dataclass(frozen=True)
    class ByLoss(FedAvg):
        name: ClassVar[str] = "byloss"
        reads_reports: ClassVar[bool] = False

        def combine(self, state, updates, cohort):
            losses = updates.reports["train_loss"]
            return state.with_global(mix(updates, losses / losses.sum()))

    method = dataclasses.replace(build("fedavg"), aggregation=ByLoss())
    directory = run(tmp_path / "run", method=method, checkpoint_every=100).directory
    assert ahead == []
    assert rows_of(directory, "rounds")[-1]["round"] == ROUNDS


def test_an_error_of_a_later_round_leaves_the_rounds_before_it(ahead, tmp_path, monkeypatch):
    launch = RoundSteps.launch

    def launching(steps, *given):
        if steps.number == 4:
            raise RunError("no more")
        return launch(steps, *given)

    monkeypatch.setattr(RoundSteps, "launch", launching)
    with pytest.raises(RunError, match="no more"):
        run(tmp_path / "run", checkpoint_every=100)
    for name in ("metrics", "rounds", "timings"):
        assert rows_of(tmp_path / "run", name)[-1]["round"] == 3


@needs_gpu
@pytest.mark.parametrize("method", ["fedavg", "fedadam"])
def test_a_gpu_writes_the_same_files_whether_rounds_run_ahead(method, tmp_path, monkeypatch):
    how = {"method": method, "machine": Machine(device="cuda"), "checkpoint_every": 100}
    ahead = noting(monkeypatch)
    run(tmp_path / "ahead", **how)
    assert ahead == LATER_ROUNDS
    monkeypatch.setattr(RoundTraining, "_may_go_ahead", lambda training, number: False)
    run(tmp_path / "now", **how)
    assert files(tmp_path / "ahead") == files(tmp_path / "now")


@needs_gpu
@pytest.mark.parametrize("value", [torch.nan, 1e20])
def test_a_gpu_drops_a_round_that_began_with_an_update_that_cannot_be_used(
    value, tmp_path, monkeypatch
):
    how = {"machine": Machine(device="cuda"), "checkpoint_every": 100}
    whole = rows_of(run(tmp_path / "whole", **how).directory, "rounds")
    spoiled(monkeypatch, 4, whole[3]["clients"][1], value)
    run(tmp_path / "ahead", **how)
    monkeypatch.setattr(RoundTraining, "_may_go_ahead", lambda training, number: False)
    run(tmp_path / "now", **how)
    assert files(tmp_path / "ahead") == files(tmp_path / "now")
    assert files(tmp_path / "ahead") != files(tmp_path / "whole")


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_does_not_wait_for_a_gpu_that_runs_ahead(monkeypatch):
    """PyTorch raises an error where the host would wait, but for events, which are expected."""
    launch = RoundTraining._launch

    def launching(training, state, *, ahead=False):
        # The first rounds build kernels and record steps.
        torch.cuda.set_sync_debug_mode("error" if ahead and state.round >= 5 else "default")
        try:
            return launch(training, state, ahead=ahead)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(RoundTraining, "_launch", launching)
    ahead = noting(monkeypatch)
    run(None, machine=Machine(device="cuda"), rounds=8)
    assert ahead == list(range(2, 9))
