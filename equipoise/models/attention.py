"""Attention and transformer blocks that give the same results stacked or alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import count, probability
from equipoise.errors import InputError
from equipoise.models.linear_layers import Linear
from equipoise.models.norm_layers import LayerNorm


class Attention(nn.Module):
    """Self-attention with several heads: softmax(q kᵀ / √d) v for each head, then a linear layer.

    By default it uses matrix products, which can be stacked with ``torch.func.vmap``, can be
    differentiated twice, and give the same bits on every run.

    Parameters
    ----------
    width : int
        Size of a token.
    heads : int
        Number of heads.
    fused : bool
        Whether to use PyTorch's fused attention. It is faster and needs less memory, but cannot be
        stacked or differentiated twice. It is intended for use inside a
        :class:`~equipoise.models.frozen.Frozen`, which handles both.
    qkv_bias : bool
        Whether queries, keys and values have a bias.

    Attributes
    ----------
    causal : bool
        Whether a token attends only to itself and to earlier tokens, as in a text encoder; by
        default it attends to all.

    Examples
    --------
    >>> Attention(8, heads=2)(torch.zeros(5, 3, 8)).shape
    torch.Size([5, 3, 8])
    """

    def __init__(
        self, width: int, heads: int, fused: bool = False, *, qkv_bias: bool = True
    ) -> None:
        super().__init__()
        if count(width, "width of attention") % count(heads, "heads of attention"):
            raise InputError(f"heads={heads} do not divide width={width} of attention")
        self.heads, self.fused, self.causal = heads, fused, False
        self.qkv = Linear(nn.Linear(width, 3 * width, bias=qkv_bias))
        self.out = Linear(nn.Linear(width, width))

    def forward(self, tokens: Tensor, *, class_only: bool = False) -> Tensor:
        """Apply attention to the tokens of each sample.

        Parameters
        ----------
        tokens : Tensor
            ``[samples, tokens, width]``.
        class_only : bool
            Whether to return only the first token, the class token.

        Returns
        -------
        Tensor
            The same shape, or ``[samples, 1, width]``.
        """
        # [samples, tokens, 3 * width] -> three times [samples, heads, tokens, width / heads]. Split
        # before swapping axes, so that the gradients are concatenated in the memory order of the
        # linear layer.
        parts = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(-2, -3) for part in parts)
        q = q[:, :, :1] if class_only else q
        mix = F.scaled_dot_product_attention if self.fused else attend
        mixed = mix(q, k, v, is_causal=self.causal)
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return made


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Return softmax(q kᵀ / √d) v.

    Parameters
    ----------
    q, k, v : Tensor
        Queries, keys and values, ``[..., tokens, d]``.
    is_causal : bool
        Whether query i attends only to keys 0 to i.

    Returns
    -------
    Tensor
        ``[..., tokens, d]``.

    Examples
    --------
    >>> attend(torch.zeros(1, 4), torch.ones(2, 4), torch.tensor([[1.0], [3.0]]))
    tensor([[2.]])
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with LayerNorm before and a residual sum.

    Parameters
    ----------
    width : int
        Size of a token.
    heads : int
        Heads of the attention.
    mlp_ratio : float
        Width of the hidden layer of the MLP, as a multiple of ``width``.
    dropout : float
        Probability of dropping a unit after the attention and after the MLP.
    fused : bool
        Whether to use fused attention; see :class:`Attention`.
    activation : nn.Module, optional
        Activation between the layers of the MLP; GELU by default.
    qkv_bias : bool
        Whether queries, keys and values have a bias.

    Examples
    --------
    >>> Block(8, heads=2)(torch.zeros(5, 3, 8)).shape
    torch.Size([5, 3, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        fused: bool = False,
        activation: nn.Module | None = None,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        hidden = count(
            round(width * mlp_ratio),
            f"width={width} times mlp_ratio={mlp_ratio} of a block, rounded,",
        )
        rate = probability(dropout, "dropout of a block")
        self.norm1 = LayerNorm(nn.LayerNorm(width))
        self.attention = Attention(width, heads, fused, qkv_bias=qkv_bias)
        self.dropout1 = nn.Dropout(rate) if rate > 0 else nn.Identity()
        self.norm2 = LayerNorm(nn.LayerNorm(width))
        self.mlp = nn.Sequential(
            Linear(nn.Linear(width, hidden)),
            activation or nn.GELU(),
            Linear(nn.Linear(hidden, width)),
        )
        self.dropout2 = nn.Dropout(rate) if rate > 0 else nn.Identity()

    def forward(self, tokens: Tensor, *, class_only: bool = False) -> Tensor:
        """Transform tokens ``[samples, tokens, width]``; optionally return only the class token."""
        attended = self.attention(self.norm1(tokens), class_only=class_only)
        tokens = (tokens[:, :1] if class_only else tokens) + self.dropout1(attended)
        made: Tensor = tokens + self.dropout2(self.mlp(self.norm2(tokens)))
        return made
