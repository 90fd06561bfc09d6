"""Steps recorded as CUDA graphs."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Unequal clients finish at different steps, and every number of active clients needs its own graph.
_MOST_GRAPHS = 256


class Replay:
    """Runs programs of tensor operations, and replays them as CUDA graphs from the third time on.

    The program is run plainly the first time, recorded the second. It may read and write any tensor
    that stays in place; what changes from call to call is given as a dataclass of tensors and
    copied to where the recording reads it.
    """

    def __init__(self) -> None:
        self._met: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None
        self._works = True

    def carry_out(self, key: Hashable, program: Callable[[Any], None], inputs: Any) -> None:
        """Run, record or replay the program with this ``key``."""
        if key in self._graphs:
            graph, read = self._graphs[key]
            for target, value in zip(_values(read), _values(inputs), strict=True):
                target.copy_(value)
            graph.replay()
        elif key in self._met and self._works and len(self._graphs) < _MOST_GRAPHS:
            self._record(key, program, inputs)
        else:
            self._met.add(key)
            program(inputs)

    def _record(self, key: Hashable, program: Callable[[Any], None], inputs: Any) -> None:
        copies = {
            field.name: value.clone()
            if isinstance(value := getattr(inputs, field.name), Tensor)
            else value
            for field in dataclasses.fields(inputs)
        }
        read = dataclasses.replace(inputs, **copies)
        graph = torch.cuda.CUDAGraph()
        try:
            with _without_garbage_collection(), torch.cuda.graph(graph, pool=self._pool):
                program(read)
        except RuntimeError as error:
            self._works = False
            warnings.warn(
                f"steps of this method cannot be replayed on the GPU and run from Python: {error}",
                stacklevel=2,
            )
            program(inputs)
            return
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, read
        graph.replay()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Prevent Python from freeing an old graph during a capture, which CUDA does not allow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _values(inputs: Any) -> list[Tensor]:
    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return [value for value in values if isinstance(value, Tensor)]
