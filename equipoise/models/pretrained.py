"""Pretrained image models and text encoders from Hugging Face ``transformers``.

They are specified by a directory, or by their name on the hub.

``transformers`` is imported when the first of them is built, and never otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from equipoise.checks import flag, image
from equipoise.errors import InputError, unknown
from equipoise.models.attention import Block
from equipoise.models.base import Model
from equipoise.models.clip_encoders import Parts, TextEncoder
from equipoise.models.frozen import Frozen, digest_of
from equipoise.models.norm_layers import LayerNorm
from equipoise.models.pretrained_backbones import (
    FAMILIES,
    TRANSFORMERS,
    backbone_of,
    layers_of,
    merged,
)
from equipoise.models.pretrained_source import SDPA, Source, library, quiet
from equipoise.models.vit import ClassToken

# Keys of a configuration that do not affect the encoder.
_UNRELATED = (
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "torch_dtype",
    "transformers_version",
)


def pretrained(shape: tuple[int, ...], classes: int, *, source: str, freeze: bool = False) -> Model:
    """Build a pretrained image model with a new head.

    The model is a ResNet, MobileNetV2, ViT, DINOv2 or the image encoder of a CLIP. It takes bytes,
    or floating point numbers from 0 to 1, and normalises them as specified in the source's
    ``preprocessor_config.json``; without that file, as is usual for ImageNet. Images are not
    resized: convolutional networks take any size, and the positions of transformers are
    interpolated for the given size. Parameters are float32. Dropout and stochastic depth of the
    source are turned off.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image.
    classes : int
        Number of classes, or of outputs in regression.
    source : str
        A directory with ``config.json`` and ``model.safetensors``, as ``save_pretrained`` writes
        it, or a name on the Hugging Face hub. With a directory nothing is downloaded.
    freeze : bool
        Whether only the head is trained. The data are then encoded once.

    Returns
    -------
    Model
        ``features`` ends with one vector per image: the mean over positions for convolutional
        networks, the class token for transformers, and the embedding for CLIP. ``head`` is a linear
        layer with random weights. With ``freeze`` the encoder is the ``stem``, and ``features`` is
        the identity.

    Raises
    ------
    InputError
        If the source cannot be read, has an unknown architecture, or does not take such images.

    Examples
    --------
    >>> pretrained((3, 32, 32), 10, source="./nowhere")
    Traceback (most recent call last):
    equipoise.errors.InputError: source './nowhere' of model 'pretrained' is not a directory; valid:
    a directory with config.json and model.safetensors, or a name on the Hugging Face hub such as
    'facebook/dinov2-small'
    """
    image(shape, "pretrained", smallest=1)
    frozen = flag(freeze, "freeze of model 'pretrained'")
    backbone, width = backbone_of(
        Source.of(source, "model 'pretrained'", FAMILIES), shape, frozen=frozen, fused=frozen
    )
    head = nn.Linear(width, classes)
    if frozen:
        return Model(nn.Identity(), head, stem=Frozen(backbone))
    return Model(backbone.train(), head)


class ImageEncoder(Frozen):
    """A frozen image encoder.

    Parameters
    ----------
    module : nn.Module
        Maps a batch of images to a batch of vectors.
    width : int
        Length of the vectors.
    digest : str
        Its identifier.

    Attributes
    ----------
    width : int
        Length of the vectors.
    digest : str
        Hash of weights, configuration and normalisation, in hexadecimal digits.

    Examples
    --------
    >>> ImageEncoder(nn.Flatten(), 4, "00")(torch.zeros(5, 1, 2, 2)).shape
    torch.Size([5, 4])
    """

    def __init__(self, module: nn.Module, width: int, digest: str) -> None:
        super().__init__(module)
        self.width, self.digest = width, digest


def encoder(source: str) -> ImageEncoder:
    """Return the frozen image encoder that :func:`pretrained` uses, for images of any size.

    Parameters
    ----------
    source : str
        As in :func:`pretrained`.

    Returns
    -------
    ImageEncoder
        Maps images ``[samples, channels, height, width]`` to vectors ``[samples, width]``. The
        positions of transformers are interpolated in every call with images of another size than
        that of the source.

    Examples
    --------
    >>> encoder("./nowhere")
    Traceback (most recent call last):
    equipoise.errors.InputError: source './nowhere' of an encoder is not a directory; valid: a
    directory with config.json and model.safetensors, or a name on the Hugging Face hub such as
    'facebook/dinov2-small'
    """
    read = Source.of(source, "an encoder", FAMILIES)
    backbone, width = backbone_of(read, None, frozen=True, fused=True)
    config = {key: value for key, value in read.config.items() if key not in _UNRELATED}
    stated = json.dumps([config, read.mean, read.std, digest_of(backbone)], sort_keys=True)
    return ImageEncoder(backbone, width, hashlib.sha256(stated.encode()).hexdigest())


# The class in ``transformers`` of each kind of text encoder.
TEXT_FAMILIES = {"clip": "CLIPTextModelWithProjection", "bert": "BertModel"}
# Batch size of a text encoder.
_TEXTS = 64


class TextEmbedder:
    """A frozen text encoder with its tokenizer.

    Parameters
    ----------
    module : nn.Module
        A model of ``transformers`` that returns ``text_embeds``, or ``last_hidden_state`` to be
        pooled.
    tokenizer : callable
        Maps texts to its inputs.
    longest : int
        Maximum number of tokens; longer texts are truncated.
    pooling : {"mean", "first"}
        How ``last_hidden_state`` is pooled: the mean over the tokens of the text, or the first
        token.
    width : int
        Length of the embeddings.
    digest : str
        Its identifier.

    Attributes
    ----------
    width : int
        Length of the embeddings.
    digest : str
        Hash of weights, configuration, tokens and pooling, in hexadecimal digits.
    """

    def __init__(
        self, module: nn.Module, tokenizer: Any, longest: int, pooling: str, width: int, digest: str
    ) -> None:
        self.module, self._tokenizer = module.requires_grad_(False).eval(), tokenizer
        self._longest, self._pooling = longest, pooling
        self.width, self.digest = width, digest

    def to(self, *where: Any) -> TextEmbedder:
        """Convert the encoder to a device or a floating point type, and return it."""
        self.module.to(*where)
        return self

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts, ``[texts, width]``."""
        made = [
            self._embed(list(texts[start : start + _TEXTS]))
            for start in range(0, len(texts), _TEXTS)
        ]
        return torch.cat(made)

    def _embed(self, texts: list[str]) -> Tensor:
        with quiet(library("a tokenizer")):
            tokens = self._tokenizer(
                texts, padding=True, truncation=True, max_length=self._longest, return_tensors="pt"
            )
        device = next(self.module.parameters()).device
        given = {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}
        output = self.module(**given)
        if hasattr(output, "text_embeds"):
            projected: Tensor = output.text_embeds
            return projected
        hidden: Tensor = output.last_hidden_state
        if self._pooling == "first":
            return hidden[:, 0]
        inside = given["attention_mask"].unsqueeze(2).to(hidden.dtype)
        return (hidden * inside).sum(1) / inside.sum(1)


