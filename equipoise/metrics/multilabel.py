"""Metrics of multi-label classification.

Outputs are scores before the sigmoid. Classes with scores above 0 are predicted.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equipoise.metrics import register

_TASK = ("multilabel",)


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def exact_match(output: Tensor, y: Tensor) -> float:
    """Return the share of samples for which exactly the right classes are predicted."""
    return float(_right(output, y).all(1).double().mean())


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def label_accuracy(output: Tensor, y: Tensor) -> float:
    """Return the share of right labels over all samples and classes: 1 minus the Hamming loss."""
    return float(_right(output, y).double().mean())


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def f1_micro(output: Tensor, y: Tensor) -> float | None:
    """Return the F1 of all labels of all classes together.

    It is undefined if there are no labels and none are predicted.
    """
    predicted, present = output > 0, y > 0
    sizes = int(predicted.sum() + present.sum())
    return 2 * int((predicted & present).sum()) / sizes if sizes else None


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def f1_classes(output: Tensor, y: Tensor) -> float | None:
    """Return the mean F1 over the classes that are in the targets or predicted.

    It is undefined if there are none.
    """
    predicted, present = output > 0, y > 0
    sizes = (predicted.sum(0) + present.sum(0)).double()
    common = 2 * (predicted & present).sum(0).double()
    return float(np.mean((common / sizes)[sizes > 0].numpy())) if bool((sizes > 0).any()) else None


def _right(output: Tensor, y: Tensor) -> Tensor:
    return torch.eq(output > 0, y > 0)
