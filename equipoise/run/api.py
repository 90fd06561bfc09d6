"""``equipoise.train`` and ``equipoise.load``: runs from Python."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import nn
from torch.nn.parameter import is_lazy

import equipoise
from equipoise import methods, models
from equipoise.checks import count
from equipoise.engine.network import frozen_digest, slots_of
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError, unknown
from equipoise.federation import Federation
from equipoise.imports import import_own
from equipoise.method import Method, personal_model
from equipoise.models.layers import convert
from equipoise.optimizers import OPTIMIZER_OPTIONS
from equipoise.run.checkpoint import CHECKPOINT, read_local, refuse_another_version
from equipoise.run.evaluation import Evaluation, Models
from equipoise.run.files import load_tensors, save_tensors, sole_writer, write_atomically
from equipoise.run.plain import optimizer_from, schedule_from, to_plain
from equipoise.run.trainer import MakeEngine, Progress, Trainer
from equipoise.tree import Tree

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

CONFIG, SUMMARY, NAMES = "config.yaml", "summary.json", "names.json"
GLOBAL, PERSONAL, INDEX = "model.safetensors", "personal.safetensors", "client_index.safetensors"


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    summary : dict
        The results of the selected round; see ``docs/metrics.md``.
    config : dict
        Everything that the run depends on.
    directory : Path or None
        Where its files are.
    """

    summary: dict[str, Any]
    config: dict[str, Any]
    directory: Path | None
    trainer: Trainer

    def model(self, client: int | str | None = None) -> nn.Module:
        """Return the global model, or a client's personal model, ready to use.

        Parameters
        ----------
        client : int or str, optional
            Whose personal model, by number or name: the one it was evaluated with. The global model by default.

        Returns
        -------
        nn.Module
            In evaluation mode, on the CPU.
        """
        selected = self.trainer.selected()
        blank, federation = self.trainer.engine.network.blank(), self.trainer.federation
        number = _number(client, federation.client_names)
        return _module(blank, selected, federation.clients, number, whole=self.trainer.has_global)

    def local_model(self, client: int | str) -> nn.Module:
        """Return a client's local model: as it was after its training in the last round, before aggregation.

        Parameters
        ----------
        client : int or str
            Whose, by number or name. It must have taken part in the last round, and the run must have been made with
            ``evaluation.keep_local``.

        Returns
        -------
        nn.Module
            In evaluation mode, on the CPU.
        """
        blank, federation = self.trainer.engine.network.blank(), self.trainer.federation
        return _filled(blank, _local(self.trainer.local_models(), _number(client, federation.client_names)))


