"""U-Net: parameters by hand, sizes, the original's connections, enlarging, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from equipoise import Machine, tasks, train
from equipoise.data import load
from equipoise.engine.model_trial import try_out
from equipoise.engine.network import Network
from equipoise.errors import InputError
from equipoise.models import build
from equipoise.models.unet import enlarged, unet
from equipoise.optimizers import Adam
from tests.engine.comparison import distance
from tests.engine.gpu import needs_gpu


def test_parameters_by_hand():
    # Two levels: 3x3 convolutions without bias, a scale and a shift per channel for each norm, and
    # 1x1 convolutions.
    down = 9 * (1 * 4 + 4 * 4) + 2 * 2 * 4 + 9 * (4 * 8 + 8 * 8) + 2 * 2 * 8
    up = (8 * 4 + 4) + 9 * (8 * 4 + 4 * 4) + 2 * 2 * 4
    model = unet((1, 16, 16), 3, width=4, depth=1)
    assert sum(p.numel() for p in model.features.parameters()) == down + up
    assert sum(p.numel() for p in model.head.parameters()) == 4 * 3 + 3


@pytest.mark.parametrize("norm", ["instance", "group", "batch"])
@pytest.mark.parametrize("size", [(16, 16), (17, 23), (31, 16)])
def test_outputs_have_the_size_of_the_images(norm, size):
    model = unet((2, *size), 3, width=2, depth=3, norm=norm)
    x = torch.randn(2, 2, *size)
    assert model.features(x).shape == (2, 2, *size)
    assert model(x).shape == (2, 3, *size)
    y = torch.zeros(2, *size, dtype=torch.uint8)
    try_out(Network(model, tasks.build("segmentation")), x, y, 3)


def test_one_level_by_hand():
    """Without halving, a U-Net is two convolutions; with one, the enlarged small map is joined."""
    torch.manual_seed(0)
    model = build("unet", shape=(1, 6, 6), classes=2, width=2, depth=1, norm="batch").eval()
    x = torch.randn(3, 1, 6, 6)
    features = model.features
    first = features.down[0](x)
    second = features.down[1](F.max_pool2d(first, 2))
    # Enlarging first and then convolving, as in FedDG's code, gives the same result.
    narrowed = features.narrow[0](F.interpolate(second, scale_factor=2, mode="nearest"))
    wanted = model.head(features.up[0](torch.cat([first, narrowed], 1)))
    torch.testing.assert_close(model(x), wanted)
    flat = build("unet", shape=(1, 6, 6), classes=2, width=2, depth=0)
    torch.testing.assert_close(flat(x), flat.head(flat.features.down[0](x)))


def test_instance_norm_is_that_of_pytorch():
    torch.manual_seed(0)
    block = unet((1, 8, 8), 2, width=3, depth=1).features.down[0]
    z = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(block[1](z), nn.InstanceNorm2d(3)(z))


def test_the_gradient_of_enlarging_sums_over_copies():
    x = torch.randn(2, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(enlarged(x, 4, 6), F.interpolate(x, scale_factor=2, mode="nearest"))
    weights = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    (enlarged(x, 5, 7) * weights).sum().backward()
    folded = torch.zeros_like(x)
    for i in range(5):
        for j in range(7):
            folded[..., min(i // 2, 1), min(j // 2, 2)] += weights[..., i, j]
    torch.testing.assert_close(x.grad, folded)


@pytest.mark.parametrize("norm", ["instance", "group", "batch"])
def test_stacked_gradients_equal_those_of_one_client(norm):
    clients, loss_of = 3, tasks.build("segmentation").loss
    model = build("unet", shape=(1, 9, 12), classes=3, width=4, depth=2, norm=norm).double().eval()
    draw = torch.Generator().manual_seed(2)
    x = torch.rand(clients, 4, 1, 9, 12, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (clients, 4, 9, 12), generator=draw)
    buffers = dict(model.named_buffers())
    stacked = {
        key: p.detach() + 0.1 * torch.randn(clients, *p.shape, generator=draw, dtype=torch.float64)
        for key, p in model.named_parameters()
    }

    def loss(parameters, x, y):
        return loss_of(functional_call(model, (parameters, buffers), (x,)), y).mean()

    gradients = vmap(grad(loss))(stacked, x, y)
    for k in range(clients):
        alone = grad(loss)({key: p[k] for key, p in stacked.items()}, x[k], y[k])
        for key, gradient in alone.items():
            torch.testing.assert_close(gradients[key][k], gradient, rtol=1e-8, atol=1e-12)
        # Parameters at each resolution are trained, even if some ReLU is always off.
        for part in ("down.0", "down.1", "down.2", "up.0", "up.1", "narrow.0", "narrow.1"):
            assert any(
                g.abs().sum() > 0 for key, g in alone.items() if key.startswith(f"features.{part}")
            )


@needs_gpu
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_on_a_gpu_training_is_deterministic_and_agrees_with_the_cpu(norm):
    federation = load("ellipses", images=20, size=33)
    how = {"rounds": 2, "batch_size": 5, "optimizer": Adam(lr=0.01)}
    model = {"name": "unet", "width": 4, "depth": 2, "norm": norm}
    first, again = (
        train(federation, model=model, machine=Machine(device="cuda"), **how).trainer.global_model
        for _ in range(2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    exact = [
        train(
            federation,
            model=model,
            machine=Machine(device=device, precision="float64", chunk=4),
            **how,
        )
        for device in ("cuda", "cpu")
    ]
    found, wanted = ({n: t.cpu() for n, t in run.trainer.global_model.items()} for run in exact)
    assert distance(found, wanted) <= 1e-7


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 8, 8), {"depth": 3}, "images must be at least 16 x 16"),
        ((1, 8, 7), {"depth": 3, "norm": "batch"}, "images must be at least 8 x 8"),
        ((64,), {}, "model 'unet' needs images"),
        ((1, 32, 32), {"norm": "layer"}, "unknown norm 'layer' in the options of model 'unet'"),
        (
            (1, 32, 32),
            {"norm": "group", "width": 5},
            "groups=2 of model 'unet' does not divide width=5",
        ),
        ((1, 32, 32), {"depth": -1}, "depth of model 'unet' must be a whole number of at least 0"),
    ],
)
def test_what_is_refused(shape, options, message):
    with pytest.raises(InputError, match=message):
        unet(shape, 2, **options)
