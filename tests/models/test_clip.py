"""CLIP, its adapter and its prompts against transformers' own forward pass, on tiny models."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from equipoise import Federation, Machine, tasks, train
from equipoise.engine.network import Network
from equipoise.engine.slots import frozen_digest
from equipoise.errors import InputError
from equipoise.models import build, defaults
from equipoise.models.frozen import frozen_names
from tests.tiny_clip import MEAN, STD, TOKEN_WIDTH, WIDTH, write_clip
from tests.tiny_encoder import write_encoder

NAMES = ("cat", "big_dog", "alarm-clock")
WORDS = ("cat", "big dog", "alarm-clock")
SHAPE = (3, 16, 16)
SMALL = {"patch": 4, "width": 8, "depth": 2, "heads": 2}
MODELS = pytest.mark.parametrize("name", ["clip", "clipadapter", "clipprompts"])
TRAINED = pytest.mark.parametrize("name", ["clipadapter", "clipprompts"])


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip") / "tiny", longest=32)


def made(name: str, folder: str, **options):
    options = {"source": folder, "class_names": NAMES, **options}
    return build(name, shape=SHAPE, classes=3, **options)


def library():
    return pytest.importorskip(
        "transformers", reason="transformers is not installed: equipoise[pretrained]"
    )


def pixels(x: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, dtype=x.dtype).view(3, 1, 1) for values in (MEAN, STD))
    return (x - mean) / std


@torch.no_grad()
def their_scores(folder: str, x: Tensor, texts: list[str]) -> Tensor:
    """The outputs of transformers' own CLIP for images and texts."""
    model = library().CLIPModel.from_pretrained(folder).to(x.dtype).eval()
    tokens = library().AutoTokenizer.from_pretrained(folder)(
        texts, return_tensors="pt", padding=True
    )
    return model(pixel_values=pixels(x), **tokens).logits_per_image


# ---- zero-shot -----------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_zero_shot_scores_are_those_of_transformers(tmp_path, legacy, dtype, tolerance):
    source = write_clip(tmp_path / "clip", legacy=legacy)
    x = uniform(5, *SHAPE).to(dtype)
    wanted = their_scores(source, x, [f"a picture of a {words}" for words in WORDS])
    assert wanted.std() > 0.01
    torch.testing.assert_close(
        made("clip", source).to(dtype)(x), wanted, rtol=tolerance, atol=tolerance
    )


