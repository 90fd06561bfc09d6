"""Recurrent layers as matrix products: values and gradients of PyTorch's layers, also stacked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from equipoise.errors import InputError
from equipoise.models.layers import convert
from equipoise.models.passes import Forward, forward_pass
from equipoise.models.sequences import Recurrent

LAYERS = {
    "lstm": (nn.LSTM, {}),
    "two layers": (nn.LSTM, {"num_layers": 2, "batch_first": True}),
    "both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "projections": (nn.LSTM, {"proj_size": 2, "num_layers": 2}),
    "without bias": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "gru without bias": (nn.GRU, {"bias": False, "batch_first": True}),
    "tanh": (nn.RNN, {"num_layers": 2, "batch_first": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


def made(name):
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    return kind(3, 5, **options).double()


def states_of(layer, samples):
    """Initial states, as the layer takes them."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    drawn = tuple(torch.randn(count, samples, size, dtype=torch.float64) for size in sizes)
    return drawn if isinstance(layer, nn.LSTM) else drawn[0]


def flat(outcome):
    outputs, last = outcome
    return [outputs, *(last if isinstance(last, tuple) else [last])]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_stacked_layers_are_those_of_pytorch(name, given):
    """Two clients with different weights, under ``vmap``, and the gradients of all outputs."""
    layer = made(name)
    clients = [layer, copy.deepcopy(layer)]
    with torch.no_grad():
        for weight in clients[1].parameters():
            weight.mul_(1.3)
    x, hx = torch.randn(2, 4, 6, 3, dtype=torch.float64), None
    samples = 4 if layer.batch_first else 6
    if given:
        hx = states_of(layer, samples)
    module = convert(copy.deepcopy(layer))
    assert isinstance(module, Recurrent)
    stacked = {
        name: torch.stack(
            [dict(c.named_parameters())[name].detach() for c in clients]
        ).requires_grad_()
        for name, _ in layer.named_parameters()
    }
    found = flat(vmap(lambda weights, x: functional_call(module, weights, (x, hx)))(stacked, x))
    wanted = [
        torch.stack(parts)
        for parts in zip(*(flat(c(x[i], hx)) for i, c in enumerate(clients)), strict=True)
    ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(sum(part.sin().sum() for part in found), list(stacked.values()))
    sum(part.sin().sum() for part in wanted).backward()
    for gradient, name in zip(gradients, stacked, strict=True):
        by_hand = torch.stack([dict(c.named_parameters())[name].grad for c in clients])
        torch.testing.assert_close(gradient, by_hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_single_client_gets_what_pytorch_computes(name):
    layer = made(name)
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    for one, other in zip(flat(convert(copy.deepcopy(layer))(x)), flat(layer(x)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_between_layers_belongs_to_the_sample(batch_first):
    torch.manual_seed(0)
    layer = convert(nn.GRU(3, 5, num_layers=2, dropout=0.5, batch_first=batch_first).double())
    x = torch.randn(6, 4, 3, dtype=torch.float64)

    def outputs(samples, forward):
        with forward_pass(forward):
            given = x[:samples]
            found = layer(given if batch_first else given.transpose(0, 1))[0]
        return found if batch_first else found.transpose(0, 1)

    training = Forward(train=True, key=torch.tensor(5))
    torch.testing.assert_close(
        outputs(6, training)[:2], outputs(2, training), rtol=1e-12, atol=1e-12
    )
    resting = outputs(6, Forward(train=False))
    assert not torch.allclose(outputs(6, training), resting)
    layer.moves = False
    torch.testing.assert_close(outputs(6, training), resting, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_single_client_drops_what_stacked_ones_drop(kind, bidirectional):
    """PyTorch's function for one layer after the other, and matrix products under ``vmap``."""
    torch.manual_seed(0)
    layer = kind(3, 5, num_layers=3, dropout=0.5, bidirectional=bidirectional).double()
    module, x = convert(layer), torch.randn(6, 4, 3, dtype=torch.float64)
    weights = dict(module.named_parameters())
    stack = {name: weight.unsqueeze(0) for name, weight in weights.items()}
    found = []
    for stacked in (False, True):
        with forward_pass(Forward(train=True, key=torch.tensor(5), stacked=stacked)):
            made = (
                flat(vmap(lambda given: functional_call(module, given, (x,)))(stack))
                if stacked
                else flat(module(x))
            )
        loss = sum(part.sin().sum() for part in made)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        found.append([*(part.reshape(-1) for part in made), *gradients])
    for alone, together in zip(*found, strict=True):
        torch.testing.assert_close(alone, together, rtol=1e-9, atol=1e-12)
    with forward_pass(Forward(train=False)):
        assert not torch.allclose(module(x)[0].reshape(-1), found[0][0])


def test_outside_the_engine_it_drops_only_in_training():
    layer = convert(nn.LSTM(3, 5, num_layers=2, dropout=0.5, batch_first=True))
    x = torch.randn(4, 6, 3)
    torch.manual_seed(0)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_a_single_sequence_is_refused():
    with pytest.raises(
        InputError, match=r"a tensor of shape \(6, 3\); valid: a batch of sequences"
    ):
        convert(nn.GRU(3, 5))(torch.zeros(6, 3))
