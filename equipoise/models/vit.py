"""Vision transformers: a small one to train, and frozen ones with learned prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import count, flag, image, probability
from equipoise.errors import InputError
from equipoise.models.attention import Block
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen, plain_attention
from equipoise.models.linear_layers import Linear
from equipoise.models.norm_layers import LayerNorm

# Standard deviation of the initial tokens and positions (Dosovitskiy et al., 2021).
TOKEN_SPREAD = 0.02


def vit(
    shape: tuple[int, ...],
    classes: int,
    *,
    patch: int = 2,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    mlp_ratio: float = 2.0,
    dropout: float = 0.0,
) -> Model:
    """Build a small vision transformer with class token and learned positions.

    The architecture is that of Dosovitskiy et al. (2021).

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image. The patch must divide height and width.
    classes : int
        Number of classes, or of outputs in regression.
    patch : int
        Height and width of a patch.
    width : int
        Size of a token.
    depth : int
        Number of transformer blocks.
    heads : int
        Heads of the attention, a divisor of ``width``.
    mlp_ratio : float
        Width of the hidden layers of the blocks, as a multiple of ``width``.
    dropout : float
        Probability of dropping a unit after each attention and each MLP.

    Returns
    -------
    Model
        ``features`` ends with the class token after the last normalisation; ``head`` is the linear
        layer.

    Examples
    --------
    >>> vit((1, 8, 8), 10).head
    Linear(in_features=64, out_features=10, bias=True)
    """
    tokens, encoder = _small(shape, "vit", patch, width, depth, heads, mlp_ratio, dropout)
    return Model(ClassToken(tokens, encoder), nn.Linear(width, classes))


def vitprompts(
    shape: tuple[int, ...],
    classes: int,
    *,
    source: str | None = None,
    prompts: int = 4,
    fused: bool = True,
    patch: int = 2,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    mlp_ratio: float = 2.0,
) -> Model:
    """Build a frozen vision transformer with learned prompts and a head.

    This is shallow prompt tuning (Jia et al., 2022). Prompts are tokens after those of the image,
    ``[class token, patches, prompts]``, and have no positions. Only the prompts and the head are
    trained.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image.
    classes : int
        Number of classes, or of outputs in regression.
    source : str, optional
        A pretrained ViT, DINOv2 or CLIP: a directory, or a name on the Hugging Face hub. By default
        the transformer is that of model ``vit``, with random weights drawn from the seed.
    prompts : int
        Number of prompts.
    fused : bool
        Whether to use fused attention, which is faster and needs less memory.
    patch, width, depth, heads, mlp_ratio
        The transformer, as in model ``vit``; only without a source.

    Returns
    -------
    Model
        ``stem`` maps an image to tokens; ``features`` has the prompts and the frozen encoder and
        ends with the class token; ``head`` is the linear layer.

    Examples
    --------
    >>> model = vitprompts((1, 8, 8), 10)
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['features.prompts', 'head.weight', 'head.bias']
    """
    number = count(prompts, "prompts of model 'vitprompts'")
    small: dict[str, Any] = {
        "patch": patch,
        "width": width,
        "depth": depth,
        "heads": heads,
        "mlp_ratio": mlp_ratio,
    }
    tower = tokens_of(source, shape, fused=flag(fused, "fused of model 'vitprompts'"), **small)
    return Model(
        Prompted(tower.encoder, number, tower.width),
        nn.Linear(tower.width, classes),
        stem=tower.stem,
    )


class Tower(NamedTuple):
    """A frozen vision transformer in two parts.

    Attributes
    ----------
    stem : Frozen
        Maps images to tokens ``[samples, 1 + patches, width]``, the class token first.
    encoder : Frozen
        Maps any number of tokens to the class token ``[samples, width]``.
    width : int
        Size of a token.
    """

    stem: Frozen
    encoder: Frozen
    width: int


SMALL: Mapping[str, Any] = {"patch": 2, "width": 64, "depth": 2, "heads": 4, "mlp_ratio": 2.0}
"""Default options of the transformer of model ``vit``."""


def tokens_of(
    source: str | None,
    shape: tuple[int, ...],
    *,
    model: str = "vitprompts",
    fused: bool = True,
    **small: Any,
) -> Tower:
    """Return a frozen vision transformer in two parts, so that tokens can be changed in between.

    Parameters
    ----------
    source : str or None
        As in :func:`vitprompts`.
    shape : tuple of int
        Channels, height and width of one image.
    model : str
        Name of the model, for messages.
    fused : bool
        Whether to use fused attention.
    **small
        The transformer, as in model ``vit``; only without a source.

    Returns
    -------
    Tower
        Stem, encoder and width.

    Examples
    --------
    >>> tower = tokens_of(None, (1, 8, 8), width=16)
    >>> tower.encoder(tower.stem(torch.zeros(5, 1, 8, 8))).shape
    torch.Size([5, 16])
    """
    options = {**SMALL, **small}
    if source is None:
        tokens, encoder = _small(shape, model, **options, fused=fused)
        return Tower(Frozen(tokens), Frozen(encoder), options["width"])
    refuse_beside(source, options, model)
    # Only pretrained models need transformers.
    from equipoise.models.pretrained import transformer

    whole = transformer(source, shape, model=model, fused=fused)
    return Tower(Frozen(whole.tokens), Frozen(whole.encoder), whole.tokens.width)


def refuse_beside(source: str, small: Mapping[str, Any], model: str) -> None:
    """Refuse options of a small transformer if a source is given and they are not the defaults.

    Examples
    --------
    >>> refuse_beside("clip", {"depth": 3}, "vitprompts")
    Traceback (most recent call last):
    equipoise.errors.InputError: depth=3 of model 'vitprompts' cannot be set together with
    source='clip', which determines the architecture; valid: one of the two
    """
    if changed := [name for name, value in small.items() if value != SMALL[name]]:
        raise InputError(
            f"{changed[0]}={small[changed[0]]} of model {model!r} cannot be set together with "
            f"source={source!r}, which determines the architecture; valid: one of the two"
        )


def _small(
    shape: tuple[int, ...],
    model: str,
    patch: int,
    width: int,
    depth: int,
    heads: int,
    mlp_ratio: float,
    dropout: float = 0.0,
    fused: bool = False,
) -> tuple[Tokens, Encoder]:
    """Create the two parts of a small vision transformer, with initial parameters."""
    side = count(patch, f"patch of model {model!r}")
    channels, height, across = image(shape, model, smallest=side)
    if height % side or across % side:
        raise InputError(
            f"patch={side} of model {model!r} does not divide images of {height} x {across}"
        )
    if count(width, f"width of model {model!r}") % count(heads, f"heads of model {model!r}"):
        raise InputError(f"heads={heads} of model {model!r} do not divide width={width}")
    if isinstance(mlp_ratio, bool) or not isinstance(mlp_ratio, int | float) or not mlp_ratio > 0:
        raise InputError(
            f"mlp_ratio of model {model!r} must be a number above 0, got {mlp_ratio!r}"
        )
    rate = probability(dropout, f"dropout of model {model!r}")
    layers = range(count(depth, f"depth of model {model!r}"))
    grid = (height // side, across // side)
    tokens = Tokens(
        nn.Linear(channels * side * side, width),
        (side, side),
        class_token=TOKEN_SPREAD * torch.randn(width),
        positions=TOKEN_SPREAD * torch.randn(1 + grid[0] * grid[1], width),
        grid=grid,
    )
    blocks = [Block(width, heads, mlp_ratio=mlp_ratio, dropout=rate, fused=fused) for _ in layers]
    encoder = Encoder(blocks, LayerNorm(nn.LayerNorm(width)))
    for layer in (*tokens.modules(), *encoder.modules()):
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return tokens, encoder


class Tokens(nn.Module):
    """A layer that maps images to tokens: a class token, then linear maps of patches.

    Positions are added to all tokens. Patches are cut by reshaping and not by a convolution, so
    that stacked clients use one matrix product each. If the patch size does not divide the image
    size, the remaining pixels at the right and at the bottom are ignored.

    Parameters
    ----------
    project : nn.Linear
        Maps the pixels of a patch, ordered by channel, row and column, to a token.
    patch : tuple of int
        Height and width of a patch.
    class_token : Tensor
        ``[width]``.
    positions : Tensor
        For the class token and the patches row by row, ``[1 + patches, width]``.
    grid : tuple of int
        Number of rows and columns of patches in the images that the positions are for.
    prepare : nn.Module, optional
        Applied to images first.
    norm : nn.Module, optional
        Applied to tokens last.
    any_size : bool
        Whether to accept images of other sizes, and interpolate the positions in every call. See
        also :meth:`fit`.

    Examples
    --------
    >>> tokens = Tokens(nn.Linear(4, 3), (2, 2), torch.zeros(3), torch.zeros(5, 3), (2, 2))
    >>> tokens(torch.zeros(6, 1, 4, 4)).shape
    torch.Size([6, 5, 3])
    """

    def __init__(
        self,
        project: nn.Linear,
        patch: tuple[int, int],
        class_token: Tensor,
        positions: Tensor,
        grid: tuple[int, int],
        *,
        prepare: nn.Module | None = None,
        norm: nn.Module | None = None,
        any_size: bool = False,
    ) -> None:
        super().__init__()
        self.prepare = prepare or nn.Identity()
        self.project = Linear(project)
        self.class_token = nn.Parameter(class_token)
        self.positions = nn.Parameter(positions)
        self.norm = norm or nn.Identity()
        self.patch, self.grid, self.any_size = patch, grid, any_size

    @property
    def width(self) -> int:
        """Size of a token."""
        return self.project.out_features

    def fit(self, height: int, width: int) -> None:
        """Interpolate the positions for images of one size, once.

        Examples
        --------
        >>> tokens = Tokens(nn.Linear(4, 3), (2, 2), torch.zeros(3), torch.zeros(5, 3), (2, 2))
        >>> tokens.fit(8, 4)
        >>> tokens(torch.zeros(6, 1, 8, 4)).shape
        torch.Size([6, 9, 3])
        """
        grid = height // self.patch[0], width // self.patch[1]
        with torch.no_grad():
            self.positions = nn.Parameter(self._positions_on(grid).clone())
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of images ``[samples, channels, height, width]``."""
        (down, across), (rows, columns) = self.patch, self._grid_of(x)
        positions = self._positions_on((rows, columns))
        pixels = self.prepare(x)[..., : rows * down, : columns * across]
        if pixels.is_floating_point():
            pixels = pixels.to(self.class_token.dtype)
        # [samples, channels, rows, down, columns, across] -> [samples, rows * columns, channels *
        # down * across]
        patches = pixels.unflatten(-1, (columns, across)).unflatten(-3, (rows, down))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), 1, -1), self.project(patches)], 1)
        made: Tensor = self.norm(tokens + positions)
        return made

    def _grid_of(self, x: Tensor) -> tuple[int, int]:
        grid = x.shape[-2] // self.patch[0], x.shape[-1] // self.patch[1]
        if grid != self.grid and not self.any_size:
            down, across = (n * p for n, p in zip(self.grid, self.patch, strict=True))
            raise InputError(
                f"the model was built for images of {down} x {across} pixels, got {x.shape[-2]} x "
                f"{x.shape[-1]}"
            )
        return grid

    def _positions_on(self, grid: tuple[int, int]) -> Tensor:
        """Return the positions for another grid of patches, by bicubic interpolation."""
        if grid == self.grid:
            return self.positions
        square = self.positions[1:].unflatten(0, self.grid).permute(2, 0, 1).unsqueeze(0)
        fitted = F.interpolate(square, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([self.positions[:1], fitted[0].flatten(1).T])


class Encoder(nn.Module):
    """Transformer blocks, then a normalisation of the class token.

    Parameters
    ----------
    blocks : sequence of nn.Module
        Each maps tokens ``[samples, tokens, width]`` to tokens of the same shape. If the last one
        is a :class:`~equipoise.models.attention.Block`, it computes only the class token.
    norm : nn.Module
        Applied last.
    fused : bool
        Whether blocks that call ``scaled_dot_product_attention`` may use fused kernels.

    Examples
    --------
    >>> Encoder([Block(8, 2)], nn.Identity())(torch.zeros(5, 3, 8)).shape
    torch.Size([5, 8])
    """

    def __init__(self, blocks: Sequence[nn.Module], norm: nn.Module, *, fused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.fused = fused

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the class token ``[samples, width]``, the first of the tokens after the blocks."""
        *blocks, last = self.blocks
        with nullcontext() if self.fused else plain_attention():
            for block in blocks:
                tokens = block(tokens)
            tokens = last(tokens, class_only=True) if isinstance(last, Block) else last(tokens)
            made: Tensor = self.norm(tokens[:, 0])
        return made


class ClassToken(nn.Module):
    """A vision transformer that maps an image to its class token.

    Parameters
    ----------
    tokens : Tokens
        Maps images to tokens.
    encoder : Encoder
        Maps tokens to the class token.
    projection : nn.Module, optional
        Applied to the class token.

    Examples
    --------
    >>> tokens = Tokens(nn.Linear(4, 8), (2, 2), torch.zeros(8), torch.zeros(5, 8), (2, 2))
    >>> ClassToken(tokens, Encoder([Block(8, 2)], nn.Identity()))(torch.zeros(6, 1, 4, 4)).shape
    torch.Size([6, 8])
    """

    def __init__(
        self, tokens: Tokens, encoder: Encoder, projection: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.encoder = encoder
        self.projection = projection or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the class tokens of a batch of images."""
        made: Tensor = self.projection(self.encoder(self.tokens(x)))
        return made


class Prompted(nn.Module):
    """A frozen encoder with learned prompts after its input tokens.

    Parameters
    ----------
    encoder : Frozen
        Maps tokens to the class token.
    prompts : int
        Number of prompts, drawn from N(0, 0.02²).
    width : int
        Size of a token.

    Examples
    --------
    >>> tower = tokens_of(None, (1, 8, 8), width=16)
    >>> Prompted(tower.encoder, 3, tower.width)(torch.zeros(5, 17, 16)).shape
    torch.Size([5, 16])
    """

    def __init__(self, encoder: Frozen, prompts: int, width: int) -> None:
        super().__init__()
        self.prompts = nn.Parameter(TOKEN_SPREAD * torch.randn(prompts, width))
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the class tokens for tokens ``[samples, tokens, width]``, class token first."""
        prompts = self.prompts.expand(len(tokens), -1, -1)
        made: Tensor = self.encoder(torch.cat([tokens.to(prompts.dtype), prompts], 1))
        return made
