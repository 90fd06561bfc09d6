"""FedGC's model: a frozen vision transformer whose prompts depend on the image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checks import count, flag, probability
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen
from equipoise.models.vit import TOKEN_SPREAD, tokens_of


def fedgc(
    shape: tuple[int, ...],
    classes: int,
    *,
    source: str | None = None,
    prompts: int = 4,
    hidden: int | None = None,
    dropout: float = 0.0,
    fused: bool = True,
    patch: int = 2,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    mlp_ratio: float = 2.0,
) -> Model:
    """Build the model of FedGC (Cheng et al., 2024): prompts that GC-Net shifts for every image.

    The transformer processes an image twice. GC-Net computes h from the class token of the first
    pass, which has no prompts. The second pass has the prompts p₁ + h, ..., pₙ + h after the
    image's tokens, and z is its class token. Only prompts, GC-Net and head are trained.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image.
    classes : int
        Number of classes, or of outputs in regression.
    source : str, optional
        A pretrained ViT, DINOv2 or CLIP, as in model ``vitprompts``. By default the transformer is
        that of model ``vit``, with random weights drawn from the seed.
    prompts : int
        Number of prompts, drawn from N(0, 0.02²).
    hidden : int, optional
        Width of GC-Net's hidden layer; by default four times that of a token.
    dropout : float
        Probability of dropping a component of z in training.
    fused : bool
        Whether to use fused attention, which is faster and needs less memory.
    patch, width, depth, heads, mlp_ratio
        The transformer, as in model ``vit``; only without a source.

    Returns
    -------
    Model
        ``stem`` maps an image to the class token of the first pass and the tokens; ``features``
        has ``prompts``, ``gcnet`` and the frozen encoder; ``head`` is the linear layer.

    Examples
    --------
    >>> model = fedgc((1, 8, 8), 10, width=16)
    >>> [name for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2]
    ['features.prompts', 'features.gcnet.0.weight', 'features.gcnet.2.weight', 'head.weight']
    """
    number = count(prompts, "prompts of model 'fedgc'")
    rate = probability(dropout, "dropout of model 'fedgc'")
    small: dict[str, Any] = {
        "patch": patch,
        "width": width,
        "depth": depth,
        "heads": heads,
        "mlp_ratio": mlp_ratio,
    }
    tower = tokens_of(
        source, shape, fused=flag(fused, "fused of model 'fedgc'"), model="fedgc", **small
    )
    inside = 4 * tower.width if hidden is None else count(hidden, "hidden of model 'fedgc'")
    features = Customized(tower.encoder, number, tower.width, inside, rate)
    return Model(
        features, nn.Linear(tower.width, classes), stem=FirstPass(tower.stem, tower.encoder)
    )


class FirstPass(nn.Module):
    """Class tokens of the frozen first pass over images, followed by the tokens before the encoder.

    Parameters
    ----------
    tokens : Frozen
        Maps images to tokens, the class token first.
    encoder : Frozen
        Maps tokens to the class token.

    Examples
    --------
    >>> tower = tokens_of(None, (1, 8, 8), width=16)
    >>> FirstPass(tower.stem, tower.encoder)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 18, 16])
    """

    def __init__(self, tokens: Frozen, encoder: Frozen) -> None:
        super().__init__()
        self.tokens = tokens
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[samples, 1 + tokens, width]``."""
        tokens = self.tokens(x)
        return torch.cat([self.encoder(tokens).unsqueeze(1), tokens], 1)


class Customized(nn.Module):
    """A frozen encoder with learned prompts, which GC-Net shifts for every image.

    Parameters
    ----------
    encoder : Frozen
        Maps tokens to the class token.
    prompts : int
        Number of prompts.
    width : int
        Size of a token.
    hidden : int
        Width of GC-Net's hidden layer.
    dropout : float
        Probability of dropping a component of z.

    Examples
    --------
    >>> tower = tokens_of(None, (1, 8, 8), width=16)
    >>> Customized(tower.encoder, 3, tower.width, 64)(torch.zeros(5, 18, 16)).shape
    torch.Size([5, 16])
    """

    def __init__(
        self, encoder: Frozen, prompts: int, width: int, hidden: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.prompts = nn.Parameter(TOKEN_SPREAD * torch.randn(prompts, width))
        self.gcnet = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, encoded: Tensor) -> Tensor:
        """Return z for the output of :class:`FirstPass` for a batch of images."""
        encoded = encoded.to(self.prompts.dtype)
        first, tokens = encoded[:, 0], encoded[:, 1:]
        # [samples, 1, width] + [prompts, width]: h of an image is added to all of its prompts.
        prompts = self.gcnet(first).unsqueeze(1) + self.prompts
        z: Tensor = self.dropout(self.encoder(torch.cat([tokens, prompts], 1)))
        return z
