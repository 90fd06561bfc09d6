"""The samples that each client of a chunk uses in each step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.federation import Split
from equipoise.random import Purpose, fold_array, fold_tensor, permutations, permutations_array

# Up to so many random numbers, the host shuffles in less time than it takes to launch the
# operations on a GPU.
FEW = 1 << 14


@dataclass(frozen=True)
class Batches:
    """The batches of one phase, for clients ordered by decreasing number of steps.

    Attributes
    ----------
    positions : Tensor
        Positions in the federation's data, ``[clients, batches, width]``; padding repeats a sample
        of the client. The width is the batch size, or less if no client holds as many samples.
    index : Tensor
        The indices of the positions in ``held``.
    indices : Tensor
        Positions of the samples of all clients of the federation, one client after the other.
    begins : int array
        Where the samples of each client begin in ``indices``, ``[clients]``.
    sizes : int array
        Number of samples of each client, ``[clients]``.
    counts : int array
        Number of rows that are samples and not padding, ``[clients, batches]``.
    steps : int array
        Number of steps of each client, ``[clients]``, in non-increasing order.
    keys : Tensor
        Random key of each client and batch, ``[clients, batches]``.
    a_step : int
        Number of consecutive batches per step.
    """

    positions: Tensor
    index: Tensor
    indices: Tensor
    begins: NDArray[np.int64]
    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]
    steps: NDArray[np.int64]
    keys: Tensor
    a_step: int = 1

    @cached_property
    def held(self) -> Tensor:
        """Positions of all samples of the clients, one client after the other."""
        first = np.cumsum(self.sizes) - self.sizes
        where = np.arange(self.sizes.sum()) + np.repeat(self.begins - first, self.sizes)
        return self.indices[torch.from_numpy(where).to(self.indices.device)]

    def of_step(self, step: int) -> int | slice:
        """Return the batches of a step: an index for a single batch, or a slice for several."""
        return step if self.a_step == 1 else slice(step * self.a_step, (step + 1) * self.a_step)

    def split(self, parts: int) -> Batches:
        """Divide every batch into parts, which are the batches of a step.

        Part j of a batch of c samples has the samples from ⌊j c / parts⌋ to ⌊(j + 1) c / parts⌋,
        excluding the last, but at least one: in a batch with fewer samples than parts, some parts
        share a sample. Halves of a batch with an odd number of samples differ by one, and the
        second is the larger. Every part has its own random numbers.

        Parameters
        ----------
        parts : int
            Number of parts per batch.

        Returns
        -------
        Batches
            With the same number of steps, and ``parts`` batches per step.
        """
        edges = np.arange(parts + 1) * self.counts[..., None] // parts
        first, end = edges[..., :-1], np.maximum(edges[..., 1:], edges[..., :-1] + 1)
        clients, batches, width = self.positions.shape
        slot = torch.from_numpy(first).to(self.positions.device).unsqueeze(-1) + torch.arange(
            max(1, -(-width // parts)), device=self.positions.device
        )
        # Padding beyond the end of the batch repeats its first sample.
        slot = torch.where(slot < width, slot, 0).view(clients, batches, -1)

        def cut(rows: Tensor) -> Tensor:
            return rows.gather(2, slot).view(clients, batches * parts, -1)

        numbers = torch.arange(parts, device=self.keys.device)
        keys = fold_tensor(self.keys.unsqueeze(-1), numbers).view(clients, batches * parts)
        return replace(
            self,
            positions=cut(self.positions),
            index=cut(self.index),
            counts=(end - first).reshape(clients, batches * parts),
            keys=keys,
            a_step=parts,
        )

    def samples(self) -> NDArray[np.int64]:
        """Return the number of samples that each client processes, with repetitions."""
        made = np.arange(self.counts.shape[1]) < self.a_step * self.steps[:, None]
        return np.where(made, self.counts, 0).sum(1)

    def active(self, step: int) -> int:
        """Return the number of clients that train in a step: the first ones of the chunk."""
        return int(np.searchsorted(-self.steps, -step, side="left"))


def draw_batches(
    split: Split,
    indices: Tensor,
    clients: NDArray[np.int64],
    keys: Tensor,
    *,
    phase: int,
    batch_size: int,
    steps: NDArray[np.int64],
    shuffle: bool,
    a_step: int = 1,
) -> Batches:
    """Draw the batches of a phase for a chunk of clients.

    Every epoch is a new permutation of the client's samples, divided into batches of which the last
    may be smaller. Steps use as many epochs as they need. If a step has several batches, it uses
    consecutive ones: n epochs of b batches are ⌈n b / a_step⌉ steps, and if batches run out in the
    last step, it uses those of one more epoch. A client with a single batch therefore gets it
    again, in another order.

    Parameters
    ----------
    split : Split
        The training samples of each client.
    indices : Tensor
        ``split.indices`` on the device.
    clients : int array
        The chunk, ordered by decreasing number of steps.
    keys : Tensor
        One key per client, of this round. Those of batches are derived on the CPU, because many
        small operations take a GPU longer.
    phase : int
        Position of the phase in the local rule; part of every random number.
    batch_size, shuffle
        As in the training settings.
    steps : int array
        Number of steps of each client; see :func:`equipoise.engine.work.steps_of`.
    a_step : int
        Number of batches per step.

    Returns
    -------
    Batches
        On the device of ``indices``.
    """
    device = indices.device
    sizes = split.offsets[clients + 1] - split.offsets[clients]
    batch_size = min(batch_size, int(sizes.max(initial=1)))
    batches_an_epoch = -(-sizes // batch_size)
    longest = a_step * int(steps.max())

    batch = np.arange(longest)
    # Batches after a client's last step are not used, so they need no permutation.
    last = a_step * steps[:, None] - 1
    epoch = np.minimum(batch, last) // batches_an_epoch[:, None]
    begin = (batch % batches_an_epoch[:, None]) * batch_size
    counts = np.minimum(batch_size, sizes[:, None] - begin)

    of_clients = keys.cpu().numpy()[:, None]

    def keys_of(purpose: Purpose, count: int) -> NDArray[np.int64]:
        return fold_array(of_clients, purpose, phase, np.arange(count))

    begins, width = split.offsets[clients], int(sizes.max())
    slots = _Slots(
        begin=begin,
        sizes=sizes,
        width=batch_size,
        first=np.cumsum(sizes) - sizes,
        begins=begins,
        keys=keys_of(Purpose.STEP, longest),
    )
    if shuffle:
        epoch_keys = keys_of(Purpose.SHUFFLE, int(epoch.max()) + 1)
        # Where the permutation of a batch begins in those of all epochs of a client.
        slots = replace(slots, epoch_keys=epoch_keys, order_begins=epoch * width)
    numbers = max(slots.epoch_keys.size * width, begin.size * batch_size)
    there = slots.on_host(split, device) if numbers <= FEW else slots.on_device(indices)
    return Batches(
        **there,
        indices=indices,
        begins=begins,
        sizes=sizes,
        counts=counts,
        steps=steps,
        a_step=a_step,
    )


_NOTHING = np.empty((0, 0), np.int64)


@dataclass(frozen=True)
class _Slots:
    """Which of a client's shuffled samples are in which batch.

    ``epoch_keys`` and ``order_begins`` are empty if samples are not shuffled.
    """

    begin: NDArray[np.int64]
    sizes: NDArray[np.int64]
    width: int
    first: NDArray[np.int64]
    begins: NDArray[np.int64]
    keys: NDArray[np.int64]
    epoch_keys: NDArray[np.int64] = field(default_factory=lambda: _NOTHING)
    order_begins: NDArray[np.int64] = field(default_factory=lambda: _NOTHING)

    def on_host(self, split: Split, device: torch.device) -> dict[str, Tensor]:
        """Return positions, index and keys of batches, found on the host and then moved."""
        slot = self.begin[..., None] + np.arange(self.width)
        slot[slot >= self.sizes[:, None, None]] = 0
        if self.epoch_keys.size:
            longest = int(self.sizes.max())
            order = permutations_array(self.epoch_keys, self.sizes[:, None], longest)
            # All permutations of all clients, one after the other.
            rows = np.arange(len(order))[:, None] * (order.size // len(order)) + self.order_begins
            slot = order.ravel()[rows[..., None] + slot]
        found = {
            "positions": split.indices[self.begins[:, None, None] + slot],
            "index": self.first[:, None, None] + slot,
            "keys": self.keys,
        }
        return _moved(found, device)

    def on_device(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the same, found on the device."""
        names = ("begin", "sizes", "first", "begins", "keys", "epoch_keys", "order_begins")
        there = _moved({name: getattr(self, name) for name in names}, indices.device)

        def of_clients(name: str) -> Tensor:
            return there[name].view(len(self.sizes), -1, 1)

        slot = of_clients("begin") + torch.arange(self.width, device=indices.device)
        slot = torch.where(slot < of_clients("sizes"), slot, 0)
        if self.epoch_keys.size:
            longest = int(self.sizes.max())
            order = permutations(there["epoch_keys"], there["sizes"].unsqueeze(1), longest)
            where = (of_clients("order_begins") + slot).flatten(1)
            slot = order.flatten(1).gather(1, where).view_as(slot)
        return {
            "positions": indices[of_clients("begins") + slot],
            "index": of_clients("first") + slot,
            "keys": there["keys"],
        }


def _moved(arrays: dict[str, NDArray[np.int64]], device: torch.device) -> dict[str, Tensor]:
    """Move int64 arrays to a device. A GPU gets them in a single transfer."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device == torch.device("cpu"):
        return tensors
    sizes = [tensor.numel() for tensor in tensors.values()]
    # From pinned memory, so that the host need not wait for what the GPU still does.
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    torch.cat([tensor.flatten() for tensor in tensors.values()], out=packed)
    parts = packed.to(device, non_blocking=True).split(sizes)
    pairs = zip(tensors.items(), parts, strict=True)
    return {name: part.view(tensor.shape) for (name, tensor), part in pairs}
