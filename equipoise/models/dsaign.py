"""DSA-IGN (Guo et al., 2024): split embeddings into what the label explains and the rest."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import count, probability
from equipoise.errors import InputError, RunError, unknown
from equipoise.models.attention import Attention
from equipoise.models.base import Model
from equipoise.models.layers import LayerNorm, Linear

PROJECTIONS = ("matrix", "linear", "mlp")
_TOKEN = 32


def dsaign(
    shape: tuple[int, ...],
    classes: int,
    *,
    labels: str | None = None,
    projection: str = "matrix",
    depth: int = 3,
    heads: int = 8,
    feedforward: int = 2048,
    dropout: float = 0.0,
) -> Model:
    """Build the network that makes client indices of embeddings.

    See section 3.2 and appendix D.2 of Client2Vec.

    An embedding D is doubled to [D, D], cut into tokens of 32 numbers, passed through a transformer
    encoder, and put together again to [z, u]: what the label explains, and the feature index of the
    sample. A projection of [z, u] reconstructs D.

    The paper leaves open: dropout (here none), and how label vectors are scaled (only their
    directions count).

    Parameters
    ----------
    shape : tuple of int
        The shape of one embedding. Its size must be a multiple of 16.
    classes : int
        Number of classes.
    labels : str, optional
        A safetensors file with the tensor ``labels``, ``[classes, width]``: the embedding of a text
        for each class. Without it, label vectors are drawn from a normal distribution.
    projection : {"matrix", "linear", "mlp"}
        What reconstructs D: a matrix, a linear layer with a bias, or two layers (figure 8).
    depth : int
        How many layers the transformer encoder has.
    heads : int
        Heads of its attention, a divisor of 32.
    feedforward : int
        Width of its hidden layers.
    dropout : float
        Probability of dropping a unit after attention and hidden layers.

    Returns
    -------
    Model
        ``features`` returns [z, u]; ``head`` the cosines of z with the label vectors, which are
        frozen; the part ``reconstruction`` is the projection.

    Examples
    --------
    >>> model = dsaign((64,), 10, feedforward=16)
    >>> model.features(torch.zeros(5, 64)).shape, model(torch.zeros(5, 64)).shape
    (torch.Size([5, 128]), torch.Size([5, 10]))
    """
    width = torch.Size(shape).numel()
    if 2 * width % _TOKEN:
        raise InputError(
            f"model 'dsaign' cuts embeddings into tokens of {_TOKEN} numbers, but one of shape {tuple(shape)} has {width} "
            f"numbers; valid: a multiple of {_TOKEN // 2}"
        )
    if projection not in PROJECTIONS:
        raise unknown("projection", projection, PROJECTIONS, where="model 'dsaign'")
    hidden = count(feedforward, "feedforward of model 'dsaign'")
    rate = probability(dropout, "dropout of model 'dsaign'")
    layers = [EncoderLayer(_TOKEN, heads, hidden, rate) for _ in range(count(depth, "depth of model 'dsaign'"))]
    vectors = torch.randn(classes, width) if labels is None else _label_vectors(labels, classes, width)
    model = Model(Decomposition(layers), LabelCosines(vectors))
    model.add_module("reconstruction", _reconstruction(projection, width))
    return model


def _reconstruction(projection: str, width: int) -> nn.Module:
    if projection == "mlp":
        return nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
    return nn.Linear(2 * width, width, bias=projection == "linear")


def _label_vectors(path: str, classes: int, width: int) -> Tensor:
    # Only models of this kind with a file need it.
    from equipoise.run.files import load_tensors

    try:
        found = load_tensors(Path(path))[0].get("labels")
    except RunError as error:
        raise InputError(f"labels of model 'dsaign': {error}") from error
    if found is None or tuple(found.shape) != (classes, width):
        shape = None if found is None else tuple(found.shape)
        raise InputError(
            f"labels of model 'dsaign': {path} must have a tensor 'labels' of shape {(classes, width)}, got {shape}"
        )
    return found.float()


class EncoderLayer(nn.Module):
    """A layer of the original transformer encoder (Vaswani et al., 2017).

    Sums are normalised after they are taken, and the activation is ReLU.

    Parameters
    ----------
    width : int
        Numbers in a token.
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
        Map tokens ``[samples, tokens, 32]`` to such tokens.

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
    """The cosines of z, the first half of [z, u], with label vectors that are never trained.

    Parameters
    ----------
    vectors : Tensor
        ``[classes, width]``.

    Examples
    --------
    >>> LabelCosines(torch.eye(2))(torch.tensor([[3.0, 4.0, 9.0, 9.0]]))
    tensor([[0.6000, 0.8000]])
    """

    vectors: Tensor

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, split: Tensor) -> Tensor:
        """Return one number in [−1, 1] for each class."""
        z = split[:, : split.shape[1] // 2]
        return F.normalize(z, dim=1) @ F.normalize(self.vectors, dim=1).T
