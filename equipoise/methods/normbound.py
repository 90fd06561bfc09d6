"""A bound on the norm of updates (Sun et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.checks import real
from equipoise.method import Cohort, Guard, Screened, Sees, Updates
from equipoise.methods import register
from equipoise.tree import Tree, flat_rows, pieces


@register("norm", paper="Sun et al., 2019", sees=Sees.UPDATES, method=False)
@dataclass(frozen=True)
class NormBound(Guard):
    """Scale updates that are too long: w_k ← w + min(1, B / ‖w_k − w‖) (w_k − w).

    Updates within the bound B stay as they are, bit for bit. BatchNorm statistics and each tree of
    uploads (such as SCAFFOLD's control variates, measured from zero) have norms and bounds of their
    own, because their scale differs. The median of an even number of norms is the lower one, so
    half of the clients cannot raise it.

    Parameters
    ----------
    bound : float, optional
        B for the parameters. Without it, B is a multiple of the median norm.
    multiple : float
        The bound as a multiple of the cohort's median norm: for parameters without ``bound``, and
        always for buffers and uploads.
    drop : float, optional
        Clients are dropped if the norm of their parameters, their buffers or one of their uploads
        is more than so many times the cohort's median norm. Without it, nobody is dropped.

    Examples
    --------
    >>> NormBound(bound=2.0).multiple
    1.0
    """

    bound: float | None = None
    multiple: float = 1.0
    drop: float | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that are not positive."""
        real(self.multiple, "norm.multiple")
        if self.bound is not None:
            real(self.bound, "norm.bound")
        if self.drop is not None:
            real(self.drop, "norm.drop", least=1.0)

    def screen(self, received: Tree, updates: Updates, cohort: Cohort) -> Screened:
        """Scale what is too long, and note the norms of the parameters and who was scaled."""
        params = self._bounded(updates.params, received, self.bound)
        buffers = self._bounded(updates.buffers, received)
        uploads = {name: self._bounded(tree, {}) for name, tree in updates.uploads.items()}
        kinds = [kind for kind in (params, buffers, *uploads.values()) if kind.tree]
        dropped = torch.stack([kind.far for kind in kinds]).any(0)
        scaled = torch.stack([kind.long for kind in kinds]).any(0) & ~dropped
        bounded = replace(
            updates,
            params=params.tree,
            buffers=buffers.tree,
            uploads={name: kind.tree for name, kind in uploads.items()},
        )
        norms = params.norms[~dropped] if params.tree else params.norms
        notes = {"norms": norms, "scaled": cohort.ids[scaled.numpy()].tolist()}
        return Screened(bounded, tuple(cohort.ids[dropped.numpy()].tolist()), notes)

    def _bounded(self, stacked: Tree, origin: Tree, bound: float | None = None) -> _Bounded:
        """Return one kind of tensors within its bound."""
        if not stacked:
            none = torch.zeros(1, dtype=torch.bool)
            return _Bounded({}, torch.zeros(1, dtype=torch.float64), none, none)
        lengths = norms_from(origin, stacked)
        median = lengths.median()
        limit = self.multiple * median if bound is None else torch.full_like(median, bound)
        long = lengths > limit
        # If half of the clients send zeros, the others are not suspicious.
        far = lengths > (self.drop * median if self.drop and median > 0 else torch.inf)
        if bool((long & ~far).any()):
            factors = torch.where(long & ~far, limit / lengths, 1.0)
            stacked = {n: _shortened(stack, origin.get(n), factors) for n, stack in stacked.items()}
        return _Bounded(stacked, lengths, long, far)


class _Bounded(NamedTuple):
    """Tensors within their bound, their norms, and which clients were above it or far above."""

    tree: Tree
    norms: Tensor
    long: Tensor
    far: Tensor


def norms_from(origin: Mapping[str, Tensor], stacked: Mapping[str, Tensor]) -> Tensor:
    """Return the L2 norm of each client's difference from a tree, over all tensors.

    Norms are computed in float64 and returned on the CPU. Numbers that are not finite in the tree,
    such as a mask of −∞, do not count. Tensors that it does not hold are measured from zero.

    Examples
    --------
    >>> norms_from({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([[4.0, 4.0], [1.0, 0.0]])})
    tensor([5., 0.], dtype=torch.float64)
    """
    squares = [
        torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64).square()
        for name, stack in stacked.items()
        for piece in differences(stack, origin.get(name))
    ]
    return torch.stack(squares).sum(0).sqrt().cpu()


def differences(stack: Tensor, origin: Tensor | None) -> Iterator[Tensor]:
    """Go through the differences of clients' tensors from another one, a row a client.

    Numbers that are not finite in the other one make no difference.

    Examples
    --------
    >>> list(differences(torch.tensor([[3.0, -torch.inf]]), torch.tensor([1.0, -torch.inf])))
    [tensor([[2., 0.]])]
    """
    rows = pieces(flat_rows(stack))
    if origin is None:
        yield from rows
        return
    finite, start = _where_finite(origin), 0
    for piece in rows:
        here = slice(start, start := start + piece.shape[1])
        difference = piece - origin.flatten()[here]
        yield difference if finite is None else difference.where(finite.flatten()[here], 0.0)


def _where_finite(tensor: Tensor) -> Tensor | None:
    """Return which numbers are finite, or None if all of them are.

    A sum is much faster than a look at every number, and not finite if one of them is not.
    """
    if bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return None
    finite = torch.isfinite(tensor)
    return None if bool(finite.all()) else finite


def _shortened(stack: Tensor, origin: Tensor | None, factors: Tensor) -> Tensor:
    """Scale the differences of clients; a factor of one keeps every bit."""
    factor = factors.to(stack.device, stack.dtype).view(-1, *[1] * (stack.dim() - 1))
    if origin is None:
        return stack * factor
    moved = torch.lerp(origin, stack, factor)
    finite = _where_finite(origin)
    return moved if finite is None else torch.where(finite, moved, stack)
