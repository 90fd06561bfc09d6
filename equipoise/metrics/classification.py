"""Metrics of classification.

Outputs are scores before the softmax. The class with the highest score is the prediction.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
    return _of_labels("balanced_accuracy_score", output, y)


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def f1_macro(output: Tensor, y: Tensor) -> float:
    """Return the mean F1 over the classes that are in the targets or predicted."""
    return _of_labels("f1_score", output, y, average="macro", zero_division=0.0)


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def f1_weighted(output: Tensor, y: Tensor) -> float:
    """Return the mean F1 over classes, weighted by their number of samples."""
    return _of_labels("f1_score", output, y, average="weighted", zero_division=0.0)


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def precision_macro(output: Tensor, y: Tensor) -> float:
    """Return the mean precision over the classes that are in the targets or predicted.

    It is 0 for a class that is not predicted.
    """
    return _of_labels("precision_score", output, y, average="macro", zero_division=0.0)


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def recall_macro(output: Tensor, y: Tensor) -> float:
    """Return the mean recall over the classes that are in the targets or predicted.

    It is 0 for a class without samples.
    """
    return _of_labels("recall_score", output, y, average="macro", zero_division=0.0)


@register(higher_is_better=True, range=(-1, 1), tasks=_TASK)
def mcc(output: Tensor, y: Tensor) -> float | None:
    """Return the Matthews correlation coefficient; undefined for targets of one class."""
    return _of_labels("matthews_corrcoef", output, y) if len(y.unique()) > 1 else None


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def auroc(output: Tensor, y: Tensor) -> float | None:
    """Return the area under the ROC curve, one class against all others.

    It is averaged over the classes in the targets, and undefined for targets of one class.
    """
    return _one_against_all("roc_auc_score", output, y)


@register(higher_is_better=True, range=(0, 1), tasks=_TASK)
def average_precision(output: Tensor, y: Tensor) -> float | None:
    """Return the average precision, one class against all others.

    It is averaged over the classes in the targets, and undefined for targets of one class.
    """
    return _one_against_all("average_precision_score", output, y)


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


def _of_labels(name: str, output: Tensor, y: Tensor, **options: Any) -> float:
    """Return a metric of scikit-learn for targets and predicted labels."""
    with warnings.catch_warnings():
        # scikit-learn warns of predicted classes without samples. Their values are documented.
        warnings.simplefilter("ignore")
        return float(_function(name)(y.numpy(), output.argmax(1).numpy(), **options))


def _one_against_all(name: str, output: Tensor, y: Tensor) -> float | None:
    """Return the mean over the classes in the targets of a binary metric of scikit-learn."""
    present = y.unique().tolist()
    if len(present) < 2:
        return None
    function, probabilities = _function(name), _probabilities(output)
    return float(
        np.mean([function((y == label).numpy(), probabilities[:, label]) for label in present])
    )


def _function(name: str) -> Callable[..., Any]:
    # Imported here, because scikit-learn is slow to import and most runs do not need it.
    from sklearn import metrics

    found: Callable[..., Any] = getattr(metrics, name)
    return found
