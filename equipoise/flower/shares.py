"""Bounds of the weights that clients have by their number of samples."""

from __future__ import annotations

import torch
from torch import Tensor


def capped_shares(shares: Tensor, largest: float | None) -> Tensor:
    """Bound weights that sum to one.

    The excess above the bound is distributed to the other weights in proportion.

    Parameters
    ----------
    shares : Tensor
        The weights.
    largest : float, optional
        The bound. If it is below one over the number of weights, all weights become equal.

    Returns
    -------
    Tensor
        Weights that sum to one; the same tensor if none was above the bound.

    Examples
    --------
    >>> capped_shares(torch.tensor([0.8, 0.15, 0.05]), 0.5)
    tensor([0.5000, 0.3750, 0.1250])
    """
    if largest is None or not len(shares) or float(shares.max()) <= largest:
        return shares
    if largest * len(shares) <= 1:
        return torch.full_like(shares, 1 / len(shares))
    capped = torch.zeros_like(shares, dtype=torch.bool)
    bounded = shares
    while bool((over := (bounded > largest) & ~capped).any()):
        capped |= over
        rest = torch.where(capped, 0.0, shares)
        if not float(rest.sum()):
            # All others have weight 0: divide the rest equally.
            rest = (~capped).to(shares.dtype)
        free = 1 - largest * int(capped.sum())
        bounded = torch.where(capped, largest, rest * free / rest.sum())
    return bounded
