"""Memory of large tensors on a CPU that is used again.

The system hands out new memory page by page, when a page is first written. With stacks of models
this takes longer than copying them, and stacks of the same sizes are made in every round.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Smaller tensors are left to PyTorch, whose allocator finds memory for them that is in use already.
_SMALL = 1 << 20
# Memory that is kept for later tensors has at most so many bytes.
_MOST_KEPT = 1 << 30
# Memory that no tensor uses, by size in bytes.
_kept: dict[int, list[mmap.mmap]] = {}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor whose numbers are not set.

    The memory of a large tensor on a CPU is kept when neither the tensor nor a view of it is left,
    for the next tensor of the same size.

    Parameters
    ----------
    shape : sequence of int
        The shape.
    dtype : torch.dtype
        The type of the numbers.
    device : torch.device or str
        The device. PyTorch itself keeps the memory of GPUs.

    Examples
    --------
    >>> first = empty((600, 600), torch.float32)
    >>> place = first.data_ptr()
    >>> del first
    >>> empty((600, 600), torch.float32).data_ptr() == place
    True
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL or torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    found = _kept.get(size)
    memory = found.pop() if found else mmap.mmap(-1, size)
    # The tensor holds this array for as long as its storage exists.
    array = np.frombuffer(memory, dtype=np.uint8)
    weakref.finalize(array, _keep, memory).atexit = False
    return torch.from_numpy(array).view(dtype).view(tuple(shape))


def _keep(memory: mmap.mmap) -> None:
    size = len(memory)
    if size + sum(each * len(pieces) for each, pieces in _kept.items()) <= _MOST_KEPT:
        _kept.setdefault(size, []).append(memory)