def test_the_prompt_can_be_another_one(folder):
    x = uniform(5, *SHAPE)
    wanted = their_scores(folder, x, [f"the {words}." for words in WORDS])
    model = made("clip", folder, template="the {}.").double()
    torch.testing.assert_close(model(x), wanted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(made("clip", folder).double()(x), wanted)


def test_bytes_are_numbers_from_0_to_1(folder):
    x = torch.randint(
        256, (4, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    model = made("clip", folder)
    torch.testing.assert_close(model(x), model(x.float() / 255))


# ---- adapter -------------------------------------------------------------------------------------


def scores_by_hand(folder: str, f: Tensor) -> Tensor:
    """Scores of image embeddings, with transformers' embeddings of the prompts."""
    model = library().CLIPModel.from_pretrained(folder).double().eval()
    tokenizer = library().AutoTokenizer.from_pretrained(folder)
    encoder = library().CLIPTextModelWithProjection.from_pretrained(folder).double().eval()
    rows = []
    with torch.no_grad():
        for words in WORDS:
            ids = torch.tensor([tokenizer(f"a picture of a {words}")["input_ids"]])
            rows.append(encoder(input_ids=ids).text_embeds[0])
        text = torch.stack(rows)
        cosines = (f / f.norm(dim=1, keepdim=True)) @ (text / text.norm(dim=1, keepdim=True)).T
        return model.logit_scale.exp() * cosines


def test_the_adapter_of_fedclip_multiplies_embeddings_by_its_softmax(folder):
    model, x = made("clipadapter", folder).double(), uniform(5, *SHAPE)
    with torch.no_grad():
        f = model.stem(x)
        first, second = model.features.layers[0], model.features.layers[2]
        hidden = torch.tanh(f @ first.weight.T + first.bias)
        attention = (hidden @ second.weight.T + second.bias).softmax(1)
        torch.testing.assert_close(
            model(x), scores_by_hand(folder, attention * f), rtol=1e-9, atol=1e-9
        )


def test_the_residual_adapter_adds_a_part_of_what_it_makes(folder):
    model, x = (
        made("clipadapter", folder, adapter="residual", ratio=0.3).double(),
        uniform(5, *SHAPE),
    )
    with torch.no_grad():
        f = model.stem(x)
        first, second = model.features.layers[0], model.features.layers[2]
        made_of_it = ((f @ first.weight.T).clamp(min=0) @ second.weight.T).clamp(min=0)
        torch.testing.assert_close(
            model(x), scores_by_hand(folder, 0.3 * made_of_it + 0.7 * f), rtol=1e-9, atol=1e-9
        )
    nothing = made("clipadapter", folder, adapter="residual", ratio=0.0).double()
    torch.testing.assert_close(nothing(x), made("clip", folder).double()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 8.0])
def test_the_adapter_can_be_wider(folder, factor):
    sizes = {
        name: p.numel()
        for name, p in made("clipadapter", folder, width_factor=factor).named_parameters()
        if p.requires_grad
    }
    hidden = round(factor * WIDTH)
    assert list(sizes.values()) == [WIDTH * hidden, hidden, hidden * WIDTH, WIDTH]
    without_bias = made("clipadapter", folder, width_factor=factor, adapter="residual")
    assert (
        sum(p.numel() for p in without_bias.parameters() if p.requires_grad) == 2 * WIDTH * hidden
    )


# ---- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_prompts_are_read_as_if_their_context_were_words(folder, fused):
    """Context vectors join the vocabulary of transformers' own text encoder, as further words."""
    model = made("clipprompts", folder, context=4, fused=fused).double()
    tokenizer = library().AutoTokenizer.from_pretrained(folder)
    encoder = library().CLIPTextModelWithProjection.from_pretrained(folder).double().eval()
    table = encoder.text_model.embeddings.token_embedding
    vocabulary = len(table.weight)
    table.weight = torch.nn.Parameter(torch.cat([table.weight, model.head.context]))
    wanted = []
    for words in WORDS:
        start, *rest = tokenizer(f"{words}.")["input_ids"]
        ids = [start, *range(vocabulary, vocabulary + 4), *rest]
        wanted.append(F.normalize(encoder(input_ids=torch.tensor([ids])).text_embeds[0], dim=0))
    x = uniform(5, *SHAPE)
    torch.testing.assert_close(
        model.aligned(model.features(model.stem(x))), torch.stack(wanted), rtol=1e-9, atol=1e-9
    )
    scale = library().CLIPModel.from_pretrained(folder).logit_scale.double().exp()
    scores = scale * F.normalize(model.stem(x), dim=1) @ torch.stack(wanted).T
    torch.testing.assert_close(model(x), scores, rtol=1e-9, atol=1e-9)


def test_methods_align_texts_in_learned_prompts():
    model = build("clipprompts", shape=(1, 8, 8), classes=5, **SMALL)
    assert model.aligned_rows == "classes"
    assert model.aligned(torch.zeros(7, 8)).shape == (5, 8)
    torch.testing.assert_close(model.aligned(torch.zeros(7, 8)).norm(dim=1), torch.ones(5))


def test_context_vectors_are_drawn_from_a_narrow_normal_distribution(folder):
    context = made("clipprompts", folder).head.context
    assert context.shape == (16, TOKEN_WIDTH)
    assert 0.015 < float(context.detach().std()) < 0.025
    other = build(
        "clipprompts", shape=SHAPE, classes=3, source=folder, class_names=NAMES, seed=1
    ).head.context
    assert not torch.equal(context, other)


@pytest.mark.parametrize("fused", [True, False])
def test_stacked_prompts_match_one_by_one_to_the_second_derivative(fused):
    clients = 3
    model = build(
        "clipprompts", shape=(1, 8, 8), classes=4, context=3, fused=fused, **SMALL
    ).double()
    z = F.normalize(normal(clients, 5, 8), dim=-1)
    y = torch.randint(4, (clients, 5), generator=torch.Generator().manual_seed(1))
    stacked = (model.head.context.detach() + 0.1 * normal(clients, 3, 8)).requires_grad_()

    def loss(context: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model.head, {"context": context}, (z,)), y)

    def after_a_step(context: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """Per-FedAvg's loss, whose gradient has a second derivative."""
        return loss(context - 0.5 * grad(loss)(context, z, y), z, y)

    for value in (loss, after_a_step):
        values = vmap(value)(stacked, z, y)
        (found,) = torch.autograd.grad(values.sum(), stacked)
        for k in range(clients):
            mine = stacked[k].detach().requires_grad_()
            alone = value(mine, z[k], y[k])
            torch.testing.assert_close(values[k], alone, rtol=1e-12, atol=1e-12)
            (right,) = torch.autograd.grad(alone, mine)
            assert right.norm() > 1e-6
            torch.testing.assert_close(found[k], right, rtol=1e-9, atol=1e-12)


# ---- what is frozen ------------------------------------------------------------------------------


def test_only_adapter_or_context_can_be_trained(folder):
    trained = {
        name: {key for key, p in made(name, folder).named_parameters() if p.requires_grad}
        for name in ("clip", "clipadapter", "clipprompts")
    }
    layers = {f"features.layers.{layer}.{leaf}" for layer in (0, 2) for leaf in ("weight", "bias")}
    assert trained == {"clip": set(), "clipadapter": layers, "clipprompts": {"head.context"}}
    for name, moving in trained.items():
        model = made(name, folder)
        assert set(model.state_dict()) - moving <= frozen_names(model)
        assert set(Network(model, tasks.build("classification")).initial()) == moving


@MODELS
def test_the_hash_follows_the_names_the_weights_and_nothing_that_rounding_changes(
    folder, tmp_path, name
):
    digest = frozen_digest(made(name, folder))
    assert frozen_digest(made(name, folder)) == digest
    assert frozen_digest(made(name, folder, class_names=("cat", "big_dog", "mouse"))) != digest
    other = write_clip(tmp_path / "other", longest=32)
    tensors = library().CLIPModel.from_pretrained(other)
    with torch.no_grad():
        tensors.text_model.final_layer_norm.bias.add_(1)
    tensors.save_pretrained(other)
    assert frozen_digest(made(name, other)) != digest
    if name != "clipprompts":
        assert frozen_digest(made(name, folder, template="a {}")) != digest
        rounded = made(name, folder)
        rounded.head.text = rounded.head.text * (1 + 1e-12)
        assert frozen_digest(rounded) == digest


def pictures(**options):
    """Four clients with images of three classes that differ in colour."""
    y = torch.arange(48) % 3
    x = 0.5 * uniform(48, *SHAPE)
    x[torch.arange(48), y] += 0.5
    return Federation.from_arrays(
        x,
        y,
        clients=[0] * 20 + [1] * 12 + [2] * 10 + [3] * 6,
        splits=(0.5, 0.25, 0.25),
        classes=3,
        **options,
    )


@TRAINED
def test_encoded_once_or_in_every_step(folder, name, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    models = [
        train(
            pictures(class_names=NAMES),
            model={"name": name, "source": folder},
            machine=Machine(device="cpu", precision="float64", encode=encode),
            rounds=2,
            optimizer={"name": "sgd", "lr": 0.3},
        ).trainer.state.model
        for encode in (True, False)
    ]
    for key, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "lr"), [("clipadapter", 0.03), ("clipprompts", 0.3)])
def test_training_improves_on_the_start(folder, name, lr, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    options = {"model": {"name": name, "source": folder}, "machine": Machine(device="cpu")}
    start, end = (
        train(
            pictures(class_names=NAMES),
            rounds=rounds,
            optimizer={"name": "adam", "lr": lr},
            **options,
        ).summary
        for rounds in (0, 8)
    )
    assert (
        end["results"]["global"]["seen"]["loss"] < 0.8 * start["results"]["global"]["seen"]["loss"]
    )


@TRAINED
def test_frozen_parts_can_be_held_in_lower_precision(folder, name, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    exact, lowered = (
        train(
            pictures(class_names=NAMES),
            model={"name": name, "source": folder},
            machine=Machine(device="cpu", frozen=frozen),
            rounds=2,
        )
        for frozen in (None, "bfloat16")
    )
    losses = [[row["train_loss"] for row in run.trainer.rounds] for run in (exact, lowered)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


def test_texts_are_counted_once_a_batch_and_not_once_a_sample():
    one, many = (
        train(
            pictures_8(classes), model={"name": "clipprompts", **SMALL}, rounds=1
        ).trainer.engine.network
        for classes in (3, 6)
    )
    # For each sample there are its embedding of length 1 and its scores.
    assert (one.activations, many.activations) == (8 + 3, 8 + 6)
    assert many.fixed_activations == 2 * one.fixed_activations > 1000


def pictures_8(classes):
    return Federation.from_arrays(
        uniform(30, 1, 8, 8).float(), torch.arange(30) % classes, clients=[0, 1] * 15
    )


# ---- without a source ----------------------------------------------------------------------------


@MODELS
def test_without_a_source_there_is_a_small_clip_that_the_seed_decides(name):
    x = uniform(3, 1, 8, 8).float()
    first, again, other = (
        build(name, shape=(1, 8, 8), classes=4, seed=seed, **SMALL)(x) for seed in (3, 3, 4)
    )
    assert first.shape == (3, 4)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_class_names_are_read_even_by_the_small_one():
    digits, words = (
        build("clip", shape=(1, 8, 8), classes=2, class_names=names, **SMALL)(
            torch.ones(1, 1, 8, 8)
        )
        for names in (None, ("null", "eins"))
    )
    assert not torch.allclose(digits, words)


def test_defaults():
    shared = {"fused": True, "patch": 2, "width": 64, "depth": 2, "heads": 4, "mlp_ratio": 2.0}
    assert defaults("clip") == {
        "source": None,
        "class_names": None,
        "template": "a picture of a {}",
        **shared,
    }
    assert defaults("clipprompts") == {"source": None, "class_names": None, "context": 16, **shared}
    own = {"adapter": "attention", "width_factor": 1.0, "ratio": 0.2}
    assert defaults("clipadapter") == {**defaults("clip"), **own}


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "clip",
            {"class_names": None},
            "model 'clip' needs the names of the 3 classes, which the data do not have",
        ),
        (
            "clipprompts",
            {"class_names": ("a", "b")},
            r"class_names of model 'clipprompts' must be 3 names.* \['a', 'b'\]",
        ),
        (
            "clipadapter",
            {"class_names": "abc"},
            "class_names of model 'clipadapter' must be a list, got 'abc'",
        ),
        (
            "clipadapter",
            {"class_names": ("a", 1, "b")},
            "each of class_names .* must be a name, got 1",
        ),
        (
            "clip",
            {"template": "a picture"},
            "template of model 'clip' must be text with one {} .* got 'a picture'",
        ),
        ("clipadapter", {"adapter": "linear"}, "unknown adapter 'linear' in model 'clipadapter'"),
        (
            "clipadapter",
            {"width_factor": 0},
            "width_factor of model 'clipadapter' must be a finite number above 0",
        ),
        (
            "clipadapter",
            {"width_factor": 0.01},
            "width_factor=0.01 times 6, rounded, .* at least 1",
        ),
        (
            "clipadapter",
            {"adapter": "residual", "ratio": 1.5},
            "ratio of model 'clipadapter' must be a number from 0",
        ),
        (
            "clipprompts",
            {"context": 0},
            "context of model 'clipprompts' must be a whole number of at least 1",
        ),
        (
            "clipprompts",
            {"context": 25},
            "the prompt 'big dog.' .* has 9 tokens and 25 vectors of context, .* at most 32",
        ),
        (
            "clip",
            {"template": "a most unusual picture of a {}"},
            "the prompt 'a most unusual picture of a .* at most 32",
        ),
        ("clip", {"depth": 3}, "depth=3 of model 'clip' cannot be set together with source="),
        ("clip", {"fused": "no"}, "fused of model 'clip' must be true or false"),
    ],
)
def test_options_that_cannot_be_carried_out_are_refused(folder, name, options, message):
    with pytest.raises(InputError, match=message):
        made(name, folder, **options)


def test_a_source_without_a_tokenizer_is_named(tmp_path):
    source = write_clip(tmp_path / "no-words", tokenizer=False)
    with pytest.raises(
        InputError,
        match=r"source '.*no-words' of model 'clip' has no tokenizer; valid: .*vocab\.json",
    ):
        made("clip", source)


def test_a_tokenizer_that_cannot_be_read_is_named(folder, tmp_path):
    source = write_clip(tmp_path / "broken", tokenizer=False)
    (tmp_path / "broken" / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(
        InputError, match=r"the tokenizer of source '.*broken' of model 'clip' cannot be loaded"
    ):
        made("clip", source)


def test_a_source_without_a_text_encoder_is_refused(tmp_path):
    source = write_encoder(tmp_path / "vit")
    with pytest.raises(
        InputError, match="unknown model type 'vit' in config.json .*image and a text encoder"
    ):
        made("clipadapter", source)


def test_without_transformers_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        InputError, match=r"needs transformers: pip install 'equipoise\[pretrained\]'"
    ):
        made("clip", folder)
