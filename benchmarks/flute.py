"""FLUTE's published jobs, carried out by Equipoise: ``python -m benchmarks.flute --help``.

The README of https://github.com/microsoft/msrflute compares FLUTE with FedML on four tasks. It
gives clients, cohort, batch size, learning rate, epochs, rounds, how often the model is tested, and
the times, but not the machine. Two of the tasks are carried out here:

``femnist``
    A CNN on Federated EMNIST. Known: 3,400 clients, 10 a round, batches of 20, SGD 0.1, one epoch,
    1,500 rounds, tested every 50; FLUTE 8 min 22 s, FedML 5 h 49 min 52 s. The model is in
    ``experiments/cv_cnn_femnist``: convolutions of 32 and 64 channels (3 x 3), a 2 x 2 max-pool,
    128 units, dropout 0.25 and 0.5, 62 classes, which is ``pflcnn`` here. TensorFlow Federated,
    from which the data are, counts 671,585 training and 77,483 test images.
``shakespeare``
    An LSTM on Shakespeare's plays. Known: 715 clients, 10 a round, batches of 4, SGD 0.8, one
    epoch, 1,200 rounds, tested every 50; FLUTE 21 min 50 s, FedML 6 h 46 min 21 s. The model is in
    ``experiments/nlp_rnn_fedshakespeare``: an embedding of 90 characters in 8 numbers, two LSTM
    layers of 256, one dense layer at every position; sequences of 80 characters, of which padding
    does not count in the loss. TensorFlow Federated counts 16,068 training and 2,356 test examples,
    which are texts of any length that FLUTE cuts into sequences.

Assumed, because neither project says it:

- How unequal clients are: standard deviations over the mean as in table 1 of LEAF's paper, which
  both datasets come from (FEMNIST 88.94 / 226.83, Shakespeare 6,212 / 3,743), and sizes that follow
  a gamma distribution.
- How many sequences Shakespeare has: LEAF counts 4,226,158 characters. As much of them as the share
  of training examples, 87 %, divided by 81, and half a sequence of padding an example, makes 53,500
  sequences for training; the same for testing makes 7,850.

Data of these sizes are drawn from a seed; times do not depend on what they show, and accuracies
mean nothing. A time is that of the round loop: all rounds and tests, without drawing data. With
``--rounds`` below the job's own number, the rest is extrapolated from the rounds after the first
tenth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.machine import Rates, cost_of_step, measured_apart, percent, precision_of
from benchmarks.text import draw_text
from equipoise import Evaluation, Federation, Machine, Training
from equipoise.errors import InputError, unknown
from equipoise.federation import Split
from equipoise.methods import build as build_method
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.run.round_rows import BESIDE
from equipoise.run.trainer import Trainer

# Images drawn at a time.
_BLOCK = 50_000


@dataclass(frozen=True)
class Workload:
    """One of FLUTE's jobs; see the description of this module.

    Attributes
    ----------
    train, test : int
        Samples of all clients together.
    spread : float
        Standard deviation of the clients' sizes over their mean.
    published : dict of str to float
        Seconds, as FLUTE's README gives them, by framework.
    """

    name: str
    model: str
    shape: tuple[int, ...]
    classes: int
    task: str
    clients: int
    batch: int
    lr: float
    rounds: int
    train: int
    test: int
    spread: float
    published: dict[str, float]
    options: dict[str, Any] = field(default_factory=dict)
    cohort: int = 10
    test_every: int = 50


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="femnist",
            model="pflcnn",
            shape=(1, 28, 28),
            classes=62,
            task="classification",
            clients=3400,
            batch=20,
            lr=0.1,
            rounds=1500,
            train=671_585,
            test=77_483,
            spread=88.94 / 226.83,
            published={"flute": 8 * 60 + 22, "fedml": (5 * 60 + 49) * 60 + 52},
        ),
        Workload(
            name="shakespeare",
            model="textlstm",
            shape=(80,),
            classes=90,
            task="next_characters",
            clients=715,
            batch=4,
            lr=0.8,
            rounds=1200,
            train=53_500,
            test=7_850,
            spread=6212.26 / 3743.28,
            published={"flute": 21 * 60 + 50, "fedml": (6 * 60 + 46) * 60 + 21},
            options={"everywhere": True},
        ),
    )
}


def sizes(total: int, clients: int, spread: float, seed: int = 0) -> NDArray[np.int64]:
    """Draw how many samples each client has: at least one each, and as many as said together.

    Parameters
    ----------
    total : int
        Samples of all clients together.
    clients : int
        How many clients.
    spread : float
        Standard deviation over the mean.
    seed : int
        What they are drawn from.

    Returns
    -------
    int array
        ``[clients]``.

    Examples
    --------
    >>> int(sizes(100, 5, 0.4).sum())
    100
    """
    if total < clients:
        raise InputError(f"{total} samples are too few for {clients} clients")
    drawn = np.random.default_rng(seed).gamma(spread**-2, size=clients)
    # Rounding the running total keeps the sum.
    bounds = np.rint(np.cumsum(drawn) / drawn.sum() * (total - clients)).astype(np.int64)
    return 1 + np.diff(bounds, prepend=0)


def drawn(workload: Workload, count: int) -> tuple[Tensor, Tensor]:
    """Draw samples and targets."""
    generator = torch.Generator().manual_seed(0)
    if workload.task == "next_characters":
        texts = draw_text(generator, count, workload.shape[0] + 1, workload.classes)
        return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()
    y = torch.randint(0, workload.classes, (count,), generator=generator)
    centres = torch.randn(workload.classes, *workload.shape, generator=generator) / 2
    x = torch.empty(count, *workload.shape)
    for block, labels in zip(x.split(_BLOCK), y.split(_BLOCK), strict=True):
        block.normal_(generator=generator)
        block += centres[labels]
    return x, y


def federation_of(workload: Workload) -> Federation:
    """Make a federation of the job's sizes, with drawn data."""
    x, y = drawn(workload, workload.train + workload.test)

    def split(total: int, first: int) -> Split:
        own = sizes(total, workload.clients, workload.spread)
        return Split(np.arange(first, first + total), np.concatenate([[0], np.cumsum(own)]))

    return Federation(
        x=x,
        y=y,
        train=split(workload.train, 0),
        val=Split.from_lists([[]] * workload.clients),
        test=split(workload.test, workload.train),
        groups=np.zeros(workload.clients, np.int64),
        group_names=("all",),
        unseen=np.zeros(workload.clients, bool),
        classes=workload.classes,
        task=workload.task,
        name=f"{workload.name}, drawn",
    )


