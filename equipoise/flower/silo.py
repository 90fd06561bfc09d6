"""The client side of a run: the experiment, the client's number, its data and its memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from equipoise import models
from equipoise.attributes import counting_of
from equipoise.checks import count
from equipoise.config import Experiment, load_experiment, read_yaml, settings_from
from equipoise.data.encode import encode_federation
from equipoise.data.silos import silo_federation
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, unknown
from equipoise.federation import Federation, Split
from equipoise.flower.limits import Limits, protection, read_limits
from equipoise.flower.memory import Versions, memory_root, proof_of_home
from equipoise.flower.roster import Description
from equipoise.flower.settings import FlowerSettings, Privacy
from equipoise.metrics import check_metrics, computed, several_from

NodeConfig = Mapping[str, Any]
OwnData = Callable[[NodeConfig], Federation]

_TEXTS = ("data", "memory", "device", "limits")
# Flower's simulation sets the keys that begin with "partition" and "num".
_NODE_KEYS = (*_TEXTS, "client", "unseen", "min-cell", "partition-id", "num-partitions")
_TYPING_MISTAKE = 0.8


@dataclass(frozen=True)
class Silo:
    """One client and everything that it needs to answer messages.

    Parameters
    ----------
    experiment : Experiment
        The experiment.
    client : int
        The client's stable number.
    engine : StackedEngine
        The engine that trains in this process, for a federation in which the client has its number.
    unseen : bool
        Whether the client is held out of training.
    root : Path
        The directory of its memory.
    privacy : Privacy, optional
        Clipping and noise that are applied to updates before they leave the client.
    """

    experiment: Experiment
    client: int
    engine: StackedEngine
    unseen: bool
    root: Path
    privacy: Privacy | None = None

    @property
    def ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The client's number, as a cohort of one."""
        return np.array([self.client])

    @property
    def trains(self) -> bool:
        """Whether the client takes part in training and is not held out."""
        return not (self.unseen or self.engine.federation.unseen[self.client])

    def describe(self, run: str = "") -> Description:
        """Return the description that is sent to the server of a run."""
        home = proof_of_home(self.root, run)
        return Description.of(self.engine.federation, self.client, unseen=self.unseen, home=home)

    def memory(self, run: str) -> Versions:
        """Return the client's memory of a run."""
        return Versions(self.root, run, self.client)


def read_experiment(path: Path, run_config: Mapping[str, Any]) -> Experiment:
    """Read the experiment of a Flower app, with overrides from ``--run-config 'set="key=value"'``.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "experiment.yaml"
    >>> _ = file.write_text("data: digits")
    >>> read_experiment(file, {"set": "training.rounds=7; seed=2"}).training.rounds
    7
    """
    overrides = [text.strip() for text in str(run_config.get("set", "")).split(";")]
    if code := [text for text in overrides if text.partition("=")[0].strip() == "imports"]:
        raise InputError(
            f"--run-config set: {code[0]!r}; a run cannot import other code than its app"
        )
    return load_experiment(path, [text for text in overrides if text])


def client_number(node: NodeConfig) -> int:
    """Return a client's stable number from its node's configuration.

    It is ``client``; else ``partition-id``, in a simulation; else the number at the end of the data
    directory's name.

    Examples
    --------
    >>> client_number({"client": 3}), client_number({"data": "/srv/clinic-12"})
    (3, 12)
    """
    for key in ("client", "partition-id"):
        if key in node:
            number = node[key]
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise InputError(
                    f"{key} in the node's configuration must be a whole number from 0, got "
                    f"{number!r}"
                )
            return number
    if named := re.search(r"(\d+)$", Path(str(node.get("data", ""))).name):
        return int(named[1])
    raise InputError(
        f"the node's configuration {dict(node)!r} has no client number; start the SuperNode with "
        "--node-config 'client=3', or a data directory whose name ends in the number"
    )