def _names_arguments(function: F) -> F:
    """Call settings in errors what the caller calls them: ``rounds`` instead of ``training.rounds``."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        try:
            return function(*args, **given)
        except InputError as error:
            said = re.sub(r"^training\.(\w+)", lambda found: found[1] if found[1] in given else found[0], str(error))
            if said == str(error):
                raise
            raise InputError(said) from error

    return called  # type: ignore[return-value]


@_names_arguments
def train(
    federation: Federation,
    *,
    method: str | Mapping[str, Any] | Method = "fedavg",
    model: str | Mapping[str, Any] | nn.Module | None = None,
    training: Training | None = None,
    machine: Machine | None = None,
    evaluation: Evaluation | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    data: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    attached: Mapping[str, bytes] | None = None,
    engine: MakeEngine = StackedEngine,
    on_round: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Run:
    """Train a federation.

    Parameters
    ----------
    federation : Federation
        The clients and their data.
    method : str, mapping or Method
        What is federated: a name, a mapping with ``name`` and hyper-parameters, or a method.
    model : str, mapping or nn.Module, optional
        A name, a mapping with ``name`` and options, or a module with ``features`` and ``head``; by default ``mlp``,
        or what the method asks for.
    training : Training, optional
        How clients train.
    machine : Machine, optional
        Where, and in which arithmetic.
    evaluation : Evaluation, optional
        When clients are evaluated, and which round counts.
    seed : int
        Of the initial model and of all random numbers.
    out : path, optional
        The run directory; without one nothing is written.
    resume : bool
        Whether to resume the run in the directory; a directory without one starts a new run.
    checkpoint_every : int
        Rounds between checkpoints.
    data : mapping, optional
        How the federation was made, for the run's configuration.
    sections : mapping, optional
        Whatever else the run depends on, for its configuration.
    attached : mapping of bytes, optional
        Files that the configuration refers to, by name, to be copied to the run directory.
    engine : callable
        Makes the engine; by default the one that runs in this process.
    on_round : callable, optional
        Called with the :class:`~equipoise.run.trainer.Progress` after every round.
    **settings
        Shortcuts for the fields of ``Training``, such as ``rounds=20`` or ``optimizer={"name": "sgd", "lr": 0.1}``. With
        ``rounds=0`` the initial model is evaluated and nothing is trained.

    Returns
    -------
    Run
        With its summary and its models.

    Examples
    --------
    >>> from equipoise.data import load as load_data
    >>> run = train(load_data("digits"), method="fedavg", model="mlp", rounds=2)
    >>> sorted(run.summary["results"]["global"]["seen"]["groups"])
    ['blurred', 'inverted', 'plain', 'rotated', 'textured']
    """
    if resume and out is None:
        raise InputError("resume=True needs out=, the directory of the run to go on with")
    if isinstance(federation, str):
        raise InputError(f"train() takes a federation, not the name of one: equipoise.data.load({federation!r})")
    training = _training(_checked(training, Training, "training"), settings)
    machine = _checked(machine, Machine, "machine") or Machine()
    evaluation = _checked(evaluation, Evaluation, "evaluation") or Evaluation()
    made = method if isinstance(method, Method) else methods.build(**_named(method, "method"))
    if isinstance(model, nn.Module):
        # Copied, because the method's parts may be added to it.
        module, model_config = copy.deepcopy(model), {"name": f"custom:{type(model).__name__}"}
    else:
        model_config = models.with_class_names(_named(model or made.usual_model, "model"), federation.class_names)
        module = models.build(shape=federation.shape, classes=federation.outputs, seed=seed, **model_config)
    module = made.extend(module, federation.shape, seed)
    count(checkpoint_every, "checkpoint_every")
    config = {
        "method": methods.describe(made),
        "data": dict(data) if data else {"name": federation.name},
        "model": model_config,
        "training": to_plain(training),
        "machine": to_plain(machine),
        "evaluation": to_plain(evaluation),
        "seed": seed,
        "checkpoint_every": checkpoint_every,
        **(sections or {}),
    }
    directory = Path(out) if out is not None else None
    config, finished = _open(directory, config, federation, machine, module, resume)
    chosen = config["resolved"].get("chunk")
    if isinstance(chosen, int):
        machine = Machine(**{**to_plain(machine), "chunk": chosen})
    trainer = Trainer(
        federation, made, module, training, machine, evaluation, seed, directory, checkpoint_every, engine
    )
    with ExitStack() as until_done:
        there = directory is not None and directory.exists()
        if directory and there:
            until_done.enter_context(sole_writer(directory))
        if resume:
            trainer.restore_checkpoint()
        trainer.begin()
        if chosen is None:
            measures = machine.chunk == "measure" and training.rounds > 0
            measured = trainer.measure_chunk() if measures else trainer.engine.chunk
            config["resolved"]["chunk"] = measured
            if directory:
                if not there:
                    # The directory is created after all checks, so that invalid settings leave none behind.
                    directory.mkdir(parents=True, exist_ok=True)
                    until_done.enter_context(sole_writer(directory))
                    # Another run may have used the directory in the meantime.
                    _refuse_a_run_in(directory)
                write_atomically(directory / CONFIG, _yaml(config))
                for name, content in (attached or {}).items():
                    write_atomically(directory / name, content)
        if finished and directory:
            return Run(json.loads((directory / SUMMARY).read_text()), config, directory, trainer)
        trainer.run(on_round)
        return _finished(trainer, config, directory)


def _finished(trainer: Trainer, config: dict[str, Any], directory: Path | None) -> Run:
    """Write the results to the run directory, if there is one."""
    summary = trainer.summary()
    if directory:
        selected = trainer.selected()
        save_tensors(directory / GLOBAL, selected.shared, {"round": selected.round, "whole": trainer.has_global})
        if names := trainer.federation.client_names:
            write_atomically(directory / NAMES, json.dumps(names, ensure_ascii=False, indent=0).encode() + b"\n")
        if selected.own:
            save_tensors(directory / PERSONAL, selected.own, {"round": selected.round, "clients": selected.clients})
        if trainer.method.local.makes_index:
            trainer.client_index().write(directory / INDEX)
        # The summary is written last: a run with a summary is complete.
        write_atomically(directory / SUMMARY, json.dumps(summary, indent=2).encode() + b"\n")
    return Run(summary, config, directory, trainer)


def load(
    run: str | Path, client: int | str | None = None, *, local: bool = False, module: nn.Module | None = None
) -> nn.Module:
    """Return a trained model from a run directory.

    Methods whose clients keep parts of the shared model for themselves, such as FedPer's head, leave no global model
    behind unless ``evaluation.average_kept`` has made one.

    Parameters
    ----------
    run : path
        The run directory.
    client : int or str, optional
        Whose personal model, by number or, where clients have names, by name: the one it was evaluated with, which clients held
        out of training have made of the global one. The global model by default.
    local : bool
        Whether to return the client's local model instead: as it was after its training in the last round, before
        aggregation, the parts it keeps included. The run must have been made with ``evaluation.keep_local``.
    module : nn.Module, optional
        The model's architecture, needed only if the run was made with a module of its own and not a named model.

    Returns
    -------
    nn.Module
        In evaluation mode, on the CPU.

    Examples
    --------
    >>> import tempfile
    >>> from equipoise.data import load as load_data
    >>> out = tempfile.mkdtemp() + "/run"
    >>> digits = load_data("digits")
    >>> _ = train(digits, rounds=1, out=out)
    >>> load(out)(digits.x[:2]).shape
    torch.Size([2, 10])
    """
    directory = Path(run)
    config = read_config(directory)
    import_own(config.get("imports", []), beside=directory)
    if module is None:
        name = config["model"]["name"]
        if name.startswith("custom:"):
            raise InputError(f"the run in {directory} used a model of its own ({name[7:]}); pass it as module=")
        resolved = config["resolved"]
        module = models.build(
            shape=resolved["shape"], classes=resolved["outputs"], seed=config["seed"], **config["model"]
        )
    module = methods.build(**config["method"]).extend(
        copy.deepcopy(module), tuple(config["resolved"]["shape"]), config["seed"]
    )
    # Runs of older versions hold their frozen tensors themselves.
    recorded = config["resolved"].get("frozen")
    if recorded is not None and (here := frozen_digest(module)) != recorded:
        raise InputError(
            f"the frozen tensors of the model differ from those of the run in {directory}: their hash is {here}, the "
            f"run's {recorded}; the run's model is {config['model']}"
        )
    named = (directory / NAMES).exists()
    number = _number(client, json.loads((directory / NAMES).read_text(encoding="utf-8")) if named else None)
    if local:
        return _filled(convert(module), _local(read_local(directory), number))
    shared, note = load_tensors(directory / GLOBAL)
    own: Tree = {}
    clients: list[int] = []
    if (directory / PERSONAL).exists():
        own, held = load_tensors(directory / PERSONAL)
        clients = held["clients"]
    chosen = Models(note["round"], shared, clients, own)
    return _module(convert(module), chosen, config["resolved"]["clients"], number, whole=note["whole"])


def read_config(directory: Path) -> dict[str, Any]:
    """Read a run's configuration; a directory that holds none is refused."""
    path = directory / CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{directory} holds no run: cannot read {path.name} ({error})") from error
    if not isinstance(config, dict) or "resolved" not in config:
        raise InputError(f"{directory} holds no run: {path.name} is not a run's configuration")
    return config


