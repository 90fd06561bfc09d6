"""The GPU kernels of stacked clients against PyTorch's layers in float64, client by client.

They run on a GPU, or slowly on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from equipoise import tasks
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine, Training
from equipoise.methods import build as method_named
from equipoise.models import build, kernel_modules
from equipoise.models.convolution_layers import MaxPool, Sequential
from equipoise.models.dropout import Dropout, dropped
from equipoise.models.layers import convert
from equipoise.models.norm_layers import BatchNorm, masked_norm
from equipoise.models.passes import Forward, current_pass, forward_pass
from equipoise.optimizers import optimizer_named
from equipoise.random import fold_tensor
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.gpu import needs_gpu
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
    serve_layers,
)
from tests.rounds import engine_run

pytest.importorskip("triton", reason="needs Triton, which only PyTorch's GPU builds bring")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import kernels, norms

# ---- max-pooling ---------------------------------------------------------------------------------


def pooled_by_pytorch(x, window):
    return torch.stack([F.max_pool2d(own, window) for own in x])


@LAYOUTS
@pytest.mark.parametrize(
    ("size", "window"),
    [
        ((4, 4), (2, 2)),
        ((5, 7), (2, 2)),
        ((6, 7), (3, 2)),
        ((2, 2), (2, 2)),
        (LARGE, (2, 2)),
        ((4, 4), (1, 1)),
    ],
    ids=str,
)
def test_max_pool_is_pytorchs(size, window, layout):
    x = laid_out(normal(CLIENTS, SAMPLES, CHANNELS, *size).mul(2).round(), layout).requires_grad_()
    assert (x == x.flip(-1)).any(), "there are ties"
    y = vmap(lambda x: kernels.max_pool(x, window))(x)
    wanted = pooled_by_pytorch(x, window)
    assert torch.equal(y, wanted)
    kept = [axis for axis in order(x) if y.shape[axis] > 1]
    assert order(y) == kept, "a later layer would have to copy"
    towards = normal(*y.shape, seed=1)
    (found,) = torch.autograd.grad(y, x, towards)
    assert torch.equal(found, torch.autograd.grad(wanted, x, towards)[0])
    assert order(found) == order(x)


@pytest.mark.parametrize("relu", [True, False])
def test_max_pool_of_bfloat16_is_pytorchs(relu):
    x = normal(2, 3, 4, 5, 4).bfloat16().requires_grad_()
    y = vmap(lambda x: kernels.max_pool(x, (2, 2), relu))(x)
    wanted = pooled_by_pytorch(x.relu() if relu else x, 2)
    assert torch.equal(y, wanted)
    towards = normal(*y.shape, seed=1).bfloat16()
    (found,), (other,) = (torch.autograd.grad(pooled, x, towards) for pooled in (y, wanted))
    assert torch.equal(found, other)


def test_what_is_not_a_number_wins():
    x = normal(2, 1, 3, 4, 6)
    x[0, 0, 0, 1, 2] = x[1, 0, 2, 0, 0] = x[1, 0, 2, 1, 1] = float("nan")
    x[0, 0, 1] = float("-inf")
    x.requires_grad_()
    y = vmap(lambda x: kernels.max_pool(x, (2, 2)))(x)
    wanted = pooled_by_pytorch(x, 2)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    assert int(y.isnan().sum()) == 2
    towards = normal(*y.shape, seed=1)
    (found,), (other,) = (torch.autograd.grad(pooled, x, towards) for pooled in (y, wanted))
    assert torch.equal(found, other)


def test_no_gradient_by_the_winners_is_written():
    x = normal(CLIENTS, SAMPLES, CHANNELS, 4, 4).requires_grad_()
    y = vmap(lambda x: kernels.max_pool(x, (2, 2)))(x)
    called = operations(lambda: torch.autograd.grad(y, x, y.detach()))
    assert "aten::empty_permuted" in called
    assert "aten::zeros" not in called


@pytest.mark.parametrize("in_dim", [1, 2])
def test_max_pool_finds_clients_along_any_axis(in_dim):
    x = normal(CLIENTS, SAMPLES, CHANNELS, 4, 6)
    found = vmap(lambda x: kernels.max_pool(x, (2, 3)), in_dims=in_dim)(x.movedim(0, in_dim))
    assert torch.equal(found, pooled_by_pytorch(x, (2, 3)))


def test_max_pool_of_images_whose_rows_do_not_follow_each_other():
    x = normal(CLIENTS, SAMPLES, CHANNELS, 4, 6).requires_grad_()
    odd = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    y = vmap(lambda x: kernels.max_pool(x, (2, 2)))(odd)
    wanted = pooled_by_pytorch(x, 2)
    assert torch.equal(y, wanted)
    # One number for all outputs, and no memory of its own.
    assert torch.equal(*(torch.autograd.grad(pooled.sum(), x)[0] for pooled in (y, wanted)))


def test_gradients_of_max_pool_can_be_differentiated():
    x = normal(CLIENTS, SAMPLES, CHANNELS, 5, 6)

    def seconds(pool, x):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(pool(x).pow(3).sum(), x, create_graph=True)
        return first.detach(), torch.autograd.grad(first.square().sum(), x)[0]

    found = seconds(vmap(lambda x: kernels.max_pool(x, (2, 2))), x)
    for own, other in zip(found, seconds(lambda x: pooled_by_pytorch(x, 2), x), strict=True):
        torch.testing.assert_close(own, other)


def test_results_may_be_changed_in_place():
    x, weight = (
        normal(CLIENTS, SAMPLES, CHANNELS, 4, 4).requires_grad_(),
        normal(CLIENTS, CHANNELS, seed=1),
    )

    def of_one_client(in_place):
        def value(x, weight):
            y, *_ = norms.norm(x, None, weight, weight, None, None, momentum=0.1, eps=1e-5)
            y = y.add_(x) if in_place else y + x
            pooled = kernels.max_pool(y, (2, 2))
            return (pooled.mul_(2) if in_place else pooled * 2).square().sum()

        return value

    changed, kept = (
        torch.autograd.grad(vmap(of_one_client(way))(x, weight).sum(), x)[0]
        for way in (True, False)
    )
    assert torch.equal(changed, kept)


def test_kernels_work_where_these_tests_run():
    assert vmap(lambda x: x + (kernels.failure_on(x.device) is None))(
        torch.zeros(2, device=DEVICE)
    ).tolist() == [1, 1]


def test_a_device_without_kernels_is_told_once(monkeypatch):
    def no_compiler(*given):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels.StackedMaxPool, "apply", no_compiler)
    reason = f"Triton cannot build kernels for {DEVICE}:0: Failed to find C compiler"
    assert_told_once(torch.device(DEVICE, 0), reason)


def test_a_device_without_triton_is_told_once(monkeypatch):
    monkeypatch.setattr(kernel_modules, "find_spec", lambda name: None)
    assert_told_once(torch.device(DEVICE, 0), "Triton is not installed")


def assert_told_once(device, reason):
    for cached in (kernel_modules.why_not, kernel_modules.module_with_triton):
        cached.cache_clear()
    with pytest.warns(UserWarning, match=f"steps will be slower: {reason}"):
        assert kernel_modules.module_with_triton("kernels", device) is None
    assert kernel_modules.module_with_triton("norms", device) is None
    assert kernel_modules.why_not(device) == reason
    for cached in (kernel_modules.why_not, kernel_modules.module_with_triton):
        cached.cache_clear()


def test_a_gradient_inside_vmap():
    """A client's loss may contain a gradient."""
    x = normal(CLIENTS, SAMPLES, CHANNELS, 4, 6)

    def loss(pool, norm):
        return lambda x: pool(norm(x)).square().sum()

    def plain(x):
        return masked_norm(x, x.new_ones(SAMPLES), None, None, None, None, momentum=0.1, eps=1e-5)[
            0
        ]

    def ours(x):
        return norms.norm(x, None, None, None, None, None, momentum=0.1, eps=1e-5)[0]

    found = vmap(grad(loss(lambda x: kernels.max_pool(x, (2, 2)), ours)))(x)
    torch.testing.assert_close(
        found, vmap(grad(loss(lambda x: F.max_pool2d(x, 2), plain)))(x), **CLOSE
    )


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 2, 2), (1,), (2, 1030)], ids=str)
def test_dropout_draws_the_engines_numbers(shape, p):
    keys = fold_tensor(7, torch.arange(CLIENTS, device=DEVICE))
    threshold = round((1 - p) * 65536)
    x = normal(CLIENTS, *shape)
    wanted = vmap(lambda x, key: dropped(x, p, key))(x, keys)
    factors = vmap(lambda key: kernels.dropout_factors(key, torch.Size(shape), threshold))(keys)
    assert torch.equal(x * factors, wanted)
    alone = kernels.dropout_factors(keys[0], torch.Size(shape), threshold)
    assert torch.equal(alone, factors[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_uses_the_kernel_for_stacked_clients_only(dtype, everywhere):
    layer, keys = Dropout(0.3, 1, False), fold_tensor(3, torch.arange(2, device=DEVICE))
    x = normal(2, 3, 4).to(dtype).requires_grad_()

    def results(stacked):
        def of_one(x, key):
            with forward_pass(Forward(train=True, key=key, stacked=stacked)):
                return layer(x)

        y = vmap(of_one)(x, keys)
        return y, torch.autograd.grad(y.square().sum(), x)[0]

    plain = results(stacked=False)
    assert not everywhere
    for own, other in zip(results(stacked=True), plain, strict=True):
        assert torch.equal(own, other)
        assert own.dtype == dtype
    assert everywhere


def test_dropout_before_vectors_makes_a_contiguous_result(everywhere):
    layer, keys = Dropout(0.3, 1, False), fold_tensor(3, torch.arange(2, device=DEVICE))
    # Channels innermost, as after convolutions.
    x = normal(2, 3, 5, 6, 4).movedim(-1, 2)

    def result(contiguous):
        def of_one(x, key):
            with forward_pass(Forward(train=True, key=key, stacked=True)):
                return layer(x, contiguous=contiguous)

        return vmap(of_one)(x, keys)

    as_it_is, vectors = result(contiguous=False), result(contiguous=True)
    assert torch.equal(vectors, as_it_is)
    assert vectors.is_contiguous()
    assert not as_it_is.is_contiguous()


@pytest.mark.parametrize("behind", [nn.Flatten(), nn.Flatten(0), nn.ReLU(), None])
def test_only_dropout_before_vectors_is_asked_for_a_contiguous_result(behind, monkeypatch):
    asked = []

    def noted(layer, x, *, contiguous=False):
        asked.append(contiguous)
        return x

    monkeypatch.setattr(Sequential, "on_device", staticmethod(lambda x: True))
    monkeypatch.setattr(Dropout, "forward", noted)
    given = [nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Dropout(0.3), *([] if behind is None else [behind])]
    layers = convert(nn.Sequential(*given).to(DEVICE))
    with forward_pass(Forward(train=True, stacked=True)):
        layers(normal(4, 2, 3, 3))
    assert asked == [isinstance(behind, nn.Flatten) and behind.start_dim == 1]


# ---- in the engine -------------------------------------------------------------------------------


@pytest.fixture
def everywhere(monkeypatch):
    """Use the kernels for layers of stacked clients on this device, and count their calls."""
    calls = []

    def chosen(x, name="kernels"):
        forward = current_pass()
        if forward is None or not forward.stacked or x.dtype == torch.float64:
            return None
        calls.append(x.shape)
        return {"kernels": kernels, "norms": norms}[name]

    serve_layers(monkeypatch, chosen)
    return calls


def test_the_layers_use_the_kernels_for_stacked_clients_only(everywhere):
    norm, pool = BatchNorm(nn.BatchNorm2d(CHANNELS).to(DEVICE)), MaxPool(nn.MaxPool2d(2))
    x = normal(SAMPLES, CHANNELS, 4, 4)
    with forward_pass(Forward(train=True)):
        plain, running = pool(norm(x)), norm.running_var
    assert not everywhere
    norm = BatchNorm(nn.BatchNorm2d(CHANNELS).to(DEVICE))
    with forward_pass(Forward(train=True, stacked=True)):
        torch.testing.assert_close(pool(norm(x)), plain, **CLOSE)
    torch.testing.assert_close(norm.running_var, running, **CLOSE)
    assert len(everywhere) == 2


@pytest.mark.parametrize("masked", [True, False])
def test_a_step_of_a_whole_model_equals_plain_operations_in_float64(
    masked, everywhere, monkeypatch
):
    # Otherwise the difference would come from convolutions on a GPU.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    module = build("bncnn", shape=(2, 9, 8), classes=3, channels=(4, 3), pools=2, hidden=(5,))
    clients, rows = 3, 4
    x, y = (
        normal(clients, rows, 2, 9, 8),
        torch.arange(clients * rows, device=DEVICE).view(clients, rows) % 3,
    )
    mask = (
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], device=DEVICE).float()
        if masked
        else None
    )

    def step(dtype):
        network = Network(module, tasks.build("classification"), torch.device(DEVICE), dtype)
        initial = network.initial()
        stacked = {
            n: (t + 0.1 * normal(clients, *t.shape, seed=i).abs()).to(dtype)
            for i, (n, t) in enumerate(initial.items())
        }
        moving = {n: t.requires_grad_() for n, t in stacked.items() if n not in network.buffers}

        def of_one(params, x, y, mask):
            output, _, buffers = network.apply(
                params, x, Forward(train=True, mask=mask, stacked=True)
            )
            values = F.cross_entropy(output, y, reduction="none")
            return values.mean() if mask is None else (values * mask).sum() / mask.sum(), buffers

        own = None if mask is None else mask.to(dtype)
        losses, buffers = vmap(of_one, in_dims=(0, 0, 0, None if mask is None else 0))(
            stacked, x.to(dtype), y, own
        )
        gradients = torch.autograd.grad(losses.sum(), list(moving.values()))
        return {"losses": losses.detach(), **buffers, **dict(zip(moving, gradients, strict=True))}

    wanted = step(torch.float64)
    assert not everywhere
    found = step(torch.float32)
    assert len(everywhere) == 5, "three BatchNorm and two max-pooling layers"
    for name, other in wanted.items():
        scale = max(float(other.abs().max()), 1e-3)
        torch.testing.assert_close(
            found[name].double() / scale, other / scale, rtol=1e-4, atol=1e-4, msg=name
        )


