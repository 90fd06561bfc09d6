"""Pretrained models against transformers' own forward pass, on tiny models and on real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from equipoise import tasks
from equipoise.config import experiment_from
from equipoise.engine.model_trial import try_out
from equipoise.engine.network import Network
from equipoise.errors import InputError
from equipoise.models import build
from equipoise.models.attention import Block
from equipoise.models.convolution_layers import Convolution, Sequential
from equipoise.models.frozen import Frozen, frozen_names
from equipoise.models.layers import convert
from equipoise.models.norm_layers import BatchNorm
from equipoise.models.passes import Forward
from equipoise.models.pretrained import encoder
from equipoise.models.pretrained_backbones import FAMILIES
from equipoise.models.pretrained_source import IMAGENET
from equipoise.models.vit import tokens_of

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: equipoise[pretrained]"
)

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
TRANSFORMER = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "patch_size": 4}
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


def resnet(layer_type, sizes, kind):
    config = transformers.ResNetConfig(
        embedding_size=4,
        hidden_sizes=sizes,
        depths=[2, 1, 1, 1],
        layer_type=layer_type,
        num_labels=5,
    )
    return getattr(transformers, kind)(config)


def mobilenet():
    config = transformers.MobileNetV2Config(
        depth_multiplier=0.2,
        depth_divisible_by=2,
        min_depth=2,
        expand_ratio=2,
        finegrained_output=False,
    )
    return transformers.MobileNetV2ForImageClassification(config)


def clip():
    vision = {
        **TRANSFORMER,
        "intermediate_size": 12,
        "image_size": 16,
        "projection_dim": 6,
        "attention_dropout": 0.3,
    }
    text = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 4,
        "intermediate_size": 4,
        "vocab_size": 9,
    }
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=text, vision_config=vision, projection_dim=6, image_size=16
        )
    )


MODELS = {
    "resnet-basic": lambda: resnet("basic", [4, 6, 8, 10], "ResNetModel"),
    "resnet-bottleneck": lambda: resnet(
        "bottleneck", [8, 12, 16, 20], "ResNetForImageClassification"
    ),
    "mobilenet": mobilenet,
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**TRANSFORMER, **DROPOUT, intermediate_size=12, image_size=16)
    ),
    "dinov2": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(
            **TRANSFORMER, **DROPOUT, mlp_ratio=2, image_size=20, drop_path_rate=0.3
        )
    ),
    "clip": clip,
}
WIDTHS = {
    "resnet-basic": 10,
    "resnet-bottleneck": 20,
    "mobilenet": 256,
    "vit": 8,
    "dinov2": 8,
    "clip": 6,
}
CONVOLUTIONAL = ("resnet-basic", "resnet-bottleneck", "mobilenet")
NAMES = pytest.mark.parametrize("name", MODELS)
TOKENS = pytest.mark.parametrize("name", ["vit", "dinov2", "clip"])


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(*shape: int, seed: int = 0) -> Tensor:
    """Bytes."""
    return torch.randint(
        256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Directories with tiny models, none of whose tensors has a special value."""
    folders = {}
    for name, make in MODELS.items():
        folder = tmp_path_factory.mktemp("pretrained") / name
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = make()
            for key, tensor in model.state_dict().items():
                if "var" in key:
                    tensor.uniform_(0.5, 1.5)
                elif tensor.is_floating_point():
                    # Signals must not vanish in many layers of convolutions and BatchNorm.
                    tensor.add_(0.3 * torch.randn_like(tensor))
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_mean": MEAN, "image_std": STD})
        )
        folders[name] = str(folder)
    return folders


