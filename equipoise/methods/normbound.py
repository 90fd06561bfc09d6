"""A bound on the norm of updates (Sun et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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

    Updates within the bound B do not change, bit for bit. BatchNorm statistics and each tree of
    uploads (such as SCAFFOLD's control variates, measured from zero) have separate norms and
    bounds, because their scales differ. For an even number of norms, the median is the lower of the
    middle two, so half of the clients cannot raise it. If half of the clients did not change their
    statistics, as with a single training sample each, the median is 0 and all statistics stay as
    received: those that did change could be the ones of attackers.

    Parameters
    ----------
    bound : float, optional
        B for the parameters. By default B is a multiple of the median norm.
    multiple : float
        The bound as a multiple of the cohort's median norm: for parameters without ``bound``, and
        always for buffers and uploads.
    drop : float, optional
        Clients whose parameters moved by more than so many times the median norm are dropped,
        because even the direction of their update is not to be trusted. With None, nobody is.

    Examples
    --------
    >>> NormBound(bound=1.0).multiple
    2.0
    """

    bound: float | None = None
    multiple: float = 2.0
    drop: float | None = 5.0

    def __post_init__(self) -> None:
        """Refuse bounds that are not positive, and a drop that half of the clients may exceed."""
        real(self.multiple, "norm.multiple")
        if self.bound is not None:
            real(self.bound, "norm.bound")
        if self.drop is not None:
            real(self.drop, "norm.drop", least=1.0)

    def screen(self, received: Tree, updates: Updates, cohort: Cohort) -> Screened:
        """Scale long updates, and note the norms of parameters and which clients were scaled.

        Only the rows of clients that are scaled are computed. New memory for the rows of all
        clients would cost more time than their norms.
        """
        lengths = _lengths(received, updates.params, len(cohort.ids))
        dropped = self._far(lengths)
        of_params = self._factors(lengths, dropped, self.bound)

        def factors(stacked: Tree, origin: Tree) -> Tensor:
            """Return those of buffers or uploads. What nobody sends has no norms."""
            if not stacked:
                return torch.ones_like(lengths)
            return self._factors(norms_from(origin, stacked), dropped)

        of_buffers = factors(updates.buffers, received)
        of_uploads = {name: factors(tree, {}) for name, tree in updates.uploads.items()}
        scaled = (torch.stack([of_params, of_buffers, *of_uploads.values()]) < 1).any(0)
        ids = torch.from_numpy(cohort.ids)
        notes = {"norms": lengths[~dropped], "scaled": ids[scaled].tolist()}
        if bool(scaled.any()):
            positions = scaled.nonzero().flatten()
            rows = Updates(
                _bounded(updates.params, received, of_params, positions),
                _bounded(updates.buffers, received, of_buffers, positions),
                {
                    name: _bounded(tree, {}, of_uploads[name], positions)
                    for name, tree in updates.uploads.items()
                },
                {},
            )
            updates = updates.with_rows(scaled.numpy(), rows)
        return Screened(updates, tuple(ids[dropped].tolist()), notes)

    def _far(self, lengths: Tensor) -> Tensor:
        """Return which clients are dropped. If half of them did not move, the others are not."""
        median = lengths.median()
        if self.drop is None or not median > 0:
            return torch.zeros_like(lengths, dtype=torch.bool)
        return lengths > self.drop * median

    def _factors(self, lengths: Tensor, dropped: Tensor, bound: float | None = None) -> Tensor:
        """Return by how much clients are scaled. One means that a client is not.

        Clients that are dropped are not scaled, because nobody uses their updates.
        """
        limit = (
            self.multiple * lengths.median()
            if bound is None
            else torch.tensor(bound, dtype=torch.float64)
        )
        return torch.where((lengths > limit) & ~dropped, limit / lengths, 1.0)


def _lengths(origin: Tree, stacked: Tree, clients: int) -> Tensor:
    """Return the norms of clients. What nobody sends has norm zero."""
    return norms_from(origin, stacked) if stacked else torch.zeros(clients, dtype=torch.float64)


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

    Where ``origin`` is not finite, the difference is 0.

    Examples
    --------
    >>> list(differences(torch.tensor([[3.0, -torch.inf]]), torch.tensor([1.0, -torch.inf])))
    [tensor([[2., 0.]])]
    """
    rows = pieces(flat_rows(stack))
    if origin is None:
        yield from rows
        return
    finite, flat, start = _where_finite(origin), origin.flatten(), 0
    for piece in rows:
        here = slice(start, start := start + piece.shape[1])
        difference = piece - flat[here]
        yield difference if finite is None else difference.where(finite.flatten()[here], 0.0)


def _where_finite(tensor: Tensor) -> Tensor | None:
    """Return which numbers are finite, or None if all of them are.

    A sum is much faster than a look at every number, and not finite if one of them is not.
    """
    if math.isfinite(tensor.sum(dtype=torch.float64).item()):
        return None
    finite = torch.isfinite(tensor)
    return None if bool(finite.all()) else finite


def _bounded(stacked: Tree, origin: Tree, factors: Tensor, positions: Tensor) -> Tree:
    """Return the rows of some clients within their bound, or nothing if all of them are."""
    factors = factors[positions]
    if not bool((factors < 1).any()):
        return {}
    rows = {
        name: stack.index_select(0, positions.to(stack.device)) for name, stack in stacked.items()
    }
    return {name: _shortened(own, origin.get(name), factors) for name, own in rows.items()}


def _shortened(rows: Tensor, origin: Tensor | None, factors: Tensor) -> Tensor:
    """Scale the differences of clients. A factor of one changes nothing, bit for bit."""
    factor = factors.to(rows.device, rows.dtype).view(-1, *[1] * (rows.dim() - 1))
    if origin is None:
        return rows * factor
    moved, finite = torch.lerp(origin, rows, factor), _where_finite(origin)
    if finite is None and bool((factors < 1).all()):
        return moved
    # Interpolation with a weight of one may change the sign of a zero.
    moves = factor < 1
    return torch.where(moves if finite is None else moves & finite, moved, rows)
