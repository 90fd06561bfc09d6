"""Local training of a chunk of clients, stacked on a leading axis.

A chunk is trained as one tensor program: ``torch.func.vmap`` over the loss of one client, one
backward pass for all of them, one optimizer step on the stack. A single client is not stacked at
all: the same code then is the plain PyTorch loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from equipoise.client import Finished
from equipoise.engine.batches import Batches
from equipoise.engine.blocks import blocks_of, spans_of
from equipoise.engine.chunk import Chunk, Pace, tensors_of
from equipoise.engine.frozen import FrozenFeatures
from equipoise.engine.memory import checked_memory
from equipoise.engine.phase_run import PhaseRun, Span
from equipoise.engine.replay import Inputs, Replay
from equipoise.engine.stack import in_plain_words
from equipoise.engine.tape import Tapes
from equipoise.errors import InputError
from equipoise.host_copy import HostCopy
from equipoise.method import LocalRule, Reports
from equipoise.optimizers import Column
from equipoise.stacks import copy_all
from equipoise.tree import Tree


@dataclass(frozen=True)
class Trained:
    """A chunk whose training has been launched.

    Attributes
    ----------
    sums : HostCopy
        Every client's sum over all samples it saw of the task's loss and, if the method may add
        terms, of the whole loss, ``[1 or 2, clients]``, float64.
    samples : Tensor
        How many samples those are, ``[clients]``, float64.
    steps : Tensor
        How many steps each client makes, ``[clients]``, float64.
    """

    sums: HostCopy
    samples: Tensor
    steps: Tensor

    def reports(self) -> Reports:
        """Wait for all steps, and return the reports of the training.

        Returns
        -------
        dict of Tensor
            ``train_loss``, every client's mean of the task's loss over all samples it saw;
            ``method_terms``, what the method has added to it, if it may have added something; and
            ``steps``. ``[clients]``, float64.
        """
        of_task, *losses = self.sums.read() / self.samples
        reports = {"train_loss": of_task, "steps": self.steps}
        return reports | ({"method_terms": losses[0] - of_task} if losses else {})


class LocalTraining:
    """A local rule for one chunk. On a GPU its memory is reused for chunks of the same shape.

    Parameters
    ----------
    chunk : Chunk
        The clients. Their parameters are trained in place.
    rule : LocalRule
        The local rule.
    paces : sequence of Pace
        One per phase.
    frozen : FrozenFeatures
        Storage of z while features are not trained.
    replay : Replay, optional
        Where to record steps; without one every step is carried out from Python.
    tapes : Tapes, optional
        Where to record gradients if steps are not recorded.
    """

    def __init__(
        self,
        chunk: Chunk,
        rule: LocalRule,
        paces: Sequence[Pace],
        frozen: FrozenFeatures,
        replay: Replay | None = None,
        tapes: Tapes | None = None,
    ) -> None:
        self.chunk, self.rule, self.paces, self.frozen = chunk, rule, paces, frozen
        self.replay, self.number = replay, next(_NUMBERS)
        tapes = tapes if _is_hashable(rule) else None
        self.runs = [
            PhaseRun(phase, chunk, pace, tapes, (rule, index))
            for index, (phase, pace) in enumerate(zip(rule.phases(), paces, strict=True))
        ]

    @property
    def nbytes(self) -> int:
        """The memory of all tensors that are kept for chunks of this shape."""
        own = [tensor for run in self.runs for tensor in run.tensors]
        return sum(tensor.nbytes for tensor in [*tensors_of(self.chunk, self.paces), *own])

    def run(self, batches: Sequence[Batches]) -> Trained:
        """Carry out the rule with the batches of each phase. A GPU may still work afterwards.

        Parameters
        ----------
        batches : sequence of Batches
            One per phase.
        """
        for stretch in self._stretches(list(zip(self.runs, batches, strict=True))):
            frozen = self._frozen_during(stretch)
            for run, own in stretch:
                run.begin(own, frozen)
            turns = [
                (step, turn)
                for turn, (_, own) in enumerate(stretch)
                for step in range(int(own.steps[0]))
            ]
            if self.rule.interleaved:
                turns.sort()
            runs = [run for run, _ in stretch]
            if self.replay is None:
                for step, turn in turns:
                    runs[turn].step(step)
            else:
                for block in blocks_of(spans_of(runs, turns)):
                    self._carry_out(self.replay, runs, block)
        samples = sum((own.samples() for own in batches), np.zeros(len(self.chunk.seen)))
        steps = sum((own.steps for own in batches), np.zeros(len(self.chunk.seen)))
        sums = [torch.stack([run.task_losses for run in self.runs]).sum(0)]
        if self.rule.adds_terms:
            sums.append(torch.stack([run.losses for run in self.runs]).sum(0))
        return Trained(
            HostCopy(torch.stack(sums)), torch.from_numpy(samples), torch.from_numpy(steps)
        )

    def _carry_out(self, replay: Replay, runs: list[PhaseRun], block: list[Span]) -> None:
        """Make the steps of a block with one recording, or with one a step until there is one."""

        def program(given: Inputs) -> None:
            for span, inputs in zip(block, given, strict=True):
                run = runs[span.turn]
                run.narrow(span.shape.active)
                for index in range(span.count):
                    run.advance(inputs.of_step(index), span.first + index)

        def one_by_one() -> None:
            for span in block:
                for step in range(span.first, span.first + span.count):
                    self._carry_out(replay, runs, [replace(span, first=step, count=1)])

        name = tuple(
            (self.runs.index(run), span.first % run.phase.turns, span.count, span.shape)
            for span in block
            for run in [runs[span.turn]]
        )
        replay.carry_out(
            self.number,
            name,
            program,
            lambda: [runs[span.turn].inputs_of(span) for span in block],
            None if sum(span.count for span in block) == 1 else one_by_one,
        )

    def _stretches(
        self, runs: list[tuple[PhaseRun, Batches]]
    ) -> list[list[tuple[PhaseRun, Batches]]]:
        """Group consecutive phases that all train the features, or all do not.

        All phases of a group begin before the first of their steps. So one whose penalty depends on
        the client's parameters comes first in its group.
        """
        if self.rule.interleaved:
            return [runs]
        stretches: list[list[tuple[PhaseRun, Batches]]] = []
        for run, own in runs:
            before = stretches[-1][-1][0] if stretches else None
            if (
                before is None
                or run.begins_with_parameters
                or run.features_rest != before.features_rest
            ):
                stretches.append([])
            stretches[-1].append((run, own))
        return stretches

    def _frozen_during(self, stretch: list[tuple[PhaseRun, Batches]]) -> FrozenFeatures | None:
        """Compute z of all samples with the current features, if that saves work."""
        batches = [own for _, own in stretch]
        if not all(run.features_rest for run, _ in stretch) or not self.frozen.serves(
            self.chunk, batches
        ):
            return None
        self.frozen.fill(self.chunk, batches[0])
        return self.frozen

    def fill(self, chunk: Chunk, paces: Sequence[Pace]) -> None:
        """Copy another chunk of the same shape into this one's memory."""
        copy_all(tensors_of(self.chunk, self.paces), tensors_of(chunk, paces))


