"""The number of steps of each client in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.engine.settings import Training
from equipoise.method import Phase
from equipoise.random import Purpose, fold_tensor, uniform

Ints = NDArray[np.int64]

# Purposes of the random numbers that are drawn for a client in a round.
_LENGTH, _STRAGGLES, _SHARE = range(3)


def batches_a_step(phase: Phase) -> int:
    """Return how many batches a step of a phase takes; a split batch counts once."""
    return 1 if phase.batch == "split" else phase.gradient.batches


def steps_of(
    phase: Phase, training: Training, sizes: Ints, keys: Tensor, *, adapting: bool = False
) -> Ints:
    """Return the number of steps of each client in a phase.

    If the training settings have a range of epochs or steps, a number is drawn once for each client
    and round. Stragglers are also drawn once for each round. A straggler stops early in every
    phase, after a share of its steps that is uniform in (0, 1].

    Parameters
    ----------
    phase : Phase
        The phase. If it has its own length, that of the training settings is ignored.
    training : Training
        The settings.
    sizes : int array
        Number of samples of each client.
    keys : Tensor
        One key per client, of this round.
    adapting : bool
        Whether models are adapted for evaluation. Then the upper end of a range is used, and there
        are no stragglers.

    Returns
    -------
    int array
        At least 1 each.

    Examples
    --------
    >>> sizes, keys = np.array([40, 10, 25]), fold_tensor(0, torch.arange(3))
    >>> steps_of(Phase(), Training(epochs=2), sizes, keys).tolist()
    [8, 2, 6]
    >>> drawn = steps_of(Phase(), Training(steps=(3, 5)), sizes, keys)
    >>> bool((drawn >= 3).all() and (drawn <= 5).all())
    True
    """
    keys = keys.cpu()

    def length(given: int | tuple[int, int]) -> Ints:
        low, high = given if isinstance(given, tuple) else (given, given)
        if low == high or adapting:
            return np.full_like(sizes, high)
        return low + np.floor((high - low + 1) * _uniform(keys, _LENGTH)).astype(np.int64)

    fixed = phase.steps or (None if phase.epochs else training.steps)
    if fixed is not None:
        steps = length(fixed) * phase.turns
    else:
        batches = -(-sizes // training.batch_size)
        steps = -(
            -length(phase.epochs or training.epochs)
            * phase.turns
            * batches
            // batches_a_step(phase)
        )
    if training.stragglers and not adapting:
        straggles = _uniform(keys, _STRAGGLES) < training.stragglers
        partial = np.ceil((1 - _uniform(keys, _SHARE)) * steps).astype(np.int64)
        steps = np.where(straggles, partial, steps)
    return steps


def _uniform(keys: Tensor, what: int) -> NDArray[np.float64]:
    """Draw a number in [0, 1) for each client."""
    drawn: NDArray[np.float64] = uniform(
        fold_tensor(keys, Purpose.WORK, what), torch.float64
    ).numpy()
    return drawn


def chunks(order: Ints, work: Sequence[Ints], size: int) -> Iterator[Ints]:
    """Divide clients into chunks in which the number of steps does not increase, in any phase.

    Parameters
    ----------
    order : int array
        The clients in the order in which they are stacked.
    work : sequence of int arrays
        The steps of each client, one array per phase.
    size : int
        The largest chunk.

    Yields
    ------
    int array
        Some clients of ``order``.

    Examples
    --------
    >>> work = [np.array([4, 4, 5, 1]), np.array([2, 1, 2, 3])]
    >>> [chunk.tolist() for chunk in chunks(np.array([2, 0, 1, 3]), work, 3)]
    [[2, 0, 1], [3]]
    """
    rises = np.zeros(len(order), bool)
    for own in work:
        rises[1:] |= np.diff(own[order]) > 0
    begin = 0
    for end in [*np.flatnonzero(rises).tolist(), len(order)]:
        for first in range(begin, end, size):
            yield order[first : min(first + size, end)]
        begin = end
