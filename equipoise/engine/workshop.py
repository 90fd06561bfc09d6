"""What is kept from one chunk to the next: on a GPU, tensors and recorded steps by shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map as tree_map_any

from equipoise.engine.batches import Batches
from equipoise.engine.chunk import Chunk, Pace, tensors_of
from equipoise.engine.frozen import FrozenFeatures
from equipoise.engine.local import LocalTraining, Trained
from equipoise.engine.replay import Replay
from equipoise.engine.tape import Tapes
from equipoise.method import LocalRule
from equipoise.optimizers import Column, Optimizer
from equipoise.stacks import copy_all
from equipoise.tree import Tree

# For how many shapes of chunks a GPU keeps tensors and recorded steps, and how much memory these
# tensors may take, over that of the graphs' pool.
MOST_SHAPES, SHAPES_TO_POOL = 64, 0.5


class Workshop:
    """Trains chunks. On a GPU it keeps tensors and recorded steps for every shape of chunk.

    A step of many small kernels costs a GPU less time than Python needs to launch them. Recorded
    once and replayed, it costs a single launch. That needs all tensors to stay where they are, so
    chunks are copied into memory that is kept.

    Parameters
    ----------
    replay : Replay, optional
        Where to record steps; without one every step is carried out from Python.
    tapes : Tapes, optional
        Where to record gradients if steps are not recorded.

    Attributes
    ----------
    meanwhile : list of callables
        What the host does, once each, while the device trains the next chunk.
    """

    def __init__(self, replay: Replay | None = None, tapes: Tapes | None = None) -> None:
        self.meanwhile: list[Callable[[], None]] = []
        self._trainings: OrderedDict[Any, LocalTraining] = OrderedDict()
        self._replay, self._tapes = replay, tapes
        self._frozen = FrozenFeatures()
        self._unreplayed: str | None = None

    @property
    def not_replayed(self) -> str | None:
        """Why steps that should be replayed ran from Python, if some did."""
        return self._unreplayed or (None if self._replay is None else self._replay.failure)

    def trains_copies(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether chunks are copied into memory that is kept, and trained there."""
        return self._replay is not None and all(optimizer.replays for optimizer in optimizers)

    def train(
        self,
        chunk: Chunk,
        rule: LocalRule,
        batches: Sequence[Batches],
        paces: Sequence[Pace],
        room: Tree | None = None,
    ) -> Trained:
        """Run a local rule for a chunk. A GPU may still work afterwards.

        Parameters
        ----------
        chunk : Chunk
            The clients.
        rule : LocalRule
            The local rule.
        batches, paces
            One per phase.
        room : Tree, optional
            Where trained parameters are written if the workshop :meth:`trains_copies`. The chunk's
            own are not changed then. Without ``room``, the chunk's parameters are trained in place.
        """
        slow = [pace.optimizer for pace in paces if not pace.optimizer.replays]
        if slow and self._replay is not None:
            self._unreplayed = f"the optimizer {slow[0]} cannot be replayed"
        if slow or self._replay is None:
            training = LocalTraining(chunk, rule, paces, self._frozen, tapes=self._tapes)
            outcome = training.run(batches)
            self._meanwhile()
            return outcome
        clients = len(chunk.seen)
        # A recorded step reads the learning rate from memory, so that a schedule can change it.
        paces = [
            replace(pace, lr=_as_column(pace.lr, clients, chunk.seen.device)) for pace in paces
        ]
        training = self._training_for(chunk, rule, paces, self._replay)
        training.fill(chunk, paces)
        outcome = training.run(batches)
        trained = chunk.params if room is None else room
        copy_all(list(trained.values()), [training.chunk.params[name] for name in trained])
        self._meanwhile()
        return outcome

    def _meanwhile(self) -> None:
        while self.meanwhile:
            self.meanwhile.pop(0)()

    def _training_for(
        self, chunk: Chunk, rule: LocalRule, paces: Sequence[Pace], replay: Replay
    ) -> LocalTraining:
        """Return what is kept for chunks of this shape, or make it."""
        optimizers = tuple(pace.optimizer for pace in paces)
        shapes = tuple(tensor.shape for tensor in tensors_of(chunk, paces))
        key = (rule, optimizers, len(chunk.seen), tuple(chunk.params), shapes)
        if key not in self._trainings:
            self._make_room(sum(tensor.nbytes for tensor in tensors_of(chunk, paces)), replay)
            self._trainings[key] = LocalTraining(*_copied(chunk, paces, rule), self._frozen, replay)
        self._trainings.move_to_end(key)
        return self._trainings[key]

    def _make_room(self, needed: int, replay: Replay) -> None:
        """Drop the shapes of chunks that were used least recently, if too much is kept."""
        kept = needed + sum(training.nbytes for training in self._trainings.values())
        most = SHAPES_TO_POOL * replay.most_bytes
        while self._trainings and (len(self._trainings) >= MOST_SHAPES or kept > most):
            _, oldest = self._trainings.popitem(last=False)
            kept -= oldest.nbytes
            replay.forget(oldest.number)


def _as_column(lr: Column, clients: int, device: torch.device) -> Tensor:
    return (
        lr
        if isinstance(lr, Tensor)
        else torch.full((clients,), lr, dtype=torch.float64, device=device)
    )


def _copied(
    chunk: Chunk, paces: Sequence[Pace], rule: LocalRule
) -> tuple[Chunk, LocalRule, list[Pace]]:
    """Copy all tensors of a chunk and its paces into separate memory."""
    copies = {
        field: tree_map_any(lambda leaf: leaf.clone(), getattr(chunk, field))
        for field in ("params", "still", "sent", "each", "memory", "seen", "round")
    }
    own_paces = [replace(pace, lr=pace.lr.clone()) for pace in paces]  # type: ignore[union-attr]
    return replace(chunk, **copies), rule, own_paces
