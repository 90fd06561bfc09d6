"""The coordinate-wise median and the trimmed mean (Yin et al., 2018).

Both treat every number of the model on its own. All clients count the same, whatever sizes they have declared: a weight
would let a client that claims many samples decide the median. BatchNorm statistics are treated like parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.method import Aggregation, Cohort, Sees, State, Updates
from equipoise.methods import register
from equipoise.tree import Tree, flat_rows


@register("median", paper="Yin et al., ICML 2018", sees=Sees.UPDATES)
@dataclass(frozen=True)
class Median(Aggregation):
    """The median of the clients' models, number by number; of an even number of clients, the mean of the middle two."""

    usual_weights = "uniform"

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Take medians."""
        return state.with_global(trimmed(updates, (len(cohort.ids) - 1) // 2))


@register("trimmedmean", paper="Yin et al., ICML 2018", sees=Sees.UPDATES)
@dataclass(frozen=True)
class TrimmedMean(Aggregation):
    """The mean of the clients' models without the largest and smallest values, number by number.

    Of n clients, ⌈share · n⌉ values are left out at either end, but never so many that none remain: at most
    ⌊(n − 1) / 2⌋, which makes it the median.

    Parameters
    ----------
    share : float
        β, the share of clients that may be hostile, from 0 to below 0.5.
    """

    share: float = 0.1
    usual_weights = "uniform"

    def __post_init__(self) -> None:
        """Refuse a share that leaves nothing."""
        if not 0 <= self.share < 0.5:
            raise InputError(f"trimmedmean.share must be at least 0 and below 0.5, got {self.share!r}")

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Take trimmed means."""
        clients = len(cohort.ids)
        # 0.1 · 30 is a little more than 3.
        ends = math.ceil(self.share * clients - 1e-9)
        return state.with_global(trimmed(updates, min(ends, (clients - 1) // 2)))


# How many numbers are sorted at a time, which limits the memory of their float64 copy.
_PIECE = 1 << 20


def trimmed(updates: Updates, ends: int) -> Tree:
    """Average the clients' models number by number, without the ``ends`` largest and smallest values.

    Parameters
    ----------
    updates : Updates
        What the cohort sent.
    ends : int
        How many values are left out at either end.

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
    return {name: _trimmed(stack, ends) for name, stack in {**updates.params, **updates.buffers}.items()}


def _trimmed(stack: Tensor, ends: int) -> Tensor:
    rows = flat_rows(stack)
    middle = slice(ends, len(rows) - ends)
    # Sorting is fastest if the values of one number are next to each other.
    pieces = (piece.T.contiguous().sort(dim=1).values for piece in rows.split(max(1, _PIECE // len(rows)), dim=1))
    means = [values[:, middle].double().mean(dim=1) for values in pieces]
    return torch.cat(means).view(stack.shape[1:]).to(stack.dtype) if means else stack[0].clone()
