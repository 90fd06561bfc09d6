"""Warm starts: the model with which a run begins, from another run or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from equipoise.engine.slots import frozen_digest, is_frozen_digest, slots_of
from equipoise.errors import InputError, unknown
from equipoise.federation import Federation
from equipoise.run.directory import GLOBAL, other_columns, read_config
from equipoise.tree import Parts, Tree, in_parts, select


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the initial model comes from.

    Parameters
    ----------
    path : str
        The directory of a finished run, whose global model is used, or a safetensors file with the
        names of a state dictionary.
    parts : str or tuple of str
        The parts to load, such as ``features``. The others are drawn from the seed.

    Examples
    --------
    >>> Start(path="runs/first", parts="features").parts
    'features'
    """

    path: str
    parts: Parts = "all"

    def tensors(self, module: nn.Module, federation: Federation) -> Tree:
        """Read the parameters and buffers for a module.

        Parameters
        ----------
        module : nn.Module
            The model that is trained, with all parts that the method adds.
        federation : Federation
            The data. If they are a table, its columns must be those of the other run.

        Returns
        -------
        Tree
            Tensors of the module by name: all of them, or those in ``parts``.
        """
        found, slots = self._read(module), {slot.name: slot for slot in slots_of(module)}
        trained = {name: slot.tensor for name, slot in slots.items() if not slot.frozen}
        for name, slot in slots.items():
            if (
                slot.frozen
                and name in found
                and not torch.equal(found[name].to(slot.tensor), slot.tensor)
            ):
                raise InputError(
                    f"start: {name} in {self.path} is frozen in the model and has other values "
                    "there; valid: a file with the same frozen tensors, or parts of it, such as "
                    "start: {path: ..., parts: head}"
                )
        names = select(trained, self.parts)
        self._check_columns(federation, trained, names)
        if self.parts == "all" and (strays := [name for name in found if name not in slots]):
            raise InputError(
                f"start: {self.path} has {strays[0]}, which the model does not have; "
                "name the parts to load, such as start: {path: ..., parts: features}"
            )
        for name in names:
            shape = tuple(trained[name].shape)
            there = tuple(found[name].shape) if name in found else None
            if there != shape:
                has = f"of shape {there}" if there is not None else "missing"
                raise InputError(
                    f"start: {name} is {has} in {self.path}, but of shape {shape} in the model; "
                    "name the parts to load, such as start: {path: ..., parts: features}"
                )
        return {name: found[name].to(trained[name].dtype) for name in names}

    def _check_columns(
        self, federation: Federation, trained: Iterable[str], names: Sequence[str]
    ) -> None:
        """Refuse other inputs if what reads them is loaded, and other classes for the head."""
        body = [name for name in trained if not in_parts(name, "head")]
        compared = {
            # In a linear model the head reads the inputs.
            "inputs": not body or not set(body).isdisjoint(names),
            "target": self.parts == "all" or any(in_parts(name, "head") for name in names),
        }
        if difference := other_columns(Path(self.path), federation, **compared):
            raise InputError(
                f"start: the run in {self.path} was trained on other columns: {difference}; valid: "
                f"the same columns, or data.columns: {self.path}, which makes inputs and classes "
                "as that run did"
            )

    def _read(self, module: nn.Module) -> Tree:
        path = Path(self.path)
        file = path
        if path.is_dir():
            file, recorded = path / GLOBAL, read_config(path)["resolved"].get("frozen")
            if not file.exists():
                raise InputError(f"start: the run in {path} is not finished: it has no {GLOBAL}")
            here = frozen_digest(module)
            if recorded and here and not is_frozen_digest(recorded, module):
                raise InputError(
                    f"start: the frozen tensors of the run in {path} have the hash {recorded}, "
                    f"those of the model {here}"
                )
        try:
            # Copied, because tensors in the file are not aligned, so kernels may round differently.
            return {name: tensor.clone() for name, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise InputError(f"start: cannot read {file} as a safetensors file: {error}") from error


def start_from(given: str | Path | Mapping[str, Any] | Start | None) -> Start | None:
    """Return a start from its plain form: a path, or a mapping with ``path`` and ``parts``.

    Examples
    --------
    >>> start_from("runs/first")
    Start(path='runs/first', parts='all')
    >>> start_from({"path": "model.safetensors", "parts": ["features"]}).parts
    ('features',)
    """
    if given is None or isinstance(given, Start):
        return given
    if isinstance(given, str | Path):
        return Start(path=str(given))
    if not isinstance(given, Mapping) or "path" not in given:
        raise InputError(f"start must be a path, or a mapping with path and parts, got {given!r}")
    for key in given:
        if key not in ("path", "parts"):
            raise unknown("key", key, ("path", "parts"), where="start")
    parts = given.get("parts", "all")
    return Start(path=str(given["path"]), parts=parts if isinstance(parts, str) else tuple(parts))
