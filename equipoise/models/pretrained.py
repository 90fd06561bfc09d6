"""Pretrained image models and text encoders from Hugging Face ``transformers``.

They are specified by a directory, or by their name on the hub.

``transformers`` is imported when the first of them is built, and never otherwise.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from equipoise.checks import flag, image
from equipoise.errors import InputError, unknown
from equipoise.models.attention import Block
from equipoise.models.base import Model
from equipoise.models.clip import Parts, TextEncoder
from equipoise.models.frozen import Frozen, digest_of
from equipoise.models.layers import LayerNorm
from equipoise.models.resnet import ImageMean
from equipoise.models.vit import ClassToken, Encoder, Tokens
from equipoise.random import seeded

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel of ImageNet, for models without their own."""

# A name on the hub is "name" or "owner/name". Anything else must be a path.
_ON_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
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
    backbone, width = _backbone(
        _Source.of(source, "model 'pretrained'"), shape, frozen=frozen, fused=frozen
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
    read = _Source.of(source, "an encoder")
    backbone, width = _backbone(read, None, frozen=True, fused=True)
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
        with _quiet(_library("a tokenizer")):
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
    read = _Source.of(source, "a text encoder", TEXT_FAMILIES)
    tokenizer = read.tokenizer()
    clip = read.kind == "clip"
    off = {"attention_dropout": 0.0} if clip else {"add_pooling_layer": False}
    module = read.load(TEXT_FAMILIES[read.kind], **_SDPA, **off)
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
    read = _Source.of(source, f"model {model!r}")
    if FAMILIES[read.kind] not in _TRANSFORMERS:
        raise unknown(
            "model type",
            read.kind,
            (name for name, family in FAMILIES.items() if family in _TRANSFORMERS),
            where=f"config.json of source {source!r} of model {model!r}, which needs a transformer",
        )
    return cast(ClassToken, _backbone(read, shape, frozen=True, fused=fused)[0])


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
    read = _Source.of(source, f"model {model!r}")
    if read.kind != "clip":
        where = (
            f"config.json of source {source!r} of model {model!r}, which needs an image and a text "
            "encoder"
        )
        raise unknown("model type", read.kind, ("clip",), where=where)
    tokenizer = read.tokenizer()
    backbone, width = _backbone(read, shape, frozen=True, fused=fused)
    whole = read.load("CLIPModel", **_SDPA)
    text = whole.text_model
    blocks = [merged(layer, text.config, fused) for layer in _layers(text)]
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
        with _quiet(_library("a tokenizer")):
            tokens = torch.tensor(tokenizer(words)["input_ids"])
        # Files written before version 4.31 name another token; transformers then uses the token
        # with the highest number.
        last = tokens.argmax() if end == 2 else (tokens == end).int().argmax()
        return table[tokens[: int(last) + 1]]

    return Parts(Frozen(backbone), Frozen(encoder), embed, whole.logit_scale.item(), width)


@dataclass(frozen=True)
class _Source:
    """The description of a pretrained model from its files.

    Attributes
    ----------
    name : str
        The directory or name that was given.
    user : str
        What it is used for, for messages.
    place : str
        Its directory, or its name on the hub.
    config : dict
        The content of ``config.json``.
    mean, std : tuple of float
        Normalisation of images, for each channel.
    """

    name: str
    user: str
    place: str
    config: dict[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, source: str, user: str, kinds: Collection[str] | None = None) -> _Source:
        """Read the description of a source, and check its kind: by default an image model."""
        if not isinstance(source, str) or not source:
            raise InputError(f"source of {user} must be text, got {source!r}; valid: {_VALID}")
        path = Path(source).expanduser()
        if path.is_dir():
            place, files = str(path), partial(_local, path)
        elif _ON_HUB.fullmatch(source):
            place, files = source, partial(_remote, source)
        else:
            raise InputError(f"source {source!r} of {user} is not a directory; valid: {_VALID}")
        config = cls._read(files, "config.json", source, user)
        if config is None:
            raise InputError(f"source {source!r} of {user} has no config.json; valid: {_VALID}")
        if config.get("model_type") not in (valid := FAMILIES if kinds is None else kinds):
            where = f"config.json of source {source!r} of {user}"
            raise unknown("model type", config.get("model_type"), valid, where=where)
        processing = cls._read(files, "preprocessor_config.json", source, user) or {}
        mean, std = (
            processing.get(key) or usual
            for key, usual in zip(("image_mean", "image_std"), IMAGENET, strict=True)
        )
        if processing.get("do_normalize") is False:
            mean, std = (0.0,), (1.0,)
        return cls(source, user, place, config, tuple(mean), tuple(std))

    @staticmethod
    def _read(
        files: Callable[[str], Path | None], name: str, source: str, user: str
    ) -> dict[str, Any] | None:
        try:
            file = files(name)
            content = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{name} of source {source!r} of {user} is not valid JSON: {error}"
            ) from error
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise InputError(
                f"source {source!r} of {user} is not a directory, and cannot be read from the "
                f"Hugging Face hub ({reason}); valid: {_VALID}"
            ) from error
        return content if content is None or isinstance(content, dict) else {}

    def also(self, name: str) -> dict[str, Any]:
        """Return the content of another file of the source, or an empty dict if it is missing."""
        folder = Path(self.place)
        files = partial(_local, folder) if folder.is_dir() else partial(_remote, self.place)
        return self._read(files, name, self.name, self.user) or {}

    @property
    def kind(self) -> str:
        """The architecture in ``config.json``."""
        kind: str = self.config["model_type"]
        return kind

    def normalise(self, channels: int) -> Normalise:
        """Return the normalisation for images with a number of channels."""
        mean, std = (
            values * channels if len(values) == 1 else values for values in (self.mean, self.std)
        )
        if {len(mean), len(std)} != {channels}:
            raise InputError(
                f"source {self.name!r} of {self.user} normalises {len(mean)} channels, but takes "
                f"images with {channels}; see its preprocessor_config.json"
            )
        return Normalise(mean, std)

    def load(self, name: str, **options: Any) -> Any:
        """Load the weights into a class of ``transformers``, in float32. All must be present."""
        library = _library(f"source {self.name!r} of {self.user}")
        # The name of the argument until version 5.
        precision = "dtype" if int(library.__version__.partition(".")[0]) >= 5 else "torch_dtype"
        # Random numbers drawn while loading must not affect later draws.
        with _quiet(library), torch.random.fork_rng(devices=[]):
            try:
                model, outcome = getattr(library, name).from_pretrained(
                    self.place,
                    local_files_only=Path(self.place).is_dir(),
                    output_loading_info=True,
                    **{precision: torch.float32},
                    **options,
                )
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise InputError(
                    f"source {self.name!r} of {self.user} cannot be loaded: {reason}"
                ) from error
        if missing := sorted(outcome["missing_keys"]):
            raise InputError(
                f"source {self.name!r} of {self.user} lacks {len(missing)} weights of a {name}, "
                f"such as {missing[0]!r}; valid: {_VALID}"
            )
        return model.float()

    def tokenizer(self) -> Any:
        """Load the tokenizer of the source."""
        library = _library(f"source {self.name!r} of {self.user}")
        folder = Path(self.place)
        valid = (
            "a source with tokenizer.json, or with vocab.json and merges.txt, as its tokenizer's "
            "save_pretrained writes"
        )
        files = ("tokenizer.json", "vocab.json", "vocab.txt")
        if folder.is_dir() and not any((folder / name).is_file() for name in files):
            raise InputError(
                f"source {self.name!r} of {self.user} has no tokenizer; valid: {valid}"
            )
        with _quiet(library):
            try:
                return library.AutoTokenizer.from_pretrained(
                    self.place, local_files_only=folder.is_dir()
                )
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise InputError(
                    f"the tokenizer of source {self.name!r} of {self.user} cannot be loaded: "
                    f"{reason}; valid: {valid}"
                ) from error


