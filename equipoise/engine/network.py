"""A model as a function of its parameters."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equipoise.errors import InputError, unknown
from equipoise.metrics import COLUMNS
from equipoise.models.base import Model, pooled
from equipoise.models.frozen import Frozen, digest_of, frozen_names
from equipoise.models.layers import BatchNorm, Dropout, Forward, convert, forward_pass, has_hooks
from equipoise.task import Task
from equipoise.tree import Parts, Tree, digest, in_parts


@dataclass(frozen=True, eq=False)
class Slot:
    """Where a module holds a tensor of floating point numbers.

    Attributes
    ----------
    name : str
        The dotted name; of a tensor that is held in several slots, the first one.
    path : str
        The dotted name of the layer that holds it; empty for the model itself.
    owner : dict
        The dictionary of the layer that holds it.
    leaf : str
        Its name there.
    tensor : Tensor
        What was there when the slot was found.
    is_parameter : bool
        Whether it is a parameter and not a buffer.
    frozen : bool
        Whether it never moves and so belongs to the architecture.
    """

    name: str
    path: str
    owner: dict[str, Any]
    leaf: str
    tensor: Tensor
    is_parameter: bool
    frozen: bool


def slots_of(module: nn.Module) -> list[Slot]:
    """Find every slot in which a module holds floating point numbers, parameters first.

    Frozen are parameters with ``requires_grad`` off, everything inside a :class:`~equipoise.models.frozen.Frozen` or in the
    stem of a :class:`~equipoise.models.base.Model`, buffers that are not persistent, and buffers of a module whose
    parameters are all frozen. (For a layer without parameters, the nearest module around it that has some decides.)

    Examples
    --------
    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    >>> tied[1].weight = tied[0].weight
    >>> [(slot.name, slot.leaf, slot.frozen) for slot in slots_of(tied)]
    [('0.weight', 'weight', False), ('0.weight', 'weight', False), ('1.bias', 'bias', False)]
    >>> [slot.frozen for slot in slots_of(nn.BatchNorm1d(2).requires_grad_(False))]
    [True, True, True, True]
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    inside = frozen_names(module)
    has_stem = isinstance(module, Model) and module.stem is not None
    first: dict[int, str] = {}
    found: list[Slot] = []
    for is_parameter, named in enumerate((module.named_buffers, module.named_parameters)):
        here = []
        for name, tensor in named(remove_duplicate=False):
            if tensor.is_floating_point():
                path, _, leaf = name.rpartition(".")
                owner, part = owners[path], path.partition(".")[0]
                held = owner._parameters if is_parameter else owner._buffers
                frozen = not tensor.requires_grad if is_parameter else _is_frozen_buffer(owners, path, leaf)
                frozen = frozen or name in inside or (has_stem and part == "stem")
                where = first.setdefault(id(tensor), name)
                here.append(Slot(where, path, held, leaf, tensor, bool(is_parameter), frozen))
        found = here + found
    return found


def frozen_digest(module: nn.Module) -> str | None:
    """Hash the frozen tensors of a module, or return ``None`` if there are none.

    Examples
    --------
    >>> frozen_digest(nn.Linear(2, 2)) is None, frozen_digest(nn.Linear(2, 2).requires_grad_(False)) is None
    (True, False)
    """
    frozen = {slot.name: slot.tensor for slot in slots_of(module) if slot.frozen}
    return digest(frozen) if frozen else None


def _is_frozen_buffer(owners: Mapping[str, nn.Module], path: str, leaf: str) -> bool:
    if leaf in owners[path]._non_persistent_buffers_set:
        return True
    while not (parameters := list(owners[path].parameters())) and path:
        path = path.rpartition(".")[0]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


_ALIGNED_ROWS = ("samples", "classes")
# Stands for all parts of a model together.
_EVERY_PART = "*"