def _number(client: int | str | None, names: Sequence[str] | None) -> int | None:
    """Return a client's number by its name, and refuse a number that could be mistaken for a name."""
    if client is None:
        return None
    if not isinstance(client, str):
        if isinstance(client, bool) or not hasattr(client, "__index__"):
            raise InputError(f"client {client!r} is no client; give its number, a whole one, or its name")
        number, own, names = int(client), str(int(client)), names or ()
        called = names[number] if 0 <= number < len(names) else None
        numeric = called is not None and all(name.removeprefix("-").isdecimal() for name in names)
        agrees = called == own or (numeric and int(called or 0) == number)
        # Where two clients share a name, only the number tells them apart.
        if agrees or names.count(called) > 1 or not (numeric or own in names):
            return number
        here = f"there is no number {number}" if called is None else f"number {number} is called {called!r}"
        there = f"{own!r} is number {names.index(own)}" if own in names else f"no client is called {own!r}"
        valid = " or ".join(f"client={name!r}" for name in (own, called) if name in names)
        raise InputError(f"client {number} is ambiguous: {here}, and {there}; give {valid}")
    if not names:
        raise InputError(f"client {client!r}: clients of this run have no names; give a number")
    numbers = [number for number, name in enumerate(names) if name == client]
    if not numbers:
        raise unknown("client", client, names)
    if len(numbers) > 1:
        raise InputError(f"client {client!r}: clients {', '.join(map(str, numbers))} are called so; give a number")
    return numbers[0]


