"""What is after CLIP's encoders: adapters, and heads that compare images with prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.models.base import Model
from equipoise.models.clip_encoders import SPREAD, Parts, embedded
from equipoise.models.frozen import Frozen
from equipoise.tree import digest


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
    """Two linear layers that adapt an embedding and scale it to length 1.

    See :func:`equipoise.models.clip.clipadapter`.

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
        >>> from equipoise.models.clip_encoders import parts_of
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
        A :class:`~equipoise.models.clip_encoders.TextEncoder`.
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
    >>> from equipoise.models.clip_encoders import parts_of
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
        self.context = nn.Parameter(SPREAD * torch.randn(context, words.shape[-1]))
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
    >>> from equipoise.models.clip import clipprompts
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
