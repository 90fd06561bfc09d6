"""Steps against given directions, for all clients of a stack together."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch import Tensor

from equipoise.models.kernel_modules import module_with_triton
from equipoise.optimizers.base import Column
from equipoise.optimizers.penalties import Penalties


def descended(params: list[Tensor], directions: list[Tensor], lr: Column) -> list[Tensor]:
    """Return the parameters after a step against the given directions.

    Parameters
    ----------
    params, directions : list of Tensor
        One direction a parameter, both stacked over clients.
    lr : float or Tensor
        The length of the step: one number, or a column over clients.

    Returns
    -------
    list of Tensor
        p − lr d.

    Examples
    --------
    >>> descended([torch.ones(2, 1)], [torch.ones(2, 1)], torch.tensor([0.5, 0.25]))
    [tensor([[0.5000],
            [0.7500]])]
    """
    if isinstance(lr, Tensor):
        columns = as_columns(lr, directions)
        return [
            torch.addcmul(p, d, c, value=-1)
            for p, d, c in zip(params, directions, columns, strict=True)
        ]
    return list(torch._foreach_add(params, directions, alpha=-lr))


def descend(params: list[Tensor], directions: list[Tensor], lr: Column) -> None:
    """Make the step of :func:`descended` in place."""
    if isinstance(lr, Tensor):
        updated, _ = updated_by_kernels(params, directions, None, lr)
        rest = [not done for done in updated]
        params, directions = list(compress(params, rest)), list(compress(directions, rest))
        for param, direction, column in zip(
            params, directions, as_columns(lr, directions), strict=True
        ):
            param.addcmul_(direction, column, value=-1)
    else:
        torch._foreach_add_(params, directions, alpha=-lr)


def as_columns(lr: Column, like: list[Tensor]) -> list[Tensor]:
    """Shape a column over clients so that it multiplies each tensor's rows."""
    if not isinstance(lr, Tensor):
        return [torch.tensor(lr, dtype=tensor.dtype, device=tensor.device) for tensor in like]
    return [
        lr.to(tensor.dtype).view(-1, *(1,) * (tensor.dim() - 1))
        if lr.dim()
        else lr.to(tensor.dtype)
        for tensor in like
    ]


def kernels_for(lr: Column) -> Any:
    """Return the module of GPU kernels if they can make steps with a learning rate, else None."""
    if not isinstance(lr, Tensor) or not lr.is_cuda:
        return None
    return module_with_triton("update_kernels", lr.device)


def updated_by_kernels(
    params: list[Tensor],
    gradients: list[Any],
    velocities: list[Tensor] | None,
    lr: Column,
    penalties: Penalties | None = None,
    **numbers: Any,
) -> tuple[list[bool], Tensor | None]:
    """Make a step of SGD for the parameters that GPU kernels can update.

    The gradient of ``penalties`` is added to theirs. ``numbers`` are those of
    :class:`equipoise.models.update_kernels.Rule`.

    Returns
    -------
    tuple
        Which parameters have been updated, and every client's penalty on them before the step, if
        there are penalties and kernels.
    """
    if (kernels := kernels_for(lr)) is None:
        return [False] * len(params), None
    fit = [kernels.fits(p, g) for p, g in zip(params, gradients, strict=True)]
    chosen = (
        None if each is None else list(compress(each, fit))
        for each in (params, gradients, velocities)
    )
    of_chosen = None if penalties is None else penalties.of(fit)
    return fit, kernels.descend(*chosen, lr, kernels.Rule(**numbers), of_chosen)
