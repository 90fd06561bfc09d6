"""Facts: what clients compute from their own data without training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from equipoise.engine.chunk import Chunk
from equipoise.engine.memory import Memory
from equipoise.engine.questions import asked_of, part_of, sums_over_samples
from equipoise.errors import InputError
from equipoise.federation import Split
from equipoise.method import Fact, LocalRule
from equipoise.tree import Tree

# Returns a random key for each of some clients.
Keys = Callable[[NDArray[np.int64]], Tensor]


def facts_before(
    local: LocalRule, chunk: Chunk, clients: NDArray[np.int64], keys: Keys, train: Split
) -> Memory:
    """Return the facts that losses may read.

    Parameters
    ----------
    local : LocalRule
        The local rule, which names the facts.
    chunk : Chunk
        The clients before training.
    clients : int array
        Their ids.
    keys : callable
        Returns the keys of clients in this round.
    train : Split
        The training data.
    """
    facts: Memory = {}
    for name, fact in local.facts().items():
        known = chunk.memory.get(name)
        if fact.model == "received":
            facts[name] = compute_fact(name, fact, chunk, clients, keys, train)
        elif fact.model == "trained":
            facts[name] = (
                _nothing_known(name, fact, chunk, clients, keys, train) if known is None else known
            )
        elif known is None:
            facts[name] = compute_fact(name, fact, chunk, clients, keys, train)
        elif len(strangers := np.flatnonzero(~chunk.seen.cpu().numpy())):
            where = torch.from_numpy(strangers).to(chunk.seen.device)
            made = compute_fact(name, fact, part_of(chunk, where), clients[strangers], keys, train)
            facts[name] = {
                leaf: known[leaf].index_copy(0, where, rows) for leaf, rows in made.items()
            }
    return facts


def compute_fact(
    name: str,
    fact: Fact,
    chunk: Chunk,
    clients: NDArray[np.int64],
    keys: Keys,
    samples: Split,
) -> Tree:
    """Return a fact of each client of a chunk, stacked.

    Parameters
    ----------
    name : str
        Its name in errors.
    fact : Fact
        The fact.
    chunk, clients, keys
        As in :func:`facts_before`.
    samples : Split
        The data from which it is computed.
    """
    own, still = (
        ({}, chunk.network.initial()) if fact.model == "first" else (chunk.params, chunk.still)
    )
    asked = asked_of(chunk, samples, clients, keys(clients), own, still)
    sums = sums_over_samples(asked, fact.sums, f"the fact {name!r}")
    made: Tree = sums if fact.then is None else vmap(fact.then)(sums)
    if not isinstance(made, dict):
        raise InputError(
            f"the fact {name!r} must be a dictionary of tensors, got {type(made).__name__}"
        )
    if strays := [leaf for leaf, rows in made.items() if not isinstance(rows, Tensor)]:
        raise InputError(
            f"the fact {name!r} must be a dictionary of tensors, but {strays[0]!r} is a "
            f"{type(made[strays[0]]).__name__}"
        )
    return made


def _nothing_known(
    name: str, fact: Fact, chunk: Chunk, clients: NDArray[np.int64], keys: Keys, train: Split
) -> Tree:
    """Return zeros in the form of a fact that has not been computed yet."""
    is_first = np.arange(train.clients) == clients[0]
    one_sample = Split(train.of(int(clients[0]))[:1], np.concatenate([[0], np.cumsum(is_first)]))
    first = part_of(chunk, torch.zeros(1, dtype=torch.int64))
    made = compute_fact(name, fact, first, clients[:1], keys, one_sample)
    return {
        leaf: torch.zeros_like(rows).expand(len(clients), *rows.shape[1:]).clone()
        for leaf, rows in made.items()
    }
