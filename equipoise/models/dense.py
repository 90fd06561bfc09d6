"""Models without convolutions: logistic regression and the multilayer perceptron.

They take samples of any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from equipoise.checks import count, probability, several
from equipoise.models.base import Model


def logistic(shape: tuple[int, ...], classes: int) -> Model:
    """Build logistic regression, or linear regression on a regression task.

    Parameters
    ----------
    shape : tuple of int
        The shape of one sample.
    classes : int
        Number of classes, or of outputs in regression.

    Returns
    -------
    Model
        ``features`` flattens and has no parameters; ``head`` is one linear layer.

    Examples
    --------
    >>> logistic((1, 8, 8), 10).head
    Linear(in_features=64, out_features=10, bias=True)
    """
    return Model(nn.Flatten(), nn.Linear(prod(shape), classes))


def mlp(
    shape: tuple[int, ...], classes: int, *, hidden: Sequence[int] = (64,), dropout: float = 0.0
) -> Model:
    """Build a multilayer perceptron: linear layers with ReLU between them.

    Parameters
    ----------
    shape : tuple of int
        The shape of one sample.
    classes : int
        Number of classes, or of outputs in regression.
    hidden : sequence of int
        Width of each hidden layer; with none, the model is ``logistic``.
    dropout : float
        Probability of dropping a unit after each hidden layer.

    Returns
    -------
    Model
        ``features`` ends after the last hidden layer; ``head`` is the last linear layer.

    Examples
    --------
    >>> mlp((1, 8, 8), 10, hidden=(32, 16)).head
    Linear(in_features=16, out_features=10, bias=True)
    """
    widths = (prod(shape), *several(hidden, "hidden of model 'mlp'", count))
    rate = probability(dropout, "dropout of model 'mlp'")
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if rate > 0:
            layers.append(nn.Dropout(rate))
    return Model(nn.Sequential(*layers), nn.Linear(widths[-1], classes))
