"""Random numbers as a pure function of what they are for.

There is no generator and no state. Every number is a 64-bit hash of (seed, round, client, purpose,
...). So it does not depend on other clients, their order or the chunk size. The hash is the
finaliser of SplitMix64 (Steele, Lea and Flood, 2014), folded over the coordinates. It is
implemented for NumPy arrays on the host (sampling of clients) and for Torch tensors on the device
(shuffles, dropout, augmentation). Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise.models.kernel_modules import module_with_triton

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK = (1 << 64) - 1
# A Feistel network over few values is not uniform. From this size on, its bias is much smaller
# than sampling noise.
_SMALL_POPULATION = 4096
_FEISTEL_ROUNDS = 6


class Purpose(IntEnum):
    """What a random number is for. It is part of every key, so uses never share numbers."""

    SAMPLE = 1
    SHUFFLE = 2
    STEP = 3
    AUGMENT = 4
    ADAPT = 5
    REPORT = 6
    EXTEND = 7
    SERVER = 8
    WORK = 9
    NOISE = 20
    NOISE_OF_FIRST = 21
    NOISE_OF_INDEX = 22


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's CPU generator while the block runs, and restore it afterwards.

    Examples
    --------
    >>> with seeded(1):
    ...     first = torch.rand(1)
    >>> with seeded(1):
    ...     bool(torch.rand(1) == first)
    True
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed the GPUs too, which fork_rng(devices=[]) does not restore.
        torch.default_generator.manual_seed(seed & (_MASK >> 1))
        yield


def _signed(value: int) -> int:
    """Return the two's-complement reading of a 64-bit pattern, which is how Torch stores it."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(z: int) -> int:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        z = ((z ^ (z >> shift)) * multiplier) & _MASK
    return z ^ (z >> _SHIFTS[2])


