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
# Raised whenever an older checkpoint would be misread.
VERSION = 2
# In the note of a checkpoint: what the last round would have left if the run had lasted longer.
IF_LONGER = "if_longer"


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from.

    Attributes
    ----------
    state : State
        The server's state.
    memory : Tree
        What the engine exports.
    note : mapping
        Plain values: byte counts, the best round, how long the journals were.
    """

    state: State
    memory: Tree
    note: Mapping[str, Any]

    def save(self, directory: Path) -> None:
        """Write the checkpoint, so that a crash leaves the old one or the new one."""
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
        A state of the same run, whose model has the tensors in their order.
    device : torch.device
        Where the model belongs.

    Raises
    ------
    RunError
        If the file is damaged, of another model, or was written by another version.
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
    # Numbers of clients stay on the CPU, where the server computes, whatever device the model is
    # on.
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
    # The tensors of a file come sorted by name; the model's own order is what later sums follow.
    ordered = {name: model[name] for name in like.model}
    return Checkpoint(State(note["round"], ordered, server), memory, note)


def refuse_another_version(directory: Path) -> None:
    """Refuse a run directory whose checkpoint another version has written; one without a checkpoint passes.

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
            f"{path} is a checkpoint of version {version}, and this release of Equipoise resumes "
            f"version {VERSION}; finish the run with the release that began it, or begin it anew "
            "in another directory"
        )
    return tensors, note


def save_models(path: Path, models: Models) -> None:
    """Write the models of a round, atomically.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / LOCAL
    >>> save_models(path, Models(3, {"head.bias": torch.zeros(2)}, [5], {"head.weight": torch.ones(1, 2)}))
    >>> read_models(path).clients
    [5]
    """
    tensors = {f"global/{n}": t for n, t in models.shared.items()} | {
        f"own/{n}": t for n, t in models.own.items()
    }
    save_tensors(path, tensors, {"round": models.round, "clients": models.clients})


def read_local(directory: Path) -> Models:
    """Read the local models that a run with ``evaluation.keep_local`` has left in its directory."""
    path = directory / LOCAL
    if not path.exists():
        raise InputError(
            f"{directory} has no {LOCAL}; train with evaluation.keep_local: true to keep local "
            "models"
        )
    return read_models(path)


def read_models(path: Path) -> Models:
    """Read what :func:`save_models` wrote."""
    tensors, note = load_tensors(path)
    shared = {n.removeprefix("global/"): t for n, t in tensors.items() if n.startswith("global/")}
    own = {n.removeprefix("own/"): t for n, t in tensors.items() if n.startswith("own/")}
    if not isinstance(note.get("round"), int) or not isinstance(note.get("clients"), list):
        raise RunError(
            f"{path} is not a file of models: it does not name its round and its clients"
        )
    return Models(note["round"], shared, note["clients"], own)
