"""The answers of several processes, put in the order of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise import reused_memory
from equipoise.engine.evaluation import Measured
from equipoise.engine.share import Ints
from equipoise.tree import Tree


@dataclass(frozen=True)
class Answers:
    """The answers of all processes to one task.

    Attributes
    ----------
    places : list of int array
        Where the clients of each process are among all clients of the task.
    each : list
        The answer of each process.
    clients : int
        How many clients there are.
    """

    places: list[Ints]
    each: list[Any]
    clients: int

    @property
    def given(self) -> list[tuple[Ints, Any]]:
        """The answers of the processes that have clients."""
        return [(w, found) for w, found in zip(self.places, self.each, strict=True) if len(w)]

    def changed(self, change: Callable[[Any, int], Any]) -> Answers:
        """Change the answer of each process that has clients; the number of these is given too."""
        pairs = zip(self.places, self.each, strict=True)
        each = [change(found, len(where)) if len(where) else None for where, found in pairs]
        return Answers(self.places, each, self.clients)

    def stack(self, part: Callable[[Any], Tensor]) -> Tensor:
        """Put one stack of all answers in the order of clients."""
        stacks = [(where, part(found)) for where, found in self.given]
        first = stacks[0][1]
        if len(stacks) == 1:
            return first
        joined = reused_memory.empty((self.clients, *first.shape[1:]), first.dtype, first.device)
        for where, rows in stacks:
            joined[torch.from_numpy(where).to(joined.device)] = rows
        return joined

    def tree(self, part: Callable[[Any], Mapping[str, Tensor]]) -> Tree:
        """Put the stacks of a tree in the order of clients."""
        names = part(self.given[0][1]) if self.given else {}
        return {name: self.stack(partial(_leaf_of, part, name)) for name in names}

    def measured(self, part: Callable[[Any], Measured]) -> Measured:
        """Put measured values in the order of clients; NaN where a process has not measured one."""
        joined: Measured = {}
        for where, found in self.given:
            for name, values in part(found).items():
                joined.setdefault(name, np.full(self.clients, np.nan))[where] = values
        return joined


def _leaf_of(part: Callable[[Any], Mapping[str, Tensor]], name: str, found: Any) -> Tensor:
    return part(found)[name]
