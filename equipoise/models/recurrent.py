"""Recurrent models of text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checks import count
from equipoise.errors import InputError
from equipoise.models.base import Model


def charlstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    vocabulary: int | None = None,
) -> Model:
    """Build a next-character model: an embedding, LSTM layers and one dense layer.

    It is the model of GIFAIR-FL (section 5.2) and LEAF. With the defaults and a vocabulary of 80
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
        Number of different characters in samples; the number of classes by default.

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
    return Model(nn.Sequential(Embedding(characters, size), recurrent), nn.Linear(width, classes))


class Embedding(nn.Module):
    """A vector for every character, looked up by a matrix product with a deterministic gradient.

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
    """LSTM layers as matrix products, so that clients can be stacked, unlike with ``nn.LSTM``.

    Parameters have the names, shapes and initial distribution they have in ``nn.LSTM``.

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
        """Return the last layer's output after the last step of ``[samples, steps, inputs]``."""
        steps = x.transpose(0, 1)
        for layer in range(self.layers):
            steps = self._outputs(steps, layer)
        return steps[-1]

    def _outputs(self, steps: Tensor, layer: int) -> Tensor:
        """Return one layer's output at every step of ``[steps, samples, inputs]``."""
        weight_ih, weight_hh, bias_ih, bias_hh = (
            getattr(self, f"{name}_l{layer}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        # What does not depend on the step before is one product for all steps; stacked clients make
        # it one per client only where it has no axis of steps.
        driven = nn.functional.linear(steps.flatten(0, 1), weight_ih, bias_ih + bias_hh).unflatten(
            0, steps.shape[:2]
        )
        if driven.is_cuda and driven.dtype == weight_hh.dtype:
            made = FusedRecurrence.apply(
                driven.unsqueeze(1), weight_hh.unsqueeze(0), torch.is_grad_enabled()
            )
            outputs: Tensor = made[0].squeeze(1)
            return outputs
        return recurrence(driven, weight_hh)


def recurrence(driven: Tensor, weight: Tensor) -> Tensor:
    """Compute the steps of an LSTM layer, starting from zeros.

    Parameters
    ----------
    driven : Tensor
        The contribution of the inputs to the four gates, ``[steps, ..., samples, 4 * hidden]``.
    weight : Tensor
        The weights of the previous output in the gates, ``[..., 4 * hidden, hidden]``.

    Returns
    -------
    Tensor
        The outputs of all steps, ``[steps, ..., samples, hidden]``.

    Examples
    --------
    >>> recurrence(torch.zeros(5, 3, 8), torch.zeros(8, 2)).shape
    torch.Size([5, 3, 2])
    """
    back = weight.transpose(-1, -2)
    output = cell = torch.zeros_like(driven[0][..., : weight.shape[-1]])
    outputs = []
    # One unbind, because its gradient is one stack.
    for drive in driven.unbind(0):
        enter, keep, new, leave = (drive + output @ back).chunk(4, dim=-1)
        cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
        output = leave.sigmoid() * cell.tanh()
        outputs.append(output)
    return torch.stack(outputs)


class FusedRecurrence(torch.autograd.Function):
    """:func:`recurrence` with PyTorch's own GPU kernel for a cell, which needs fewer kernels.

    Takes ``[steps, clients, samples, 4 * hidden]``, the weights ``[clients, 4 * hidden, hidden]``,
    and whether a gradient is needed. Returns the outputs, and for the gradient the cells and
    the open gates of every step.
    """

    @staticmethod
    def forward(driven: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the steps."""
        _, clients, samples, _ = driven.shape
        back = weight.transpose(1, 2)
        output = driven.new_zeros(clients, samples, weight.shape[-1])
        cell = output.flatten(0, 1)
        outputs, cells, gates = [], [cell], []
        # Stacked clients come with other strides; one copy now saves one per step.
        for drive in driven.contiguous().unbind(0):
            output, cell, gate = fused_cell(
                drive.flatten(0, 1), (output @ back).flatten(0, 1), cell
            )
            output = output.unflatten(0, (clients, samples))
            outputs.append(output)
            if keep:
                cells.append(cell)
                gates.append(gate)
        kept = [
            torch.stack(tensors).unflatten(1, (clients, samples))
            for tensors in (cells, gates or cells)
        ]
        return torch.stack(outputs), kept[0], kept[1]

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Save the tensors that the gradient needs."""
        outputs, cells, gates = output
        ctx.mark_non_differentiable(cells, gates)
        ctx.save_for_backward(*inputs[:2], outputs, cells, gates)

    @staticmethod
    def backward(ctx: Any, upper: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        """Compute the gradients from the last step to the first."""
        driven, weight, outputs, cells, gates = ctx.saved_tensors
        if torch.is_grad_enabled():
            # This gradient will be differentiated again, which the kernels do not support.
            return (*torch.func.vjp(recurrence, driven, weight)[1](upper), None)
        steps, clients, samples, _ = outputs.shape
        upper = upper.clone(memory_format=torch.contiguous_format)
        change = torch.zeros_like(gates[0])
        of_cell = torch.zeros_like(cells[0]).flatten(0, 1)
        changes = []
        for step in reversed(range(steps)):
            of_output = upper[step].baddbmm_(change, weight)
            before, cell, gate = (
                tensor.flatten(0, 1) for tensor in (cells[step], cells[step + 1], gates[step])
            )
            flat, of_cell = fused_cell_gradient(
                of_output.flatten(0, 1), of_cell, before, cell, gate
            )
            change = flat.unflatten(0, (clients, samples))
            changes.append(change)
        of_driven = torch.stack(changes[::-1])
        # The first step has no previous output, so it adds nothing to the weights' gradient.
        later, before = (
            tensor.transpose(0, 1).flatten(1, 2) for tensor in (of_driven[1:], outputs[:-1])
        )
        return of_driven, later.transpose(1, 2) @ before, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, int | None, None],
        driven: Tensor,
        weight: Tensor,
        keep: bool,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        """Merge the axis of stacked clients with the existing axis of clients."""
        merged = []
        for tensor, dim, axis in ((driven, in_dims[0], 1), (weight, in_dims[1], 0)):
            copies = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor
            merged.append(copies.movedim(dim or 0, axis).flatten(axis, axis + 1))
        made = FusedRecurrence.apply(*merged, keep)
        outputs, cells, gates = (tensor.unflatten(1, (info.batch_size, -1)) for tensor in made)
        return (outputs, cells, gates), (1, 1, 1)


def fused_cell(drive: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one step of an LSTM on a GPU: output, cell and open gates, in rows of samples."""
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._thnn_fused_lstm_cell(
        drive, recurrent, cell
    )
    return made


def fused_cell_gradient(
    of_output: Tensor, of_cell: Tensor, before: Tensor, cell: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of that step for the input of its gates and for the previous cell."""
    made = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(
        of_output, of_cell, before, cell, gate, False
    )
    return made[0], made[1]