def theirs(name: str, folder: str, x: Tensor) -> Tensor:
    """The outputs of transformers' own model for images, in float64 and evaluation mode."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    pixels = (x - mean) / std

    def output(kind: str, **options):
        model = getattr(transformers, kind).from_pretrained(folder).double().eval()
        return model(pixels, **options)

    with torch.no_grad():
        if name in CONVOLUTIONAL:
            kind = "MobileNetV2Model" if name == "mobilenet" else "ResNetModel"
            return output(kind).pooler_output.flatten(1)
        if name == "vit":
            return output("ViTModel", interpolate_pos_encoding=True).last_hidden_state[:, 0]
        if name == "dinov2":
            return output("Dinov2Model").pooler_output
        return output("CLIPVisionModelWithProjection", interpolate_pos_encoding=True).image_embeds


def made(name: str, folder: str, shape: tuple[int, ...] = (3, 16, 16), **options):
    return build("pretrained", shape=shape, classes=4, source=folder, **options)


def test_every_family_is_covered_here(saved):
    kinds = {
        json.loads(Path(folder, "config.json").read_text())["model_type"]
        for folder in saved.values()
    }
    assert kinds | {"clip_vision_model"} == set(FAMILIES)


@pytest.mark.parametrize("name", ["resnet-basic", "resnet-bottleneck"])
def test_layers_of_resnet_take_images_with_channels_innermost_and_do_the_work_of_relu(name, saved):
    model = made(name, saved[name])
    theirs = transformers.ResNetModel.from_pretrained(saved[name])
    names = {f"features.body.{key}" for key, _ in theirs.named_parameters()}
    assert names == {key for key, _ in model.named_parameters() if "body" in key}
    modules = list(convert(model).modules())
    assert all(layer.channels_innermost for layer in modules if isinstance(layer, Convolution))
    convolutions = sum(type(layer).__name__ == "ResNetConvLayer" for layer in theirs.modules())
    alone = sum(
        isinstance(layer, nn.Sequential) and isinstance(layer[-1], nn.Identity) for layer in modules
    )
    fused = sum(isinstance(layer, Sequential) for layer in modules)
    assert fused == convolutions - alone > alone > 0


@NAMES
@pytest.mark.parametrize("size", [(16, 16), (20, 20), (24, 36), (35, 22)], ids=str)
def test_features_are_those_of_transformers(saved, name, size):
    x = uniform(3, 3, *size)
    wanted = theirs(name, saved[name], x)
    assert wanted.shape == (3, WIDTHS[name])
    assert wanted.std(0).max() > 1e-3
    model = made(name, saved[name], (3, *size)).double().eval()
    torch.testing.assert_close(model.features(x), wanted, rtol=1e-6, atol=1e-6)
    frozen = made(name, saved[name], (3, *size), freeze=True).double()
    torch.testing.assert_close(frozen.stem(x), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(encoder(saved[name]).double()(x), wanted, rtol=1e-6, atol=1e-6)


@NAMES
@pytest.mark.parametrize("freeze", [False, True])
def test_bytes_are_numbers_from_0_to_1(saved, name, freeze):
    model, x = made(name, saved[name], freeze=freeze).eval(), images(3, 3, 16, 16)
    found = model(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, model(x.float() / 255), rtol=0, atol=1e-6)


@NAMES
def test_the_seed_decides_the_head_and_nothing_else(saved, name):
    one, again, other = (made(name, saved[name], seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[key], again[key]) for key in one)
    differing = {key for key in one if not torch.equal(one[key], other[key])}
    assert differing == {"head.weight", "head.bias"}
    assert torch.equal(made(name, saved[name], seed=1, freeze=True).head.weight, one["head.weight"])


@NAMES
def test_everything_moves_or_only_the_head(saved, name):
    free, frozen = made(name, saved[name]), made(name, saved[name], freeze=True)
    assert all(p.requires_grad for p in free.parameters())
    assert free.stem is None
    assert free.training
    assert all(part.training for part in free.modules())
    assert {key for key, p in frozen.named_parameters() if p.requires_grad} == {
        "head.weight",
        "head.bias",
    }
    assert isinstance(frozen.stem, Frozen)
    assert isinstance(frozen.features, nn.Identity)
    assert frozen_names(frozen) == {key for key in frozen.state_dict() if key.startswith("stem.")}
    kinds = {tensor.dtype for tensor in (*free.parameters(), *frozen.parameters())}
    assert kinds == {torch.float32}


@NAMES
@pytest.mark.parametrize("freeze", [False, True])
def test_the_engine_takes_it_as_it_is(saved, name, freeze):
    """Without own dropout, dependence on other samples, or tensors unknown to the engine."""
    model = made(name, saved[name], freeze=freeze)
    try_out(
        Network(model, tasks.build("classification")),
        images(3, 3, 16, 16),
        torch.tensor([0, 1, 2]),
        4,
    )


@NAMES
def test_stacked_clients_match_one_by_one(saved, name):
    clients = 3
    model = convert(made(name, saved[name]).double()).eval()
    x, y = (
        uniform(clients, 4, 3, 16, 16),
        torch.randint(4, (clients, 4), generator=torch.Generator().manual_seed(2)),
    )
    buffers = dict(model.named_buffers())
    stacked = {
        key: (p.detach() * (1 + 0.1 * uniform(clients, *p.shape, seed=seed))).requires_grad_()
        for seed, (key, p) in enumerate(model.named_parameters())
    }

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, (params, buffers), (x,)), y)

    losses = vmap(loss)(stacked, x, y)
    found = torch.autograd.grad(losses.sum(), list(stacked.values()))
    for k in range(clients):
        mine = {key: p[k].detach().requires_grad_() for key, p in stacked.items()}
        alone = loss(mine, x[k], y[k])
        torch.testing.assert_close(losses[k], alone, rtol=1e-12, atol=1e-12)
        wanted = torch.autograd.grad(alone, list(mine.values()))
        for gradient, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient[k], right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_batch_norm_is_the_engines_and_moves_as_that_of_pytorch_would(saved, name):
    model = made(name, saved[name]).double()
    network = Network(model, tasks.build("classification"), dtype=torch.float64)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert sum(isinstance(layer, BatchNorm) for layer in network.module.modules()) == len(norms) > 5
    x = uniform(6, 3, 32, 32)
    output, _, buffers = network.apply(network.initial(), x, Forward(train=True))
    torch.testing.assert_close(output, model.train()(x), rtol=1e-9, atol=1e-9)
    wanted = dict(model.named_buffers())
    for key, found in buffers.items():
        torch.testing.assert_close(found, wanted[key], rtol=1e-9, atol=1e-9)


def test_statistics_of_mobilenet_move_slowly(saved):
    """The momentum of transformers is TensorFlow's decay, and must be converted."""
    model = made("mobilenet", saved["mobilenet"]).double().train()
    first = model.features.body.conv_stem.first_conv
    before = first.normalization.running_mean.clone()
    seen: list[Tensor] = []
    first.normalization.register_forward_pre_hook(
        lambda layer, inputs: seen.append(inputs[0].detach())
    )
    model(uniform(6, 3, 32, 32))
    of_batch = seen[0].mean((0, 2, 3))
    assert (of_batch - before).abs().min() > 1e-3
    wanted = 0.997 * before + 0.003 * of_batch
    torch.testing.assert_close(first.normalization.running_mean, wanted, rtol=1e-9, atol=1e-12)


