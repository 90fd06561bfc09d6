"""Compact convolutional transformers: size, forward pass step by step, and stacked clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.methods import build as build_method
from equipoise.models import build
from equipoise.models.cct import cct
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.rounds import play

SMALL = {"width": 8, "depth": 2, "heads": 2}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cct_7_3x1_has_the_size_in_the_paper():
    """3.76 million parameters for 32 × 32 pixels and 10 classes (Hassani et al., table 1)."""
    block = 2 * 2 * 256 + 3 * 256 * 256 + (256 + 1) * 256 + (256 + 1) * 512 + (512 + 1) * 256
    by_hand = 3 * 9 * 256 + 16 * 16 * 256 + 7 * block + 2 * 256 + (256 + 1) + (256 + 1) * 10
    found = sum(p.numel() for p in cct((3, 32, 32), 10).parameters())
    assert found == by_hand
    assert round(found / 1e6, 2) == 3.76


@pytest.mark.parametrize(
    ("kernel", "convolutions", "tokens"),
    [(3, 1, 16 * 16), (3, 2, 8 * 8), (5, 1, 16 * 16), (7, 1, 8 * 8), (7, 2, 2 * 2)],
)
def test_convolutions_and_pooling_make_fewer_tokens(kernel, convolutions, tokens):
    model = cct((3, 32, 32), 10, kernel=kernel, convolutions=convolutions, **SMALL)
    assert model.features.positions.shape == (tokens, 8)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_forward_pass_step_by_step():
    model = build("cct", shape=(2, 6, 5), classes=4, **SMALL).double()
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            p.add_(0.3 * normal(*p.shape, seed=seed))
    x, w = normal(3, 2, 6, 5), dict(model.named_parameters())
    pooled = F.max_pool2d(F.conv2d(x, w["features.tokens.0.weight"], padding=1).relu(), 3, 2, 1)
    assert pooled.shape == (3, 8, 3, 3)
    outputs = []
    for picture in pooled:
        rows = [picture[:, i, j] for i in range(3) for j in range(3)]
        tokens = torch.stack(rows) + w["features.positions"]
        for block in ("features.blocks.0", "features.blocks.1"):
            normed = F.layer_norm(
                tokens, (8,), w[f"{block}.norm1.weight"], w[f"{block}.norm1.bias"]
            )
            q, k, v = (normed @ part.T for part in w[f"{block}.attention.qkv.weight"].split(8))
            heads = []
            for head in (slice(0, 4), slice(4, 8)):
                scores = q[:, head] @ k[:, head].T / 2
                heads.append(scores.softmax(1) @ v[:, head])
            attended = (
                torch.cat(heads, 1) @ w[f"{block}.attention.out.weight"].T
                + w[f"{block}.attention.out.bias"]
            )
            tokens = tokens + attended
            normed = F.layer_norm(
                tokens, (8,), w[f"{block}.norm2.weight"], w[f"{block}.norm2.bias"]
            )
            hidden = F.gelu(normed @ w[f"{block}.mlp.0.weight"].T + w[f"{block}.mlp.0.bias"])
            tokens = tokens + hidden @ w[f"{block}.mlp.2.weight"].T + w[f"{block}.mlp.2.bias"]
        tokens = F.layer_norm(tokens, (8,), w["features.norm.weight"], w["features.norm.bias"])
        share = (tokens @ w["features.score.weight"][0] + w["features.score.bias"]).softmax(0)
        z = sum(a * token for a, token in zip(share, tokens, strict=True))
        outputs.append(w["head.weight"] @ z + w["head.bias"])
    torch.testing.assert_close(model(x), torch.stack(outputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "perfedavg", "fediir"])
def test_the_engine_gives_the_same_however_clients_are_stacked(method):
    sizes = [6, 3, 8, 5]
    clients = np.repeat(np.arange(4), sizes)
    federation = Federation.from_arrays(
        normal(22, 1, 8, 8),
        torch.arange(22) % 3,
        clients=clients,
        splits=(1.0, 0.0, 0.0),
        classes=3,
    )
    model = build("cct", shape=(1, 8, 8), classes=3, dropout=0.3, **SMALL).double()
    how = {"batch_size": 4, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    one, all_ = (
        play(build_method(method), federation, model, [range(4)] * 2, chunk=chunk, **how).model
        for chunk in (1, 4)
    )
    # Adding a constant to all scores does not change the softmax, so the true gradient is zero.
    assert distance(all_, one, {"features.score.bias"}) <= 1e-9
    assert distance(one, {name: p.detach() for name, p in model.named_parameters()}) > 1e-3


def test_it_learns_digits():
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    model = build("cct", shape=(1, 8, 8), classes=10, width=32, depth=2, heads=2)
    optimizer, draws = (
        torch.optim.Adam(model.parameters(), lr=3e-3),
        torch.Generator().manual_seed(0),
    )
    for _ in range(120):
        batch = torch.randint(1000, (64,), generator=draws)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    assert (model(x[1000:]).argmax(1) == y[1000:]).float().mean() > 0.6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 4}, "kernel of model 'cct' must be odd, got 4"),
        (
            {"convolutions": 0},
            "convolutions of model 'cct' must be a whole number of at least 1, got 0",
        ),
        ({"heads": 3}, "heads=3 do not divide width=8 of attention"),
        ({"convolutions": 4}, "is too small for model 'cct'"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message):
        build("cct", shape=(1, 8, 8), classes=3, **{**SMALL, **options})


def test_images_of_another_size_are_refused():
    with pytest.raises(InputError, match="was built for images of 8 x 8 pixels, got 8 x 9"):
        build("cct", shape=(1, 8, 8), classes=3, **SMALL)(torch.zeros(1, 1, 8, 9))


def test_bytes_are_read_as_numbers_from_0_to_1():
    model = build("cct", shape=(1, 8, 8), classes=3, **SMALL).eval()
    x = torch.randint(
        256, (2, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(model(x), model(x / 255))
