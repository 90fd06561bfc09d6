"""The convolutions of stacked clients against ``nn.Conv2d`` in float64, client by client.

They run on a GPU, or slowly on the CPU in Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.nn.grad import conv2d_weight
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise import tasks
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine, Training
from equipoise.methods import build as method_named
from equipoise.models import build, convolution_layers
from equipoise.models.convolution_layers import Convolution, Sequential
from equipoise.models.layers import convert
from equipoise.models.passes import Forward, current_pass, forward_pass
from equipoise.optimizers import optimizer_named
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.gpu import needs_gpu
from tests.models.stacks import serve_layers

pytest.importorskip("triton", reason="needs Triton, which is not made for this system")

from equipoise.models import convolutions, kernels, norms
from equipoise.models.convolutions import Geometry, Tile, convolve, convolve_and_pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest error over the largest value. A weight's gradient in TF32 is more accurate than that.
ERROR = {"ieee": 2e-6, "split": 2e-6, "tf32": 3e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """As the engine does: PyTorch by itself lets convolutions round to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float().to(DEVICE)


def channels_last(x):
    return x.movedim(-3, -1).contiguous().movedim(-1, -3)


def lies_channels_last(x):
    return x.movedim(-3, -1).is_contiguous()


def assert_near(found, wanted, error=ERROR["ieee"]):
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    scale = max(float(wanted.abs().max()), 1e-30)
    assert float((found.double() - wanted).abs().max()) <= error * scale


def parts(channels, results, size, kernel, clients=2, samples=2, depthwise=False):
    """Images, weights and bias of several clients."""
    x = normal(clients, samples, channels, *size)
    read = 1 if depthwise else channels
    return x, normal(clients, results, read, *kernel, seed=1), normal(clients, results, seed=2)


def by_pytorch(x, weight, bias, geometry, relu=False):
    """One client after the other."""
    how = geometry.stride, geometry.padding, geometry.dilation
    how = *how, x.shape[2] if geometry.depthwise else 1
    bias = [None] * len(x) if bias is None else bias
    y = torch.stack([F.conv2d(a, w, b, *how) for a, w, b in zip(x, weight, bias, strict=True)])
    return y.relu() if relu else y


def stacked(geometry, **options):
    return vmap(lambda x, weight, bias: convolve(x, weight, bias, geometry, **options))


def results_of(function, tensors, dtype=torch.float32, seconds=False):
    """What a function makes of tensors, its gradients, and those of their squares."""
    own = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    y = function(*own)
    loss = (y * normal(*y.shape, seed=3).to(y.dtype)).sum() if not seconds else y.pow(3).sum()
    firsts = torch.autograd.grad(loss, own, create_graph=seconds)
    if not seconds:
        return [y.detach(), *firsts]
    return torch.autograd.grad(sum(first.square().sum() for first in firsts), own)


