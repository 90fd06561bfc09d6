"""Replaced functions: the values of PyTorch's, and random numbers by client and sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.errors import InputError
from equipoise.models.frozen import Frozen
from equipoise.models.functions import Carried
from equipoise.models.passes import Forward, forward_pass


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def training(key=7):
    return Forward(train=True, key=torch.tensor(key))


def carried(function, forward=None):
    with Carried(), forward_pass(forward or Forward(train=False)):
        return function()


# ---- attention -----------------------------------------------------------------------------------

SCORES = normal(5, 7, seed=3)
OPEN = SCORES > -0.8
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "truth values": {"attn_mask": OPEN},
    "numbers": {"attn_mask": SCORES},
    "minus infinity": {"attn_mask": torch.where(OPEN, 0.0, -torch.inf).double()},
    "for each sample": {"attn_mask": normal(2, 1, 1, 7) > -0.5},
    "a scale": {"scale": 0.3},
    "a query without keys": {"attn_mask": OPEN & (torch.arange(5) != 2).unsqueeze(1)},
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_pytorch(name):
    q, k, v = (normal(2, 3, n, 4, seed=n).requires_grad_() for n in (5, 7, 7))
    how = MASKS[name]

    def made():
        return F.scaled_dot_product_attention(q, k, v, **how)

    found, wanted = carried(made), made()
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        *(torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_attention_of_grouped_queries_is_that_of_pytorch():
    q, k, v = normal(2, 4, 5, 4), normal(2, 2, 7, 4, seed=1), normal(2, 2, 7, 4, seed=2)

    def made():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    torch.testing.assert_close(carried(made), made())


HEADS = {
    "usual": ({}, {}),
    "without bias": ({"bias": False}, {}),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "zeros": ({"add_zero_attn": True}, {"attn_mask": SCORES[:, :5] > 1.0}),
    "other widths": ({"kdim": 3, "vdim": 5}, {}),
    "padding": ({}, {"key_padding_mask": normal(2, 5) > 1.0}),
    "padding as numbers": ({}, {"key_padding_mask": normal(2, 5)}),
    "a mask of numbers": ({}, {"attn_mask": SCORES[:, :5]}),
    "a mask for each head": ({}, {"attn_mask": normal(4, 5, 5) > 1.0}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "without weights": ({}, {"need_weights": False}),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_attention_with_heads_is_that_of_pytorch(name, batch_first):
    options, how = HEADS[name]
    torch.manual_seed(0)
    layer = (
        nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=batch_first, **options).double().eval()
    )
    widths = (8, options.get("kdim", 8), options.get("vdim", 8))
    given = [normal(2, 5, width, seed=seed) for seed, width in enumerate(widths)]
    if name in ("usual", "padding"):
        given = [given[0]] * 3
    given = given if batch_first else [x.transpose(0, 1) for x in given]

    found, wanted = carried(lambda: layer(*given, **how)), layer(*given, **how)
    torch.testing.assert_close(found[0], wanted[0])
    assert (found[1] is None) == (wanted[1] is None)
    if wanted[1] is not None:
        torch.testing.assert_close(found[1], wanted[1])


def test_attention_without_samples_is_refused():
    layer = nn.MultiheadAttention(8, 2).double()
    with pytest.raises(
        InputError, match=r"queries of shape \(5, 8\); valid: a batch with three dimensions"
    ):
        carried(lambda: layer(*[normal(5, 8)] * 3))


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_the_mean(p):
    dropped = carried(lambda: F.dropout(torch.ones(200, 100), p), training())
    kept = dropped > 0
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=0.02)
    assert dropped[kept].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-4)


def test_alpha_dropout_keeps_mean_and_variance():
    dropped = carried(lambda: F.alpha_dropout(normal(400, 100), 0.3, training=True), training())
    assert dropped.mean().item() == pytest.approx(0, abs=0.02)
    assert dropped.std().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "function", [F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout]
)
def test_channels_are_dropped_as_a_whole(function):
    dropped = carried(lambda: function(torch.ones(20, 8, 3), 0.5, training=True), training())
    assert (dropped == dropped[:, :, :1]).all()
    assert len(dropped.unique()) == 2


def test_draws_differ_between_calls_clients_and_parts_and_repeat_otherwise():
    def twice():
        return [F.dropout(torch.ones(50), 0.5) for _ in range(2)]

    one, other = carried(twice, training())
    assert not torch.equal(one, other)
    assert torch.equal(carried(twice, training())[1], other)
    assert not torch.equal(carried(twice, training(8))[0], one)
    with Carried(), forward_pass(training(), "head"):
        assert not torch.equal(twice()[0], one)


def test_a_sample_does_not_see_how_many_are_beside_it():
    for function in (
        torch.rand_like,
        torch.randn_like,
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.rand(x.shape),
    ):
        few, many = (
            carried(lambda n=n, f=function: f(torch.ones(n, 3)), training()) for n in (2, 6)
        )
        assert torch.equal(many[:2], few)


def test_numbers_have_their_distributions():
    uniform = carried(lambda: torch.rand(100, 100, dtype=torch.float64), training())
    assert (uniform.dtype, uniform.mean().item()) == (torch.float64, pytest.approx(0.5, abs=0.02))
    gaussian = carried(lambda: torch.empty(100, 100).normal_(2.0, 3.0), training())
    assert (gaussian.mean().item(), gaussian.std().item()) == (
        pytest.approx(2, abs=0.1),
        pytest.approx(3, abs=0.1),
    )
    between = carried(lambda: torch.empty(100, 100).uniform_(-1.0, 3.0), training())
    assert between.min() >= -1
    assert between.mean().item() == pytest.approx(1, abs=0.05)
    flips = carried(lambda: torch.bernoulli(torch.full((100, 100), 0.3)), training())
    assert flips.mean().item() == pytest.approx(0.3, abs=0.02)


def test_a_frozen_module_calls_pytorchs_own_functions():
    class Attends(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    x = normal(2, 3, 5, 4)
    with Carried() as mode, forward_pass(Forward(train=False)):
        Frozen(Attends())(x)
        assert not mode.seen
        Attends()(x)
        assert len(mode.seen) == 1
