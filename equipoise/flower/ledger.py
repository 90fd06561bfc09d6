"""Which version of each client's memory is valid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from equipoise.tree import Tree


@dataclass
class Ledger:
    """The valid version of each client's memory: the last round in which its answer was used.

    Attributes
    ----------
    now, saved, best : dict
        The round for each client: the current one, that of the latest checkpoint, and that at the
        best round so far.
    durable : bool
        Whether there are checkpoints to resume from.
    """

    durable: bool = True
    now: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    best: dict[int, int] = field(default_factory=dict)

    def oldest(self, client: int) -> int:
        """Return the oldest version of a client's memory that may still be needed."""
        candidates = [self.saved.get(client, 0) if self.durable else self.now.get(client, 0)]
        candidates += [self.best.get(client, 0)] if self.best else []
        return min(candidates)

    def commit(self, clients: Iterable[int], round_: int) -> None:
        """Mark the memories that clients wrote in a round as the valid ones."""
        self.now |= {int(client): round_ for client in clients}

    def keep(self) -> None:
        """Keep the current versions, which are those of the best round so far."""
        self.best = dict(self.now)

    def export(self) -> Tree:
        """Return the ledger for a checkpoint."""
        self.saved = dict(self.now)
        clients = sorted(self.now)
        rounds = {"now": self.now, "best": self.best}
        columns = {name: [of.get(client, 0) for client in clients] for name, of in rounds.items()}
        return {
            name: torch.tensor(values, dtype=torch.int64)
            for name, values in {"clients": clients, **columns}.items()
        }

    def restore(self, columns: Tree) -> None:
        """Read what :meth:`export` wrote."""
        clients, now, best = (columns[name].tolist() for name in ("clients", "now", "best"))
        self.now = dict(zip(clients, now, strict=True))
        self.saved = dict(self.now)
        self.best = {c: version for c, version in zip(clients, best, strict=True) if version}
