"""The gradient of one step of local training, as a function of tensors.

Everything that differs from step to step is an argument, so that the operations of a step can be
recorded and repeated: see :mod:`equipoise.engine.tape`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from equipoise.client import Client
from equipoise.engine.frozen import FrozenFeatures
from equipoise.engine.network import Network
from equipoise.engine.stack import in_plain_words, over_clients
from equipoise.errors import InputError
from equipoise.masked import masked_mean
from equipoise.method import FollowsRate, Loss, Phase, Value
from equipoise.models.passes import Forward
from equipoise.optimizers import Column
from equipoise.optimizers.penalties import Penalties
from equipoise.phases import PLAIN_LOSSES
from equipoise.tree import Tree


class Batch(NamedTuple):
    """A batch of every client that still trains; that of a single client has no axis of clients.

    Attributes
    ----------
    x, y : Tensor
        Samples, or z if features are frozen, and targets.
    where : Tensor
        Positions of the samples.
    mask : Tensor or None
        Which rows are samples; ``None`` if all are.
    key : Tensor
        Key of random numbers.
    """

    x: Tensor
    y: Tensor
    where: Tensor
    mask: Tensor | None
    key: Tensor


class Rows(NamedTuple):
    """What the gradient of a step depends on besides batches, for the clients that still train.

    Attributes
    ----------
    moving : list of Tensor
        The parameters that are trained.
    fixed : Tree
        The client's other parameters and buffers.
    each, memory, seen, sent, round
        As a :class:`~equipoise.client.Client` sees them.
    still : Tree
        Parameters and buffers that all clients share.
    lr : float, Tensor or None
        The learning rate, if the gradient depends on it.
    penalties : Penalties or None
        The penalty, if it is part of the losses that the gradient rule gets.
    """

    moving: list[Tensor]
    fixed: Tree
    each: Tree
    memory: dict[str, Tree]
    seen: Tensor
    still: Tree
    sent: dict[str, Tree]
    round: Tensor
    lr: Column | None
    penalties: Penalties | None


class StepGradient(NamedTuple):
    """The gradient of a step.

    Attributes
    ----------
    losses, task_losses : Tensor
        Every client's loss, and the task's part of it.
    gradients : list of Tensor
        One per parameter; on a GPU some may be factors.
    statistics : Tree
        New BatchNorm statistics.
    """

    losses: Tensor
    task_losses: Tensor
    gradients: list[Any]
    statistics: Tree


class Look(NamedTuple):
    """How a step looks at its batches.

    Attributes
    ----------
    losses : tuple of callable
        The loss of each batch.
    stacked : bool
        Whether there are several clients.
    frozen : FrozenFeatures or None
        Where z of samples is, if features are frozen.
    factored : bool
        Whether gradients by weights may be left as factors.
    """

    losses: tuple[Loss, ...]
    stacked: bool
    frozen: FrozenFeatures | None
    factored: bool


@dataclass(frozen=True)
class _Noted:
    """What the forward passes of a step leave behind.

    Attributes
    ----------
    task_losses : dict
        Losses and the task's part of them, by where the losses are in memory: a gradient rule
        returns the losses of one of its passes. They are kept, so that other tensors of the step do
        not reuse their memory.
    statistics : Tree
        New BatchNorm statistics.
    """

    task_losses: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    statistics: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class PhaseGradient:
    """How the steps of a phase compute their gradients.

    Parameters
    ----------
    phase : Phase
        The phase.
    network : Network
        The model.
    names : tuple of str
        Names of the parameters that are trained.
    buffers : frozenset of str
        Names of the buffers that follow the training.
    """

    phase: Phase
    network: Network
    names: tuple[str, ...]
    buffers: frozenset[str]

    @cached_property
    def moving(self) -> frozenset[str]:
        """Names of all that changes."""
        return self.buffers.union(self.names)

    @cached_property
    def follows_rate(self) -> bool:
        """Whether the gradient depends on the learning rate."""
        # Asked once: whether an object has the methods of a protocol takes Python long to say.
        return isinstance(self.phase.gradient, FollowsRate)

    def __call__(self, look: Look, rows: Rows, batches: list[Batch]) -> StepGradient:
        """Return the gradient at the current parameters."""
        noted = _Noted()
        values = [
            self._value(look, loss, rows, batch, noted)
            for loss, batch in zip(look.losses, batches, strict=True)
        ]
        losses, gradients = self._gradient(look, values, rows)
        _, task_losses = noted.task_losses.get(losses.data_ptr(), (losses, losses))
        statistics = {name: new.detach() for name, new in noted.statistics.items()}
        return StepGradient(losses.detach(), task_losses.detach(), gradients, statistics)

    def _value(self, look: Look, loss: Loss, rows: Rows, batch: Batch, noted: _Noted) -> Value:
        """Return the losses on a batch as a function of the parameters that are trained."""
        of_one = partial(self._of_one_client, look, loss, rows)
        of_all = over_clients(of_one) if look.stacked else of_one

        def value(moving: list[Tensor]) -> Tensor:
            stacks = rows.fixed, rows.each, rows.memory, rows.seen, batch
            with in_plain_words(f"the loss {_named(loss)}"):
                losses, task_losses, statistics = of_all(moving, *stacks)
            if rows.penalties is not None:
                task_losses = losses if task_losses is None else task_losses
                losses = losses + rows.penalties.values(moving)
            if task_losses is not None:
                noted.task_losses[losses.data_ptr()] = losses, task_losses
            # BatchNorm statistics follow the step's first forward pass only, however often a
            # gradient rule looks again.
            if not noted.statistics:
                noted.statistics.update(statistics)
            return losses

        return value

    def _gradient(self, look: Look, values: list[Value], rows: Rows) -> tuple[Tensor, list[Any]]:
        """Return the losses of a step, and one gradient per parameter."""
        if look.factored:
            # Imported here, because it needs Triton.
            from equipoise.models import factored

            return factored.gradient(values[0], rows.moving)
        gradient = self.phase.gradient
        if self.follows_rate:
            gradient = gradient.at_rate(rows.lr)  # type: ignore[attr-defined]
        return gradient(values, rows.moving)

    def _of_one_client(
        self,
        look: Look,
        loss: Loss,
        rows: Rows,
        moving: list[Tensor],
        fixed: Tree,
        each: Tree,
        memory: dict[str, Tree],
        seen: Tensor,
        batch: Batch,
    ) -> tuple[Tensor, Tensor | None, Tree]:
        """Return a client's mean loss, the task's loss if it differs, and BatchNorm statistics."""
        x, y, where, mask, key = batch
        client = Client(
            network=self.network,
            params={**rows.still, **fixed, **dict(zip(self.names, moving, strict=True))},
            x=x if look.frozen is None else look.frozen.batch(x, where),
            y=y,
            forward=Forward(
                train=True, mask=mask, key=key, stacked=look.stacked, factored=look.factored
            ),
            sent=rows.sent,
            each=each,
            memory=memory,
            seen=seen,
            round=rows.round,
            moving=self.moving,
        )
        recorded: Tree = {}
        client.recording(recorded)
        values = loss(client if loss in PLAIN_LOSSES else client.noting({}))
        if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
            what = (
                f"values of shape {tuple(values.shape)}"
                if isinstance(values, Tensor)
                else repr(values)
            )
            raise InputError(
                f"the loss {_named(loss)} returned {what} for {len(y)} samples; valid: one value "
                f"per sample, of shape ({len(y)},), so that padding can be left out"
            )
        task_loss = client.task_loss_of_step()
        of_task = None if task_loss is None else masked_mean(task_loss, mask)
        statistics = {n: value for n, value in recorded.items() if n in self.buffers}
        return masked_mean(values, mask), of_task, statistics


def _named(loss: Loss) -> str:
    return str(getattr(loss, "__qualname__", loss))
