"""Metrics of regression, averaged over the targets of a sample."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise.metrics import register

_TASK = ("regression",)


@register(higher_is_better=False, range=(0, float("inf")), tasks=_TASK)
def mae(output: Tensor, y: Tensor) -> float:
    """Return the mean absolute error."""
    wanted, found = _numbers(output, y)
    return float(np.abs(found - wanted).mean(0).mean())


@register(higher_is_better=False, range=(0, float("inf")), tasks=_TASK)
def rmse(output: Tensor, y: Tensor) -> float:
    """Return the root of the mean squared error over all samples and targets."""
    wanted, found = _numbers(output, y)
    return float(np.square(found - wanted).mean(0).mean() ** 0.5)


@register(higher_is_better=True, range=(-float("inf"), 1), tasks=_TASK)
def r2(output: Tensor, y: Tensor) -> float | None:
    """Return the coefficient of determination R², averaged over targets.

    It is undefined if a target is the same for all samples.
    """
    wanted, found = _numbers(output, y)
    if (wanted == wanted[0]).all(0).any():
        return None
    unexplained = np.square(found - wanted).sum(0) / np.square(wanted - wanted.mean(0)).sum(0)
    return float((1 - unexplained).mean())


def _numbers(output: Tensor, y: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return targets and outputs as arrays with a row for each sample."""
    return y.double().reshape(len(y), -1).numpy(), output.reshape(len(y), -1).numpy()
