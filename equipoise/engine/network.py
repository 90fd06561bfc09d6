"""A model as a function of its parameters."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.engine.model_checks import refuse_unusual
from equipoise.engine.slots import Slot, frozen_digest, slots_of
from equipoise.errors import InputError, unknown
from equipoise.models.base import Model, pooled
from equipoise.models.dropout import Dropout
from equipoise.models.frozen import digest_of, lower_frozen
from equipoise.models.functions import Carried
from equipoise.models.headed import Headed, tensor_of
from equipoise.models.layers import convert
from equipoise.models.norm_layers import BatchNorm
from equipoise.models.passes import Forward, enter_part, forward_pass
from equipoise.models.replacing import has_hooks
from equipoise.models.sequences import Recurrent
from equipoise.task import Task
from equipoise.tree import Parts, Tree, in_parts

_ALIGNED_ROWS = ("samples", "classes")
# Denotes all parts of a model together.
_EVERY_PART = "*"


class Pass(NamedTuple):
    """The results of a forward pass.

    Attributes
    ----------
    output : Tensor
        The output of the model or of the part that was applied.
    z : Tensor
        The output of the features, in the type of the input of the head. It is the output for a
        part other than ``features``, and for a model with its own ``forward``.
    buffers : Tree
        The buffers after the pass.
    """

    output: Tensor
    z: Tensor
    buffers: Tree


class Network:
    """An ``nn.Module`` whose parameters and buffers are arguments of every call.

    Methods that treat features and head differently need a module with the two submodules
    ``features`` and ``head``; see :func:`equipoise.models.headed.with_head`.

    Frozen tensors (see :func:`slots_of`), and buffers of integers or booleans, are part of the
    architecture: all clients share one copy, and they are not trained, sent or averaged.

    Tensors are put directly into the module's own dictionaries, where attribute look-up finds them.
    ``torch.func.functional_call`` does the same, but here the slots are found only once and not in
    every step. This is faster for deep models with small batches.

    Parameters
    ----------
    module : nn.Module
        The model. It is copied, and layers of the copy are converted
        (:func:`equipoise.models.layers.convert`).
    task : Task
        What is learned.
    device : torch.device
        The device of all calls.
    dtype : torch.dtype
        Floating point type of parameters and buffers.
    autocast : torch.dtype, optional
        The type of autocast.
    lowered : torch.dtype, optional
        The type of the model's :class:`~equipoise.models.frozen.Frozen` modules, if it is not
        ``dtype``.

    Attributes
    ----------
    given : nn.Module
        The original module.
    encoded : bool
        Whether x is the output of the model's stem instead of samples; set by the engine.
    classes : int or None
        The number of classes of the federation, if its task has any; set by the engine.
    activations, fixed_activations, stem_activations : int
        Total size of the outputs of all layers for each sample, for a batch of any size (such as
        text prompts), and of the stem for each sample. This and what follows is set by
        :func:`equipoise.engine.model_trial.try_out`.
    measures : tuple of str
        The metrics of the task.
    functions : Carried or None
        A context that replaces functions which the model's own code calls, if it must.
    unstackable : str
        Why clients cannot be stacked with this model; empty if they can.

    Examples
    --------
    >>> from equipoise import tasks
    >>> from equipoise.models import build
    >>> network = Network(build("logistic", shape=(2,), classes=3), tasks.build("classification"))
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
        lowered: torch.dtype | None = None,
    ) -> None:
        refuse_unusual(module)
        self.given = module
        self.module = convert(copy.deepcopy(module)).to(device=device, dtype=dtype).train()
        self.task = task
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.autocast = autocast
        self.lowered = lowered
        self.encoded = False
        self.classes: int | None = None
        self.activations = self.fixed_activations = self.stem_activations = 0
        self.measures: tuple[str, ...] = ()
        if lowered is not None:
            lower_frozen(self.module, lowered)
        every_slot = slots_of(self.module)
        self._slots = [slot for slot in every_slot if not slot.frozen]
        self._initial = {slot.name: slot.tensor.detach().clone() for slot in self._slots}
        self.buffers = frozenset(slot.name for slot in self._slots if not slot.is_parameter)
        owners = dict(self.module.named_modules())
        self._norms = [
            (name, layer) for name, layer in owners.items() if isinstance(layer, BatchNorm)
        ]
        self._dropouts = [
            (path.partition(".")[0], layer)
            for path, layer in owners.items()
            if isinstance(layer, Dropout | Recurrent)
        ]
        # The trainable tensors of each part; None if it has no tensors at all.
        self._tensors_of: dict[str, list[str] | None] = {}
        for part, _ in self.module.named_children():
            inside = [
                slot for slot in every_slot if slot.path == part or slot.path.startswith(f"{part}.")
            ]
            self._tensors_of[part] = (
                [slot.name for slot in inside if not slot.frozen] if inside else None
            )
        self._moving_parts: dict[str, bool] = {}
        self._training_parts = dict.fromkeys(["", *self._tensors_of], True)
        self.functions: Carried | None = None
        self.unstackable = ""
        self._slots_of_part: dict[str | None, list[Slot]] = {}
        usual = getattr(self.module.forward, "__func__", None) in (Model.forward, Headed.forward)
        self.composed = usual and not has_hooks(self.module)
        # Frozen layers are in evaluation mode in every call, also if no phase sets what is trained.
        self.rest_unless(self._initial.__contains__)

    def initial(self) -> Tree:
        """Return the original parameters and buffers of the module."""
        return dict(self._initial)

    @property
    def name(self) -> str:
        """The original class of the model."""
        given: Any = self.given
        return type(given.features.body if isinstance(given, Headed) else given).__name__

    @cached_property
    def frozen_digest(self) -> str | None:
        """Hash of the original frozen tensors, or ``None`` if there are none."""
        return frozen_digest(self.given)

    @cached_property
    def stem(self) -> nn.Module | None:
        """The frozen first part of the model, which encodes samples once, or ``None``."""
        stem = getattr(self.module, "stem", None)
        return stem if isinstance(stem, nn.Module) and self.composed else None

    @cached_property
    def inputs(self) -> nn.Module | None:
        """The part that a method has added before the stem and the features, or ``None``."""
        inputs = getattr(self.module, "inputs", None)
        return inputs if isinstance(inputs, nn.Module) and self.composed else None

    @property
    def stem_digest(self) -> str:
        """Hash of the stem: its layers and its original tensors."""
        stem: Any = self.given.stem
        return digest_of(stem) + hashlib.sha256(repr(stem).encode()).hexdigest()

    @cached_property
    def separable(self) -> bool:
        """Whether outputs are head(z), and z of a sample is constant if features are not trained.

        False for features without parameters.
        """
        return (
            self.composed
            and any(in_parts(name, "features") for name in self._initial)
            and not self.batchwise
        )

    @property
    def composed(self) -> bool:
        """Whether outputs are head(features(x)), which a custom forward or hooks may change."""
        return self._composed

    @composed.setter
    def composed(self, composed: bool) -> None:
        self._composed = composed
        # The tensors that a pass needs depend on it.
        self._slots_of_part.clear()

    @property
    def has_dropout(self) -> bool:
        """Whether some layers draw random numbers in training."""
        return bool(self._dropouts)

    @cached_property
    def batchwise(self) -> bool:
        """Whether outputs depend on the batch even in evaluation: BatchNorm without statistics."""
        return any(layer.running_mean is None for _, layer in self._norms)

    def blank(self) -> nn.Module:
        """Return a copy of the original module, with its own layers, to be filled with tensors."""
        return copy.deepcopy(self.given)

    def apply(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        forward: Forward,
        part: str | None = None,
        *,
        encoded: bool = False,
    ) -> Pass:
        """Apply the model, or one part of it.

        Parameters
        ----------
        params : mapping of str to Tensor
            Every parameter and buffer; other names are ignored.
        x : Tensor
            A batch of samples, or of outputs of the stem if ``encoded`` of the network or of this
            call is true.
        forward : Forward
            The state of the pass that layers read.
        part : str, optional
            ``features``, ``head``, a part that a method has added, or a layer by its dotted name;
            by default the whole model.
        encoded : bool
            Whether x is the output of the stem, although the network's data are not encoded.

        Returns
        -------
        Pass
            Its output, z and the buffers.
        """
        slots = self._filled(params, part)
        self._set_training(forward.train)
        with self._pass(forward, part or ""):
            if part is None and self.composed:
                z = self._features(x, encoded)
                enter_part("head")
                output = tensor_of(self._part("head")(z))
            elif part == "features" and self.composed:
                output = z = self._features(x, encoded)
            else:
                output = z = tensor_of((self.module if part is None else self._part(part))(x))
        buffers = {slot.name: slot.owner[slot.leaf] for slot in slots if not slot.is_parameter}
        return Pass(output.to(self.dtype), z, buffers)

    def aligned(self, params: Mapping[str, Tensor], z: Tensor, forward: Forward) -> Tensor:
        """Return the values to be aligned; see :meth:`equipoise.models.base.Model.aligned`.

        Parameters
        ----------
        params : mapping of str to Tensor
            Every parameter and buffer; other names are ignored.
        z : Tensor
            The output of the features for a batch.
        forward : Forward
            The state of the pass that layers read.

        Returns
        -------
        Tensor
            ``[rows, d]``.
        """
        self._filled(params, _EVERY_PART)
        self._set_training(forward.train)
        with self._pass(forward, "aligned"):
            rows: Tensor = getattr(self.module, "aligned", pooled)(z)
        return rows.to(self.dtype)

    @property
    def aligns_samples(self) -> bool:
        """Whether the rows of :meth:`aligned` are the samples of the batch."""
        rows = getattr(self.module, "aligned_rows", "samples")
        if rows not in _ALIGNED_ROWS:
            raise unknown(
                "aligned_rows", rows, _ALIGNED_ROWS, where=f"model {type(self.module).__name__}"
            )
        return bool(rows == "samples")

    def _filled(self, params: Mapping[str, Tensor], part: str | None) -> list[Slot]:
        """Put tensors into the slots of a part or of the model, and return the slots."""
        if part not in self._slots_of_part:
            parts: Parts | None = part
            if part == _EVERY_PART or (part is None and not self.composed):
                parts = None
            elif part in (None, "features"):
                parts = ("inputs", "features", "head") if part is None else ("inputs", "features")
            chosen = [slot for slot in self._slots if parts is None or in_parts(slot.path, parts)]
            self._slots_of_part[part] = chosen
        try:
            for slot in self._slots_of_part[part]:
                slot.owner[slot.leaf] = params[slot.name]
        except KeyError as missing:
            raise InputError(
                f"the question uses {missing} of the model, but no model was given; valid: "
                "cohort.ask(..., model=...)"
            ) from None
        return self._slots_of_part[part]

    def release(self) -> None:
        """Put the module's own tensors back into all slots, so that others can be freed."""
        for slot in self._slots:
            slot.owner[slot.leaf] = slot.tensor

    def _arithmetic(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)

    @contextmanager
    def _pass(self, forward: Forward, part: str) -> Iterator[None]:
        """Set the state that layers and functions read while a part of the model is applied."""
        with forward_pass(forward, part), self._arithmetic(), self.functions or nullcontext():
            yield

    def _set_training(self, train: bool) -> None:
        """Set training mode for trained parts in a training pass, and evaluation mode otherwise."""
        for part, before in self._training_parts.items():
            trains = train and self._moving_parts[part]
            if trains != before:
                self._training_parts[part] = trains
                if part:
                    self.module.get_submodule(part).train(trains)
                else:
                    self.module.training = trains

    def stemmed(self, params: Mapping[str, Tensor], x: Tensor, forward: Forward) -> Tensor:
        """Return the output of the stem for samples; only if the data are not encoded."""
        if self.inputs is not None:
            self._filled(params, "inputs")
        self._set_training(forward.train)
        with self._pass(forward, "features"):
            return self._encoded(x)

    def _encoded(self, x: Tensor) -> Tensor:
        """Apply the layers before the features, unless samples were encoded before training."""
        if self.inputs is not None:
            x = self.inputs(x)
        return x if self.encoded or self.stem is None else self.stem(x)

    def _features(self, x: Tensor, encoded: bool) -> Tensor:
        enter_part("features")
        z: Tensor = self._part("features")(x if encoded else self._encoded(x))
        return z

    def _part(self, name: str) -> nn.Module:
        part: Any = self.module
        for child in name.split("."):
            part = getattr(part, child, None)
        if not isinstance(part, nn.Module):
            raise unknown(
                "part",
                name,
                [child for child, _ in self.module.named_children()],
                where="the model",
            )
        return part

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Return the output of the stem for samples."""
        stem = self.stem
        if stem is None:
            raise InputError(
                f"the model {type(self.module).__name__} has no stem to encode samples with"
            )
        with self._pass(Forward(train=False), "features"):
            encoded: Tensor = stem(x)
        return encoded.to(self.dtype) if encoded.is_floating_point() else encoded

    def resting_features(
        self, params: Mapping[str, Tensor], x: Tensor, *, stacked: bool = False
    ) -> Tensor:
        """Return z of a batch in evaluation mode, in the type of the head's input."""
        return self.apply(params, x, Forward(train=False, stacked=stacked), "features").z

    def rest_unless(self, moves: Callable[[str], bool]) -> None:
        """Set training mode for layers with trained tensors, and evaluation mode for others.

        BatchNorm layers without a trained parameter or buffer use running statistics. Dropout is
        off in a part of the model without trained tensors.
        """
        for name, layer in self._norms:
            layer.moves = any(moves(f"{name}.{leaf}") for leaf in ("weight", "running_mean"))
        anything = any(moves(slot.name) for slot in self._slots)
        self._moving_parts = {
            part: anything if names is None else any(moves(name) for name in names)
            for part, names in self._tensors_of.items()
        }
        self._moving_parts[""] = anything
        for part, dropout in self._dropouts:
            dropout.moves = self._moving_parts[part]
