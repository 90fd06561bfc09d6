"""The streams of a GPU: a run's own work, and what is done beside it.

A GPU does the work of a stream in order, and that of several streams at the same time. Where it
cannot, it prefers the stream with the higher priority.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_HIGH, _LOW = -1, 0


@contextmanager
def preferred(device: torch.device) -> Iterator[None]:
    """Launch work that the device prefers to what is launched in :func:`beside`.

    It begins when what was launched before is done, and what is launched after the block waits for
    it, and for what was launched beside it: an error may have left an evaluation that nobody reads.

    Parameters
    ----------
    device : torch.device
        The device. On a CPU the block is ordinary code.

    Examples
    --------
    >>> with preferred(torch.device("cpu")):
    ...     print(torch.ones(2).sum())
    tensor(2.)
    """
    if device.type != "cuda":
        yield
        return
    outside, stream = torch.cuda.current_stream(device), preferred_stream(device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            outside.wait_stream(stream)
            outside.wait_stream(_stream(stream.device, _LOW))


def preferred_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of :func:`preferred`."""
    return _stream(_with_index(device), _HIGH)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Launch work that begins when the device has done what was launched before.

    It does not delay what is launched after the block in :func:`preferred`: while the host decides
    what comes next, the GPU has something to do. So what is launched in the block must neither
    change tensors that later work reads, nor read tensors that later work changes. Tensors that it
    reads must be kept until it is done, and its results must be read with
    :class:`equipoise.host_copy.HostCopy`.

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
    stream = _stream(_with_index(device), _LOW)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _with_index(device: torch.device) -> torch.device:
    """Name the current GPU if the device is any."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


@cache
def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)
