"""What every peer is given, what it must do and what it reports: the rules of the comparison."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MIB = 2**20


@dataclass(frozen=True)
class Pass:
    """One training from the initial weights: rounds of warm-up, then ``rounds`` that count.

    A pass that is timed needs one warm-up round at least: a round is timed from the end of the one
    before.
    """

    name: str
    warmup: int
    rounds: int
    shuffle: bool
    dropout: bool


@dataclass(frozen=True)
class Job:
    """A federation, a model and the local training every peer must carry out.

    The directory written by ``write`` holds ``job.json`` (these fields), ``initial.pt`` (the
    initial weights) and ``data.pt`` (``x`` of shape ``[clients, samples, *shape]`` and ``y`` of
    shape ``[clients, samples]``).

    Examples
    --------
    >>> job = Job("tiny", "mlp", {"hidden": [4]}, (3,), 2, clients=5, samples=7, cohort=2, batch=3,
    ...           epochs=1, lr=0.1, seed=0, threads=1, tolerance=1e-5,
    ...           timed=Pass("timed", 1, 2, True, True),
    ...           exact=Pass("exact", 0, 1, False, False))
    >>> job.cohort_of(2), job.steps_per_round
    ([4, 0], 6)
    """

    name: str
    model: str
    options: dict[str, Any]
    shape: tuple[int, ...]
    classes: int
    clients: int
    samples: int
    cohort: int
    batch: int
    epochs: int
    lr: float
    seed: int
    threads: int
    tolerance: float
    timed: Pass
    exact: Pass
    tf32: bool = False
    # Of Equipoise. They share the threads of one.
    processes: int = 1

    @property
    def steps_per_round(self) -> int:
        """Count the client-steps of a round: every client of the cohort, batch and epoch."""
        return self.cohort * self.epochs * math.ceil(self.samples / self.batch)

    def cohort_of(self, round_: int) -> list[int]:
        """Name the clients of a round, in their order; rounds count from 0, with warm-up."""
        return [(round_ * self.cohort + place) % self.clients for place in range(self.cohort)]

    def write(self, directory: Path, initial: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
        """Lay the job down where the peers' processes can read it."""
        (directory / "job.json").write_text(json.dumps(asdict(self), indent=2))
        torch.save(initial, directory / "initial.pt")
        torch.save({"x": x, "y": y}, directory / "data.pt")

    @classmethod
    def read(cls, directory: Path) -> Job:
        """Read back what ``write`` laid down, without the tensors."""
        fields = json.loads((directory / "job.json").read_text())
        fields |= {name: Pass(**fields[name]) for name in ("timed", "exact")}
        return cls(**{**fields, "shape": tuple(fields["shape"])})


@dataclass(frozen=True)
class Work:
    """A job on a device: the initial model and the data, as a peer's ``train`` receives them."""

    job: Job
    directory: Path
    device: torch.device

    def model(self, stage: Pass) -> nn.Module:
        """Build the model with the initial weights, with or without dropout, for training."""
        # Models of the benchmarks' own are registered by importing them.
        import benchmarks.text  # noqa: F401
        from equipoise.models import build

        model: nn.Module = build(
            self.job.model, shape=self.job.shape, classes=self.job.classes, **self.job.options
        )
        model.load_state_dict(torch.load(self.directory / "initial.pt", weights_only=True))
        if not stage.dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        return model.to(self.device).train()

    def data(self) -> tuple[Tensor, Tensor]:
        """Load ``x`` and ``y`` onto the device; a CPU maps them, and reads only what is used."""
        data = torch.load(self.directory / "data.pt", weights_only=True, mmap=True)
        return data["x"].to(self.device), data["y"].to(self.device)


Train = Callable[[Work, Pass, Callable[[], None]], dict[str, Tensor]]
"""How a peer trains: ``train(work, stage, round_done) -> parameters``.

Train ``stage.warmup + stage.rounds`` rounds from the initial weights, ``work.model(stage)``. Round
``r`` (from 0) asks the clients ``job.cohort_of(r)`` to train, and the global model becomes their
average, weighted by numbers of samples. Call ``round_done()`` once after every round, when the
device has computed its model. Return the final global parameters, on the CPU, by the names of
``work.model(stage).named_parameters()``. With ``stage.shuffle`` off, batches follow the stored
order of samples; with ``stage.dropout`` off, nothing is dropped. ``train`` is called twice in one
process, each time afresh.
"""


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Records when each round ended, and the memory at the last.

    It does not wait for the device, which may work for the next round already. The last round has
    no next one, so nothing is left out.
    """

    def __init__(self, stage: Pass, device: torch.device) -> None:
        self._stage, self._device = stage, device
        self._ends: list[float] = []
        self.peak: dict[str, float] = {}

    def round_done(self) -> None:
        """Mark the end of one round."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == self._stage.warmup + self._stage.rounds:
            # Asked inside the round loop: a peer's worker processes are gone once its training
            # returns.
            self.peak = peak_memory(self._device)

    @property
    def round_seconds(self) -> list[float]:
        """List the seconds of each round that counts, from the end of the one before to its own."""
        counted = self._ends[self._stage.warmup - 1 :]
        return [end - start for start, end in pairwise(counted)]


