"""Local training of a chunk of clients, stacked on a leading axis.

A chunk is trained as one tensor program: ``torch.func.vmap`` over the loss of one client, one
backward pass for all of them, one optimizer step on the stack. Clients are ordered by falling
number of steps, so those still training are always the first rows, and a step is taken on views of
those rows. A single client is not stacked at all: the same code then is the plain PyTorch loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map as tree_map_any

from equipoise.client import Finished
from equipoise.data.augment import Augmentation, moves_pixels
from equipoise.engine.batches import Batches
from equipoise.engine.data import DeviceData
from equipoise.engine.frozen import FrozenFeatures, features_rest
from equipoise.engine.gradients import Batch, Look, PhaseGradient, Rows, StepGradient
from equipoise.engine.memory import checked_memory
from equipoise.engine.network import Network
from equipoise.engine.replay import STEPS_A_GRAPH, Inputs, Replay
from equipoise.engine.stack import first_rows, in_plain_words, tree_first_rows
from equipoise.engine.tape import Tapes
from equipoise.errors import InputError
from equipoise.host_copy import HostCopy
from equipoise.method import LocalRule, Phase, PlainGradient, Reports
from equipoise.optimizers import Column, Count, Optimizer, OptimizerState, Sgd
from equipoise.random import Purpose, fold_tensor
from equipoise.stacks import copy_all
from equipoise.tree import PERSONAL, Tree, norms, scaled, select

# For how many shapes of chunks a GPU keeps tensors and recorded steps, and how much memory these
# tensors may take, over that of the graphs' pool.
MOST_SHAPES, SHAPES_TO_POOL = 64, 0.5


@dataclass(frozen=True)
class Chunk:
    """Clients that train together, and everything that they need.

    Attributes
    ----------
    params : Tree
        Parameters and buffers that are trained or kept, stacked; they are updated in place.
    still : Tree
        Parameters and buffers that are neither trained nor kept: one copy for all.
    sent, each, memory, seen, round
        As a :class:`~equipoise.client.Client` sees them; all but ``sent`` and ``round`` are
        stacked.
    """

    network: Network
    data: DeviceData
    augment: tuple[Augmentation, ...]
    params: Tree
    still: Tree
    sent: Mapping[str, Tree]
    each: Tree
    memory: dict[str, Tree]
    seen: Tensor
    round: Tensor


@dataclass(frozen=True)
class Pace:
    """Optimizer, learning rate (a number or a column) and gradient clipping of a round."""

    optimizer: Optimizer
    lr: Column
    clip: float | None


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
        self._tapes, self._name = tapes, name
        self._active = 0

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
        )
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
        gradients = found.gradients
        with torch.no_grad():
            if self.pace.clip is not None:
                gradients = _clip(gradients, self.pace.clip, stacked=active > 1)
            self.pace.optimizer.step(
                self._rows.moving, gradients, self._state, self._lr, inputs.number
            )
            for name, new in found.statistics.items():
                self._rows.fixed[name].copy_(new)
            samples = inputs.counts if together == 1 else inputs.counts.sum(1)
            self.losses[:active] += found.losses.double() * samples
            if self.phase.adds_terms:
                self.task_losses[:active] += found.task_losses.double() * samples

    def _gradient(self, inputs: StepInput, step: int) -> StepGradient:
        """Return the gradient of a step, from a tape if there is one."""
        together = self.batches.a_step
        batches = [inputs] if together == 1 else [inputs.batch(index) for index in range(together)]
        look = Look(
            self.phase.losses_in(step), self._active > 1, self._frozen, self._may_factor(inputs)
        )
        program = partial(self._gradients, look)
        given = self._rows, [self._batch(batch) for batch in batches]
        if self._tapes is None:
            return program(given)
        lr = None if isinstance(self._rows.lr, Tensor) else self._rows.lr
        moves = None if self._frozen is None else self._frozen.moves
        name = self._name, step % self.phase.turns, look.stacked, moves, lr
        return self._tapes.carry_out(name, program, given)

    def _may_factor(self, inputs: StepInput) -> bool:
        """Return whether gradients by weights may be left as factors for the optimizer.

        They must go to it as they are. Only for recorded steps, because the graph of the losses is
        examined from Python.
        """
        recorded = isinstance(inputs.number, Tensor)
        optimizer = self.pace.optimizer
        return (
            recorded
            and self._active > 1
            and self.pace.clip is None
            and type(self.phase.gradient) is PlainGradient
            and type(optimizer) is Sgd
            and self.chunk.network.dtype == torch.float32
            and optimizer.takes_factors(self._lr)
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
        states = [state for run in self.runs for state in run.state.values()]
        tensors = [*_tensors(self.chunk, self.paces), *(t for state in states for t in state)]
        return sum(tensor.nbytes for tensor in tensors)

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
                for block in _blocks(_spans(runs, turns)):
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
        """Group consecutive phases that all train the features, or all do not."""
        if self.rule.interleaved:
            return [runs]
        return [list(alike) for _, alike in groupby(runs, key=lambda pair: pair[0].features_rest)]

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
        copy_all(_tensors(self.chunk, self.paces), _tensors(chunk, paces))


_NUMBERS = count()


def _is_hashable(rule: LocalRule) -> bool:
    """Return whether a rule can be a key. One of the user's own may be a mutable dataclass."""
    try:
        hash(rule)
    except TypeError:
        return False
    return True


def _spans(runs: Sequence[PhaseRun], turns: Iterable[tuple[int, int]]) -> Iterator[Span]:
    """Join consecutive steps of the same phase and shape, up to as many as a recording holds."""
    last: Span | None = None
    for step, turn in turns:
        shape = runs[turn].shape_of(step)
        if last is not None:
            follows = (last.turn, last.shape, last.first + last.count) == (turn, shape, step)
            if follows and last.count < STEPS_A_GRAPH:
                last = replace(last, count=last.count + 1)
                continue
            yield last
        last = Span(turn, step, 1, shape)
    if last is not None:
        yield last


def _blocks(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Divide spans into blocks, each of which one recording can hold.

    A block ends where the clients of a phase become fewer, so that blocks come again also where
    clients differ.
    """
    block: list[Span] = []
    active: dict[int, int] = {}
    for span in spans:
        full = sum(each.count for each in block) + span.count > STEPS_A_GRAPH
        if block and (full or active.get(span.turn, span.shape.active) != span.shape.active):
            yield block
            block, active = [], {}
        block.append(span)
        active[span.turn] = span.shape.active
    if block:
        yield block


def _tensors(chunk: Chunk, paces: Sequence[Pace]) -> list[Tensor]:
    """Return every tensor that a chunk's training depends on."""
    trees = (chunk.params, chunk.still, chunk.sent, chunk.each, chunk.memory)
    rates = [pace.lr for pace in paces if isinstance(pace.lr, Tensor)]
    return [*_leaves(trees), *rates, chunk.seen, chunk.round]


def _leaves(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of nested dictionaries and sequences.

    PyTorch's ``tree_leaves`` also knows other containers, but takes ten times as long.
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)


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
        shapes = tuple(tensor.shape for tensor in _tensors(chunk, paces))
        key = (rule, optimizers, len(chunk.seen), tuple(chunk.params), shapes)
        if key not in self._trainings:
            self._make_room(sum(tensor.nbytes for tensor in _tensors(chunk, paces)), replay)
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


def finish_chunk(
    chunk: Chunk, rule: LocalRule, steps: Tensor, lr: Column
) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Return the new memory and the uploads of every client of a trained chunk, both stacked."""
    if type(rule).finish is LocalRule.finish:
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
