"""Equipoise's own round loop with its default settings; evaluation and checkpoints are off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
from torch import Tensor

from benchmarks.protocol import Job, Pass, Work, run_peer
from benchmarks.whole_run import InTurn
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.federation import Federation, Split
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.run import processes
from equipoise.run.evaluation import Evaluation


def train(work: Work, stage: Pass, round_done: Callable[[], None]) -> dict[str, Tensor]:
    """Train as ``benchmarks.protocol.Train`` asks."""
    job = work.job
    x, y = work.data()
    rows = np.arange(job.clients * job.samples).reshape(job.clients, job.samples)
    nothing = Split.from_lists([[]] * job.clients)
    federation = Federation(
        x=x.flatten(0, 1).cpu(),
        y=y.flatten().cpu(),
        train=Split.from_lists(list(rows)),
        val=nothing,
        test=nothing,
        groups=np.zeros(job.clients, np.int64),
        group_names=("all",),
        unseen=np.zeros(job.clients, bool),
        classes=job.classes,
    )
    del x, y
    training = Training(
        rounds=stage.warmup + stage.rounds,
        cohort=job.cohort,
        epochs=job.epochs,
        batch_size=job.batch,
        optimizer=Sgd(lr=job.lr),
        shuffle=stage.shuffle,
    )
    tf32 = job.tf32 and stage is job.timed
    all_of_it = processes.Work(
        federation,
        build("fedavg", sampling=InTurn()),
        work.model(stage).cpu(),
        training,
        Machine(device=str(work.device), tf32=tf32, processes=job.processes),
        Evaluation(every=0),
        job.seed,
    )
    alone = job.processes == 1
    with nullcontext() if alone else processes.started(all_of_it, job.processes) as team:
        trainer = all_of_it.trainer(StackedEngine if team is None else team.engine)
        trainer.run(on_round=lambda progress: round_done())
    buffers = trainer.engine.network.buffers
    return {
        name: tensor.cpu() for name, tensor in trainer.state.model.items() if name not in buffers
    }


def in_words(job: Job) -> str:
    """Describe the processes of a job.

    Examples
    --------
    >>> from benchmarks import jobs
    >>> in_words(jobs.make("small", device="cpu", threads=2, processes=2))
    '2 processes'
    """
    return "one process" if job.processes == 1 else f"{job.processes} processes"


if __name__ == "__main__":
    run_peer(train, processes=in_words)
