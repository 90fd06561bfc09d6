"""What ``evaluation.every: 1`` costs, in per cent of training.

    python -m benchmarks.evaluation_cost --device cuda
    python -m benchmarks.evaluation_cost --job small --rounds 20 --profile

Two runs of a job take turns in one process, twenty rounds each: one evaluates all clients after
every round, the other never. Both write their journals to disk. A turn ends when the values of all
its rounds are written, so that what a GPU evaluates beside the training of later rounds counts in
full. The job has no test data of its own, so clients hold ``--test`` images each (ten by default:
the 10,000 test images of CIFAR-10 among the 1,000 clients of job ``pfl``), and ``--val`` for
validation. With ``--profile`` the operations of one round of each run are counted, those that make
the host wait for the device among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import jobs
from benchmarks.million import Pause
from benchmarks.protocol import Job
from equipoise.engine.settings import Machine, Training
from equipoise.errors import InputError
from equipoise.federation import Federation, Split
from equipoise.method import Method
from equipoise.methods import build as build_method
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Progress, Trainer

# Rounds of each run before those that are timed, and rounds in a row of each.
WARM_UP, TURN = 4, 20
POOL = 1000
# Names of operations and of CUDA calls that tell how often the host starts something, copies
# something, or waits.
_COUNTED = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "replays": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpyAsync",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "scalars read": ("aten::_local_scalar_dense",),
}


def federation(job: Job, val: int, test: int) -> Federation:
    """Make the job's clients, with more samples for validation and test.

    All are copies of a few: speed does not depend on what they show.
    """
    held = job.samples + val + test
    rng = np.random.default_rng(job.seed)
    few = torch.from_numpy(rng.standard_normal((POOL, *job.shape), dtype=np.float32))
    total = job.clients * held
    rows = np.arange(total).reshape(job.clients, held)
    parts = np.split(rows, [job.samples, job.samples + val], axis=1)
    train, validation, tested = (Split.from_lists(list(part)) for part in parts)
    return Federation(
        x=few[torch.from_numpy(rng.integers(POOL, size=total))],
        y=torch.from_numpy(rng.integers(job.classes, size=total)),
        train=train,
        val=validation,
        test=tested,
        groups=np.zeros(job.clients, np.int64),
        group_names=("all",),
        unseen=np.zeros(job.clients, bool),
        classes=job.classes,
    )


def trainer(
    job: Job, data: Federation, every: int, machine: Machine, directory: Path, method: Method
) -> Trainer:
    """Make one of the two runs."""
    directory.mkdir()
    model = build_model(
        job.model, shape=job.shape, classes=job.classes, seed=job.seed, **job.options
    )
    return Trainer(
        data,
        method,
        method.extend(model, job.shape, job.seed),
        Training(
            rounds=10**6,
            cohort=job.cohort,
            epochs=job.epochs,
            batch_size=job.batch,
            optimizer=Sgd(lr=job.lr),
        ),
        machine,
        Evaluation(every=every),
        seed=job.seed,
        directory=directory,
        # Both runs would write the same checkpoints.
        checkpoint_every=10**6,
    )


def measure(
    job: Job,
    machine: Machine,
    *,
    val: int,
    test: int,
    rounds: int,
    seconds: float,
    method: str = "fedavg",
    profiled: bool = False,
) -> dict[str, Any]:
    """Time both runs in turns.

    Parameters
    ----------
    job : Job
        What to train.
    machine : Machine
        Where, and in which arithmetic.
    val, test : int
        Samples a client.
    rounds : int
        Timed rounds of each run, after warm-up; rounded up to whole turns.
    seconds : float
        After how long no further turn begins.
    method : str
        What to train with; one with personal models evaluates those, too.
    profiled : bool
        Whether to count operations of one more round.

    Returns
    -------
    dict
        ``seconds`` of a round are the median over turns of the mean over a turn's rounds.
        ``percent`` is what evaluation adds to them. ``share`` is the same for its own lap of the
        clock alone, which leaves out what training reports for it; a GPU's lap may overlap with
        training.
    """
    data = federation(job, val, test)
    with tempfile.TemporaryDirectory() as temporary:
        runs = {
            name: trainer(job, data, every, machine, Path(temporary) / name, build_method(method))
            for name, every in (("without", 0), ("with", 1))
        }
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            seconds_of_rounds(run, WARM_UP, machine)
        begin = time.perf_counter()
        while TURN * len(taken["with"]) < rounds:
            for name, run in runs.items():
                taken[name].append(seconds_of_turn(run, min(TURN, rounds), machine))
            if time.perf_counter() - begin > seconds:
                break
        timed = list(runs["with"].timings)[WARM_UP:]
        laps = {
            name: statistics.median(row.get(f"{name}_beside", row.get(name)) for row in timed)
            for name in ("train", "combine", "evaluate")
        }
        counts = {name: _profile(run, machine) for name, run in runs.items()} if profiled else {}
    medians = {name: statistics.median(each) for name, each in taken.items()}
    return {
        "job": job.name,
        "method": method,
        "clients": job.clients,
        "val": val,
        "test": test,
        "precision": machine.precision,
        "tf32": machine.tf32,
        "rounds": min(TURN, rounds) * len(taken["with"]),
        "seconds": medians,
        "laps": laps,
        "percent": 100 * (medians["with"] / medians["without"] - 1),
        "share": 100 * laps["evaluate"] / medians["without"],
        **({"counts": counts} if counts else {}),
        "device": _device(machine),
        "torch": torch.__version__,
    }


def _on_gpu(machine: Machine) -> bool:
    return machine.torch_device.type == "cuda"


def _device(machine: Machine) -> str:
    return torch.cuda.get_device_name() if _on_gpu(machine) else "cpu"


def seconds_of_turn(run: Trainer, count: int, machine: Machine) -> float:
    """Carry out the next rounds to the end, and return their mean seconds."""
    begin = time.perf_counter()
    seconds_of_rounds(run, count, machine)
    if _on_gpu(machine):
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def seconds_of_rounds(run: Trainer, count: int, machine: Machine) -> list[float]:
    """Carry out the next rounds, and return the seconds of each.

    A GPU may evaluate a round beside later ones, so evaluations are not evenly divided among
    rounds. After the last of the rounds it has also trained the next one, if it runs ahead, but not
    the first one, which the call before has begun.
    """
    ticks = [time.perf_counter()]

    def tick(progress: Progress) -> None:
        last = len(ticks) == count
        if last and _on_gpu(machine):
            torch.cuda.synchronize()
        ticks.append(time.perf_counter())
        if last:
            raise Pause

    with suppress(Pause):
        run.run(tick)
    return [after - before for before, after in pairwise(ticks)]


def _profile(run: Trainer, machine: Machine) -> dict[str, int]:
    """Count what the host does in one round."""
    activities = [ProfilerActivity.CPU]
    if _on_gpu(machine):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        seconds_of_rounds(run, 1, machine)
    calls: Counter[str] = Counter()
    for event in recorded.key_averages():
        calls[event.key] += event.count
    counts = {what: sum(calls[name] for name in names) for what, names in _COUNTED.items()}
    operations = sum(number for name, number in calls.items() if name.startswith("aten::"))
    return {"operations": operations, **counts}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the numbers; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--job", choices=jobs.NAMES, default="pfl")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--val", type=int, default=0, help="validation samples a client")
    parser.add_argument("--test", type=int, default=10, help="test samples a client")
    parser.add_argument("--clients", type=int, help="clients, in place of the job's own number")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of each run")
    parser.add_argument("--seconds", type=float, default=60, help="when to stop at the latest")
    parser.add_argument("--profile", action="store_true", help="count operations of one round")
    parser.add_argument("--json", type=Path, help="where to append the numbers, as a line")
    given = parser.parse_args(argv)
    try:
        machine = Machine(device=given.device, precision=given.precision, tf32=given.tf32)
        if given.rounds < 1 or given.val < 0 or given.test < 0:
            raise InputError("--rounds must be at least 1, --val and --test at least 0")
        job = jobs.make(given.job, device=given.device, threads=1)
        if given.clients:
            cohort = min(job.cohort, given.clients)
            job = dataclasses.replace(job, clients=given.clients, cohort=cohort)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    measured = measure(
        job,
        machine,
        val=given.val,
        test=given.test,
        rounds=given.rounds,
        seconds=given.seconds,
        method=given.method,
        profiled=given.profile,
    )
    print(json.dumps(measured, indent=2))
    print(f"evaluation after every round costs {measured['percent']:.1f} % of training")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        with given.json.open("a") as file:
            file.write(json.dumps(measured) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
