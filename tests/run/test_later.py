"""Rounds whose evaluation ends while a GPU trains the next round.

Without a GPU, an engine that defers work is the usual one that says so.
"""

from __future__ import annotations

import shutil
import time
import weakref

import numpy as np
import pytest
import torch

from equipoise import Callback, Evaluation, Federation, Machine
from equipoise.attributes import Attribute
from equipoise.engine.local import LocalTraining
from equipoise.engine.settings import FineTune
from equipoise.engine.spread import SpreadEngine
from equipoise.engine.stacked import StackedEngine
from equipoise.engine.streams import beside, preferred
from equipoise.errors import RunError
from equipoise.host_copy import HostCopy
from equipoise.run.evaluation import Evaluator, Reported
from equipoise.run.later import LaterRounds
from equipoise.run.participants import Participants
from equipoise.run.round_rows import Clock, Moment, seconds_of
from equipoise.run.round_steps import RoundSteps
from equipoise.run.trainer import Trainer
from tests.engine.gpu import needs_gpu
from tests.run.deferring import ROUNDS, deferring, files, run, watched
from tests.run.server_data import federation as with_server_data
from tests.run.small import Stop, rows_of, stop_after


def with_attributes():
    rng = np.random.default_rng(1)
    clients = np.arange(160) % 4
    return Federation.from_arrays(
        rng.normal(size=(160, 5)),
        rng.integers(0, 2, 160),
        clients=clients,
        classes=2,
        attributes={"sex": Attribute(rng.integers(0, 2, 160), ("f", "m"))},
    )


