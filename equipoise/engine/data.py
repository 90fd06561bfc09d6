"""The federation's samples on the device."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from equipoise.federation import Federation, Split
from equipoise.samples import Samples

# Data larger than this share of a GPU's memory stay on the host, and batches are copied one by one.
_LARGEST_SHARE = 0.4


def at(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of a tensor at positions of any shape.

    Examples
    --------
    >>> at(torch.arange(10, 16).view(3, 2), torch.tensor([[2], [0]]))
    tensor([[[14, 15]],
    <BLANKLINE>
            [[10, 11]]])
    """
    return tensor.index_select(0, positions.flatten()).view(*positions.shape, *tensor.shape[1:])


class DeviceData:
    """The samples of all clients, fetched by position.

    A tensor is copied to the device as a whole if it fits. If it does not, or if samples are on
    disk, each batch is read when it is needed and copied to the device. Targets are always on the
    device.

    Parameters
    ----------
    federation : Federation
        The federation with the data.
    device : torch.device
        The device of batches.
    dtype : torch.dtype
        Type of floating point samples and targets.
    x : Tensor or Samples, optional
        Samples that replace those of the federation, such as encoded ones.

    Attributes
    ----------
    orders : mapping
        In which order the samples of a split are evaluated, kept by evaluation.

    Examples
    --------
    >>> from equipoise.data import load
    >>> data = DeviceData(load("digits"), torch.device("cpu"), torch.float32)
    >>> data.fetch(torch.zeros(3, 5, dtype=torch.int64))[0].shape
    torch.Size([3, 5, 1, 8, 8])
    """

    def __init__(
        self,
        federation: Federation,
        device: torch.device,
        dtype: torch.dtype,
        x: Tensor | Samples | None = None,
    ) -> None:
        self.device = device
        self.orders: WeakKeyDictionary[Split, Any] = WeakKeyDictionary()
        self.x = federation.x if x is None else x
        self.y = federation.y.to(device, _target_type(federation.y.dtype, dtype))
        self._dtype = _target_type(self.x.dtype, dtype)
        self._resident = isinstance(self.x, Tensor) and _fits(
            self.x.numel() * self._dtype.itemsize, device
        )
        if isinstance(self.x, Tensor) and self._resident:
            self.x = self.x.to(device, self._dtype)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def on_gpu(self) -> bool:
        """Whether all samples are in the memory of a GPU, which can then replay steps."""
        return self._resident and self.device.type == "cuda"

    @property
    def on_cpu(self) -> bool:
        """Whether all samples are in memory, and the device is a CPU."""
        return self._resident and self.device.type == "cpu"

    def fetch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples and targets at positions of any shape."""
        return self.inputs(positions), self.targets(positions)

    def inputs(self, positions: Tensor) -> Tensor:
        """Return only the samples."""
        if isinstance(self.x, Tensor) and self._resident:
            return at(self.x, positions.to(self.device, non_blocking=True))
        rows: Tensor = _Read.apply(positions, self)
        return rows

    def targets(self, positions: Tensor) -> Tensor:
        """Return only the targets."""
        return at(self.y, positions.to(self.device, non_blocking=True))

    def read(self, positions: Tensor) -> Tensor:
        """Read samples that are not on the device, each once and in the order of storage."""
        wanted, index = torch.unique(positions.cpu(), return_inverse=True)
        return at(self.x[wanted].to(self.device, self._dtype), index.to(self.device))


class _Read(torch.autograd.Function):
    """`DeviceData.read` with a ``vmap`` rule, which reads the samples of all clients at once."""

    @staticmethod
    def forward(positions: Tensor, data: DeviceData) -> Tensor:
        return data.read(positions)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], positions: Tensor, data: DeviceData
    ) -> tuple[Tensor, int]:
        rows: Tensor = _Read.apply(positions.movedim(in_dims[0], 0), data)
        return rows, 0


def _target_type(given: torch.dtype, floating: torch.dtype) -> torch.dtype:
    """Return the type of values on the device: ``floating`` for floating point, else unchanged."""
    return floating if given.is_floating_point else given


def _fits(size: int, device: torch.device) -> bool:
    """Return whether this many bytes may be copied to the device."""
    return (
        device.type != "cuda"
        or size <= _LARGEST_SHARE * torch.cuda.get_device_properties(device).total_memory
    )
