"""The layers against PyTorch's: on samples without padding, in and outside the engine."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from equipoise import tasks
from equipoise.engine.network import Network
from equipoise.errors import InputError
from equipoise.models import norm_layers
from equipoise.models.base import Model
from equipoise.models.convolution_layers import Convolution, MaxPool
from equipoise.models.dropout import Dropout
from equipoise.models.layers import convert
from equipoise.models.linear_layers import Linear
from equipoise.models.linear_products import linear
from equipoise.models.norm_layers import BatchNorm, LayerNorm
from equipoise.models.passes import Forward, forward_pass
from equipoise.random import fold

CHANNELS = 3
SHAPES = pytest.mark.parametrize(
    "shape", [(), (4,), (2, 5)], ids=["vectors", "sequences", "images"]
)
KINDS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def torch_norm(shape, **options):
    """PyTorch's layer with random parameters and statistics."""
    layer = KINDS[len(shape)](CHANNELS, **options).double()
    with torch.no_grad():
        for offset, (name, tensor) in enumerate(layer.state_dict().items()):
            if tensor.is_floating_point():
                tensor.copy_(
                    normal(CHANNELS, seed=offset + 10).abs()
                    if "var" in name
                    else normal(CHANNELS, seed=offset)
                )
    return layer


def padded(samples, rows, shape, garbage=1e3):
    """A batch whose first rows are samples and the rest large numbers, with its mask."""
    x = garbage * normal(rows, CHANNELS, *shape, seed=99)
    x[:samples] = normal(samples, CHANNELS, *shape)
    return x.requires_grad_(), (torch.arange(rows) < samples).double()


@SHAPES
@pytest.mark.parametrize("samples", [2, 5, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"momentum": 0.3, "eps": 0.01}],
    ids=["usual", "bare", "other"],
)
def test_masked_batchnorm_is_pytorchs_on_the_samples_alone(options, samples, shape):
    theirs = torch_norm(shape, **options)
    ours = BatchNorm(copy.deepcopy(theirs))
    x, mask = padded(samples, 8, shape)
    alone = x.detach()[:samples].clone().requires_grad_()
    towards = normal(samples, CHANNELS, *shape, seed=5)
    wanted = theirs.train()(alone)
    (wanted * towards).sum().backward()
    with forward_pass(Forward(train=True, mask=mask)):
        found = ours(x)
    (found[:samples] * towards).sum().backward()
    exact = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(found[:samples], wanted, **exact)
    torch.testing.assert_close(x.grad[:samples], alone.grad, **exact)
    assert not x.grad[samples:].any()
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, **exact)
    torch.testing.assert_close(ours.running_var, theirs.running_var, **exact)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, **exact)


