"""The floating point tensors of a module: where they are, and which of them are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from equipoise.models.base import Model
from equipoise.models.frozen import frozen_names
from equipoise.tree import Tree, digest


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of a floating point tensor in a module.

    Attributes
    ----------
    name : str
        The dotted name; the first one if the tensor is in several slots.
    path : str
        The dotted name of the layer with the tensor; empty for the model itself.
    owner : dict
        The dictionary of the layer with the tensor.
    leaf : str
        Its name there.
    tensor : Tensor
        The tensor in the slot when it was found.
    is_parameter : bool
        Whether it is a parameter and not a buffer.
    frozen : bool
        Whether it is never trained and thus part of the architecture.
    """

    name: str
    path: str
    owner: dict[str, Any]
    leaf: str
    tensor: Tensor
    is_parameter: bool
    frozen: bool


def slots_of(module: nn.Module) -> list[Slot]:
    """Return every slot of a module with floating point numbers, parameters first.

    The following are frozen: parameters with ``requires_grad=False``, everything inside a
    :class:`~equipoise.models.frozen.Frozen` or in the stem of a
    :class:`~equipoise.models.base.Model`, buffers that are not persistent, and buffers of a module
    whose parameters are all frozen. (For a layer without parameters, the innermost module around it
    that has parameters is used.)

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
                frozen = (
                    not tensor.requires_grad
                    if is_parameter
                    else _is_frozen_buffer(owners, path, leaf)
                )
                frozen = frozen or name in inside or (has_stem and part == "stem")
                where = first.setdefault(id(tensor), name)
                here.append(Slot(where, path, held, leaf, tensor, bool(is_parameter), frozen))
        found = here + found
    return found


def frozen_digest(module: nn.Module) -> str | None:
    """Return a hash of the frozen tensors of a module, or ``None`` if there are none.

    Buffers of integers and booleans are included, except BatchNorm's count of batches, which is
    never read.

    Examples
    --------
    >>> frozen_digest(nn.Linear(2, 2)) is None
    True
    >>> frozen_digest(nn.Linear(2, 2).requires_grad_(False)) is None
    False
    """
    fixed = {
        name: tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not tensor.is_floating_point() and name.rpartition(".")[2] != "num_batches_tracked"
    }
    frozen = _frozen_floats(module) | fixed
    return digest(frozen) if frozen else None


def is_frozen_digest(recorded: str | None, module: nn.Module) -> bool:
    """Return whether a recorded hash is that of a module's frozen tensors.

    Equipoise 0.1.0 hashed floating point tensors only. Such a hash is accepted as well, because a
    run does not record more.

    Examples
    --------
    >>> is_frozen_digest(None, nn.Linear(2, 2))
    True
    """
    if recorded == frozen_digest(module):
        return True
    floats = _frozen_floats(module)
    return bool(floats) and recorded == digest(floats)


def _frozen_floats(module: nn.Module) -> Tree:
    return {slot.name: slot.tensor for slot in slots_of(module) if slot.frozen}


def _is_frozen_buffer(owners: Mapping[str, nn.Module], path: str, leaf: str) -> bool:
    if leaf in owners[path]._non_persistent_buffers_set:
        return True
    while not (parameters := list(owners[path].parameters())) and path:
        path = path.rpartition(".")[0]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