EVERY = list(range(1, ROUNDS))
CASES = {
    "plain": ({"checkpoint_every": 100}, EVERY),
    "checkpoints": ({"checkpoint_every": 3}, [1, 2, 4, 5]),
    "a checkpoint after every round": ({"checkpoint_every": 1}, []),
    "short rounds": ({"checkpoint_every": None}, EVERY[1:]),
    "every second round": (
        {"checkpoint_every": 100, "evaluation": Evaluation(every=2)},
        [2, 4, 6],
    ),
    "every third round": (
        {"checkpoint_every": 5, "evaluation": Evaluation(every=3)},
        [3, 6],
    ),
    "memories": ({"checkpoint_every": 100, "method": "scaffold"}, EVERY),
    "memories, every second round": (
        {"checkpoint_every": 100, "method": "scaffold", "evaluation": Evaluation(every=2)},
        list(range(2, ROUNDS)),
    ),
    "momentum of the server": ({"checkpoint_every": 3, "method": "fedavgm"}, [1, 2, 4, 5]),
    "personal models": ({"checkpoint_every": 100, "method": "fedper"}, EVERY),
    "averaged heads": (
        {
            "checkpoint_every": 3,
            "method": "fedper",
            "evaluation": Evaluation(average_kept=True, local=True, keep_local=True),
        },
        [1, 2, 4, 5],
    ),
    "fine-tuning": (
        {"checkpoint_every": 100, "evaluation": Evaluation(fine_tune=FineTune(epochs=1))},
        EVERY,
    ),
    "metrics": (
        {"checkpoint_every": 100, "evaluation": Evaluation(metrics=["auroc"], last=3)},
        EVERY,
    ),
    "attributes": ({"checkpoint_every": 100, "federation": with_attributes()}, EVERY),
    "data of the server": ({"checkpoint_every": 3, "federation": with_server_data()}, [1, 2, 4, 5]),
    "pooled data": ({"checkpoint_every": 100, "method": "central"}, EVERY),
    "the best round": ({"checkpoint_every": 100, "evaluation": Evaluation(select="best")}, []),
    "patience": ({"checkpoint_every": 100, "evaluation": Evaluation(patience=5)}, []),
    "callbacks": ({"checkpoint_every": 100, "callbacks": [Callback()]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_the_same(case, tmp_path, monkeypatch):
    how, wanted = CASES[case]
    run(tmp_path / "now", **how)
    later = deferring(monkeypatch)
    run(tmp_path / "later", **how)
    assert later == wanted
    now, found = (files(tmp_path / name) for name in ("now", "later"))
    assert found.keys() == now.keys()
    assert {name for name in now if now[name] != found[name]} == set()
    timings, of_rounds = (rows_of(tmp_path / "later", name) for name in ("timings", "rounds"))
    assert [row["round"] for row in timings] == [row["round"] for row in of_rounds]
    assert [
        [name.removesuffix("_beside") for name in row if name != "wait"] for row in timings
    ] == [list(row) for row in rows_of(tmp_path / "now", "timings")]
    assert all(value >= 0 for row in timings for value in row.values())


def test_without_a_directory_only_the_last_round_is_waited_for(monkeypatch):
    now = run(None).trainer
    later = deferring(monkeypatch)
    found = run(None).trainer
    assert later == EVERY
    for name in ("metrics", "rounds"):
        assert list(found.journals[name]) == list(now.journals[name])


def test_without_a_gpu_no_round_ends_later(tmp_path, monkeypatch):
    later = watched(monkeypatch)
    run(tmp_path / "run", checkpoint_every=100)
    assert later == []


def test_other_engines_have_their_values_when_evaluation_returns():
    pytest.importorskip("flwr", reason="needs Flower")
    from equipoise.flower.engine import FlowerEngine

    assert SpreadEngine.defers.fget(None) is FlowerEngine.defers.fget(None) is False


def test_progress_shows_the_scores_of_the_evaluation_before(monkeypatch):
    def scores(**how):
        seen = []
        run(None, on_round=seen.append, **how)
        assert [progress.round for progress in seen] == list(range(1, ROUNDS + 1))
        return [(progress.mean, progress.worst, progress.sigma) for progress in seen]

    now = scores()
    deferring(monkeypatch)
    later = scores()
    # A round is evaluated while the next one is trained. The last round is shown at once.
    assert later == [(None, None, None), *now[: ROUNDS - 2], now[-1]]


def test_progress_shows_the_personal_scores_of_the_evaluation_before(monkeypatch):
    def means():
        seen = []
        run(None, method="fedper", on_round=seen.append)
        return [progress.mean for progress in seen]

    now = means()
    deferring(monkeypatch)
    assert means() == [None, *now[: ROUNDS - 2], now[-1]]


@pytest.fixture
def order(monkeypatch):
    """The order in which the parts of rounds begin or end, if the engine defers work."""
    deferring(monkeypatch)
    order = []

    def noted(kind, name, before, after=()):
        original = getattr(kind, name)

        def calling(self, *args, **more):
            order.extend(before)
            found = original(self, *args, **more)
            order.extend(after)
            return found

        monkeypatch.setattr(kind, name, calling)

    noted(LocalTraining, "run", ["train"])
    noted(RoundSteps, "wait", [], ["trained"])
    noted(Participants, "look_ahead", ["look ahead"])
    noted(Evaluator, "launch", ["launch"])
    noted(Evaluator, "follow", ["finish"])
    return order


def test_a_round_is_evaluated_when_the_next_one_has_been_launched(order):
    """After the host has chosen the cohort of the round after that, which needs no result."""
    run(None, rounds=4, method="scaffold", machine=Machine(device="cpu", chunk=10))
    assert order == [
        *("train", "look ahead", "trained"),
        *("train", "look ahead", "launch", "trained"),
        *("train", "look ahead", "finish", "launch", "trained"),
        *("train", "finish", "launch", "trained", "finish"),
        *("launch", "finish"),
    ]


def test_without_memories_the_next_round_is_launched_before_the_host_waits(order):
    run(None, rounds=4, machine=Machine(device="cpu", chunk=10))
    assert order == [
        *("train", "look ahead", "train", "trained"),
        *("train", "launch", "finish", "trained"),
        *("train", "launch", "finish", "trained"),
        *("launch", "trained", "finish", "launch", "finish"),
    ]


def test_personal_models_are_evaluated_before_the_next_round_is_launched(order):
    run(None, rounds=3, method="fedper", machine=Machine(device="cpu", chunk=10))
    # New clients train, too, when their personal models are evaluated.
    assert [step for step in order if step != "train"] == [
        *("look ahead", "trained", "launch"),
        *("look ahead", "finish", "trained", "launch"),
        *("finish", "trained", "launch", "finish"),
    ]


def can_be_beside(**how):
    trainer = run(None, rounds=1, **how).trainer
    return trainer.evaluator.can_be_beside


def test_evaluations_that_only_read_can_be_beside_training(monkeypatch):
    assert not can_be_beside()
    deferring(monkeypatch)
    assert can_be_beside()
    assert can_be_beside(method="scaffold")
    averaged = Evaluation(average_kept=True)
    assert not any(
        (
            can_be_beside(method="ditto"),
            can_be_beside(method="fedbabu", evaluation=averaged),
            can_be_beside(method="fedper", evaluation=averaged),
            can_be_beside(evaluation=Evaluation(metrics=["auroc"])),
            can_be_beside(evaluation=Evaluation(fine_tune=FineTune(epochs=1))),
            can_be_beside(federation=with_attributes()),
            can_be_beside(federation=with_server_data()),
        )
    )


def test_what_waits_does_not_keep_the_updates_in_memory(monkeypatch):
    deferring(monkeypatch)
    kept, reported, follow = [], Reported.of, Evaluator.follow
    alive = []

    def reporting(updates, cohort):
        kept.append(weakref.ref(updates))
        return reported(updates, cohort)

    def following(evaluator, round_, *args):
        alive.append(kept[round_ - 1]() is not None)
        return follow(evaluator, round_, *args)

    monkeypatch.setattr(Reported, "of", reporting)
    monkeypatch.setattr(Evaluator, "follow", following)
    run(None, evaluation=Evaluation(local=True))
    assert alive == [False] * (ROUNDS - 1) + [True]


def test_a_round_is_finished_even_if_no_device_is_ever_busy(tmp_path, monkeypatch):
    run(tmp_path / "now", checkpoint_every=3)
    later = deferring(monkeypatch)
    monkeypatch.setattr(StackedEngine, "while_busy", lambda engine, work: None)
    run(tmp_path / "later", checkpoint_every=3)
    assert later == [1, 2, 4, 5]
    assert files(tmp_path / "later") == files(tmp_path / "now")


# ---- runs that fail, are broken off or killed ----------------------------------------------------


def diverging(monkeypatch, number):
    """Make the test loss of client 6 NaN in the evaluation of a round, and only there."""
    launch, launched = StackedEngine.launch_evaluation, []

    def launching(engine, *args, **more):
        read = launch(engine, *args, **more)
        launched.append(read)
        evaluated = len(launched)

        def reading():
            found = read()
            if evaluated == number:
                found["test"]["loss"][6] = np.nan
            return found

        return reading

    monkeypatch.setattr(StackedEngine, "launch_evaluation", launching)


@pytest.mark.parametrize("checkpoint_every", [2, 100])
@pytest.mark.parametrize("number", [1, 3, ROUNDS])
def test_a_round_that_has_diverged_is_named_and_has_no_rows(
    number, checkpoint_every, tmp_path, monkeypatch
):
    how = {"checkpoint_every": checkpoint_every}
    messages = []
    for name in ("now", "later"):
        with monkeypatch.context() as patch:
            if name == "later":
                later = deferring(patch)
            diverging(patch, number)
            with pytest.raises(RunError) as caught:
                run(tmp_path / name, **how)
            messages.append(str(caught.value))
    assert (number in later) == (number < ROUNDS)
    assert messages[0].startswith(
        f"round {number}: the test loss of the global model of client 6 (6) is not finite"
    )
    assert messages[1] == messages[0]
    now, found = (files(tmp_path / name) for name in ("now", "later"))
    assert found == now
    if number > 1:
        assert rows_of(tmp_path / "later", "rounds")[-1]["round"] == number - 1
    # Resumed without the cause, the run ends as any other.
    run(tmp_path / "whole", **how)
    deferring(monkeypatch)
    run(tmp_path / "later", **how, resume=True)
    assert files(tmp_path / "later") == files(tmp_path / "whole")


def test_a_round_is_finished_if_the_evaluation_of_the_next_one_cannot_be_launched():
    written = []
    cpu = torch.device("cpu")
    later = LaterRounds(cpu, lambda row, clock: written.append(row["round"]))

    def launch_too_much():
        raise RunError("out of memory")

    later.add_beside(lambda: lambda: None, {"round": 1}, Clock(cpu))
    later.launch()
    later.add_beside(launch_too_much, {"round": 2}, Clock(cpu))
    with pytest.raises(RunError, match="out of memory"):
        later.finish()
    assert written == [1]


def failing(monkeypatch, number):
    launch = RoundSteps.launch

    def launching(steps, prepared, cohort):
        if steps.number == number:
            raise RunError("no more")
        return launch(steps, prepared, cohort)

    monkeypatch.setattr(RoundSteps, "launch", launching)


def test_a_round_is_finished_if_the_next_one_fails(tmp_path, monkeypatch):
    deferring(monkeypatch)
    failing(monkeypatch, 4)
    with pytest.raises(RunError, match="no more"):
        run(tmp_path / "run", checkpoint_every=100)
    for name in ("metrics", "rounds", "timings"):
        assert rows_of(tmp_path / "run", name)[-1]["round"] == 3


def test_the_first_of_two_failures_is_reported(tmp_path, monkeypatch):
    deferring(monkeypatch)
    failing(monkeypatch, 4)
    diverging(monkeypatch, 3)
    with pytest.raises(RunError, match="round 3: the test loss of the global model of client 6"):
        run(tmp_path / "run", checkpoint_every=100)
    for name in ("metrics", "rounds", "timings"):
        assert rows_of(tmp_path / "run", name)[-1]["round"] == 2


@pytest.mark.parametrize("checkpoint_every", [1, 3])
@pytest.mark.parametrize("finished", [1, 2, 3, 5])
def test_a_run_that_was_broken_off_or_killed_goes_on_as_if_nothing_had_happened(
    finished, checkpoint_every, tmp_path, monkeypatch
):
    how = {"checkpoint_every": checkpoint_every, "method": "scaffold"}
    run(tmp_path / "whole", **how)
    deferring(monkeypatch)
    stop = stop_after(finished)

    def on_round(progress):
        if progress.round == finished:
            # What a kill at this moment leaves behind.
            shutil.copytree(tmp_path / "broken off", tmp_path / "killed")
        stop(progress)

    with pytest.raises(Stop):
        run(tmp_path / "broken off", **how, on_round=on_round)
    whole = files(tmp_path / "whole")
    for name in ("metrics", "rounds", "timings"):
        assert rows_of(tmp_path / "broken off", name)[-1]["round"] == finished
    for name in ("metrics.jsonl", "rounds.jsonl"):
        for directory in ("broken off", "killed"):
            path = tmp_path / directory / name
            assert not path.exists() or whole[name].startswith(path.read_bytes())
    for directory in ("broken off", "killed"):
        run(tmp_path / directory, **how, resume=True)
        assert files(tmp_path / directory) == whole


def test_a_longer_run_goes_on_from_a_round_that_was_evaluated_as_the_last(tmp_path, monkeypatch):
    how = {"checkpoint_every": 100, "evaluation": Evaluation(every=3)}
    run(tmp_path / "whole", **how, rounds=9)
    deferring(monkeypatch)
    run(tmp_path / "run", **how, rounds=4)
    run(tmp_path / "run", **how, rounds=9, resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


# ---- seconds -------------------------------------------------------------------------------------


def test_a_lap_begins_where_the_device_had_finished_the_round_before():
    clock = Clock(torch.device("cpu"))
    begin = clock._start
    clock.lap_at("evaluate", begin + 2)
    assert clock.laps["evaluate"] == 2
    clock = Clock(torch.device("cpu"))
    time.sleep(0.03)
    clock.lap("train", since=time.perf_counter())
    assert clock.laps["train"] < 0.03
    clock.lap("combine", since=begin)
    assert 0 <= clock.laps["combine"] < 0.03


def test_training_begins_when_the_device_has_evaluated_the_round_before(tmp_path, monkeypatch):
    def busy(moment, idle):
        time.sleep(0.5)
        return time.perf_counter()

    deferring(monkeypatch)
    monkeypatch.setattr(Moment, "time_since", busy)
    run(tmp_path / "run", method="fedper", rounds=3, checkpoint_every=100)
    first, second, third = rows_of(tmp_path / "run", "timings")
    assert first["evaluate"] >= 0.5 <= second["evaluate"]
    assert second["train"] < 0.5 > third["train"]
    assert third["evaluate"] < 0.5


def test_the_wait_for_evaluations_is_no_part_of_training(tmp_path, monkeypatch):
    finish = LaterRounds.finish

    def slowly(later):
        time.sleep(0.2)
        finish(later)

    deferring(monkeypatch)
    monkeypatch.setattr(LaterRounds, "finish", slowly)
    run(tmp_path / "run", rounds=8, checkpoint_every=3)
    timings = rows_of(tmp_path / "run", "timings")
    assert [row["round"] for row in timings if "wait" in row] == [3, 6, 8]
    assert all(row.get("wait", 0.2) >= 0.2 > row["train"] for row in timings)


@needs_gpu
def test_a_moment_on_a_gpu_is_when_it_comes_there():
    gpu = torch.device("cuda")
    x = torch.randn(4096, 4096, device=gpu)
    torch.cuda.synchronize()
    idle = Moment(gpu)
    for _ in range(20):
        x = x @ x
    done, launched = Moment(gpu), time.perf_counter()
    torch.cuda.synchronize()
    finished = time.perf_counter()
    assert idle._called < launched < done.time_since(idle) <= finished + 1e-3


@needs_gpu
def test_a_gpu_prefers_what_is_launched_later_to_what_it_does_beside_it():
    gpu = torch.device("cuda")
    x = torch.randn(2048, 2048, device=gpu) / 50
    with preferred(gpu):
        # Kernels are loaded in the first turn, which may wait for all streams.
        for turn in range(3):
            torch.cuda.synchronize()
            y = x @ x
            with beside(gpu):
                began = Moment(gpu)
                # It reads what was launched before, so it has waited for it.
                copied = HostCopy((y @ y)[0, :8])
                for _ in range(200):
                    y @ y
                ended = Moment(gpu)
            z = y[0, :8] * 2
            little = Moment(gpu)
            torch.cuda.current_stream().synchronize()
            seconds = little.seconds_since(began), ended.seconds_since(began)
            assert turn == 0 or seconds[0] < seconds[1] / 4
            assert torch.equal(copied.read(), (y @ y)[0, :8].cpu())
    # What comes after the block waits for it.
    assert torch.equal(z / 2, y[0, :8])


@needs_gpu
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_gpu_writes_the_same_files_whenever_rounds_end(method, tmp_path, monkeypatch):
    how = {"method": method, "machine": Machine(device="cuda"), "checkpoint_every": 3}
    later = watched(monkeypatch)
    began = time.perf_counter()
    run(tmp_path / "later", **how)
    seconds = time.perf_counter() - began
    assert later == [1, 2, 4, 5]
    timings = rows_of(tmp_path / "later", "timings")
    laps = [value for row in timings for name, value in row.items() if name != "round"]
    assert min(laps) >= 0
    assert seconds_of(timings) <= seconds
    assert all(("evaluate_beside" in row) == (method == "fedavg") for row in timings[:2])
    monkeypatch.setattr(Trainer, "_may_finish_later", lambda trainer, number: False)
    run(tmp_path / "now", **how)
    assert files(tmp_path / "later") == files(tmp_path / "now")
