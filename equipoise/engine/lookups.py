"""Whether a model takes all whole numbers in the samples, found on the host before training.

A number beyond the rows of an embedding is an error that names it on a CPU. On a GPU it ends the
CUDA context, after which nothing works in the process. So the largest and smallest numbers are
tried on the host, and no later call reads a row that does not exist.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.engine.model_checks import naming
from equipoise.engine.network import Network
from equipoise.federation import Federation
from equipoise.federation_checks import whose
from equipoise.samples import blocks
from equipoise.splits import SPLITS

# How many samples are called one by one at most. Up to two for each position of a sample hold the
# largest and smallest numbers.
_MOST_TRIED = 256


@torch.no_grad()
def check_lookups(network: Network, federation: Federation, tried: Tensor) -> None:
    """Refuse whole numbers in samples that the model has no row for.

    The model is called with the largest and with the smallest number at each position of a sample,
    because an embedding may serve some positions only. If it fails, samples that hold these numbers
    are called one by one, and the first that fails is named. If all of them fail, and not by an
    index, nothing is refused: the model may need a GPU, or samples of floating point, which its
    trial reports.

    Bytes of images are not checked; they are not looked up, and there may be many.

    Parameters
    ----------
    network : Network
        The model.
    federation : Federation
        The samples. Those that nobody uses are left out.
    tried : Tensor
        Positions of the samples of the model's trial, which may be in no split.

    Raises
    ------
    InputError
        If the model cannot take a sample.
    """
    x = federation.x
    if x.dtype.is_floating_point or (x.dtype == torch.uint8 and len(x.shape) == 4):
        return
    used = _used(federation, tried)
    lowest, highest = _bounds(federation, used)
    call = copy.deepcopy(network.given).to(device="cpu", dtype=network.dtype).eval()
    extremes = torch.from_numpy(np.stack([lowest, highest])).view(2, *x.shape[1:])
    if _error(call, extremes) is None:
        return
    refused: tuple[int, Exception] | None = None
    accepted = False
    for sample in _holders(federation, used, lowest, highest):
        error = _error(call, x[torch.tensor([sample])])
        if error is None:
            accepted = True
        elif refused is None:
            refused = sample, error
        if refused is not None and (accepted or isinstance(refused[1], IndexError)):
            sample, error = refused
            with naming(x[torch.tensor([sample])], whose(federation, sample)):
                raise error


def _error(call: nn.Module, x: Tensor) -> Exception | None:
    """Return the error of a call, if there is one."""
    try:
        call(x)
    except Exception as error:
        # A model that needs a GPU may fail in any way.
        return error
    return None


def _used(federation: Federation, tried: Tensor) -> NDArray[np.bool_]:
    """Return which samples are in a split of a client or of the server, or in the trial."""
    splits = (federation.split(name).indices for name in SPLITS)
    used = np.zeros(len(federation.x), bool)
    for positions in (*splits, *federation.server.values(), tried.numpy()):
        used[positions] = True
    return used


def _blocks(
    federation: Federation, used: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Read the used samples a block at a time, as rows of numbers, with their positions."""
    for first, block in blocks(federation.x):
        rows = np.flatnonzero(used[first : first + len(block)])
        if len(rows):
            values = block.numpy().reshape(len(block), -1)
            yield first + rows, values if len(rows) == len(values) else values[rows]


def _bounds(federation: Federation, used: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the smallest and the largest number at each position of a sample."""
    # Not by PyTorch, which takes ten times as long.
    found = [(block.min(0), block.max(0)) for _, block in _blocks(federation, used)]
    lowest, highest = zip(*found, strict=True)
    return np.min(lowest, axis=0), np.max(highest, axis=0)


def _holders(
    federation: Federation,
    used: NDArray[np.bool_],
    lowest: NDArray[Any],
    highest: NDArray[Any],
) -> list[int]:
    """List samples with the largest and smallest numbers, those with the extremes of all first."""
    low, high = (np.full(len(lowest), -1) for _ in range(2))
    for positions, block in _blocks(federation, used):
        for holder, bound in ((low, lowest), (high, highest)):
            holds = block == bound
            new = (holder < 0) & holds.any(0)
            holder[new] = positions[holds.argmax(0)[new]]
    ordered = np.stack([high[np.argsort(highest)[::-1]], low[np.argsort(lowest)]], axis=1)
    return list(dict.fromkeys(ordered.flatten().tolist()))[:_MOST_TRIED]