@TOKENS
@pytest.mark.parametrize("fused", [True, False])
def test_prompts_in_a_pretrained_transformer(saved, name, fused):
    model = build(
        "vitprompts", shape=(3, 24, 16), classes=4, source=saved[name], prompts=2, fused=fused
    ).double()
    moving = {key: tuple(p.shape) for key, p in model.named_parameters() if p.requires_grad}
    assert moving == {"features.prompts": (2, 8), "head.weight": (4, 8), "head.bias": (4,)}
    x = uniform(3, 5, 3, 24, 16)
    tokens = torch.stack([model.stem(own) for own in x])
    assert tokens.shape == (3, 5, 1 + 6 * 4, 8)
    prompts = uniform(3, 2, 8, seed=1).requires_grad_()

    def value(prompts: Tensor, tokens: Tensor) -> Tensor:
        return functional_call(model.features, {"prompts": prompts}, (tokens,)).pow(3).sum()

    found = vmap(value)(prompts, tokens)
    alone = torch.stack([value(own, row) for own, row in zip(prompts, tokens, strict=True)])
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(values.sum(), prompts)[0] for values in (found, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert gradients[0].abs().max() > 1e-6


@TOKENS
def test_towers_without_prompts_are_the_whole_transformer(saved, name):
    tower = tokens_of(saved[name], (3, 24, 16))
    x = uniform(3, 3, 24, 16)
    found = tower.encoder.double()(tower.stem.double()(x))
    whole = made(name, saved[name], (3, 24, 16)).double().eval()
    # DINOv2 scales its branches; multiplied into the weights, the scales are rounded to float32.
    tolerance = 1e-6 if name == "dinov2" else 1e-9
    torch.testing.assert_close(
        whole.features.projection(found), whole.features(x), rtol=tolerance, atol=tolerance
    )
    assert tower.width == found.shape[1] == 8
    # Frozen layers are merged into fewer and larger operations; trainable ones are not.
    assert all(isinstance(block, Block) for block in tower.encoder.module.blocks)
    assert not any(isinstance(block, Block) for block in whole.features.encoder.blocks)


def test_the_image_encoder_of_clip_alone(saved, tmp_path):
    transformers.CLIPVisionModelWithProjection.from_pretrained(saved["clip"]).save_pretrained(
        tmp_path
    )
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "clip_vision_model"
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": MEAN, "image_std": STD})
    )
    x = images(2, 3, 16, 16)
    torch.testing.assert_close(encoder(str(tmp_path))(x), encoder(saved["clip"])(x))


