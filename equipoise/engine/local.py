"""Local training of a chunk of clients, stacked on a leading axis.

A chunk is trained as one tensor program: ``torch.func.vmap`` over the loss of one client, one backward pass for all of
them, one optimizer step on the stack. Clients are ordered by falling number of steps, so those still training are always
the first rows, and views of those rows are all that is needed to let the others rest. A single client is not stacked
at all: the same code then is the plain PyTorch loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from equipoise.engine.batches import Batches
from equipoise.engine.client import Client, Finished
from equipoise.engine.data import DeviceData
from equipoise.engine.network import Network
from equipoise.engine.optimizers import Column, Optimizer, OptimizerState
from equipoise.engine.random import Purpose, fold_tensor
from equipoise.data.augment import Augmentation
from equipoise.method import LocalRule, Phase
from equipoise.models.layers import Forward
from equipoise.tree import PERSONAL, Tree, select


def rows(tensor: Tensor, count: int) -> Tensor:
    """View the first rows of a stack; a single row loses the leading axis, and with it the need for ``vmap``.

    Examples
    --------
    >>> rows(torch.zeros(3, 2), 2).shape, rows(torch.zeros(3, 2), 1).shape
    (torch.Size([2, 2]), torch.Size([2]))
    """
    return tensor[0] if count == 1 else tensor[:count]


def tree_rows(tree: Mapping[str, Tensor], count: int) -> Tree:
    """Do what :func:`rows` does, for every tensor of a tree."""
    return {name: rows(tensor, count) for name, tensor in tree.items()}


@dataclass(frozen=True)
class Chunk:
    """Clients that train together, and all they need.

    Attributes
    ----------
    params : Tree
        Parameters and buffers that move or are kept, stacked; trained in place.
    still : Tree
        Those that neither move nor are kept: one copy for all.
    sent, each, memory, seen
        As a :class:`~equipoise.engine.client.Client` sees them; all but ``sent`` are stacked.
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


@dataclass(frozen=True)
class Pace:
    """How steps are made in this round: the optimizer, its learning rate (perhaps a column) and the gradient limit."""

    optimizer: Optimizer
    lr: Column
    clip: float | None


