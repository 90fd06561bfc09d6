"""Sums over clients' samples, for questions and facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from equipoise.client import Client
from equipoise.engine.chunk import Chunk
from equipoise.engine.chunking import samples_a_pass
from equipoise.engine.data import DeviceData
from equipoise.engine.memory import Memory
from equipoise.engine.network import Network
from equipoise.engine.stack import first_rows, in_plain_words, passes, tree_first_rows
from equipoise.errors import InputError
from equipoise.federation import Split
from equipoise.models.passes import Forward
from equipoise.tree import Tree


@dataclass(frozen=True)
class Asked:
    """The clients of a question, and everything that their answers may depend on.

    Attributes
    ----------
    network, data
        The model and the samples.
    split : Split
        The split with the samples.
    clients : int array
        The clients.
    keys : Tensor
        A random key for each client.
    params : Tree
        Parameters and buffers that differ between clients, stacked in the order of ``clients``.
    still : Tree
        Parameters and buffers that are the same for all clients.
    sent, each, memory, seen, round
        As in :class:`~equipoise.client.Client`; all except ``sent`` and ``round`` are stacked.
    """

    network: Network
    data: DeviceData
    split: Split
    clients: NDArray[np.int64]
    keys: Tensor
    params: Tree
    still: Tree
    sent: Mapping[str, Tree]
    each: Tree
    memory: Memory
    seen: Tensor
    round: Tensor


def asked_of(
    chunk: Chunk,
    split: Split,
    clients: NDArray[np.int64],
    keys: Tensor,
    params: Tree,
    still: Tree,
) -> Asked:
    """Return the clients of a chunk as those of a question.

    Parameters
    ----------
    chunk : Chunk
        The clients, with what they have received and remember.
    split, clients, params, still
        As in :class:`Asked`. The models may be others than those of the chunk.
    keys : Tensor
        A random key for each client, on any device.
    """
    return Asked(
        network=chunk.network,
        data=chunk.data,
        split=split,
        clients=clients,
        keys=keys.to(chunk.network.device),
        params=params,
        still=still,
        sent=chunk.sent,
        each=chunk.each,
        memory=chunk.memory,
        seen=chunk.seen,
        round=chunk.round,
    )


def part_of(chunk: Chunk, where: Tensor) -> Chunk:
    """Return some of a chunk's clients, by their positions."""

    def chosen(tree: Mapping[str, Tensor]) -> Tree:
        return {name: stack[where.to(stack.device)] for name, stack in tree.items()}

    return replace(
        chunk,
        params=chosen(chunk.params),
        each=chosen(chunk.each),
        memory={name: chosen(tree) for name, tree in chunk.memory.items()},
        seen=chunk.seen[where.to(chunk.seen.device)],
    )


