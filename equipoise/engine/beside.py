"""Work that a GPU does beside other work that is launched later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Launch work that begins when the device has done what was launched before.

    It does not delay what is launched after the block: while the host decides what comes next, the
    GPU has something to do. So what is launched in the block must neither change tensors that
    later work reads, nor read tensors that later work changes. Tensors that it reads must be kept
    until it is done, and its results must be read with :class:`equipoise.host_copy.HostCopy`.

    Parameters
    ----------
    device : torch.device
        The device. On a CPU the block is ordinary code.

    Examples
    --------
    >>> with beside(torch.device("cpu")):
    ...     print(torch.ones(2).sum())
    tensor(2.)
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
