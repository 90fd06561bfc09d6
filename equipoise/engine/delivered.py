"""Trees that are sent to a client only once, and identified by their hash afterwards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from equipoise.tree import Tree, digest

_PREFIX = "delivered/"


class Delivered:
    """A record of which clients hold which trees.

    Examples
    --------
    >>> delivered = Delivered()
    >>> index = delivered.digest_of({"beta": torch.ones(2)})
    >>> delivered.mark(index, [0, 2])
    >>> delivered.missing(index, [0, 1, 2])
    [1]
    """

    def __init__(self) -> None:
        self._holders: dict[str, set[int]] = {}
        self._hashed: dict[str, Tree] = {}

    def digest_of(self, tree: Tree) -> str:
        """Return a tree's hash, which is computed only once for the same values.

        To compare tensors takes a GPU less time than to copy them to the host, which hashes them.
        """
        for known, hashed in self._hashed.items():
            if tree.keys() == hashed.keys() and all(
                _same(tensor, hashed[name]) for name, tensor in tree.items()
            ):
                return known
        made = digest(tree)
        self._hashed[made] = dict(tree)
        return made

    def missing(self, name: str, clients: Iterable[int]) -> list[int]:
        """List the clients that do not hold the tree with this hash."""
        holders = self._holders.get(name, set())
        return [client for client in clients if client not in holders]

    def mark(self, name: str, clients: Iterable[int]) -> None:
        """Record that clients hold a tree."""
        self._holders.setdefault(name, set()).update(int(client) for client in clients)

    def unmark(self, client: int) -> None:
        """Record that a client has lost all trees."""
        for holders in self._holders.values():
            holders.discard(client)

    def export(self) -> Tree:
        """Return everything as tensors for a checkpoint."""
        return {
            _PREFIX + name: torch.tensor(sorted(holders)) for name, holders in self._holders.items()
        }

    def restore(self, tensors: Tree) -> Tree:
        """Read what :meth:`export` wrote, and return all other tensors."""
        own = {name: ids for name, ids in tensors.items() if name.startswith(_PREFIX)}
        self._holders = {
            name.removeprefix(_PREFIX): {int(i) for i in ids} for name, ids in own.items()
        }
        return {name: tensor for name, tensor in tensors.items() if name not in own}


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values, type and device."""
    return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
