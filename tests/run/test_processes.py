"""Runs in several real processes: the same numbers, the same bytes, and one error if a process
ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from equipoise import Evaluation, Machine, Training
from equipoise.engine.link import ProcessLost
from equipoise.errors import InputError, RunError
from equipoise.methods import build
from equipoise.run.processes import (
    Work,
    _work_there,
    follow,
    joined,
    processes_of,
    rank_of_torchrun,
    threads_of_each,
)
from tests.engine.gpu import needs_gpu, pretend_gpus
from tests.run.small import PROMISED, federation, promised, rows_of, small_run

ROOT = Path(__file__).parents[2]
TWO = Machine(device="cpu", precision="float64", processes=2)
ONE = Machine(device="cpu", precision="float64")
# The method and the directory, then how many processes, then how many rounds.
PROGRAM = """
import sys

from equipoise import Machine
from tests.run.small import small_run

if __name__ == "__main__":
    method, directory, processes, rounds = sys.argv[1:]
    machine = Machine(device="cpu", precision="float64", processes=int(processes))
    told = lambda progress: print(progress.round, flush=True)
    small_run(directory, method, machine=machine, rounds=int(rounds), resume=True, on_round=told)
"""


def program(tmp_path, *arguments, command=(sys.executable,)):
    """Start a program that trains."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, str(file), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=tmp_path,
        text=True,
    )