def copy_of(folder: str, target: Path, **changes) -> str:
    """Copy a directory with other settings for images, or none."""
    for file in Path(folder).iterdir():
        if file.name != "preprocessor_config.json":
            (target / file.name).write_bytes(file.read_bytes())
    if changes:
        (target / "preprocessor_config.json").write_text(json.dumps(changes))
    return str(target)


def test_normalisation_follows_the_files(saved, tmp_path):
    x = uniform(2, 3, 16, 16).float()
    reference = encoder(saved["vit"])

    def given(number: int, **changes) -> Tensor:
        folder = tmp_path / str(number)
        folder.mkdir()
        return encoder(copy_of(saved["vit"], folder, **changes))(x)

    def as_if(mean, std) -> Tensor:
        """The reference outputs for images that it normalises to the same values."""
        theirs, wanted = (
            [torch.tensor(v).view(3, 1, 1) for v in pair] for pair in ((MEAN, STD), (mean, std))
        )
        return reference((x - wanted[0]) / wanted[1] * theirs[1] + theirs[0])

    torch.testing.assert_close(given(0), as_if(*IMAGENET), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        given(1, image_mean=[0.5], image_std=[0.1]),
        as_if([0.5] * 3, [0.1] * 3),
        rtol=1e-4,
        atol=1e-5,
    )
    off = given(2, do_normalize=False, image_mean=MEAN, image_std=STD)
    torch.testing.assert_close(off, as_if([0.0] * 3, [1.0] * 3), rtol=1e-4, atol=1e-5)


def test_digests_know_weights_configuration_and_normalisation(saved, tmp_path):
    wanted = encoder(saved["vit"]).digest
    assert encoder(saved["vit"]).digest == wanted
    others = [encoder(saved[name]).digest for name in ("dinov2", "resnet-basic")]
    for number, (file, change) in enumerate(
        {
            "preprocessor_config.json": {"image_mean": STD, "image_std": STD},
            "config.json": {"layer_norm_eps": 1e-3},
        }.items()
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        copy_of(saved["vit"], folder, image_mean=MEAN, image_std=STD)
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **change}))
        others.append(encoder(str(folder)).digest)
    model = transformers.ViTModel.from_pretrained(saved["vit"], add_pooling_layer=False)
    model.layernorm.bias.data[0] += 1
    (tmp_path / "weights").mkdir()
    copy_of(saved["vit"], tmp_path / "weights", image_mean=MEAN, image_std=STD)
    model.save_pretrained(tmp_path / "weights")
    others.append(encoder(str(tmp_path / "weights")).digest)
    assert len({wanted, *others}) == 6


