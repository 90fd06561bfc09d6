"""Recurrent models of text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.models.base import Model
from equipoise.models.checks import count


def charlstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    vocabulary: int | None = None,
) -> Model:
    """Build a next-character model: an embedding, LSTM layers, one dense layer (GIFAIR-FL, section 5.2; LEAF).

    With the defaults and a vocabulary of 80 characters that is 819,920 parameters.

    Parameters
    ----------
    shape : tuple of int
        The number of characters in a sample, such as ``(80,)``.
    classes : int
        Number of classes: the characters that may come next.
    embedding : int
        Numbers that stand for a character.
    hidden : int
        Width of every LSTM layer.
    layers : int
        How many LSTM layers.
    vocabulary : int, optional
        How many characters there are in samples; as many as classes by default.

    Returns
    -------
    Model
        ``features`` ends with what the last LSTM layer puts out at the last character; ``head`` is the dense layer.

    Examples
    --------
    >>> charlstm((80,), 80).head
    Linear(in_features=256, out_features=80, bias=True)
    """
    if len(shape) != 1:
        raise InputError(f"model 'charlstm' needs samples that are sequences of characters, got shape {shape}")
    width = count(hidden, "hidden of model 'charlstm'")
    size = count(embedding, "embedding of model 'charlstm'")
    characters = classes if vocabulary is None else count(vocabulary, "vocabulary of model 'charlstm'")
    recurrent = Lstm(size, width, count(layers, "layers of model 'charlstm'"))
    return Model(nn.Sequential(Embedding(characters, size), recurrent), nn.Linear(width, classes))


class Embedding(nn.Module):
    """A vector for every character, looked up by a matrix product: its gradient is the same on every run.

    Parameters
    ----------
    characters : int
        How many characters there are.
    size : int
        Length of the vectors.

    Examples
    --------
    >>> Embedding(80, 8)(torch.zeros(5, 20, dtype=torch.int64)).shape
    torch.Size([5, 20, 8])
    """

    def __init__(self, characters: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(characters, size))

    def forward(self, x: Tensor) -> Tensor:
        """Look up whole numbers of any shape; the vectors are along a new last axis."""
        chosen = x.unsqueeze(-1) == torch.arange(self.weight.shape[0], device=x.device)
        return chosen.to(self.weight.dtype) @ self.weight


class Lstm(nn.Module):
    """LSTM layers made of matrix products, so that clients can be stacked; ``nn.LSTM`` has no rule for that.

    Parameters have the names, shapes and initial distribution they have in ``nn.LSTM``.

    Parameters
    ----------
    inputs : int
        Numbers in one step of the sequence.
    hidden : int
        Width of every layer.
    layers : int
        How many layers.

    Examples
    --------
    >>> layer = Lstm(8, 16, layers=2)
    >>> _ = layer.load_state_dict(nn.LSTM(8, 16, num_layers=2).state_dict())
    >>> layer(torch.zeros(5, 20, 8)).shape
    torch.Size([5, 16])
    """

    def __init__(self, inputs: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.layers = layers
        bound = hidden**-0.5
        for layer in range(layers):
            shapes = {
                "weight_ih": (4 * hidden, hidden if layer else inputs),
                "weight_hh": (4 * hidden, hidden),
                "bias_ih": (4 * hidden,),
                "bias_hh": (4 * hidden,),
            }
            for name, shape in shapes.items():
                drawn = torch.empty(shape).uniform_(-bound, bound)
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(drawn))

    def forward(self, x: Tensor) -> Tensor:
        """Read sequences ``[samples, steps, inputs]`` and give the last layer's output after the last step."""
        steps = x.transpose(0, 1)
        for layer in range(self.layers - 1):
            steps = torch.stack(self._outputs(steps, layer))
        return self._outputs(steps, self.layers - 1)[-1]

    def _outputs(self, steps: Tensor, layer: int) -> list[Tensor]:
        """Give one layer's output at every step of ``[steps, samples, inputs]``."""
        weight_ih, weight_hh, bias_ih, bias_hh = (
            getattr(self, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        # What does not depend on the step before is one product for all steps; unbind's gradient is one stack.
        driven = (steps @ weight_ih.T + (bias_ih + bias_hh)).unbind(0)
        back = weight_hh.T
        output = cell = torch.zeros_like(driven[0][..., : weight_hh.shape[-1]])
        outputs = []
        for drive in driven:
            enter, keep, new, leave = (drive + output @ back).chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
            output = leave.sigmoid() * cell.tanh()
            outputs.append(output)
        return outputs
