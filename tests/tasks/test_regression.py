"""The loss of a regression by hand, and outputs whose shape does not match the targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from equipoise import Federation, Machine, tasks, train
from equipoise.errors import InputError
from equipoise.models.base import Model

REGRESSION = tasks.build("regression")


@pytest.mark.parametrize(
    ("output", "y", "wanted"),
    [
        # Squared errors by hand, averaged over the targets of a sample.
        (
            [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
            [[1.0, 0.0], [0.0, 4.0], [6.0, 7.0]],
            [2.0, 4.5, 1.0],
        ),
        ([[1.0], [3.0]], [0.0, 1.0], [1.0, 4.0]),
        ([1.0, 3.0], [[0.0], [1.0]], [1.0, 4.0]),
        ([1.0, 3.0], [0.0, 1.0], [1.0, 4.0]),
        # A model that removes an axis, and a batch of one.
        (3.0, [1.0], [4.0]),
        (3.0, [[1.0]], [4.0]),
    ],
)
def test_a_last_dimension_of_one_does_not_matter(output, y, wanted):
    assert REGRESSION.loss(torch.tensor(output), torch.tensor(y)).tolist() == wanted


@pytest.mark.parametrize(
    ("output", "y"),
    [
        ((2, 3), (3, 2)),
        ((1, 3), (3,)),
        ((1, 3), (3, 1)),
        ((6,), (3, 2)),
        ((3, 2), (6,)),
        ((3, 1, 2), (3, 2)),
    ],
)
def test_other_shapes_are_refused_also_when_stacked(output, y):
    message = (
        rf"has shape \({str(output)[1:-1]}\), but its targets have shape \({str(y)[1:-1]}\); "
        "valid: the same"
    )
    with pytest.raises(InputError, match=message):
        REGRESSION.loss(torch.zeros(output), torch.zeros(y))
    with pytest.raises(InputError, match=message):
        vmap(REGRESSION.loss)(torch.zeros(4, *output), torch.zeros(4, *y))


class Turned(nn.Module):
    """Returns samples in columns."""

    def forward(self, x):
        return x.T


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_model_that_answers_in_columns_does_not_train(chunk):
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(24, 4)), draws.normal(size=(24, 2))
    data = Federation.from_arrays(x, y, clients=np.arange(24) // 8, task="regression")
    how = {"rounds": 1, "batch_size": 3, "machine": Machine(chunk=chunk)}
    train(data, model=Model(nn.Flatten(), nn.Linear(4, 2)), **how)
    with pytest.raises(InputError, match="the output of the model"):
        train(data, model=Model(nn.Flatten(), nn.Sequential(nn.Linear(4, 2), Turned())), **how)