def test_weights_in_half_precision_are_used_in_float32(saved, tmp_path):
    copy_of(saved["vit"], tmp_path, image_mean=MEAN, image_std=STD)
    half = transformers.ViTForImageClassification.from_pretrained(saved["vit"]).half()
    half.save_pretrained(tmp_path)
    model = made("vit", str(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.features.encoder.norm.weight, half.vit.layernorm.weight.float())


def test_a_precision_in_the_configuration_does_not_round_weights(saved, tmp_path):
    """Weights stored in float32 stay float32, whatever config.json specifies."""
    copy_of(saved["vit"], tmp_path, image_mean=MEAN, image_std=STD)
    content = json.loads((tmp_path / "config.json").read_text())
    stated = {key: "float16" for key in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps({**content, **stated}))
    wanted, found = made("vit", saved["vit"]), made("vit", str(tmp_path))
    assert all(
        torch.equal(*pair) for pair in zip(wanted.parameters(), found.parameters(), strict=True)
    )


def test_loading_is_quiet_and_leaves_random_numbers_and_settings_alone(saved, capfd):
    logging = transformers.utils.logging
    before = torch.get_rng_state(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    encoder(saved["vit"])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before[1:]
    assert capfd.readouterr() == ("", "")


def test_experiments_take_the_options(saved):
    given = {"name": "pretrained", "source": saved["vit"], "freeze": True}
    assert experiment_from({"data": "digits", "model": given}).model == given
    with pytest.raises(InputError, match="model.freeze must be true or false, got 1"):
        experiment_from({"data": "digits", "model": {**given, "freeze": 1}})


def refused(
    message: str, source: str, shape: tuple[int, ...] = (3, 16, 16), model: str = "pretrained"
) -> None:
    with pytest.raises(InputError) as caught:
        build(model, shape=shape, classes=3, source=source)
    assert message in str(caught.value)


VALID = (
    "valid: a directory with config.json and model.safetensors, or a name on the Hugging Face hub"
)


@pytest.mark.parametrize("source", ["../missing/weights", "/missing", "./missing", "a/b/c", "", 3])
def test_sources_that_are_no_directory_are_refused(source):
    refused(f"{source!r}", source)
    refused(VALID, source)


def test_directories_that_hold_something_else_are_refused(saved, tmp_path):
    refused(f"source '{tmp_path}' of model 'pretrained' has no config.json; {VALID}", str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text("{")
    refused(
        f"config.json of source '{tmp_path}' of model 'pretrained' is not valid JSON", str(tmp_path)
    )
    config.write_text('{"model_type": "bert"}')
    refused(
        f"unknown model type 'bert' in config.json of source '{tmp_path}' of model 'pretrained'",
        str(tmp_path),
    )
    refused("Valid: clip, clip_vision_model, dinov2, mobilenet_v2, resnet, vit", str(tmp_path))
    config.write_text("[]")
    refused("unknown model type None", str(tmp_path))
    config.write_bytes(Path(saved["vit"], "config.json").read_bytes())
    refused(f"source '{tmp_path}' of model 'pretrained' cannot be loaded: ", str(tmp_path))


def test_weights_that_are_not_all_there_are_refused(saved, tmp_path):
    """CLIP's image encoder without its projection would get a random one."""
    transformers.CLIPVisionModel.from_pretrained(saved["clip"]).save_pretrained(tmp_path)
    refused(
        "lacks 1 weights of a CLIPVisionModelWithProjection, such as 'visual_projection.weight'",
        str(tmp_path),
    )


def test_images_that_do_not_fit_are_refused(saved, tmp_path):
    refused(
        f"source '{saved['vit']}' of model 'pretrained' takes images with 3 channels, got shape "
        "(1, 16, 16)",
        saved["vit"],
        (1, 16, 16),
    )
    refused(
        "model 'pretrained' needs images of shape (channels, height, width), got shape (48,)",
        saved["vit"],
        (48,),
    )
    refused("images must be at least 4 x 4", saved["dinov2"], (3, 3, 16))
    copied = copy_of(saved["vit"], tmp_path, image_mean=[0.5, 0.5], image_std=[0.5, 0.5])
    refused(
        "normalises 2 channels, but takes images with 3; see its preprocessor_config.json", copied
    )


def test_prompts_need_a_transformer(saved):
    refused("unknown model type 'resnet'", saved["resnet-basic"], model="vitprompts")
    refused(
        "Valid: clip, clip_vision_model, dinov2, vit", saved["resnet-basic"], model="vitprompts"
    )


def test_without_transformers_the_message_says_what_to_install(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("needs transformers: pip install 'equipoise[pretrained]'", saved["vit"])
    refused("needs transformers: pip install 'equipoise[pretrained]'", "facebook/dinov2-small")


def test_a_misspelt_directory_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights" / "vit-small").mkdir(parents=True)
    (tmp_path / "weights" / "vit-small" / "config.json").write_text("{}")
    refused("does not exist; the models in weights are 'vit-small'", "weights/vit-smal")


def test_names_that_the_hub_does_not_answer_to_are_refused():
    code = "from equipoise.models.pretrained import encoder; encoder('nobody/nothing')"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=offline, check=False, capture_output=True, text=True
    )
    assert (
        "InputError: source 'nobody/nothing' of an encoder is not a directory, and cannot be read "
        "from the Hugging Face hub" in run.stderr
    )
    assert VALID in run.stderr


SHARED = Path(__file__).parents[3] / "shared"
WEIGHTS = SHARED / "weights"
PHOTOS = Path(os.environ.get("EQUIPOISE_DATA", SHARED / "data")) / "pacs" / "photo"


def weights(name: str) -> str:
    folder = WEIGHTS / name
    if not folder.exists():
        pytest.skip(f"there are no weights in {folder}")
    return str(folder)


def photos(size: int, a_class: int) -> tuple[Tensor, np.ndarray]:
    """The first photographs of each class, enlarged."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    if not PHOTOS.exists():
        pytest.skip(f"there are no photographs in {PHOTOS}")
    files = [sorted(folder.glob("*.jpg"))[:a_class] for folder in sorted(PHOTOS.iterdir())]
    opened = [
        image.open(file).convert("RGB").resize((size, size))
        for of_class in files
        for file in of_class
    ]
    x = torch.from_numpy(np.stack([np.asarray(picture) for picture in opened])).permute(0, 3, 1, 2)
    return x.contiguous(), np.repeat(np.arange(len(files)), [len(of_class) for of_class in files])


@torch.no_grad()
@pytest.mark.slow
def test_a_linear_probe_on_resnet_50_knows_photographs():
    """Each third is held out once, because single thirds of 84 images differ by several percent.

    The accuracy of random guessing is 0.14.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score

    resnet = encoder(weights("resnet50-imagenet"))
    assert resnet.width == 2048
    # Smaller than the 224 pixels of the source, which take more than twice as long for the same
    # accuracy.
    x, y = photos(160, 36)
    z = torch.nn.functional.normalize(torch.cat([resnet(batch) for batch in x.split(16)])).numpy()
    thirds = [
        (np.flatnonzero(part), np.flatnonzero(~part))
        for part in (np.arange(len(y)) % 3 != k for k in range(3))
    ]
    assert cross_val_score(LogisticRegression(max_iter=1000), z, y, cv=thirds).mean() >= 0.95


@torch.no_grad()
def test_a_real_vision_transformer_is_that_of_transformers():
    folder = weights("vit-small-14")
    x = uniform(2, 3, 112, 112)
    mean, std = (torch.tensor(values).double().view(3, 1, 1) for values in IMAGENET)
    model = transformers.Dinov2Model.from_pretrained(folder).double().eval()
    wanted = model((x - mean) / std).pooler_output
    found = build("pretrained", shape=(3, 112, 112), classes=7, source=folder).double().eval()
    assert found.features.tokens.positions.shape == (1 + 8 * 8, 384)
    torch.testing.assert_close(found.features(x), wanted, rtol=1e-4, atol=1e-4)
    lowered = build("vitprompts", shape=(3, 112, 112), classes=7, source=folder)
    exact = lowered(x.float())
    for part in (lowered.stem, lowered.features.encoder):
        part.lower(torch.bfloat16)
    assert float((lowered(x.float()) - exact).norm() / exact.norm()) < 0.1


@torch.no_grad()
def test_a_real_mobilenet_loads():
    model = encoder(weights("mobilenetv2-imagenet"))
    assert model.width == 1280
    z = model(images(2, 3, 112, 112))
    assert z.shape == (2, 1280)
    assert 0 <= float(z.min()) < float(z.max()) <= 6
