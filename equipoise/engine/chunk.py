"""A chunk of clients that train together, and the pace at which they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equipoise.data.augment import Augmentation
from equipoise.engine.data import DeviceData
from equipoise.engine.network import Network
from equipoise.optimizers import Column, Optimizer
from equipoise.tree import Tree


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


def tensors_of(chunk: Chunk, paces: Sequence[Pace]) -> list[Tensor]:
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
