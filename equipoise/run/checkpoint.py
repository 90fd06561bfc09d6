"""Checkpoints: one file with everything the next round depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.errors import InputError, RunError
from equipoise.method import State
from equipoise.run.evaluation import Models
from equipoise.run.files import load_tensors, save_tensors
from equipoise.tree import Tree, tree_map

CHECKPOINT = "checkpoint.safetensors"
BEST, LOCAL = "best.safetensors", "local.safetensors"
# Increased whenever older checkpoints cannot be read correctly.
VERSION = 2


@dataclass(frozen=True)
class Checkpoint:
    """Everything from which a run is resumed.

    Attributes
    ----------
    state : State
        The server's state.
    memory : Tree
        What the engine exports.
    note : mapping
        Plain values: byte counts, the best round, the lengths of the journals.
    """

    state: State
    memory: Tree
    note: Mapping[str, Any]

    def save(self, directory: Path) -> None:
        """Write the checkpoint atomically: after a crash the old or the new one is there."""
        tensors = {f"model/{name}": tensor for name, tensor in self.state.model.items()}
        for tree, values in self.state.server.items():
            tensors |= {f"server/{tree}/{name}": tensor for name, tensor in values.items()}
        tensors |= {f"memory/{name}": tensor for name, tensor in self.memory.items()}
        note = {**self.note, "version": VERSION, "round": self.state.round}
        save_tensors(directory / CHECKPOINT, tensors, note)


def read_checkpoint(directory: Path, like: State, device: torch.device) -> Checkpoint | None:
    """Read the checkpoint of a run directory, or return ``None`` if there is none.

    Parameters
    ----------
    directory : Path
        The run directory.
    like : State
        A state of the same run, for the order of tensors.
    device : torch.device
        The device of the model.

    Raises
    ------
    RunError
        If the file is damaged, belongs to another model, or was written by another version.
    """
    path = directory / CHECKPOINT
    if not path.exists():
        return None
    tensors, note = _of_this_version(path)
    model: Tree = {}
    server: dict[str, Tree] = {}
    memory: Tree = {}
    for name, tensor in tensors.items():
        root, _, rest = name.partition("/")
        if root == "model":
            model[rest] = tensor.to(device)
        elif root == "server":
            tree, _, leaf = rest.partition("/")
            server.setdefault(tree, {})[leaf] = tensor
        else:
            memory[rest] = tensor
    # Values of clients stay on the CPU, where the server uses them, on any device.
    for tree, values in server.items():
        server[tree] = (
            values if "ids" in values else tree_map(lambda tensor: tensor.to(device), values)
        )
    there, here = (
        {name: tuple(tensor.shape) for name, tensor in of.items()} for of in (model, like.model)
    )
    if there != here or not isinstance(note.get("round"), int):
        differing = sorted(
            name for name in there.keys() | here.keys() if there.get(name) != here.get(name)
        )
        raise RunError(
            f"{path} is a checkpoint of another model: "
            f"{differing[0] if differing else 'its round'} differs; restore the file that belongs "
            "to this run"
        )
    # Tensors in a file are sorted by name. Sums over tensors use the order of the model.
    ordered = {name: model[name] for name in like.model}
    return Checkpoint(State(note["round"], ordered, server), memory, note)


def refuse_another_version(directory: Path) -> None:
    """Refuse a run directory with a checkpoint of another version.

    Raises
    ------
    RunError
        If the file is damaged, or was written by another version.

    Examples
    --------
    >>> import tempfile
    >>> refuse_another_version(Path(tempfile.mkdtemp()))
    """
    if (path := directory / CHECKPOINT).exists():
        _of_this_version(path)


def read_note(directory: Path) -> dict[str, Any]:
    """Read the plain values of a checkpoint; empty if there is none.

    Raises
    ------
    RunError
        If the file is damaged, or was written by another version.

    Examples
    --------
    >>> import tempfile
    >>> read_note(Path(tempfile.mkdtemp()))
    {}
    """
    path = directory / CHECKPOINT
    return _of_this_version(path)[1] if path.exists() else {}


def _of_this_version(path: Path) -> tuple[Tree, dict[str, Any]]:
    tensors, note = load_tensors(path)
    if (version := note.get("version", 1)) != VERSION:
        raise RunError(
            f"{path} is a checkpoint of version {version}, but this release of Equipoise resumes "
            f"version {VERSION}; finish the run with the release that started it, or start again "
            "in another directory"
        )
    return tensors, note


def save_models(path: Path, models: Models) -> None:
    """Write the models of a round, atomically.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / LOCAL
    >>> own = {"head.weight": torch.ones(1, 2)}
    >>> save_models(path, Models(3, {"head.bias": torch.zeros(2)}, [5], own))
    >>> read_models(path).clients
    [5]
    """
    tensors = {f"global/{n}": t for n, t in models.shared.items()} | {
        f"own/{n}": t for n, t in models.own.items()
    }
    save_tensors(path, tensors, {"round": models.round, "clients": models.clients})


def read_local(directory: Path) -> Models:
    """Read the local models that a run with ``evaluation.keep_local`` has written."""
    path = directory / LOCAL
    if not path.exists():
        raise InputError(
            f"{directory} has no {LOCAL}; train with evaluation.keep_local: true to keep local "
            "models"
        )
    return read_models(path)


def read_models(path: Path) -> Models:
    """Read a file that :func:`save_models` wrote."""
    tensors, note = load_tensors(path)
    shared = {n.removeprefix("global/"): t for n, t in tensors.items() if n.startswith("global/")}
    own = {n.removeprefix("own/"): t for n, t in tensors.items() if n.startswith("own/")}
    if not isinstance(note.get("round"), int) or not isinstance(note.get("clients"), list):
        raise RunError(f"{path} is not a file of models: it has no round and clients")
    return Models(note["round"], shared, note["clients"], own)