def check_node(node: NodeConfig) -> None:
    """Refuse values of a wrong type in a node's configuration, and keys with typing mistakes.

    Other keys are allowed: a function for the data, or another app, may read them.

    Examples
    --------
    >>> check_node({"client": 3, "ward": "north"})
    >>> check_node({"client": 3, "limit": "/srv/limits.yaml"})
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown key 'limit' in the node's configuration; did you mean
    'limits'? Valid: client, data, device, limits, memory, min-cell, num-partitions, partition-id,
    unseen
    """
    where = "the node's configuration"
    for key, value in node.items():
        if key in _TEXTS and not (isinstance(value, str) and value):
            raise InputError(f'{key} in {where} must be text, such as {key}="...", got {value!r}')
        if key == "unseen" and not isinstance(value, bool):
            raise InputError(f"unseen in {where} must be true or false, got {value!r}")
        if key not in _NODE_KEYS and get_close_matches(key, _NODE_KEYS, 1, _TYPING_MISTAKE):
            # Without this, a silo could believe that it has limits.
            raise unknown("key", key, _NODE_KEYS, where=where)


def open_silo(
    experiment: Path, run_config: Mapping[str, Any], node: NodeConfig, own: OwnData | None = None
) -> Silo:
    """Open the client side of a run.

    Parameters
    ----------
    experiment : Path
        The experiment's file.
    run_config, node : mapping
        Flower's run and node configurations. A node may have ``client``, ``data`` (its own
        directory), ``memory``, ``device``, ``unseen``, ``min-cell`` (a smallest cell above that of
        the experiment) and ``limits`` (a file).
    own : callable, optional
        Returns the client's own federation, of one client, for the node's configuration.

    Returns
    -------
    Silo
        Ready to answer.

    Raises
    ------
    Refusal
        If the experiment exceeds the limits of the silo, or the run weakens the protection of
        updates.
    """
    check_node(node)
    client = client_number(node)
    # A process that answers many messages reads the file, the data and the model only once, unless
    # the file changes.
    settings = str(run_config.get("set", ""))
    if "device" in node:
        settings += f"; machine.device={node['device']}"
    asked = Asked(experiment, experiment.stat().st_mtime_ns, settings)
    least = count(node.get("min-cell", 1), "min-cell in the node's configuration")
    if least > _experiment(asked).evaluation.min_cell:
        # A client may withhold more than the experiment requires, but not less.
        asked = asked._replace(settings=f"{settings}; evaluation.min_cell={least}")
    if own is not None or "data" in node:
        engine = _own_engine(asked, client, own, tuple(sorted(node.items())))
    else:
        engine = _shared_engine(asked)
    if client >= engine.federation.clients:
        raise InputError(
            f"client {client} does not exist in data {engine.federation.name!r}; "
            f"valid: 0 to {engine.federation.clients - 1}"
        )
    made, limits = _experiment(asked), read_limits(node["limits"]) if "limits" in node else Limits()
    limits.check(made, len(engine.federation.train.of(client)))
    unseen = limits.evaluate_only or node.get("unseen", False)
    privacy = protection(_written_privacy(experiment, asked.written), made.flower.privacy, limits)
    return Silo(made, client, engine, unseen, memory_root(node.get("memory")), privacy)


class Asked(NamedTuple):
    """The identity of an experiment: its file, the time of its last change, and its overrides."""

    path: Path
    written: int
    settings: str


@lru_cache(maxsize=8)
def _experiment(asked: Asked) -> Experiment:
    return read_experiment(asked.path, {"set": asked.settings})


@lru_cache(maxsize=8)
def _written_privacy(path: Path, written: int) -> Privacy | None:
    """Return the protection of updates in the experiment's file, without overrides."""
    return settings_from(
        FlowerSettings, read_yaml(path).get("flower") or {}, "flower", str(path)
    ).privacy


@lru_cache(maxsize=1)
def _shared_engine(asked: Asked) -> StackedEngine:
    """Create an engine for the experiment's source, shared by clients simulated in one process."""
    return engine_over(_experiment(asked), _experiment(asked).federation())