def _local(models: Models, client: int | None) -> Tree:
    """Return the tensors of a client's local model."""
    if client is None or client not in models.clients:
        asked = "local models belong to clients" if client is None else f"client {client} has no local model"
        raise InputError(
            f"{asked}; valid: client= one of those that trained in round {models.round}: "
            f"{', '.join(map(str, models.clients))}"
        )
    row = models.clients.index(client)
    return {**models.shared, **{name: stack[row] for name, stack in models.own.items()}}


def _module(module: nn.Module, chosen: Models, registered: int, client: int | None, *, whole: bool) -> nn.Module:
    """Fill a module with the global model, or with a client's own if ``client`` is given.

    If clients keep parts of the shared model, there is no complete global model, and only clients
    that have taken part have a model.
    """
    tensors = dict(chosen.shared)
    if not whole and (client is None or (0 <= client < registered and client not in chosen.clients)):
        asked = "there is no global model" if client is None else f"client {client} has never taken part"
        raise InputError(
            f"{asked}, and clients of this method keep parts of the model for themselves; "
            f"valid: client= one of {', '.join(map(str, chosen.clients))}"
        )
    if client is not None:
        if not chosen.own:
            raise InputError(f"client {client} has no personal model; the method gives all clients the global model")
        if not 0 <= client < registered:
            raise InputError(f"client {client} does not exist; valid: 0 to {registered - 1}")
        # A client that has never taken part still has the global model.
        if client in chosen.clients:
            row = chosen.clients.index(client)
            tensors = personal_model(chosen.shared, {name: stack[row] for name, stack in chosen.own.items()})
    return _filled(module, tensors)


def _filled(module: nn.Module, tensors: Tree) -> nn.Module:
    """Copy tensors into a module, which must have the same ones."""
    # A model without trained tensors keeps its type.
    dtype = next((tensor.dtype for tensor in tensors.values()), None)
    # Runs of older versions hold frozen tensors too.
    slots = [s for s in slots_of(module.to(dtype=dtype, device="cpu")) if not s.frozen or s.name in tensors]
    there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if difference := first_difference(there, {slot.name: tuple(slot.tensor.shape) for slot in slots}):
        raise InputError(f"the module does not fit the run: the shape of {difference}")
    with torch.no_grad():
        for slot in slots:
            slot.tensor.copy_(tensors[slot.name])
    return module.eval()


