"""The federation's samples where the engine can reach them."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.federation import Federation

# Data larger than this share of a GPU's memory stays on the host, and batches are copied one by one.
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
    """All samples as whole tensors, indexed per client; on the device unless they are too large for it.

    Parameters
    ----------
    federation : Federation
        Whose data.
    device : torch.device
        Where batches are wanted.
    dtype : torch.dtype
        Type of floating point samples and targets.

    Examples
    --------
    >>> from equipoise.data import load
    >>> data = DeviceData(load("digits"), torch.device("cpu"), torch.float32)
    >>> data.fetch(torch.zeros(3, 5, dtype=torch.int64))[0].shape
    torch.Size([3, 5, 1, 8, 8])
    """

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (federation.x, federation.y))
        fits = True
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            fits = x.numel() * x.element_size() <= _LARGEST_SHARE * total
        home = device if fits else torch.device("cpu")
        self.x, self.y = x.to(home), y.to(home)

    def fetch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples and targets at positions of any shape."""
        return self.inputs(positions), self.targets(positions)

    def inputs(self, positions: Tensor) -> Tensor:
        """Return the samples alone."""
        return at(self.x, positions.to(self.x.device)).to(self.device)

    def targets(self, positions: Tensor) -> Tensor:
        """Return the targets alone."""
        return at(self.y, positions.to(self.y.device)).to(self.device)
