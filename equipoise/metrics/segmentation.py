"""Metrics of segmentation over all pixels of a client's images. Class 0 is the background."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from equipoise.metrics import register

_TASK = ("segmentation",)


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def pixel_accuracy(output: Tensor, y: Tensor) -> float:
    """Return the share of pixels whose class has the highest score."""
    return float((output.argmax(1) == y).double().mean())


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def iou(output: Tensor, y: Tensor) -> float | None:
    """Return the intersection over union of pixels, averaged over classes without the background.

    Classes that are neither in a mask nor predicted are left out. If all are, it is undefined.
    """
    from sklearn.metrics import jaccard_score

    wanted, found = y.flatten().numpy(), output.argmax(1).flatten().numpy()
    present = [label for label in np.union1d(wanted, found).tolist() if label != 0]
    return float(jaccard_score(wanted, found, labels=present, average="macro")) if present else None
