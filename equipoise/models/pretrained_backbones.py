"""Image models of ``transformers`` as backbones, one loader for each architecture."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.models.attention import Block
from equipoise.models.norm_layers import LayerNorm
from equipoise.models.pretrained_source import SDPA, Source
from equipoise.models.resnet import ImageMean
from equipoise.models.vit import ClassToken, Encoder, Tokens
from equipoise.random import seeded


def backbone_of(
    source: Source, shape: tuple[int, ...] | None, *, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    """Load a source for images of one or any shape; return it and the length of its vectors."""
    config = source.config.get("vision_config", source.config)
    channels = config.get("num_channels", 3)
    if shape is not None and shape[0] != channels:
        raise InputError(
            f"source {source.name!r} of {source.user} takes images with {channels} channels, got "
            f"shape {shape}"
        )
    return FAMILIES[source.kind](source, _normalise(source, channels), shape, frozen, fused)


def _normalise(source: Source, channels: int) -> Normalise:
    """Return the normalisation for images with a number of channels."""
    mean, std = (
        values * channels if len(values) == 1 else values for values in (source.mean, source.std)
    )
    if {len(mean), len(std)} != {channels}:
        raise InputError(
            f"source {source.name!r} of {source.user} normalises {len(mean)} channels, but takes "
            f"images with {channels}; see its preprocessor_config.json"
        )
    return Normalise(mean, std)


class Normalise(nn.Module):
    """A layer that scales bytes to [0, 1] and then returns (x − mean) / std for each channel.

    The constants are plain numbers and not buffers, so they are not sent, averaged or rounded.

    Parameters
    ----------
    mean, std : sequence of float
        One value per channel.

    Examples
    --------
    >>> Normalise([0.5], [0.25])(torch.tensor([[[[255]]]], dtype=torch.uint8)).item()
    2.0
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = tuple(mean), tuple(std)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images ``[samples, channels, height, width]``; bytes become float32."""
        pixels = x if x.is_floating_point() else x.to(torch.float32) / 255
        channels = zip(pixels.unbind(1), self.mean, self.std, strict=True)
        return torch.stack([(channel - mean) / std for channel, mean, std in channels], 1)


class Convolutional(nn.Module):
    """A convolutional network, followed by the mean of its last feature map over positions.

    Parameters
    ----------
    normalise : Normalise
        Applied to images first.
    body : nn.Module
        A model of ``transformers`` whose first output is a feature map ``[samples, channels,
        height, width]``.

    Examples
    --------
    >>> class Body(nn.Conv2d):
    ...     def forward(self, x, return_dict):
    ...         return (super().forward(x),)
    >>> Convolutional(Normalise([0.0], [1.0]), Body(1, 3, 2))(torch.ones(5, 1, 4, 4)).shape
    torch.Size([5, 3])
    """

    def __init__(self, normalise: Normalise, body: nn.Module) -> None:
        super().__init__()
        self.normalise = normalise
        self.body = body
        self.pool = ImageMean()

    def forward(self, x: Tensor) -> Tensor:
        """Return one vector per image."""
        pixels = self.normalise(x).to(next(self.body.parameters()).dtype)
        made: Tensor = self.pool(self.body(pixels, return_dict=False)[0])
        return made


class Layer(nn.Module):
    """A layer of ``transformers`` as a function of tokens only.

    Parameters
    ----------
    layer : nn.Module
        It may take masks, which are not passed. If it returns a tuple, the first element is used.

    Examples
    --------
    >>> Layer(nn.Identity())(torch.zeros(5, 3, 8)).shape
    torch.Size([5, 3, 8])
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._left_out = dict.fromkeys(
            name
            for name in inspect.signature(layer.forward).parameters
            if name.endswith("attention_mask")
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Pass tokens through the layer."""
        made = self.layer(tokens, **self._left_out)
        first: Tensor = made if isinstance(made, Tensor) else made[0]
        return first


def _resnet(
    source: Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    body = source.load("ResNetModel")
    # Convolutional computes the mean itself, so the model's own pooling is removed.
    body.pooler = nn.Identity()
    for module in list(body.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "ResNetConvLayer":
                # A sequence of the same layers, in which BatchNorm can do the work of the ReLU.
                setattr(module, name, nn.Sequential(OrderedDict(child.named_children())))
    return Convolutional(normalise, body), body.config.hidden_sizes[-1]


def _mobilenet_v2(
    source: Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    body = source.load("MobileNetV2Model", add_pooling_layer=False)
    for layer in body.modules():
        if isinstance(layer, nn.BatchNorm2d):
            # The configured 0.997 is TensorFlow's momentum, the share of the old statistics.
            # PyTorch's momentum is one minus that.
            layer.momentum = 1 - 0.997
    return Convolutional(normalise, body), body.conv_1x1.convolution.out_channels


def _vit(
    source: Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = source.load("ViTModel", add_pooling_layer=False, **SDPA, **off)
    return _with_class_token(source, model, normalise, shape, frozen, fused)


def _dinov2(
    source: Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
    return _with_class_token(
        source, source.load("Dinov2Model", **SDPA, **off), normalise, shape, frozen, fused
    )


def _with_class_token(
    source: Source, model: Any, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    """Return a ViT or DINOv2 as tokens and encoder."""
    embeddings = model.embeddings
    tokens = _tokens(
        source,
        embeddings.patch_embeddings.projection,
        embeddings.cls_token[0, 0],
        embeddings.position_embeddings[0],
        model.config,
        normalise,
        shape,
    )
    return ClassToken(tokens, _blocks(model, model.layernorm, frozen, fused)), tokens.width


def _clip(
    source: Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    model = source.load("CLIPVisionModelWithProjection", attention_dropout=0.0, **SDPA)
    vision = model.vision_model
    embeddings = vision.embeddings
    tokens = _tokens(
        source,
        embeddings.patch_embedding,
        embeddings.class_embedding,
        embeddings.position_embedding.weight,
        model.config,
        normalise,
        shape,
        norm=vision.pre_layrnorm,
    )
    projection = model.visual_projection
    return ClassToken(
        tokens, _blocks(vision, vision.post_layernorm, frozen, fused), projection
    ), projection.out_features


def _tokens(
    source: Source,
    convolution: nn.Conv2d,
    class_token: Tensor,
    positions: Tensor,
    config: Any,
    normalise: Normalise,
    shape: tuple[int, ...] | None,
    norm: nn.Module | None = None,
) -> Tokens:
    """Return the tokens of a model of ``transformers``, for images of one or any shape."""
    patch, size = _pair(config.patch_size), _pair(config.image_size)
    if shape is not None and (shape[1] < patch[0] or shape[2] < patch[1]):
        raise InputError(
            f"shape {shape} is too small for source {source.name!r} of {source.user}: images must "
            f"be at least {patch[0]} x {patch[1]}"
        )
    # Skip the initialization, which would draw from the global generator.
    project = nn.utils.skip_init(
        nn.Linear,
        convolution.weight[0].numel(),
        convolution.out_channels,
        bias=convolution.bias is not None,
    )
    with torch.no_grad():
        project.weight.copy_(convolution.weight.flatten(1))
        if convolution.bias is not None:
            project.bias.copy_(convolution.bias)
    tokens = Tokens(
        project,
        patch,
        class_token.detach().clone(),
        positions.detach().clone(),
        (size[0] // patch[0], size[1] // patch[1]),
        prepare=normalise,
        norm=norm,
        any_size=shape is None,
    )
    if shape is not None:
        tokens.fit(*shape[1:])
    return tokens


def _blocks(model: Any, norm: nn.Module, frozen: bool, fused: bool) -> Encoder:
    """Return an encoder with the layers of a model."""
    layers = layers_of(model)
    blocks = [merged(layer, model.config, fused) if frozen else None for layer in layers]
    return Encoder(
        [block or layer for block, layer in zip(blocks, layers, strict=True)], norm, fused=fused
    )


def layers_of(model: Any) -> list[Layer]:
    """Return the layers of a model, wherever the version of ``transformers`` stores their list."""
    return [
        Layer(layer)
        for layer in next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    ]


@torch.no_grad()
def merged(layer: Layer, config: Any, fused: bool) -> Block | None:
    """Return a frozen layer of ``transformers`` as a block with fewer and larger operations.

    Queries, keys and values become one product, and scales of the residual branches (DINOv2) are
    multiplied into the weights before them. A frozen layer then has the same tensors with every
    version of ``transformers``.

    Parameters
    ----------
    layer : Layer
        The layer.
    config : object
        The configuration of its model.
    fused : bool
        Whether to use fused attention.

    Returns
    -------
    Block or None
        ``None`` if the layer has another structure, or if the results differ.
    """
    found: dict[str, nn.Linear] = {}
    others: list[nn.Linear] = []
    for name, part in layer.named_modules():
        if isinstance(part, nn.Linear):
            role = _ATTENTION_INPUTS.get(name.rpartition(".")[2])
            others += [] if role else [part]
            found |= {role: part} if role else {}
    norms = [part for part in layer.modules() if isinstance(part, nn.LayerNorm)]
    scales = [scale for name, scale in layer.named_parameters() if name.endswith(".lambda1")]
    if (len(found), len(others), len(norms)) != (3, 3, 2) or len(scales) not in (0, 2):
        return None
    width, hidden = others[1].in_features, others[1].out_features
    activation = import_module("transformers.activations").ACT2FN[config.hidden_act]
    with seeded(0):
        options = {"mlp_ratio": hidden / width, "fused": fused, "activation": activation}
        block = Block(width, config.num_attention_heads, **options)
    block.norm1, block.norm2 = (LayerNorm(norm) for norm in norms)
    joined = [found[role] for role in ("q", "k", "v")]
    targets: Any = (
        (block.attention.qkv, joined, None),
        (block.attention.out, others[:1], scales[0] if scales else None),
        (block.mlp[0], others[1:2], None),
        (block.mlp[2], others[2:], scales[1] if scales else None),
    )
    for target, sources, scale in targets:
        weight = torch.cat([source.weight for source in sources])
        bias = torch.cat(
            [torch.zeros(s.out_features) if s.bias is None else s.bias for s in sources]
        )
        target.weight.copy_(weight if scale is None else weight * scale.unsqueeze(1))
        target.bias.copy_(bias if scale is None else bias * scale)
    with seeded(0):
        probe = torch.randn(2, 5, width)
    wanted, made = layer(probe), block(probe)
    return (
        block
        if torch.allclose(made, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
        else None
    )


# Names of the query, key and value layers in models of ``transformers``.
_ATTENTION_INPUTS = {
    name: role
    for role, names in {
        "q": ("query", "q_proj"),
        "k": ("key", "k_proj"),
        "v": ("value", "v_proj"),
    }.items()
    for name in names
}


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


_Family = Callable[[Source, Normalise, Any, bool, bool], tuple[nn.Module, int]]


TRANSFORMERS = (_vit, _dinov2, _clip)


FAMILIES: Mapping[str, _Family] = {
    "resnet": _resnet,
    "mobilenet_v2": _mobilenet_v2,
    "vit": _vit,
    "dinov2": _dinov2,
    "clip": _clip,
    "clip_vision_model": _clip,
}
"""The loader of each architecture, by ``model_type`` of ``config.json``."""
