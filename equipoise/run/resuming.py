"""Whether a run may start, resume or become longer in a directory, and what identifies it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import equipoise
from equipoise.data.columns import COLUMNS
from equipoise.engine.settings import Machine, Training
from equipoise.engine.slots import frozen_digest, is_frozen_digest
from equipoise.errors import InputError, RunError
from equipoise.federation import Federation
from equipoise.method import Method
from equipoise.run.checkpoint import CHECKPOINT, read_note, refuse_another_version
from equipoise.run.checkpoint_note import IF_LONGER
from equipoise.run.checksums import sha256, verify
from equipoise.run.directory import (
    CONFIG,
    SUMMARY,
    left_over,
    other_columns,
    read_config,
    refuse_a_run_in,
)
from equipoise.run.plain import first_difference
from equipoise.run.processes import threads_of_each
from equipoise.text import plural
from equipoise.tree import Tree, digest


class Opened(NamedTuple):
    """What :func:`open_run` has found.

    Attributes
    ----------
    config : dict
        The complete configuration.
    finished : bool
        Whether the run in the directory is finished.
    longer : bool
        Whether it is made longer.
    checkpoint_every : int or None
        The setting with which its journals so far were written. ``config`` may have another one.
    """

    config: dict[str, Any]
    finished: bool
    longer: bool
    checkpoint_every: int | None


def open_run(
    directory: Path | None,
    config: dict[str, Any],
    federation: Federation,
    machine: Machine,
    module: nn.Module,
    begun: Tree,
    resume: bool,
    attached: Mapping[str, bytes],
    processes: int,
) -> Opened:
    """Complete the configuration and check the directory."""
    resolved = {
        "equipoise": equipoise.__version__,
        "torch": torch.__version__,
        "device": machine.torch_device.type,
        # Those of each process.
        "threads": threads_of_each(processes),
        **({"processes": processes} if processes > 1 else {}),
        "fingerprint": federation.fingerprint(),
        "shape": list(federation.shape),
        "outputs": federation.outputs,
        "clients": federation.clients,
    }
    if config["model"]["name"].startswith("custom:"):
        resolved["module"] = _architecture(module)
    if frozen := frozen_digest(module):
        resolved["frozen"] = frozen
    if begun:
        resolved["start"] = digest(begun)
    config = {**config, "resolved": resolved}
    new = Opened(config, False, False, config["checkpoint_every"])
    if directory is None:
        return new
    if (directory / CONFIG).exists():
        if not resume:
            refuse_a_run_in(directory)
        found = read_config(directory)
        chunk = found["resolved"].pop("chunk", None)
        # The number of clients may change on Flower. In one process the fingerprint contains it.
        found["resolved"]["clients"] = resolved["clients"]
        # Runs of older versions do not record their module. Their checkpoints are refused because
        # of their version.
        for entry in ("module", "frozen"):
            found["resolved"].setdefault(entry, resolved.get(entry))
        if is_frozen_digest(found["resolved"]["frozen"], module):
            found["resolved"]["frozen"] = resolved.get("frozen")
        _keep_processes(found, config)
        before, asked = (given["training"]["rounds"] for given in (found, config))
        longer = before < asked
        if longer:
            found["training"]["rounds"] = asked
        there, here = (_experiment(given) for given in (found, json.loads(json.dumps(config))))
        if difference := first_difference(there, here):
            # Runs of older versions differ in settings that did not exist. The error about the
            # version is clearer.
            refuse_another_version(directory)
            if difference.startswith("training.rounds "):
                raise InputError(
                    f"training.rounds is {asked}, but the run in {directory} was started with "
                    f"{before} rounds and cannot be made shorter; valid: {before} or more"
                )
            same = (
                "pass the module the run began with or "
                if difference.startswith("resolved.module ")
                else ""
            )
            raise InputError(
                f"{directory} holds another experiment: {difference}; {same}choose another "
                "directory"
            )
        _check_code(directory, attached)
        if difference := other_columns(directory, federation):
            raise InputError(
                f"{directory} holds another experiment: {difference}; choose another directory"
            )
        finished = (directory / SUMMARY).exists()
        if finished and not (directory / CHECKPOINT).exists():
            raise RunError(
                f"the run in {directory} is finished, but its {CHECKPOINT} is missing; its results "
                "are intact and there is nothing to resume. equipoise.load reads its models"
            )
        every: int | None = found["checkpoint_every"]
        goes_on = longer or not finished
        if config["checkpoint_every"] is None or not goes_on:
            config["checkpoint_every"] = every
        if chunk:
            config["resolved"] = resolved | {"chunk": chunk}
        return Opened(config, not goes_on, longer, every)
    if directory.exists() and (
        not directory.is_dir() or not all(left_over(p, attached) for p in directory.iterdir())
    ):
        raise InputError(f"{directory} exists and is not a run directory; choose another")
    return new


def _keep_processes(found: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Let a configuration name the processes with which the run began, if there are others now.

    Their number changes results by rounding only, so a run may be resumed with another one.
    """
    there, here = found["resolved"], config["resolved"]
    if there.get("processes", 1) != here.get("processes", 1):
        here["threads"] = there["threads"]
    for before, now in ((there, here), (found["machine"], config["machine"])):
        now.pop("processes", None)
        if "processes" in before:
            now["processes"] = before["processes"]


