"""Recurrent models of text."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import count
from equipoise.errors import InputError
from equipoise.models.base import Model
from equipoise.models.frozen import transforms
from equipoise.models.kernel_modules import module_with_triton
from equipoise.samples import Samples, blocks

_FEWEST_UNITS_ALONE = 32


def charlstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    vocabulary: int | None = None,
) -> Model:
    """Build a next-character model: an embedding, LSTM layers, one dense layer.

    It is that of GIFAIR-FL, section 5.2, and of LEAF. With the defaults and a vocabulary of 80
    characters it has 819,920 parameters.

    Parameters
    ----------
    shape : tuple of int
        The number of characters in a sample, such as ``(80,)``.
    classes : int
        Number of classes: the characters that may come next.
    embedding : int
        Size of the vector of a character.
    hidden : int
        Width of every LSTM layer.
    layers : int
        Number of LSTM layers.
    vocabulary : int, optional
        Number of different characters in samples; the number of classes by default. Samples are
        whole numbers from 0 to ``vocabulary - 1``; others are refused before training.

    Returns
    -------
    Model
        ``features`` ends with the output of the last LSTM layer at the last character; ``head`` is
        the dense layer.

    Examples
    --------
    >>> charlstm((80,), 80).head
    Linear(in_features=256, out_features=80, bias=True)
    """
    if len(shape) != 1:
        raise InputError(
            f"model 'charlstm' needs samples that are sequences of characters, got shape {shape}"
        )
    width = count(hidden, "hidden of model 'charlstm'")
    size = count(embedding, "embedding of model 'charlstm'")
    characters = (
        classes if vocabulary is None else count(vocabulary, "vocabulary of model 'charlstm'")
    )
    recurrent = Lstm(size, width, count(layers, "layers of model 'charlstm'"))
    features = nn.Sequential(Embedding(characters, size), recurrent)
    return NextCharacter(features, nn.Linear(width, classes), characters)


class NextCharacter(Model):
    """A model whose samples are characters, as positions in a vocabulary.

    Parameters
    ----------
    features, head : nn.Module
        See :class:`~equipoise.models.base.Model`.
    vocabulary : int
        Number of different characters.

    Examples
    --------
    >>> charlstm((20,), 80).check_samples(torch.full((5, 20), 79))
    """

    def __init__(self, features: nn.Module, head: nn.Module, vocabulary: int) -> None:
        super().__init__(features, head)
        self.vocabulary = vocabulary

    def check_samples(self, x: Tensor | Samples) -> None:
        """Refuse samples that are not positions in the vocabulary: their vectors would be zeros."""
        if x.dtype.is_floating_point:
            raise InputError(
                "model 'charlstm' needs samples of whole numbers, the positions of characters in "
                f"its vocabulary, but x holds {str(x.dtype).removeprefix('torch.')}"
            )
        found = [block.aminmax() for _, block in blocks(x)]
        least, most = int(min(each.min for each in found)), int(max(each.max for each in found))
        if least < 0 or most >= self.vocabulary:
            larger = f", or model.vocabulary: {most + 1}" if least >= 0 else ""
            raise InputError(
                f"vocabulary of model 'charlstm' is {self.vocabulary} (by default the number of "
                f"classes), but x holds numbers from {least} to {most}; valid: numbers from 0 to "
                f"{self.vocabulary - 1}{larger}"
            )


class Embedding(nn.Module):
    """A vector for every character, looked up by a matrix product.

    Its gradient is the same on every run.

    Parameters
    ----------
    characters : int
        Number of different characters.
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
        """Look up integers of any shape; the vectors are along a new last axis."""
        chosen = x.flatten().unsqueeze(-1) == torch.arange(self.weight.shape[0], device=x.device)
        return (chosen.to(self.weight.dtype) @ self.weight).unflatten(0, x.shape)


