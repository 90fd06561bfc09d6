"""The state of the engine's forward pass, and what layers decide by it.

The engine sets the state for every pass; layers read it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.models.kernel_modules import module_with_triton
from equipoise.random import fold_tensor


@dataclass(frozen=True)
class Forward:
    """What layers must know about a forward pass: set by the engine, read by layers.

    Attributes
    ----------
    train : bool
        Whether dropout drops and BatchNorm uses the batch's own statistics.
    mask : Tensor or None
        Which rows of the batch are samples and not padding; ``None`` when all are.
    key : Tensor or None
        Key of the random numbers of this client, phase and step.
    stacked : bool
        Whether this is one of many clients under ``vmap``.
    shared : bool
        Whether one model evaluates the samples of many clients, without gradients.
    factored : bool
        Whether gradients by weights may be left as factors: see
        :mod:`equipoise.models.factored`.
    """

    train: bool
    mask: Tensor | None = None
    key: Tensor | None = None
    stacked: bool = False
    shared: bool = False
    factored: bool = False

    @property
    def wide(self) -> bool:
        """Whether the samples of many clients are processed at a time."""
        return self.stacked or self.shared


_current: Forward | None = None
# How often each layer with dropout has drawn in the current pass, and how often functions have in
# each part.
_calls: dict[nn.Module | str, int] = {}
# The part of the model that is being applied.
_part = ""


@contextmanager
def forward_pass(forward: Forward, part: str = "") -> Iterator[None]:
    """Show layers ``forward`` while the block applies a part of the model."""
    global _current, _calls, _part
    before, _current, _calls, _part = (_current, _calls, _part), forward, {}, part
    try:
        yield
    finally:
        _current, _calls, _part = before


def enter_part(part: str) -> None:
    """Say that the current pass goes on with another part of the model.

    The functions of each part draw random numbers of their own.
    """
    global _part
    _part = part


def current_pass() -> Forward | None:
    """Return the state of the engine's current forward pass, or ``None`` outside the engine."""
    return _current


def next_key(owner: nn.Module | None, number: int) -> Tensor | None:
    """Return the key of a draw in the current pass. Each call returns another key.

    Keys of layers depend on the layer's number. Those of functions depend on the part of the model
    and on how many of them have drawn before, so that a part draws the same numbers alone and in a
    pass of the whole model.

    Parameters
    ----------
    owner : nn.Module or None
        The layer that draws; ``None`` for a function that is called by a model's own code.
    number : int
        The number of the layer; 0 for a function.
    """
    if _current is None or _current.key is None:
        return None
    who: nn.Module | str = _part if owner is None else owner
    calls = _calls.get(who, 0)
    _calls[who] = calls + 1
    if owner is None:
        return fold_tensor(_current.key, number, zlib.crc32(_part.encode()), calls)
    key = fold_tensor(_current.key, number)
    # A layer that is called again in the same pass draws new numbers.
    return fold_tensor(key, calls) if calls else key


def stacked_on_gpu(x: Tensor) -> bool:
    """Return whether this is a pass of stacked clients on a GPU."""
    return _current is not None and _current.stacked and x.is_cuda


def wide_on_gpu(x: Tensor) -> bool:
    """Return whether this pass, on a GPU, has enough samples for the kernels of stacked clients."""
    return _current is not None and _current.wide and x.is_cuda


def kernels_for_pass(x: Tensor, name: str = "kernels") -> Any:
    """Return a module of GPU kernels if they can serve this pass, else ``None``."""
    if not wide_on_gpu(x) or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    return module_with_triton(name, x.device)