def refuse_to_lengthen(directory: Path, training: Training, method: Method, *, best: bool) -> None:
    """Refuse to make a run longer if its rounds so far would differ in the longer run.

    ``best``: whether clients keep memories of the best round on disk, which have replaced earlier
    ones.
    """
    note = read_note(directory)
    reason = training.schedule.needs_total
    if reason is None and note.get("total_was_read"):
        reason = f"its method {method.name!r} has used the number of rounds"
    if best and IF_LONGER in note and note[IF_LONGER]["best_round"] != note["best_round"]:
        reason = (
            "clients have kept their memories of its last round, which was evaluated only "
            "because it was the last"
        )
    if reason:
        raise InputError(
            f"the run in {directory} cannot be made longer: {reason}, so its rounds so far differ "
            f"from those of a run with training.rounds of {training.rounds}; start again in "
            "another directory"
        )


def nothing_left(directory: Path, ended: int, rounds: int, patience: int) -> str:
    """Say why a run that ``evaluation.patience`` has ended does not become longer.

    Parameters
    ----------
    directory : Path
        The run directory.
    ended : int
        The round after which the run ended.
    rounds : int
        How many rounds it should have now.
    patience : int
        Its ``evaluation.patience``.

    Returns
    -------
    str
        With what to change instead.

    Examples
    --------
    >>> nothing_left(Path("runs/a"), 12, 200, 5)  # doctest: +ELLIPSIS
    'nothing is left to train in runs/a: with training.rounds of 200, too, the run ends after round
    12, because 5 evaluations brought no better value (evaluation.patience); for more rounds, ...'
    """
    return (
        f"nothing is left to train in {directory}: with training.rounds of {rounds}, too, the run "
        f"ends after round {ended}, because {plural(patience, 'evaluation')} brought no better "
        "value (evaluation.patience); for more rounds, start again in another directory with a "
        "larger evaluation.patience or without it"
    )


def _check_code(directory: Path, attached: Mapping[str, bytes]) -> None:
    """Refuse to resume a run with other code than that with which it started."""
    for name, content in attached.items():
        path = directory / name
        if not path.exists() or name == COLUMNS:
            # Runs of older versions may lack a copy. Columns are no code, and are compared apart.
            continue
        verify(directory, name)
        if path.read_bytes() != content:
            raise InputError(
                f"{directory} holds another experiment: {name} differs from the copy there, with "
                f"which the run started; resume with that copy (equipoise run {directory / CONFIG} "
                "--resume --trust) or choose another directory"
            )


def identity_of(config: Mapping[str, Any], checkpoint_every: int | None = None) -> str:
    """Return a hash of a run's settings without those that may differ when it is resumed.

    ``checkpoint_every``: the setting of this name, which the hashes of older versions contain.
    """
    resolved = {
        name: value
        for name, value in config["resolved"].items()
        if name not in ("clients", "chunk")
    }
    training = {name: value for name, value in config["training"].items() if name != "rounds"}
    same = {
        **_experiment(config),
        "checkpoint_every": checkpoint_every,
        "resolved": resolved,
        "training": training,
    }
    return sha256(json.dumps(same, sort_keys=True).encode())[:16]


def _experiment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the settings on which no result depends."""
    return {**config, "tracking": None, "checkpoint_every": None}


def _architecture(module: nn.Module) -> str:
    """Return a hash of a module's printed layers, and of its tensors' names, shapes and types."""
    # Functions are printed with their address, which differs between processes.
    layers = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(module))
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = [
        (name, None if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in named
    ]
    return hashlib.sha256(repr((layers, tensors)).encode()).hexdigest()[:16]
