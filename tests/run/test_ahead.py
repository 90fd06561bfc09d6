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
from equipoise.models import build as model_named
from equipoise.optimizers import optimizer_named
from equipoise.run.round_steps import RoundSteps
from equipoise.run.round_training import RoundTraining
from equipoise.run.trainer import Trainer
from tests.engine.gpu import needs_gpu
from tests.run.deferring import ROUNDS, deferring, files, run
from tests.run.small import MODEL, TRAINING, federation, rows_of


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


def by_steps(reports):
    return reports["steps"]


def if_there(reports):
    return reports["steps"] if "steps" in reports else torch.ones(4)


def or_else(reports):
    return reports.get("steps", torch.ones(4))


@pytest.mark.parametrize("read", [by_steps, if_there, or_else])
def test_an_aggregation_that_reads_reports_after_all_waits_for_them(
    read, ahead, tmp_path, monkeypatch
):
    @dataclasses.dataclass(frozen=True)
    class BySteps(FedAvg):
        name: ClassVar[str] = "bysteps"
        reads_reports: ClassVar[bool] = False

        def combine(self, state, updates, cohort):
            steps = read(updates.reports)
            return state.with_global(mix(updates, steps / steps.sum()))

    method = dataclasses.replace(build("fedavg"), aggregation=BySteps())
    run(tmp_path / "run", method=method, checkpoint_every=100)
    assert ahead == []
    monkeypatch.setattr(RoundTraining, "_may_go_ahead", lambda training, number: False)
    run(tmp_path / "now", method=method, checkpoint_every=100)
    assert files(tmp_path / "run") == files(tmp_path / "now")


def test_questions_of_an_aggregation_are_counted_once(ahead, tmp_path, monkeypatch):
    class Asking(FedAvg):
        name: ClassVar[str] = "asking"
        reads_reports: ClassVar[bool] = False

        def combine(self, state, updates, cohort):
            losses = cohort.evaluate(state.model, "train")["loss"]
            return state.with_global(mix(updates, losses / losses.sum()))

    method = dataclasses.replace(build("fedavg"), aggregation=Asking())
    spoiled(monkeypatch, 2, 0, torch.nan)
    run(tmp_path / "run", method=method, checkpoint_every=100)
    assert ahead == []
    monkeypatch.setattr(RoundTraining, "_may_go_ahead", lambda training, number: False)
    run(tmp_path / "now", method=method, checkpoint_every=100)
    assert files(tmp_path / "run") == files(tmp_path / "now")


def test_rounds_run_ahead_again_after_one_that_failed_because_of_an_update(
    ahead, tmp_path, monkeypatch
):
    class Checking(FedAvg):
        name: ClassVar[str] = "checking"
        reads_reports: ClassVar[bool] = False

        def combine(self, state, updates, cohort):
            if not all(bool(stack.isfinite().all()) for stack in updates.params.values()):
                raise ArithmeticError
            return super().combine(state, updates, cohort)

    method = dataclasses.replace(build("fedavg"), aggregation=Checking())
    how = {"method": method, "checkpoint_every": 100}
    client = rows_of(run(tmp_path / "whole", **how).directory, "rounds")[2]["clients"][0]
    ahead.clear()
    spoiled(monkeypatch, 3, client, torch.nan)
    run(tmp_path / "run", **how)
    # Round 4 began when round 3 had been checked.
    assert ahead == [2, 3, 5, 6, 7]


def test_a_round_that_was_interrupted_is_repeated(ahead):
    trainer, whole = (small_trainer() for _ in range(2))
    whole.run()
    wait, interrupted = RoundSteps.wait, []

    def waiting(steps, launched, cohort):
        if steps.number == 3 and not interrupted:
            interrupted.append(steps.number)
            raise KeyboardInterrupt
        return wait(steps, launched, cohort)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundSteps, "wait", waiting)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    assert trainer.state.round == 2
    trainer.run()
    for name in ("rounds", "metrics"):
        assert list(trainer.journals[name]) == list(whole.journals[name])


def small_trainer():
    data = federation()
    return Trainer(
        data,
        build("fedavg"),
        model_named(shape=data.shape, classes=data.outputs, seed=3, **MODEL),
        TRAINING,
        Machine(device="cpu"),
        Evaluation(),
        seed=3,
    )


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
