"""A whole run of a study's FedAvg, by Equipoise and by a plain loop over clients.

``python -m benchmarks.whole_run experiments/fedcrc/table1-cifar10.yaml --setting iid``. Both train
the same clients in the same rounds, in turn, so that after clients/cohort rounds every client has
trained once. Equipoise runs to the end and its first rounds, in which steps are recorded, count.
The loop runs ``--loop-rounds`` after one that does not count, and is extrapolated; with ten rounds
of a hundred clients it has done exactly a tenth of the run. A round of each without shuffling and
without TF32 comes before: ``of the way`` is how far apart their models are, over how far the loop's
has moved. Beside the seconds of both is the share that the machine's limit is of them
(``benchmarks.machine``): the fewest seconds in which its measured rates allow all client-steps.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.machine import Rates, cost_of_step, measured_apart, percent, precision_of
from benchmarks.protocol import wait_for
from equipoise import Evaluation, Federation, Machine, Training
from equipoise.config import Experiment, experiment_from
from equipoise.errors import InputError, unknown
from equipoise.method import Candidates, Sampler, State
from equipoise.methods import build as build_method
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.run.trainer import Trainer
from equipoise.study import load_study


@dataclass(frozen=True)
class InTurn(Sampler):
    """Clients take part one after another, the next ones in every round."""

    reads_state: ClassVar[bool] = False

    def select(self, state: State, candidates: Candidates, count: int) -> NDArray[np.int64]:
        """Return the cohort of the round."""
        return candidates.ids[in_turn(state.round, len(candidates.ids), count)]


def in_turn(round_: int, clients: int, count: int) -> NDArray[np.int64]:
    """Name the clients of a round, counted from 0."""
    return (round_ * count + np.arange(count)) % clients


@dataclass(frozen=True)
class Setting:
    """What both sides train."""

    federation: Federation
    model: nn.Module
    training: Training
    machine: Machine

    @classmethod
    def of(cls, experiment: Experiment, machine: Machine) -> Setting:
        """Take over an experiment's data, model and training."""
        if not isinstance(experiment.training.optimizer, Sgd):
            raise InputError(f"the plain loop knows SGD alone, not {experiment.training.optimizer}")
        federation = experiment.federation()
        model = build_model(
            shape=federation.shape,
            classes=federation.outputs,
            seed=experiment.seed,
            **experiment.model,
        )
        return cls(federation, model, experiment.training, machine)

    @property
    def cohort(self) -> int:
        return self.training.cohort_size(len(self.federation.seen))

    def batches(self, rounds: int) -> Counter[int]:
        """Count the client-steps of the first rounds by the number of their samples."""
        sizes = self.federation.train.sizes[self.federation.seen]
        chosen = [in_turn(round_, len(sizes), self.cohort) for round_ in range(rounds)]
        full, rest = np.divmod(sizes[np.concatenate(chosen)], self.training.batch_size)
        counts = Counter({self.training.batch_size: int(full.sum())})
        counts.update(rest[rest > 0].tolist())
        return Counter({size: count * self.training.epochs for size, count in counts.items()})

    def steps(self, rounds: int) -> int:
        """Count the client-steps of the first rounds."""
        return self.batches(rounds).total()

    def fewest_seconds(self, rounds: int, rates: Rates) -> float:
        """Return the seconds that a machine needs at least for the first rounds."""
        return sum(
            count * cost_of_step(self.model, self.federation.x[:size]).seconds(rates)
            for size, count in self.batches(rounds).items()
        )


RoundDone = Callable[[], None]


def by_engine(setting: Setting, rounds: int, round_done: RoundDone) -> dict[str, Tensor]:
    """Train with Equipoise; evaluation and checkpoints are off."""
    trainer = Trainer(
        setting.federation,
        build_method("fedavg", sampling=InTurn()),
        setting.model,
        dataclasses.replace(setting.training, rounds=rounds),
        setting.machine,
        Evaluation(every=0),
        seed=0,
    )
    round_done()
    trainer.run(on_round=lambda progress: round_done())
    return {name: tensor.cpu() for name, tensor in trainer.state.model.items()}


def by_loop(setting: Setting, rounds: int, round_done: RoundDone) -> dict[str, Tensor]:
    """Train with a plain PyTorch loop: one model, clients in turn, their average by size."""
    training, device = setting.training, setting.machine.torch_device
    options: Any = training.optimizer
    x, y = setting.federation.x.to(device), setting.federation.y.to(device)
    seen = setting.federation.seen
    held = {
        int(client): torch.from_numpy(setting.federation.train.of(client)).to(device)
        for client in seen
    }
    model = copy.deepcopy(setting.model).to(device).train()
    local = [
        tensor for tensor in model.state_dict(keep_vars=True).values() if tensor.is_floating_point()
    ]
    shared = [tensor.detach().clone() for tensor in local]
    round_done()
    for round_ in range(rounds):
        cohort = seen[in_turn(round_, len(seen), setting.cohort)].tolist()
        samples = sum(len(held[client]) for client in cohort)
        average = [torch.zeros_like(tensor) for tensor in shared]
        lr = options.lr * training.schedule.factor(round_, training.rounds)
        for client in cohort:
            with torch.no_grad():
                torch._foreach_copy_(local, shared)
            optimizer = torch.optim.SGD(
                model.parameters(),
                lr,
                options.momentum,
                options.dampening,
                options.weight_decay,
                options.nesterov,
            )
            for _ in range(training.epochs):
                mine = held[client]
                order = mine[torch.randperm(len(mine), device=device)] if training.shuffle else mine
                for batch in order.split(training.batch_size):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                    optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(average, local, alpha=len(held[client]) / samples)
        shared = average
        wait_for(device)
        round_done()
    names = [name for name, tensor in model.state_dict().items() if tensor.is_floating_point()]
    return {name: tensor.cpu() for name, tensor in zip(names, shared, strict=True)}


