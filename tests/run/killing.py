"""Runs in processes that are killed and restarted.

Use it as ``python -m tests.run.killing KIND FOLDER TRIALS``.

All processes are forked from this one, which has already imported everything, so that a trial takes
less than a second. It has a single thread, because a process with several cannot be forked.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from equipoise.config import experiment_from
from tests.run.small import PROMISED

COMPARED = (*PROMISED, "config.yaml", "names.json", "own_clouds.py")
OWN = """
import torch

from equipoise import data
from equipoise.data import Iid, Source


@data.register
def own_clouds(*, seed: int):
    y = torch.arange(120) % 3
    noise = torch.randn(120, 5, generator=torch.Generator().manual_seed(seed))
    return Source(x=noise + y.unsqueeze(1), y=y, name="own_clouds"), Iid(5)
"""


def experiment(folder: Path):
    """Return a run with every kind of file: code, best and local models, memories, server state."""
    file = folder / "own_clouds.py"
    file.write_text(OWN)
    return experiment_from(
        {
            "imports": str(file),
            "data": "own_clouds",
            "method": "scaffold",
            "model": {"name": "mlp", "hidden": [32]},
            "training": {"rounds": 5, "cohort": 3},
            "evaluation": {"select": "best", "local": True, "keep_local": True},
            "checkpoint_every": 2,
        }
    )


def forked(work: Callable[[], object]) -> int:
    """Start a process that does some work."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a process; the result is negative if a signal has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Steps:
    """Counts the steps that make files durable, and ends the process at one of them."""

    def __init__(self, last: int | None = None, *, done: bool = False) -> None:
        self.count, self.last, self.done = 0, last, done
        for name in ("fsync", "replace", "truncate"):
            setattr(os, name, self._step(getattr(os, name)))

    def _step(self, real):
        def step(*arguments):
            self.count += 1
            if self.count == self.last and not self.done:
                os.kill(os.getpid(), signal.SIGKILL)
            returned = real(*arguments)
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            return returned

        return step


def contents(directory: Path) -> dict[str, bytes]:
    return {
        name: (directory / name).read_bytes() for name in COMPARED if (directory / name).exists()
    }


def main(kind: str, folder: str, trials: int) -> dict[str, object]:
    """Kill runs, and print how many of them leave the same files as an undisturbed one."""
    torch.set_num_threads(1)
    home = Path(folder)
    run = experiment(home)

    def counted() -> None:
        steps = Steps()
        run.run(home / "alone")
        (home / "steps").write_text(str(steps.count))

    began = time.monotonic()
    if ended(forked(counted)):
        raise RuntimeError("the run that was left alone failed")
    seconds = time.monotonic() - began
    wanted, steps = contents(home / "alone"), int((home / "steps").read_text())
    chance = random.Random(0)
    points = [(step, done) for step in range(1, steps + 1) for done in (False, True)]
    if kind == "steps":
        points = points if trials >= len(points) else sorted(chance.sample(points, trials))
    else:
        points = [(0, False)] * trials
    killed, different = 0, []
    for step, done in points:
        directory = home / "killed"
        shutil.rmtree(directory, ignore_errors=True)
        moment = chance.uniform(0, seconds)

        def broken(step: int = step, done: bool = done, directory: Path = directory) -> None:
            if step:
                Steps(step, done=done)
            run.run(directory, resume=True)

        child = forked(broken)
        if not step:
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        in_time = ended(child) == -signal.SIGKILL
        killed += in_time
        # Follow the speed of the machine: about three of four runs are killed before they end. The
        # first run may have taken many times as long, beside other work.
        seconds *= 1.06 if in_time else 0.85
        code = ended(forked(lambda directory=directory: run.run(directory, resume=True)))
        if code or contents(directory) != wanted:
            different.append([step, done, moment, code])
    return {
        "trials": len(points),
        "killed": killed,
        "different": different,
        "steps": steps,
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
