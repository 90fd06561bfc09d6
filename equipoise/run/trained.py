"""The models of a run: built from its configuration, and filled with the tensors of a client."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from equipoise import methods, models
from equipoise.engine.slots import slots_of
from equipoise.errors import InputError, RunError, unknown
from equipoise.method import personal_model
from equipoise.models.headed import Headed, with_head
from equipoise.run.directory import GLOBAL, PERSONAL
from equipoise.run.evaluation import Models
from equipoise.run.files import load_tensors
from equipoise.run.plain import first_difference
from equipoise.tree import Tree

S = TypeVar("S")


def divided(module: nn.Module, head: str | None) -> nn.Module:
    """Divide a module into features and head, if the head is named."""
    return module if head is None else with_head(module, head)


def undivided(module: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Return the original module, if it was divided by the argument ``head``.

    A part that the method has put before it comes first in a sequence of both.
    """
    if not isinstance(module, Headed) or "head" not in config["model"]:
        return module
    inputs, whole = module.inputs, module.whole()
    if inputs is not None:
        whole = nn.Sequential(OrderedDict(inputs=inputs, module=whole))
    return whole.eval()


def model_of(config: Mapping[str, Any], directory: Path, module: nn.Module | None) -> nn.Module:
    """Build the model that a configuration describes, with the parts that its method adds."""
    resolved = config["resolved"]
    if module is None:
        name = config["model"]["name"]
        if name.startswith("custom:"):
            raise InputError(
                f"the run in {directory} used a custom model ({name[7:]}); pass it as module="
            )
        module = models.build(
            shape=resolved["shape"],
            classes=resolved["outputs"],
            seed=config["seed"],
            **config["model"],
        )
    else:
        module = divided(copy.deepcopy(module), config["model"].get("head"))
    method = methods.build(**config["method"])
    return method.extend(module, tuple(resolved["shape"]), config["seed"])


def client_number(client: int | str | None, names: Sequence[str] | None) -> int | None:
    """Return the number of a client, and refuse one that is the name of another client."""
    if client is None:
        return None
    if not isinstance(client, str):
        if isinstance(client, bool) or not hasattr(client, "__index__"):
            raise InputError(
                f"client {client!r} is not a client; pass its number, a whole number, or its name"
            )
        number, own, names = int(client), str(int(client)), names or ()
        called = names[number] if 0 <= number < len(names) else None
        if called is None and names.count(own) == 1:
            return names.index(own)
        numeric = called is not None and all(name.removeprefix("-").isdecimal() for name in names)
        agrees = called == own or (numeric and int(called or 0) == number)
        # If two clients have the same name, only the number identifies them.
        if agrees or names.count(called) > 1 or not (numeric or own in names):
            return number
        here = (
            f"there is no number {number}"
            if called is None
            else f"number {number} is called {called!r}"
        )
        there = (
            f"{own!r} is number {names.index(own)}"
            if own in names
            else f"no client is called {own!r}"
        )
        valid = " or ".join(f"client={name!r}" for name in (own, called) if name in names)
        raise InputError(f"client {number} is ambiguous: {here}, and {there}; pass {valid}")
    if not names:
        raise InputError(f"client {client!r}: clients of this run have no names; pass a number")
    numbers = [number for number, name in enumerate(names) if name == client]
    if not numbers:
        raise unknown("client", client, names)
    if len(numbers) > 1:
        raise InputError(
            f"client {client!r}: clients {', '.join(map(str, numbers))} have this name; pass a "
            "number"
        )
    return numbers[0]


def local_tensors(models: Models, client: int | None) -> Tree:
    """Return the tensors of a client's local model."""
    if client is None or client not in models.clients:
        asked = (
            "local models belong to clients"
            if client is None
            else f"client {client} has no local model"
        )
        raise InputError(
            f"{asked}; valid: client= one of those that trained in round {models.round}: "
            f"{', '.join(map(str, models.clients))}"
        )
    row = models.clients.index(client)
    return {**models.shared, **{name: stack[row] for name, stack in models.own.items()}}


def chosen_model(
    module: nn.Module, chosen: Models, registered: int, client: int | None, *, whole: bool
) -> nn.Module:
    """Fill a module with the global model, or with the model that a client uses.

    A client without a personal model uses the global one. If clients keep parts of the shared
    model, there is no complete global model, and only clients that have taken part have a model.
    """
    tensors = dict(chosen.shared)
    if not whole and (
        client is None or (0 <= client < registered and client not in chosen.clients)
    ):
        asked = (
            "there is no global model"
            if client is None
            else f"client {client} has never taken part"
        )
        raise InputError(
            f"{asked}, and clients of this method keep parts of the model; "
            f"valid: client= one of {', '.join(map(str, chosen.clients))}"
        )
    if client is not None and not 0 <= client < registered:
        raise InputError(f"client {client} does not exist; valid: 0 to {registered - 1}")
    if client in chosen.clients:
        row = chosen.clients.index(client)
        tensors = personal_model(
            chosen.shared, {name: stack[row] for name, stack in chosen.own.items()}
        )
    return filled(module, tensors)


def filled(module: nn.Module, tensors: Tree) -> nn.Module:
    """Copy tensors into a module, which must have tensors of the same names and shapes."""
    # A model without trained tensors keeps its type.
    dtype = next((tensor.dtype for tensor in tensors.values()), None)
    # Runs of older versions contain frozen tensors, too.
    slots = [
        s
        for s in slots_of(module.to(dtype=dtype, device="cpu"))
        if not s.frozen or s.name in tensors
    ]
    there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if difference := first_difference(
        there, {slot.name: tuple(slot.tensor.shape) for slot in slots}
    ):
        raise InputError(f"the module does not fit the run: the shape of {difference}")
    with torch.no_grad():
        for slot in slots:
            slot.tensor.copy_(tensors[slot.name])
    return module.eval()


def read_selected(directory: Path) -> tuple[Models, bool]:
    """Read the models of the selected round, and whether the global one is complete."""
    shared, note = load_tensors(directory / GLOBAL)
    own: Tree = {}
    clients: list[int] = []
    if (directory / PERSONAL).exists():
        own, held = load_tensors(directory / PERSONAL)
        clients = _noted(held, "clients", list, directory / PERSONAL)
    chosen = Models(_noted(note, "round", int, directory / GLOBAL), shared, clients, own)
    return chosen, _noted(note, "whole", bool, directory / GLOBAL)


def _noted(note: Mapping[str, Any], key: str, kind: type[S], path: Path) -> S:
    """Return a value that the note of a file must have."""
    value = note.get(key)
    if not isinstance(value, kind):
        raise RunError(f"{path} is not a file of a run's models: its note has no {key}")
    return value
