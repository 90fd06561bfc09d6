"""What Client2Vec's local training costs, as a multiple of the seconds of its host.

    python -m benchmarks.index_cost --device cuda --tf32
    python -m benchmarks.index_cost --host feddyn --model resnet18 --clients 20 --samples 64

Two runs take turns in one process, a few rounds each: the host alone, and the host with the use
``training``. The job is that of ``experiments/client2vec/table1-cifar10.yaml``: the CNN with four
convolutions, 100 clients of 500 images, ten of them a round, five epochs, batches of 32. Images and
indices are drawn from a seed, and nothing is evaluated. Beside the ratio of the seconds is that of
the operations of all matrix products and convolutions of a step, which no implementation can avoid.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import jobs
from benchmarks.evaluation_cost import federation, seconds_of_rounds, trainer
from benchmarks.machine import cost_of_step
from benchmarks.protocol import Job
from equipoise.client_index import ClientIndex
from equipoise.engine.settings import Machine
from equipoise.errors import InputError
from equipoise.method import Method
from equipoise.methods import build as build_method
from equipoise.models import build as build_model

# Rounds of each run before those that are timed, and the width of an index of ViT-S and MiniLM.
WARM_UP, WIDTH = 4, 384


def job(clients: int, samples: int, model: str = "cnn4") -> Job:
    """Make the job of table 1, with these numbers of clients and of images of each."""
    return dataclasses.replace(
        jobs.make("pfl", device="cpu", threads=1),
        name="client2vec",
        model=model,
        clients=clients,
        samples=samples,
        cohort=max(1, clients // 10),
        batch=32,
        epochs=5,
        lr=0.01,
    )


def _indexed(host: str, clients: int, directory: Path) -> Method:
    """Wrap a host, with an index that is written to a directory."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, clients, WIDTH, generator=generator)
    path = directory / "index.safetensors"
    ClientIndex(np.arange(clients), *drawn).write(path)
    return build_method("client2vec", host=host, uses=["training"], index=str(path))


class _WithTerms(nn.Module):
    """A model whose outputs need all products of the use ``training``."""

    def __init__(self, model: nn.Module, index: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        model: Any = self.model
        z = model.features(x)
        projected = model.projection(z.flatten(1))
        outputs = model.head(z), model.projection_head(projected), projected @ self.index.T
        return torch.cat(outputs, 1)


def ratio_of_operations(work: Job, method: Method) -> float:
    """Return the operations of a step with the use, as a multiple of those of its host.

    They are those of plain gradient descent: passes of a host's own, as MOON has them, are left
    out.
    """
    model = build_model(work.model, shape=work.shape, classes=work.classes)
    x = torch.zeros(work.batch, *work.shape)
    alone = cost_of_step(model, x).operations
    extended = method.extend(model, work.shape, seed=0)
    return (
        cost_of_step(_WithTerms(extended, torch.zeros(work.clients, WIDTH)), x).operations / alone
    )


def measure(
    host: str,
    machine: Machine,
    *,
    model: str = "cnn4",
    clients: int,
    samples: int,
    rounds: int,
    turns: int,
) -> dict[str, Any]:
    """Time both runs in turns.

    Parameters
    ----------
    host : str
        The host method, with its default options.
    machine : Machine
        Where, and in which arithmetic.
    model : str
        The model.
    clients, samples : int
        How many clients there are, and how many images each of them holds.
    rounds, turns : int
        Rounds of a turn, and turns of each run.

    Returns
    -------
    dict
        ``ratio`` is that of the median seconds of a round, ``operations`` that of
        :func:`ratio_of_operations`.
    """
    work = job(clients, samples, model)
    data = federation(work, val=0, test=0)
    with tempfile.TemporaryDirectory() as temporary:
        methods = {"host": build_method(host), "with": _indexed(host, clients, Path(temporary))}
        runs = {
            name: trainer(work, data, 0, machine, Path(temporary) / name, method)
            for name, method in methods.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            seconds_of_rounds(run, WARM_UP, machine)
        for _ in range(turns):
            for name, run in runs.items():
                taken[name] += seconds_of_rounds(run, rounds, machine)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    on_gpu = machine.torch_device.type == "cuda"
    return {
        "host": host,
        "model": model,
        "clients": clients,
        "samples": samples,
        "tf32": machine.tf32,
        "rounds": rounds * turns,
        "seconds": medians,
        "ratio": medians["with"] / medians["host"],
        "operations": ratio_of_operations(work, methods["with"]),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the numbers; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.index_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", action="append", help="a host; may be repeated (default: fedavg)")
    parser.add_argument("--model", default="cnn4", help="a model for images of 32 x 32 pixels")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=500, help="images of a client")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a turn")
    parser.add_argument("--turns", type=int, default=4, help="turns of each run")
    parser.add_argument("--json", type=Path, help="where to append the numbers, as lines")
    given = parser.parse_args(argv)
    try:
        if min(given.clients, given.samples, given.rounds, given.turns) < 1:
            raise InputError("--clients, --samples, --rounds and --turns must be at least 1")
        machine = Machine(device=given.device, tf32=given.tf32)
        for host in given.host or ["fedavg"]:
            measured = measure(
                host,
                machine,
                model=given.model,
                clients=given.clients,
                samples=given.samples,
                rounds=given.rounds,
                turns=given.turns,
            )
            print(
                f"{host}: training with the index takes {measured['ratio']:.2f} times as long, and "
                f"has {measured['operations']:.2f} times as many operations"
            )
            if given.json:
                given.json.parent.mkdir(parents=True, exist_ok=True)
                with given.json.open("a") as file:
                    file.write(json.dumps(measured) + "\n")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
