"""CLIP (Radford et al., 2021): a frozen image encoder with classes described by text.

The image encoder is the stem, so images are encoded once. Scores are those of CLIP: the cosine of
the image's and the prompt's embedding, times a frozen scale. The trained part is an adapter of the
image's embedding (FedCLIP), the context of the prompts (PromptFL), or nothing (zero-shot).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import count, flag, probability, real, several
from equipoise.errors import InputError, unknown
from equipoise.models.attention import Block
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen
from equipoise.models.norm_layers import LayerNorm
from equipoise.models.vit import ClassToken, refuse_beside, tokens_of
from equipoise.tree import digest

PICTURE = "a picture of a {}"
"""FedCLIP's prompt."""

# Initial values of CLIP: its scale, and the standard deviation of its embeddings.
_FIRST_SCALE = math.log(1 / 0.07)
_SPREAD = 0.02
# The start and the end of a text, after the 256 bytes.
_START, _END = 256, 257
_POSITIONS = 77


def clip(
    shape: tuple[int, ...],
    classes: int,
    *,
    source: str | None = None,
    class_names: tuple[str, ...] | None = None,
    template: str = PICTURE,
    fused: bool = True,
    patch: int = 2,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    mlp_ratio: float = 2.0,
) -> Model:
    """Build an unchanged CLIP, for zero-shot classification.

    Nothing is trained: use it with ``rounds: 0``.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image.
    classes : int
        Number of classes.
    source : str, optional
        A pretrained CLIP with its tokenizer: a directory, or a name on the Hugging Face hub. The
        default is a small CLIP with random weights, drawn from the seed, that reads texts byte by
        byte.
    class_names : tuple of str, optional
        The names of the classes, in the order of the labels. Underscores mean spaces. The default
        is the names of the federation. They are optional without a source.
    template : str
        The prompt, with ``{}`` for the name of the class.
    fused : bool
        Whether to use fused attention.
    patch, width, depth, heads, mlp_ratio
        Both encoders, as in model ``vit``; only without a source.

    Returns
    -------
    Model
        ``stem`` computes embeddings of images, ``features`` scales them to length 1, and ``head``
        compares them with those of the prompts.

    Examples
    --------
    >>> model = clip((1, 8, 8), 2, class_names=("cat", "dog"))
    >>> model(torch.zeros(5, 1, 8, 8)).shape, any(p.requires_grad for p in model.parameters())
    (torch.Size([5, 2]), False)
    """
    small = {"patch": patch, "width": width, "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio}
    parts = parts_of(source, shape, model="clip", fused=fused, **small)
    prompts = _prompts(template, classes, class_names, source, "clip")
    return Model(Unit(), FixedPrompts.of(parts, prompts, "clip"), stem=parts.image)


def clipadapter(
    shape: tuple[int, ...],
    classes: int,
    *,
    source: str | None = None,
    class_names: tuple[str, ...] | None = None,
    template: str = PICTURE,
    adapter: str = "attention",
    width_factor: float = 1.0,
    ratio: float = 0.2,
    fused: bool = True,
    patch: int = 2,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    mlp_ratio: float = 2.0,
) -> Model:
    """Build a frozen CLIP with an adapter after its image encoder (FedCLIP, Lu et al., 2023).

    Only the adapter is trained. With f the embedding of an image and two linear layers W₁ and W₂,
    the adapted embedding is

    - ``attention``: softmax(W₂ tanh(W₁ f + b₁) + b₂) ⊙ f, as in FedCLIP,
    - ``residual``: (1 − r) f + r relu(W₂ relu(W₁ f)), CLIP-Adapter (Gao et al., 2024), which the
      FFT-GP paper describes.

    Parameters
    ----------
    shape, classes, source, class_names, template, fused, patch, width, depth, heads, mlp_ratio
        See :func:`clip`.
    adapter : {"attention", "residual"}
        The form of the adapter.
    width_factor : float
        Width of the adapter's hidden layer, as a multiple of the embedding's: 1, 2, 4 and 8 in
        figure 4 of FFT-GP.
    ratio : float
        r of the residual form.

    Returns
    -------
    Model
        ``stem`` computes embeddings of images, ``features`` adapts them and scales them to length
        1, and ``head`` compares them with those of the prompts.

    Examples
    --------
    >>> model = clipadapter((1, 8, 8), 2, width_factor=2.0, width=16)
    >>> [name for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2]
    ['features.layers.0.weight', 'features.layers.2.weight']
    """
    where = "of model 'clipadapter'"
    small = {"patch": patch, "width": width, "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio}
    if adapter not in ("attention", "residual"):
        raise unknown("adapter", adapter, ("attention", "residual"), where="model 'clipadapter'")
    factor = real(width_factor, f"width_factor {where}")
    part = probability(ratio, f"ratio {where}") if adapter == "residual" else None
    parts = parts_of(source, shape, model="clipadapter", fused=fused, **small)
    prompts = _prompts(template, classes, class_names, source, "clipadapter")
    hidden = count(
        round(factor * parts.width), f"width_factor={factor} times {parts.width}, rounded, {where}"
    )
    features = Adapter(parts.width, hidden, part)
    return Model(features, FixedPrompts.of(parts, prompts, "clipadapter"), stem=parts.image)


def clipprompts(
    shape: tuple[int, ...],
    classes: int,
    *,
    source: str | None = None,
    class_names: tuple[str, ...] | None = None,
    context: int = 16,
    fused: bool = True,
    patch: int = 2,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    mlp_ratio: float = 2.0,
) -> PromptModel:
    """Build a frozen CLIP with learned prompts (PromptFL, Guo et al., 2024).

    Only the context of the prompts is trained. The prompt of a class is ``[start, context, name of
    the class, full stop, end]``, as in CoOp (Zhou et al., 2022): the context vectors are the same
    for all classes, and the name comes last.

    Parameters
    ----------
    shape, classes, source, class_names, fused, patch, width, depth, heads, mlp_ratio
        See :func:`clip`.
    context : int
        Number of context vectors, drawn from N(0, 0.02²).

    Returns
    -------
    PromptModel
        ``stem`` computes embeddings of images, ``features`` scales them to length 1, and ``head``
        contains the context and the frozen text encoder and compares images with prompts.

    Examples
    --------
    >>> model = clipprompts((1, 8, 8), 2, width=32)
    >>> [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    [('head.context', (16, 32))]
    """
    small = {"patch": patch, "width": width, "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio}
    number = count(context, "context of model 'clipprompts'")
    parts = parts_of(source, shape, model="clipprompts", fused=fused, **small)
    prompts = _prompts("{}.", classes, class_names, source, "clipprompts")
    words, ends = embedded(parts, prompts, "clipprompts", context=number)
    head = LearnedPrompts(parts.text, words, ends, number, parts.log_scale)
    return PromptModel(Unit(), head, stem=parts.image)


class Parts(NamedTuple):
    """A frozen CLIP in parts.

    Attributes
    ----------
    image : Frozen
        Maps images to embeddings ``[samples, width]``.
    text : Frozen
        A :class:`TextEncoder`.
    embed : callable
        Returns the vectors of the tokens of a text, ``[tokens, token width]``, from its start to
        the token whose output is the embedding of the text.
    log_scale : float
        Logarithm of the factor on cosines.
    width : int
        Size of an embedding.
    """

    image: Frozen
    text: Frozen
    embed: Callable[[str], Tensor]
    log_scale: float
    width: int


def parts_of(
    source: str | None, shape: tuple[int, ...], *, model: str, fused: bool = True, **small: Any
) -> Parts:
    """Return the parts of a CLIP.

    Parameters
    ----------
    source : str or None
        As in :func:`clip`.
    shape : tuple of int
        Channels, height and width of one image.
    model : str
        Name of the model, for messages.
    fused : bool
        Whether to use fused attention.
    **small
        Both encoders, as in model ``vit``; only without a source.

    Returns
    -------
    Parts
        Its encoders, tokenizer and scale.

    Examples
    --------
    >>> small = {"patch": 4, "width": 16, "depth": 1, "heads": 2, "mlp_ratio": 2.0}
    >>> parts = parts_of(None, (1, 8, 8), model="clip", **small)
    >>> parts.image(torch.zeros(5, 1, 8, 8)).shape, parts.embed("cat").shape
    (torch.Size([5, 16]), torch.Size([5, 16]))
    """
    flag(fused, f"fused of model {model!r}")
    if source is None:
        return _small(shape, model, fused, **small)
    refuse_beside(source, small, model)
    # Only pretrained models need transformers.
    from equipoise.models.pretrained import clip_parts

    return clip_parts(source, shape, model=model, fused=fused)


def _small(
    shape: tuple[int, ...],
    model: str,
    fused: bool,
    patch: int,
    width: int,
    depth: int,
    heads: int,
    mlp_ratio: float,
) -> Parts:
    """Create a small CLIP with random weights, whose two encoders have the same size."""
    same = {"width": width, "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio}
    tower = tokens_of(None, shape, model=model, fused=fused, patch=patch, **same)
    blocks = [Block(width, heads, mlp_ratio=mlp_ratio, fused=fused) for _ in range(depth)]
    table, positions = (
        _SPREAD * torch.randn(_END + 1, width),
        _SPREAD * torch.randn(_POSITIONS, width),
    )
    projections = [nn.Linear(width, width, bias=False) for _ in range(2)]
    image = ClassToken(
        tower.stem.module,  # type: ignore[arg-type]
        tower.encoder.module,  # type: ignore[arg-type]
        projections[0],
    )
    text = TextEncoder(positions, blocks, LayerNorm(nn.LayerNorm(width)), projections[1])

    def embed(words: str) -> Tensor:
        return table[[_START, *words.encode(), _END]]

    return Parts(Frozen(image), Frozen(text), embed, _FIRST_SCALE, width)


class TextEncoder(nn.Module):
    """CLIP's text encoder, which maps the vectors of tokens to embeddings of texts.

    Parameters
    ----------
    positions : Tensor
        Added to the vectors, ``[most tokens, token width]``.
    blocks : sequence of Block
        A token attends only to itself and to earlier tokens, so tokens after the end of a text have
        no effect.
    norm : nn.Module
        Applied to the token at the end of each text.
    projection : nn.Module
        Applied last.

    Examples
    --------
    >>> encoder = TextEncoder(torch.zeros(5, 8), [Block(8, 2)], nn.Identity(), nn.Linear(8, 3))
    >>> encoder(torch.zeros(2, 4, 8), ends=torch.eye(4)[:2]).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, positions: Tensor, blocks: Sequence[Block], norm: nn.Module, projection: nn.Module
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(positions)
        self.blocks = nn.ModuleList(blocks)
        for block in blocks:
            block.attention.causal = True
        self.norm = norm
        self.projection = projection

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Return the embeddings of texts.

        Parameters
        ----------
        tokens : Tensor
            ``[texts, tokens, token width]``.
        ends : Tensor
            One-hot rows ``[texts, tokens]``: the position of the end of each text.

        Returns
        -------
        Tensor
            ``[texts, width]``.
        """
        hidden = tokens + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        made: Tensor = self.projection(self.norm((ends.unsqueeze(1) @ hidden).squeeze(1)))
        return made


def embedded(
    parts: Parts, texts: Sequence[str], model: str, *, context: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the token vectors of texts, and the positions of their ends after adding a context.

    Parameters
    ----------
    parts : Parts
        A CLIP.
    texts : sequence of str
        The texts.
    model : str
        Name of the model, for messages.
    context : int
        Number of vectors that will be inserted after the start token.

    Returns
    -------
    tuple of Tensor
        ``[texts, tokens, token width]``, zero after the ends, and one-hot rows ``[texts, tokens +
        context]``.

    Examples
    --------
    >>> small = {"patch": 4, "width": 16, "depth": 1, "heads": 2, "mlp_ratio": 2.0}
    >>> parts = parts_of(None, (1, 8, 8), model="clip", **small)
    >>> words, ends = embedded(parts, ["cat", "mouse"], "clip", context=4)
    >>> words.shape, ends.argmax(1)
    (torch.Size([2, 7, 16]), tensor([ 8, 10]))
    """
    rows = [parts.embed(text) for text in texts]
    encoder: Any = parts.text.module
    for text, row in zip(texts, rows, strict=True):
        if len(row) + context > len(encoder.positions):
            raise InputError(
                f"the prompt {text!r} of model {model!r} has {len(row)} "
                f"tokens{f' and {context} vectors of context' if context else ''}, but the text "
                f"encoder takes at most {len(encoder.positions)}; valid: shorter names"
            )
    words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    last = torch.tensor([len(row) - 1 + context for row in rows])
    return words, F.one_hot(last, words.shape[1] + context).to(words.dtype)


class Unit(nn.Module):
    """A layer that scales vectors to length 1.

    Examples
    --------
    >>> Unit()(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Scale a batch of vectors."""
        return F.normalize(x, dim=-1)


class Adapter(nn.Module):
    """Two linear layers that adapt an embedding and scale it to length 1; see :func:`clipadapter`.

    Parameters
    ----------
    width : int
        Size of an embedding.
    hidden : int
        Width of the hidden layer.
    ratio : float, optional
        r of the residual form. By default the form is FedCLIP's attention.

    Examples
    --------
    >>> Adapter(4, 8)(torch.ones(5, 4)).shape
    torch.Size([5, 4])
    """

    def __init__(self, width: int, hidden: int, ratio: float | None = None) -> None:
        super().__init__()
        self.ratio = ratio
        attention = ratio is None
        self.layers = nn.Sequential(
            nn.Linear(width, hidden, bias=attention),
            nn.Tanh() if attention else nn.ReLU(),
            nn.Linear(hidden, width, bias=attention),
            nn.Softmax(-1) if attention else nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adapt a batch of embeddings."""
        made: Tensor = self.layers(x)
        return F.normalize(
            made * x if self.ratio is None else self.ratio * made + (1 - self.ratio) * x, dim=-1
        )


class FixedPrompts(nn.Module):
    """A head that compares embeddings with those of fixed prompts.

    The embeddings of the prompts are computed once, in float64. They are not a buffer, because
    their last bits depend on the machine and the hash of frozen tensors must not. That hash uses
    ``identity`` instead, the hash of the data from which they are computed.

    Parameters
    ----------
    text : Tensor
        The prompts' embeddings, of length 1, ``[classes, width]``.
    log_scale : float
        Logarithm of the factor on cosines.
    identity : str
        In hexadecimal digits.

    Examples
    --------
    >>> FixedPrompts(torch.eye(2), 0.0, "00")(torch.tensor([[0.6, 0.8]]))
    tensor([[0.6000, 0.8000]])
    """

    identity: Tensor
    log_scale: Tensor

    def __init__(self, text: Tensor, log_scale: float, identity: str) -> None:
        super().__init__()
        self.text = text
        numbers = torch.tensor(list(bytes.fromhex(identity)), dtype=torch.get_default_dtype())
        self.register_buffer("identity", numbers, persistent=False)
        self.register_buffer("log_scale", torch.tensor(log_scale), persistent=False)

    @classmethod
    @torch.no_grad()
    def of(cls, parts: Parts, prompts: Sequence[str], model: str) -> FixedPrompts:
        """Create the head from the text of prompts.

        Examples
        --------
        >>> small = {"patch": 4, "width": 16, "depth": 1, "heads": 2, "mlp_ratio": 2.0}
        >>> parts = parts_of(None, (1, 8, 8), model="clip", **small)
        >>> FixedPrompts.of(parts, ["a cat", "a dog"], "clip").text.shape
        torch.Size([2, 16])
        """
        words, ends = embedded(parts, prompts, model)
        identity = digest({"words": words, "ends": ends, **dict(parts.text.named_parameters())})
        text = copy.deepcopy(parts.text).double()(words.double(), ends.double())
        return cls(F.normalize(text, dim=-1), parts.log_scale, identity)

    def forward(self, z: Tensor) -> Tensor:
        """Return a score for each class."""
        return self.log_scale.exp() * (z @ self.text.to(z.dtype).T)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **options: Any) -> FixedPrompts:
        """Apply ``to``, ``double`` and similar conversions, which all call this method."""
        super()._apply(fn, *args, **options)
        self.text = fn(self.text)
        return self


class LearnedPrompts(nn.Module):
    """A head that compares embeddings with those of prompts with a learned context.

    Parameters
    ----------
    encoder : Frozen
        A :class:`TextEncoder`.
    words : Tensor
        The vectors of each prompt's other tokens, the start token first, ``[classes, tokens, token
        width]``.
    ends : Tensor
        One-hot rows ``[classes, tokens + context]``: the position of the end of each prompt.
    context : int
        Number of context vectors, drawn from N(0, 0.02²).
    log_scale : float
        Logarithm of the factor on cosines.

    Examples
    --------
    >>> small = {"patch": 4, "width": 16, "depth": 1, "heads": 2, "mlp_ratio": 2.0}
    >>> parts = parts_of(None, (1, 8, 8), model="clip", **small)
    >>> words, ends = embedded(parts, ["cat", "mouse"], "clip", context=4)
    >>> LearnedPrompts(parts.text, words, ends, 4, 0.0)(torch.zeros(5, 16)).shape
    torch.Size([5, 2])
    """

    words: Tensor
    ends: Tensor
    log_scale: Tensor

    def __init__(
        self, encoder: Frozen, words: Tensor, ends: Tensor, context: int, log_scale: float
    ) -> None:
        super().__init__()
        self.context = nn.Parameter(_SPREAD * torch.randn(context, words.shape[-1]))
        self.encoder = encoder
        for name, tensor in (
            ("words", words),
            ("ends", ends),
            ("log_scale", torch.tensor(log_scale)),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def text(self) -> Tensor:
        """Return the prompts' embeddings, of length 1, ``[classes, width]``."""
        context = self.context.expand(len(self.words), -1, -1)
        tokens = torch.cat([self.words[:, :1], context, self.words[:, 1:]], 1)
        # The ends are a keyword argument, because only the tokens have an axis of stacked clients.
        return F.normalize(self.encoder(tokens, ends=self.ends), dim=-1)

    def forward(self, z: Tensor) -> Tensor:
        """Return a score for each class."""
        return self.log_scale.exp() * (z @ self.text().T)


class PromptModel(Model):
    """A model with learned prompts. Methods align its text embeddings.

    Attributes
    ----------
    aligned_rows : str
        What the rows of :meth:`aligned` are.

    Examples
    --------
    >>> model = clipprompts((1, 8, 8), 3, width=32)
    >>> model.aligned(torch.zeros(5, 32)).shape
    torch.Size([3, 32])
    """

    aligned_rows: ClassVar[str] = "classes"

    def aligned(self, z: Tensor) -> Tensor:
        """Return the prompts' embeddings ``[classes, width]``; those of images are constant."""
        head: Any = self.head
        made: Tensor = head.text()
        return made


def _prompts(
    template: str, classes: int, class_names: Sequence[str] | None, source: str | None, model: str
) -> list[str]:
    """Return a prompt for each class."""
    if not isinstance(template, str) or template.count("{}") != 1:
        raise InputError(
            f"template of model {model!r} must be text with one {{}} for the class, got "
            f"{template!r}"
        )
    if class_names is None:
        if source is not None:
            raise InputError(
                f"model {model!r} needs the names of the {classes} classes, which the data do not "
                f"have; valid: the option class_names, such as model: {{name: {model}, "
                f"class_names: [cat, dog]}}, or data with class names, such as imagefolder"
            )
        # The names do not matter for a text encoder with random weights.
        class_names = [str(label) for label in range(classes)]
    names = several(class_names, f"class_names of model {model!r}", _name)
    if len(names) != classes:
        raise InputError(
            f"class_names of model {model!r} must be {classes} names, one per class, got "
            f"{list(names)}"
        )
    return [template.replace("{}", name.replace("_", " ")) for name in names]


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{what} must be a name, got {value!r}")
    return value
