"""Samples that may be read from disk: any object that returns the rows at given positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# How many bytes are read at a time when all samples are read once.
_BLOCK = 1 << 26


@runtime_checkable
class Samples(Protocol):
    """An object that reads samples when they are needed.

    It can be used as `Federation.x` instead of a tensor, such as
    :class:`equipoise.data.cache.MappedArray`. A tensor has the same members except the digest.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of samples, then the shape of one sample."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""

    @property
    def digest(self) -> str:
        """A hash of type, shape and all values, stored so that the values need not be read."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, positions: Tensor | NDArray[np.int64] | slice) -> Tensor:
        """Return the samples at positions as a tensor on the CPU, a copy of the data."""


def blocks(x: Tensor | Samples, size: int = _BLOCK) -> Iterator[tuple[int, Tensor]]:
    """Read all samples, a block of rows at a time.

    Parameters
    ----------
    x : Tensor or Samples
        The samples.
    size : int
        The largest size of a block in bytes. A block has at least one row.

    Yields
    ------
    tuple of int and Tensor
        The position of the block's first row, and the block.

    Examples
    --------
    >>> [(first, block.tolist()) for first, block in blocks(torch.arange(5), size=16)]
    [(0, [0, 1]), (2, [2, 3]), (4, [4])]
    """
    bytes_a_row = x.dtype.itemsize * int(np.prod(x.shape[1:], dtype=np.int64))
    rows = max(1, size // max(1, bytes_a_row))
    for first in range(0, len(x), rows):
        yield first, x[first : first + rows]


def kind_of(value: Any) -> str:
    """Describe samples by type and shape, and other values by their class, for messages.

    Parameters
    ----------
    value : object
        What was given.

    Returns
    -------
    str
        A few words.

    Examples
    --------
    >>> kind_of(torch.zeros(2, 3)), kind_of([1])
    ('torch.float32 of shape [2, 3]', 'list')
    """
    return (
        f"{value.dtype} of shape {list(value.shape)}"
        if isinstance(value, Tensor | Samples)
        else type(value).__name__
    )
