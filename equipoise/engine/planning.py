"""Which clients of a cohort train together, on which batches, and at which pace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.engine.batches import Batches, draw_batches
from equipoise.engine.chunk import Pace
from equipoise.engine.chunking import even_chunks
from equipoise.engine.work import batches_a_step, chunks, steps_of
from equipoise.method import LocalRule, Phase
from equipoise.optimizers import Column, TorchOptimizer
from equipoise.random import Purpose, fold, fold_array

if TYPE_CHECKING:
    from equipoise.engine.stacked import StackedEngine


class Division(NamedTuple):
    """How a cohort is divided into chunks.

    Attributes
    ----------
    work : list of int arrays
        The steps of each client, one array a phase.
    order : int array
        The positions of clients in the cohort, in the order in which they train.
    chunks : list of int arrays
        The same, divided.
    """

    work: list[NDArray[np.int64]]
    order: NDArray[np.int64]
    chunks: list[NDArray[np.int64]]


class Planner:
    """The local work of the clients of one round.

    Parameters
    ----------
    engine : StackedEngine
        The engine, with the settings and the data.
    clients : int array
        The clients.
    sizes : int array
        Their numbers of training samples.
    round_ : int
        The round (counted from 0).
    purpose : sequence of Purpose
        Of the random numbers. Those of training have none; those of all other uses have one.
    """

    def __init__(
        self,
        engine: StackedEngine,
        clients: NDArray[np.int64],
        sizes: NDArray[np.int64],
        round_: int,
        purpose: Sequence[Purpose],
    ) -> None:
        self.engine, self.clients, self.sizes = engine, clients, sizes
        self.round, self.purpose = round_, tuple(purpose)
        # What draw_ahead has found, and for which rule and chunk size.
        self._division: tuple[LocalRule, int, Division] | None = None
        self._drawn: dict[Any, Batches] = {}

    def keys(self, clients: NDArray[np.int64]) -> Tensor:
        """Return the keys of clients in this round, on the CPU, because they are few."""
        key = fold(self.engine.seed, self.round, *self.purpose)
        return torch.from_numpy(fold_array(key, clients))

    def optimizer(self, phase: Phase) -> Any:
        """Return the optimizer of a phase."""
        return phase.optimizer or self.engine.training.optimizer

    def work_of(self, local: LocalRule) -> list[NDArray[np.int64]]:
        """Return how many steps each client makes, one array a phase."""
        training, keys, adapting = self.engine.training, self.keys(self.clients), bool(self.purpose)
        work: list[NDArray[np.int64]] = []
        for phase in local.phases():
            same = phase.batch == "same" and work
            work.append(
                work[-1] if same else steps_of(phase, training, self.sizes, keys, adapting=adapting)
            )
        return work

    def divided(self, local: LocalRule) -> Division:
        """Return the chunks in which clients train."""
        if self._division is not None:
            rule, chunk, found = self._division
            if rule is local and chunk == self.engine.chunk:
                return found
        work = self.work_of(local)
        # The larger of two clients comes first if they make as many steps.
        order = np.lexsort((-self.sizes, -sum(work, np.zeros_like(self.sizes))))
        alone = any(isinstance(self.optimizer(phase), TorchOptimizer) for phase in local.phases())
        size = 1 if alone else even_chunks(len(self.clients), self.engine.chunk)
        return Division(work, order, list(chunks(order, work, size)))

    def draw_ahead(self, local: LocalRule) -> None:
        """Draw the batches of the first chunk, so that training can begin at once later."""
        found = self.divided(local)
        self._division = local, self.engine.chunk, found
        for members in found.chunks[:1]:
            steps = [of_phase[members] for of_phase in found.work]
            for index, phase in enumerate(local.phases()):
                if index == 0 or phase.batch != "same":
                    key, draw = self._drawing(index, phase, members, steps[index])
                    self._drawn[key] = draw()

    def of_chunk(
        self,
        local: LocalRule,
        members: NDArray[np.int64],
        work: Sequence[NDArray[np.int64]],
        each: Mapping[str, Tensor],
    ) -> tuple[list[Batches], list[Pace]]:
        """Return the batches and the pace of every phase.

        Parameters
        ----------
        local : LocalRule
            The local rule.
        members : int array
            The positions of the chunk's clients in the cohort.
        work : sequence of int arrays
            Their steps, one array a phase.
        each : mapping of Tensor
            What the server has sent to each of them.
        """
        training = self.engine.training
        batches: list[Batches] = []
        paces = []
        for index, phase in enumerate(local.phases()):
            if phase.batch == "same" and batches:
                batches.append(batches[-1])
            else:
                key, draw = self._drawing(index, phase, members, work[index])
                drawn = self._drawn.pop(key, None) or draw()
                batches.append(
                    drawn.split(phase.gradient.batches) if phase.batch == "split" else drawn
                )
            optimizer = self.optimizer(phase)
            factor = (
                training.schedule.factor(self.round, training.rounds) if phase.scheduled else 1.0
            )
            lr: Column = optimizer.lr * factor
            if "step_factor" in each:
                lr = lr * each["step_factor"]
            paces.append(Pace(optimizer, lr, training.clip))
        return batches, paces

    def _drawing(
        self, index: int, phase: Phase, members: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> tuple[Any, Callable[[], Batches]]:
        """Return what the batches of a phase depend on in this round, and what draws them."""
        engine, clients, a_step = self.engine, self.clients[members], batches_a_step(phase)

        def draw() -> Batches:
            return draw_batches(
                engine.view.train,
                engine.train_indices,
                clients,
                self.keys(clients),
                phase=index,
                batch_size=engine.training.batch_size,
                steps=steps,
                shuffle=engine.training.shuffle,
                a_step=a_step,
            )

        return (index, a_step, clients.tobytes(), steps.tobytes()), draw
