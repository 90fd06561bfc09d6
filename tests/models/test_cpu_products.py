"""Products of large float32 matrices with oneDNN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import train
from equipoise.data import load
from equipoise.engine.settings import Machine, Training
from equipoise.models import cpu_products, linear_products
from equipoise.models.linear_layers import Linear
from tests.models.derivatives import agreeing_derivatives, drawn


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        (drawn(32, 256), drawn(256, 256, seed=1)),
        (drawn(9, 1000), drawn(300, 1000, seed=1)),
        (drawn(256, 64).mT, drawn(256, 256, seed=1).mT),
        (drawn(1, 256).expand(40, 256), drawn(512, 512, seed=1)[::2, ::2]),
        (drawn(2000).unfold(0, 500, 50), drawn(300, 500, seed=1)),
    ],
)
def test_products_and_two_derivatives_are_those_of_pytorch(given, biased, onednn):
    bias = (drawn(len(given[1]), seed=2),) if biased else ()
    found = agreeing_derivatives(cpu_products.linear, F.linear, (*given, *bias))
    assert len(onednn) > 3
    # The gradient by the weights lies in memory as contiguous weights do.
    assert found[2].is_contiguous()


@pytest.mark.parametrize("bias", [drawn(512)[::2], drawn(1).expand(256)], ids=["strided", "same"])
def test_biases_may_lie_in_memory_in_any_way(bias, onednn):
    x, weight = drawn(32, 256), drawn(256, 256, seed=1)
    found, wanted = (function(x, weight, bias) for function in (cpu_products.linear, F.linear))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert onednn


def test_shapes_that_do_not_fit_are_described(onednn):
    with pytest.raises(RuntimeError, match="32x300 and 256x256"):
        cpu_products.linear(drawn(32, 300), drawn(256, 256))
    with pytest.raises(RuntimeError, match="must match"):
        cpu_products.linear(drawn(32, 256), drawn(256, 256), drawn(3))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (drawn(32, 64), drawn(64, 64)),
        (drawn(4, 2000), drawn(1000, 2000)),
        (drawn(32, 256).double(), drawn(256, 256).double()),
        (drawn(4, 8, 256), drawn(256, 256)),
    ],
    ids=["small", "few rows", "float64", "three axes"],
)
def test_other_products_are_those_of_pytorch(x, weight, onednn):
    assert torch.equal(cpu_products.linear(x, weight), F.linear(x, weight))
    assert not onednn


def test_nothing_changes_in_transforms_and_under_autocast(onednn):
    x, weight = drawn(2, 32, 256), drawn(2, 256, 256)
    stacked = torch.func.vmap(cpu_products.linear)(x, weight)
    torch.testing.assert_close(stacked, torch.stack(list(map(F.linear, x, weight))))
    with torch.autocast("cpu", torch.bfloat16):
        assert cpu_products.linear(x[0], weight[0]).dtype == torch.bfloat16
    assert not onednn


@pytest.mark.parametrize(
    ("matrix", "usable"),
    [
        (drawn(32, 64), True),
        (drawn(32, 64).mT, True),
        (drawn(64, 64)[::2], False),
        (drawn(32, 128)[:, ::2], False),
        (drawn(200).unfold(0, 64, 2), False),
    ],
    ids=["plain", "transposed", "every second row", "every second column", "windows"],
)
def test_matrices_that_onednn_cannot_use_well_are_copied(matrix, usable):
    dense = cpu_products._dense(matrix)
    assert (dense is matrix) == usable
    assert usable or dense.is_contiguous()
    assert torch.equal(dense, matrix)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (drawn(3, 32, 256), drawn(3, 256, 256, seed=1)),
        (drawn(3, 256, 64).mT, drawn(3, 256, 256, seed=1).mT),
        (drawn(32, 256, 3).movedim(-1, 0), drawn(256, 256, 3, seed=1).movedim(-1, 0)),
    ],
    ids=["plain", "transposed", "clients innermost"],
)
@pytest.mark.parametrize("biased", [True, False])
def test_stacked_clients_are_multiplied_one_by_one(x, weight, biased, onednn):
    bias = (drawn(3, 256, seed=2),) if biased else ()
    given = (x, weight, *bias)

    def ours(x, weight, bias=None):
        stacked = (0, 0, 0 if biased else None)
        return torch.func.vmap(linear_products.linear, in_dims=stacked)(x, weight, bias)

    def theirs(x, weight, bias=None):
        made = x @ weight.mT
        return made if bias is None else made + bias.unsqueeze(1)

    agreeing_derivatives(ours, theirs, given)
    assert len(onednn) >= 9


def test_small_products_of_stacked_clients_are_those_of_pytorch(onednn):
    x, weight = drawn(3, 32, 64), drawn(3, 64, 64)
    assert torch.equal(cpu_products.product(x, weight), x @ weight.mT)
    assert not onednn


def test_linear_layers_use_it(onednn):
    Linear(nn.Linear(256, 256))(drawn(4, 8, 256))
    assert onednn == [(32, 256, 256)]


def test_recorded_and_plain_steps_have_the_same_bits(onednn):
    """Operations of oneDNN can be recorded, and repeated with the same results."""
    runs = [
        train(
            load("digits"),
            model={"name": "mlp", "hidden": [1024]},
            training=Training(rounds=2, cohort=1, epochs=2, batch_size=32),
            machine=Machine(device="cpu", replay=replay),
        )
        for replay in (True, False)
    ]
    assert onednn
    one, two = (run.model().state_dict() for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)
