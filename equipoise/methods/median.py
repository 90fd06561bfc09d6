"""The coordinate-wise median and the trimmed mean (Yin et al., 2018).

Both treat every coordinate of the model separately. All clients are weighted equally, whatever
their declared sizes: with weights, a client that claims many samples could determine the median.
BatchNorm statistics are treated like parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.method import Aggregation, Cohort, Sees, State, Updates
from equipoise.methods import register
from equipoise.tree import Tree, flat_rows, pieces


@register("median", paper="Yin et al., ICML 2018", sees=Sees.UPDATES)
@dataclass(frozen=True)
class Median(Aggregation):
    """The coordinate-wise median of the clients' models.

    For an even number of clients, it is the mean of the middle two values.
    """

    usual_weights = "uniform"
    ignores_prior = "a median weights clients equally"

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Return the medians."""
        return state.with_global(trimmed(updates, (len(cohort.ids) - 1) // 2))


@register("trimmedmean", paper="Yin et al., ICML 2018", sees=Sees.UPDATES)
@dataclass(frozen=True)
class TrimmedMean(Aggregation):
    """The coordinate-wise mean of the clients' models without the largest and smallest values.

    For n clients, ⌈share · n⌉ values are left out at either end, but at most ⌊(n − 1) / 2⌋, which
    gives the median.

    Parameters
    ----------
    share : float
        β, the share of clients that may be hostile, from 0 to below 0.5.
    """

    share: float = 0.1
    usual_weights = "uniform"
    ignores_prior = "a trimmed mean weights clients equally"

    def __post_init__(self) -> None:
        """Refuse a share that would leave out all values."""
        if not 0 <= self.share < 0.5:
            raise InputError(
                f"trimmedmean.share must be at least 0 and below 0.5, got {self.share!r}"
            )

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Return the trimmed means."""
        clients = len(cohort.ids)
        # In floating point, 0.1 · 30 is slightly more than 3.
        ends = math.ceil(self.share * clients - 1e-9)
        return state.with_global(trimmed(updates, min(ends, (clients - 1) // 2)))


def trimmed(updates: Updates, ends: int) -> Tree:
    """Return the mean of each coordinate without its ``ends`` largest and smallest values.

    Parameters
    ----------
    updates : Updates
        The updates of the cohort.
    ends : int
        Number of values left out at either end.

    Returns
    -------
    Tree
        In the dtype of the updates.

    Examples
    --------
    >>> four = Updates({"w": torch.tensor([[1.0], [2.0], [4.0], [1e9]])}, {}, {}, {})
    >>> trimmed(four, 1)
    {'w': tensor([3.])}
    """
    return {
        name: _trimmed(stack, ends) for name, stack in {**updates.params, **updates.buffers}.items()
    }


def _trimmed(stack: Tensor, ends: int) -> Tensor:
    exchanges = _exchanges(len(stack))
    means = []
    for piece in pieces(flat_rows(stack)):
        rows = list(piece.unbind())
        for low, high in exchanges:
            rows[low], rows[high] = (
                torch.minimum(rows[low], rows[high]),
                torch.maximum(rows[low], rows[high]),
            )
        means.append(torch.stack(rows[ends : len(rows) - ends]).mean(dim=0, dtype=torch.float64))
    return torch.cat(means).view(stack.shape[1:]).to(stack.dtype)


@cache
def _exchanges(count: int) -> tuple[tuple[int, int], ...]:
    """Return the exchanges of rows that sort ``count`` rows: Batcher's odd-even merge sort.

    Exchanging whole rows is an order of magnitude faster than sorting short columns.
    """
    pairs = []
    merged = 1
    while merged < count:
        gap = merged
        while gap:
            for first in range(gap % merged, count - gap, 2 * gap):
                for low in range(first, min(first + gap, count - gap)):
                    if low // (2 * merged) == (low + gap) // (2 * merged):
                        pairs.append((low, low + gap))
            gap //= 2
        merged *= 2
    return tuple(pairs)
