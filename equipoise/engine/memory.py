"""The memories of clients: what they keep between rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise import reused_memory
from equipoise.errors import InputError
from equipoise.samples import kind_of
from equipoise.stacks import chosen_rows, copy_all, put_rows
from equipoise.tree import Tree

Memory = dict[str, Tree]


def checked_memory(
    given: Any, where: str, like: Mapping[str, Mapping[str, Tensor]] | None = None
) -> Memory:
    """Refuse a memory, or uploads, that are not dictionaries of dictionaries of tensors.

    Parameters
    ----------
    given : object
        The memory or the uploads that a local rule returned.
    where : str
        What returned it, for messages.
    like : mapping, optional
        The memory that it replaces. Tensors must keep their types and shapes.

    Returns
    -------
    dict
        The same memory.

    Examples
    --------
    >>> checked_memory({"counter": {"rounds": 1}}, "finish of Mine")
    Traceback (most recent call last):
    equipoise.errors.InputError: finish of Mine returned 1 for counter.rounds; valid: a tensor, such
    as torch.tensor(1.0)
    """
    if not isinstance(given, Mapping):
        raise InputError(
            f'{where} returned {given!r}; valid: a dictionary such as {{"counter": {{"rounds": '
            f"tensor}}}}"
        )
    for name, tree in given.items():
        if not isinstance(tree, Mapping):
            raise InputError(
                f"{where} returned {_shown(tree)} for {name}; valid: a dictionary of tensors, such "
                "as "
                f'{{"{name}": {{"value": tensor}}}}'
            )
        for leaf, tensor in tree.items():
            if not isinstance(tensor, Tensor):
                number = float(tensor) if isinstance(tensor, int | float) else 0.0
                raise InputError(
                    f"{where} returned {_shown(tensor)} for {name}.{leaf}; valid: a tensor, such "
                    f"as torch.tensor({number})"
                )
            before = (like or {}).get(name, {}).get(leaf)
            if before is not None and (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
                raise InputError(
                    f"{where} returned {kind_of(tensor)} for {name}.{leaf}, which was "
                    f"{kind_of(before)} before; valid: the same type and shape in every round"
                )
    return dict(given)


def _shown(given: Any) -> str:
    return kind_of(given) if isinstance(given, Tensor) else repr(given)


class MemoryStore:
    """The memories of all clients that have taken part, stacked; other clients need no storage.

    Round r reads the memories committed before it and writes new ones, so a round that is repeated,
    or resumed after a crash, never applies an update twice.

    Examples
    --------
    >>> store = MemoryStore()
    >>> first = {"control": {"w": torch.zeros(1)}}
    >>> store.write(np.array([7]), {"control": {"w": torch.ones(1, 1)}})
    >>> store.read(np.array([7]), first)[1]
    tensor([False])
    >>> store.newest(np.array([3, 7]), first)["control"]["w"].flatten()
    tensor([0., 1.])
    >>> store.commit()
    >>> memory, seen = store.read(np.array([3, 7]), first)
    >>> memory["control"]["w"].flatten(), seen
    (tensor([0., 1.]), tensor([False,  True]))
    """

    def __init__(self) -> None:
        self._slot: dict[int, int] = {}
        self._stacks: Tree = {}
        self._pending: list[tuple[NDArray[np.int64], Tree]] = []

    @property
    def clients(self) -> list[int]:
        """The clients that have a memory, in ascending order."""
        return sorted(self._slot)

    def read(
        self,
        clients: NDArray[np.int64],
        first: Memory,
        device: torch.device | None = None,
        maybe: Iterable[str] = (),
    ) -> tuple[Memory, Tensor]:
        """Return the stacked memories of clients, and which of them have one.

        Parameters
        ----------
        clients : int array
            The clients.
        first : Memory
            The memory of a client that has none, and what all clients have of trees that were
            never written.
        device : torch.device, optional
            The device of the result.
        maybe : iterable of str
            Trees to read if any client has them; they are zero for the others.
        """
        slots = np.array([self._slot.get(int(client), -1) for client in clients], dtype=np.int64)
        seen = torch.from_numpy(slots >= 0).to(device, non_blocking=True)
        memory: Memory = {}
        trees = {**{name: self._zeros(name) for name in maybe}, **first}
        if not any(trees.values()):
            return memory, seen
        leaves = [(tree, name) for tree, values in trees.items() for name in values]
        made = self._rows(slots, [(f"{t}/{n}", trees[t][n]) for t, n in leaves], device)
        for (tree, name), stack in zip(leaves, made, strict=True):
            memory.setdefault(tree, {})[name] = stack
        return memory, seen

    def _rows(
        self,
        slots: NDArray[np.int64],
        firsts: Sequence[tuple[str, Tensor]],
        device: torch.device | None,
    ) -> list[Tensor]:
        """Stack rows of stored tensors, and first values where there are none."""
        known = np.flatnonzero(slots >= 0)
        names = [name for name, _ in firsts if name in self._stacks] if len(known) else []
        rows = chosen_rows([self._stacks[name] for name in names], torch.from_numpy(slots[known]))
        stored = {n: rows.to(device or rows.device) for n, rows in zip(names, rows, strict=True)}
        whole = stored if len(known) == len(slots) else {}
        repeated = {n: f.expand(len(slots), *f.shape) for n, f in firsts if n not in whole}
        made = {
            name: reused_memory.empty(each.shape, each.dtype, each.device)
            for name, each in repeated.items()
        }
        copy_all(list(made.values()), list(repeated.values()))
        if names and not whole:
            put_rows([made[name] for name in names], list(stored.values()), torch.from_numpy(known))
        return [(whole | made)[name] for name, _ in firsts]

    def newest(
        self, clients: NDArray[np.int64], first: Memory, device: torch.device | None = None
    ) -> Memory:
        """Return the stacked memories of clients, including those that are not yet committed.

        Parameters
        ----------
        clients, first, device
            As in :meth:`read`.
        """
        memory, _ = self.read(clients, first, device)
        for owners, flat in self._pending:
            _, here, there = np.intersect1d(clients, owners, return_indices=True)
            stacks = {
                flat_name: stack
                for tree, values in memory.items()
                for name, stack in values.items()
                if (flat_name := f"{tree}/{name}") in flat
            }
            new = chosen_rows([flat[name] for name in stacks], torch.from_numpy(there))
            put_rows(list(stacks.values()), new, torch.from_numpy(here))
        return memory

    def _zeros(self, tree: str) -> Tree:
        prefix = f"{tree}/"
        found = {
            name.removeprefix(prefix): stack
            for name, stack in self._stacks.items()
            if name.startswith(prefix)
        }
        return {name: torch.zeros_like(stack[0]) for name, stack in found.items()}

    def write(self, clients: NDArray[np.int64], memory: Memory) -> None:
        """Store the new memories of clients until :meth:`commit`."""
        flat = {
            f"{tree}/{name}": stack
            for tree, values in memory.items()
            for name, stack in values.items()
        }
        if flat:
            self._pending.append((clients, flat))

    def forget_pending(self) -> None:
        """Discard uncommitted memories, before a round is repeated."""
        self._pending.clear()

    def commit(self, only: NDArray[np.int64] | None = None) -> None:
        """Make the stored memories of all or some clients the newest version."""
        for clients, flat in self._pending:
            if only is not None and not (kept := np.isin(clients, only)).all():
                where = torch.from_numpy(np.flatnonzero(kept))
                clients, flat = (
                    clients[kept],
                    {name: stack[where.to(stack.device)] for name, stack in flat.items()},
                )
            if not len(clients):
                continue
            for client in clients:
                self._slot.setdefault(int(client), len(self._slot))
            slots = torch.tensor([self._slot[int(client)] for client in clients])
            rooms = [self._room(name, stack) for name, stack in flat.items()]
            put_rows(rooms, list(flat.values()), slots)
        self._pending.clear()

    def _room(self, name: str, like: Tensor) -> Tensor:
        """Return the stack of a name, enlarged until every client with a slot fits."""
        stack = self._stacks.get(name)
        have, want = (0 if stack is None else len(stack)), len(self._slot)
        if stack is None or have < want:
            grown = torch.zeros(
                max(want, 2 * have), *like.shape[1:], dtype=like.dtype, device=like.device
            )
            if stack is not None:
                grown[:have] = stack
            self._stacks[name] = stack = grown
        return stack

    def export(self) -> Tree:
        """Return everything committed, as tensors for a checkpoint."""
        if not self._slot:
            return {}
        clients = torch.tensor(list(self._slot))
        return {
            "clients": clients,
            **{name: stack[: len(clients)].contiguous() for name, stack in self._stacks.items()},
        }

    def restore(self, tensors: Tree) -> None:
        """Read what :meth:`export` wrote."""
        stacks = dict(tensors)
        clients = stacks.pop("clients", torch.empty(0))
        self._slot = {int(client): slot for slot, client in enumerate(clients.tolist())}
        self._stacks = stacks
        self._pending.clear()
