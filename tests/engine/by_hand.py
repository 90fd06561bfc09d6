"""Federated rounds of several phases in ordinary PyTorch, with modules and ``torch.optim``."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch

from equipoise.random import Purpose, fold
from tests.engine.federations import images
from tests.engine.five_clients import BATCH, SEED, SIZES
from tests.engine.plain_loop import shuffled


@dataclass
class Turn:
    """One phase by hand: the trained modules (others are in evaluation mode) and the loss."""

    moves: list
    loss: object
    lr: float = 0.1
    momentum: float = 0.9
    epochs: int = 1
    same: bool = False


def hand_batches(count, key, phase, epochs=None):
    """The batches of some epochs, or of an infinite number of epochs."""
    for epoch in itertools.count() if epochs is None else range(epochs):
        order = shuffled(count, fold(key, Purpose.SHUFFLE, phase, epoch))
        yield from (order[start : start + BATCH] for start in range(0, count, BATCH))


def train_by_hand(modules, turns, x, y, key, *, interleaved):
    """Train modules in place, phase after phase or batch by batch."""
    batches, optimizers = [], []
    for phase, turn in enumerate(turns):
        batches.append(
            batches[-1] if turn.same else list(hand_batches(len(x), key, phase, turn.epochs))
        )
        moving = [tensor for module in turn.moves for tensor in module.parameters()]
        optimizers.append(torch.optim.SGD(moving, lr=turn.lr, momentum=turn.momentum))
    steps = [(phase, step) for phase in range(len(turns)) for step in range(len(batches[phase]))]
    if interleaved:
        steps.sort(key=lambda pair: (pair[1], pair[0]))
    for phase, step in steps:
        for module in modules:
            module.eval()
        for module in turns[phase].moves:
            module.train()
        batch = batches[phase][step]
        optimizers[phase].zero_grad()
        turns[phase].loss(x[batch], y[batch]).backward()
        optimizers[phase].step()


def tensors(module):
    return {
        n: t.clone()
        for n, t in module.state_dict().items()
        if not n.endswith("num_batches_tracked")
    }


def held_by(federation, client):
    samples = torch.from_numpy(federation.train.of(client))
    return federation.x[samples], federation.y[samples]


def average(trees, sizes):
    return {
        n: sum(t[n] * (s / sum(sizes)) for t, s in zip(trees, sizes, strict=True)) for n in trees[0]
    }


def rounds_by_hand(module, make_turns, cohorts, *, interleaved=False, make_own=None, combine=None):
    """FedAvg of hand-trained clients; each client may own a module that starts as the received one.

    Another aggregation is a function of the received tensors and of those averaged by size.
    """
    federation = images(sizes=SIZES)
    owned = {}
    for round_, cohort in enumerate(cohorts):
        sent = []
        for client in cohort:
            shared = copy.deepcopy(module)
            if make_own and client not in owned:
                owned[client] = make_own(shared)
            own = owned.get(client)
            modules = [m for m in (shared, own) if m is not None]
            key = fold(fold(SEED, round_), client)
            turns = make_turns(shared, own, copy.deepcopy(shared))
            train_by_hand(
                modules, turns, *held_by(federation, client), key, interleaved=interleaved
            )
            sent.append(tensors(shared))
        averaged = average(sent, [SIZES[client] for client in cohort])
        module.load_state_dict(
            combine(tensors(module), averaged) if combine else averaged, strict=False
        )
    return tensors(module), owned
