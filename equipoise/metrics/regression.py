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
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(*_numbers(output, y)))


@register(higher_is_better=False, range=(0, float("inf")), tasks=_TASK)
def rmse(output: Tensor, y: Tensor) -> float:
    """Return the root of the mean squared error over all samples and targets."""
    from sklearn.metrics import mean_squared_error

    return float(mean_squared_error(*_numbers(output, y)) ** 0.5)


@register(higher_is_better=True, range=(-float("inf"), 1), tasks=_TASK)
def r2(output: Tensor, y: Tensor) -> float | None:
    """Return the coefficient of determination R², averaged over targets.

    It is undefined if a target is the same for all samples.
    """
    from sklearn.metrics import r2_score

    wanted, found = _numbers(output, y)
    if (wanted == wanted[:1]).all(0).any():
        return None
    return float(r2_score(wanted, found))


def _numbers(output: Tensor, y: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return targets and outputs as arrays of the same shape."""
    return y.double().numpy(), output.reshape(y.shape).numpy()
