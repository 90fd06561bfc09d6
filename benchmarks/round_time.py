"""Where a round's time goes: ``python -m benchmarks.round_time --job pfl --out runs/round.png``.

A few rounds of a job are measured twice, after rounds that do not count: as a user gets them, which
gives the time of a round, and divided into parts. On a CPU a part's time is that of a clock. On a
GPU steps are carried out from Python, the device is awaited before and after each part, and
``torch.profiler`` says how long its kernels ran; the rest of a round is then what is neither: gaps
between kernels, and Python. Parts:

fetch
    Copying the samples of a batch.
forward, backward
    The two passes of local steps, the loss in the first.
optimizer
    Changing the parameters.
aggregation
    Combining the updates to the next model.
evaluation
    The global model on every client's test samples, a fifth as many as for training, after every
    round.
rest
    Everything else: choosing clients, drawing batches, copying parameters, records.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import jobs
from benchmarks.protocol import Job
from benchmarks.whole_run import InTurn, Laps
from equipoise import Evaluation, Federation, Machine, Training
from equipoise.engine.data import DeviceData
from equipoise.engine.gradients import PhaseGradient
from equipoise.errors import InputError
from equipoise.federation import Split
from equipoise.figures.drawing import HUES, INK, new_figure, quiet, save
from equipoise.methods import build as build_method
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.run.round_steps import RoundSteps
from equipoise.run.round_training import RoundTraining
from equipoise.run.trainer import Trainer

PARTS = ("fetch", "forward", "backward", "optimizer", "aggregation", "evaluation")
_MARK = "part: "


class Parts:
    """Measures how long parts of a round take, each without the parts inside it.

    Aggregation and evaluation are not divided further.
    """

    _WHOLE: ClassVar = frozenset({"aggregation", "evaluation"})

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.counting = False
        self._device, self._open, self._since = device, list[str](), 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside as one part."""
        if self._open and self._open[-1] in self._WHOLE:
            yield
            return
        self._turn()
        self._open.append(name)
        with record_function(_MARK + name):
            yield
            self._turn()
        self._open.pop()

    def _turn(self) -> None:
        """Add the time since the last turn to the part that is open."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._open and self.counting:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function a part."""

        @functools.wraps(function)
        def measured(*given: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*given, **options)

        return measured

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the engine's own functions measured while the block runs."""
        make_value = PhaseGradient._value

        def value_of(gradient: PhaseGradient, *given: Any) -> Any:
            return self.named("forward", make_value(gradient, *given))

        make_evaluation = Trainer._evaluation

        def evaluation_of(trainer: Trainer, *given: Any, **named: Any) -> Any:
            # What launches it returns what waits for the values and records them.
            launch = self.named("evaluation", make_evaluation(trainer, *given, **named))
            return lambda: self.named("evaluation", launch())

        changes: list[tuple[Any, str, Any]] = [
            (DeviceData, "fetch", self.named("fetch", DeviceData.fetch)),
            (PhaseGradient, "_value", value_of),
            (torch.autograd, "grad", self.named("backward", torch.autograd.grad)),
            (Sgd, "step", self.named("optimizer", Sgd.step)),
            (RoundSteps, "aggregate", self.named("aggregation", RoundSteps.aggregate)),
            (Trainer, "_evaluation", evaluation_of),
            # A round would be counted before the one that is being measured has ended.
            (RoundTraining, "_may_go_ahead", lambda training, number: False),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        for owner, name, function in changes:
            setattr(owner, name, function)
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)


def trainer_of(job: Job, machine: Machine, rounds: int) -> Trainer:
    """Prepare a job; clients are tested on a fifth as many samples as they train on."""
    x, y = jobs.draw(dataclasses.replace(job, samples=job.samples + job.samples // 5))
    rows = np.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2])
    federation = Federation(
        x=x.flatten(0, 1),
        y=y.flatten(),
        train=Split.from_lists(list(rows[:, : job.samples])),
        val=Split.from_lists([[]] * job.clients),
        test=Split.from_lists(list(rows[:, job.samples :])),
        groups=np.zeros(job.clients, np.int64),
        group_names=("all",),
        unseen=np.zeros(job.clients, bool),
        classes=job.classes,
    )
    return Trainer(
        federation,
        build_method("fedavg", sampling=InTurn()),
        build_model(job.model, shape=job.shape, classes=job.classes, **job.options),
        Training(
            rounds=rounds,
            cohort=job.cohort,
            epochs=job.epochs,
            batch_size=job.batch,
            optimizer=Sgd(lr=job.lr),
        ),
        machine,
        Evaluation(every=1),
        seed=0,
    )