def _mix_array(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
    return z ^ (z >> np.uint64(_SHIFTS[2]))


def _kernels(z: Tensor) -> Any:
    """Return the module of GPU kernels if it can hash these keys, else ``None``."""
    if not z.is_cuda or z.dtype != torch.int64:
        return None
    return module_with_triton("hash_kernels", z.device)


def _mix_tensor(z: Tensor, step: int = 0) -> Tensor:
    """Add a number to keys, and hash them."""
    if (kernels := _kernels(z)) is not None:
        mixed: Tensor = kernels.Mixed.apply(z, step)
        return mixed
    if step:
        z = z + step
    # Torch shifts int64 arithmetically; masking the sign bits away makes the shift logical.
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        z = (z ^ ((z >> shift) & (_MASK >> shift))) * _signed(multiplier)
    return z ^ ((z >> _SHIFTS[2]) & (_MASK >> _SHIFTS[2]))


def fold(key: int, *coordinates: int) -> int:
    """Derive a key from another key and integer coordinates.

    Examples
    --------
    >>> fold(0, 1) == fold(0, 1), fold(0, 1) == fold(1, 0)
    (True, False)
    """
    key &= _MASK
    for coordinate in coordinates:
        key = _mix_int((key + _GOLDEN * (int(coordinate) + 1)) & _MASK)
    return key


def fold_array(
    key: npt.NDArray[np.int64] | int, *coordinates: npt.NDArray[np.int64] | int
) -> npt.NDArray[np.int64]:
    """Derive keys elementwise on the host, where this takes less time than with tensors.

    The key or the first coordinate is an array. Arguments are broadcast.

    Examples
    --------
    >>> keys = fold_array(7, np.arange(3))
    >>> keys[2].item() % 2**64 == fold(7, 2)
    True
    """
    mixed: Any = key.astype(np.uint64) if isinstance(key, np.ndarray) else np.uint64(key & _MASK)
    for coordinate in coordinates:
        step = (
            (coordinate.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
            if isinstance(coordinate, np.ndarray)
            else np.uint64(_GOLDEN * (coordinate + 1) & _MASK)
        )
        mixed = _mix_array(mixed + step)
    keys: npt.NDArray[np.int64] = mixed.view(np.int64)
    return keys


def fold_tensor(key: Tensor | int, *coordinates: Tensor | int) -> Tensor:
    """Derive keys elementwise on the device.

    At least one argument is an int64 tensor. Arguments are broadcast.

    Examples
    --------
    >>> keys = fold_tensor(7, torch.arange(3))
    >>> keys[2].item() % 2**64 == fold(7, 2)
    True
    """
    result: Any = key if isinstance(key, Tensor) else _signed(key)
    for coordinate in coordinates:
        if isinstance(coordinate, Tensor):
            result = _mix_tensor(result + (coordinate + 1) * _signed(_GOLDEN))
        elif isinstance(result, Tensor):
            result = _mix_tensor(result, _signed(_GOLDEN * (coordinate + 1)))
        else:
            result = _signed(fold(result, coordinate))
    return result


def uniform(keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn keys into numbers in [0, 1).

    The top 24 bits are used, so that float32 represents the numbers exactly.

    Examples
    --------
    >>> numbers = uniform(fold_tensor(0, torch.arange(1000)))
    >>> bool(((numbers >= 0) & (numbers < 1)).all()), round(numbers.mean().item(), 1)
    (True, 0.5)
    """
    return ((keys >> 40) & 0xFFFFFF).to(dtype) / (1 << 24)


def normal(keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn keys into numbers with a standard normal distribution (Box and Muller, 1958).

    Examples
    --------
    >>> numbers = normal(fold_tensor(0, torch.arange(10000)))
    >>> abs(numbers.mean().item()) < 0.05, round(numbers.std().item(), 1)
    (True, 1.0)
    """
    radius, angle = (uniform(fold_tensor(keys, half), torch.float64) for half in (0, 1))
    # 1 - u is above 0, so that the logarithm is finite.
    return ((-2 * (1 - radius).log()).sqrt() * (2 * torch.pi * angle).cos()).to(dtype)


def keep_mask(key: Tensor, shape: torch.Size, threshold: int) -> Tensor:
    """Draw a boolean mask in which each element is true with probability ``threshold / 65536``.

    One hash is used for four elements, sixteen bits each, because the time for random numbers
    matters in dropout.
    """
    count = shape.numel()
    hashes = fold_tensor(key, torch.arange((count + 3) // 4, device=key.device))
    lanes = torch.stack([(hashes >> shift) & 0xFFFF for shift in (0, 16, 32, 48)], dim=-1)
    return (lanes.flatten()[:count] < threshold).view(shape)


def permutations(keys: Tensor, sizes: Tensor, width: int) -> Tensor:
    """Shuffle ``range(sizes[k])`` for every key.

    Parameters
    ----------
    keys : Tensor
        Keys of any shape ``[...]``.
    sizes : Tensor
        How many numbers each key shuffles; broadcasts against ``keys``.
    width : int
        Length of the last axis of the result, at least the largest size.

    Returns
    -------
    Tensor
        Int64 ``[..., width]``. The first ``sizes[k]`` entries are the permutation, the others are
        padding.

    Examples
    --------
    >>> order = permutations(fold_tensor(0, torch.arange(2)), torch.tensor([3, 5]), 5)
    >>> sorted(order[0, :3].tolist()), sorted(order[1].tolist())
    ([0, 1, 2], [0, 1, 2, 3, 4])
    """
    elements = torch.arange(width, device=keys.device)
    # Without the top bit, hashes are not negative, and the largest int64 sorts padding last.
    hashes = fold_tensor(keys.unsqueeze(-1), elements) & (_MASK >> 1)
    hashes = torch.where(elements < sizes.unsqueeze(-1), hashes, torch.iinfo(torch.int64).max)
    return hashes.argsort(dim=-1, stable=True)


def permutations_array(
    keys: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], width: int
) -> npt.NDArray[np.int64]:
    """Shuffle on the host, where few permutations take less time than with tensors.

    Parameters
    ----------
    keys, sizes, width
        As those of :func:`permutations`, which returns the same.

    Examples
    --------
    >>> keys, sizes = fold_array(0, np.arange(2)), np.array([3, 5])
    >>> order = permutations(torch.from_numpy(keys), torch.from_numpy(sizes), 5)
    >>> bool((permutations_array(keys, sizes, 5) == order.numpy()).all())
    True
    """
    elements = np.arange(width)
    # Without the top bit, hashes are not negative, and the largest int64 sorts padding last.
    hashes = fold_array(keys[..., None], elements) & np.int64(_MASK >> 1)
    if (sizes < width).any():
        hashes = np.where(elements < sizes[..., None], hashes, np.iinfo(np.int64).max)
    return hashes.argsort(axis=-1, kind="stable")


def choose(key: int, population: int, count: int) -> npt.NDArray[np.int64]:
    """Choose distinct numbers below ``population`` uniformly.

    Small populations are ordered by hash. For large ones the numbers are the first images of a
    keyed permutation: a Feistel network, applied again to values outside the population. Its time
    depends on ``count`` only, so a million clients take no longer than a thousand.

    Examples
    --------
    >>> sorted(choose(3, 5, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    if population <= _SMALL_POPULATION:
        hashes = _mix_array(
            np.uint64(fold(key, 0)) + np.arange(population, dtype=np.uint64) * np.uint64(_GOLDEN)
        )
        return np.argsort(hashes, kind="stable")[:count]
    half = ((population - 1).bit_length() + 1) // 2
    low = np.uint64((1 << half) - 1)

    def permute(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> np.uint64(half), values & low
        for feistel_round in range(_FEISTEL_ROUNDS):
            mixed = _mix_array(right + np.uint64(fold(key, feistel_round)))
            left, right = right, left ^ (mixed & low)
        return (left << np.uint64(half)) | right

    chosen = permute(np.arange(count, dtype=np.uint64))
    while (outside := chosen >= population).any():
        chosen[outside] = permute(chosen[outside])
    return chosen.astype(np.int64)


def choose_by_weight(
    key: int, weights: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.int64]:
    """Choose distinct positions one by one, with probabilities proportional to the weights.

    A draw of a position that is already chosen is repeated. If this takes too long, the remaining
    positions are chosen by an exponential race, which has the same distribution. Usually a draw is
    one binary search.

    Examples
    --------
    >>> choose_by_weight(0, np.array([0.0, 1.0, 0.0, 1.0]), 2).tolist() in ([1, 3], [3, 1])
    True
    """
    cumulative = np.cumsum(weights)
    counters = np.arange(4 * count, dtype=np.uint64) * np.uint64(_GOLDEN)
    draws = (_mix_array(np.uint64(fold(key, 0)) + counters) >> np.uint64(11)).astype(
        np.float64
    ) / 2.0**53
    hits = np.searchsorted(cumulative, draws * cumulative[-1], side="right")
    chosen = list(dict.fromkeys(hits.tolist()))[:count]
    if missing := count - len(chosen):
        rest = np.setdiff1d(np.flatnonzero(weights > 0), chosen)
        seeds = _mix_array(np.uint64(fold(key, 1)) + rest.astype(np.uint64) * np.uint64(_GOLDEN))
        waiting = (
            -np.log((seeds >> np.uint64(11)).astype(np.float64) / 2.0**53 + 2.0**-54)
            / weights[rest]
        )
        chosen += rest[np.argsort(waiting, kind="stable")[:missing]].tolist()
    return np.array(chosen, dtype=np.int64)
