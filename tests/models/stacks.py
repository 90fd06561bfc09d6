"""What tests of GPU kernels share.

Batches of stacked clients in any order of memory, and kernels for layers on any device.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.models import convolution_layers, dropout, norm_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, SAMPLES, CHANNELS = 3, 5, 4
# How clients, samples, channels, height and width lie in memory, the outermost first.
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [(0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (2, 1, 0, 3, 4), (0, 1, 3, 4, 2)],
    ids=["clients first", "samples first", "channels first", "channels last"],
)
# Triton's interpreter takes minutes where a GPU takes milliseconds.
LARGE = (32, 32) if torch.cuda.is_available() else (6, 7)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float().to(DEVICE)


def laid_out(x, layout):
    """The same numbers with axes in another order of memory."""
    axes = [axis for axis in layout if axis < x.dim()]
    return x.permute(*axes).contiguous().permute(*np.argsort(axes))


def order(x):
    return [axis for axis in np.argsort([-s for s in x.stride()]) if x.shape[axis] > 1]


def operations(call):
    """The names of the operations that a call carries out."""
    called = set()

    class Listed(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.add(func.name())
            return func(*args, **(kwargs or {}))

    with Listed():
        call()
    return called


def serve_layers(monkeypatch, kernels_for_pass):
    """Let a function choose the kernels of all layers that may have some, except convolutions."""
    for module in (convolution_layers, dropout, norm_layers):
        monkeypatch.setattr(module, "kernels_for_pass", kernels_for_pass)