def ended(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def children_of(process):
    """List the processes that a process has started and that work for it."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields["PPid"]) == process.pid and b"spawn_main" in command:
            found.append(int(fields["Pid"]))
    return found


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/status").read_text().split("State:")[1].split()[0]
    except OSError:
        return False


def losses(directory):
    return torch.tensor([row["loss"] for row in rows_of(directory)])


@pytest.mark.parametrize(
    ("value", "said"), [(0, "at least 1, got 0"), (1.5, "got 1.5"), (True, "got True")]
)
def test_a_number_of_processes_is_a_whole_number(value, said):
    with pytest.raises(InputError, match=f"machine.processes must be a whole number.*{said}"):
        Machine(device="cpu", processes=value)


def test_other_engines_refuse_processes():
    with pytest.raises(InputError, match="machine.processes is 2, but on Flower"):
        small_run(machine=TWO, engine=lambda *given: None)


def test_what_cannot_reach_another_process_is_refused():
    local = small_run(rounds=1).trainer.engine.network.blank()
    local.hook = lambda: None
    with pytest.raises(InputError, match="machine.processes: data, model and method must be pick"):
        small_run(machine=TWO, model=local)


@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [("2", "2", "'2' and '2'"), ("one", "2", "'one' and '2'"), ("0", "-3", "'0' and '-3'")],
)
def test_environment_variables_that_torchrun_would_not_set_are_refused(
    monkeypatch, rank, size, said
):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    assert rank_of_torchrun() == 0
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(InputError, match=f"RANK and WORLD_SIZE are {said}"):
        processes_of(ONE)


def test_torchrun_says_how_many_processes_there_are(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert (processes_of(ONE), rank_of_torchrun()) == (3, 1)
    assert threads_of_each(3) == torch.get_num_threads()
    with pytest.raises(InputError, match="is 2, but torchrun has started 3 processes"):
        processes_of(TWO)


def test_a_lost_process_is_a_failed_run():
    assert isinstance(ProcessLost(1, "killed"), RunError)
    assert str(ProcessLost(1, "killed")) == "process 1 of the run has ended (killed)"


# ---- several GPUs, which are pretended -----------------------------------------------------------


def work_on(device):
    """The work of a run that is not carried out."""
    settings = Training(), Machine(device=device), Evaluation(), 0
    return Work(federation(), build("fedavg"), nn.Linear(5, 3), *settings)


@pytest.mark.parametrize(
    ("device", "gpus"),
    [("cuda", [0, 1, 2, 0, 1, 2, 0]), ("auto", [0, 1, 2, 0, 1, 2, 0]), ("cpu", [])],
)
def test_processes_use_the_gpus_of_the_machine_in_turn(device, gpus, monkeypatch):
    chosen = pretend_gpus(monkeypatch, 3)
    for number in range(7):
        work_on(device).use_gpu(number)
    assert chosen == gpus


def test_processes_started_here_choose_their_gpu_before_they_build_anything(tmp_path, monkeypatch):
    chosen, told = pretend_gpus(monkeypatch, 2), []

    def build_nothing(work):
        raise InputError(f"GPU {chosen[-1]}")

    monkeypatch.setattr(Work, "share", build_nothing)
    monkeypatch.setattr("equipoise.run.processes.end_with_parent", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    torch.save(work_on("cuda"), tmp_path / "work")
    for rank in (1, 2, 3):
        _work_there(tmp_path, rank, 4, 1, SimpleNamespace(send=told.append))
    assert told == ["InputError: GPU 1", "InputError: GPU 0", "InputError: GPU 1"]


@pytest.mark.parametrize(("local", "rank", "gpu"), [("3", 4, 1), ("2", 5, 0), (None, 5, 1)])
@pytest.mark.parametrize("first", [True, False])
def test_processes_of_torchrun_use_the_gpu_of_their_number_on_the_machine(
    first, local, rank, gpu, monkeypatch
):
    chosen = pretend_gpus(monkeypatch, 2)
    link = SimpleNamespace(rank=rank, broadcast=lambda told: None)
    monkeypatch.setattr("equipoise.run.processes._group_of_torchrun", lambda: None)
    monkeypatch.setattr("equipoise.run.processes.Link", lambda group: link)
    monkeypatch.setattr("equipoise.run.processes.serve", lambda link, share: (share(), None))
    monkeypatch.setattr("equipoise.run.processes.Share", lambda engine, method: chosen.copy())
    monkeypatch.setattr(Work, "trainer", lambda work: SimpleNamespace(engine=None))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    if first:
        with joined(work_on("cuda")):
            assert chosen == [gpu]
    else:
        # The other processes build their share when the GPU has been chosen.
        assert follow(work_on("cuda"))[0] == [gpu]


# ---- real processes ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto", "fftgp"])
def test_two_processes_give_the_numbers_of_one_and_the_same_bytes_twice(method, tmp_path):
    wanted = small_run(tmp_path / "one", method, machine=ONE, rounds=3)
    found = small_run(tmp_path / "two", method, machine=TWO, rounds=3)
    again = small_run(tmp_path / "again", method, machine=TWO, rounds=3)
    assert promised(tmp_path / "two") == promised(tmp_path / "again")
    assert again.summary == found.summary
    assert torch.allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-9, rtol=0)
    for client in (None, *(wanted.trainer.selected().clients[:2])):
        pairs = zip(
            found.model(client).parameters(), wanted.model(client).parameters(), strict=True
        )
        assert all(torch.allclose(a, b, atol=1e-9, rtol=0) for a, b in pairs)
    assert set(PROMISED) & {path.name for path in (tmp_path / "two").iterdir()} == set(PROMISED) & {
        path.name for path in (tmp_path / "one").iterdir()
    }


@pytest.mark.slow
def test_a_killed_run_ends_all_its_processes_and_is_resumed_to_the_same_bytes(tmp_path):
    ended(program(tmp_path, "scaffold", "alone", 2, 9))
    process = program(tmp_path, "scaffold", "killed", 2, 9)
    assert [process.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "3\n"]
    workers = children_of(process)
    assert len(workers) == 1
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
    assert not (tmp_path / "killed" / "summary.json").exists()
    ended(program(tmp_path, "scaffold", "killed", 2, 9))
    assert promised(tmp_path / "killed") == promised(tmp_path / "alone")


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_with_one_error(tmp_path):
    process = program(tmp_path, "fedavg", "run", 2, 100000)
    process.stdout.readline()
    (worker,) = children_of(process)
    os.kill(worker, signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    said = "process 1 of 2 was killed by signal 9"
    assert error.rstrip().endswith(f"RunError: {said}")


@pytest.mark.slow
def test_a_script_that_trains_when_it_is_imported_gets_a_hint(tmp_path):
    file = tmp_path / "unguarded.py"
    file.write_text(PROGRAM.split("if __name__")[0] + "small_run(machine=Machine(processes=2))\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 1
    assert 'must call train() below `if __name__ == "__main__":`' in process.stderr


def torchrun(*arguments, processes=2):
    return (
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        *arguments,
    )


@pytest.mark.slow
def test_torchrun_starts_the_processes(tmp_path):
    ended(program(tmp_path, "ditto", "here", 2, 3))
    out = ended(program(tmp_path, "ditto", "torchrun", 1, 3, command=torchrun()))
    assert out == "1\n2\n3\n"
    assert promised(tmp_path / "torchrun") == promised(tmp_path / "here")


@pytest.mark.slow
def test_the_command_line_speaks_once_under_torchrun(tmp_path):
    def command(*arguments):
        equipoise = ("-m", "equipoise", "run", "--rounds", "1", "--out", "run", *arguments)
        return subprocess.run(
            torchrun(*equipoise),
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    first = command("--json", "--no-report")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["config"]["resolved"]["processes"] == 2
    again = command()
    assert again.returncode != 0
    assert again.stderr.count("error: run already holds a run") == 1


@needs_gpu
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedcrc"])
def test_two_processes_on_a_gpu_give_the_numbers_of_one(method, tmp_path):
    runs = {}
    for processes in (1, 2):
        machine = Machine(device="cuda", precision="float64", processes=processes)
        runs[processes] = small_run(tmp_path / str(processes), method, machine=machine, rounds=3)
    assert torch.allclose(losses(tmp_path / "2"), losses(tmp_path / "1"), atol=1e-9, rtol=0)
    engine = runs[2].trainer.engine
    memories = [tensor for tensor in engine.export().values() if tensor.is_floating_point()]
    assert all(tensor.is_cuda for tensor in (*runs[2].trainer.state.model.values(), *memories))
