"""Which samples every client of a chunk sees at which step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.engine.random import Purpose, fold_tensor, permutations
from equipoise.federation import Split


@dataclass(frozen=True)
class Batches:
    """The batches of one phase, for clients ordered by falling number of steps.

    Attributes
    ----------
    positions : Tensor
        Positions in the federation's data, ``[clients, steps, batch_size]``; padding repeats a sample of the client.
    counts : int array
        How many of the ``batch_size`` rows are samples, ``[clients, steps]``.
    steps : int array
        How many steps each client makes, ``[clients]``, never rising.
    keys : Tensor
        Key of the random numbers of each client and step, ``[clients, steps]``.
    """

    positions: Tensor
    counts: NDArray[np.int64]
    steps: NDArray[np.int64]
    keys: Tensor

    def active(self, step: int) -> int:
        """Give the number of clients still training at a step: the first so many of the chunk."""
        return int(np.searchsorted(-self.steps, -step, side="left"))


def draw_batches(
    split: Split,
    indices: Tensor,
    clients: NDArray[np.int64],
    keys: Tensor,
    *,
    phase: int,
    batch_size: int,
    epochs: int,
    steps: int | None,
    shuffle: bool,
) -> Batches:
    """Draw the batches of a phase for a chunk of clients.

    Every epoch is a new permutation of the client's samples, cut into batches of which the last may be smaller. A fixed
    number of steps runs through as many epochs as it takes.

    Parameters
    ----------
    split : Split
        Who holds which training samples.
    indices : Tensor
        ``split.indices`` on the device.
    clients : int array
        The chunk, ordered by falling number of samples.
    keys : Tensor
        One key a client, of this round.
    phase : int
        Position of the phase in the local rule; part of every random number.
    batch_size, epochs, steps, shuffle
        As in the training settings.

    Returns
    -------
    Batches
        On the device of ``indices``.
    """
    device = indices.device
    sizes = split.offsets[clients + 1] - split.offsets[clients]
    batches_an_epoch = -(-sizes // batch_size)
    own_steps = np.full_like(sizes, steps) if steps is not None else epochs * batches_an_epoch
    longest = int(own_steps.max())

    step = np.arange(longest)
    epoch = step // batches_an_epoch[:, None]
    begin = (step % batches_an_epoch[:, None]) * batch_size
    counts = np.minimum(batch_size, sizes[:, None] - begin)

    on_device = {"sizes": sizes, "epoch": epoch, "begin": begin, "offset": split.offsets[clients]}
    moved = {name: torch.from_numpy(array).to(device) for name, array in on_device.items()}
    slot = moved["begin"].unsqueeze(-1) + torch.arange(batch_size, device=device)
    slot = torch.where(slot < moved["sizes"].view(-1, 1, 1), slot, 0)
    if shuffle:
        epochs_drawn = torch.arange(int(epoch.max()) + 1, device=device)
        epoch_keys = fold_tensor(keys.unsqueeze(1), Purpose.SHUFFLE, phase, epochs_drawn)
        order = permutations(epoch_keys, moved["sizes"].unsqueeze(1), int(sizes.max()))
        rows = torch.arange(len(clients), device=device).view(-1, 1, 1)
        slot = order[rows, moved["epoch"].unsqueeze(-1), slot]
    positions = indices[moved["offset"].view(-1, 1, 1) + slot]
    step_keys = fold_tensor(keys.unsqueeze(1), Purpose.STEP, phase, torch.arange(longest, device=device))
    return Batches(positions, counts, own_steps, step_keys)
