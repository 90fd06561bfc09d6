"""A model as a function of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from equipoise.engine.task import Task
from equipoise.errors import InputError
from equipoise.models.base import Model
from equipoise.models.layers import BatchNorm, Dropout, Forward, convert, forward_pass
from equipoise.tree import Tree, in_parts


class Network:
    """An ``nn.Module`` with ``features`` and ``head`` whose parameters and buffers are given with every call.

    Tensors are put straight into the module's own dictionaries, where attribute look-up finds them. That is what
    ``torch.func.functional_call`` does too, but the places are found once and not at every step, which matters when a
    deep model takes small steps.

    Parameters
    ----------
    module : nn.Module
        The model; it is copied, and the copy's BatchNorm and Dropout layers are converted.
    task : Task
        What is learned.
    device : torch.device
        Where calls happen.
    dtype : torch.dtype
        Floating point type of parameters and buffers.
    autocast : torch.dtype, optional
        Type of the arithmetic where autocast lowers it.

    Examples
    --------
    >>> from equipoise.models import build
    >>> network = Network(build("logistic", shape=(2,), classes=3), Task("classification"))
    >>> list(network.initial())
    ['head.weight', 'head.bias']
    """

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
    ) -> None:
        if missing := [part for part in ("features", "head") if not isinstance(getattr(module, part, None), nn.Module)]:
            raise InputError(
                f"the model {type(module).__name__} has no {' and no '.join(missing)}; "
                "a model needs two submodules, features and head (equipoise.models.base.Model takes any two)"
            )
        self.module = convert(copy.deepcopy(module)).to(device=device, dtype=dtype)
        self.task = task
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.autocast = autocast
        self.buffers = frozenset(name for name, _ in self.module.named_buffers())
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        self._initial = {name: tensor.detach().clone() for name, tensor in named}
        owners = dict(self.module.named_modules())
        self._slots = []
        for name in self._initial:
            path, _, leaf = name.rpartition(".")
            owner = owners[path]
            self._slots.append((name, owner._buffers if name in self.buffers else owner._parameters, leaf))
        self._norms = [(name, layer) for name, layer in owners.items() if isinstance(layer, BatchNorm)]
        self._dropouts = [
            ([name for name in self._initial if in_parts(name, path.partition(".")[0])], layer)
            for path, layer in owners.items()
            if isinstance(layer, Dropout)
        ]

    def initial(self) -> Tree:
        """Give the parameters and buffers the module came with."""
        return dict(self._initial)

    @cached_property
    def separable(self) -> bool:
        """Whether an output is the head of z, and resting features make the same z of a sample whatever its batch.

        A model with a ``forward`` of its own may do anything. Features without parameters cannot be said to rest.
        """
        return (
            getattr(self.module.forward, "__func__", None) is Model.forward
            and any(in_parts(name, "features") for name in self._initial)
            and not self.batchwise
        )

    @cached_property
    def batchwise(self) -> bool:
        """Whether outputs depend on what else is in the batch even at rest: BatchNorm without running statistics."""
        return any(layer.running_mean is None for _, layer in self._norms)

    def blank(self) -> nn.Module:
        """Give a copy of the module as it came, to be filled with other parameters; calls leave theirs in the original."""
        for name, owner, leaf in self._slots:
            tensor = self._initial[name]
            owner[leaf] = tensor if name in self.buffers else nn.Parameter(tensor)
        return copy.deepcopy(self.module)

    def output(
        self, params: Mapping[str, Tensor], x: Tensor, forward: Forward, part: str | None = None
    ) -> tuple[Tensor, Tree]:
        """Apply the model, or one part of it.

        Parameters
        ----------
        params : mapping of str to Tensor
            Every parameter and buffer; other names are ignored.
        x : Tensor
            A batch.
        forward : Forward
            What the layers must know.
        part : {"features", "head"}, optional
            What to apply, if not the whole model.

        Returns
        -------
        tuple
            The output, and the buffers of what was applied as the pass leaves them.
        """
        output = self._applied(params, x, forward, part)
        applied = part or "all"
        buffers = {n: owner[leaf] for n, owner, leaf in self._slots if n in self.buffers and in_parts(n, applied)}
        return output.to(self.dtype), buffers

    @torch.no_grad()
    def try_out(self, x: Tensor, y: Tensor, outputs: int) -> None:
        """See that the model takes samples, and answers each with a number a class, or a target.

        Parameters
        ----------
        x, y : Tensor
            Samples and their targets.
        outputs : int
            How many classes or targets there are.

        Raises
        ------
        InputError
            If it does not.
        """
        taken = f"x holds {str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}"
        try:
            output, _ = self.output(self._initial, x, Forward(train=False))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            advice = "" if x.is_floating_point() else "; most models need floating point, such as x / 255 for images"
            raise InputError(f"the model cannot take a sample: {taken}{advice} ({error})") from error
        if self.task.kind == "classification":
            fits, wanted = output.dim() == 2 and output.shape[1] >= outputs, f"{outputs} classes"
        else:
            fits, wanted = output.numel() == y.numel(), f"{outputs} targets a sample"
        if not fits:
            raise InputError(
                f"the model answers a sample with numbers of shape {tuple(output.shape[1:])}, "
                f"but the federation has {wanted}"
            )

    def resting_features(self, params: Mapping[str, Tensor], x: Tensor, *, stacked: bool = False) -> Tensor:
        """Give z of a batch while the features rest, in the type in which the head gets it: autocast may lower it."""
        return self._applied(params, x, Forward(train=False, stacked=stacked), "features")

    def _applied(self, params: Mapping[str, Tensor], x: Tensor, forward: Forward, part: str | None) -> Tensor:
        for name, owner, leaf in self._slots:
            owner[leaf] = params[name]
        lowered = torch.autocast(
            self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )
        with forward_pass(forward), lowered:
            output: Tensor = self.module(x) if part is None else getattr(self.module, part)(x)
        return output

    def rest_unless(self, moves: Callable[[str], bool]) -> None:
        """Let only what moves behave as in training.

        BatchNorm layers without a parameter or buffer that moves leave their batches alone, and dropout in features or
        a head of which nothing moves drops nothing.
        """
        for name, layer in self._norms:
            layer.moves = any(moves(f"{name}.{leaf}") for leaf in ("weight", "running_mean"))
        for around, dropout in self._dropouts:
            dropout.moves = not around or any(moves(name) for name in around)
