"""DSA-IGN (Guo et al., 2024): split embeddings into a label-related part and the rest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from equipoise.checks import count, probability, several
from equipoise.errors import InputError, unknown
from equipoise.models.attention import Attention
from equipoise.models.base import Model
from equipoise.models.linear_layers import Linear
from equipoise.models.norm_layers import LayerNorm

PROJECTIONS = ("matrix", "linear", "mlp")
PHOTO = "A photo of a/an {}"
"""The paper's text for the label of an image. "a/an" is replaced with the right article."""
CHARACTER = "Character {}"
"""The paper's text for a label when the task is to predict the next character."""
_TOKEN = 32
# Names that begin with a vowel sound, whatever their first letter.
_VOWEL = re.compile(r"(?!one|uni|use|eu)[aeiou]|hour|honest|heir", re.IGNORECASE)
# Tokenizers drop white space, so these would have the same name.
_WHITE_SPACE = {" ": "space", "\n": "newline", "\t": "tab"}


def dsaign(
    shape: tuple[int, ...],
    classes: int,
    *,
    labels: str | None = None,
    text: str | None = None,
    class_names: tuple[str, ...] | None = None,
    template: str = PHOTO,
    projection: str = "matrix",
    depth: int = 3,
    heads: int = 8,
    feedforward: int = 2048,
    dropout: float = 0.0,
) -> Model:
    """Build the network that computes client indices from embeddings.

    See section 3.2 and appendix D.2 of Client2Vec.

    An embedding D is repeated to [D, D], cut into tokens of 32 numbers, passed through a
    transformer encoder, and concatenated to [z, u]: the part related to the label, and the feature
    index of the sample. A projection of [z, u] reconstructs D.

    Choices that the paper leaves open: there is no dropout. Embeddings are not scaled to length 1
    (for label vectors, the losses use only the directions). The activation and the order of the
    encoder layers are those of ``nn.TransformerEncoderLayer``. Tokens have no positions, as with
    that layer.

    Parameters
    ----------
    shape : tuple of int
        The shape of one embedding. Its size must be a multiple of 16.
    classes : int
        Number of classes.
    labels : str, optional
        A safetensors file with the tensor ``labels``, ``[classes, width]``: the embedding of a text
        for each class. Without it and without ``text``, label vectors are drawn from a normal
        distribution.
    text : str, optional
        A text encoder that computes the label vectors: a directory or a name on the Hugging Face
        hub; see :func:`equipoise.models.pretrained.text_encoder`. Its embeddings must have the same
        size as those of samples.
    class_names : tuple of str, optional
        The names of the classes, for ``text``; by default those of the federation.
    template : str
        The text for a class, with ``{}`` for its name, for ``text``.
    projection : {"matrix", "linear", "mlp"}
        The layer that reconstructs D: a matrix, a linear layer with a bias, or two layers
        (figure 8).
    depth : int
        Number of layers of the transformer encoder.
    heads : int
        Heads of its attention, a divisor of 32.
    feedforward : int
        Width of its hidden layers.
    dropout : float
        Probability of dropping a unit after attention and hidden layers.

    Returns
    -------
    Model
        ``features`` returns [z, u]. ``head`` returns the cosines of z and the label vectors, which
        are frozen. The part ``reconstruction`` is the projection.

    Examples
    --------
    >>> model = dsaign((64,), 10, feedforward=16)
    >>> model.features(torch.zeros(5, 64)).shape, model(torch.zeros(5, 64)).shape
    (torch.Size([5, 128]), torch.Size([5, 10]))
    """
    width = torch.Size(shape).numel()
    if 2 * width % _TOKEN:
        raise InputError(
            f"model 'dsaign' cuts embeddings into tokens of {_TOKEN} numbers, but one of shape "
            f"{tuple(shape)} has {width} numbers; valid: a multiple of {_TOKEN // 2}"
        )
    if projection not in PROJECTIONS:
        raise unknown("projection", projection, PROJECTIONS, where="model 'dsaign'")
    hidden = count(feedforward, "feedforward of model 'dsaign'")
    rate = probability(dropout, "dropout of model 'dsaign'")
    layers = [
        EncoderLayer(_TOKEN, heads, hidden, rate)
        for _ in range(count(depth, "depth of model 'dsaign'"))
    ]
    if text is not None:
        if labels is not None:
            raise InputError(
                "model 'dsaign' takes label vectors from a file (labels) or from a text encoder "
                "(text); set only one of them"
            )
        head = _described(text, label_texts(class_names, classes, template), width)
    else:
        head = LabelCosines(
            torch.randn(classes, width)
            if labels is None
            else _label_vectors(labels, classes, width)
        )
    model = Model(Decomposition(layers), head)
    model.add_module("reconstruction", _reconstruction(projection, width))
    return model


def _reconstruction(projection: str, width: int) -> nn.Module:
    if projection == "mlp":
        return nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
    return nn.Linear(2 * width, width, bias=projection == "linear")


