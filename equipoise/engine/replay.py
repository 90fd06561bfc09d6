"""Steps recorded as CUDA graphs."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.engine.streams import preferred_stream

# How many steps in a row one graph holds at most. Rounds of up to so many steps are one launch;
# larger graphs would save little more and take more memory.
STEPS_A_GRAPH = 8
# Unequal clients finish at different steps, and every number of active clients needs its own graph.
MOST_GRAPHS = 256
# A graph that was replayed among the last so many programs is not dropped for a new one. Otherwise
# a run with a few shapes too many would record in every round, which costs more than it saves.
RECENT = 4 * MOST_GRAPHS
# The share of the GPU's memory that the pool of all graphs may take.
POOL_SHARE = 0.5

Inputs = Sequence[Any]
"""What a program reads: dataclasses of tensors."""
_Key = tuple[Hashable, Hashable]


class Graph(Protocol):
    """A recorded program."""

    def replay(self) -> None:
        """Run it again, on what is then in the tensors that it reads."""


class Recorder(Protocol):
    """Records programs.

    Attributes
    ----------
    bytes : int
        The memory of the pool that recorded programs share.
    most_bytes : int
        How much it should take at most.
    """

    bytes: int
    most_bytes: int

    def record(self, program: Callable[[], None]) -> Graph:
        """Record a program without carrying it out."""

    def begin_anew(self) -> None:
        """Take a new pool; the memory of the old one is free once its graphs are gone."""

    def wait(self) -> None:
        """Wait until no recorded program runs any more, so that some can be dropped."""


class CudaRecorder:
    """Records programs as CUDA graphs, which share one pool of memory.

    A program leaves nothing in the pool, so the next one uses the same memory, and the pool is
    about as large as the largest program needs.

    Parameters
    ----------
    device : torch.device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.most_bytes = int(POOL_SHARE * torch.cuda.get_device_properties(device).total_memory)
        # A graph has the priority of the stream on which it was captured.
        self._stream = preferred_stream(device)
        self.begin_anew()

    def wait(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def begin_anew(self) -> None:
        """Take a new pool."""
        self._pool = torch.cuda.graph_pool_handle()
        self.bytes = 0

    def record(self, program: Callable[[], None]) -> Graph:
        """Capture a program."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            before = torch.cuda.memory_reserved(self._device)
            program()
            self.bytes += torch.cuda.memory_reserved(self._device) - before
        return graph


class Replay:
    """Carries out programs of tensor operations, and replays those that come again as CUDA graphs.

    A program is carried out plainly the first time, and recorded the second time. It may read and
    write any tensor that stays in place. What changes from call to call is given as ``inputs`` and
    copied to where the recording reads it.

    The least recently used graphs are dropped when there are too many. All are dropped when their
    pool has become too large, or when memory runs out while another is recorded.

    Parameters
    ----------
    recorder : Recorder
        How programs are recorded, such as :class:`CudaRecorder`.

    Attributes
    ----------
    failure : str or None
        Why programs are no longer recorded, if one could not be.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.failure: str | None = None
        self._recorder = recorder
        self._met: dict[_Key, int] = {}
        self._graphs: OrderedDict[_Key, tuple[Graph, Inputs]] = OrderedDict()
        self._used: dict[_Key, int] = {}
        self._calls = 0
        self._largest = 0
        self._collected = False
        # The graphs must not go with this object, which the garbage collector may free at any time.
        weakref.finalize(self, _drop, self._graphs)

    def __len__(self) -> int:
        """Count the graphs."""
        return len(self._graphs)

    @property
    def most_bytes(self) -> int:
        """How much memory the pool of graphs should take at most."""
        return self._recorder.most_bytes

    def carry_out(
        self,
        owner: Hashable,
        name: Hashable,
        program: Callable[[Inputs], None],
        inputs: Callable[[], Inputs],
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """Run, record or replay a program.

        Parameters
        ----------
        owner : hashable
            Whose tensors the program uses; see :meth:`forget`.
        name : hashable
            Distinguishes the owner's programs. Programs with the same name make the same operations
            on tensors of the same shapes.
        program : callable
            What to do with the inputs.
        inputs : callable
            Returns what differs from call to call.
        otherwise : callable, optional
            Does the same, perhaps with the help of other recordings. It is called until the program
            is recorded, which then happens one time later.
        """
        key = owner, name
        self._calls += 1
        if key in self._graphs:
            self._graphs.move_to_end(key)
            self._used[key] = self._calls
            graph, read = self._graphs[key]
            for target, value in zip(_tensors(read), _tensors(inputs()), strict=True):
                target.copy_(value)
            graph.replay()
            return
        met = self._met.pop(key, 0)
        ripe = met > (0 if otherwise is None else 1)
        if ripe and self.failure is None and self._has_room():
            self._record(key, program, inputs())
            return
        self._met[key] = met + 1
        if len(self._met) > RECENT:
            del self._met[next(iter(self._met))]
        if otherwise is None:
            program(inputs())
        else:
            otherwise()

    def forget(self, owner: Hashable) -> None:
        """Drop the graphs of an owner, whose tensors are about to be freed."""
        self._recorder.wait()
        for key in [key for key in self._graphs if key[0] == owner]:
            self._drop_one(key)
        self._met = {key: met for key, met in self._met.items() if key[0] != owner}
        if not self._graphs:
            self._drop_all()

    def _has_room(self) -> bool:
        """Make room for one more graph, and say whether there is some."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        oldest = next(iter(self._graphs))
        if self._calls - self._used[oldest] <= RECENT:
            return False
        self._recorder.wait()
        self._drop_one(oldest)
        return True

    def _drop_one(self, key: _Key) -> None:
        del self._used[key]
        _drop({key: self._graphs.pop(key)})

    def _drop_all(self) -> None:
        self._recorder.wait()
        self._used.clear()
        _drop(self._graphs)
        self._recorder.begin_anew()
        self._largest = 0

    def _record(self, key: _Key, program: Callable[[Inputs], None], inputs: Inputs) -> None:
        # Less than twice what the largest needs cannot be saved by starting again.
        if self._recorder.bytes > max(self._recorder.most_bytes, 2 * self._largest):
            self._drop_all()
        try:
            graph, read = self._recorded_with_room(program, inputs)
        except RuntimeError as error:
            cause = list(_chain(error))[-1]
            self.failure = " ".join(str(cause).split())[:300] or type(cause).__name__
            warnings.warn(
                "steps of this method cannot be replayed on the GPU and run from Python, which is "
                f"slower: {self.failure}",
                stacklevel=3,
            )
            program(inputs)
            return
        self._graphs[key] = graph, read
        self._used[key] = self._calls
        graph.replay()

    def _recorded_with_room(
        self, program: Callable[[Inputs], None], inputs: Inputs
    ) -> tuple[Graph, list[Any]]:
        """Record a program. If memory runs out, drop all graphs and try once more."""
        try:
            return self._recorded(program, inputs)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
        self._drop_all()
        return self._recorded(program, inputs)

    def _recorded(
        self, program: Callable[[Inputs], None], inputs: Inputs
    ) -> tuple[Graph, list[Any]]:
        """Record a program that reads copies of the inputs; return both."""
        read = [_copied(each) for each in inputs]
        before = self._recorder.bytes
        if not self._collected:
            # Frees the memory that earlier runs of the process have left. Once is enough: this
            # takes as long as many steps.
            gc.collect()
            self._collected = True
        with _only_recording():
            graph = self._recorder.record(lambda: program(read))
        self._largest = max(self._largest, self._recorder.bytes - before)
        return graph, read


# CUDA refuses to destroy a graph while another one is captured, and the capture fails. So graphs
# that are to be dropped meanwhile wait here.
_recording = False
_waiting: list[dict[Any, Any]] = []


def _drop(graphs: dict[Any, Any]) -> None:
    """Drop graphs, now or after the current recording."""
    if _recording:
        _waiting.append(dict(graphs))
    graphs.clear()


@contextmanager
def _only_recording() -> Iterator[None]:
    """Keep graphs from being destroyed in the block, by the garbage collector or otherwise."""
    global _recording
    enabled = gc.isenabled()
    gc.disable()
    _recording = True
    try:
        yield
    finally:
        _recording = False
        _waiting.clear()
        if enabled:
            gc.enable()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and the errors before it.

    An error in a capture is followed by another one, which says only that the capture cannot end.
    """
    while error is not None:
        yield error
        error = error.__context__


def _out_of_memory(error: BaseException) -> bool:
    """Return whether memory has run out, perhaps in a capture that could not be ended then."""
    return any(isinstance(each, torch.OutOfMemoryError) for each in _chain(error))


def _copied(inputs: Any) -> Any:
    """Copy the tensors of a dataclass."""
    copies = {
        field.name: value.clone(memory_format=torch.contiguous_format)
        for field in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }
    return dataclasses.replace(inputs, **copies)


def _tensors(inputs: Inputs) -> list[Tensor]:
    """List the tensors of dataclasses."""
    values = (getattr(each, field.name) for each in inputs for field in dataclasses.fields(each))
    return [value for value in values if isinstance(value, Tensor)]