def text_encoder(source: str) -> TextEmbedder:
    """Load a frozen text encoder: that of a CLIP, or a model of type BERT, such as MiniLM.

    The embeddings of CLIP are the projected ones. Those of BERT are the mean over tokens, or the
    first token if ``1_Pooling/config.json`` of the source specifies it, as in
    sentence-transformers. They are not scaled to length 1.

    Parameters
    ----------
    source : str
        As in :func:`pretrained`, with a tokenizer beside the weights.

    Returns
    -------
    TextEmbedder
        Maps texts to vectors.

    Examples
    --------
    >>> text_encoder("./nowhere")
    Traceback (most recent call last):
    equipoise.errors.InputError: source './nowhere' of a text encoder is not a directory; valid: a
    directory with config.json and model.safetensors, or a name on the Hugging Face hub such as
    'facebook/dinov2-small'
    """
    read = Source.of(source, "a text encoder", TEXT_FAMILIES)
    tokenizer = read.tokenizer()
    clip = read.kind == "clip"
    off = {"attention_dropout": 0.0} if clip else {"add_pooling_layer": False}
    module = read.load(TEXT_FAMILIES[read.kind], **SDPA, **off)
    pooling = (
        "first"
        if not clip and read.also("1_Pooling/config.json").get("pooling_mode_cls_token")
        else "mean"
    )
    width = module.config.projection_dim if clip else module.config.hidden_size
    config = {key: value for key, value in read.config.items() if key not in _UNRELATED}
    stated = json.dumps(
        [config, pooling, sorted(tokenizer.get_vocab().items()), digest_of(module)], sort_keys=True
    )
    identity = hashlib.sha256(stated.encode()).hexdigest()
    return TextEmbedder(
        module, tokenizer, module.config.max_position_embeddings, pooling, width, identity
    )


