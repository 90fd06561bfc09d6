"""The steps of one phase of a chunk.

Clients are ordered by falling number of steps, so those still training are always the first rows,
and a step is taken on views of those rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.data.augment import moves_pixels
from equipoise.engine.batches import Batches
from equipoise.engine.chunk import Chunk, Pace
from equipoise.engine.frozen import FrozenFeatures, features_rest
from equipoise.engine.gradients import Batch, Look, PhaseGradient, Rows, StepGradient
from equipoise.engine.phase_penalty import PhasePenalty
from equipoise.engine.stack import first_rows, tree_first_rows
from equipoise.engine.tape import Apart, Tapes
from equipoise.errors import InputError
from equipoise.method import Phase, PlainGradient
from equipoise.optimizers import Count, OptimizerState, Sgd
from equipoise.optimizers.penalties import Penalties, Room
from equipoise.random import Purpose, fold_tensor
from equipoise.tree import PERSONAL, norms, scaled, select


@dataclass(frozen=True)
class StepInput:
    """What changes from step to step: everything else stays where it is in memory.

    Tensors have a leading axis of clients, then one of batches if a step looks at several.
    ``number`` is that of the step, from 1: a tensor if the step is recorded. The inputs of several
    steps have one more axis in front.
    """

    positions: Tensor
    keys: Tensor
    mask: Tensor | None
    counts: Tensor
    number: Count

    def batch(self, index: int) -> StepInput:
        """Return one of several batches."""
        mask = None if self.mask is None else self.mask[:, index]
        return StepInput(
            self.positions[:, index], self.keys[:, index], mask, self.counts[:, index], self.number
        )

    def of_step(self, index: int) -> StepInput:
        """Return one of several steps."""
        mask = None if self.mask is None else self.mask[index]
        number = self.number[index] if isinstance(self.number, Tensor) else self.number
        return StepInput(self.positions[index], self.keys[index], mask, self.counts[index], number)


@dataclass(frozen=True)
class Shape:
    """What two steps of a phase have in common if one recording serves both.

    Attributes
    ----------
    active : int
        How many clients still train.
    width : int
        How many samples a batch has, padding included.
    masked : bool
        Whether some of them are padding.
    moves : int or None
        Which place in memory z has, if features are frozen.
    """

    active: int
    width: int
    masked: bool
    moves: int | None


@dataclass(frozen=True)
class Span:
    """Consecutive steps of one phase that have the same shape.

    Attributes
    ----------
    turn : int
        Which of the phases of a stretch.
    first, count : int
        The first step, and how many there are.
    shape : Shape
        Of each of them.
    """

    turn: int
    first: int
    count: int
    shape: Shape


class PhaseRun:
    """One phase of one chunk, step by step.

    Parameters
    ----------
    phase : Phase
        The phase.
    chunk : Chunk
        The clients.
    pace : Pace
        Optimizer, learning rate and clipping.
    tapes : Tapes, optional
        Where to record gradients; without one they are computed from Python.
    name : hashable
        Distinguishes phases in the tapes.
    """

    def __init__(
        self,
        phase: Phase,
        chunk: Chunk,
        pace: Pace,
        tapes: Tapes | None = None,
        name: Hashable = None,
    ) -> None:
        self.phase, self.chunk, self.pace = phase, chunk, pace
        moving = select(chunk.params, phase.move)
        self.features_rest = features_rest(chunk, frozenset(moving))
        buffers = frozenset(
            name for name in moving if name.removeprefix(PERSONAL) in chunk.network.buffers
        )
        self.names = tuple(name for name in moving if name not in buffers)
        if not self.names:
            raise InputError(
                f"nothing of {phase.move!r} can be trained: it holds no parameters with "
                "requires_grad on"
            )
        self.params = [chunk.params[name] for name in self.names]
        self.state = pace.optimizer.begin(self.params)
        self.losses = torch.zeros(len(chunk.seen), dtype=torch.float64, device=chunk.seen.device)
        # The task's part of the losses, if a method adds further terms.
        self.task_losses = torch.zeros_like(self.losses) if phase.adds_terms else self.losses
        self._gradients = PhaseGradient(phase, chunk.network, self.names, buffers)
        self._plain = type(phase.gradient) is PlainGradient
        self._penalty = (
            None
            if phase.penalty is None or phase.penalty.vanishes
            else PhasePenalty(phase.penalty, self.names, chunk, added=self._plain)
        )
        self._penalties: Penalties | None = None
        self._room: Room | None = None
        self._tapes, self._name = tapes, name
        self._active = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the phase keeps, besides those of the chunk."""
        own = [tensor for tensors in self.state.values() for tensor in tensors]
        return own if self._penalty is None else [*own, *(self._penalty.linear or ())]

    @property
    def begins_with_parameters(self) -> bool:
        """Whether the phase reads parameters when it begins."""
        return self._penalty is not None and self._penalty.linear is not None

    def begin(self, batches: Batches, frozen: FrozenFeatures | None = None) -> None:
        """Start the phase with new batches, a new optimizer state and no losses.

        With frozen features a step fetches z, and not x.
        """
        if batches.a_step != self.phase.gradient.batches:
            raise InputError(
                f"a Phase with batch='same' looks at {self.phase.gradient.batches} batches a step, "
                f"and the phase before at {batches.a_step}; valid: the same number"
            )
        self.batches = batches if frozen is None else replace(batches, positions=batches.index)
        self._frozen = frozen
        like = self.losses
        # The host does not wait for the device, which may still fill memory for these steps.
        self._counts = torch.from_numpy(batches.counts.astype(np.float64)).to(
            like.device, non_blocking=True
        )
        self._numbers = torch.arange(
            1, int(batches.steps[0]) + 1, dtype=like.dtype, device=like.device
        )
        self.losses.zero_()
        self.task_losses.zero_()
        if self._penalty is not None:
            self._penalty.begin()
        if self.pace.optimizer.stacked:
            for tensors in self.state.values():
                torch._foreach_zero_(tensors)

    def narrow(self, active: int) -> None:
        """Create views of the clients that still train, if their number has changed."""
        if active == self._active:
            return
        self._active = active
        chunk, optimizer, lr = self.chunk, self.pace.optimizer, self.pace.lr
        self._lr = first_rows(lr, active) if isinstance(lr, Tensor) else lr
        fixed = {name: t for name, t in chunk.params.items() if name not in self.names}
        if self._penalty is not None:
            self._penalties, self._room = self._penalty.of(active)
        self._rows = Rows(
            moving=[first_rows(tensor, active) for tensor in self.params],
            fixed=tree_first_rows(fixed, active),
            each=tree_first_rows(chunk.each, active),
            memory={name: tree_first_rows(tree, active) for name, tree in chunk.memory.items()},
            seen=first_rows(chunk.seen, active),
            still=chunk.still,
            sent=dict(chunk.sent),
            round=chunk.round,
            lr=self._lr if self._gradients.follows_rate else None,
            penalties=None if self._plain else self._penalties,
        )
        if self._tapes is not None:
            self._lasting = Apart(self._rows)
        self._state: OptimizerState = (
            {name: [first_rows(t, active) for t in tensors] for name, tensors in self.state.items()}
            if optimizer.stacked
            else self.state
        )

    def step(self, step: int) -> None:
        """Make one step for every client that has not finished."""
        active = self.batches.active(step)
        self.narrow(active)
        self.advance(self._inputs(step, active), step)

    def _inputs(self, step: int, active: int) -> StepInput:
        here = self.batches.of_step(step)
        counts = self.batches.counts[:active, here]
        # No wider than its fullest client.
        positions = self.batches.positions[:active, here][..., : counts.max()]
        mask = None
        if self._padded(counts, positions.shape[-1]):
            mask = self._mask(self._counts[:active, here], positions.shape[-1])
        return StepInput(
            positions, self.batches.keys[:active, here], mask, self._counts[:active, here], step + 1
        )

    def shape_of(self, step: int) -> Shape:
        """Return the shape of a step. All steps have one width, except those of a single client."""
        active = self.batches.active(step)
        counts = self.batches.counts[:active, self.batches.of_step(step)]
        width = int(counts.max()) if active == 1 else self.batches.positions.shape[-1]
        moves = None if self._frozen is None else self._frozen.moves
        return Shape(active, width, self._padded(counts, width), moves)

    def inputs_of(self, span: Span) -> StepInput:
        """Return the inputs of all steps of a span."""
        shape, together = span.shape, self.batches.a_step
        here = slice(span.first * together, (span.first + span.count) * together)

        def cut(rows: Tensor) -> Tensor:
            rows = rows[: shape.active, here]
            by_step = rows if together == 1 else rows.unflatten(1, (span.count, together))
            return by_step.movedim(1, 0)

        counts = cut(self._counts)
        mask = self._mask(counts, shape.width) if shape.masked else None
        positions = cut(self.batches.positions)[..., : shape.width]
        numbers = self._numbers[span.first : span.first + span.count]
        return StepInput(positions, cut(self.batches.keys), mask, counts, numbers)

    def _padded(self, counts: NDArray[np.int64], width: int) -> bool:
        """Return whether some client of a step has fewer samples than the batch is wide."""
        alone = counts.shape[0] == 1 and self.batches.a_step == 1
        return not alone and bool((counts < width).any())

    def _mask(self, counts: Tensor, width: int) -> Tensor:
        slots = torch.arange(width, device=counts.device)
        return (slots < counts.unsqueeze(-1)).to(self.chunk.network.dtype)

    def advance(self, inputs: StepInput, step: int) -> None:
        """Make a step with tensor operations only, so that a GPU can replay them."""
        active, together = self._active, self.batches.a_step
        found = self._gradient(inputs, step)
        with torch.no_grad():
            losses = self._descend(found.gradients, inputs.number, found.losses)
            for name, new in found.statistics.items():
                self._rows.fixed[name].copy_(new)
            samples = inputs.counts if together == 1 else inputs.counts.sum(1)
            # In float64, to which all of them are converted.
            self.losses[:active].addcmul_(losses, samples)
            if self.phase.adds_terms:
                self.task_losses[:active].addcmul_(found.task_losses, samples)

    def _descend(self, gradients: list[Any], number: Count, losses: Tensor) -> Tensor:
        """Make a step of the optimizer, and return losses with the penalty before the step."""
        params, optimizer = self._rows.moving, self.pace.optimizer
        penalties = self._penalties if self._plain else None
        if penalties is not None and isinstance(optimizer, Sgd) and self._uses_kernels():
            return losses + optimizer.penalized_step(
                params, gradients, self._state, self._lr, number, penalties
            )
        if penalties is not None:
            values, gradients = penalties.added_to(gradients, params, self._room)
            losses = losses + values
        if self.pace.clip is not None:
            gradients = _clip(gradients, self.pace.clip, stacked=self._active > 1)
        optimizer.step(params, gradients, self._state, self._lr, number)
        return losses

    def _gradient(self, inputs: StepInput, step: int) -> StepGradient:
        """Return the gradient of a step, from a tape if there is one."""
        together = self.batches.a_step
        batches = [inputs] if together == 1 else [inputs.batch(index) for index in range(together)]
        look = Look(
            self.phase.losses_in(step), self._active > 1, self._frozen, self._may_factor(inputs)
        )
        program = partial(self._gradients, look)
        given = [self._batch(batch) for batch in batches]
        if self._tapes is None:
            return program(self._rows, given)
        lr = None if isinstance(self._rows.lr, Tensor) else self._rows.lr
        moves = None if self._frozen is None else self._frozen.moves
        name = self._name, step % self.phase.turns, look.stacked, moves, lr
        return self._tapes.carry_out(name, program, self._lasting, given)

    def _may_factor(self, inputs: StepInput) -> bool:
        """Return whether gradients by weights may be left as factors for the optimizer.

        Only for recorded steps, because the graph of the losses is examined from Python.
        """
        recorded = isinstance(inputs.number, Tensor)
        return recorded and self._active > 1 and self._uses_kernels()

    def _uses_kernels(self) -> bool:
        """Return whether GPU kernels make the steps, with gradients as the losses have them."""
        optimizer = self.pace.optimizer
        return (
            self._plain
            and self.pace.clip is None
            and type(optimizer) is Sgd
            and self.chunk.network.dtype == torch.float32
            and optimizer.uses_kernels(self._lr)
        )

    def _batch(self, inputs: StepInput) -> Batch:
        """Fetch a batch, and augment it."""
        x, y = (self._frozen or self.chunk.data).fetch(inputs.positions)
        if self.chunk.augment:
            x, y = self._augmented(x, y, inputs.keys)
        x, y, where, key = (
            first_rows(tensor, self._active) for tensor in (x, y, inputs.positions, inputs.keys)
        )
        mask = None if inputs.mask is None else first_rows(inputs.mask, self._active)
        return Batch(x, y, where, mask, key)

    def _augmented(self, x: Tensor, y: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Augment the images of a batch, and their masks if pixels move."""
        samples = torch.arange(x.shape[1], device=x.device)
        images, targets = x.flatten(0, 1), y.flatten(0, 1)
        for index, augmentation in enumerate(self.chunk.augment):
            own_keys = fold_tensor(keys.unsqueeze(1), Purpose.AUGMENT, index, samples).flatten()
            images = augmentation(images, own_keys)
            if self.chunk.network.task.spatial and moves_pixels(augmentation):
                targets = augmentation(targets.unsqueeze(1), own_keys).squeeze(1)
        return images.view_as(x), targets.view_as(y)


def _clip(gradients: list[Tensor], limit: float, *, stacked: bool) -> list[Tensor]:
    """Clip each client's gradient, like ``torch.nn.utils.clip_grad_norm_``."""
    return scaled(gradients, (limit / (norms(gradients, stacked=stacked) + 1e-6)).clamp(max=1.0))
