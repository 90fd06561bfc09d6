"""Convolutions of small images with large weights as products of oneDNN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from equipoise import train
from equipoise.data import load
from equipoise.engine.settings import Machine, Training
from equipoise.models import cpu_convolutions
from equipoise.models.cpu_convolutions import convolve
from tests.models.derivatives import agreeing_derivatives, drawn

GEOMETRIES = [
    # Images, weights, stride, padding.
    ((2, 128, 4, 4), (1024, 128, 3, 3), (1, 1), (1, 1)),
    ((3, 40, 5, 7), (512, 40, 7, 8), (2, 1), (1, 2)),
    ((1, 1100, 3, 2), (1000, 1100, 1, 1), (2, 2), (0, 0)),
    ((4, 50, 6, 6), (450, 50, 5, 9), (3, 3), (0, 2)),
]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("images", "weights", "stride", "padding"), GEOMETRIES, ids=str)
def test_results_and_two_derivatives_are_those_of_pytorch(
    images, weights, stride, padding, biased, onednn
):
    bias = (drawn(weights[0], seed=2),) if biased else ()
    given = (drawn(*images), drawn(*weights, seed=1).div(30), *bias)

    def convolved(function):
        return lambda x, weight, bias=None: function(x, weight, bias, stride, padding)

    found = agreeing_derivatives(convolved(convolve), convolved(F.conv2d), given)
    assert len(onednn) > 3
    assert found[0].is_contiguous()
    # The gradient by the weights lies in memory as contiguous weights do.
    assert found[2].is_contiguous()


@pytest.mark.parametrize(
    ("images", "weights"),
    [
        ((2, 16, 4, 4), (64, 16, 3, 3)),
        ((33, 128, 4, 4), (1024, 128, 3, 3)),
        ((128, 4, 4), (1024, 128, 3, 3)),
        ((0, 128, 4, 4), (1024, 128, 3, 3)),
    ],
    ids=["few weights", "many positions", "no axis of samples", "no samples"],
)
def test_other_convolutions_are_those_of_pytorch(images, weights, onednn):
    x, weight = drawn(*images), drawn(*weights)
    found = convolve(x, weight, None, (1, 1), (1, 1))
    assert torch.equal(found, F.conv2d(x, weight, padding=1))
    assert not onednn


@pytest.mark.parametrize(
    ("images", "says"), [((2, 128, 2, 2), "Kernel size"), ((2, 64, 4, 4), "128 channels")]
)
def test_shapes_that_do_not_fit_are_described(images, says, onednn):
    with pytest.raises(RuntimeError, match=says):
        convolve(drawn(*images), drawn(1024, 128, 3, 3), None, (1, 1), (0, 0))


def test_nothing_changes_in_float64_under_autocast_and_in_transforms(onednn):
    x, weight = drawn(2, 128, 4, 4), drawn(1024, 128, 3, 3)
    assert convolve(x.double(), weight.double(), None, (1, 1), (1, 1)).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert convolve(x, weight, None, (1, 1), (1, 1)).dtype == torch.bfloat16
    torch.func.vmap(lambda w: convolve(x, w, None, (1, 1), (1, 1)))(weight[None])
    assert not onednn


def test_recorded_and_plain_steps_have_the_same_bits(onednn, monkeypatch):
    """The operations can be recorded, and repeated with the same results."""
    monkeypatch.setattr(cpu_convolutions, "_FEWEST_WEIGHTS", 4_000)
    runs = [
        train(
            load("digits"),
            model={"name": "cnn2", "channels": [8, 1024]},
            training=Training(rounds=2, cohort=1, epochs=2, batch_size=16),
            machine=Machine(device="cpu", replay=replay),
        )
        for replay in (True, False)
    ]
    assert onednn
    one, two = (run.model().state_dict() for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)