class Pass(NamedTuple):
    """What a forward pass leaves.

    Attributes
    ----------
    output : Tensor
        The output of what was applied.
    z : Tensor
        What the features made of the batch, in the type in which the head gets it; of a part other than
        ``features``, or of a model with a ``forward`` of its own, the output.
    buffers : Tree
        The buffers of what was applied, as the pass leaves them.
    """

    output: Tensor
    z: Tensor
    buffers: Tree


class Network:
    """An ``nn.Module`` with ``features`` and ``head`` whose parameters and buffers are given with every call.

    Frozen tensors (see :func:`slots_of`), and buffers of whole numbers or truth values, are part of the architecture:
    all clients share one copy, and they are not trained, sent or averaged.

    Tensors are put straight into the module's own dictionaries, where attribute look-up finds them. That is what
    ``torch.func.functional_call`` does too, but the slots are found once and not at every step, which matters when a
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
    lowered : torch.dtype, optional
        Type in which the model's :class:`~equipoise.models.frozen.Frozen` modules are held and computed, if it is
        not ``dtype``.

    Attributes
    ----------
    encoded : bool
        Whether x is what the model's stem makes of samples, and not the samples; set by the engine.
    activations, fixed_activations, stem_activations : int
        How many numbers all layers together put out for each sample, how many for a batch whatever its size (prompts in
        words), and those of the stem for each sample; :meth:`try_out` counts.

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
        if missing := [part for part in ("features", "head") if not isinstance(getattr(module, part, None), nn.Module)]:
            raise InputError(
                f"the model {type(module).__name__} has no {' and no '.join(missing)}; "
                "a model needs two submodules, features and head (equipoise.models.base.Model takes any two)"
            )
        _refuse_unusual(module)
        self._given = module
        self.module = convert(copy.deepcopy(module)).to(device=device, dtype=dtype).train()
        self.task = task
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.autocast = autocast
        self.lowered = lowered
        self.encoded = False
        self.activations = self.fixed_activations = self.stem_activations = 0
        # What the task measures; known once the model was tried out.
        self.measures: tuple[str, ...] = ()
        if lowered is not None:
            _lower(self.module, lowered)
        every_slot = slots_of(self.module)
        self._slots = [slot for slot in every_slot if not slot.frozen]
        self._initial = {slot.name: slot.tensor.detach().clone() for slot in self._slots}
        self.buffers = frozenset(slot.name for slot in self._slots if not slot.is_parameter)
        owners = dict(self.module.named_modules())
        self._norms = [(name, layer) for name, layer in owners.items() if isinstance(layer, BatchNorm)]
        self._dropouts = [
            ([slot.name for slot in every_slot if in_parts(slot.path, path.partition(".")[0])], layer)
            for path, layer in owners.items()
            if isinstance(layer, Dropout)
        ]
        self._slots_of_part: dict[str | None, list[Slot]] = {}
        # Frozen layers rest in every call, also where no phase says what moves.
        self.rest_unless(self._initial.__contains__)

    def initial(self) -> Tree:
        """Return the parameters and buffers the module came with."""
        return dict(self._initial)

    @cached_property
    def frozen_digest(self) -> str | None:
        """Hash of the frozen tensors as they came, or ``None`` if there are none."""
        return frozen_digest(self._given)

    @cached_property
    def stem(self) -> nn.Module | None:
        """The frozen beginning of the model, which encodes samples once, if it has one."""
        stem = getattr(self.module, "stem", None)
        return stem if isinstance(stem, nn.Module) and self.composed else None

    @cached_property
    def inputs(self) -> nn.Module | None:
        """What changes samples before the stem and the features see them, if a method has brought such a part."""
        inputs = getattr(self.module, "inputs", None)
        return inputs if isinstance(inputs, nn.Module) and self.composed else None

    @property
    def stem_digest(self) -> str:
        """Hash of the stem: its layers and its tensors as they came."""
        stem: Any = self._given.stem
        return digest_of(stem) + hashlib.sha256(repr(stem).encode()).hexdigest()

    @cached_property
    def separable(self) -> bool:
        """Whether an output is the head of z, and features that do not move make the same z of a sample whatever its batch.

        Features without parameters cannot be said not to move.
        """
        return self.composed and any(in_parts(name, "features") for name in self._initial) and not self.batchwise

    @cached_property
    def composed(self) -> bool:
        """Whether an output is head(features(x)); a model with a ``forward`` or hooks of its own may do anything."""
        return getattr(self.module.forward, "__func__", None) is Model.forward and not has_hooks(self.module)

    @cached_property
    def batchwise(self) -> bool:
        """Whether outputs depend on what else is in the batch even at rest: BatchNorm without running statistics."""
        return any(layer.running_mean is None for _, layer in self._norms)

    def blank(self) -> nn.Module:
        """Return a copy of the module as it came, in its own types, to be filled with other parameters."""
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
            A batch: samples, or what the stem made of them if the network's or the argument's ``encoded`` is true.
        forward : Forward
            What the layers must know.
        part : str, optional
            ``features``, ``head``, a part that a method has brought, or a layer by its dotted name; by default the whole
            model.
        encoded : bool
            Whether x is what the stem made of samples, although the network's data are not encoded.

        Returns
        -------
        Pass
            Its output, z and the buffers.
        """
        slots = self._filled(params, part)
        with forward_pass(forward), self._arithmetic():
            if part is None and self.composed:
                z = self._features(x, encoded)
                output = self._part("head")(z)
            elif part == "features":
                output = z = self._features(x, encoded)
            else:
                output = z = (self.module if part is None else self._part(part))(x)
        buffers = {slot.name: slot.owner[slot.leaf] for slot in slots if not slot.is_parameter}
        return Pass(output.to(self.dtype), z, buffers)

    def aligned(self, params: Mapping[str, Tensor], z: Tensor, forward: Forward) -> Tensor:
        """Return what the model says is to be aligned; see :meth:`equipoise.models.base.Model.aligned`.

        Parameters
        ----------
        params : mapping of str to Tensor
            Every parameter and buffer; other names are ignored.
        z : Tensor
            What the features made of a batch.
        forward : Forward
            What the layers must know.

        Returns
        -------
        Tensor
            ``[rows, d]``.
        """
        self._filled(params, _EVERY_PART)
        with forward_pass(forward), self._arithmetic():
            rows: Tensor = getattr(self.module, "aligned", pooled)(z)
        return rows.to(self.dtype)

    @property
    def aligns_samples(self) -> bool:
        """Whether the rows of :meth:`aligned` are the samples of the batch."""
        rows = getattr(self.module, "aligned_rows", "samples")
        if rows not in _ALIGNED_ROWS:
            raise unknown("aligned_rows", rows, _ALIGNED_ROWS, where=f"model {type(self.module).__name__}")
        return bool(rows == "samples")

    def _filled(self, params: Mapping[str, Tensor], part: str | None) -> list[Slot]:
        """Put tensors into the slots of what is applied, and return the slots."""
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
                f"the question looks at {missing} of the model, but no model was given; valid: cohort.ask(..., model=...)"
            ) from None
        return self._slots_of_part[part]

    def _arithmetic(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)

    def stemmed(self, params: Mapping[str, Tensor], x: Tensor, forward: Forward) -> Tensor:
        """Return what the stem makes of a batch of samples; only for models that have a stem and data not yet encoded."""
        if self.inputs is not None:
            self._filled(params, "inputs")
        with forward_pass(forward), self._arithmetic():
            return self._encoded(x)

    def _encoded(self, x: Tensor) -> Tensor:
        """Apply what stands before the features to samples, unless it has been applied to all of them before training."""
        if self.inputs is not None:
            x = self.inputs(x)
        return x if self.encoded or self.stem is None else self.stem(x)

    def _features(self, x: Tensor, encoded: bool) -> Tensor:
        z: Tensor = self._part("features")(x if encoded else self._encoded(x))
        return z

    def _part(self, name: str) -> nn.Module:
        part: Any = self.module
        for child in name.split("."):
            part = getattr(part, child, None)
        if not isinstance(part, nn.Module):
            raise unknown("part", name, [child for child, _ in self.module.named_children()], where="the model")
        return part

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Return what the stem makes of samples."""
        stem = self.stem
        if stem is None:
            raise InputError(f"the model {type(self.module).__name__} has no stem to encode samples with")
        with forward_pass(Forward(train=False)), self._arithmetic():
            encoded: Tensor = stem(x)
        return encoded.to(self.dtype) if encoded.is_floating_point() else encoded

    @torch.no_grad()
    def try_out(self, x: Tensor, y: Tensor, outputs: int) -> None:
        """Check that the model can be trained, and gives the same outputs as the original module.

        It must take samples and answer each with a number a class, or a target; the same with or without others beside it,
        BatchNorm aside; without changing its tensors in place or drawing random numbers of its own; and as the module it was
        made from does. Tensors are moved a little first, so that those a call does not reach show.

        Parameters
        ----------
        x, y : Tensor
            A few samples and their targets.
        outputs : int
            How many classes or targets there are.

        Raises
        ------
        InputError
            If it does not.
        """
        draws = torch.Generator().manual_seed(0)
        params = {}
        for name, tensor in self._initial.items():
            noise = torch.rand(tensor.shape, generator=draws, dtype=tensor.dtype).to(tensor.device)
            params[name] = tensor * (1 + 0.2 * noise) + 0.01 * noise
        versions = {name: tensor._version for name, tensor in params.items()}
        # Kernels of normalisation change statistics without saying so.
        statistics = {name: params[name].clone() for name in self.buffers}
        lowered, self.autocast = self.autocast, None
        before = self._random_states()
        try:
            seen = self._encode_counted(x) if self.encoded else x
            output = self.apply(params, seen, Forward(train=False)).output
            self._check_outputs(output, y, outputs)
            self._check_metrics(output, y)
            # Not in the first call: counting adds hooks, and ``composed`` is determined there.
            with self._counting() as together:
                self.apply(params, seen, Forward(train=True, key=torch.zeros((), dtype=torch.int64, device=x.device)))
            drawn = any(not torch.equal(*pair) for pair in zip(before, self._random_states(), strict=True))
            changed = [
                name
                for name, tensor in params.items()
                if tensor._version != versions[name] or not tensor.equal(statistics.get(name, tensor))
            ]
            alone = torch.cat([self.apply(params, row, Forward(train=False)).output for row in seen[1:].split(1)])
            with self._counting() as counted:
                first = self.apply(params, seen[:1], Forward(train=False)).output
            alone = torch.cat([first, alone])
            others = len(seen) - 1
            self.activations = (together[0] - counted[0]) // others if others else counted[0]
            self.fixed_activations = counted[0] - self.activations
            itself = self._by_itself(params, x)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            taken = f"x holds {str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}"
            advice = "" if x.is_floating_point() else "; most models need floating point, such as x / 255 for images"
            raise InputError(f"the model cannot take a sample: {taken}{advice} ({error})") from error
        finally:
            self.autocast = lowered
        if drawn:
            raise InputError(
                "the model draws random numbers of its own, which nobody could draw again; valid: layers of nn.Dropout, "
                "and no dropout inside nn.LSTM, nn.MultiheadAttention and the like, or by torch.nn.functional"
            )
        if changed:
            raise InputError(
                f"the model changes {changed[0]} in place while it is called, for all clients alike; valid: layers of "
                "nn.BatchNorm, and buffers that are assigned anew (self.mean = ...)"
            )
        if not self.batchwise and _far(output, alone):
            raise InputError(
                "what the model answers to a sample depends on the others in its batch, or on their order; valid: models "
                "that take a batch as their first dimension (batch_first=True) and mix samples by nn.BatchNorm alone"
            )
        if _far(output, itself):
            raise InputError(
                "taken apart and put together again the model is another one: it has parameters that are no attributes of "
                "a module, layers that behave otherwise in evaluation, or classes derived from nn.BatchNorm that do more"
            )

    @contextmanager
    def _counting(self) -> Iterator[list[int]]:
        """Count the numbers that all layers together put out while the block runs."""
        counted = [0]

        def count(layer: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                counted[0] += output.numel()

        handles = [layer.register_forward_hook(count) for layer in self.module.modules()]
        try:
            yield counted
        finally:
            for handle in handles:
                handle.remove()

    def _encode_counted(self, x: Tensor) -> Tensor:
        with self._counting() as counted:
            encoded = self.encode(x)
        self.stem_activations = counted[0] // len(x)
        return encoded

    def _check_outputs(self, output: Tensor, y: Tensor, outputs: int) -> None:
        if wanted := self.task.misfit(output, y, outputs):
            raise InputError(
                f"the model answers a sample with numbers of shape {tuple(output.shape[1:])}, "
                f"but the federation has {wanted}"
            )

    def _check_metrics(self, output: Tensor, y: Tensor) -> None:
        measured = self.task.metrics(output, y)
        self.measures = tuple(measured)
        if missing := {"loss", self.task.score} - set(measured):
            raise InputError(
                f"the metrics of task {self.task.name!r} are {', '.join(measured)}, without {missing.pop()}"
            )
        if taken := (set(measured) - {"loss"}) & set(COLUMNS):
            raise InputError(
                f"the task {self.task.name!r} has a metric called {taken.pop()!r}, which is another column of "
                "metrics.jsonl; choose another name"
            )
        for name, values in measured.items():
            if values.shape != y.shape[:1]:
                raise InputError(
                    f"{name} of task {self.task.name!r} has shape {tuple(values.shape)} for {len(y)} samples; valid: one "
                    f"value a sample, of shape ({len(y)},)"
                )

    def _by_itself(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Call a copy of the original module, in evaluation mode, with the given tensors."""
        module = copy.deepcopy(self._given).to(device=self.device, dtype=self.dtype).eval()
        if self.lowered is not None:
            _lower(module, self.lowered)
        for slot in slots_of(module):
            if slot.name in params:
                slot.tensor.copy_(params[slot.name])
        answer: Tensor = module(x)
        return answer

    def _random_states(self) -> list[Tensor]:
        """Return the states of PyTorch's generators, from which layers may draw."""
        on_gpu = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    def resting_features(self, params: Mapping[str, Tensor], x: Tensor, *, stacked: bool = False) -> Tensor:
        """Return z of a batch as in evaluation, in the type in which the head gets it: autocast may lower it."""
        return self.apply(params, x, Forward(train=False, stacked=stacked), "features").z

    def rest_unless(self, moves: Callable[[str], bool]) -> None:
        """Set which layers behave as in training: those with tensors that are trained.

        BatchNorm layers without a trained parameter or buffer use running statistics. Dropout is
        off in a part of the model without trained tensors.
        """
        for name, layer in self._norms:
            layer.moves = any(moves(f"{name}.{leaf}") for leaf in ("weight", "running_mean"))
        for around, dropout in self._dropouts:
            dropout.moves = not around or any(moves(name) for name in around)


def _lower(module: nn.Module, dtype: torch.dtype) -> None:
    lowered = [layer for layer in module.modules() if isinstance(layer, Frozen)]
    if not lowered:
        raise InputError(
            "machine.frozen lowers frozen modules, but the model has none; valid: a model with a module of the class "
            "equipoise.models.frozen.Frozen, such as vitprompts, or no machine.frozen"
        )
    for layer in lowered:
        layer.lower(dtype)


def _refuse_unusual(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InputError(f"{name} of the model has no shape yet; call the model with a sample once before")
        if tensor.is_complex():
            raise InputError(f"{name} of the model holds complex numbers; valid: real ones")


def _far(found: Tensor, wanted: Tensor) -> bool:
    """Say whether answers differ by more than rounding, TF32's among it."""
    return found.shape != wanted.shape or bool((found - wanted).norm() > 0.01 * wanted.norm() + 1e-6)
