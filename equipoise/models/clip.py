"""CLIP (Radford et al., 2021): a frozen image encoder with classes described by text.

The image encoder is the stem, so images are encoded once. Scores are those of CLIP: the cosine of
the image's and the prompt's embedding, times a frozen scale. The trained part is an adapter of the
image's embedding (FedCLIP), the context of the prompts (PromptFL), or nothing (zero-shot).
"""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.checks import count, probability, real, several
from equipoise.errors import InputError, unknown
from equipoise.models.base import Model
from equipoise.models.clip_encoders import embedded, parts_of
from equipoise.models.clip_heads import Adapter, FixedPrompts, LearnedPrompts, PromptModel, Unit

PICTURE = "a picture of a {}"
"""FedCLIP's prompt."""


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
    >>> import torch
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