def peak_memory(device: torch.device) -> dict[str, float]:
    """Measure the peak memory so far in MiB: of this process and its children, and on the GPU."""
    peak = {"resident_mib": _peak_resident() / MIB}
    if device.type == "cuda":
        peak["cuda_allocated_mib"] = torch.cuda.max_memory_allocated() / MIB
        peak["cuda_reserved_mib"] = torch.cuda.max_memory_reserved() / MIB
    return peak


def _peak_resident() -> float:
    """Sum each process's own peak in bytes; shared pages count once for each process."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:
            continue  # the process ended while we were looking
        if "VmHWM" in fields:
            pid = int(fields["Pid"])
            parents[pid] = int(fields["PPid"])
            peaks[pid] = int(fields["VmHWM"].split()[0]) * 1024
    if not peaks:  # no /proc: macOS, which counts in bytes and not in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    return sum(peak for pid, peak in peaks.items() if _descends(pid, parents))


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid != os.getpid() and pid in parents:
        pid = parents[pid]
    return pid == os.getpid()


def float32_error(device: torch.device) -> dict[str, float]:
    """Measure how far a product and a convolution are from float64.

    That is about 1e-7, or 3e-4 if TF32 is on. Measured, not read from a setting: PyTorch has two
    sets of switches, and only the result is the truth.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    images, kernel = (
        a.view(4, 64, 16, 16),
        torch.randn(64, 64, 3, 3, generator=generator, dtype=torch.float64),
    )
    questions: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
        "matmul": (torch.matmul, a, b),
        "conv": (nn.functional.conv2d, images, kernel),
    }
    errors = {}
    for name, (operation, left, right) in questions.items():
        truth = operation(left, right)
        answer = operation(left.float().to(device), right.float().to(device)).double().cpu()
        errors[name] = float((answer - truth).norm() / truth.norm())
    return errors


def _allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def peer_arguments() -> argparse.Namespace:
    """Read what every peer's script is given on its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, help="directory that holds the job")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON file to write; parameters go beside it as .pt"
    )
    parser.add_argument("--no-exact", action="store_true", help="leave the exactness pass out")
    return parser.parse_args()


def run_peer(
    train: Train,
    *,
    package: str | None = None,
    processes: Callable[[Job], str] = lambda job: "one process",
) -> None:
    """Run a peer's script: read the job, time one pass, do the exactness pass, write the result.

    Parameters
    ----------
    train : callable
        The peer, as ``Train`` describes it.
    package : str, optional
        Distribution whose version is reported.
    processes : callable
        Describes how the peer spreads its threads for a job, for the report.
    """
    arguments = peer_arguments()
    job = Job.read(arguments.job)
    torch.set_num_threads(job.threads)
    _allow_tf32(job.tf32)
    torch.manual_seed(job.seed)
    work = Work(job, arguments.job.resolve(), torch.device(arguments.device))

    clock = Clock(job.timed, work.device)
    train(work, job.timed, clock.round_done)
    seconds = clock.round_seconds
    error = float32_error(work.device)
    _allow_tf32(False)
    if not arguments.no_exact:
        torch.save(train(work, job.exact, lambda: None), arguments.out.with_suffix(".pt"))
    result = {
        "client_steps_per_second": {
            "median": job.steps_per_round / statistics.median(seconds),
            "total": job.steps_per_round * len(seconds) / sum(seconds),
        },
        "seconds_per_round": statistics.median(seconds),
        "round_seconds": seconds,
        "peak": clock.peak,
        "float32_error": error,
        "threads": f"{job.threads} torch threads, {processes(job)}",
        "device": torch.cuda.get_device_name()
        if work.device.type == "cuda"
        else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **({package: metadata.version(package)} if package else {}),
        },
    }
    arguments.out.write_text(json.dumps(result, indent=2))
