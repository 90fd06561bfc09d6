"""A process that is killed and restarted writes the same bytes as an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.run.small import promised, rows_of
from tests.trials import trials

pytestmark = pytest.mark.slow

KILLS = 20
# A process that will be killed waits after a number of rounds, whatever the speed of the machine,
# so that the run cannot end before the last kill.
MOST_BETWEEN_KILLS = 7
ROUNDS = KILLS * MOST_BETWEEN_KILLS + 5
# A wide model: writing its checkpoint of several megabytes takes a large part of a round, so some
# kills happen there.
PROGRAM = f"""
import sys, time
import torch
from equipoise import Evaluation, train
from equipoise.data import load

torch.set_num_threads(1)
rounds = []

def told(progress):
    rounds.append(progress.round)
    print(progress.round, flush=True)
    if len(rounds) == int(sys.argv[2]) < {ROUNDS}:
        time.sleep(600)

train(
    load("digits"),
    method="scaffold",
    model={{"name": "mlp", "hidden": [512]}},
    rounds={ROUNDS},
    cohort=11,
    evaluation=Evaluation(select="best", local=True, keep_local=True),
    seed=1,
    out=sys.argv[1],
    checkpoint_every=1,
    resume=True,
    on_round=told,
)
"""


def start(directory, *, to_the_end=False):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    most = ROUNDS if to_the_end else MOST_BETWEEN_KILLS
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), str(most)],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=root,
        text=True,
    )


def some_rounds(process, directory, rounds):
    """Wait until a process has finished a number of rounds (or ended)."""
    for _ in range(rounds):
        process.stdout.readline()


def checkpoint_half_written(process, directory, rounds):
    """Wait until a process writes a checkpoint (or has no more to write)."""
    process.stdout.readline()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (directory / "checkpoint.safetensors.tmp").exists():
        pass


def nothing(process, directory, rounds):
    """Do not wait: the kill comes while a process starts, reads its files or repeats a round."""


def finish(process):
    process.communicate(timeout=120)
    return process.returncode


def test_twenty_kills_at_random_moments_change_no_byte(tmp_path):
    began = time.monotonic()
    alone = start(tmp_path / "alone", to_the_end=True)
    some_rounds(alone, tmp_path / "alone", 1)
    started = time.monotonic()
    assert finish(alone) == 0
    ended = time.monotonic()

    rng = np.random.default_rng(0)
    moments = {
        nothing: started - began,
        some_rounds: (ended - started) / ROUNDS,
        checkpoint_half_written: 0.0,
    }
    waits = rng.permutation(
        [nothing] * 5 + [some_rounds] * (KILLS - 10) + [checkpoint_half_written] * 5
    )
    directory = tmp_path / "killed"
    killed, half_written, lengths = 0, 0, []
    for wait in waits:
        process = start(directory)
        wait(process, directory, int(rng.integers(1, 4)))
        time.sleep(float(rng.uniform(0, moments[wait])))
        process.send_signal(signal.SIGKILL)
        killed += finish(process) == -signal.SIGKILL
        half_written += (directory / "checkpoint.safetensors.tmp").exists()
        lengths.append(
            (directory / "rounds.jsonl").stat().st_size
            if (directory / "rounds.jsonl").exists()
            else 0
        )
    assert finish(start(directory, to_the_end=True)) == 0

    assert killed == KILLS, "the run ended before it was killed often enough"
    assert half_written, "no kill came while a checkpoint was being written"
    assert len(set(lengths)) >= KILLS // 2, "the kills came at the same moments"
    assert promised(directory) == promised(tmp_path / "alone")
    assert [row["round"] for row in rows_of(directory, "rounds")] == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize(("kind", "full"), [("steps", 120), ("random", 200)])
def test_kills_of_many_runs_change_no_byte(kind, full, tmp_path):
    """Kill before and after every fsync, rename and truncation, and at random moments."""
    command = [sys.executable, "-m", "tests.run.killing", kind, str(tmp_path), str(trials(full))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["different"] == [], done.stderr
    assert found["steps"] >= 40
    # A run may end before its kill.
    assert (
        found["trials"] == found["killed"]
        if kind == "steps"
        else found["killed"] >= found["trials"] * 0.6
    )
    assert found["trials"] >= min(trials(full), 2 * found["steps"])
