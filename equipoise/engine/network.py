"""A model as a function of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equipoise.engine.task import Task
from equipoise.errors import InputError
from equipoise.models.base import Model
from equipoise.models.layers import BatchNorm, Dropout, Forward, convert, forward_pass, has_hooks
from equipoise.tree import Tree, in_parts


@dataclass(frozen=True, eq=False)
class Place:
    """Where a module holds a tensor of floating point numbers.

    Attributes
    ----------
    name : str
        The dotted name; of a tensor that is held in several places, the first one.
    owner : dict
        The dictionary of the layer that holds it.
    leaf : str
        Its name there.
    tensor : Tensor
        What was there when the place was found.
    is_parameter : bool
        Whether it is a parameter and not a buffer.
    """

    name: str
    owner: dict[str, Any]
    leaf: str
    tensor: Tensor
    is_parameter: bool


def places_of(module: nn.Module) -> list[Place]:
    """Find every place in which a module holds floating point numbers, parameters first.

    Examples
    --------
    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    >>> tied[1].weight = tied[0].weight
    >>> [(place.name, place.leaf) for place in places_of(tied)]
    [('0.weight', 'weight'), ('0.weight', 'weight'), ('1.bias', 'bias')]
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}
    found: list[Place] = []
    for is_parameter, named in enumerate((module.named_buffers, module.named_parameters)):
        here = []
        for name, tensor in named(remove_duplicate=False):
            if tensor.is_floating_point():
                path, _, leaf = name.rpartition(".")
                owner = owners[path]._parameters if is_parameter else owners[path]._buffers
                here.append(Place(first.setdefault(id(tensor), name), owner, leaf, tensor, bool(is_parameter)))
        found = here + found
    return found


class Network:
    """An ``nn.Module`` with ``features`` and ``head`` whose parameters and buffers are given with every call.

    Buffers of whole numbers or truth values are part of the architecture: nobody trains, sends or averages them.

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
        _refuse_unusual(module)
        self._given = module
        self.module = convert(copy.deepcopy(module)).to(device=device, dtype=dtype).train()
        self.task = task
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.autocast = autocast
        places = places_of(self.module)
        self._slots = [(place.name, place.owner, place.leaf) for place in places]
        self._initial = {place.name: place.tensor.detach().clone() for place in places}
        self.buffers = frozenset(place.name for place in places if not place.is_parameter)
        self.fixed = frozenset(p.name for p in places if p.is_parameter and not p.tensor.requires_grad)
        owners = dict(self.module.named_modules())
        self._norms = [(name, layer) for name, layer in owners.items() if isinstance(layer, BatchNorm)]
        self._dropouts = [
            ([name for name in self._initial if in_parts(name, path.partition(".")[0])], layer)
            for path, layer in owners.items()
            if isinstance(layer, Dropout)
        ]

    def initial(self) -> Tree:
        """Return the parameters and buffers the module came with."""
        return dict(self._initial)

    @cached_property
    def separable(self) -> bool:
        """Whether an output is the head of z, and resting features make the same z of a sample whatever its batch.

        Features without parameters cannot be said to rest.
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
        """Return a copy of the module as it came, to be filled with other parameters; calls leave theirs in the original."""
        whole = {
            name: tensor if name in self.buffers else nn.Parameter(tensor, requires_grad=name not in self.fixed)
            for name, tensor in self._initial.items()
        }
        for name, owner, leaf in self._slots:
            owner[leaf] = whole[name]
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
        """See that the model can be trained here, and means here what it means by itself.

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
            output, _ = self.output(params, x, Forward(train=False))
            self._check_outputs(output, y, outputs)
            self.task.loss(output, y)
            self.output(params, x, Forward(train=True, key=torch.zeros((), dtype=torch.int64, device=x.device)))
            drawn = any(not torch.equal(*pair) for pair in zip(before, self._random_states(), strict=True))
            changed = [
                name
                for name, tensor in params.items()
                if tensor._version != versions[name] or not tensor.equal(statistics.get(name, tensor))
            ]
            alone = torch.cat([self.output(params, row, Forward(train=False))[0] for row in x.split(1)])
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

    def _check_outputs(self, output: Tensor, y: Tensor, outputs: int) -> None:
        if self.task.kind == "classification":
            fits, wanted = output.dim() == 2 and output.shape[1] >= outputs, f"{outputs} classes"
        else:
            fits, wanted = output.numel() == y.numel(), f"{outputs} targets a sample"
        if not fits:
            raise InputError(
                f"the model answers a sample with numbers of shape {tuple(output.shape[1:])}, "
                f"but the federation has {wanted}"
            )

    def _by_itself(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Call a copy of the module as it came, in evaluation mode, with the given tensors."""
        module = copy.deepcopy(self._given).to(device=self.device, dtype=self.dtype).eval()
        for place in places_of(module):
            if place.name in params:
                place.tensor.copy_(params[place.name])
        answer: Tensor = module(x)
        return answer

    def _random_states(self) -> list[Tensor]:
        """Look at the generators that layers draw from if they are not the engine's."""
        on_gpu = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    def resting_features(self, params: Mapping[str, Tensor], x: Tensor, *, stacked: bool = False) -> Tensor:
        """Return z of a batch while the features rest, in the type in which the head gets it: autocast may lower it."""
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


def _refuse_unusual(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InputError(f"{name} of the model has no shape yet; call the model with a sample once before")
        if tensor.is_complex():
            raise InputError(f"{name} of the model holds complex numbers; valid: real ones")


def _far(found: Tensor, wanted: Tensor) -> bool:
    """Say whether answers differ by more than rounding, TF32's among it."""
    return found.shape != wanted.shape or bool((found - wanted).norm() > 0.01 * wanted.norm() + 1e-6)