def carry_out(
    workload: Workload, machine: Machine, *, rounds: int | None = None, rates: Rates | None = None
) -> dict[str, Any]:
    """Train, and report the time of the whole job.

    Parameters
    ----------
    workload : Workload
        What to train.
    machine : Machine
        Where.
    rounds : int, optional
        How many rounds to carry out; all by default.
    rates : Rates, optional
        What the machine can do, for the limit.

    Returns
    -------
    dict
        ``seconds`` of the whole job, and whether they are ``extrapolated``.
    """
    rounds = workload.rounds if rounds is None else rounds
    if not 2 <= rounds <= workload.rounds:
        raise InputError(f"--rounds is {rounds}; valid: 2 to {workload.rounds}")
    federation = federation_of(workload)
    model = build_model(
        workload.model, shape=workload.shape, classes=workload.classes, **workload.options
    )
    cost = cost_of_step(model, federation.x[: workload.batch])
    trainer = Trainer(
        federation,
        build_method("fedavg"),
        model,
        Training(
            rounds=rounds,
            cohort=workload.cohort,
            batch_size=workload.batch,
            epochs=1,
            optimizer=Sgd(lr=workload.lr),
        ),
        machine,
        Evaluation(every=workload.test_every),
        seed=0,
    )
    began = time.perf_counter()
    trainer.run()
    elapsed = time.perf_counter() - began
    rows = list(trainer.timings)
    # A GPU evaluates most rounds beside the training of later ones, which then takes longer.
    tests = [row["evaluate"] for row in rows if "evaluate" in row]
    beside = sum(BESIDE in row for row in rows)
    trains = [sum(row[part] for part in ("train", "combine")) for row in rows]
    whole = rounds == workload.rounds
    if not whole:
        # In the first rounds, steps are recorded.
        later = trains[rounds // 10 :]
        due = 1 if beside else -(-workload.rounds // workload.test_every)
        elapsed = sum(later) / len(later) * workload.rounds + sum(tests) / len(tests) * due
    a_client = -(-federation.train.sizes // workload.batch)
    steps = float(a_client.mean()) * workload.cohort * workload.rounds
    return {
        "job": workload.name,
        "data": "drawn, with the sizes of the original",
        "model": workload.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": workload.rounds,
        "rounds_carried_out": rounds,
        "extrapolated": not whole,
        "seconds": elapsed,
        "seconds_of_tests": sum(tests),
        "tests_beside_training": beside,
        "first_rounds": trains[:3],
        "median_round": float(np.median(trains)),
        "client_steps": steps,
        "client_steps_per_second": steps / elapsed,
        "limit_seconds": None if rates is None else steps * cost.seconds(rates),
        "published_seconds": workload.published,
        "machine": dataclasses.asdict(machine),
        "device": torch.cuda.get_device_name() if machine.torch_device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def in_words(report: dict[str, Any]) -> str:
    """Write a report in one line.

    Examples
    --------
    >>> in_words({"job": "femnist", "rounds": 1500, "seconds": 61.0, "extrapolated": True,
    ...           "rounds_carried_out": 20, "limit_seconds": None,
    ...           "published_seconds": {"flute": 502}})
    'femnist: 1500 rounds in 1 min 1 s (extrapolated from 20); published: flute 8 min 22 s'
    """
    carried_out = report["rounds_carried_out"]
    note = f" (extrapolated from {carried_out})" if report["extrapolated"] else ""
    limit = report["limit_seconds"]
    known = "" if limit is None else f", {percent(limit / report['seconds'])} of the limit"
    published = ", ".join(
        f"{name} {_minutes(value)}" for name, value in report["published_seconds"].items()
    )
    return (
        f"{report['job']}: {report['rounds']} rounds in {_minutes(report['seconds'])}{note}{known}"
        f"; published: {published}"
    )


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out jobs, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flute",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("jobs", nargs="*", default=list(WORKLOADS), metavar="JOB")
    parser.add_argument("--rounds", type=int, help="rounds to carry out (default: all)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 on a GPU")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    arguments = parser.parse_args(argv)
    try:
        for name in arguments.jobs:
            if name not in WORKLOADS:
                raise unknown("job", name, WORKLOADS, where="the command line")
        machine = Machine(device=arguments.device, tf32=arguments.tf32)
        kind, precision = machine.torch_device.type, precision_of(machine)
        rates = measured_apart(kind, precision=precision, threads=torch.get_num_threads())
        reports = []
        for name in arguments.jobs:
            reports.append(
                carry_out(WORKLOADS[name], machine, rounds=arguments.rounds, rates=rates)
            )
            print(in_words(reports[-1]), flush=True)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps({"rates": dataclasses.asdict(rates), "jobs": reports}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