_VALID = (
    "a directory with config.json and model.safetensors, or a name on the Hugging Face hub such as "
    "'facebook/dinov2-small'"
)


def _local(folder: Path, name: str) -> Path | None:
    return folder / name if (folder / name).is_file() else None


def _remote(source: str, name: str) -> Path | None:
    """Return a file of a model on the hub, or ``None`` if the model does not have it."""
    _library(f"source {source!r}, which is not a directory,")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source, name))
    except LocalEntryNotFoundError:
        # The hub could not be reached, so a file that is not cached may exist there.
        raise
    except EntryNotFoundError:
        return None


def _library(what: str) -> ModuleType:
    """Import ``transformers``."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{what} needs transformers: pip install 'equipoise[pretrained]'"
        ) from error
    return transformers


@contextmanager
def _quiet(library: ModuleType) -> Iterator[None]:
    """Turn off the progress bars and the warnings about unused weights of ``transformers``."""
    log = library.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _backbone(
    source: _Source, shape: tuple[int, ...] | None, *, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    """Load a source for images of one or any shape; return it and the length of its vectors."""
    config = source.config.get("vision_config", source.config)
    channels = config.get("num_channels", 3)
    if shape is not None and shape[0] != channels:
        raise InputError(
            f"source {source.name!r} of {source.user} takes images with {channels} channels, got "
            f"shape {shape}"
        )
    return FAMILIES[source.kind](source, source.normalise(channels), shape, frozen, fused)


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
    source: _Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
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
    source: _Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    body = source.load("MobileNetV2Model", add_pooling_layer=False)
    for layer in body.modules():
        if isinstance(layer, nn.BatchNorm2d):
            # The configured 0.997 is TensorFlow's momentum, the share of the old statistics.
            # PyTorch's momentum is one minus that.
            layer.momentum = 1 - 0.997
    return Convolutional(normalise, body), body.conv_1x1.convolution.out_channels


def _vit(
    source: _Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = source.load("ViTModel", add_pooling_layer=False, **_SDPA, **off)
    return _with_class_token(source, model, normalise, shape, frozen, fused)


def _dinov2(
    source: _Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
    return _with_class_token(
        source, source.load("Dinov2Model", **_SDPA, **off), normalise, shape, frozen, fused
    )


def _with_class_token(
    source: _Source, model: Any, normalise: Normalise, shape: Any, frozen: bool, fused: bool
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
    source: _Source, normalise: Normalise, shape: Any, frozen: bool, fused: bool
) -> tuple[nn.Module, int]:
    model = source.load("CLIPVisionModelWithProjection", attention_dropout=0.0, **_SDPA)
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


# Not "eager", which computes softmax in float32 even if everything else is float64. Inside
# ``plain_attention`` this one uses plain matrix products, too.
_SDPA = {"attn_implementation": "sdpa"}


def _tokens(
    source: _Source,
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
    layers = _layers(model)
    blocks = [merged(layer, model.config, fused) if frozen else None for layer in layers]
    return Encoder(
        [block or layer for block, layer in zip(blocks, layers, strict=True)], norm, fused=fused
    )


def _layers(model: Any) -> list[Layer]:
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


_Family = Callable[[_Source, Normalise, Any, bool, bool], tuple[nn.Module, int]]
_TRANSFORMERS = (_vit, _dinov2, _clip)
FAMILIES: Mapping[str, _Family] = {
    "resnet": _resnet,
    "mobilenet_v2": _mobilenet_v2,
    "vit": _vit,
    "dinov2": _dinov2,
    "clip": _clip,
    "clip_vision_model": _clip,
}
"""The loader of each architecture, by ``model_type`` of ``config.json``."""
