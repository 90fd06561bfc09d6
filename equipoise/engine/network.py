"""A model as a function of its parameters."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from equipoise.engine.model_checks import (
    check_outputs,
    checked_metrics,
    counting,
    known_to_stack,
    random_states,
    refuse_unusual,
)
from equipoise.engine.slots import Slot, frozen_digest, slots_of
from equipoise.engine.stack import why_not_stacked
from equipoise.errors import InputError, unknown
from equipoise.models.base import Model, pooled
from equipoise.models.dropout import Dropout
from equipoise.models.frozen import Frozen, digest_of
from equipoise.models.functions import Carried, Watched, advice
from equipoise.models.headed import Headed, refuse_bytes, tensor_of
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
    encoded : bool
        Whether x is the output of the model's stem instead of samples; set by the engine.
    classes : int or None
        The number of classes of the federation, if its task has any; set by the engine.
    activations, fixed_activations, stem_activations : int
        Total size of the outputs of all layers for each sample, for a batch of any size (such as
        text prompts), and of the stem for each sample; set by :meth:`try_out`.
    unstackable : str
        Why clients cannot be stacked with this model; empty if they can. Set by :meth:`try_out`.

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
        self._given = module
        self.module = convert(copy.deepcopy(module)).to(device=device, dtype=dtype).train()
        self.task = task
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.autocast = autocast
        self.lowered = lowered
        self.encoded = False
        self.classes: int | None = None
        self.activations = self.fixed_activations = self.stem_activations = 0
        # The metrics of the task; set by try_out.
        self.measures: tuple[str, ...] = ()
        if lowered is not None:
            _lower(self.module, lowered)
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
        # Whether the model's own code calls functions that must be replaced; set by try_out.
        self._functions: Carried | None = None
        self.unstackable = ""
        self._slots_of_part: dict[str | None, list[Slot]] = {}
        # Frozen layers are in evaluation mode in every call, also if no phase sets what is trained.
        self.rest_unless(self._initial.__contains__)

    def initial(self) -> Tree:
        """Return the original parameters and buffers of the module."""
        return dict(self._initial)

    @property
    def name(self) -> str:
        """The original class of the model."""
        given: Any = self._given
        return type(given.features.body if isinstance(given, Headed) else given).__name__

    @cached_property
    def frozen_digest(self) -> str | None:
        """Hash of the original frozen tensors, or ``None`` if there are none."""
        return frozen_digest(self._given)

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
        stem: Any = self._given.stem
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

    @cached_property
    def composed(self) -> bool:
        """Whether outputs are head(features(x)), which a custom forward or hooks may change."""
        usual = getattr(self.module.forward, "__func__", None) in (Model.forward, Headed.forward)
        return usual and not has_hooks(self.module)

    @cached_property
    def batchwise(self) -> bool:
        """Whether outputs depend on the batch even in evaluation: BatchNorm without statistics."""
        return any(layer.running_mean is None for _, layer in self._norms)

    def blank(self) -> nn.Module:
        """Return a copy of the original module, in its own types, to be filled with parameters."""
        return convert(copy.deepcopy(self._given))

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
        with forward_pass(forward, part), self._arithmetic(), self._functions or nullcontext():
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

    @torch.no_grad()
    def try_out(self, x: Tensor, y: Tensor, outputs: int) -> None:
        """Check that the model can be trained, and gives the same outputs as the original module.

        The model must return one number per class, or a target, for each sample. Apart from
        BatchNorm, the output for a sample must not depend on the other samples of the batch. The
        model must not change its tensors in place or draw from PyTorch's random generators. The
        parameters are perturbed slightly first, to detect those that a call does not use.

        This also determines whether clients can be stacked, and whether functions that the model
        calls, such as ``torch.nn.functional.dropout``, must be replaced by
        :mod:`equipoise.models.functions`.

        Parameters
        ----------
        x, y : Tensor
            A few samples and their targets.
        outputs : int
            Number of classes or targets.

        Raises
        ------
        InputError
            If a check fails.
        """
        refuse_bytes(self.module, x)
        params = self._moved_a_little(0)
        versions = {name: tensor._version for name, tensor in params.items()}
        # Normalisation kernels change statistics without increasing their version.
        statistics = {name: params[name].clone() for name in self.buffers}
        lowered, self.autocast = self.autocast, None
        key = torch.zeros((), dtype=torch.int64, device=x.device)
        before = random_states(self.device)
        self._functions = functions = Carried()
        try:
            seen = self._encode_counted(x) if self.encoded else x
            self._check_composition(params, seen)
            output = self.apply(params, seen, Forward(train=False)).output
            check_outputs(self.task, output, y, outputs)
            self.measures = checked_metrics(self.task, output, y)
            # Not in the first call: counting adds hooks, and ``composed`` is determined there.
            with counting(self.module) as together:
                self.apply(params, seen, Forward(train=True, key=key))
            drawn = self._drawn_since(before)
            changed = [
                name
                for name, tensor in params.items()
                if tensor._version != versions[name]
                or not tensor.equal(statistics.get(name, tensor))
            ]
            alone = torch.cat(
                [self.apply(params, row, Forward(train=False)).output for row in seen[1:].split(1)]
            )
            with counting(self.module) as counted:
                first = self.apply(params, seen[:1], Forward(train=False)).output
            alone = torch.cat([first, alone])
            others = len(seen) - 1
            self.activations = (together[0] - counted[0]) // others if others else counted[0]
            self.fixed_activations = counted[0] - self.activations
            itself = self._by_itself(params, x)
            drawing = self._drawing(params, seen, key) if drawn else []
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
            taken = f"x holds {str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}"
            advised = (
                ""
                if x.is_floating_point()
                else "; most models need floating point, such as x / 255 for images (data "
                "'imagefolder' has the option scaled)"
            )
            raise InputError(
                f"the model cannot take a sample: {taken}{advised} ({error})"
            ) from error
        finally:
            self.autocast = lowered
        if drawn:
            named = f" by {drawing[0]}" if drawing else ""
            raise InputError(
                f"the model draws its own random numbers{named}, which are not reproducible; "
                f"{advice(drawing)}"
            )
        if changed:
            raise InputError(
                f"the model changes {changed[0]} in place in its forward pass, which would affect "
                "all clients; valid: layers of nn.BatchNorm, and buffers that are assigned anew "
                "(self.mean = ...)"
            )
        if not self.batchwise and self._far(output, alone):
            raise InputError(
                "the model's output for a sample depends on the other samples of its batch, or on "
                "their order; valid: models with the batch as first dimension (batch_first=True) "
                "that combine samples only in nn.BatchNorm"
            )
        if self._far(output, itself):
            raise InputError(
                "the converted model gives other outputs than the original: it has parameters that "
                "are not attributes of a module, layers with a special evaluation mode, or "
                "subclasses of nn.BatchNorm with another behaviour"
            )
        random = bool(self._dropouts or functions.seen)
        if random and not self.batchwise and self._draws_by_batch(params, seen, key):
            raise InputError(
                "dropout of a sample depends on the number of samples in its batch; valid: "
                "dropout of tensors whose first dimension is that of the samples (batch_first=True)"
            )
        if functions.seen or not all(map(known_to_stack, self.module.modules())):
            self.unstackable = self._why_not_stacked(seen[:2], key)
        self._functions = Carried() if functions.seen else None
        # Remove the tensors of this test from the module.
        self._filled(self._initial, _EVERY_PART)

    def _moved_a_little(self, seed: int) -> Tree:
        """Return the initial parameters with a little noise, to detect those that are not used."""
        draws = torch.Generator().manual_seed(seed)
        params = {}
        for name, tensor in self._initial.items():
            noise = torch.rand(tensor.shape, generator=draws, dtype=tensor.dtype).to(tensor.device)
            params[name] = tensor * (1 + 0.2 * noise) + 0.01 * noise
        return params

    def _check_composition(self, params: Tree, x: Tensor) -> None:
        """Determine whether a model that was divided at its head processes the head's output."""
        if isinstance(self.module, Headed) and self.composed:
            # Overwrite the cached property, which determines the tensors that a pass needs.
            self.__dict__["composed"] = False
            whole = self.apply(params, x, Forward(train=False)).output
            self.__dict__["composed"] = True
            self._slots_of_part.clear()
            try:
                apart = self.apply(params, x, Forward(train=False)).output
            except InputError:
                # The head has more inputs than z.
                self.__dict__["composed"] = False
            else:
                self.__dict__["composed"] = not self._far(apart, whole)
            self._slots_of_part.clear()

    def _drawn_since(self, before: list[Tensor]) -> bool:
        """Return whether PyTorch's generators have been used."""
        return any(
            not torch.equal(*pair) for pair in zip(before, random_states(self.device), strict=True)
        )

    def _drawing(self, params: Tree, x: Tensor, key: Tensor) -> list[str]:
        """List the functions that draw from PyTorch's generators, in evaluation or in training."""
        self._functions = watched = Watched(partial(random_states, self.device))
        for forward in (Forward(train=False), Forward(train=True, key=key)):
            self.apply(params, x, forward)
        return watched.drawing

    def _draws_by_batch(self, params: Tree, x: Tensor, key: Tensor) -> bool:
        """Return whether the random numbers of a sample depend on the size of its batch."""
        for _, layer in self._norms:
            layer.moves = False
        forward = Forward(train=True, key=key)
        fewer = self.apply(params, x[:-1], forward).output if len(x) > 1 else None
        differs = fewer is not None and self._far(fewer, self.apply(params, x, forward).output[:-1])
        self.rest_unless(self._initial.__contains__)
        return differs

    def _why_not_stacked(self, x: Tensor, key: Tensor) -> str:
        """Return why two clients cannot be stacked, with gradients; empty if they can."""
        clients = [self._moved_a_little(seed) for seed in (0, 1)]
        if not clients[0]:
            return ""
        keys = [key, key + 1]

        def output_of(params: Tree, x: Tensor, key: Tensor, stacked: bool = True) -> Tensor:
            return self.apply(params, x, Forward(train=True, key=key, stacked=stacked)).output

        leaves = {name: torch.stack([client[name] for client in clients]) for name in clients[0]}
        trained = [
            leaf.requires_grad_() for name, leaf in leaves.items() if name not in self.buffers
        ]
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                # PyTorch warns about operations that it repeats for every client.
                warnings.simplefilter("ignore")
                found = vmap(output_of)(leaves, torch.stack([x, x]), torch.stack(keys))
                torch.autograd.grad(found.sum(), trained, allow_unused=True)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            return why_not_stacked(error)
        wanted = torch.stack(
            [output_of(*given, False) for given in zip(clients, (x, x), keys, strict=True)]
        )
        return (
            "stacked clients get other outputs than single ones" if self._far(found, wanted) else ""
        )

    def _encode_counted(self, x: Tensor) -> Tensor:
        with counting(self.module) as counted:
            encoded = self.encode(x)
        self.stem_activations = counted[0] // len(x)
        return encoded

    def _by_itself(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Call a copy of the original module, in evaluation mode, with the given tensors."""
        module = copy.deepcopy(self._given).to(device=self.device, dtype=self.dtype).eval()
        if self.lowered is not None:
            _lower(module, self.lowered)
        for slot in slots_of(module):
            if slot.name in params:
                slot.tensor.copy_(params[slot.name])
        return tensor_of(module(x)).to(self.dtype)

    def _far(self, found: Tensor, wanted: Tensor) -> bool:
        """Return whether outputs differ by more than rounding."""
        allowed = _ROUNDING[self.lowered] * wanted.norm() + 1e-6
        return found.shape != wanted.shape or bool((found - wanted).norm() > allowed)

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


def _lower(module: nn.Module, dtype: torch.dtype) -> None:
    lowered = [layer for layer in module.modules() if isinstance(layer, Frozen)]
    if not lowered:
        raise InputError(
            "machine.frozen lowers the precision of frozen modules, but the model has none; valid: "
            "a model with a module of the class equipoise.models.frozen.Frozen, such as "
            "vitprompts, or no machine.frozen"
        )
    for layer in lowered:
        layer.lower(dtype)


# Relative tolerance when two outputs of a model are compared. TF32 rounds more than float32, and
# each of many frozen layers in a lower precision adds its own rounding error. A model that combines
# samples differs by far more.
_ROUNDING = {None: 0.01, torch.bfloat16: 0.1}