def small():
    return build(
        "bncnn", shape=(2, 5, 5), classes=4, channels=(4, 3), pools=1, hidden=(5,)
    ).double()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the test below carries out more rounds"
)
def test_a_round_of_ragged_clients_equals_clients_one_by_one_in_float64(everywhere):
    federation = images(sizes=[1, 3, 5])
    options = {"batch_size": 4, "epochs": 1, "optimizer": optimizer_named("sgd", lr=0.05)}
    wanted = engine_run(small(), federation, [np.arange(3)], chunk=1, **options)
    found = engine_run(small(), federation, [np.arange(3)], chunk=3, precision="float32", **options)
    assert everywhere
    assert distance(found, wanted) <= 1e-5


@needs_gpu
@pytest.mark.parametrize("replay", [True, False])
def test_a_gpu_gives_the_cpus_numbers_in_float32(replay):
    def trained(device, **machine):
        trainer = Trainer(
            images(),
            method_named("fedavg"),
            small(),
            Training(
                rounds=4,
                cohort=10,
                batch_size=8,
                epochs=1,
                optimizer=optimizer_named("sgd", lr=0.05),
            ),
            Machine(device=device, **machine),
            Evaluation(every=0),
            seed=0,
        )
        trainer.run()
        return {name: tensor.cpu() for name, tensor in trainer.state.model.items()}

    wanted = trained("cpu", precision="float64", chunk=1)
    found = trained("cuda", precision="float32", chunk=10, replay=replay, tf32=False)
    assert distance(found, wanted) <= 1e-4
    again = trained("cuda", precision="float32", chunk=10, replay=replay, tf32=False)
    assert all(torch.equal(found[name], again[name]) for name in found)