def of_the_way(setting: Setting) -> float:
    """Compare a round of both without shuffling.

    Returns the distance of their models over how far the loop's has moved.
    """
    plain = dataclasses.replace(
        setting,
        training=dataclasses.replace(setting.training, shuffle=False),
        machine=dataclasses.replace(setting.machine, tf32=False),
    )
    allow_tf32(False)
    engine, loop = (train(plain, 1, lambda: None) for train in (by_engine, by_loop))
    start = {name: tensor.cpu() for name, tensor in setting.model.state_dict().items()}
    apart = sum(float((engine[name] - loop[name]).square().sum()) for name in loop) ** 0.5
    moved = sum(float((start[name] - loop[name]).square().sum()) for name in loop) ** 0.5
    return apart / moved


def allow_tf32(allowed: bool) -> None:
    """Let the plain loop round factors, or not."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


class Laps:
    """Seconds between calls. Both sides call it when the device has computed a round's model."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def __call__(self) -> None:
        self._ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return np.diff(self._ends).tolist()


def compare(setting: Setting, *, rounds: int, loop_rounds: int, rates: Rates) -> dict[str, Any]:
    """Measure both sides; see the module's own description."""
    agreement = of_the_way(setting)
    allow_tf32(setting.machine.tf32)
    loop, engine = Laps(), Laps()
    by_loop(setting, 1 + loop_rounds, loop)
    by_engine(setting, rounds, engine)
    _, *counted = loop.seconds
    steps = setting.steps(1 + loop_rounds) - setting.steps(1)
    # By steps, not by rounds: unequal clients make rounds of unequal length.
    extrapolated = sum(counted) * setting.steps(rounds) / steps
    fewest = setting.fewest_seconds(rounds, rates)
    return {
        "device": torch.cuda.get_device_name()
        if setting.machine.torch_device.type == "cuda"
        else "cpu",
        "torch": torch.__version__,
        "machine": dataclasses.asdict(setting.machine),
        "rates": dataclasses.asdict(rates),
        "rounds": rounds,
        "client_steps": setting.steps(rounds),
        "limit_seconds": fewest,
        "limit_steps_per_second": setting.steps(rounds) / fewest,
        "engine_seconds": sum(engine.seconds),
        "engine_first_rounds": engine.seconds[:5],
        "engine_steps_per_second": setting.steps(rounds) / sum(engine.seconds),
        "engine_share_of_limit": fewest / sum(engine.seconds),
        "loop_rounds": loop_rounds,
        "loop_seconds_measured": sum(counted),
        "loop_seconds_extrapolated": extrapolated,
        "loop_steps_per_second": steps / sum(counted),
        "loop_share_of_limit": fewest / extrapolated,
        "ratio": extrapolated / sum(engine.seconds),
        "of_the_way": agreement,
    }


def in_words(report: dict[str, Any]) -> str:
    """Write a report in one line.

    Examples
    --------
    >>> in_words({"setting": "iid", "rounds": 100, "limit_seconds": 2.0, "ratio": 4.0,
    ...           "engine_seconds": 10.0, "engine_share_of_limit": 0.2,
    ...           "loop_seconds_extrapolated": 40.0, "loop_share_of_limit": 0.05})
    'iid: 100 rounds in 10.0 s (20.0 % of the limit), the loop would take 40.0 s (5.0 %): 4.00
    times as fast; at the limit they take 2 s'
    """
    return (
        f"{report['setting']}: {report['rounds']} rounds in {report['engine_seconds']:.1f} s "
        f"({percent(report['engine_share_of_limit'])} of the limit), the loop would take "
        f"{report['loop_seconds_extrapolated']:.1f} s ({percent(report['loop_share_of_limit'])}): "
        f"{report['ratio']:.2f} times as fast; at the limit they take "
        f"{report['limit_seconds']:.3g} s"
    )


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--setting", help="one of the study's settings (default: the first)")
    parser.add_argument("--rounds", type=int, help="rounds of Equipoise (default: the study's)")
    parser.add_argument("--loop-rounds", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--chunk", default="auto", help="clients stacked together (default: the engine's own rule)"
    )
    parser.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=False, help="for both sides"
    )
    parser.add_argument(
        "--set",
        dest="changes",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="change the experiment",
    )
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    arguments = parser.parse_args()
    study = load_study(arguments.study)
    chosen = arguments.setting or study.settings[0]
    if chosen not in study.settings:
        raise unknown("setting", chosen, study.settings, where="--setting")
    experiment = next(job.experiment for job in study.jobs if job.setting == chosen)
    experiment = experiment_from(experiment.plain(), str(arguments.study), arguments.changes)
    chunk = int(arguments.chunk) if arguments.chunk.isdecimal() else arguments.chunk
    machine = Machine(device=arguments.device, chunk=chunk, tf32=arguments.tf32)
    kind, precision = machine.torch_device.type, precision_of(machine)
    measured = compare(
        Setting.of(experiment, machine),
        rounds=arguments.rounds or experiment.training.rounds,
        loop_rounds=arguments.loop_rounds,
        rates=measured_apart(kind, precision=precision, threads=torch.get_num_threads()),
    )
    report = {"study": str(arguments.study), "setting": chosen, **measured}
    print(json.dumps(report, indent=2))
    print(in_words(report))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
