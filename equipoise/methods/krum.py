"""Krum and multi-Krum (Blanchard et al., 2017): only updates with close neighbours are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.checks import count
from equipoise.method import Cohort, Guard, Screened, Sees, Updates
from equipoise.methods import register
from equipoise.methods.normbound import differences
from equipoise.tree import Tree


@dataclass(frozen=True)
class _Neighbours(Guard):
    """What Krum and multi-Krum share: the scores of clients."""

    f: int = 1

    def __post_init__(self) -> None:
        """Check the number of hostile clients."""
        count(self.f, f"{self.name}.f", least=0)

    def least_clients(self) -> int:
        """Return 2 f + 3, the smallest number for which the paper's guarantee holds."""
        return 2 * self.f + 3

    def kept(self, clients: int) -> int:
        """Return the number of clients that are kept."""
        raise NotImplementedError

    def screen(self, received: Tree, updates: Updates, cohort: Cohort) -> Screened:
        """Keep the clients with the lowest scores."""
        distances = squared_distances(received, updates)
        scores = krum_scores(distances, self.f)
        best = scores.argsort(stable=True)[: self.kept(len(scores))]
        dropped = np.delete(cohort.ids, best.numpy())
        return Screened(updates, tuple(dropped.tolist()))


@register("krum", paper="Blanchard et al., NeurIPS 2017", sees=Sees.UPDATES, method=False)
@dataclass(frozen=True)
class Krum(_Neighbours):
    """Use only the update with the lowest score.

    The score of a client is the sum of its n − f − 2 smallest squared distances from others.
    The distance of two clients covers everything they send. With parameters only, it is the paper's
    ‖w_i − w_j‖². BatchNorm statistics and each tree of uploads are further terms; if there are any,
    each term is divided by its median over pairs of clients, because their scales differ. Of
    clients with equal scores, those with lower ids are kept.

    Parameters
    ----------
    f : int
        The number of clients that may be hostile. A round needs n ≥ 2 f + 3 updates.
    """

    def kept(self, clients: int) -> int:
        """Return 1."""
        return 1


@register("multikrum", paper="Blanchard et al., NeurIPS 2017", sees=Sees.UPDATES, method=False)
@dataclass(frozen=True)
class MultiKrum(_Neighbours):
    """Use only the m updates with the lowest scores, which are those of :class:`Krum`.

    Weights of the clients that are kept are those that the aggregation gives them; the paper's mean
    is that of ``weights: uniform``.

    Parameters
    ----------
    f : int
        As that of :class:`Krum`.
    m : int, optional
        At most n − f; n − f by default.
    """

    m: int | None = None

    def __post_init__(self) -> None:
        """Check both numbers."""
        super().__post_init__()
        if self.m is not None:
            count(self.m, "multikrum.m")

    def least_clients(self) -> int:
        """Return 2 f + 3, or m + f if that is more."""
        return max(super().least_clients(), (self.m or 0) + self.f)

    def kept(self, clients: int) -> int:
        """Return m."""
        return self.m or clients - self.f


def krum_scores(distances: Tensor, f: int) -> Tensor:
    """Return the sum of every client's n − f − 2 smallest squared distances to others.

    Examples
    --------
    >>> positions = torch.tensor([0.0, 1.0, 3.0, 13.0])
    >>> krum_scores((positions.unsqueeze(0) - positions.unsqueeze(1)).square(), f=0)
    tensor([ 10.,   5.,  13., 244.])
    """
    clients = len(distances)
    others = distances.clone().fill_diagonal_(torch.inf)
    return others.sort(dim=1).values[:, : clients - f - 2].sum(1)


def squared_distances(received: Tree, updates: Updates) -> Tensor:
    """Return the squared distances between all pairs of clients, in float64 on the CPU.

    Examples
    --------
    >>> two = Updates({"w": torch.tensor([[1.0], [4.0]])}, {}, {}, {})
    >>> squared_distances({"w": torch.tensor([2.0])}, two)
    tensor([[0., 9.],
            [9., 0.]], dtype=torch.float64)
    """
    trees = [
        (updates.params, received),
        (updates.buffers, received),
        *((u, {}) for u in updates.uploads.values()),
    ]
    terms = [_distances(tree, origin) for tree, origin in trees if tree]
    if len(terms) == 1:
        return terms[0]
    return torch.stack([term / _scale(term) for term in terms]).sum(0)


def _distances(stacked: Mapping[str, Tensor], origin: Mapping[str, Tensor]) -> Tensor:
    # Differences from the received model are short, so subtracting inner products loses little
    # precision.
    products = []
    for name, stack in stacked.items():
        for piece in differences(stack, origin.get(name)):
            # Differences of float32 numbers are no more exact than their products in float32, which
            # take half the time. On a GPU these may be TF32 products.
            kind = (
                torch.float64 if piece.is_cuda else torch.promote_types(piece.dtype, torch.float32)
            )
            exact = piece.to(kind)
            products.append((exact @ exact.T).double())
    gram = torch.stack(products).sum(0).cpu()
    squares = gram.diagonal()
    distances = (squares.unsqueeze(0) + squares.unsqueeze(1) - gram - gram.T).clamp_min(0)
    return distances.fill_diagonal_(0)


def _scale(distances: Tensor) -> Tensor:
    pairs = distances[~torch.eye(len(distances), dtype=torch.bool)]
    middle = pairs.median()
    largest = pairs.max()
    return middle if middle > 0 else largest if largest > 0 else torch.ones_like(middle)