@torch.no_grad()
def sums_over_samples(asked: Asked, question: Callable[[Client], Any], what: str) -> Any:
    """Call a question on clients' samples batch by batch, and sum its results.

    Memory depends on the size of a pass (:func:`~equipoise.engine.chunking.samples_a_pass`), not on
    the number of samples of a client. Floating point sums are accumulated in float64. If the
    model's outputs depend on the batch, all samples of a client are in one batch.

    Parameters
    ----------
    asked : Asked
        The clients.
    question : callable
        Takes a :class:`~equipoise.client.Client` and returns a tensor, or a nested structure of
        tensors: sums over the samples of the batch, without padding. It must not read tensor values
        in Python. Use ``torch.func.grad`` for gradients.
    what : str
        The name of the question in errors.

    Returns
    -------
    object
        The sums, stacked in the order of the clients; zero for clients without samples.
    """
    sizes = asked.split.offsets[asked.clients + 1] - asked.split.offsets[asked.clients]
    order = np.argsort(-sizes, kind="stable")
    device = asked.network.device
    stacked = _Stack(asked, torch.from_numpy(order).to(device))
    totals: list[Tensor] = []
    form: Any = None
    # Clients without samples get a batch of padding, so that every client has a row.
    counted = np.maximum(sizes[order], 1)
    whole = asked.network.batchwise
    together = int(counted[0]) * len(order) if whole else samples_a_pass(asked.network, len(order))
    for active, slots, inside in passes(counted, together):
        inside = inside & (slots < sizes[order[:active], None])
        x, y = stacked.samples(active, slots, inside)
        mask = torch.from_numpy(inside).to(device)
        of_all = stacked.of_one_client(question, active, what)
        positions = torch.from_numpy(slots).to(device)
        with in_plain_words(what):
            answer = of_all(
                *stacked.rows(active), *(first_rows(t, active) for t in (x, y, mask, positions))
            )
        leaves, form = tree_flatten(answer)
        sums = [leaf.unsqueeze(0) if active == 1 else leaf for leaf in leaves]
        if not totals:
            totals = [
                torch.zeros(len(order), *s.shape[1:], dtype=_summed_as(s), device=device)
                for s in sums
            ]
        for total, part in zip(totals, sums, strict=True):
            total[:active] += part.to(total.dtype)
    back = torch.from_numpy(np.argsort(order)).to(device)
    empty = torch.from_numpy(np.flatnonzero(sizes == 0)).to(device)
    dtype = asked.network.dtype
    ordered = [total[back].index_fill(0, empty, 0) for total in totals]
    return tree_unflatten([t.to(dtype) if t.is_floating_point() else t for t in ordered], form)


def _summed_as(answer: Tensor) -> torch.dtype:
    return torch.float64 if answer.is_floating_point() else torch.int64


class _Stack:
    """Clients ordered by decreasing number of samples."""

    def __init__(self, asked: Asked, order: Tensor) -> None:
        self.asked = asked
        self._offsets = asked.split.offsets[asked.clients[order.cpu().numpy()]]

        def ordered(tree: Mapping[str, Tensor]) -> Tree:
            return {name: stack.to(order.device)[order] for name, stack in tree.items()}

        self._params, self._each = ordered(asked.params), ordered(asked.each)
        self._memory = {name: ordered(tree) for name, tree in asked.memory.items()}
        self._seen, self._keys = asked.seen[order], asked.keys[order]

    def samples(
        self, active: int, slots: NDArray[np.int64], inside: NDArray[np.bool_]
    ) -> tuple[Tensor, Tensor]:
        indices = self.asked.split.indices
        positions = np.where(inside, self._offsets[:active, None] + slots, 0)
        return self.asked.data.fetch(
            torch.from_numpy(indices[positions] if len(indices) else positions)
        )

    def rows(self, active: int) -> tuple[Tree, Tree, Memory, Tensor, Tensor]:
        return (
            tree_first_rows(self._params, active),
            tree_first_rows(self._each, active),
            {name: tree_first_rows(tree, active) for name, tree in self._memory.items()},
            first_rows(self._seen, active),
            first_rows(self._keys, active),
        )

    def of_one_client(
        self, question: Callable[[Client], Any], active: int, what: str
    ) -> Callable[..., Any]:
        asked = self.asked

        def answer(
            own: Tree,
            each: Tree,
            memory: Memory,
            seen: Tensor,
            key: Tensor,
            x: Tensor,
            y: Tensor,
            mask: Tensor,
            positions: Tensor,
        ) -> Any:
            client = Client(
                network=asked.network,
                params={**asked.still, **own},
                x=x,
                y=y,
                forward=Forward(
                    train=False, mask=mask.to(asked.network.dtype), key=key, stacked=active > 1
                ),
                sent=asked.sent,
                each=each,
                memory=memory,
                seen=seen,
                round=asked.round,
                positions=positions,
            )
            said = question(client)
            for leaf in tree_flatten(said)[0]:
                if not isinstance(leaf, Tensor):
                    raise InputError(f"{what} must return tensors, got {leaf!r}")
            return said

        return answer if active == 1 else vmap(answer)