CASES = {
    "usual": (4, 5, (5, 6), (3, 3), Geometry(padding=(1, 1))),
    "three channels": (3, 17, (6, 5), (5, 5), Geometry(padding=(2, 2))),
    "one pixel": (1, 1, (1, 1), (1, 1), Geometry()),
    "kernel larger than the image": (2, 3, (1, 2), (5, 3), Geometry(padding=(2, 1))),
    "sixteen channels": (16, 4, (4, 4), (3, 2), Geometry(padding=(0, 1))),
    "forty channels": (40, 33, (3, 3), (2, 2), Geometry()),
    "stride": (5, 4, (5, 7), (3, 3), Geometry((2, 3), (1, 1))),
    "stride beyond the kernel": (3, 2, (7, 6), (1, 2), Geometry((3, 4), (0, 1))),
    "dilation": (2, 4, (7, 6), (3, 2), Geometry((1, 1), (2, 0), (2, 3))),
    "stride and dilation": (2, 3, (9, 8), (3, 3), Geometry((4, 2), (3, 2), (2, 3))),
    "depthwise": (5, 5, (5, 6), (3, 3), Geometry((1, 1), (1, 1), (1, 1), True)),
    "depthwise with stride": (3, 3, (7, 6), (3, 2), Geometry((2, 3), (2, 1), (2, 1), True)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_convolution_is_that_of_every_client(case):
    channels, results, size, kernel, geometry = CASES[case]
    tensors = parts(channels, results, size, kernel, depthwise=geometry.depthwise)
    found = results_of(stacked(geometry, precision="ieee"), tensors)
    wanted = results_of(lambda *own: by_pytorch(*own, geometry), tensors, torch.float64)
    for own, other in zip(found, wanted, strict=True):
        assert_near(own, other)
    assert lies_channels_last(found[0]), "a later layer would have to copy"
    assert lies_channels_last(found[1])
    assert found[2].is_contiguous()


def test_quotients_are_exact_wherever_places_are_packed():
    """As in the kernels: a product in 32 bits, without its last 20."""
    numbers = np.arange(2048, dtype=np.int32)
    for divisor in range(1, 513):
        factor = np.int32((1 << 20) // divisor + 1)
        assert np.array_equal(numbers * factor >> 20, numbers // divisor), divisor
    for channels, kernel, inner in [(1, (1, 513), 32), (1, (45, 45), 32), (256, (3, 3), 64)]:
        assert not convolutions.packs(channels, kernel, inner)
    assert convolutions.packs(1, (1, 512), 32)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("precision", ["split", "tf32", "bfloat16"])
def test_precisions(precision, relu):
    geometry = Geometry((2, 1), (1, 1))
    tensors = parts(17, 5, (4, 5), (3, 3))
    # The kernels round first, and near zero that decides what ReLU does.
    tensors = [tensor.bfloat16().float() for tensor in tensors]
    found = results_of(stacked(geometry, precision=precision, relu=relu), tensors)
    wanted = results_of(lambda *own: by_pytorch(*own, geometry, relu), tensors, torch.float64)
    assert found[0].dtype == (torch.bfloat16 if precision == "bfloat16" else torch.float32)
    for own, other in zip(found, wanted, strict=True):
        assert_near(own, other, ERROR[precision])


def weight_gradients(x, upper, precision="tf32", **options):
    """Weight gradients of 3 x 3 kernels, and those of PyTorch in float64."""
    found, _ = convolutions.weight_gradient(
        x, upper, (3, 3), Geometry(padding=(1, 1)), precision, biased=False, **options
    )
    return found, in_float64(x, upper)


def in_float64(x, upper):
    pairs = zip(x.double(), upper.double(), strict=True)
    size = upper.shape[2], x.shape[2], 3, 3
    return torch.stack([conv2d_weight(a, size, b, padding=1) for a, b in pairs])


def in_tf32(x):
    """Round to 11 bits, as TF32 does."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2**11).round() / 2**11, exponent)


def relative_errors(found, wanted):
    """The error of each kernel over its norm."""
    difference = (found.double() - wanted).flatten(-2).norm(dim=-1)
    return difference / wanted.flatten(-2).norm(dim=-1)


@pytest.mark.parametrize("same_size", [True, False])
def test_a_weight_gradient_is_more_accurate_than_tf32(same_size):
    x, upper = normal(2, 3, 5, 6, 6), normal(2, 3, 4, 6, 6, seed=1)
    if not same_size:
        # One channel, and one result, is much larger than the others.
        x = x * torch.tensor([1e-30, 1.0, 1e30, 1e-12, 1.0], device=DEVICE).view(5, 1, 1)
        upper = upper * torch.tensor([1e-6, 1.0, 1e6, 1e-3], device=DEVICE).view(4, 1, 1)
    found, wanted = weight_gradients(x, upper)
    errors = relative_errors(found, wanted)
    assert errors.max() <= 1e-4
    assert (
        errors.mean() < 0.1 * relative_errors(in_float64(in_tf32(x), in_tf32(upper)), wanted).mean()
    )


def test_a_weight_gradient_in_tf32_of_numbers_within_a_sum():
    # A sum has a large number and many that are far smaller.
    x, upper = normal(1, 3, 4, 6, 6), normal(1, 3, 4, 6, 6, seed=1)
    x[:, 0, :, 0, 0] *= 2.0**20
    assert relative_errors(*weight_gradients(x, upper)).max() <= 1e-4
    x[:] = 0
    assert not weight_gradients(x, upper)[0].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("which", ["x", "upper"])
def test_a_weight_gradient_in_tf32_of_what_is_not_finite(which, number):
    x, upper = normal(2, 2, 4, 4, 4), normal(2, 2, 5, 4, 4, seed=1)
    # All places of a kernel read this pixel.
    (x if which == "x" else upper)[1, 0, 2, 1, 2] = number
    found, _ = weight_gradients(x, upper)
    reached = torch.zeros(found.shape, dtype=torch.bool, device=DEVICE)
    (reached[1, :, 2] if which == "x" else reached[1, 2])[:] = True
    assert torch.equal(~found.isfinite(), reached)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000])
@pytest.mark.parametrize("precision", ["split", "tf32", "bfloat16"])
def test_what_is_not_finite_is_not_hidden(precision, bits):
    """Two of these are the results that GPUs and CPUs give where there is no number."""
    number = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for position in range(2):
        tensors = parts(3, 4, (4, 5), (3, 3))
        tensors[position][1, 1, 2, 1, 2] = number
        found = stacked(Geometry(), precision=precision)(*tensors).isfinite()
        wanted = by_pytorch(*(tensor.double() for tensor in tensors), Geometry()).isfinite()
        assert torch.equal(found, wanted)


def test_a_weight_gradient_in_tf32_has_the_same_bits_alone_and_in_a_stack():
    x, upper = normal(3, 2, 4, 5, 5), normal(3, 2, 5, 5, 5, seed=1)
    together, _ = weight_gradients(x, upper)
    for client in range(3):
        alone, _ = weight_gradients(x[client : client + 1], upper[client : client + 1])
        assert torch.equal(alone[0], together[client])


def test_a_weight_gradient_of_several_tiles_at_one_place_of_the_kernel():
    x, upper = normal(1, 1, 48, 3, 4), normal(1, 1, 3, 3, 4, seed=1)
    assert_near(*weight_gradients(x, upper, "ieee", tile=Tile(16, 16, 16, 1, 1), piece=16))


def test_images_may_lie_in_any_order():
    x, weight, bias = parts(3, 4, (4, 5), (3, 3), samples=3)
    wanted = by_pytorch(x.double(), weight.double(), bias.double(), Geometry())
    for axis in (1, 2):
        one_first = x.movedim(0, axis).contiguous()
        found = vmap(lambda x, w, b: convolve(x, w, b, Geometry()), in_dims=(axis, 0, 0))
        assert_near(found(one_first, weight, bias), wanted)
    assert_near(stacked(Geometry())(channels_last(x), weight, bias), wanted)


def test_clients_may_share_images_or_weights():
    x, weight, bias = parts(3, 4, (4, 5), (3, 3), samples=3)

    def shared_weights(x, weight):
        return vmap(lambda x: convolve(x, weight, None, Geometry()))(x)

    assert_near(
        vmap(lambda weight, bias: convolve(x[0], weight, bias, Geometry()))(weight, bias),
        by_pytorch(*(t.double() for t in (x[:1].expand_as(x), weight, bias)), Geometry()),
    )
    found = results_of(shared_weights, (x, weight[0]))
    wanted = results_of(
        lambda x, w: by_pytorch(x, w.expand(len(x), *w.shape), None, Geometry()),
        (x, weight[0]),
        torch.float64,
    )
    for own, other in zip(found, wanted, strict=True):
        assert_near(own, other)


@pytest.mark.parametrize(
    ("relu", "depthwise"), [(False, False), (True, False), (True, True)], ids=str
)
def test_gradients_can_be_differentiated(relu, depthwise):
    geometry = Geometry((2, 1), (1, 0), (1, 2), depthwise)
    tensors = parts(3, 3, (4, 5), (3, 2), depthwise=depthwise)
    found = results_of(stacked(geometry, relu=relu), tensors, seconds=True)
    wanted = results_of(
        lambda *own: by_pytorch(*own, geometry, relu), tensors, torch.float64, seconds=True
    )
    for own, other in zip(found, wanted, strict=True):
        assert_near(own, other, 1e-5)


def test_a_gradient_inside_vmap():
    x, weight, bias = parts(3, 4, (4, 5), (3, 2))

    def loss(convolved):
        return lambda weight, bias, x: convolved(x, weight, bias).square().sum()

    found = vmap(grad(loss(lambda *own: convolve(*own, Geometry())), argnums=(0, 1)))
    wanted = vmap(grad(loss(F.conv2d), argnums=(0, 1)))
    exact = wanted(weight.double(), bias.double(), x.double())
    for own, other in zip(found(weight, bias, x), exact, strict=True):
        assert_near(own, other)


def test_the_same_bits_twice_and_whoever_shares_the_stack(monkeypatch):
    # Several pieces, the last of them not full.
    monkeypatch.setattr(convolutions, "weight_tile", lambda *_: (Tile(32, 16, 16, 1, 1), 16))
    x, weight, bias = parts(3, 4, (3, 3), (3, 3), clients=2, samples=2)
    geometry = Geometry(padding=(1, 1))
    first = results_of(stacked(geometry), (x, weight, bias))
    for own, other in zip(results_of(stacked(geometry), (x, weight, bias)), first, strict=True):
        assert torch.equal(own, other)
    wanted = results_of(lambda *own: by_pytorch(*own, geometry), (x, weight, bias), torch.float64)
    for own, other in zip(first, wanted, strict=True):
        assert_near(own, other)
    alone = [tensor[:1] for tensor in (x, weight, bias)]
    towards = normal(*first[0].shape, seed=3)

    def results(tensors, towards):
        own = [tensor.detach().requires_grad_() for tensor in tensors]
        y = stacked(geometry)(*own)
        return [y, *torch.autograd.grad(y, own, towards)]

    for own, other in zip(results(alone, towards[:1]), first, strict=True):
        assert torch.equal(own, other[:1])
    # Rows of padding, whose upper gradient is zero.
    wider = torch.cat([x, x], dim=1), weight, bias
    padded = torch.cat([towards, torch.zeros_like(towards)], dim=1)
    _, of_x, *of_weights = results(wider, padded)
    assert torch.equal(of_x[:, :2], first[1])
    for own, other in zip(of_weights, first[2:], strict=True):
        assert torch.equal(own, other)


def test_no_samples_give_no_gradient():
    x, weight, bias = parts(2, 3, (3, 3), (2, 2), samples=0)
    y, of_x, of_weight, of_bias = results_of(stacked(Geometry()), (x, weight, bias))
    assert y.shape == (2, 0, 3, 2, 2)
    assert of_x.shape == x.shape
    assert not of_weight.any()
    assert not of_bias.any()


# ---- in the engine -------------------------------------------------------------------------------


@pytest.fixture
def everywhere(monkeypatch):
    """Let layers of stacked clients use the kernels on this device, and say how often they did."""
    calls = []

    def chosen(module):
        def serving(x, *_):
            forward = current_pass()
            if forward is None or not forward.wide or x.dtype != torch.float32:
                return None
            calls.append(module)
            return module

        return serving

    monkeypatch.setattr(convolution_layers, "_convolutions", chosen(convolutions))
    serving = {"kernels": chosen(kernels), "norms": chosen(norms)}
    serve_layers(monkeypatch, lambda x, name="kernels": serving[name](x))
    return calls


@pytest.mark.parametrize("groups", [1, 2])
def test_layers_use_the_kernels_for_stacked_clients_only(groups, everywhere):
    layer = nn.Conv2d(2, 2, (2, 3), (2, 1), (1, 0), (1, 2), groups).to(DEVICE)
    x = normal(4, 2, 5, 6)
    wanted = layer(x).double()
    (own,) = convert(nn.Sequential(layer))
    assert type(own) is Convolution
    assert own.channels_innermost
    with forward_pass(Forward(train=True)):
        assert_near(own(x), wanted, 1e-3)
    assert not everywhere
    with forward_pass(Forward(train=True, stacked=True)):
        assert_near(own(x), wanted)
    assert everywhere == [convolutions]


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ([nn.Conv2d(2, 3, 2), nn.ReLU()], ["conv"]),
        ([nn.Conv2d(2, 3, 2), nn.ReLU(), nn.MaxPool2d(2)], ["conv", "kernel"]),
        ([nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 3, 2)], ["kernel", "conv"]),
        ([nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Tanh()], ["conv", "conv"]),
        ([nn.ReLU(), nn.MaxPool2d(2, stride=1), nn.Conv2d(2, 3, 2), nn.ReLU()], ["conv"]),
        ([nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 3, 2)], ["kernel", "conv"]),
        ([nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)], ["kernel", "kernel"]),
    ],
    ids=[
        "convolution",
        "both",
        "pooling",
        "two convolutions",
        "other pooling",
        "norm",
        "norm, pool",
    ],
)
def test_a_neighbour_does_the_work_of_relu(body, calls, everywhere, monkeypatch):
    plain = nn.Sequential(*body).to(DEVICE)
    x = normal(3, 2, 6, 7)
    wanted = plain.double()(x.double())
    plain.float()
    own = convert(plain)
    assert type(own) is Sequential
    assert list(dict(own.named_parameters())) == list(dict(plain.named_parameters()))
    assert_near(own(x), wanted, 1e-3)
    monkeypatch.setattr(Sequential, "on_device", staticmethod(lambda x: True))
    relus = []
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: relus.append(self) or x.relu())
    with forward_pass(Forward(train=True, stacked=True)):
        assert_near(own(x), wanted)
    names = {convolutions: "conv", kernels: "kernel", norms: "kernel"}
    assert [names[module] for module in everywhere] == calls
    assert len(relus) == (1 if calls == ["conv"] and len(body) == 4 else 0)


@pytest.mark.parametrize(
    "other", [nn.GroupNorm(1, 3), nn.AdaptiveAvgPool2d(1), nn.Module()], ids=str
)
def test_results_lie_as_usual_where_another_layer_needs_it(other, everywhere):
    layer, *_ = convert(nn.Sequential(nn.Conv2d(2, 3, 2), other).to(DEVICE))
    alone, *_ = convert(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()).to(DEVICE))
    with forward_pass(Forward(train=True, stacked=True)):
        assert layer(normal(2, 2, 3, 4)).is_contiguous()
        assert lies_channels_last(alone(normal(2, 2, 3, 4)))


def test_a_relu_with_a_hook_is_called():
    relu = nn.ReLU()
    relu.register_forward_hook(lambda *_: None)
    body = nn.Sequential(nn.Conv2d(2, 3, 2), relu, nn.MaxPool2d(2))
    assert type(convert(body)) is nn.Sequential


class Copies(TorchDispatchMode):
    """Notes the shapes of the images that are copied while it is active."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        copying = torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy
        if function.overloadpacket in copying and args[0].dim() >= 5:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["cnn4", "bncnn"])
def test_a_step_of_a_whole_model_copies_no_images(name, everywhere, monkeypatch):
    monkeypatch.setattr(Sequential, "on_device", staticmethod(lambda x: True))
    options = {
        "cnn4": {"channels": (2, 3, 2, 3)},
        "bncnn": {"channels": (3, 2), "hidden": (), "kernel": 3},
    }[name]
    module = build(name, shape=(2, 8, 8), classes=3, **options)
    clients, rows = 2, 5
    x = normal(clients, rows, 2, 8, 8)
    y = torch.arange(clients * rows, device=DEVICE).view(clients, rows) % 3

    def step(dtype):
        network = Network(module, tasks.build("classification"), torch.device(DEVICE), dtype)
        params = {
            n: (t + 0.1 * normal(clients, *t.shape, seed=i).abs()).to(dtype)
            for i, (n, t) in enumerate(network.initial().items())
        }
        moving = {n: t.requires_grad_() for n, t in params.items() if n not in network.buffers}

        def of_one(params, x, y):
            forward = Forward(train=True, stacked=True)
            return F.cross_entropy(network.apply(params, x, forward)[0], y)

        losses = vmap(of_one)(params, x.to(dtype), y)
        gradients = torch.autograd.grad(losses.sum(), list(moving.values()))
        return dict(zip(moving, gradients, strict=True))

    wanted = step(torch.float64)
    assert not everywhere
    with Copies() as copies:
        found = step(torch.float32)
    assert everywhere.count(convolutions) == len(options["channels"])
    images = [shape for shape in copies.shapes if shape[:2] == (clients, rows)]
    # Features become rows before the fully connected layer.
    assert images == [(clients, rows, options["channels"][-1], 2, 2)]
    for parameter, other in wanted.items():
        scale = max(float(other.abs().max()), 1e-3)
        assert float((found[parameter] - other).abs().max()) <= 1e-4 * scale, parameter


POOLED = {
    "pairs": (3, 5, (6, 8), (3, 3), Geometry(padding=(1, 1)), (2, 2)),
    "rows and columns in no window": (2, 17, (8, 7), (3, 3), Geometry(), (4, 2)),
    "one window": (4, 3, (2, 3), (1, 1), Geometry(), (2, 1)),
    "stride": (16, 4, (9, 9), (3, 2), Geometry((2, 1), (1, 1)), (1, 2)),
}


@pytest.mark.parametrize("channels_innermost", [True, False])
@pytest.mark.parametrize("precision", ["ieee", "split", "tf32", "bfloat16"])
@pytest.mark.parametrize("case", POOLED)
def test_a_convolution_that_pools_gives_the_bits_of_both_layers(
    case, precision, channels_innermost
):
    *sizes, geometry, window = POOLED[case]
    (x,), (weight,), (bias,) = parts(*sizes, clients=1, samples=3)
    x = channels_last(x)
    x[1, 0, 0, 0] = float("nan")
    # One of the two has a bias.
    own = bias if channels_innermost else None
    made = convolve(x, weight, own, geometry, relu=True, precision=precision)
    wanted = F.max_pool2d(made.float(), window).to(made.dtype)
    how = {"channels_innermost": channels_innermost, "precision": precision}
    found = convolve_and_pool(x, weight, own, geometry, window, **how)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert lies_channels_last(found) if channels_innermost else found.is_contiguous()


@pytest.fixture
def poolings(everywhere, monkeypatch):
    """Whether channels were innermost in the results of convolutions that pooled."""
    monkeypatch.setattr(Sequential, "on_device", staticmethod(lambda x: True))
    found = []

    def noted(*given, **options):
        found.append(options["channels_innermost"])
        return convolve_and_pool(*given, **options)

    monkeypatch.setattr(convolutions, "convolve_and_pool", noted)
    return found


@pytest.mark.parametrize("why_not", [None, "hooks", "gradient", "overlap", "nine in a window"])
def test_convolutions_pool_in_evaluation(why_not, poolings):
    pools = {"overlap": nn.MaxPool2d(2, 1), "nine in a window": nn.MaxPool2d(3)}
    pool = pools.get(why_not, nn.MaxPool2d(2))
    first, second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
    behind = nn.Dropout(0.5), nn.Flatten()
    layers = nn.Sequential(first, nn.ReLU(), pool, second, nn.ReLU(), pool, *behind).to(DEVICE)
    x = normal(3, 2, 9, 9)
    with torch.no_grad():
        wanted = layers.eval().double()(x.double())
    if why_not == "hooks":
        for layer in layers:
            layer.register_forward_hook(lambda *_: None)
    shared = Forward(train=False, shared=True)
    with forward_pass(shared), torch.set_grad_enabled(why_not == "gradient"):
        found = convert(layers.float())(x)
    assert_near(found, wanted, 1e-5)
    # The second result becomes vectors, so its channels are outermost.
    assert poolings == ([True, False] if why_not is None else [])


def test_an_image_without_a_window_is_refused_as_by_pytorch(poolings):
    layers = convert(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d((4, 1))).to(DEVICE))
    shared = forward_pass(Forward(train=False, shared=True))
    with shared, torch.no_grad(), pytest.raises(RuntimeError, match="too small"):
        layers(normal(3, 2, 5, 5))
    assert not poolings


@pytest.mark.parametrize("name", ["cnn4", "bncnn", "resnet18"])
def test_a_shared_model_is_evaluated_by_the_same_kernels(name, everywhere, monkeypatch):
    monkeypatch.setattr(Sequential, "on_device", staticmethod(lambda x: True))
    options = {
        "cnn4": {"channels": (2, 3, 2, 3)},
        "bncnn": {"channels": (3, 2), "hidden": (), "kernel": 3},
        "resnet18": {"width": 4},
    }[name]
    module = build(name, shape=(2, 8, 8), classes=3, **options)
    kernel_sizes = [m.kernel_size for m in module.modules() if isinstance(m, nn.Conv2d)]
    x = normal(7, 2, 8, 8)

    def outputs(dtype, **how):
        network = Network(module, tasks.build("classification"), torch.device(DEVICE), dtype)
        params = {name: tensor.to(dtype) for name, tensor in network.initial().items()}
        with torch.no_grad():
            return network.apply(params, x.to(dtype), Forward(train=False, **how)).output

    wanted = outputs(torch.float64)
    outputs(torch.float32)
    assert not everywhere, "a pass over few samples uses PyTorch's layers"
    assert_near(outputs(torch.float32, shared=True), wanted, 1e-5)
    assert everywhere.count(convolutions) == len(kernel_sizes)


LARGE = {
    "pfl 1": (3, 32, (32, 32), (3, 3), Geometry()),
    "pfl 2": (32, 64, (30, 30), (3, 3), Geometry()),
    "large kernel": (3, 16, (32, 32), (5, 5), Geometry(padding=(2, 2))),
    "grey": (1, 32, (28, 28), (5, 5), Geometry(padding=(2, 2))),
    "six channels": (6, 16, (14, 14), (5, 5), Geometry()),
    "twelve channels": (12, 20, (13, 11), (3, 3), Geometry((2, 2), (1, 1))),
    "resnet stem": (3, 64, (32, 32), (3, 3), Geometry(padding=(1, 1))),
    "resnet down": (64, 128, (32, 32), (3, 3), Geometry((2, 2), (1, 1))),
    "resnet shortcut": (128, 256, (16, 16), (1, 1), Geometry((2, 2))),
    "resnet last": (512, 512, (4, 4), (3, 3), Geometry(padding=(1, 1))),
    "imagenet stem": (3, 64, (64, 64), (7, 7), Geometry((2, 2), (3, 3))),
    "to few channels": (64, 4, (16, 16), (3, 3), Geometry(padding=(1, 1))),
    "depthwise": (96, 96, (28, 28), (3, 3), Geometry((1, 1), (1, 1), (1, 1), True)),
    "depthwise down": (144, 144, (28, 28), (3, 3), Geometry((2, 2), (1, 1), (1, 1), True)),
}


# Each is compiled, which takes seconds.
PRECISIONS = {"pfl 1": ERROR, "pfl 2": ERROR, "resnet down": ("split", "tf32")}


@needs_gpu
@pytest.mark.parametrize(
    ("case", "precision"),
    [(case, how) for case in LARGE for how in PRECISIONS.get(case, ("split",))],
)
def test_sizes_of_real_models(case, precision):
    channels, results, size, kernel, geometry = LARGE[case]
    shapes = {"clients": 3, "samples": 5, "depthwise": geometry.depthwise}
    tensors = parts(channels, results, size, kernel, **shapes)
    tensors = [channels_last(tensors[0]), *tensors[1:]]
    found = results_of(stacked(geometry, precision=precision), tensors)
    wanted = results_of(lambda *own: by_pytorch(*own, geometry), tensors, torch.float64)
    for own, other in zip(found, wanted, strict=True):
        assert_near(own, other, ERROR[precision])
    again = results_of(stacked(geometry, precision=precision), tensors)
    assert all(torch.equal(own, other) for own, other in zip(again, found, strict=True))
    alone = [tensor[:1] for tensor in tensors]
    assert torch.equal(stacked(geometry, precision=precision)(*alone), found[0][:1])


@needs_gpu
@pytest.mark.parametrize("channels_innermost", [True, False])
@pytest.mark.parametrize("precision", ["split", "tf32", "bfloat16"])
@pytest.mark.parametrize("case", ["pfl 2", "grey", "twelve channels"])
def test_pooling_of_real_models(case, precision, channels_innermost):
    channels, results, size, kernel, geometry = LARGE[case]
    (x,), (weight,), (bias,) = parts(channels, results, size, kernel, clients=1, samples=300)
    how = {"precision": precision}
    made = convolve(channels_last(x), weight, bias, geometry, relu=True, **how)
    how["channels_innermost"] = channels_innermost
    found = convolve_and_pool(channels_last(x), weight, bias, geometry, (2, 2), **how)
    assert torch.equal(found, F.max_pool2d(made.float(), 2).to(made.dtype))


@needs_gpu
@pytest.mark.parametrize(
    ("machine", "error"),
    [({}, 1e-4), ({"tf32": True}, 2e-2), ({"precision": "bfloat16"}, 1e-1)],
    ids=["float32", "tf32", "bfloat16"],
)
def test_a_gpu_trains_as_a_cpu_does_one_client_at_a_time(machine, error):
    def trained(**machine):
        module = build("cnn4", shape=(2, 5, 5), classes=4, channels=(4, 5, 6, 5)).double()
        training = Training(
            rounds=3, cohort=10, batch_size=8, epochs=1, optimizer=optimizer_named("sgd", lr=0.05)
        )
        method, evaluation = method_named("fedavg"), Evaluation(every=0)
        trainer = Trainer(
            images(), method, module, training, Machine(**machine), evaluation, seed=0
        )
        trainer.run()
        return {name: tensor.cpu() for name, tensor in trainer.state.model.items()}

    wanted = trained(device="cpu", precision="float64", chunk=1)
    found = trained(device="cuda", chunk=10, **machine)
    assert distance(found, wanted) <= error
    again = trained(device="cuda", chunk=10, **machine)
    assert all(torch.equal(found[name], again[name]) for name in found)
