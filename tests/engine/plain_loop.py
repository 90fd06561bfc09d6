"""Federated averaging as plainly as possible: one client after the other, ordinary layers.

It shares only the definition of the random numbers with the engine, and computes them one integer
at a time.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from equipoise.random import Purpose, fold


class PlainDropout(nn.Module):
    """Dropout that computes its mask element by element in Python."""

    def __init__(self, p, layer):
        super().__init__()
        self.p, self.layer, self.key = p, layer, None

    def forward(self, x):
        if not self.training:
            return x
        threshold = round((1 - self.p) * 65536)
        key = fold(self.key, self.layer)
        kept = [
            (fold(key, i // 4) >> (16 * (i % 4))) & 0xFFFF < threshold for i in range(x.numel())
        ]
        return x * torch.tensor(kept, dtype=x.dtype).view_as(x) * (65536 / threshold)


def with_plain_dropout(module):
    """Replace the model's dropout layers with the ones above, numbered from 1."""
    module = copy.deepcopy(module)
    layer = 0
    for owner in list(module.modules()):
        for name, child in owner.named_children():
            if isinstance(child, nn.Dropout):
                layer += 1
                setattr(owner, name, PlainDropout(child.p, layer))
    return module


def shuffled(n, key):
    return sorted(range(n), key=lambda i: fold(key, i) & ((1 << 63) - 1))


def train_client(
    module, x, y, *, client_key, make_optimizer, batch_size, epochs, clip=None, max_steps=None
):
    """Train a copy of the module on one client's samples."""
    module = copy.deepcopy(module).train()
    optimizer = make_optimizer(module.parameters())
    step = 0
    for epoch in range(epochs):
        order = shuffled(len(x), fold(client_key, Purpose.SHUFFLE, 0, epoch))
        for start in range(0, len(x), batch_size):
            if max_steps is not None and step == max_steps:
                return module
            batch = order[start : start + batch_size]
            for layer in module.modules():
                if isinstance(layer, PlainDropout):
                    layer.key = fold(client_key, Purpose.STEP, 0, step)
            optimizer.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            step += 1
    return module


def federated_averaging(module, federation, cohorts, *, seed, **how):
    """Run one round per cohort; return the global model's state dict, averaged by size."""
    module = with_plain_dropout(module)
    x = (
        federation.x.to(next(module.parameters()).dtype)
        if federation.x.is_floating_point()
        else federation.x
    )
    for round_, cohort in enumerate(cohorts):
        held = [torch.from_numpy(federation.train.of(int(client))) for client in cohort]
        total = sum(len(samples) for samples in held)
        average = {}
        for client, samples in zip(cohort, held, strict=True):
            key = fold(fold(seed, round_), int(client))
            trained = train_client(module, x[samples], federation.y[samples], client_key=key, **how)
            for name, tensor in trained.state_dict().items():
                if tensor.is_floating_point():
                    average[name] = average.get(name, 0) + tensor.double() * (len(samples) / total)
        module.load_state_dict(average, strict=False)
    return {
        name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()
    }
