"""FedGC's model: the shift of prompts for each image, the first pass as stem, and training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise import tasks
from equipoise.engine.model_trial import try_out
from equipoise.engine.network import Network
from equipoise.errors import InputError
from equipoise.models import build, defaults
from equipoise.models.fedgc import fedgc
from equipoise.models.frozen import frozen_names
from equipoise.models.pretrained import encoder
from tests.tiny_encoder import write_encoder

SMALL = {"width": 8, "depth": 2, "heads": 2, "patch": 4}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model(**options):
    return build("fedgc", shape=(1, 8, 8), classes=5, **{**SMALL, **options}).double().eval()


def by_hand(made, x):
    """z of one image after the other, with every prompt written out."""
    found = []
    for image in x:
        tokens = made.stem.tokens.module(image.unsqueeze(0))
        first = made.stem.encoder.module(tokens)[0]
        hidden = (made.features.gcnet[0].weight @ first + made.features.gcnet[0].bias).clamp(min=0)
        h = made.features.gcnet[2].weight @ hidden + made.features.gcnet[2].bias
        prompts = torch.stack([p + h for p in made.features.prompts])
        found.append(made.features.encoder.module(torch.cat([tokens, prompts.unsqueeze(0)], 1))[0])
    return torch.stack(found)


def test_each_images_own_h_reaches_its_own_prompts():
    made, x = model(prompts=3), normal(5, 1, 8, 8)
    wanted = by_hand(made, x)
    torch.testing.assert_close(made.features(made.stem(x)), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(made(x), made.head(wanted), rtol=0, atol=1e-12)
    given = []
    made.features.encoder.module.register_forward_pre_hook(
        lambda module, inputs: given.append(inputs[0])
    )
    encoded = made.stem(x)
    made.features(encoded)
    shift = given[-1][:, -3:] - made.features.prompts
    torch.testing.assert_close(
        shift, made.features.gcnet(encoded[:, 0]).unsqueeze(1).expand(-1, 3, -1)
    )
    # Images differ, so an h in the wrong place would be detected.
    assert torch.cdist(shift[:, 0], shift[:, 0]).fill_diagonal_(1).min() > 1e-3


def test_the_stem_is_the_first_pass_and_the_tokens():
    made, x = model(), normal(3, 1, 8, 8)
    encoded = made.stem(x)
    assert encoded.shape == (3, 1 + 1 + 4, 8)
    tokens = made.stem.tokens(x)
    assert torch.equal(encoded[:, 1:], tokens)
    assert torch.equal(encoded[:, 0], made.features.encoder(tokens))
    assert made.stem.encoder is made.features.encoder


def test_only_prompts_gcnet_and_head_move():
    made = model(prompts=2)
    moving = {name: tuple(p.shape) for name, p in made.named_parameters() if p.requires_grad}
    assert moving == {
        "features.prompts": (2, 8),
        "features.gcnet.0.weight": (32, 8),
        "features.gcnet.0.bias": (32,),
        "features.gcnet.2.weight": (8, 32),
        "features.gcnet.2.bias": (8,),
        "head.weight": (5, 8),
        "head.bias": (5,),
    }
    assert set(made.state_dict()) - set(moving) == frozen_names(made)
    network = Network(made, tasks.build("classification"), dtype=torch.float64)
    assert list(network.initial()) == list(moving)
    try_out(network, normal(3, 1, 8, 8), torch.tensor([0, 1, 2]), 5)


def test_prompts_are_drawn_as_in_the_paper():
    prompts = build("fedgc", shape=(1, 8, 8), classes=2, prompts=400).features.prompts.detach()
    assert float(prompts.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(prompts.mean())) < 1e-3


def test_options():
    assert defaults("fedgc") == {
        "source": None,
        "prompts": 4,
        "hidden": None,
        "dropout": 0.0,
        "fused": True,
        **{name: value for name, value in defaults("vit").items() if name != "dropout"},
    }
    assert model(hidden=6).features.gcnet[0].out_features == 6
    dropping = model(dropout=0.5)
    assert isinstance(dropping.features.dropout, nn.Dropout)
    x = normal(2, 1, 8, 8)
    torch.testing.assert_close(dropping(x), model()(x))
    assert int((dropping.train().features(dropping.stem(x)) == 0).sum()) > 0


def test_pretrained_transformers(tmp_path):
    source = write_encoder(tmp_path / "encoder")
    made = build("fedgc", shape=(3, 16, 16), classes=5, source=source, prompts=2).double().eval()
    x = normal(3, 3, 16, 16)
    torch.testing.assert_close(made.features(made.stem(x)), by_hand(made, x), rtol=0, atol=1e-12)
    # The first pass is that of the saved encoder.
    torch.testing.assert_close(made.stem(x)[:, 0], encoder(source).double()(x), rtol=0, atol=1e-5)
    assert {
        name.split(".")[1]
        for name, p in made.features.named_parameters("features")
        if p.requires_grad
    } == {
        "prompts",
        "gcnet",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": 0}, "prompts of model 'fedgc' must be a whole number of at least 1, got 0"),
        ({"hidden": 0}, "hidden of model 'fedgc' must be a whole number of at least 1, got 0"),
        ({"dropout": 1}, "dropout of model 'fedgc' must be a number from 0 to below 1, got 1"),
        ({"fused": "no"}, "fused of model 'fedgc' must be true or false, got 'no'"),
        ({"patch": 3}, "patch=3 of model 'fedgc' does not divide images of 8 x 8"),
        (
            {"source": "./nowhere", "depth": 3},
            "depth=3 of model 'fedgc' cannot be set together with source='./nowhere', which "
            "determines the architecture; valid: one of the two",
        ),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError) as caught:
        fedgc((1, 8, 8), 3, **options)
    assert str(caught.value) == message
