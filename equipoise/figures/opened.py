"""Loading run directories to evaluate their models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equipoise.data import SOURCES
from equipoise.data import load as load_data
from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.evaluation import evaluate_shared
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.imports import import_of_run
from equipoise.run.api import load
from equipoise.run.checkpoint import read_local
from equipoise.run.directory import GLOBAL, read_config, read_names
from equipoise.run.evaluation import Models
from equipoise.run.files import load_tensors
from equipoise.tree import Tree


@dataclass(frozen=True)
class OpenedRun:
    """A finished run whose models can be evaluated.

    Parameters
    ----------
    directory : Path
        The run directory.
    federation : Federation
        Its data.
    engine : StackedEngine
        An engine with these data and the model of the run.

    Attributes
    ----------
    local : Models
        The local models of the last round, from a run with ``evaluation.keep_local``.
    shared : Tree
        The global model.
    """

    directory: Path
    federation: Federation
    engine: StackedEngine

    @cached_property
    def local(self) -> Models:
        """The local models of the last round."""
        return read_local(self.directory)

    @cached_property
    def shared(self) -> Tree:
        """The global model."""
        tensors, note = load_tensors(self.directory / GLOBAL)
        if not note["whole"]:
            raise InputError(
                f"the run in {self.directory} has no global model: its clients keep parts of the "
                "model"
            )
        return self.on_device(tensors)

    @property
    def shared_round(self) -> int:
        """The round of the global model."""
        return int(load_tensors(self.directory / GLOBAL)[1]["round"])

    def on_device(self, tree: Tree) -> Tree:
        """Move tensors to the device of the engine."""
        network = self.engine.network
        return {name: tensor.to(network.device, network.dtype) for name, tensor in tree.items()}

    def mixed(self, clients: Sequence[int], factors: NDArray[np.float64]) -> Tree:
        """Return Σ_k f_k w_k over the local models of some clients, for factors that sum to one.

        For buffers, such as the variances of BatchNorm, factors are clipped at 0 and normalized,
        because a combination outside the convex hull of the models may be negative.
        """
        rows = [self.local.clients.index(client) for client in clients]
        inside = np.clip(factors, 0, None)
        buffers = self.engine.network.buffers
        mixture: Tree = dict(self.local.shared)
        for name, stack in self.local.own.items():
            weights = torch.from_numpy(inside / inside.sum() if name in buffers else factors)
            mixture[name] = torch.tensordot(weights, stack[rows].double(), dims=1)
        return self.on_device(mixture)

    def losses(self, params: Tree, split: str, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the loss of a model on each client's own samples of a split."""
        engine = self.engine
        with exact_arithmetic(engine.machine):
            return evaluate_shared(
                engine.network, engine.data, params, self.federation.split(split), clients
            )["loss"]


def open_run(
    run: str | Path,
    *,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    device: str = "auto",
    local: bool = False,
    trust: bool = False,
) -> OpenedRun:
    """Load a run directory to evaluate its models.

    Parameters
    ----------
    run : path
        The run directory.
    federation : Federation, optional
        Its data; by default those of its configuration.
    module : nn.Module, optional
        The model's architecture. It is needed only if the run used a custom module.
    device : str
        ``auto``, ``cpu`` or ``cuda``.
    local : bool
        Whether its local models are needed. Otherwise it needs a global model.
    trust : bool
        Whether to execute the code that the run imports; see :func:`equipoise.load`.

    Returns
    -------
    OpenedRun
        With the data and the model loaded.
    """
    directory = Path(run)
    config = read_config(directory)
    import_of_run(config.get("imports", []), directory, trust=trust)
    if federation is None:
        federation = _data_of(directory, config)
    if (there := federation.fingerprint()) != config["resolved"]["fingerprint"]:
        raise InputError(
            f"the run in {directory} was trained on other data: their fingerprint is "
            f"{config['resolved']['fingerprint']}, that of federation {federation.name!r} is "
            f"{there}"
        )
    client = read_local(directory).clients[0] if local else None
    network = load(directory, client, local=local, module=module, trust=trust)
    machine = Machine(**{**config["machine"], "device": device, "chunk": "auto"})
    return OpenedRun(directory, federation, StackedEngine(federation, network, Training(), machine))


def labels_of(run: str | Path, clients: Sequence[int]) -> list[str]:
    """Return the labels of clients in figures: their names, with numbers if names are equal."""
    return distinct_labels(clients, read_names(Path(run)))


def distinct_labels(clients: Sequence[int], names: Sequence[str] | None) -> list[str]:
    """Return different labels for clients.

    Examples
    --------
    >>> distinct_labels([0, 2], ["north", "south", "west"]), distinct_labels([4], None)
    (['north', 'west'], ['client 4'])
    >>> distinct_labels([0, 1], ["north", "north"])
    ['north (0)', 'north (1)']
    """
    called = [names[client] if names else str(client) for client in clients]
    labels = []
    for client, name in zip(clients, called, strict=True):
        if name.isdecimal():
            labels.append(f"client {client}")
        else:
            # ``global`` is the label of the global model.
            labels.append(
                f"{name} ({client})" if called.count(name) > 1 or name == "global" else name
            )
    return labels


def _data_of(directory: Path, config: dict[str, Any]) -> Federation:
    described = config["data"]
    if described["name"] not in SOURCES:
        raise InputError(
            f"the data of the run in {directory} are not in its configuration; pass them as "
            "federation="
        )
    return load_data(**described)
