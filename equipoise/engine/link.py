"""Messages between the processes of a run, through ``torch.distributed``.

A message is any object that can be pickled. Its tensors are sent as they are, without a copy, and
what was on a GPU is put on the receiver's device.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from equipoise import reused_memory
from equipoise.errors import RunError

# A process waits for the next message as long as the server needs. One that has ended is noticed
# at once, because its connection is closed.
PATIENCE = timedelta(days=365)
# Smaller tensors travel inside the pickled text: a message of their own would take longer.
_SMALL = 1 << 16


class ProcessLost(RunError):
    """Raised when another process of the run has ended.

    Parameters
    ----------
    rank : int or None
        Which one, if that is known.
    reason : str, optional
        Why, if it has said so.

    Examples
    --------
    >>> str(ProcessLost(1))
    'process 1 of the run has ended'
    """

    def __init__(self, rank: int | None, reason: str | None = None) -> None:
        which = "another process" if rank is None else f"process {rank}"
        super().__init__(f"{which} of the run has ended" + (f" ({reason})" if reason else ""))


class Link:
    """The connection of one process to the others.

    Parameters
    ----------
    group : ProcessGroup
        A process group of ``torch.distributed`` for tensors on the CPU (``gloo``).
    device : torch.device, optional
        Where to put tensors that were on the sender's GPU.

    Attributes
    ----------
    rank : int
        The number of this process. Process 0 is the server.
    size : int
        How many processes there are.

    Examples
    --------
    >>> import tempfile
    >>> store = torch.distributed.FileStore(tempfile.mkdtemp() + "/store", 1)
    >>> link = Link(torch.distributed.ProcessGroupGloo(store, 0, 1, PATIENCE))
    >>> link.broadcast({"weights": torch.ones(2)}), link.rank, link.size
    ({'weights': tensor([1., 1.])}, 0, 1)
    """

    def __init__(self, group: Any, device: torch.device | None = None) -> None:
        self._group = group
        self.device = device or torch.device("cpu")
        self.rank: int = group.rank()
        self.size: int = group.size()

    def broadcast(self, message: Any = None) -> Any:
        """Send a message from process 0 to all others, and return it everywhere."""
        sends = self.rank == 0
        head, tensors = _packed(message) if sends else (None, [])
        with self._talking_to(None if sends else 0):
            length = torch.tensor([len(head) if head is not None else 0])
            self._group.broadcast(length, 0).wait()
            head = torch.empty(int(length), dtype=torch.uint8) if head is None else head
            self._group.broadcast(head, 0).wait()
            large = iter(tensors) if sends else _received(head)
            for tensor in large:
                self._group.broadcast(tensor, 0).wait()
                tensors += [] if sends else [tensor]
        return message if sends else self._unpacked(head, tensors)

    def send(self, message: Any, to: int) -> None:
        """Send a message to another process."""
        head, tensors = _packed(message)
        with self._talking_to(to):
            for tensor in (torch.tensor([len(head)]), head, *tensors):
                self._group.send([tensor], to, 0).wait()

    def receive(self, source: int) -> Any:
        """Wait for a message of another process."""
        with self._talking_to(source):
            length = torch.zeros(1, dtype=torch.int64)
            self._group.recv([length], source, 0).wait()
            head = torch.empty(int(length), dtype=torch.uint8)
            self._group.recv([head], source, 0).wait()
            tensors = list(_received(head))
            for tensor in tensors:
                self._group.recv([tensor], source, 0).wait()
        return self._unpacked(head, tensors)

    @contextmanager
    def _talking_to(self, rank: int | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ProcessLost(rank) from error

    def _unpacked(self, head: Tensor, tensors: list[Tensor]) -> Any:
        large = iter(tensors)

        def tensor_of(form: _Form) -> Tensor:
            dtype, shape, on_gpu, content = form
            if content is None:
                tensor = next(large)
            elif content:
                # Copied, because kernels round differently for other alignments in memory.
                found = torch.frombuffer(bytearray(content), dtype=dtype)
                tensor = found.clone().reshape(shape)
            else:
                tensor = torch.empty(shape, dtype=dtype)
            return tensor.to(self.device) if on_gpu else tensor

        return _Reader(_text(head), tensor_of).load()


# The type and the shape of a tensor, whether it was on a GPU, and its content if it is small.
_Form = tuple[torch.dtype, torch.Size, bool, bytes | None]


class _Writer(pickle.Pickler):
    """Sets large tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.large: list[Tensor] = []
        self.forms: list[_Form] = []

    def persistent_id(self, value: Any) -> _Form | None:
        if not isinstance(value, Tensor):
            return None
        plain = value.detach().cpu().contiguous()
        if plain.numel() * plain.itemsize >= _SMALL:
            self.large.append(plain)
            self.forms.append((plain.dtype, plain.shape, value.is_cuda, None))
            return self.forms[-1]
        # Copied, because a single element may have any stride, also 0, and then no view as bytes.
        plain = plain.clone(memory_format=torch.contiguous_format)
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return plain.dtype, plain.shape, value.is_cuda, content


class _Reader(pickle.Unpickler):
    def __init__(self, text: bytes, tensor_of: Any) -> None:
        # The forms of large tensors come before the message.
        file = io.BytesIO(text)
        pickle.load(file)
        super().__init__(file)
        self._tensor_of = tensor_of

    def persistent_load(self, form: Any) -> Any:
        return self._tensor_of(form)


def _packed(message: Any) -> tuple[Tensor, list[Tensor]]:
    """Return a message as bytes, and its large tensors."""
    file = io.BytesIO()
    writer = _Writer(file)
    writer.dump(message)
    text = pickle.dumps(writer.forms) + file.getvalue()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), writer.large


def _text(head: Tensor) -> bytes:
    content: bytes = head.numpy().tobytes()
    return content


def _received(head: Tensor) -> Iterator[Tensor]:
    """Make room for the large tensors of a message."""
    forms: list[_Form] = pickle.load(io.BytesIO(_text(head)))
    for dtype, shape, _, _ in forms:
        yield reused_memory.empty(shape, dtype)


class Alone:
    """The connection of a process without others."""

    rank, size = 0, 1
    device = torch.device("cpu")

    def broadcast(self, message: Any = None) -> Any:
        """Return the message."""
        return message

    def send(self, message: Any, to: int) -> None:
        """Refuse: there is nobody."""
        raise RunError(f"there is no process {to}")

    def receive(self, source: int) -> Any:
        """Refuse: there is nobody."""
        raise RunError(f"there is no process {source}")