@SHAPES
def test_without_mask_batchnorm_is_pytorchs(shape):
    theirs = torch_norm(shape)
    ours = BatchNorm(copy.deepcopy(theirs))
    x = normal(6, CHANNELS, *shape)
    with forward_pass(Forward(train=True)):
        found = ours(x)
    torch.testing.assert_close(found, theirs.train()(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-12, atol=1e-12)


def test_what_padding_holds_never_matters():
    results = []
    for garbage in (0.0, 1.0, -1e6):
        layer = BatchNorm(torch_norm((2, 5)))
        x, mask = padded(3, 8, (2, 5), garbage)
        with forward_pass(Forward(train=True, mask=mask)):
            results.append((layer(x)[:3].detach(), layer.running_mean, layer.running_var))
    for other in results[1:]:
        for found, wanted in zip(other, results[0], strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_a_single_value_per_channel_uses_and_keeps_the_running_statistics(masked):
    layer = BatchNorm(torch_norm(()))
    before = layer.running_mean.clone(), layer.running_var.clone()
    x = padded(1, 4, ())[0].detach() if masked else normal(1, CHANNELS)
    mask = torch.tensor([1.0, 0, 0, 0]).double() if masked else None
    with forward_pass(Forward(train=True, mask=mask)):
        found = layer(x)[:1]
    wanted = (x[:1] - before[0]) / (before[1] + layer.eps).sqrt() * layer.weight + layer.bias
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.running_mean, before[0])
    assert torch.equal(layer.running_var, before[1])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("why", ["evaluation", "frozen"])
def test_evaluation_and_frozen_parts_use_the_running_statistics(why, masked):
    theirs = torch_norm((2, 5)).eval()
    ours = BatchNorm(copy.deepcopy(theirs))
    before = ours.running_mean.clone(), ours.running_var.clone()
    ours.moves = why == "evaluation"
    x, mask = padded(3, 8, (2, 5))
    with forward_pass(Forward(train=why == "frozen", mask=mask if masked else None)):
        found = ours(x)
    torch.testing.assert_close(found, theirs(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(ours.running_mean, before[0])
    assert torch.equal(ours.running_var, before[1])


@pytest.mark.parametrize(
    ("train", "mask"), [(True, None), (True, [1.0, 1.0, 0.0]), (False, None)], ids=str
)
def test_under_autocast_the_result_has_the_inputs_type_and_statistics_do_not(train, mask):
    x = normal(3, 2, 4, 4).bfloat16()
    mask = None if mask is None else torch.tensor(mask)

    def results(x, *, autocast):
        layer = BatchNorm(nn.BatchNorm2d(2))
        with (
            forward_pass(Forward(train=train, mask=mask)),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            return layer(x), layer.running_mean, layer.running_var

    y, *statistics = results(x, autocast=True)
    wanted, *others = results(x.float(), autocast=False)
    assert torch.equal(y, wanted.bfloat16())
    assert y.dtype == torch.bfloat16
    for own, other in zip(statistics, others, strict=True):
        assert torch.equal(own, other)


def test_new_statistics_are_assigned_and_never_written_in_place():
    layer = BatchNorm(torch_norm(()))
    before = layer.running_mean
    copied = before.clone()
    with forward_pass(Forward(train=True)):
        layer(normal(6, CHANNELS))
    assert torch.equal(before, copied)
    assert not torch.equal(layer.running_mean, copied)


@SHAPES
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("when", ["training", "evaluation", "frozen"])
def test_without_running_statistics_the_batch_is_always_used(when, masked, shape):
    theirs = torch_norm(shape, track_running_stats=False)
    ours = BatchNorm(copy.deepcopy(theirs))
    ours.moves = when != "frozen"
    x, mask = padded(5, 8, shape)
    alone = x[:5] if masked else x
    with forward_pass(Forward(train=when != "evaluation", mask=mask if masked else None)):
        found = ours(x)[: len(alone)]
    torch.testing.assert_close(found, theirs.eval()(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_a_single_value_without_running_statistics_is_its_own_mean(masked):
    layer = BatchNorm(torch_norm((), track_running_stats=False))
    x = padded(1, 4, ())[0].detach() if masked else normal(1, CHANNELS)
    with forward_pass(
        Forward(train=False, mask=torch.tensor([1.0, 0, 0, 0]).double() if masked else None)
    ):
        found = layer(x)[0]
    torch.testing.assert_close(found, layer.bias, rtol=1e-12, atol=1e-12)


def test_stacked_clients_with_masks_of_their_own_equal_one_by_one():
    features = nn.Sequential(
        nn.Conv2d(2, CHANNELS, 2), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Flatten()
    )
    network = Network(
        Model(features, nn.Linear(CHANNELS * 4, 2)),
        tasks.build("classification"),
        dtype=torch.float64,
    )
    clients, rows = 4, 6
    x = normal(clients, rows, 2, 3, 3)
    counts = [6, 1, 3, 5]
    mask = (torch.arange(rows) < torch.tensor(counts).unsqueeze(1)).double()
    stacked = {
        n: t + 0.1 * normal(clients, *t.shape, seed=i).abs()
        for i, (n, t) in enumerate(network.initial().items())
    }

    def of_one(params, x, mask):
        return network.apply(params, x, Forward(train=True, mask=mask))

    together, _, buffers = vmap(of_one)(stacked, x, mask)
    for client, count in enumerate(counts):
        own = {name: stack[client] for name, stack in stacked.items()}
        alone, _, own_buffers = network.apply(own, x[client, :count], Forward(train=True))
        torch.testing.assert_close(together[client, :count], alone, rtol=1e-9, atol=1e-9)
        for name, buffer in own_buffers.items():
            torch.testing.assert_close(buffers[name][client], buffer, rtol=1e-9, atol=1e-9)


# ---- dropout -------------------------------------------------------------------------------------


def key(value=7):
    return torch.tensor(value)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_expectation(p):
    layer = Dropout(p, 1, channels=False)
    with forward_pass(Forward(train=True, key=key())):
        y = layer(torch.ones(200, 500).double())
    threshold = round((1 - p) * 65536)
    assert set(y.unique().tolist()) == {0.0, 65536 / threshold}
    # 100,000 draws: five standard deviations around the mean of one.
    assert abs(y.mean().item() - 1) < 5 * np.sqrt(p / (1 - p) / y.numel())


def test_dropout_masks_belong_to_key_and_layer():
    x = torch.ones(20, 20)

    def dropped(layer, key_):
        with forward_pass(Forward(train=True, key=key_)):
            return Dropout(0.5, layer, channels=False)(x)

    assert torch.equal(dropped(1, key(1)), dropped(1, key(1)))
    assert not torch.equal(dropped(1, key(1)), dropped(1, key(2)))
    assert not torch.equal(dropped(1, key(1)), dropped(2, key(1)))


def test_a_dropout_mask_is_the_hash_worked_out_in_integers():
    with forward_pass(Forward(train=True, key=key(12))):
        kept = Dropout(0.3, 4, channels=False)(torch.ones(3, 7)) > 0
    threshold, own = round(0.7 * 65536), fold(12, 4)
    wanted = [(fold(own, i // 4) >> (16 * (i % 4))) & 0xFFFF < threshold for i in range(21)]
    assert kept.flatten().tolist() == wanted


def test_a_dropout_layer_that_is_called_again_draws_again():
    layer, x = Dropout(0.5, layer=1, channels=False), torch.ones(40, 5)

    def twice():
        with forward_pass(Forward(train=True, key=key())):
            return layer(x), layer(x)

    first, second = twice()
    assert 0.3 < float((first == second).double().mean()) < 0.7
    again = twice()
    assert torch.equal(again[0], first)
    assert torch.equal(again[1], second)


def test_a_layer_in_several_places_stays_one():
    layer = nn.BatchNorm1d(3)
    module = convert(
        nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.Dropout(0.5)), "c": layer})
    )
    assert module["a"] is module["c"] is module["b"][0]
    assert isinstance(module["a"], BatchNorm)
    assert module["a"].weight is layer.weight


class Doubled(nn.Dropout):
    def forward(self, x):
        return 2 * super().forward(x)


class Kept(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


@pytest.mark.parametrize(
    "layer", [Doubled(0.5), Kept(3), nn.AlphaDropout(0.5), nn.Embedding(3, 2, max_norm=1.0)]
)
def test_layers_that_do_something_else_are_left_alone(layer):
    assert convert(nn.Sequential(layer))[0] is layer


def test_padding_rows_do_not_change_the_mask_of_samples():
    with forward_pass(Forward(train=True, key=key())):
        short, long = (Dropout(0.5, 1, channels=False)(torch.ones(rows, 9)) for rows in (4, 10))
    assert torch.equal(long[:4], short)


def test_dropout_of_channels_drops_all_of_their_values():
    with forward_pass(Forward(train=True, key=key())):
        y = Dropout(0.4, 1, channels=True)(torch.ones(50, 20, 3, 3))
    whole = y.flatten(2)
    assert bool((whole == whole[..., :1]).all())
    assert 0.3 < (whole[..., 0] == 0).double().mean() < 0.5


@pytest.mark.parametrize(("p", "value"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_extremes_of_dropout(p, value):
    with forward_pass(Forward(train=True, key=key())):
        assert Dropout(p, 1, channels=False)(torch.ones(4, 4)).unique().tolist() == [value]


def test_dropout_does_nothing_in_evaluation():
    x = normal(4, 4)
    with forward_pass(Forward(train=False, key=key())):
        assert torch.equal(Dropout(0.5, 1, channels=False)(x), x)


# ---- conversion ----------------------------------------------------------------------------------


def every_kind():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Dropout2d(0.3), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(36, 3),
        nn.BatchNorm1d(3, affine=False),
        nn.Dropout(0.5),
    ).double()


def test_converted_layers_keep_names_and_every_bit_of_float64():
    module = every_kind()
    with torch.no_grad():
        for offset, tensor in enumerate(module.state_dict().values()):
            if tensor.is_floating_point():
                tensor.copy_(normal(*tensor.shape, seed=offset).abs())
    wanted = {
        n: t.clone()
        for n, t in module.state_dict().items()
        if not n.endswith("num_batches_tracked")
    }
    state = torch.get_rng_state()
    found = convert(module).state_dict()
    assert list(found) == list(wanted)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == torch.float64
        for name, tensor in wanted.items()
    )
    assert torch.equal(torch.get_rng_state(), state), "no random number was drawn"
    kinds = [type(module[i]) for i in (0, 1, 5, 6)] + [type(module[2][0])]
    assert kinds == [Convolution, BatchNorm, BatchNorm, Dropout, Dropout]
    assert (module[2][0].channels, module[6].channels) == (True, False)
    assert (module[2][0].layer, module[6].layer) == (1, 2)


def test_outside_the_engine_converted_models_behave_like_the_originals():
    plain = every_kind()
    ours = convert(copy.deepcopy(plain))
    x = normal(5, 2, 3, 3)
    for module in (plain, ours):
        module.train()
    torch.manual_seed(0)
    wanted = plain(x)
    torch.manual_seed(0)
    torch.testing.assert_close(ours(x), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[1].running_mean, plain[1].running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x), rtol=1e-12, atol=1e-12)


def test_converting_twice_changes_nothing():
    once = convert(every_kind())
    layers = [id(layer) for layer in once.modules()]
    assert [id(layer) for layer in convert(once).modules()] == layers


def test_a_cumulative_average_is_refused():
    with pytest.raises(InputError, match="momentum=None"):
        convert(nn.Sequential(nn.BatchNorm1d(3, momentum=None)))


def test_batchnorm_refuses_a_batch_without_channels():
    with pytest.raises(InputError, match="at least two dimensions"):
        BatchNorm(nn.BatchNorm1d(3))(torch.zeros(3))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding="same"),
    ],
    ids=["groups", "two of each channel", "named padding"],
)
def test_unusual_convolutions_are_left_alone(layer):
    assert convert(nn.Sequential(layer))[0] is layer


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d((2, 3), stride=2),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
    ],
    ids=["overlap", "other stride", "padding", "dilation", "ceil", "indices"],
)
def test_unusual_max_pooling_is_left_alone(layer):
    assert convert(nn.Sequential(layer))[0] is layer


@pytest.mark.parametrize("window", [2, (3, 2)])
@pytest.mark.parametrize("stacked", [None, False, True], ids=["outside", "alone", "stacked"])
def test_max_pooling_without_a_gpu_is_pytorchs(stacked, window):
    plain = nn.MaxPool2d(window)
    (layer,) = convert(nn.Sequential(nn.MaxPool2d(window)))
    assert type(layer) is MaxPool
    x = normal(4, 5, 2, 7, 6)
    if stacked is None:
        assert torch.equal(layer(x[0]), plain(x[0]))
        assert torch.equal(layer(x[0, 0]), plain(x[0, 0])), "a single image"
        return
    with forward_pass(Forward(train=True, stacked=stacked)):
        found = vmap(layer)(x) if stacked else layer(x[0])
    assert torch.equal(found, torch.stack([plain(own) for own in x]) if stacked else plain(x[0]))


def test_max_pooling_gets_its_gradient_in_the_layout_of_the_images():
    """Otherwise PyTorch copies a gradient of the size of the images twice on a CPU."""
    images = normal(3, 6, 8, 2).permute(0, 3, 1, 2).requires_grad_()
    weight = normal(2 * 3 * 4, seed=1)

    def derivatives(layer):
        y = layer(images)
        seen = []
        for node in (y.grad_fn, *(node for node, _ in y.grad_fn.next_functions)):
            if node.name().startswith("MaxPool2D"):
                node.register_prehook(
                    lambda given: seen.append(
                        given[0].is_contiguous(memory_format=torch.channels_last)
                    )
                )
        value = (y.flatten(1).pow(3) @ weight).sum()
        (first,) = torch.autograd.grad(value, images, create_graph=True)
        return y, first, *torch.autograd.grad(first.square().sum(), images), seen[0]

    *found, innermost = derivatives(MaxPool(nn.MaxPool2d(2)))
    *wanted, _ = derivatives(nn.MaxPool2d(2))
    assert innermost
    assert all(map(torch.equal, found, wanted))


def test_sparse_embeddings_get_dense_gradients():
    layer = nn.Embedding(5, 2, sparse=True)
    numbers = torch.tensor([1, 3, 3])
    wanted, found = (
        torch.autograd.grad(made(numbers).square().sum(), layer.weight)[0]
        for made in (layer, convert(nn.Sequential(layer)))
    )
    assert torch.equal(found, wanted.to_dense())


def test_pooled_images_can_be_changed_in_place():
    images = normal(3, 6, 8, 2).permute(0, 3, 1, 2).requires_grad_()

    def gradient(layer):
        y = nn.ReLU(inplace=True)(layer(images))
        return torch.autograd.grad(y.flatten(1).pow(3).sum(), images)[0]

    assert torch.equal(gradient(MaxPool(nn.MaxPool2d(2))), gradient(nn.MaxPool2d(2)))


@pytest.mark.parametrize("affine", [True, False])
def test_batchnorm_at_rest_on_a_gpu_is_pytorchs(affine, monkeypatch):
    """It is made of elementary operations there: PyTorch cannot stack channels innermost."""
    layer = nn.BatchNorm2d(3, affine=affine).double()
    layer.running_mean, layer.running_var = normal(3, seed=1), normal(3, seed=2).abs()
    if affine:
        layer.weight.data, layer.bias.data = normal(3, seed=3), normal(3, seed=4)
    x = normal(4, 2, 5, 6, 3).movedim(-1, 2)
    wanted = torch.stack([copy.deepcopy(layer).eval()(own) for own in x])
    own = BatchNorm(layer)
    monkeypatch.setattr(norm_layers, "stacked_on_gpu", lambda x: True)
    with forward_pass(Forward(train=False, stacked=True)):
        torch.testing.assert_close(vmap(own)(x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_stacked_products_lie_as_the_weights_do(bias):
    x, weight = normal(6, 4, 3).requires_grad_(), normal(6, 2, 3, seed=1).requires_grad_()
    added = [normal(6, 2, seed=2).requires_grad_()] if bias else []

    def results(product):
        y = vmap(product)(x, weight, *added)
        firsts = torch.autograd.grad(y.pow(3).sum(), (x, weight, *added), create_graph=True)
        squares = sum(first.square().sum() for first in firsts)
        return y, *firsts, *torch.autograd.grad(squares, (x, weight, *added))

    found = results(lambda x, weight, bias=None: linear(x, weight, bias))
    for own, other in zip(found, results(F.linear), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    assert found[2].is_contiguous()
    shared = vmap(lambda x: linear(x, weight[0], None))(x)
    torch.testing.assert_close(shared, x @ weight[0].t(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leading", [(), (4,), (4, 5), (4, 5, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_pytorchs_alone_and_stacked(leading, bias):
    layer = nn.Linear(3, 2, bias=bias).double()
    wanted_layer, converted = copy.deepcopy(layer), convert(nn.Sequential(layer))[0]
    assert type(converted) is Linear
    assert converted.weight is layer.weight
    x, weights = normal(6, *leading, 3), normal(6, 2, 3, seed=1)
    torch.testing.assert_close(converted(x[0]), wanted_layer(x[0]), rtol=0, atol=1e-14)

    def output(weight, x):
        return torch.func.functional_call(converted, {"weight": weight}, (x,))

    wanted = torch.stack(
        [F.linear(own, weight, layer.bias) for own, weight in zip(x, weights, strict=True)]
    )
    torch.testing.assert_close(vmap(output)(weights, x), wanted, rtol=0, atol=1e-13)


def test_stacked_linear_layers_do_not_copy_their_weights():
    """PyTorch's ``vmap`` rule copies the weights of a client for each of its samples."""
    weights, x = torch.zeros(2, 50, 40), torch.zeros(2, 7, 30, 40).transpose(1, 2)

    def largest(layer):
        """The size of the largest matrix product's operands."""
        sizes = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if "mm" in function.__name__:
                    sizes.extend(
                        tensor.numel() for tensor in args if isinstance(tensor, torch.Tensor)
                    )
                return function(*args, **(kwargs or {}))

        with Watch():
            vmap(lambda weight, x: torch.func.functional_call(layer, {"weight": weight}, (x,)))(
                weights, x
            )
        return max(sizes)

    plain = nn.Linear(40, 50, bias=False)
    assert largest(plain) == 30 * weights.numel()
    assert largest(convert(nn.Sequential(plain))[0]) == x.numel() < 30 * weights.numel()


def test_linear_layers_with_hooks_are_left_alone():
    hooked = nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda layer, inputs: None)
    assert convert(nn.Sequential(hooked))[0] is hooked


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_layer_norm_is_pytorchs_alone_and_inside_transforms(shape, options):
    layer = nn.LayerNorm(shape, **options).double()
    with torch.no_grad():
        for seed, p in enumerate(layer.parameters()):
            p.copy_(normal(*p.shape, seed=seed))
    wanted, converted = copy.deepcopy(layer), convert(nn.Sequential(layer))[0]
    assert type(converted) is LayerNorm
    x = normal(3, 2, *shape).requires_grad_()
    (right,) = torch.autograd.grad(wanted(x).pow(3).sum(), x)
    torch.testing.assert_close(converted(x), wanted(x), rtol=0, atol=0)
    found = vmap(torch.func.grad(lambda x: converted(x).pow(3).sum()))(x)
    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)],
    ids=str,
)
def test_second_derivatives_of_stacked_clients_are_those_of_one(norm, masked):
    """PyTorch's own ``vmap`` rules are wrong here by tens of percent."""
    module = convert(
        nn.Sequential(nn.Linear(4, 3, bias=False), copy.deepcopy(norm), nn.Linear(3, 2)).double()
    )
    buffers = dict(module.named_buffers())
    stacked = {
        name: normal(2, *p.shape, seed=seed).requires_grad_()
        for seed, (name, p) in enumerate(module.named_parameters())
    }
    x = normal(2, 6, 4, seed=9)
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64) if masked else None

    def loss(params, x):
        output = torch.func.functional_call(module, (params, buffers), (x,))
        return output[:5].pow(3).mean()

    def sharpness(params, x):
        return sum(g.square().sum() for g in torch.func.grad(loss)(params, x).values())

    with forward_pass(Forward(train=True, mask=mask, stacked=True)):
        found = torch.autograd.grad(vmap(sharpness)(stacked, x).sum(), list(stacked.values()))
    for k in range(2):
        mine = {name: p[k].detach().requires_grad_() for name, p in stacked.items()}
        with forward_pass(Forward(train=True)):
            value = loss(mine, x[k][:5] if masked else x[k])
        first = torch.autograd.grad(value, list(mine.values()), create_graph=True)
        wanted = torch.autograd.grad(sum(g.square().sum() for g in first), list(mine.values()))
        for gradient, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient[k], right, rtol=1e-9, atol=1e-11)
