"""The GPU kernels of BatchNorm against PyTorch's layer in float64, client by client.

They run on a GPU, or slowly on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.func import vmap

from equipoise.models.norm_layers import masked_norm
from tests.models.stacks import (
    CHANNELS,
    CLIENTS,
    CLOSE,
    DEVICE,
    LARGE,
    LAYOUTS,
    SAMPLES,
    laid_out,
    normal,
    operations,
    order,
)

pytest.importorskip("triton", reason="needs Triton, which only PyTorch's GPU builds bring")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import norms

FULL = [[1, 1, 1, 1, 1]] * CLIENTS
MASKS = {
    "none": None,
    "full": FULL,
    "partial": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 1]],
    "one": [[1, 1, 1, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0]],
}
POSITIONS = [(), (1, 1), (3, 5), (4, 4), LARGE] if torch.cuda.is_available() else [(), (3, 5)]


def mask_named(name):
    return (
        None
        if MASKS[name] is None
        else torch.tensor(MASKS[name], dtype=torch.float32, device=DEVICE)
    )


def statistics():
    return normal(CLIENTS, CHANNELS, seed=3), normal(CLIENTS, CHANNELS, seed=4).abs()


def normalised(x, weight, bias, mask, mean, var, in_dim=0, momentum=0.2, eps=1e-3):
    given = (x, mask, weight, bias, mean, var)
    dims = tuple(None if t is None else 0 for t in given)

    def of_one(*tensors):
        return norms.norm(*tensors, momentum=momentum, eps=eps)

    return vmap(of_one, in_dims=(in_dim, *dims[1:]))(x.movedim(0, in_dim), *given[1:])


def by_pytorch(x, weight, bias, mask, mean, var, client, momentum=0.2, eps=1e-3):
    """One client in float64: output of all rows, statistics of ``nn.BatchNorm`` on samples only."""
    rows = slice(None) if mask is None else mask[client].bool()
    layer = nn.BatchNorm2d(x.shape[2], eps, momentum).double().to(DEVICE)
    layer.running_mean, layer.running_var = (
        mean[client].double().clone(),
        var[client].double().clone(),
    )
    column = (-1,) + (1,) * (x.dim() - 3)
    own = x[client]
    if own[rows].numel() == own.shape[1]:
        used_mean, used_var = mean[client].double(), var[client].double()
    else:
        layer(
            own[rows].detach().flatten(2).unsqueeze(-1)
            if own.dim() > 2
            else own[rows].detach()[..., None, None]
        )
        axes = [0, *range(2, own.dim())]
        used_mean, used_var = own[rows].mean(axes), own[rows].var(axes, unbiased=False)
    y = (own - used_mean.view(column)) / (used_var + eps).sqrt().view(column)
    return (
        y * weight[client].view(column) + bias[client].view(column),
        layer.running_mean,
        layer.running_var,
    )


@LAYOUTS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_norm_is_pytorchs_on_every_clients_samples(positions, mask, layout):
    mask = mask_named(mask)
    x = laid_out(3 + 2 * normal(CLIENTS, SAMPLES, CHANNELS, *positions), layout).requires_grad_()
    weight, bias = (normal(CLIENTS, CHANNELS, seed=seed).requires_grad_() for seed in (1, 2))
    mean, var = statistics()
    # An upper gradient in padding rows too: nobody may rely on it being zero.
    towards = normal(*x.shape, seed=5)
    y, new_mean, new_var = normalised(x, weight, bias, mask, mean, var)
    assert order(y) == order(x), "a later layer would have to copy"
    found = torch.autograd.grad(y, (x, weight, bias), towards)
    assert order(found[0]) == order(x)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    made = [by_pytorch(*exact, mask, mean, var, client) for client in range(CLIENTS)]
    wanted, wanted_mean, wanted_var = (torch.stack(parts) for parts in zip(*made, strict=True))
    torch.testing.assert_close(y.double(), wanted, **CLOSE)
    torch.testing.assert_close(new_mean.double(), wanted_mean, **CLOSE)
    torch.testing.assert_close(new_var.double(), wanted_var, **CLOSE)
    for own, other in zip(found, torch.autograd.grad(wanted, exact, towards.double()), strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(own.double() / scale, other / scale, **CLOSE)


@pytest.mark.parametrize("mask", ["none", "partial", "one"])
def test_norm_without_weights_and_running_statistics(mask):
    mask = mask_named(mask)
    rows = torch.ones(CLIENTS, SAMPLES, device=DEVICE) if mask is None else mask
    x = normal(CLIENTS, SAMPLES, CHANNELS, 3, 5).requires_grad_()
    towards = normal(*x.shape, seed=5)
    y, mean, var = normalised(x, None, None, mask, None, None)
    exact = x.detach().double().requires_grad_()

    def of_one(x, mask):
        return masked_norm(x, mask, None, None, None, None, momentum=0.2, eps=1e-3)

    wanted = vmap(of_one)(exact, rows.double())
    for own, other in zip((y, mean, var), wanted, strict=True):
        torch.testing.assert_close(own.double(), other, **CLOSE)
    (found,) = torch.autograd.grad(y, x, towards)
    torch.testing.assert_close(
        found.double(),
        torch.autograd.grad(wanted[0], exact, towards.double())[0],
        rtol=1e-4,
        atol=1e-4,
    )


def test_no_gradients_by_the_statistics_are_written():
    x = normal(CLIENTS, SAMPLES, CHANNELS, 2, 2).requires_grad_()
    y, *_ = normalised(x, None, None, None, *statistics())
    called = operations(lambda: torch.autograd.grad(y, x, y.detach()))
    assert "aten::view" in called
    assert "aten::zeros" not in called


@pytest.mark.parametrize("in_dim", [1, 2])
def test_norm_finds_clients_along_any_axis_and_shares_what_is_shared(in_dim):
    x, (mean, var) = normal(CLIENTS, SAMPLES, CHANNELS, 4, 4), statistics()
    weight, bias = (normal(CLIENTS, CHANNELS, seed=seed) for seed in (1, 2))
    wanted = normalised(x, weight, bias, None, mean, var)
    for own, other in zip(
        normalised(x, weight, bias, None, mean, var, in_dim=in_dim), wanted, strict=True
    ):
        assert torch.equal(own, other)
    shared = vmap(
        lambda x: norms.norm(x, None, weight[0], bias[0], mean[0], var[0], momentum=0.2, eps=1e-3)
    )(x)
    for own, other in zip(shared, wanted, strict=True):
        assert torch.equal(own[0], other[0])
    alone = norms.norm(x[0], None, weight[0], bias[0], mean[0], var[0], momentum=0.2, eps=1e-3)
    for own, other in zip(alone, wanted, strict=True):
        assert torch.equal(own, other[0])


def test_norm_of_images_whose_positions_do_not_follow_each_other():
    x = normal(CLIENTS, SAMPLES, CHANNELS, 4, 6)
    odd = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    given = (None, None, None, None, None)
    assert torch.equal(normalised(odd, *given)[0], normalised(x, *given)[0])


@pytest.mark.parametrize("affine", [True, False])
def test_norm_does_the_work_of_relu(affine):
    x, mask = normal(CLIENTS, SAMPLES, CHANNELS, 2, 3), mask_named("partial")
    tensors = [x, normal(CLIENTS, CHANNELS, seed=1), normal(CLIENTS, CHANNELS, seed=2)]
    tensors = tensors if affine else tensors[:1]

    def results(function, dtype):
        own = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        y = vmap(function)(mask.to(dtype), *own)
        towards = normal(*y.shape, seed=5).to(dtype)
        firsts = torch.autograd.grad(y, own, towards, retain_graph=True)
        again = torch.autograd.grad(y, own, towards, create_graph=True)
        return [y, *firsts, *torch.autograd.grad(again[0].square().sum(), own)]

    def ours(mask, x, weight=None, bias=None):
        how = {"momentum": 0.1, "eps": 1e-3, "relu": True}
        return norms.norm(x, mask, weight, bias, None, None, **how)[0]

    def plain(mask, x, weight=None, bias=None):
        return masked_norm(x, mask, weight, bias, None, None, momentum=0.1, eps=1e-3)[0].relu()

    found, wanted = results(ours, torch.float32), results(plain, torch.float64)
    for own, other in zip(found, wanted, strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(own.double() / scale, other / scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [(0, 1, 2, 3, 4), (0, 1, 3, 4, 2)], ids=str)
def test_norm_of_bfloat16_has_statistics_in_float32(layout):
    x = laid_out((3 + normal(2, 4, 3, 2, 3)).bfloat16(), layout).requires_grad_()
    weight, bias = (normal(2, 3, seed=seed).requires_grad_() for seed in (1, 2))
    mean, var = normal(2, 3, seed=3), normal(2, 3, seed=4).abs()
    towards = normal(*x.shape, seed=5).bfloat16()
    y, *statistics = normalised(x, weight, bias, None, mean, var)
    found = torch.autograd.grad(y, (x, weight, bias), towards)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    clients = [by_pytorch(*exact, None, mean, var, client) for client in range(2)]
    wanted, *others = (torch.stack(parts) for parts in zip(*clients, strict=True))
    for own, other in zip(statistics, others, strict=True):
        torch.testing.assert_close(own.double(), other, **CLOSE)
    gradients = torch.autograd.grad(wanted, exact, towards.double())
    # Results are rounded to eight bits, and nothing before them. Triton's interpreter truncates.
    assert y.dtype == found[0].dtype == torch.bfloat16
    for own, other in [(y, wanted), (found[0], gradients[0])]:
        torch.testing.assert_close(own.double(), other, rtol=2**-7, atol=1e-5)
    for own, other in zip(found[1:], gradients[1:], strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-4, atol=1e-4)


def test_variance_far_from_zero_is_not_lost():
    """Deviations of one around ten thousand, which the mean of squares in float32 loses."""
    x = 1e4 + normal(2, 9, 1, *LARGE)
    _, mean, var = vmap(
        lambda x: norms.norm(x, None, None, None, None, None, momentum=0.1, eps=1e-5)
    )(x)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean((1, 3, 4)), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        var.double(), exact.var((1, 3, 4), unbiased=False), rtol=1e-3, atol=0
    )


@pytest.fixture
def small_tiles(monkeypatch):
    """Cut small batches into many tiles and several pieces."""
    for name, value in {"_TILE": 32, "_LINE": 16, "_TILES_OF_PIECE": 2, "_MOST_PIECES": 2}.items():
        monkeypatch.setattr(norms, name, value)


# Samples, channels and positions, and for channels first and last: tiles, and tiles of a piece.
CUT = {
    "many": ((5, 6, 3, 3), (6, 3), (6, 3)),
    "one sample": ((1, 5, 7, 3), (6, 3), (3, 2)),
    "one position": ((19, 5, 1, 1), (1, 1), (3, 2)),
    "one tile": ((2, 3, 2, 2), (1, 1), (1, 1)),
}


def test_batches_are_cut_as_expected(small_tiles):
    for shape, *wanted in CUT.values():
        if shape[2:] == (1, 1):
            continue  # Both orders of memory are the same.
        x = normal(2, *shape)
        for layout, cut in zip([(0, 1, 2, 3, 4), (0, 1, 3, 4, 2)], wanted, strict=True):
            work = norms._Work.on(laid_out(x, layout).flatten(3))
            assert (work.tiles, work.length) == cut
            assert work.pieces == -(-cut[0] // cut[1])
            assert work.whole == (cut == (1, 1))


@pytest.mark.parametrize("layout", [(0, 1, 2, 3, 4), (0, 1, 3, 4, 2)], ids=str)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("cut", CUT)
def test_norm_of_many_tiles_is_pytorchs(cut, masked, layout, small_tiles):
    (samples, channels, *_), *_ = shape, *_ = CUT[cut]
    x = laid_out(3 + 2 * normal(2, *shape), layout).requires_grad_()
    weight, bias = (normal(2, channels, seed=seed).requires_grad_() for seed in (1, 2))
    mean, var = normal(2, channels, seed=3), normal(2, channels, seed=4).abs()
    mask = None
    if masked:
        mask = torch.ones(2, samples, device=DEVICE)
        mask[1, samples // 2 + 1 :] = mask[0, 1:2] = 0
    towards = laid_out(normal(*x.shape, seed=5), layout)
    made = normalised(x, weight, bias, mask, mean, var)
    assert order(made[0]) == order(x)
    found = torch.autograd.grad(made[0], (x, weight, bias), towards)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    clients = [by_pytorch(*exact, mask, mean, var, client) for client in range(2)]
    wanted = [torch.stack(parts) for parts in zip(*clients, strict=True)]
    for own, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(own.double(), other, **CLOSE)
    for own, other in zip(
        found, torch.autograd.grad(wanted[0], exact, towards.double()), strict=True
    ):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(own.double() / scale, other / scale, **CLOSE)


@pytest.mark.parametrize("upper", [(0, 1, 2, 3, 4), (0, 1, 3, 4, 2)], ids=str)
def test_many_tiles_give_the_same_bits_alone_and_wherever_samples_lie(upper, small_tiles):
    x, towards = normal(2, 4, 5, 2, 3), laid_out(normal(2, 4, 5, 2, 3, seed=5), upper)
    weight, bias = (normal(2, 5, seed=seed).requires_grad_() for seed in (1, 2))
    mean, var = normal(2, 5, seed=3), normal(2, 5, seed=4).abs()
    mask = (torch.arange(4, device=DEVICE) < torch.tensor([[4], [3]], device=DEVICE)).float()

    def results(clients, layout):
        given = [tensor[clients] for tensor in (x, weight, bias, mask, mean, var)]
        given[0] = laid_out(given[0], layout).requires_grad_()
        made = normalised(*given)
        return *made, *torch.autograd.grad(made[0], given[:3], towards[clients])

    usual, samples_first = (0, 1, 3, 4, 2), (1, 0, 3, 4, 2)
    first = results(slice(None), usual)
    for clients, layout in [(slice(None), samples_first), (slice(1, None), usual)]:
        for own, other in zip(results(clients, layout), first, strict=True):
            assert torch.equal(own, other[clients])


def test_variance_of_many_tiles_far_from_zero_is_not_lost(small_tiles):
    """Deviations of one around ten thousand, which the mean of squares in float32 loses."""
    x = laid_out(1e4 + normal(2, 9, 3, 2, 3), (0, 1, 3, 4, 2))
    _, mean, var = normalised(x, None, None, None, None, None)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean((1, 3, 4)), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        var.double(), exact.var((1, 3, 4), unbiased=False), rtol=1e-3, atol=0
    )


def test_norm_gives_the_same_bits_twice_and_whoever_shares_the_stack():
    x, mask = normal(CLIENTS, SAMPLES, CHANNELS, *LARGE).requires_grad_(), mask_named("partial")
    weight, bias = (normal(CLIENTS, CHANNELS, seed=seed).requires_grad_() for seed in (1, 2))
    mean, var = statistics()

    def results(clients):
        given = [tensor[:clients] for tensor in (x, weight, bias, mask, mean, var)]
        made = normalised(*given)
        return *made, *torch.autograd.grad(made[0].square().sum(), given[:3])

    first = results(CLIENTS)
    for own, other in zip(results(CLIENTS), first, strict=True):
        assert torch.equal(own, other)
    for own, other in zip(results(2), first, strict=True):
        assert torch.equal(own, other[:2])


@pytest.mark.parametrize("mask", ["none", "one"])
def test_second_derivatives_of_norm_go_through_plain_operations(mask):
    mask, (mean, var) = mask_named(mask), statistics()
    tensors = [
        normal(CLIENTS, SAMPLES, CHANNELS, 3),
        normal(CLIENTS, CHANNELS, seed=1),
        normal(CLIENTS, CHANNELS),
    ]
    rows = torch.ones(CLIENTS, SAMPLES, device=DEVICE) if mask is None else mask

    def plain(x, weight, bias):
        def of_one(x, rows, *others):
            return masked_norm(x, rows, *others, momentum=0.2, eps=1e-3)[0]

        return vmap(of_one)(x, rows.to(x.dtype), weight, bias, mean.to(x.dtype), var.to(x.dtype))

    def seconds(function, dtype):
        own = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        firsts = torch.autograd.grad(function(*own).pow(3).sum(), own, create_graph=True)
        return torch.autograd.grad(sum(first.square().sum() for first in firsts), own)

    found = seconds(lambda *own: normalised(*own, mask, mean, var)[0], torch.float32)
    for own, other in zip(found, seconds(plain, torch.float64), strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(own.double() / scale, other / scale, rtol=1e-3, atol=1e-4)
