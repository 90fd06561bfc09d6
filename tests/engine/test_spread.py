"""Clients divided among processes give the same numbers as in one process."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from equipoise import Evaluation, Machine
from equipoise.engine.cohort import StackedCohort
from equipoise.engine.spread import balanced
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.methods import names
from equipoise.run.directory import read_config
from tests.engine.comparison import distance
from tests.engine.every_method import VARIANTS, fits, skipped, trained_by
from tests.engine.ranks import threads_for
from tests.run.small import small_run

# No memory, a memory, personal models, facts and questions, questions that are answered by all.
FEW = ("fedavg", "scaffold", "ditto", "fedcrc", "fftgp", "afl")
MACHINE = Machine(device="cpu", precision="float64")
SEVERAL = Machine(device="cpu", precision="float64", processes=2)


@pytest.fixture
def in_threads(monkeypatch, tmp_path):
    """Let runs with several processes have threads instead, and give the shares of the others."""
    shares = []

    def started(work, processes):
        folder = tmp_path / f"link{len(shares)}"
        folder.mkdir()
        return threads_for(work, processes, folder, shares)

    monkeypatch.setattr("equipoise.run.api.started", started)
    return shares


def rows(run):
    return {
        (row["round"], row["client"], row["model"], row["split"]): row
        for row in run.trainer.metrics
    }


def largest_difference(found, wanted):
    """Return how far the metrics of two runs are apart, which must be of the same things."""
    found, wanted = rows(found), rows(wanted)
    assert found.keys() == wanted.keys()
    apart = [0.0]
    for key, row in wanted.items():
        assert found[key].keys() == row.keys()
        apart += [abs(found[key][name] - row[name]) for name in ("loss", "accuracy")]
    return max(apart)


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("method", FEW)
def test_any_number_of_processes_gives_the_same_numbers(method, processes, tmp_path):
    compared_with_one(method, processes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in (*names(), *VARIANTS) if m not in FEW])
def test_every_method_gives_the_same_numbers_in_two_processes(method, tmp_path):
    compared_with_one(method, 2, tmp_path)


def compared_with_one(method, processes, folder):
    what = next(
        setting for setting in ("images", "text", "fedgc", "prompts") if fits(method, setting)
    )
    wanted = trained_by(method, what, chunk=10, rounds=2)
    team = partial(threads_for, processes=processes, folder=folder)
    found = trained_by(method, what, chunk=10, rounds=2, team=team)
    assert distance(found, wanted, skipped(wanted, what)) <= 1e-9


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper", "fedbabu", "client2vec"])
def test_metrics_and_models_are_those_of_one_process(method, in_threads, tmp_path):
    evaluation = Evaluation(
        every=2,
        local=True,
        keep_local=True,
        metrics=["ece"],
        select="best",
        average_kept=method == "fedper",
    )
    how = {"method": method, "evaluation": evaluation, "rounds": 3}
    wanted = small_run(machine=MACHINE, **how)
    found = small_run(machine=SEVERAL, **how)
    assert len(in_threads) == 1
    assert largest_difference(found, wanted) <= 1e-9
    for name in ("bytes_up", "bytes_down"):
        assert found.summary[name] == wanted.summary[name]
    pairs = [(found.model(), wanted.model())]
    clients = wanted.trainer.local_models().clients
    assert found.trainer.local_models().clients == clients
    pairs += [(found.local_model(client), wanted.local_model(client)) for client in clients]
    if wanted.trainer.evaluator.has_personal:
        pairs += [(found.model(client), wanted.model(client)) for client in clients]
    for one, other in pairs:
        there, here = one.state_dict(), other.state_dict()
        assert all(torch.allclose(there[name], here[name], atol=1e-9) for name in here)


def test_what_slows_other_processes_is_in_the_summary(in_threads, monkeypatch):
    def slowed_by(engine):
        # Process 1 is the one that the fixture has seen.
        other = any(engine is share.engine for share in in_threads)
        return ["no room for graphs"] if other else ["no kernels"]

    monkeypatch.setattr(StackedEngine, "slowed_by", property(slowed_by))
    run = small_run(machine=SEVERAL, rounds=1)
    assert run.summary["slowed_by"] == ["no kernels", "process 1: no room for graphs"]


def test_memories_live_where_their_clients_do(in_threads):
    run = small_run(method="scaffold", machine=SEVERAL, rounds=2)
    there = in_threads[0].engine.remembering
    # At the end process 0 has all of them.
    everyone = run.trainer.engine.here.remembering
    assert set(there) < set(everyone)
    sizes = run.trainer.federation.train.sizes
    owners = balanced(sizes, 2)
    assert there == [client for client in everyone if owners[client] == 1]
    assert abs(sizes[owners == 0].sum() - sizes[owners == 1].sum()) <= sizes.max()


def test_a_cohort_may_be_smaller_than_the_number_of_processes(in_threads):
    machine = Machine(device="cpu", precision="float64", processes=3)
    how = {"cohort": 1, "rounds": 2, "method": "scaffold"}
    found, wanted = small_run(machine=machine, **how), small_run(machine=MACHINE, **how)
    assert largest_difference(found, wanted) <= 1e-9


def test_the_chunk_size_of_process_0_holds_for_all(in_threads):
    machine = Machine(device="cpu", processes=2, chunk="measure")
    run = small_run(machine=machine, rounds=1)
    assert in_threads[0].engine.chunk == run.config["resolved"]["chunk"]


@pytest.mark.parametrize("error", [InputError("lr is odd"), RuntimeError("no memory")])
def test_an_error_of_another_process_ends_the_run(error, in_threads, monkeypatch):
    real = StackedCohort.carry_out

    def fails(self, *given):
        if in_threads and self.engine is in_threads[0].engine:
            raise error
        return real(self, *given)

    monkeypatch.setattr(StackedCohort, "carry_out", fails)
    said = {
        InputError: (InputError, "^lr is odd$"),
        RuntimeError: (RunError, "^process 1: RuntimeError: no memory$"),
    }
    kind, message = said[type(error)]
    with pytest.raises(kind, match=message):
        small_run(machine=SEVERAL)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_run_is_resumed_with_another_number_of_processes(before, after, in_threads, tmp_path):
    def machine(processes):
        return Machine(device="cpu", precision="float64", processes=processes)

    wanted = small_run(method="ditto", machine=MACHINE, rounds=3)
    out = tmp_path / "run"
    small_run(out, "ditto", machine=machine(before), rounds=2)
    began = read_config(out)
    found = small_run(out, "ditto", machine=machine(after), rounds=3, resume=True)
    assert largest_difference(found, wanted) <= 1e-9
    # The configuration says how the run began.
    began["training"]["rounds"] = 3
    assert read_config(out) == began == found.config


def test_work_is_balanced():
    work = np.array([7, 1, 1, 1, 9, 2, 2, 3])
    parts = balanced(work, 3)
    loads = [work[parts == part].sum() for part in range(3)]
    assert sum(loads) == work.sum()
    assert max(loads) == 9
    assert balanced(np.ones(5), 2).tolist() == [0, 1, 0, 1, 0]
    assert balanced(np.empty(0), 2).tolist() == []
