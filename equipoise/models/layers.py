"""Layers whose behaviour must not depend on which clients, or how much padding, share the batch.

``convert`` replaces a model's BatchNorm, LayerNorm, Dropout, linear, convolution, max-pooling and
padded embedding layers by such layers, sequences of some of them by one that does several in one
go, and recurrent layers by those of :mod:`equipoise.models.sequences`.
Outside the engine they behave exactly like the layers they replace. Only the engine's own copy of a
model is converted: finished models have the original layers.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from equipoise.models.convolution_layers import Convolution, MaxPool, Sequential
from equipoise.models.dropout import Dropout
from equipoise.models.frozen import Frozen
from equipoise.models.functions import embedding
from equipoise.models.linear_layers import Linear
from equipoise.models.norm_layers import BatchNorm, LayerNorm
from equipoise.models.replacing import adopt, has_hooks, take_additions, take_hooks
from equipoise.models.sequences import Recurrent


class Embedding(nn.Embedding):
    """An embedding with a dense gradient, whose padding row never moves, stacked or not.

    PyTorch's rule for ``vmap`` moves it, and sparse gradients cannot be stacked.
    """

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__(
            layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta"
        )
        adopt(self, layer)

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is an embedding with padding or sparse, and otherwise ordinary."""
        return (
            type(layer) is nn.Embedding
            and (layer.padding_idx is not None or layer.sparse)
            and layer.max_norm is None
            and not layer.scale_grad_by_freq
        )

    def forward(self, x: Tensor) -> Tensor:
        """Look up the vectors of a batch of integers."""
        return embedding(x, self.weight, self.padding_idx)


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def convert(module: nn.Module) -> nn.Module:
    """Replace PyTorch's layers, at any depth, by their counterparts in this package.

    Parameters and buffers keep their names, their values and their identity, so shared ones stay
    shared. Subclasses of PyTorch's classes are not replaced if they behave differently. Nothing
    inside a ``Frozen`` is replaced, because it gets the samples of all clients as one ordinary
    batch, in evaluation mode.

    Examples
    --------
    >>> module = convert(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.5)))
    >>> [type(layer).__module__ for layer in module]
    ['equipoise.models.norm_layers', 'torch.nn.modules.activation', 'equipoise.models.dropout']
    """
    dropouts = 0
    # A layer that is used in two places stays one layer.
    done: dict[nn.Module, nn.Module] = {}

    def replaced(layer: nn.Module) -> nn.Module:
        if layer not in done:
            # A layer may have a forward of its own in place of that of its class.
            done[layer] = layer if "forward" in vars(layer) else counterpart(layer)
            if done[layer] is not layer:
                take_additions(done[layer], layer)
            if isinstance(layer, Frozen):
                return layer
            for name, child in done[layer]._modules.items():
                done[layer]._modules[name] = None if child is None else replaced(child)
        return done[layer]

    def counterpart(layer: nn.Module) -> nn.Module:
        nonlocal dropouts
        if type(layer) in DROPOUTS:
            dropouts += 1
            probability, channels = cast(nn.Dropout, layer).p, type(layer) is not nn.Dropout
            return take_hooks(Dropout(probability, dropouts, channels), layer)
        if Recurrent.replaces(layer):
            recurrent = cast(nn.RNNBase, layer)
            dropouts += bool(recurrent.dropout)
            return Recurrent(recurrent, dropouts)
        if Sequential.replaces(layer):
            sequence = Sequential()
            sequence._modules.update(layer._modules)  # type: ignore[arg-type]
            sequence.training = layer.training
            return sequence
        for kind in (BatchNorm, LayerNorm, Linear, Convolution, MaxPool, Embedding):
            if not isinstance(layer, kind) and kind.replaces(layer):
                return cast(nn.Module, kind(layer))  # type: ignore[arg-type]
        return layer

    made = replaced(module)
    parts = list(made.modules())
    channels_innermost = all(map(_takes_any_layout, parts))
    for part in parts:
        if isinstance(part, Convolution):
            part.channels_innermost = channels_innermost
    return made


# Layers of PyTorch that can be stacked however images lie in memory. GroupNorm and adaptive pooling
# cannot.
_ANY_LAYOUT = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardtanh, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.Linear),
)
# Where code is that calls such layers only.
_ANY_LAYOUT_IN = ("equipoise.models.", "transformers.models.resnet.")


def _takes_any_layout(part: nn.Module) -> bool:
    """Return whether a module can be stacked however images lie in memory.

    A model's own code may call anything.
    """
    known = type(part) in _ANY_LAYOUT or type(part).__module__.startswith(_ANY_LAYOUT_IN)
    return known and not has_hooks(part) and "forward" not in vars(part)