def transformer(source: str, shape: tuple[int, ...], *, model: str, fused: bool) -> ClassToken:
    """Load a pretrained vision transformer.

    Parameters
    ----------
    source : str
        As in :func:`pretrained`.
    shape : tuple of int
        Channels, height and width of one image.
    model : str
        Name of the model, for messages.
    fused : bool
        Whether to use fused attention.

    Returns
    -------
    ClassToken
        With ``tokens`` and ``encoder``.

    Examples
    --------
    >>> transformer("./nowhere", (3, 32, 32), model="vitprompts", fused=True)
    Traceback (most recent call last):
    equipoise.errors.InputError: source './nowhere' of model 'vitprompts' is not a directory; valid:
    a directory with config.json and model.safetensors, or a name on the Hugging Face hub such as
    'facebook/dinov2-small'
    """
    image(shape, model, smallest=1)
    read = Source.of(source, f"model {model!r}", FAMILIES)
    if FAMILIES[read.kind] not in TRANSFORMERS:
        raise unknown(
            "model type",
            read.kind,
            (name for name, family in FAMILIES.items() if family in TRANSFORMERS),
            where=f"config.json of source {source!r} of model {model!r}, which needs a transformer",
        )
    return cast(ClassToken, backbone_of(read, shape, frozen=True, fused=fused)[0])


def clip_parts(source: str, shape: tuple[int, ...], *, model: str, fused: bool) -> Parts:
    """Load a pretrained CLIP with its text encoder and its tokenizer.

    Parameters
    ----------
    source : str
        As in :func:`pretrained`.
    shape : tuple of int
        Channels, height and width of one image.
    model : str
        Name of the model, for messages.
    fused : bool
        Whether to use fused attention.

    Returns
    -------
    Parts
        Its encoders, tokenizer and scale.

    Examples
    --------
    >>> clip_parts("./nowhere", (3, 32, 32), model="clipadapter", fused=True)
    Traceback (most recent call last):
    equipoise.errors.InputError: source './nowhere' of model 'clipadapter' is not a directory;
    valid: a directory with config.json and model.safetensors, or a name on the Hugging Face hub
    such as 'facebook/dinov2-small'
    """
    image(shape, model, smallest=1)
    read = Source.of(source, f"model {model!r}", FAMILIES)
    if read.kind != "clip":
        where = (
            f"config.json of source {source!r} of model {model!r}, which needs an image and a text "
            "encoder"
        )
        raise unknown("model type", read.kind, ("clip",), where=where)
    tokenizer = read.tokenizer()
    backbone, width = backbone_of(read, shape, frozen=True, fused=fused)
    whole = read.load("CLIPModel", **SDPA)
    text = whole.text_model
    blocks = [merged(layer, text.config, fused) for layer in layers_of(text)]
    if any(block is None for block in blocks):
        raise InputError(
            f"the text encoder of source {source!r} of model {model!r} has an unknown structure"
        )
    encoder = TextEncoder(
        text.embeddings.position_embedding.weight.detach().clone(),
        cast(list[Block], blocks),
        LayerNorm(text.final_layer_norm),
        whole.text_projection,
    )
    table, end = text.embeddings.token_embedding.weight.detach(), text.config.eos_token_id

    def embed(words: str) -> Tensor:
        with quiet(library("a tokenizer")):
            tokens = torch.tensor(tokenizer(words)["input_ids"])
        # Files written before version 4.31 name another token; transformers then uses the token
        # with the highest number.
        last = tokens.argmax() if end == 2 else (tokens == end).int().argmax()
        return table[tokens[: int(last) + 1]]

    return Parts(Frozen(backbone), Frozen(encoder), embed, whole.logit_scale.item(), width)