@lru_cache(maxsize=8)
def _own_engine(
    asked: Asked, client: int, own: OwnData | None, node: tuple[tuple[str, Any], ...]
) -> StackedEngine:
    """Create an engine for the data of this client only."""
    experiment, config = _experiment(asked), dict(node)
    federation = (
        own(config) if own else silo_federation(Path(config["data"]), **_silo_options(experiment))
    )
    if experiment.data.get("encode"):
        federation = encode_federation(
            federation, experiment.data["encode"], experiment.data["encode_size"]
        )
    return engine_over(experiment, placed(federation, client))


def holds_samples(experiment: Experiment) -> bool:
    """Return whether the server has its own samples, for testing or validation.

    Examples
    --------
    >>> from equipoise.config import experiment_from
    >>> holds_samples(experiment_from({"data": "digits"}))
    False
    """
    return experiment.data["test"] == "server" or bool(experiment.data.get("server_val"))


def engine_over(experiment: Experiment, federation: Federation) -> StackedEngine:
    """Create the engine of an experiment for a federation, with one client at a time."""
    machine = dataclasses.replace(experiment.machine.carrying_out(experiment.method), chunk=1)
    named = models.with_class_names(experiment.model, federation.class_names)
    module = models.build(
        shape=federation.shape, classes=federation.outputs, seed=experiment.seed, **named
    )
    extended = experiment.method.extend(module, federation.shape, experiment.seed)
    engine = StackedEngine(federation, extended, experiment.training, machine, experiment.seed)
    wanted = several_from(experiment.evaluation.metrics, "evaluation.metrics")
    # Only clients call the model, and thus know all metrics of the task.
    check_metrics(wanted, engine.network.task, engine.network.measures)
    engine.metrics = computed(wanted, engine.network.task)
    engine.counting = counting_of(
        federation.attributes,
        engine.network.task,
        federation.classes,
        federation.class_names,
        positive=experiment.evaluation.positive,
        min_cell=experiment.evaluation.min_cell,
    )
    return engine


def _silo_options(experiment: Experiment) -> dict[str, Any]:
    if experiment.data["name"] != "silos":
        raise InputError(
            f"the node has its own data directory, but the experiment's data are "
            f"{experiment.data['name']!r}; valid: data: silos"
        )
    if experiment.data["test"] == "group":
        raise InputError(
            "data.test: group needs the test samples of other clients, which a client with its own "
            "data directory cannot read; valid: a copy of the group's test samples in the file "
            "test.npz of every client's directory"
        )
    if experiment.data["leave_out"] is not None:
        raise InputError(
            f"data.leave_out={experiment.data['leave_out']!r} is not applied to data in the nodes' "
            "own directories; remove it and set unseen=true for the nodes that must not train"
        )
    return {name: experiment.data[name] for name in ("splits", "classes", "task", "seed")}


def placed(federation: Federation, client: int) -> Federation:
    """Return a federation in which a client has its stable number. Clients before it are empty.

    Random numbers depend on a client's number, so the client trains as in the federation of all
    clients.

    Examples
    --------
    >>> one = Federation.from_arrays(np.zeros((4, 1)), [0, 1, 0, 1], clients=["ann"] * 4)
    >>> placed(one, 2).train.sizes.tolist(), placed(one, 2).client_name(2)
    ([0, 0, 2], 'ann')
    """
    if federation.clients != 1:
        raise InputError(
            f"a node's own data must have exactly one client; federation {federation.name!r} has "
            f"{federation.clients}"
        )

    def moved(split: Split) -> Split:
        return Split(split.indices, np.concatenate([np.zeros(client, np.int64), split.offsets]))

    return dataclasses.replace(
        federation,
        train=moved(federation.train),
        val=moved(federation.val),
        test=moved(federation.test),
        groups=np.concatenate([np.zeros(client, np.int64), federation.groups]),
        unseen=np.concatenate([np.ones(client, bool), federation.unseen]),
        client_names=(*(f"client {before}" for before in range(client)), federation.client_name(0)),
    )
