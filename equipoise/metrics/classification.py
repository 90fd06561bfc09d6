"""Metrics of classification.

Outputs are scores before the softmax. The class with the highest score is the prediction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise.arrays import Ints
from equipoise.metrics import register

_TASK = ("classification",)
_BINS = 15


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def accuracy(output: Tensor, y: Tensor) -> float:
    """Return the share of samples whose class has the highest score."""
    return float((output.argmax(1) == y).double().mean())


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def balanced_accuracy(output: Tensor, y: Tensor) -> float:
    """Return the mean recall over the classes in the targets."""
    right, present, _ = _counts(output, y)
    return float(np.mean(right[present > 0] / present[present > 0]))


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def f1_macro(output: Tensor, y: Tensor) -> float:
    """Return the mean F1 over the classes that are in the targets or predicted."""
    right, present, predicted = _counts(output, y)
    return float(np.mean(2 * right / (present + predicted)))


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def f1_weighted(output: Tensor, y: Tensor) -> float:
    """Return the mean F1 over classes, weighted by their number of samples."""
    right, present, predicted = _counts(output, y)
    return float(np.average(2 * right / (present + predicted), weights=present))


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def precision_macro(output: Tensor, y: Tensor) -> float:
    """Return the mean precision over the classes that are in the targets or predicted.

    It is 0 for a class that is not predicted.
    """
    right, _, predicted = _counts(output, y)
    return float(np.mean(right / np.maximum(predicted, 1)))


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def recall_macro(output: Tensor, y: Tensor) -> float:
    """Return the mean recall over the classes that are in the targets or predicted.

    It is 0 for a class without samples.
    """
    right, present, _ = _counts(output, y)
    return float(np.mean(right / np.maximum(present, 1)))


@register(higher_is_better=True, range=(-1, 1), tasks=_TASK)
def mcc(output: Tensor, y: Tensor) -> float | None:
    """Return the Matthews correlation coefficient; undefined for targets of one class.

    It is 0 if a single class is predicted.
    """
    right, present, predicted = (count.astype(np.float64) for count in _counts(output, y))
    samples = float(len(y))
    of_targets = samples**2 - present @ present
    if of_targets == 0:
        return None
    of_both = of_targets * (samples**2 - predicted @ predicted)
    common = right.sum() * samples - present @ predicted
    return float(common / np.sqrt(of_both)) if of_both else 0.0


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def auroc(output: Tensor, y: Tensor) -> float | None:
    """Return the area under the ROC curve, one class against all others.

    It is averaged over the classes in the targets, and undefined for targets of one class.
    """
    return _one_against_all(_area, output, y)


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def average_precision(output: Tensor, y: Tensor) -> float | None:
    """Return the average precision, one class against all others.

    It is averaged over the classes in the targets, and undefined for targets of one class.
    """
    return _one_against_all(_precision, output, y)


@register(higher_is_better=False, range=(0, 2), tasks=_TASK)
def brier(output: Tensor, y: Tensor) -> float:
    """Return the Brier score.

    It is the squared error of the probabilities, summed over classes and averaged over samples.
    """
    probabilities = _probabilities(output)
    probabilities[np.arange(len(y)), y.numpy()] -= 1
    return float(np.square(probabilities).sum(1).mean())


@register(higher_is_better=False, range=(0, 1), tasks=_TASK)
def ece(output: Tensor, y: Tensor) -> float:
    """Return the expected calibration error with 15 bins of equal width.

    A bin has the samples whose highest probability is in it, including its upper end. The error is
    Σ_b n_b / n |accuracy in b − mean highest probability in b|.
    """
    probabilities = _probabilities(output)
    highest, right = probabilities.max(1), probabilities.argmax(1) == y.numpy()
    bins = np.clip(np.ceil(highest * _BINS).astype(np.int64) - 1, 0, _BINS - 1)
    differences = np.bincount(bins, weights=right - highest, minlength=_BINS)
    return float(np.abs(differences).sum() / len(y))


def _probabilities(output: Tensor) -> NDArray[np.float64]:
    return output.double().softmax(1).numpy()


def _counts(output: Tensor, y: Tensor) -> tuple[Ints, Ints, Ints]:
    """Count the samples of each class that are right, that it has, and that are predicted.

    Classes that are neither in the targets nor predicted are left out.
    """
    wanted, found = y.numpy(), output.argmax(1).numpy()
    right, present, predicted = (
        np.bincount(labels, minlength=output.shape[1])
        for labels in (wanted[wanted == found], wanted, found)
    )
    used = present + predicted > 0
    return right[used], present[used], predicted[used]


def _one_against_all(
    measure: Callable[[Ints, Ints], float], output: Tensor, y: Tensor
) -> float | None:
    """Return the mean over the classes in the targets of a function of true and false positives.

    The function gets their numbers for every threshold of the class's probability, beginning with
    the highest one.
    """
    present, probabilities = y.unique().tolist(), _probabilities(output)
    # The probabilities of a model that has diverged have no order.
    if len(present) < 2 or not np.isfinite(probabilities).all():
        return None
    values = []
    for label in present:
        order = np.argsort(-probabilities[:, label], kind="stable")
        scores = probabilities[order, label]
        # Samples with the same probability have the same threshold.
        last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
        true = np.cumsum(y.numpy()[order] == label)[last]
        values.append(measure(true, 1 + last - true))
    return float(np.mean(values))


def _area(true: Ints, false: Ints) -> float:
    """Return the area under the ROC curve by trapezoids, as scikit-learn does, to the last bit.

    Points between others on a straight line are left out, and the curve begins at zero.
    """
    corners = np.ones(len(true), bool)
    corners[1:-1] = (np.diff(true, 2) != 0) | (np.diff(false, 2) != 0)
    x, y = (np.append(0, count[corners]) / count[-1] for count in (false, true))
    return float((np.diff(x) * (y[1:] + y[:-1]) / 2).sum())


def _precision(true: Ints, false: Ints) -> float:
    """Return the average precision, weighted by the gain in recall, as scikit-learn does."""
    precision, gains = true / (true + false), np.diff(true / true[-1], prepend=0.0)
    # The order of summation, from the lowest threshold, determines the last bits.
    return float(np.flip(gains * precision).copy().sum())
