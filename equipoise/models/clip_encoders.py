"""CLIP's image and text encoders: pretrained, or small ones with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import flag
from equipoise.errors import InputError
from equipoise.models.attention import Block
from equipoise.models.frozen import Frozen
from equipoise.models.norm_layers import LayerNorm
from equipoise.models.vit import ClassToken, refuse_beside, tokens_of

# Initial values of CLIP: its scale, and the standard deviation of its embeddings.
_FIRST_SCALE = math.log(1 / 0.07)
SPREAD = 0.02
# The start and the end of a text, after the 256 bytes.
_START, _END = 256, 257
_POSITIONS = 77


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
        As in :func:`equipoise.models.clip.clip`.
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
        SPREAD * torch.randn(_END + 1, width),
        SPREAD * torch.randn(_POSITIONS, width),
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
