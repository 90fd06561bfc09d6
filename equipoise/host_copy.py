"""Copies of tensors from a device to the host, started early and read late."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host, which a GPU makes when it has computed the tensor.

    The host launches further work in the meantime, and waits only when it reads the copy. The
    tensor must not be changed before that.

    Parameters
    ----------
    tensor : Tensor
        What to copy. A tensor on the CPU is not copied.

    Examples
    --------
    >>> losses = HostCopy(torch.tensor([0.5, 1.5]))
    >>> losses.read()
    tensor([0.5000, 1.5000])
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # PyTorch copies to pinned memory here, so that the host need not wait.
            self._values = tensor.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            self._values = tensor.cpu()

    def read(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