def label_texts(
    class_names: Sequence[str] | None, classes: int, template: str = PHOTO
) -> list[str]:
    """Return the text that describes each class.

    Underscores in names mean spaces. White space is spelled out, because tokenizers drop it.

    Parameters
    ----------
    class_names : sequence of str or None
        The names of the classes.
    classes : int
        Number of classes.
    template : str
        Text with ``{}`` for the name, and optionally "a/an" for an article.

    Returns
    -------
    list of str
        One text per class.

    Examples
    --------
    >>> label_texts(["apple", "sea_lion"], 2)
    ['A photo of an apple', 'A photo of a sea lion']
    >>> label_texts(["x", " "], 2, CHARACTER)
    ['Character x', 'Character space']
    """
    if not isinstance(template, str) or template.count("{}") != 1:
        raise InputError(
            f"template of model 'dsaign' must be text with one {{}} for the class, got {template!r}"
        )
    if class_names is None:
        raise InputError(
            f"model 'dsaign' needs the names of the {classes} classes for the option text, which "
            "the data do not have; "
            "valid: the option class_names, such as model: {name: dsaign, class_names: [cat, dog]}"
        )
    names = several(class_names, "class_names of model 'dsaign'", _name)
    if len(names) != classes:
        raise InputError(
            f"class_names of model 'dsaign' must be {classes} names, one per class, got "
            f"{list(names)}"
        )
    plain = [
        _WHITE_SPACE.get(name, name.replace("_", " ") if name != "_" else name) for name in names
    ]
    articles = ["an" if _VOWEL.match(name) else "a" for name in plain]
    return [
        template.replace("a/an", a).replace("{}", name)
        for a, name in zip(articles, plain, strict=True)
    ]


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{what} must be a name, got {value!r}")
    return value


def _described(source: str, texts: list[str], width: int) -> LabelCosines:
    # Only text encoders need transformers.
    from equipoise.models.pretrained import text_encoder

    encoder = text_encoder(source)
    if encoder.width != width:
        raise InputError(
            f"text encoder {source!r} of model 'dsaign' has embeddings of size {encoder.width}, "
            f"but those of samples have size {width}; valid: encoders of the same size, such as "
            "the two of a CLIP"
        )
    identity = hashlib.sha256(repr((encoder.digest, texts)).encode()).hexdigest()
    return LabelCosines(encoder.to(torch.float64)(texts).to(torch.get_default_dtype()), identity)


def _label_vectors(path: str, classes: int, width: int) -> Tensor:
    try:
        found = load_file(path).get("labels")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"labels of model 'dsaign': cannot read {path} as a safetensors file: {error}"
        ) from error
    if found is None or tuple(found.shape) != (classes, width):
        shape = None if found is None else tuple(found.shape)
        raise InputError(
            f"labels of model 'dsaign': {path} must have a tensor 'labels' of shape "
            f"{(classes, width)}, got {shape}"
        )
    # Copied, because tensors in the file are not aligned, so kernels may round differently.
    return found.to(torch.float32, copy=True)


class EncoderLayer(nn.Module):
    """A layer of the original transformer encoder (Vaswani et al., 2017).

    Residual sums are normalised afterwards, and the activation is ReLU.

    Parameters
    ----------
    width : int
        Size of a token.
    heads : int
        Heads of the attention.
    hidden : int
        Width of the hidden layer.
    dropout : float
        Probability of dropping a unit.

    Examples
    --------
    >>> EncoderLayer(8, 2, 16)(torch.zeros(5, 3, 8)).shape
    torch.Size([5, 3, 8])
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1, self.norm2 = (LayerNorm(nn.LayerNorm(width)) for _ in range(2))
        self.dropout1, self.dropout2, self.dropout3 = (
            nn.Dropout(dropout) if dropout > 0 else nn.Identity() for _ in range(3)
        )
        self.first, self.second = Linear(nn.Linear(width, hidden)), Linear(nn.Linear(hidden, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Transform tokens ``[samples, tokens, width]``."""
        tokens = self.norm1(tokens + self.dropout1(self.attention(tokens)))
        hidden = self.dropout2(self.first(tokens).relu())
        made: Tensor = self.norm2(tokens + self.dropout3(self.second(hidden)))
        return made


class Decomposition(nn.Module):
    """Split embeddings D into [z, u].

    Parameters
    ----------
    layers : list of nn.Module
        Map tokens ``[samples, tokens, 32]`` to tokens of the same shape.

    Examples
    --------
    >>> Decomposition([EncoderLayer(32, 8, 16)])(torch.zeros(5, 48)).shape
    torch.Size([5, 96])
    """

    def __init__(self, layers: list[EncoderLayer]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return [z, u], twice as wide as the embeddings."""
        embedding = x.flatten(1)
        doubled = torch.cat([embedding, embedding], 1)
        made: Tensor = self.layers(doubled.unflatten(1, (-1, _TOKEN)))
        return made.flatten(1)


class LabelCosines(nn.Module):
    """The cosines of z, the first half of [z, u], and label vectors that are not trained.

    Parameters
    ----------
    vectors : Tensor
        ``[classes, width]``.
    identity : str, optional
        A hash of the data from which the vectors were computed, in hexadecimal digits. It replaces
        them in the hash of frozen tensors, because the last bits of computed vectors depend on the
        machine.

    Attributes
    ----------
    vectors : Tensor
        ``[classes, width]``.

    Examples
    --------
    >>> LabelCosines(torch.eye(2))(torch.tensor([[3.0, 4.0, 9.0, 9.0]]))
    tensor([[0.6000, 0.8000]])
    """

    vectors: Tensor

    def __init__(self, vectors: Tensor, identity: str | None = None) -> None:
        super().__init__()
        self._computed = identity is not None
        if identity is None:
            self.register_buffer("vectors", vectors, persistent=False)
        else:
            self.vectors = vectors
            numbers = torch.tensor(list(bytes.fromhex(identity)), dtype=torch.get_default_dtype())
            self.register_buffer("identity", numbers, persistent=False)

    def forward(self, split: Tensor) -> Tensor:
        """Return one number in [−1, 1] for each class."""
        z = split[:, : split.shape[1] // 2]
        return F.normalize(z, dim=1) @ F.normalize(self.vectors, dim=1).T

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **options: Any) -> LabelCosines:
        """Apply ``to``, ``double`` and similar conversions, which all call this method."""
        super()._apply(fn, *args, **options)
        if self._computed:
            self.vectors = fn(self.vectors)
        return self
