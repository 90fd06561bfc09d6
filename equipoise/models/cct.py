"""Compact convolutional transformers: tokens from convolutions, and pooling over all tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from equipoise.checks import count, image, probability
from equipoise.errors import InputError
from equipoise.models.attention import Block
from equipoise.models.base import Model, pixels
from equipoise.models.norm_layers import LayerNorm

# Channels between two convolutions of the tokenizer, as in the paper.
_BETWEEN = 64
# Standard deviations of the initial positions and linear layers in the public code.
_POSITIONS, _LINEAR = 0.2, 0.02


def cct(
    shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 7,
    kernel: int = 3,
    convolutions: int = 1,
    width: int = 256,
    heads: int = 4,
    mlp_ratio: float = 2.0,
    dropout: float = 0.0,
) -> Model:
    """Build a compact convolutional transformer (Hassani et al., 2021). The default is CCT-7/3×1.

    A convolution, ReLU and max-pooling turn an image into tokens, so there is no class token.
    Learned positions are added. After the blocks, z is the sum of the tokens, weighted by a softmax
    over their scores (sequence pooling).

    Blocks are those of the paper, with normalisation before attention and MLP. There is no
    stochastic depth.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image.
    classes : int
        Number of classes, or of outputs in regression.
    depth : int
        Number of transformer blocks.
    kernel : int
        Height and width of the convolutions, an odd number.
    convolutions : int
        Number of convolutions, each followed by ReLU and max-pooling that halves height and width.
    width : int
        Size of a token.
    heads : int
        Heads of the attention, a divisor of ``width``.
    mlp_ratio : float
        Width of the hidden layers of the blocks, as a multiple of ``width``.
    dropout : float
        Probability of dropping a unit after each attention and each MLP.

    Returns
    -------
    Model
        ``features`` ends with sequence pooling; ``head`` is the linear layer.

    Examples
    --------
    >>> model = cct((3, 32, 32), 10)
    >>> sum(p.numel() for p in model.parameters())
    3760139
    """
    side = count(kernel, "kernel of model 'cct'")
    if side % 2 == 0:
        raise InputError(f"kernel of model 'cct' must be odd, got {kernel!r}")
    layers = count(convolutions, "convolutions of model 'cct'")
    count(width, "width of model 'cct'")
    rate = probability(dropout, "dropout of model 'cct'")
    channels, height, across = image(shape, "cct", smallest=2**layers)
    blocks = [
        Block(width, heads, mlp_ratio=mlp_ratio, dropout=rate, qkv_bias=False)
        for _ in range(count(depth, "depth of model 'cct'"))
    ]
    features = CompactTransformer(
        ConvolutionalTokens(channels, width, side, layers), (height, across), blocks
    )
    model = Model(features, nn.Linear(width, classes))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=_LINEAR)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return model


class ConvolutionalTokens(nn.Sequential):
    """Convolutions without bias, each with ReLU and max-pooling over 3 × 3 pixels in steps of 2.

    Parameters
    ----------
    channels : int
        Channels of an image.
    width : int
        Size of a token.
    kernel : int
        Height and width of the convolutions.
    convolutions : int
        Number of convolutions.

    Examples
    --------
    >>> ConvolutionalTokens(3, 8, 3, 1)(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 256, 8])
    """

    def __init__(self, channels: int, width: int, kernel: int, convolutions: int) -> None:
        sizes = [channels, *(_BETWEEN,) * (convolutions - 1), width]
        # The stride of the public code: 1 for a kernel of 3 or 5, and 2 for one of 7.
        stride = max(1, kernel // 2 - 1)
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            convolution = nn.Conv2d(
                before, after, kernel, stride, padding=max(1, kernel // 2), bias=False
            )
            layers += [convolution, nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens ``[samples, tokens, width]`` of images."""
        return super().forward(x).flatten(2).transpose(1, 2)


class CompactTransformer(nn.Module):
    """Tokens, positions, transformer blocks and sequence pooling.

    Parameters
    ----------
    tokens : nn.Module
        Maps images to tokens ``[samples, tokens, width]``.
    size : tuple of int
        Height and width of the images.
    blocks : list of Block
        Transformer blocks.

    Examples
    --------
    >>> tokens = ConvolutionalTokens(1, 8, 3, 1)
    >>> CompactTransformer(tokens, (8, 8), [Block(8, 2)])(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 8])
    """

    def __init__(self, tokens: nn.Module, size: tuple[int, int], blocks: list[Block]) -> None:
        super().__init__()
        self.tokens, self.size = tokens, size
        channels = next(tokens.parameters()).shape[1]
        with torch.no_grad():
            _, number, width = tokens(torch.zeros(1, channels, *size)).shape
        self.positions = nn.Parameter(
            nn.init.trunc_normal_(torch.empty(number, width), std=_POSITIONS)
        )
        self.blocks = nn.Sequential(*blocks)
        self.norm = LayerNorm(nn.LayerNorm(width))
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return z ``[samples, width]`` of images, which may be bytes."""
        x = pixels(x, self.positions.dtype)
        if tuple(x.shape[-2:]) != self.size:
            expected, given = (f"{height} x {width}" for height, width in (self.size, x.shape[-2:]))
            raise InputError(f"the model was built for images of {expected} pixels, got {given}")
        tokens = self.norm(self.blocks(self.tokens(x) + self.positions))
        weights = self.score(tokens).softmax(1)
        return (weights.transpose(1, 2) @ tokens).squeeze(1)
