"""Sharpness-aware training of the clients of ``tests/engine/five_clients.py`` in plain PyTorch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from equipoise.random import fold
from tests.engine.by_hand import average, hand_batches, held_by, tensors
from tests.engine.five_clients import SEED, SIZES


def by_hand(module, federation, cohorts, *, rho, eta=None, weights=SIZES):
    """Sharpness-aware steps in plain PyTorch: parameters are perturbed and then restored."""
    for round_, cohort in enumerate(cohorts):
        sent = []
        for client in cohort:
            own = copy.deepcopy(module).train()
            params = list(own.parameters())
            norms = [layer for layer in own.modules() if isinstance(layer, nn.BatchNorm2d)]
            optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
            x, y = held_by(federation, client)
            for batch in hand_batches(len(x), fold(fold(SEED, round_), client), 0, 1):
                w = [p.detach().clone() for p in params]
                t = [torch.ones_like(p) if eta is None else p.abs() + eta for p in w]
                g = torch.autograd.grad(F.cross_entropy(own(x[batch]), y[batch]), params)
                length = torch.cat([(a * b).flatten() for a, b in zip(t, g, strict=True)]).norm()
                optimizer.zero_grad()
                with torch.no_grad():
                    for p, a, b in zip(params, t, g, strict=True):
                        p += rho * a**2 * b / length
                for norm in norms:
                    norm.momentum = 0.0
                F.cross_entropy(own(x[batch]), y[batch]).backward()
                for norm in norms:
                    norm.momentum = 0.1
                with torch.no_grad():
                    for p, before in zip(params, w, strict=True):
                        p.copy_(before)
                optimizer.step()
            sent.append(tensors(own))
        module.load_state_dict(average(sent, [weights[client] for client in cohort]), strict=False)
    return tensors(module)