def measure(job: Job, *, device: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of a round, and of its parts.

    Parameters
    ----------
    job : Job
        What is trained; its warm-up rounds come first.
    device : str
        ``"cpu"`` or ``"cuda"``.
    rounds : int
        Rounds that count.

    Returns
    -------
    dict
        ``round``, and ``parts`` with one entry for each of ``PARTS`` and ``rest``: seconds, means
        over rounds.
    """
    warmup = job.timed.warmup
    machine = Machine(device=device, tf32=job.tf32)
    laps = Laps()
    trainer_of(job, machine, warmup + rounds).run(on_round=lambda progress: laps())
    # The first lap ends with round 2.
    whole = float(np.mean(laps.seconds[warmup - 1 :]))

    apart = Machine(device=device, tf32=job.tf32, replay=False)
    parts = Parts(apart.torch_device)
    trainer = trainer_of(job, apart, warmup + rounds)
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with parts.installed():
        if device == "cpu":
            _run(trainer, parts, warmup)
            seconds = parts.seconds
        else:
            profiler = profile(activities=kinds)
            _run(trainer, parts, warmup, profiler.start)
            profiler.stop()
            seconds = of_kernels(profiler.events() or [])
    shares = {name: value / rounds for name, value in seconds.items()}
    return {
        "job": job.name,
        "device": device,
        "tf32": job.tf32,
        "rounds": rounds,
        "round": whole,
        "parts": shares | {"rest": max(0.0, whole - sum(shares.values()))},
    }


def _run(
    trainer: Trainer, parts: Parts, warmup: int, begin: Callable[[], None] = lambda: None
) -> None:
    """Train; count from the end of the last warm-up round on."""

    def ended(progress: Any) -> None:
        if progress.round == warmup:
            begin()
            parts.counting = True

    trainer.run(on_round=ended)


def of_kernels(events: Sequence[Any]) -> dict[str, float]:
    """Assign the time of every kernel to the innermost part that it began in.

    Parameters
    ----------
    events : sequence
        Of a profiler, with ``name``, ``device_type`` and ``time_range`` in microseconds.

    Returns
    -------
    dict of str to float
        Seconds by part.
    """
    marks = []
    for event in events:
        if event.name.startswith(_MARK) and event.device_type == DeviceType.CPU:
            name = event.name.removeprefix(_MARK)
            marks += [(event.time_range.start, True, name), (event.time_range.end, False, name)]
    # From each of these times on, which part is the innermost that is open.
    times, innermost, open_parts = list[float](), list[str | None]([None]), list[str]()
    for when, begins, name in sorted(marks):
        if begins:
            open_parts.append(name)
        else:
            open_parts.pop()
        times.append(when)
        innermost.append(open_parts[-1] if open_parts else None)
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in events:
        # A part is listed as work of the device, too.
        if event.device_type == DeviceType.CUDA and not event.name.startswith(_MARK):
            part = innermost[int(np.searchsorted(times, event.time_range.start, side="right"))]
            if part is not None:
                seconds[part] += event.time_range.elapsed_us() / 1e6
    return seconds


def draw(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw one bar for each report, divided into parts."""
    figure = new_figure(8.0, 1.4 + 0.6 * len(reports))
    axes = figure.subplots()
    names = [*PARTS, "rest"]
    labels = [
        f"{report['job']}, {report['device']}\n{1000 * report['round']:.3g} ms a round"
        for report in reports
    ]
    left = np.zeros(len(reports))
    for number, name in enumerate(names):
        share = np.array(
            [report["parts"][name] / sum(report["parts"].values()) for report in reports]
        )
        colour = "#cccccc" if name == "rest" else HUES[number % len(HUES)]
        axes.barh(labels, 100 * share, left=100 * left, color=colour, label=name)
        for row, (begin, width) in enumerate(zip(left, share, strict=True)):
            if width >= 0.05:
                axes.text(
                    100 * (begin + width / 2), row, f"{100 * width:.0f}", ha="center", va="center"
                )
        left += share
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of a round in %", color=INK)
    quiet(axes)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False, fontsize=9)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jobs", nargs="+", default=["pfl"], choices=jobs.NAMES)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 on a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/round_time.png"))
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is 'cuda', but PyTorch finds no GPU here; valid: cpu")
    torch.set_num_threads(arguments.threads)
    reports = []
    for name in arguments.jobs:
        job = jobs.make(
            name, device=arguments.device, threads=arguments.threads, tf32=arguments.tf32
        )
        reports.append(measure(job, device=arguments.device, rounds=arguments.rounds))
        print(in_words(reports[-1]), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(reports, arguments.out)
    arguments.out.with_suffix(".json").write_text(json.dumps(reports, indent=2) + "\n")
    return 0


def in_words(report: dict[str, Any]) -> str:
    """Write a report in one line.

    Examples
    --------
    >>> in_words({"job": "pfl", "round": 0.05, "parts": {"fetch": 0.001, "rest": 0.049}})
    'pfl: 50 ms a round: fetch 1, rest 49'
    """
    parts = ", ".join(f"{name} {1000 * value:.3g}" for name, value in report["parts"].items())
    return f"{report['job']}: {1000 * report['round']:.3g} ms a round: {parts}"


if __name__ == "__main__":
    sys.exit(main())
