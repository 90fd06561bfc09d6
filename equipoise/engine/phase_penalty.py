"""The penalty of a phase on the parameters of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise import reused_memory
from equipoise.client import Client, shared_names
from equipoise.engine.chunk import Chunk
from equipoise.engine.stack import first_rows, in_plain_words, over_clients, tree_first_rows
from equipoise.errors import InputError
from equipoise.method import Penalty
from equipoise.models.passes import Forward
from equipoise.optimizers.penalties import Penalties, Room
from equipoise.samples import kind_of
from equipoise.stacks import copy_all
from equipoise.tree import Tree

_LINEAR = "linear of a Penalty"


class PhasePenalty:
    """The tensors of a penalty. They stay in place, so that recorded steps can read them.

    Parameters
    ----------
    penalty : Penalty
        The penalty. It must not vanish.
    names : sequence of str
        Names of the parameters that are trained.
    chunk : Chunk
        The clients.
    added : bool
        Whether its gradient is added to that of the losses.

    Attributes
    ----------
    linear : list of Tensor or None
        v of all clients, one tensor per parameter.
    """

    def __init__(
        self, penalty: Penalty, names: Sequence[str], chunk: Chunk, *, added: bool
    ) -> None:
        self._penalty, self._chunk, self._moving = penalty, chunk, frozenset(names)
        self._shared = list(shared_names(names))
        received = chunk.sent["model"]
        self._anchors = [received[name] for name in self._shared]
        params = [chunk.params[name] for name in names]
        self.linear = (
            None
            if penalty.linear is None
            else [reused_memory.empty(p.shape, p.dtype, p.device) for p in params]
        )
        # On a CPU, making new memory for sums in every step would take longer than the additions.
        self._sums: Tensor | None = None
        if added and params[0].device.type == "cpu":
            numbers = sum(anchor.numel() for anchor in self._anchors)
            self._sums = reused_memory.empty((len(chunk.seen), numbers), params[0].dtype)

    def begin(self) -> None:
        """Compute v for the clients that are now in the chunk."""
        if self._penalty.linear is None or self.linear is None:
            return  # v is 0.
        chunk, clients = self._chunk, len(self._chunk.seen)
        of_one = partial(self._linear_of_one, self._penalty.linear)
        of_all = of_one if clients == 1 else over_clients(of_one)
        with torch.no_grad(), in_plain_words(_LINEAR):
            found = of_all(
                tree_first_rows(chunk.params, clients),
                tree_first_rows(chunk.each, clients),
                {name: tree_first_rows(tree, clients) for name, tree in chunk.memory.items()},
                first_rows(chunk.seen, clients),
            )
            copy_all([first_rows(tensor, clients) for tensor in self.linear], found)

    def of(self, active: int) -> tuple[Penalties, Room | None]:
        """Return the penalty on the parameters of the first clients, and room for sums."""
        linear = self.linear and [first_rows(tensor, active) for tensor in self.linear]
        penalties = Penalties(float(self._penalty.strength), self._anchors, linear)
        if self._sums is None:
            return penalties, None
        return penalties, penalties.room_in(first_rows(self._sums, active))

    def _linear_of_one(
        self,
        linear: Callable[[Client], Tree],
        params: Tree,
        each: Tree,
        memory: dict[str, Tree],
        seen: Tensor,
    ) -> list[Tensor]:
        """Return v of a client."""
        chunk = self._chunk
        client = Client(
            network=chunk.network,
            params={**chunk.still, **params},
            x=None,
            y=None,
            forward=Forward(train=False),
            sent=chunk.sent,
            each=each,
            memory=memory,
            seen=seen,
            round=chunk.round,
            moving=self._moving,
        )
        found = linear(client)
        return [
            _checked(found, name, anchor)
            for name, anchor in zip(self._shared, self._anchors, strict=True)
        ]


def _checked(found: Any, name: str, like: Tensor) -> Tensor:
    """Return a tensor of v, or refuse what a user's function has returned instead."""
    in_a_tree = isinstance(found, Mapping)
    given = found.get(name) if in_a_tree else None
    if isinstance(given, Tensor) and given.shape == like.shape:
        return given
    what = kind_of(found)
    if in_a_tree:
        what = f"{kind_of(given) if name in found else 'nothing'} for {name}"
    raise InputError(
        f"{_LINEAR} returned {what}; valid: a tree with a tensor of shape {list(like.shape)} for "
        f"{name}, and one for every other parameter that the phase trains"
    )
