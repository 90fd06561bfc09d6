"""Which client holds which samples, and the division of samples into train, val and test."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.arrays import Ints, whole_numbers
from equipoise.checks import count
from equipoise.errors import InputError, few

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of each client, in compressed rows: two arrays for any number of clients.

    Parameters
    ----------
    indices : int array of shape [M]
        Positions in ``Federation.x``, client after client.
    offsets : int array of shape [K + 1]
        Client ``k`` holds ``indices[offsets[k]:offsets[k + 1]]``.

    Examples
    --------
    >>> split = Split.from_lists([[4, 2], [], [7]])
    >>> split.sizes.tolist(), split.of(0).tolist()
    ([2, 0, 1], [4, 2])
    """

    indices: Ints
    offsets: Ints

    def __post_init__(self) -> None:
        """Refuse invalid arrays."""
        for part in ("indices", "offsets"):
            object.__setattr__(self, part, whole_numbers(getattr(self, part), f"Split.{part}"))
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(self.indices):
            raise InputError(
                f"Split.offsets must start at 0 and end at {len(self.indices)}, the number of "
                f"indices; got {few(self.offsets.tolist())}"
            )
        if (falls := np.flatnonzero(np.diff(self.offsets) < 0)).size:
            raise InputError(f"Split.offsets must not decrease, but do at client {falls[0]}")

    @classmethod
    def from_lists(cls, lists: Iterable[ArrayLike]) -> Split:
        """Build a split from one list of sample positions per client.

        Parameters
        ----------
        lists : iterable of int array-likes
            The positions of the samples of client 0, of client 1, and so on.

        Returns
        -------
        Split
            The split.

        Examples
        --------
        >>> Split.from_lists([[1], [0, 2]]).offsets.tolist()
        [0, 1, 3]
        """
        rows = [
            whole_numbers(row, f"samples of client {client}") for client, row in enumerate(lists)
        ]
        return cls(
            np.concatenate([np.empty(0, np.int64), *rows]), offsets_of([len(row) for row in rows])
        )

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """Number of samples of every client, [K]."""
        return np.diff(self.offsets)

    @cached_property
    def repeats(self) -> bool:
        """Whether a sample occurs more than once."""
        return bool(len(self.indices)) and int(np.bincount(self.indices).max()) > 1

    @cached_property
    def alike(self) -> Ints:
        """The first client that holds the same samples in the same order as each client, [K].

        Examples
        --------
        >>> Split.from_lists([[4, 2], [2, 4], [4, 2]]).alike.tolist()
        [0, 1, 0]
        """
        if not self.repeats:
            return np.arange(self.clients)
        first: dict[bytes, int] = {}
        return np.array(
            [first.setdefault(self.of(k).tobytes(), k) for k in range(self.clients)], np.int64
        )

    @property
    def holders(self) -> Ints:
        """The client that holds each of ``indices``, [M]."""
        return np.repeat(np.arange(self.clients), self.sizes)

    def of(self, client: int) -> Ints:
        """Return the positions of the samples of one client.

        Parameters
        ----------
        client : int
            The client's number, from 0.

        Returns
        -------
        int array
            Positions in ``Federation.x`` (a view, not a copy).

        Examples
        --------
        >>> Split.from_lists([[1], [0, 2]]).of(1).tolist()
        [0, 2]
        """
        if not 0 <= client < self.clients:
            raise InputError(f"client {client} does not exist; valid: 0 to {self.clients - 1}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]


class ThreeSplits(NamedTuple):
    """Train, val and test, in the order of the arguments of `Federation`."""

    train: Split
    val: Split
    test: Split


def split_samples(
    held: Split,
    keys: Sequence[str],
    fractions: Sequence[float],
    seed: int,
    units: NDArray[Any] | None = None,
) -> ThreeSplits:
    """Divide the samples of every client into train, val and test.

    Shares are rounded by largest remainder. Then an empty split with a positive share gets one
    sample of the client's largest split, if that has more than one: first train, then test, then
    val. Train gets even a client's only sample. The shuffle depends only on the seed and the
    client's key.

    Parameters
    ----------
    held : Split
        All samples of every client.
    keys : sequence of str
        A permanent key of each client, such as its name.
    fractions : sequence of three floats
        Shares of train, val and test, summing to 1.
    seed : int
        Seed of the shuffle.
    units : array of shape [N], optional
        The unit of each sample, such as a patient. The samples of a unit are in the same split, and
        shares are shares of a client's units.

    Returns
    -------
    ThreeSplits
        Train, val and test.

    Examples
    --------
    >>> splits = split_samples(Split.from_lists([range(10)]), ["ann"], (0.7, 0.1, 0.2), 0)
    >>> [split.sizes.tolist() for split in splits]
    [[7], [1], [2]]
    >>> held, patients = Split.from_lists([range(6)]), np.array(["a", "a", "b", "b", "b", "c"])
    >>> splits = split_samples(held, ["ann"], (0.4, 0.3, 0.3), 0, patients)
    >>> [split.of(0).tolist() for split in splits]
    [[2, 3, 4], [0, 1], [5]]
    """
    if units is not None:
        return _split_units(
            held, keys, fractions, seed, np.unique(units, return_inverse=True)[1].reshape(-1)
        )
    seed = count(seed, "seed", least=0)
    counts = _split_sizes(held.sizes, fractions)
    holders = held.holders
    place = np.arange(len(held.indices)) - held.offsets[holders]
    shuffled = held.indices[np.lexsort((_shuffle_keys(keys, holders, place, seed), holders))]
    ends = np.cumsum(counts, axis=1)
    part = (place >= ends[holders, 0]).astype(np.int8) + (place >= ends[holders, 1])
    return ThreeSplits(*(Split(shuffled[part == i], offsets_of(counts[:, i])) for i in range(3)))


def _split_units(
    held: Split, keys: Sequence[str], fractions: Sequence[float], seed: int, units: Ints
) -> ThreeSplits:
    mine = [held.of(client) for client in range(held.clients)]
    by_unit = split_samples(
        Split.from_lists([np.unique(units[samples]) for samples in mine]), keys, fractions, seed
    )

    def samples_of(split: Split) -> Split:
        return Split.from_lists(
            [own[np.isin(units[own], split.of(client))] for client, own in enumerate(mine)]
        )

    return ThreeSplits(*map(samples_of, by_unit))


def _split_sizes(sizes: Ints, fractions: Sequence[float]) -> Ints:
    try:
        shares = np.asarray(fractions, float)
    except (ValueError, TypeError):
        shares = np.empty(0)
    if (
        shares.shape != (3,)
        or not (shares >= 0).all()
        or abs(shares.sum() - 1) > 1e-6
        or shares[0] == 0
    ):
        raise InputError(
            f"splits={fractions!r} must be three shares (train, val, test), none negative, train "
            "above 0, summing to 1"
        )
    ideal = sizes[:, None] * shares
    counts: Ints = np.floor(ideal + 1e-9).astype(np.int64)  # 0.7 * 10 may fall just below 7
    ranks = np.argsort(np.argsort(counts - ideal, axis=1, kind="stable"), axis=1)
    counts += ranks < (sizes - counts.sum(axis=1))[:, None]
    for part in (0, 2, 1):
        largest = counts.argmax(axis=1)
        spare = counts.max(axis=1) - (part != 0)  # train gets even a client's only sample
        needy = np.flatnonzero((counts[:, part] == 0) & (shares[part] > 0) & (spare > 0))
        counts[needy, largest[needy]] -= 1
        counts[needy, part] += 1
    return counts


def _shuffle_keys(keys: Sequence[str], holders: Ints, place: Ints, seed: int) -> NDArray[np.uint64]:
    """Return a hash of seed, client's key and position for every sample.

    It is SplitMix64, started from a digest of seed and key.
    """
    digests = [hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest() for key in keys]
    mixed = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)[holders]
    mixed += (place.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def offsets_of(sizes: ArrayLike) -> Ints:
    """Return the offsets of a split from the number of samples of each client.

    Examples
    --------
    >>> offsets_of([2, 0, 1]).tolist()
    [0, 2, 2, 3]
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64))])


def first_holder(split: Split, sample: int | np.integer[Any]) -> int:
    """Return the number of the first client that holds a sample of the split.

    Examples
    --------
    >>> first_holder(Split.from_lists([[4, 2], [], [7, 2]]), 7)
    2
    """
    position = np.flatnonzero(split.indices == sample)[0]
    return int(np.searchsorted(split.offsets, position, side="right")) - 1
