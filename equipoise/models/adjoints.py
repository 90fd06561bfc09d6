"""Linear operations whose gradients are their adjoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Operation = Callable[[Tensor], Tensor]


class Adjoint(torch.autograd.Function):
    """A linear operation whose gradient is made by its adjoint, and the other way round.

    So any number of derivatives can be taken, in any order of the transforms of ``torch.func``.
    Under ``vmap``, both must have a row of the first axis for each row that they are given.

    Examples
    --------
    >>> x = torch.arange(3.0, requires_grad=True)
    >>> y = Adjoint.apply(x, lambda x: x.repeat(2), lambda y: y.view(2, -1).sum(0))
    >>> torch.autograd.grad(y.sum(), x)
    (tensor([2., 2., 2.]),)
    """

    @staticmethod
    def forward(x: Tensor, operation: Operation, adjoint: Operation) -> Tensor:
        """Carry out the operation."""
        return operation(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep both operations; the gradient needs no numbers."""
        _, ctx.operation, ctx.adjoint = inputs

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor, None, None]:
        """Carry out the adjoint."""
        made: Tensor = Adjoint.apply(upper, ctx.adjoint, ctx.operation)
        return made, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int, None, None],
        x: Tensor,
        operation: Operation,
        adjoint: Operation,
    ) -> tuple[Tensor, int]:
        """Make one axis of the hidden axis and the rows."""
        stacks = x.movedim(in_dims[0], 0)
        made: Tensor = Adjoint.apply(stacks.flatten(0, 1), operation, adjoint)
        return made.unflatten(0, stacks.shape[:2]), 0