def _open(
    directory: Path | None,
    config: dict[str, Any],
    federation: Federation,
    machine: Machine,
    module: nn.Module,
    resume: bool,
) -> tuple[dict[str, Any], bool]:
    """Complete the configuration, check the directory, and say whether the run in it is finished."""
    resolved = {
        "equipoise": equipoise.__version__,
        "torch": torch.__version__,
        "device": machine.torch_device.type,
        "threads": torch.get_num_threads(),
        "fingerprint": federation.fingerprint(),
        "shape": list(federation.shape),
        "outputs": federation.outputs,
        "clients": federation.clients,
    }
    if config["model"]["name"].startswith("custom:"):
        resolved["module"] = _architecture(module)
    if frozen := frozen_digest(module):
        resolved["frozen"] = frozen
    config = {**config, "resolved": resolved}
    if directory is None:
        return config, False
    if (directory / CONFIG).exists():
        if not resume:
            _refuse_a_run_in(directory)
        found = read_config(directory)
        chunk = found["resolved"].pop("chunk", None)
        # The number of clients may change on Flower; elsewhere the fingerprint contains it.
        found["resolved"]["clients"] = resolved["clients"]
        # Runs of older versions do not record their module; their checkpoints are refused by version.
        for entry in ("module", "frozen"):
            found["resolved"].setdefault(entry, resolved.get(entry))
        if difference := first_difference(found, json.loads(json.dumps(config))):
            # An older version differs in settings it did not have, which say less than its number.
            refuse_another_version(directory)
            same = "pass the module the run began with or " if difference.startswith("resolved.module ") else ""
            raise InputError(f"{directory} holds another experiment: {difference}; {same}choose another directory")
        finished = (directory / SUMMARY).exists()
        if finished and not (directory / CHECKPOINT).exists():
            raise RunError(
                f"the run in {directory} is finished, but its {CHECKPOINT} is missing; its results are intact and there "
                "is nothing to resume. equipoise.load reads its models"
            )
        return {**config, "resolved": resolved | ({"chunk": chunk} if chunk else {})}, finished
    # A process that is killed while it writes the first file leaves only that temporary file behind.
    leftover = f"{CONFIG}.tmp"
    if directory.exists() and (not directory.is_dir() or any(path.name != leftover for path in directory.iterdir())):
        raise InputError(f"{directory} exists and is no run directory; choose another")
    return config, False


def _architecture(module: nn.Module) -> str:
    """Hash the architecture of a module: its layers as printed, and the names, shapes and types of its tensors."""
    # Functions are printed with their address, which differs between processes.
    layers = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(module))
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = [(name, None if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    return hashlib.sha256(repr((layers, tensors)).encode()).hexdigest()[:16]


def _refuse_a_run_in(directory: Path) -> None:
    if (directory / CONFIG).exists():
        raise InputError(f"{directory} already holds a run; resume it (--resume) or choose another directory")


def first_difference(found: Any, wanted: Any, path: str = "") -> str | None:
    """Return the first key in which nested mappings differ, or ``None``.

    Examples
    --------
    >>> first_difference({"training": {"rounds": 1}}, {"training": {"rounds": 2}})
    'training.rounds is 1 there and 2 here'
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*found, *(k for k in wanted if k not in found)]:
            inner = first_difference(found.get(key), wanted.get(key), f"{path}.{key}" if path else str(key))
            if inner:
                return inner
        return None
    return None if found == wanted else f"{path} is {found!r} there and {wanted!r} here"


def _yaml(config: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False).encode()


def _named(value: str | Mapping[str, Any], what: str) -> dict[str, Any]:
    if not isinstance(value, (str, Mapping)):
        raise InputError(f"{what} must be a name or a mapping with 'name', got {value!r}")
    named = {"name": value} if isinstance(value, str) else dict(value)
    if "name" not in named:
        raise InputError(f"{what} {named!r} has no name")
    return named


def _checked(settings: S | None, kind: type[S], name: str) -> S | None:
    if settings is not None and not isinstance(settings, kind):
        raise InputError(
            f"{name} must be of the class {kind.__name__} (from equipoise import {kind.__name__}), got {settings!r}"
        )
    return settings


def _training(training: Training | None, settings: Mapping[str, Any]) -> Training:
    valid = [field.name for field in dataclasses.fields(Training)]
    for key, value in settings.items():
        if key in OPTIMIZER_OPTIONS:
            raise InputError(
                f"unknown setting {key!r} in train(); it is an option of the optimizer: "
                f"optimizer={{'name': 'sgd', {key!r}: {value!r}}}"
            )
        if key not in valid:
            raise unknown("setting", key, valid, where="train()")
    made = dict(settings)
    for key, read in (("optimizer", optimizer_from), ("schedule", schedule_from)):
        if isinstance(made.get(key), (str, Mapping)):
            made[key] = read(made[key])
    return dataclasses.replace(training, **made) if training else Training(**made)