class PhaseRun:
    """One phase of one chunk, step by step."""

    def __init__(self, phase: Phase, batches: Batches, chunk: Chunk, pace: Pace) -> None:
        self.phase, self.batches, self.chunk, self.pace = phase, batches, chunk, pace
        moving = select(chunk.params, phase.move)
        self.moving = frozenset(moving)
        buffers = {name for name in moving if name.removeprefix(PERSONAL) in chunk.network.buffers}
        self.names = [name for name in moving if name not in buffers]
        self.moving_buffers = buffers
        self.params = [chunk.params[name] for name in self.names]
        self.state = pace.optimizer.begin(self.params)
        self.losses = torch.zeros(len(chunk.seen), dtype=torch.float64, device=chunk.seen.device)
        self._active = 0

    def _narrow(self, active: int) -> None:
        """Take views of the clients still training; only needed when their number changes."""
        self._active = active
        chunk = self.chunk
        self._moving_rows = [rows(tensor, active) for tensor in self.params]
        moved = {*self.names}
        self._fixed_rows = {n: rows(tensor, active) for n, tensor in chunk.params.items() if n not in moved}
        self._each = tree_rows(chunk.each, active)
        self._memory = {name: tree_rows(tree, active) for name, tree in chunk.memory.items()}
        self._seen = rows(chunk.seen, active)
        optimizer, lr = self.pace.optimizer, self.pace.lr
        self._lr = rows(lr, active) if isinstance(lr, Tensor) else lr
        self._state: OptimizerState = (
            {name: [rows(t, active) for t in tensors] for name, tensors in self.state.items()}
            if optimizer.stacked
            else self.state
        )

    def step(self, step: int) -> None:
        """Make one step of every client that has not finished."""
        active = self.batches.active(step)
        if active != self._active:
            self._narrow(active)
        counts = self.batches.counts[:active, step]
        x, y, mask, key = self._batch(step, active, counts)
        recorded: Tree = {}

        def of_one_client(
            moving: list[Tensor],
            fixed: Tree,
            x: Tensor,
            y: Tensor,
            mask: Tensor | None,
            each: Tree,
            memory: dict[str, Tree],
            seen: Tensor,
            key: Tensor,
        ) -> tuple[Tensor, Tree]:
            client = Client(
                network=self.chunk.network,
                params={**self.chunk.still, **fixed, **dict(zip(self.names, moving, strict=True))},
                x=x,
                y=y,
                forward=Forward(train=True, mask=mask, key=key),
                sent=self.chunk.sent,
                each=each,
                memory=memory,
                seen=seen,
                moving=frozenset(self.names),
            )
            values = self.phase.loss(client)
            mean = values.mean() if mask is None else (values * mask).sum() / mask.sum()
            return mean, {name: value for name, value in client.recorded.items() if name in self.moving_buffers}

        across = (0, 0, 0, 0, None if mask is None else 0, 0, 0, 0, 0)
        of_all = of_one_client if active == 1 else vmap(of_one_client, in_dims=across)

        def value(moving: list[Tensor]) -> Tensor:
            losses, buffers = of_all(
                moving, self._fixed_rows, x, y, mask, self._each, self._memory, self._seen, key
            )
            # BatchNorm statistics follow the step's first forward pass only, however often a gradient rule looks again.
            if not recorded:
                recorded.update(buffers)
            return losses

        losses, gradients = self.phase.gradient(value, self._moving_rows)
        with torch.no_grad():
            if self.pace.clip is not None:
                gradients = _clip(gradients, self.pace.clip, stacked=active > 1)
            self.pace.optimizer.step(self._moving_rows, gradients, self._state, self._lr, step + 1)
            for name, new in recorded.items():
                self._fixed_rows[name].copy_(new.detach())
            self.losses[:active] += losses.double() * torch.from_numpy(counts).to(losses.device)

    def _batch(
        self, step: int, active: int, counts: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        positions = self.batches.positions[:active, step]
        keys = self.batches.keys[:active, step]
        if active == 1:
            # One client needs no padding: its last batch is simply shorter.
            positions = positions[:, : counts[0]]
        x, y = self.chunk.data.fetch(positions)
        if self.chunk.augment:
            x = self._augmented(x, keys)
        full = active == 1 or bool((counts == positions.shape[1]).all())
        if full:
            return rows(x, active), rows(y, active), None, rows(keys, active)
        inside = torch.arange(positions.shape[1], device=x.device) < torch.from_numpy(counts).to(x.device).unsqueeze(1)
        return x, y, inside.to(self.chunk.network.dtype), keys

    def _augmented(self, x: Tensor, keys: Tensor) -> Tensor:
        samples = torch.arange(x.shape[1], device=x.device)
        flat = x.flatten(0, 1)
        for index, augmentation in enumerate(self.chunk.augment):
            flat = augmentation(flat, fold_tensor(keys.unsqueeze(1), Purpose.AUGMENT, index, samples).flatten())
        return flat.view_as(x)


def _clip(gradients: list[Tensor], limit: float, *, stacked: bool) -> list[Tensor]:
    """Shorten each client's gradient to the limit, by the formula of ``torch.nn.utils.clip_grad_norm_``."""
    squares = [g.square().flatten(1).sum(1) if stacked and g.dim() > 1 else g.square() for g in gradients]
    norm = torch.stack([s if stacked else s.sum() for s in squares]).sum(0).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    return [g * (factor.view(-1, *(1,) * (g.dim() - 1)) if stacked else factor) for g in gradients]


def train_chunk(chunk: Chunk, rule: LocalRule, batches: Sequence[Batches], paces: Sequence[Pace]) -> tuple[Tensor, Tensor]:
    """Carry out a local rule for a chunk; its parameters are trained in place.

    Parameters
    ----------
    chunk : Chunk
        The clients.
    rule : LocalRule
        Whose phases to run.
    batches, paces : sequence
        One of each a phase.

    Returns
    -------
    tuple
        Every client's mean training loss over all samples it saw, and the steps it made; ``[clients]``, float64.
    """
    runs = [PhaseRun(*arguments, chunk, pace) for *arguments, pace in zip(rule.phases(), batches, paces, strict=True)]
    lengths = [int(b.steps[0]) for b in batches]
    if rule.interleaved:
        turns = [(run, step) for step in range(max(lengths)) for run, n in zip(runs, lengths, strict=True) if step < n]
    else:
        turns = [(run, step) for run, n in zip(runs, lengths, strict=True) for step in range(n)]
    current = None
    for run, step in turns:
        if run is not current:
            chunk.network.freeze_statistics_except(name.removeprefix(PERSONAL) for name in run.moving)
            current = run
        run.step(step)
    seen_samples = sum((np.where(_made(b), b.counts, 0).sum(1) for b in batches), np.zeros(len(chunk.seen)))
    steps = sum((b.steps for b in batches), np.zeros(len(chunk.seen)))
    losses = torch.stack([run.losses for run in runs]).sum(0) / torch.from_numpy(seen_samples).to(chunk.seen.device)
    return losses, torch.from_numpy(steps)


def _made(batches: Batches) -> NDArray[np.bool_]:
    return np.arange(batches.counts.shape[1]) < batches.steps[:, None]


def finish_chunk(chunk: Chunk, rule: LocalRule, steps: Tensor, lr: Column) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Let every client of a trained chunk make its new memory and its uploads, both stacked."""
    if type(rule).finish is LocalRule.finish:
        return {}, {}
    like = chunk.seen
    dtype = chunk.network.dtype
    count = steps.to(device=like.device, dtype=dtype)
    rates = lr.to(dtype) if isinstance(lr, Tensor) else torch.full_like(count, lr)

    def of_one_client(
        params: Tree, each: Tree, memory: dict[str, Tree], seen: Tensor, steps: Tensor, lr: Tensor
    ) -> tuple[dict[str, Tree], dict[str, Tree]]:
        return rule.finish(Finished({**chunk.still, **params}, chunk.sent, each, memory, seen, steps, lr))

    finished: tuple[dict[str, Tree], dict[str, Tree]] = vmap(of_one_client)(
        chunk.params, chunk.each, chunk.memory, chunk.seen, count, rates
    )
    return finished
