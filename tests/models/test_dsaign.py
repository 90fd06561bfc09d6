"""DSA-IGN: its layers against PyTorch's, its sizes, label vectors, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from equipoise.engine.slots import frozen_digest
from equipoise.errors import InputError
from equipoise.models import build


def reference(model, width, hidden):
    """The decomposition as PyTorch's own transformer encoder with the same parameters."""
    layers = []
    for ours in model.features.layers:
        theirs = nn.TransformerEncoderLayer(32, 8, hidden, dropout=0.0, batch_first=True).double()
        with torch.no_grad():
            theirs.self_attn.in_proj_weight.copy_(ours.attention.qkv.weight)
            theirs.self_attn.in_proj_bias.copy_(ours.attention.qkv.bias)
            for name, source in (
                ("self_attn.out_proj", ours.attention.out),
                ("linear1", ours.first),
                ("linear2", ours.second),
                ("norm1", ours.norm1),
                ("norm2", ours.norm2),
            ):
                layer = theirs.get_submodule(name)
                layer.weight.copy_(source.weight)
                layer.bias.copy_(source.bias)
        layers.append(theirs)
    return lambda x: nn.Sequential(*layers)(
        torch.cat([x, x], 1).view(len(x), 2 * width // 32, 32)
    ).flatten(1)


@pytest.mark.parametrize("width", [16, 48, 64])
def test_the_decomposition_is_pytorchs_transformer_encoder(width):
    model = build("dsaign", shape=(width,), classes=3, feedforward=20).double()
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            p.add_(
                0.2
                * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
            )
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    torch.testing.assert_close(
        model.features(x), reference(model, width, 20)(x), rtol=0, atol=1e-12
    )


def test_sizes_of_the_paper():
    """CLIP embeddings of 512 numbers: 32 tokens of 32, three layers, a matrix of 1024 × 512."""
    model = build("dsaign", shape=(512,), classes=10)
    layer = (32 + 1) * 96 + (32 + 1) * 32 + (32 + 1) * 2048 + (2048 + 1) * 32 + 4 * 32
    assert sum(p.numel() for p in model.features.parameters()) == 3 * layer
    assert tuple(model.reconstruction.weight.shape) == (512, 1024)
    assert model.reconstruction.bias is None
    assert model.features(torch.zeros(2, 512)).shape == (2, 1024)


@pytest.mark.parametrize(
    ("projection", "numbers"), [("matrix", 512), ("linear", 528), ("mlp", 528 + 272)]
)
def test_projections(projection, numbers):
    model = build("dsaign", shape=(16,), classes=3, feedforward=8, projection=projection)
    assert sum(p.numel() for p in model.reconstruction.parameters()) == numbers
    assert model.reconstruction(torch.zeros(2, 32)).shape == (2, 16)


def test_outputs_are_cosines_with_label_vectors_that_never_move(tmp_path):
    vectors = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    save_file({"labels": vectors}, tmp_path / "labels")
    model = build("dsaign", shape=(4, 4), classes=3, feedforward=8, labels=str(tmp_path / "labels"))
    x = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(1))
    z = model.features(x)[:, :16]
    wanted = torch.stack([F.cosine_similarity(z, vector.expand(5, -1)) for vector in vectors], 1)
    torch.testing.assert_close(model(x), wanted)
    assert "head.vectors" not in model.state_dict()
    other = build("dsaign", shape=(4, 4), classes=3, feedforward=8)
    assert frozen_digest(model) != frozen_digest(other)


def test_without_a_file_label_vectors_are_drawn_from_the_seed():
    one, same, other = (
        build("dsaign", shape=(16,), classes=3, feedforward=8, seed=s).head.vectors
        for s in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((24,), {}, r"one of shape \(24,\) has 24 numbers; valid: a multiple of 16"),
        (
            (16,),
            {"projection": "matrx"},
            "unknown projection 'matrx' in model 'dsaign'; did you mean 'matrix'",
        ),
        ((16,), {"heads": 5}, "heads=5 do not divide width=32"),
        ((16,), {"labels": "/nowhere"}, "labels of model 'dsaign': cannot read /nowhere"),
    ],
)
def test_refusals(shape, options, message):
    with pytest.raises(InputError, match=message):
        build("dsaign", shape=shape, classes=3, **options)


def test_label_vectors_of_another_shape_are_refused(tmp_path):
    save_file({"labels": torch.ones(4, 16)}, tmp_path / "labels")
    with pytest.raises(InputError, match=r"a tensor 'labels' of shape \(3, 16\), got \(4, 16\)"):
        build("dsaign", shape=(16,), classes=3, labels=str(tmp_path / "labels"))
