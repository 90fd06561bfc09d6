"""Penalties on parameters, with their gradients in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.tree import flat_rows

# How many numbers are squared at a time.
_PIECE = 1 << 16


class Room(NamedTuple):
    """Memory for a number per element of several parameters.

    Attributes
    ----------
    whole : Tensor
        All numbers: a row per client, or those of a single client without an axis of clients.
    parts : list of Tensor
        The numbers of each parameter, in its shape.
    """

    whole: Tensor
    parts: list[Tensor]


class Penalties(NamedTuple):
    """The penalty s/2 ‖w − anchor‖² + ⟨w, v⟩ on several parameters w, with s > 0 or with v.

    Parameters and v are stacked over clients. Those of a single client may have no axis of clients.

    Attributes
    ----------
    strength : float
        s.
    anchors : list of Tensor
        One per parameter, the same for all clients.
    linear : list of Tensor or None
        v, one tensor per parameter; None if v is 0.

    Examples
    --------
    >>> penalties = Penalties(0.5, [torch.tensor([1.0, 2.0])], None)
    >>> penalties.values([torch.tensor([[1.0, 2.0], [3.0, 2.0]])])
    tensor([0., 1.])
    """

    strength: float
    anchors: list[Tensor]
    linear: list[Tensor] | None

    def of(self, chosen: Iterable[bool]) -> Penalties:
        """Return the penalty on some of the parameters."""
        chosen = list(chosen)
        linear = None if self.linear is None else list(compress(self.linear, chosen))
        return Penalties(self.strength, list(compress(self.anchors, chosen)), linear)

    def values(self, params: Sequence[Tensor]) -> Tensor:
        """Return every client's penalty, ``[K]``, or that of a single client. It has gradients."""
        terms = []
        for index, (param, anchor) in enumerate(zip(params, self.anchors, strict=True)):
            term = torch.zeros_like(param)
            if self.strength:
                term = self.strength / 2 * (param - anchor).square()
            if self.linear is not None:
                term = term + param * self.linear[index]
            terms.append(flat_rows(term).sum(1) if param.dim() > anchor.dim() else term.sum())
        return torch.stack(terms).sum(0)

    def room_in(self, whole: Tensor) -> Room:
        """Divide memory among the parameters: ``[K, numbers]``, or ``[numbers]`` of one client."""
        parts = whole.split([anchor.numel() for anchor in self.anchors], dim=-1)
        shapes = [(*whole.shape[:-1], *anchor.shape) for anchor in self.anchors]
        return Room(whole, [part.view(s) for part, s in zip(parts, shapes, strict=True)])

    def added_to(
        self, gradients: Sequence[Tensor], params: Sequence[Tensor], room: Room | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Add the gradient s (w − anchor) + v of the penalty to gradients.

        Parameters
        ----------
        gradients, params : sequence of Tensor
            One gradient per parameter. They do not change.
        room : Room, optional
            Where to write the sums; by default in new memory.

        Returns
        -------
        tuple
            The penalty as :meth:`values` returns it, and the sums.

        Examples
        --------
        >>> penalties = Penalties(0.5, [torch.tensor([1.0])], [torch.tensor([2.0])])
        >>> penalties.added_to([torch.tensor([10.0])], [torch.tensor([3.0])])
        (tensor(7.), [tensor([13.])])
        """
        if room is None:
            clients = params[0].shape[: params[0].dim() - self.anchors[0].dim()]
            numbers = sum(anchor.numel() for anchor in self.anchors)
            room = self.room_in(params[0].new_empty((*clients, numbers)))
        # Sums over the whole room take fewer operations than a sum for each parameter.
        whole, sums = room
        values = []
        if self.linear is not None:
            for param, slope, total in zip(params, self.linear, sums, strict=True):
                torch.mul(param, slope, out=total)
            values.append(whole.sum(-1))
        if self.strength:
            for param, anchor, total in zip(params, self.anchors, sums, strict=True):
                torch.sub(param, anchor, out=total)
            values.append(self.strength / 2 * _squared_length(whole))
            for gradient, total in zip(gradients, sums, strict=True):
                torch.add(gradient, total, alpha=self.strength, out=total)
            gradients = sums
        if self.linear is not None:
            for gradient, slope, total in zip(gradients, self.linear, sums, strict=True):
                torch.add(gradient, slope, out=total)
        return values[0] if len(values) == 1 else values[0] + values[1], sums


def _squared_length(whole: Tensor) -> Tensor:
    """Return the sum of squares of each row, or of a vector."""
    if whole.device.type != "cpu":
        return torch.linalg.vector_norm(whole, dim=-1).square()
    # On a CPU, dot and vector_norm lose four digits of ten million numbers in float32. The squares
    # of all numbers at once would need memory as large as the model.
    length = max(1, _PIECE // max(1, whole.numel() // max(1, whole.shape[-1])))
    parts = [piece.square().sum(-1) for piece in whole.split(length, -1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