_NUMBERS = count()


def _is_hashable(rule: LocalRule) -> bool:
    """Return whether a rule can be a key. One of the user's own may be a mutable dataclass."""
    try:
        hash(rule)
    except TypeError:
        return False
    return True


def finish_chunk(
    chunk: Chunk, rule: LocalRule, steps: Tensor, lr: Column
) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Return the new memory and the uploads of every client of a trained chunk, both stacked."""
    if not rule.finishes:
        return {}, {}
    like = chunk.seen
    dtype = chunk.network.dtype
    count = steps.to(device=like.device, dtype=dtype)
    rates = lr.to(dtype) if isinstance(lr, Tensor) else torch.full_like(count, lr)

    def of_one_client(
        params: Tree, each: Tree, memory: dict[str, Tree], seen: Tensor, steps: Tensor, lr: Tensor
    ) -> tuple[dict[str, Tree], dict[str, Tree]]:
        finished = rule.finish(
            Finished({**chunk.still, **params}, chunk.sent, each, memory, seen, steps, lr)
        )
        where = f"finish of {type(rule).__name__}"
        if not isinstance(finished, tuple) or len(finished) != 2:
            raise InputError(
                f"{where} returned {finished!r}; valid: the client's memory and its uploads, two "
                "dictionaries"
            )
        return checked_memory(finished[0], where, memory), checked_memory(finished[1], where)

    with in_plain_words(f"finish of {type(rule).__name__}"):
        finished: tuple[dict[str, Tree], dict[str, Tree]] = vmap(of_one_client)(
            chunk.params, chunk.each, chunk.memory, chunk.seen, count, rates
        )
    return finished
