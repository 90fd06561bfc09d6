"""Regression: each sample has one or several numbers as targets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from equipoise.errors import InputError
from equipoise.samples import kind_of
from equipoise.task import Task
from equipoise.tasks import register


@register("regression")
class Regression(Task):
    """Squared error, averaged over a sample's targets.

    Targets are floating point numbers ``[N]`` or ``[N, d]``.

    Examples
    --------
    >>> import torch
    >>> Regression().loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([2.])
    """

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the squared error averaged over a sample's targets."""
        # Only shapes are compared, which works under ``vmap``.
        if output.shape != y.shape and _without_last_ones(output.shape) != _without_last_ones(
            y.shape
        ):
            raise InputError(
                f"the output of the model has shape {tuple(output.shape)}, but its targets have "
                f"shape {tuple(y.shape)}; valid: the same shape, with or without a last dimension "
                "of 1"
            )
        error = (output.reshape(y.shape) - y).square()
        return error.flatten(1).mean(1) if y.dim() > 1 else error

    def check(self, y: Tensor, shape: Sequence[int]) -> None:
        """Refuse targets that are not floating point numbers ``[N]`` or ``[N, d]``."""
        if not y.is_floating_point() or y.ndim > 2:
            raise InputError(
                f"y of a regression must be floating point of shape [N] or [N, d], not {kind_of(y)}"
            )


def _without_last_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
