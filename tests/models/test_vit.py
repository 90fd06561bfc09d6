"""Vision transformers: tokens, parameters, and prompts that are the only trained part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from equipoise import tasks
from equipoise.config import experiment_from
from equipoise.engine.model_trial import try_out
from equipoise.engine.network import Network
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.methods import build as build_method
from equipoise.models import build, defaults
from equipoise.models.attention import Block
from equipoise.models.frozen import Frozen, frozen_names
from equipoise.models.vit import Tokens, tokens_of, vit, vitprompts
from equipoise.optimizers import Sgd
from tests.rounds import play

SMALL = {"width": 8, "depth": 2, "heads": 2}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(patch: tuple[int, int], grid: tuple[int, int], channels: int = 2, **options) -> Tokens:
    made = Tokens(
        nn.Linear(channels * patch[0] * patch[1], 6),
        patch,
        normal(6, seed=1).float(),
        normal(1 + grid[0] * grid[1], 6, seed=2).float(),
        grid,
        **options,
    )
    return made.double()


def test_tokens_are_a_convolution_of_patches_after_a_class_token():
    made, x = tokens((2, 3), (4, 3)), normal(5, 2, 8, 9)
    kernel = made.project.weight.unflatten(1, (2, 2, 3))
    patches = F.conv2d(x, kernel, made.project.bias, stride=(2, 3)).flatten(2).transpose(1, 2)
    found = made(x)
    torch.testing.assert_close(found[:, 1:], patches + made.positions[1:], rtol=0, atol=1e-13)
    torch.testing.assert_close(found[:, 0], (made.class_token + made.positions[0]).expand(5, -1))
    wider = F.pad(x, (0, 2, 0, 1), value=100.0)
    torch.testing.assert_close(made(wider), found)


def test_positions_follow_the_place_of_a_patch():
    """On a grid three times as fine, every third position is an old one."""
    made = tokens((1, 1), (3, 5), channels=1)
    before = made.positions.detach().clone()
    made.fit(9, 15)
    assert made.positions.shape == (1 + 9 * 15, 6)
    assert torch.equal(made.positions[0], before[0])
    found = made.positions[1:].unflatten(0, (9, 15))
    torch.testing.assert_close(
        found[1::3, 1::3], before[1:].unflatten(0, (3, 5)), rtol=0, atol=1e-12
    )
    assert made.positions.requires_grad


def test_positions_of_the_same_grid_are_left_as_they_are():
    made = tokens((2, 2), (4, 4))
    before = made.positions.clone()
    made.fit(9, 8)
    assert torch.equal(made.positions, before)


def test_images_of_another_size_are_refused_or_interpolated_for():
    x = normal(3, 2, 6, 10)
    with pytest.raises(InputError, match="was built for images of 8 x 8 pixels, got 6 x 10"):
        tokens((2, 2), (4, 4))(x)
    fitted, any_size = tokens((2, 2), (4, 4)), tokens((2, 2), (4, 4), any_size=True)
    any_size.load_state_dict(fitted.state_dict())
    fitted.fit(6, 10)
    torch.testing.assert_close(any_size(x), fitted(x))
    assert any_size.positions.shape == (17, 6)


def test_size_by_hand():
    def by_hand(
        channels: int, patches: int, patch: int, width: int, depth: int, hidden: int, classes: int
    ) -> int:
        block = (
            3 * width * (width + 1)
            + width * (width + 1)
            + 2 * width * hidden
            + hidden
            + width
            + 4 * width
        )
        token = (channels * patch**2 + 1) * width + width + (1 + patches) * width
        return token + depth * block + 2 * width + (width + 1) * classes

    model = vit((3, 8, 12), 7, patch=4, width=12, depth=3, heads=3, mlp_ratio=1.5)
    assert sum(p.numel() for p in model.parameters()) == by_hand(3, 6, 4, 12, 3, 18, 7)
    assert (
        sum(p.numel() for p in vit((1, 8, 8), 10).parameters())
        == by_hand(1, 16, 2, 64, 2, 128, 10)
        == 69_194
    )


def test_the_order_of_patches_matters():
    model = build("vit", shape=(1, 4, 4), classes=3, **SMALL).double()
    x = normal(2, 1, 4, 4)
    assert not torch.allclose(
        model(x), model(x.flip(-1).unflatten(-1, (2, 2)).flip(-1).flatten(-2)), atol=1e-6
    )


def test_options():
    assert defaults("vit") == {
        "patch": 2,
        "width": 64,
        "depth": 2,
        "heads": 4,
        "mlp_ratio": 2.0,
        "dropout": 0.0,
    }
    shared = {key: value for key, value in defaults("vit").items() if key != "dropout"}
    assert defaults("vitprompts") == {"source": None, "prompts": 4, "fused": True, **shared}


def test_only_prompts_and_head_move():
    model = build("vitprompts", shape=(1, 8, 8), classes=5, prompts=3, **SMALL)
    moving = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert moving == {"features.prompts": (3, 8), "head.weight": (5, 8), "head.bias": (5,)}
    assert set(model.state_dict()) - set(moving) == frozen_names(model)
    assert isinstance(model.stem, Frozen)
    assert 0 < float(model.features.prompts.detach().std()) < 0.05


def test_prompts_stand_after_the_tokens_and_have_no_positions():
    model = build("vitprompts", shape=(1, 8, 8), classes=5, prompts=3, **SMALL).double()
    x = normal(2, 1, 8, 8)
    encoded = model.stem(x)
    assert encoded.shape == (2, 17, 8)
    everything = torch.cat([encoded, model.features.prompts.expand(2, -1, -1)], 1)
    wanted = model.features.encoder.module(everything)
    torch.testing.assert_close(model.features(encoded), wanted)
    with torch.no_grad():
        before = model(x)
        model.features.prompts.copy_(model.features.prompts.flip(0))
    torch.testing.assert_close(model(x), before)


def test_without_a_source_the_transformer_is_that_of_vit_with_the_same_options():
    whole = build("vit", shape=(1, 8, 8), classes=5, seed=3, **SMALL)
    tower = build("vitprompts", shape=(1, 8, 8), classes=5, seed=3, **SMALL)
    shapes = {name: p.shape for name, p in whole.features.named_parameters()}
    found = {f"tokens.{name}": p.shape for name, p in tower.stem.module.named_parameters()}
    found |= {
        f"encoder.{name}": p.shape for name, p in tower.features.encoder.module.named_parameters()
    }
    assert found == shapes


@pytest.mark.parametrize("fused", [True, False])
def test_stacked_prompts_match_one_by_one_to_the_second_derivative(fused):
    clients = 3
    model = build("vitprompts", shape=(2, 8, 8), classes=4, fused=fused, **SMALL).double()
    x, y = (
        normal(clients, 5, 2, 8, 8),
        torch.randint(4, (clients, 5), generator=torch.Generator().manual_seed(1)),
    )
    with torch.no_grad():
        encoded = torch.stack([model.stem(own) for own in x])
    moving = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stacked = {
        name: (p.detach() + 0.1 * normal(clients, *p.shape, seed=seed)).requires_grad_()
        for seed, (name, p) in enumerate(moving.items())
    }

    def loss(params: dict[str, Tensor], z: Tensor, y: Tensor) -> Tensor:
        parts = {part: {} for part in ("features", "head")}
        for name, p in params.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = p
        z = functional_call(model.features, parts["features"], (z,))
        return F.cross_entropy(functional_call(model.head, parts["head"], (z,)), y)

    def perturbed(params: dict[str, Tensor], z: Tensor, y: Tensor) -> Tensor:
        """A loss that contains a gradient with respect to its inputs."""
        return loss(params, z + grad(loss, argnums=1)(params, z, y), y)

    for value in (loss, perturbed):
        values = vmap(value)(stacked, encoded, y)
        found = torch.autograd.grad(values.sum(), list(stacked.values()))
        for k in range(clients):
            mine = {name: p[k].detach().requires_grad_() for name, p in stacked.items()}
            alone = value(mine, encoded[k], y[k])
            torch.testing.assert_close(values[k], alone, rtol=1e-12, atol=1e-12)
            for gradient, right in zip(
                found, torch.autograd.grad(alone, list(mine.values())), strict=True
            ):
                torch.testing.assert_close(gradient[k], right, rtol=1e-10, atol=1e-12)
                assert right.abs().max() > 0


@pytest.mark.parametrize(("name", "options"), [("vit", {"dropout": 0.3}), ("vitprompts", {})])
def test_the_engine_gives_the_same_however_clients_are_stacked(name, options):
    sizes = [6, 3, 8, 5]
    x, y = normal(22, 1, 8, 8), torch.arange(22) % 3
    clients = np.repeat(np.arange(4), sizes)
    federation = Federation.from_arrays(x, y, clients=clients, splits=(1.0, 0.0, 0.0), classes=3)
    model = build(name, shape=(1, 8, 8), classes=3, **SMALL, **options).double()
    moving = [key for key, p in model.named_parameters() if p.requires_grad]
    results = [
        play(
            build_method("fedavg"),
            federation,
            model,
            [range(4)] * 2,
            chunk=chunk,
            batch_size=4,
            optimizer=Sgd(lr=0.1),
        ).model
        for chunk in (1, 3, 4)
    ]
    for key in moving:
        start = model.get_parameter(key)
        assert not torch.allclose(results[0][key], start, atol=1e-6)
        for other in results[1:]:
            torch.testing.assert_close(other[key], results[0][key], rtol=1e-9, atol=1e-9)
    for key in set(results[0]) - set(moving):
        torch.testing.assert_close(results[2][key], model.state_dict()[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "vitprompts"])
def test_experiments_take_the_options(name):
    experiment = experiment_from(
        {"data": "digits", "model": {"name": name, "width": 8, "heads": 2, "mlp_ratio": 2}}
    )
    assert experiment.model == {
        "name": name,
        **defaults(name),
        "width": 8,
        "heads": 2,
        "mlp_ratio": 2,
    }
    model = build(shape=(1, 8, 8), classes=10, **experiment.model)
    try_out(
        Network(model, tasks.build("classification")),
        torch.rand(3, 1, 8, 8),
        torch.tensor([0, 1, 2]),
        10,
    )


def test_prompts_and_head_learn_digits():
    """Random features are enough for most digits; random guessing has an accuracy of 0.1."""
    digits = load_digits()
    x, y = (
        torch.from_numpy(digits.images).float().unsqueeze(1) / 16,
        torch.from_numpy(digits.target),
    )
    model = build("vitprompts", shape=(1, 8, 8), classes=10)
    with torch.no_grad():
        tokens = model.stem(x)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    start = model.features.prompts.detach().clone()
    for _ in range(3):
        for batch in torch.arange(1400).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model.head(model.features(tokens[batch])), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        right = model(x[1400:]).argmax(1) == y[1400:]
    assert float(right.float().mean()) > 0.5
    assert float((model.features.prompts - start).norm().detach()) > 0.1


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (vit, {"patch": 3}, "patch=3 of model 'vit' does not divide images of 8 x 8"),
        (
            vit,
            {"patch": 9},
            "shape (1, 8, 8) is too small for model 'vit': images must be at least 9 x 9",
        ),
        (vit, {"heads": 5}, "heads=5 of model 'vit' do not divide width=64"),
        (vit, {"depth": 0}, "depth of model 'vit' must be a whole number of at least 1, got 0"),
        (vit, {"mlp_ratio": 0}, "mlp_ratio of model 'vit' must be a number above 0, got 0"),
        (vit, {"mlp_ratio": "2"}, "mlp_ratio of model 'vit' must be a number above 0, got '2'"),
        (vit, {"dropout": 1}, "dropout of model 'vit' must be a number from 0 to below 1, got 1"),
        (
            vitprompts,
            {"prompts": 0},
            "prompts of model 'vitprompts' must be a whole number of at least 1, got 0",
        ),
        (
            vitprompts,
            {"fused": "no"},
            "fused of model 'vitprompts' must be true or false, got 'no'",
        ),
        (vitprompts, {"patch": 5}, "patch=5 of model 'vitprompts' does not divide images of 8 x 8"),
        (
            vitprompts,
            {"source": "./nowhere", "depth": 3},
            "depth=3 of model 'vitprompts' cannot be set together with source='./nowhere', which "
            "determines the architecture; valid: one of the two",
        ),
    ],
)
def test_refusals(make, options, message):
    with pytest.raises(InputError) as caught:
        make((1, 8, 8), 3, **options)
    assert str(caught.value) == message


def test_towers_can_be_had_apart():
    tower = tokens_of(None, (3, 8, 8), patch=4, width=12, heads=3)
    assert tower.width == 12
    encoded = tower.stem(torch.zeros(2, 3, 8, 8))
    assert encoded.shape == (2, 5, 12)
    assert tower.encoder(encoded[:, :3]).shape == (2, 12)
    assert not any(p.requires_grad for part in tower[:2] for p in part.parameters())


def test_the_last_block_computes_the_class_token_as_a_whole_block_does():
    torch.manual_seed(0)
    block = Block(8, 2).double()
    tokens = normal(3, 5, 8)
    torch.testing.assert_close(
        block(tokens, class_only=True), block(tokens)[:, :1], rtol=1e-12, atol=1e-12
    )
