"""Recurrent layers of PyTorch as matrix products, so that clients can be stacked."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from equipoise.errors import InputError
from equipoise.models.dropout import dropped
from equipoise.models.passes import current_pass, next_key
from equipoise.models.recurrent import alone_is_faster, is_alone_on_cpu, steps_of_layer
from equipoise.models.replacing import has_hooks

_ACTIVATIONS = {"RNN_TANH": torch.tanh, "RNN_RELU": torch.relu}


class Recurrent(nn.Module):
    """An ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` made of matrix products.

    Those of PyTorch cannot be stacked. Parameters have the same names. Dropout between layers is a
    hash of client, phase, step and layer, as in :class:`~equipoise.models.dropout.Dropout`. A
    single client on a CPU uses PyTorch's own loop, which is faster.

    Parameters
    ----------
    layer : nn.LSTM, nn.GRU or nn.RNN
        The layer to replace.
    number : int
        The number of the layer among those with dropout.

    Examples
    --------
    >>> gru = nn.GRU(3, 5, num_layers=2, batch_first=True)
    >>> outputs, last = Recurrent(gru, 1)(torch.zeros(4, 7, 3))
    >>> outputs.shape, last.shape
    (torch.Size([4, 7, 5]), torch.Size([2, 4, 5]))
    """

    def __init__(self, layer: nn.RNNBase, number: int) -> None:
        super().__init__()
        self.mode, self.bias, self.batch_first = layer.mode, layer.bias, layer.batch_first
        self.input_size, self.hidden_size, self.proj_size = (
            layer.input_size,
            layer.hidden_size,
            layer.proj_size,
        )
        self.num_layers, self.dropout, self.bidirectional = (
            layer.num_layers,
            layer.dropout,
            layer.bidirectional,
        )
        self._parameters.update(layer._parameters)
        self.number = number
        # Set by the engine: dropout is off in a part that is not trained in this phase.
        self.moves = True

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is one of PyTorch's own."""
        return type(layer) in (nn.LSTM, nn.GRU, nn.RNN) and not has_hooks(layer)

    def extra_repr(self) -> str:
        """Return the kind of the layer and its sizes."""
        return f"{self.mode}, {self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"

    @property
    def faster_alone(self) -> bool:
        """Whether a CPU trains clients faster one by one than stacked.

        oneDNN computes LSTM layers without projection. PyTorch's loops of other layers are slower
        than stacked products.
        """
        return self.mode == "LSTM" and not self.proj_size and alone_is_faster(self.hidden_size)

    def flatten_parameters(self) -> None:
        """Do nothing. Models call this method of PyTorch's layers, which arranges memory."""

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs of the last layer, and the last states of all layers.

        Parameters
        ----------
        input : Tensor
            ``[samples, steps, inputs]`` with ``batch_first``, otherwise ``[steps, samples,
            inputs]``.
        hx : Tensor or tuple of Tensor, optional
            The initial states, as in PyTorch's layers.
        """
        if isinstance(input, PackedSequence):
            raise InputError(
                "a recurrent layer is called with a packed sequence, whose lengths differ between "
                "clients; pass the padded sequences, and take the outputs that count with "
                "torch.gather"
            )
        if input.dim() != 3:
            raise InputError(
                f"a recurrent layer is called with a tensor of shape {tuple(input.shape)}; valid: "
                "a batch of sequences, with three dimensions"
            )
        steps = input.transpose(0, 1) if self.batch_first else input
        states, rate = self._first_states(steps, hx), self._rate()
        run = self._by_pytorch if is_alone_on_cpu(input) else self._by_products
        outputs, ends = run(steps, states, rate)
        outputs = outputs.transpose(0, 1) if self.batch_first else outputs
        return outputs, ends if self.mode == "LSTM" else ends[0]

    def _by_pytorch(
        self, steps: Tensor, states: tuple[Tensor, ...], rate: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Use PyTorch's own function: once, or for each layer if there is dropout between them."""
        every = range(self.num_layers)
        ends = []
        for layers in [every[layer : layer + 1] for layer in every] if rate else [every]:
            if layers.start:
                steps = self._dropped(steps, rate)
            weights = [
                tensor
                for layer in layers
                for way in range(self._ways)
                for tensor in self._weights(layer, way)
                if tensor is not None
            ]
            rows = slice(layers.start * self._ways, layers.stop * self._ways)
            first = tuple(state[rows] for state in states)
            given = first if self.mode == "LSTM" else first[0]
            settings = (self.bias, len(layers), 0.0, False, self.bidirectional, False)
            steps, *last = getattr(torch, self.mode.lower())(steps, given, weights, *settings)
            ends.append(last)
        return steps, tuple(torch.cat(parts) for parts in zip(*ends, strict=True))

    def _by_products(
        self, steps: Tensor, states: tuple[Tensor, ...], rate: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Use matrix products, which can be stacked."""
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            if layer and rate:
                steps = self._dropped(steps, rate)
            ways = []
            for way in range(self._ways):
                outputs, final = self._layer(
                    steps, layer, way, tuple(state[len(last)] for state in states)
                )
                ways.append(outputs)
                last.append(final)
            steps = torch.cat(ways, -1) if self.bidirectional else ways[0]
        return steps, tuple(torch.stack(parts) for parts in zip(*last, strict=True))

    @property
    def _ways(self) -> int:
        return 2 if self.bidirectional else 1

    def _rate(self) -> float:
        """Return the probability of dropout in this pass."""
        forward = current_pass()
        trains = (
            self.training
            if forward is None
            else forward.train and self.moves and forward.key is not None
        )
        return float(self.dropout) if trains and self.num_layers > 1 else 0.0

    def _dropped(self, steps: Tensor, rate: float) -> Tensor:
        key = next_key(self, self.number)
        if key is None:
            return F.dropout(steps, rate)
        # Samples first: random numbers must not depend on how many samples a batch has.
        return dropped(steps.transpose(0, 1), rate, key).transpose(0, 1)

    def _first_states(self, steps: Tensor, hx: Any) -> tuple[Tensor, ...]:
        if hx is not None:
            return hx if isinstance(hx, tuple) else (hx,)
        count, samples = self.num_layers * self._ways, steps.shape[1]
        sizes = [self.proj_size or self.hidden_size, self.hidden_size][
            : 2 if self.mode == "LSTM" else 1
        ]
        return tuple(steps.new_zeros(count, samples, size) for size in sizes)

    def _weights(self, layer: int, way: int) -> list[Tensor | None]:
        suffix = f"_l{layer}{'_reverse' if way else ''}"
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        return [getattr(self, f"{name}{suffix}", None) for name in names]

    def _layer(
        self, steps: Tensor, layer: int, way: int, first: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs and the last states of one layer in one direction."""
        weight_ih, weight_hh, bias_ih, bias_hh, weight_hr = self._weights(layer, way)
        # An LSTM adds both biases to the same sums. With a projection, a step is more than that.
        at_once = self.mode == "LSTM" and weight_hr is None
        bias = bias_ih + bias_hh if at_once and bias_ih is not None else bias_ih  # type: ignore[operator]
        # What does not depend on the step before is one product for all steps.
        driven = F.linear(steps.flatten(0, 1), weight_ih, bias)  # type: ignore[arg-type]
        driven = driven.unflatten(0, steps.shape[:2])
        if at_once:
            ordered = driven.flip(0) if way else driven
            outputs, cell = steps_of_layer(ordered, weight_hh, *first)  # type: ignore[arg-type]
            return (outputs.flip(0) if way else outputs), (outputs[-1], cell)
        state, made = first, []
        drives = driven.unbind(0)
        for drive in reversed(drives) if way else drives:
            state = self._cell(drive, F.linear(state[0], weight_hh, bias_hh), state, weight_hr)  # type: ignore[arg-type]
            made.append(state[0])
        return torch.stack(made[::-1] if way else made), state

    def _cell(
        self, drive: Tensor, recurrent: Tensor, state: tuple[Tensor, ...], weight_hr: Tensor | None
    ) -> tuple[Tensor, ...]:
        if self.mode == "LSTM":
            enter, keep, new, leave = (drive + recurrent).chunk(4, -1)
            cell = keep.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
            output = leave.sigmoid() * cell.tanh()
            return (output if weight_hr is None else F.linear(output, weight_hr)), cell
        if self.mode == "GRU":
            (reset, update, new), (reset_by, update_by, new_by) = (
                drive.chunk(3, -1),
                recurrent.chunk(3, -1),
            )
            candidate = (new + (reset + reset_by).sigmoid() * new_by).tanh()
            share = (update + update_by).sigmoid()
            return ((1 - share) * candidate + share * state[0],)
        return (_ACTIVATIONS[self.mode](drive + recurrent),)