class Lstm(nn.Module):
    """LSTM layers made of matrix products, so that clients can be stacked.

    ``nn.LSTM`` has no rule for that. Parameters have the names, shapes and initial distribution
    of ``nn.LSTM``. A single client on a CPU uses PyTorch's own loop, which is faster.

    Parameters
    ----------
    inputs : int
        Size of one step of the sequence.
    hidden : int
        Width of every layer.
    layers : int
        Number of layers.

    Examples
    --------
    >>> layer = Lstm(8, 16, layers=2)
    >>> _ = layer.load_state_dict(nn.LSTM(8, 16, num_layers=2).state_dict())
    >>> layer(torch.zeros(5, 20, 8)).shape
    torch.Size([5, 16])
    """

    def __init__(self, inputs: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
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

    @property
    def faster_alone(self) -> bool:
        """Whether a CPU trains clients faster one by one than stacked."""
        return alone_is_faster(self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Read ``[samples, steps, inputs]``; return the last layer's output after the last step."""
        if is_alone_on_cpu(x):
            weights = [tensor for layer in range(self.layers) for tensor in self._weights(layer)]
            start = x.new_zeros(self.layers, len(x), self.hidden)
            settings = (True, self.layers, 0.0, False, False, True)
            outputs: Tensor = torch.lstm(x, (start, start), weights, *settings)[0]
            return outputs[:, -1]
        steps = x.transpose(0, 1)
        for layer in range(self.layers):
            steps = self._outputs(steps, layer)
        return steps[-1]

    def _weights(self, layer: int) -> list[Tensor]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [getattr(self, f"{name}_l{layer}") for name in names]

    def _outputs(self, steps: Tensor, layer: int) -> Tensor:
        """Return one layer's output at every step of ``[steps, samples, inputs]``."""
        weight_ih, weight_hh, bias_ih, bias_hh = self._weights(layer)
        # What does not depend on the step before is one product for all steps; stacked clients make
        # it one per client only where it has no axis of steps.
        driven = F.linear(steps.flatten(0, 1), weight_ih, bias_ih + bias_hh)
        driven = driven.unflatten(0, steps.shape[:2])
        start = driven.new_zeros(steps.shape[1], weight_hh.shape[1])
        return steps_of_layer(driven, weight_hh, start, start)[0]


def is_alone_on_cpu(x: Tensor) -> bool:
    """Return whether a layer can use PyTorch's own loop: a single client on a CPU.

    Examples
    --------
    >>> is_alone_on_cpu(torch.zeros(2))
    True
    """
    return x.device.type == "cpu" and not transforms()


def alone_is_faster(hidden: int) -> bool:
    """Return whether a CPU trains the LSTM layers of clients faster one by one than stacked.

    Parameters
    ----------
    hidden : int
        Width of the layers.

    Returns
    -------
    bool
        Whether oneDNN, which PyTorch uses for a single LSTM in float32, takes less time than
        stacked products do. On one core, with sequences of 20 to 80 steps, it needs 0.3 to 0.7 of
        the time with a width of 64. Layers narrower than 32 gain less than the steps of single
        clients cost.

    Examples
    --------
    >>> alone_is_faster(8)
    False
    """
    return hidden >= _FEWEST_UNITS_ALONE and torch.backends.mkldnn.is_available()


def steps_of_layer(
    driven: Tensor, weight: Tensor, output: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Go through the steps of one client's LSTM layer, on a GPU with kernels of our own.

    Parameters
    ----------
    driven : Tensor
        What the inputs add to the four gates, ``[steps, samples, 4 * hidden]``.
    weight : Tensor
        How the gates depend on the output of the step before, ``[4 * hidden, hidden]``.
    output, cell : Tensor
        Output and cell before the first step, ``[samples, hidden]``.

    Returns
    -------
    tuple of Tensor
        The outputs of all steps, ``[steps, samples, hidden]``, and the last cell.

    Examples
    --------
    >>> start = torch.zeros(3, 2)
    >>> outputs, cell = steps_of_layer(torch.zeros(5, 3, 8), torch.zeros(8, 2), start, start)
    >>> outputs.shape, cell.shape
    (torch.Size([5, 3, 2]), torch.Size([3, 2]))
    """
    kernels = lstm_kernels(driven)
    if kernels is None:
        return recurrence(driven, weight, output, cell)
    # Autocast lowers the product that made ``driven``, and so the one inside the kernel.
    given = (driven, *(tensor.to(driven.dtype) for tensor in (weight, output, cell)))
    made = kernels.StackedRecurrence.apply(
        *(tensor.unsqueeze(0) for tensor in given), torch.is_grad_enabled()
    )
    return made[0].squeeze(0), made[1].squeeze(0)


def lstm_kernels(driven: Tensor) -> Any:
    """Return the module of GPU kernels if they can be used for a tensor, else ``None``."""
    if not driven.is_cuda or driven.dtype == torch.float64:
        return None
    return module_with_triton("lstm_kernels", driven.device)


def recurrence(
    driven: Tensor, weight: Tensor, output: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Go through the steps of an LSTM layer in plain operations.

    Parameters
    ----------
    driven : Tensor
        What the inputs add to the four gates, ``[steps, ..., samples, 4 * hidden]``.
    weight : Tensor
        How the gates depend on the output of the step before, ``[..., 4 * hidden, hidden]``.
    output, cell : Tensor
        Output and cell before the first step, ``[..., samples, hidden]``.

    Returns
    -------
    tuple of Tensor
        The outputs of all steps, ``[steps, ..., samples, hidden]``, and the last cell.

    Examples
    --------
    >>> start = torch.zeros(3, 2)
    >>> recurrence(torch.zeros(5, 3, 8), torch.zeros(8, 2), start, start)[0].shape
    torch.Size([5, 3, 2])
    """
    back = weight.transpose(-1, -2)
    outputs = []
    # One unbind, because its gradient is one stack.
    for drive in driven.unbind(0):
        enter, keep, new, leave = (drive + output @ back).chunk(4, dim=-1)
        cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
        output = leave.sigmoid() * cell.tanh()
        outputs.append(output)
    return torch.stack(outputs), cell
