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
from equipoise.documents import read_json, yaml_from
from equipoise.engine.network import frozen_digest, is_frozen_digest, slots_of
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError, unknown
from equipoise.federation import Federation
from equipoise.imports import import_of_run
from equipoise.method import Method, personal_model
from equipoise.models.headed import Headed, with_head
from equipoise.models.layers import convert
from equipoise.optimizers import OPTIMIZER_OPTIONS
from equipoise.run.callbacks import Callback, Listeners, checked
from equipoise.run.checkpoint import (
    CHECKPOINT,
    IF_LONGER,
    read_local,
    read_note,
    refuse_another_version,
)
from equipoise.run.checksums import SUMS, read_sums, verify, write_sums
from equipoise.run.evaluation import Evaluation, Models
from equipoise.run.files import load_tensors, save_tensors, sole_writer, write_atomically
from equipoise.run.plain import optimizer_from, schedule_from, to_plain
from equipoise.run.processes import (
    Work,
    follow,
    joined,
    processes_of,
    rank_of_torchrun,
    started,
    started_by_torchrun,
    threads_of_each,
)
from equipoise.run.start import Start, start_from
from equipoise.run.trainer import MakeEngine, Progress, Trainer
from equipoise.tree import Tree, digest

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
            The client, by number or name. Its personal model is the one that was evaluated. The
            global model by default.

        Returns
        -------
        nn.Module
            In evaluation mode, on the CPU.
        """
        selected = self.trainer.selected()
        blank, federation = self.trainer.engine.network.blank(), self.trainer.federation
        number = _number(client, federation.client_names)
        module = _module(blank, selected, federation.clients, number, whole=self.trainer.has_global)
        return _undivided(module, self.config)

    def local_model(self, client: int | str) -> nn.Module:
        """Return a client's local model: after its training in the last round, before aggregation.

        Parameters
        ----------
        client : int or str
            The client, by number or name. It must have taken part in the last round, and the run
            must have used ``evaluation.keep_local``.

        Returns
        -------
        nn.Module
            In evaluation mode, on the CPU.
        """
        blank, federation = self.trainer.engine.network.blank(), self.trainer.federation
        local = _local(self.trainer.local_models(), _number(client, federation.client_names))
        return _undivided(_filled(blank, local), self.config)


class Followed(Run):
    """A finished run in a process of ``torchrun`` other than process 0: without its models."""

    def model(self, client: int | str | None = None) -> nn.Module:
        """Refuse: process 0 has the models."""
        raise self._elsewhere

    def local_model(self, client: int | str) -> nn.Module:
        """Refuse: process 0 has the models."""
        raise self._elsewhere

    @property
    def _elsewhere(self) -> InputError:
        return InputError(
            "this process has worked for process 0, which alone has the models of the run; load "
            "them from its directory, or ask for them where RANK is 0"
        )


def _names_arguments(function: F) -> F:
    """Name settings in errors like the arguments: ``rounds`` instead of ``training.rounds``."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        try:
            return function(*args, **given)
        except InputError as error:
            said = re.sub(
                r"^training\.(\w+)",
                lambda found: found[1] if found[1] in given else found[0],
                str(error),
            )
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
    head: str | None = None,
    training: Training | None = None,
    machine: Machine | None = None,
    evaluation: Evaluation | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    start: str | Path | Mapping[str, Any] | Start | None = None,
    data: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    attached: Mapping[str, bytes] | None = None,
    engine: MakeEngine = StackedEngine,
    on_round: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Run:
    """Train a federation.

    Parameters
    ----------
    federation : Federation
        The clients and their data.
    method : str, mapping or Method
        A name, a mapping with ``name`` and hyper-parameters, or a method.
    model : str, mapping or nn.Module, optional
        A name, a mapping with ``name`` and options, or any module; by default the usual model of
        the method, for most methods ``mlp``.
    head : str, optional
        The dotted name of the layer that is the head of a module, such as ``"classifier"``, for
        methods that treat features and head differently. Modules with the submodules ``features``
        and ``head`` do not need it.
    training : Training, optional
        How clients train.
    machine : Machine, optional
        Device and precision.
    evaluation : Evaluation, optional
        When clients are evaluated, and which round is reported.
    seed : int
        Seed of the initial model and of all random numbers.
    out : path, optional
        The run directory. Without it nothing is written.
    resume : bool
        Whether to resume the run in the directory. If there is none, a new run starts. If
        ``rounds`` is larger than before, the run is made longer. The results are those of a run
        that had this length from the start. An error is raised if they would differ, because the
        schedule or the method depends on the number of rounds.
    checkpoint_every : int
        Rounds between checkpoints.
    start : path, mapping or Start, optional
        The initial model: the directory of another run, a safetensors file, or a mapping with
        ``path`` and the ``parts`` to load; see :class:`equipoise.run.start.Start`.
    data : mapping, optional
        How the federation was made, for the run's configuration.
    sections : mapping, optional
        Further sections of the run's configuration.
    attached : mapping of bytes, optional
        Files that the configuration refers to, by name. They are copied to the run directory.
    engine : callable
        Makes the engine; by default the one that runs in this process.
    on_round : callable, optional
        Called with the :class:`~equipoise.run.trainer.Progress` after every round.
    callbacks : sequence of Callback
        Objects that are called during the run, get its models and may stop it; see
        :class:`equipoise.Callback`. They are not called if the run in the directory is finished.
    **settings
        Shortcuts for the fields of ``Training``, such as ``rounds=20`` or ``optimizer={"name":
        "sgd", "lr": 0.1}``. With ``rounds=0`` the initial model is evaluated and nothing is
        trained.

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
        raise InputError("resume=True needs out=, the directory of the run to resume")
    if isinstance(federation, str):
        raise InputError(
            f"train() takes a federation, not a name; use equipoise.data.load({federation!r})"
        )
    training = _training(_checked(training, Training, "training"), settings)
    machine = _checked(machine, Machine, "machine") or Machine()
    evaluation = _checked(evaluation, Evaluation, "evaluation") or Evaluation()
    callbacks = checked(callbacks)
    made = method if isinstance(method, Method) else methods.build(**_named(method, "method"))
    if isinstance(model, nn.Module):
        # Copied, because the method may add parts to it.
        module, model_config = (
            _divided(copy.deepcopy(model), head),
            {"name": f"custom:{type(model).__name__}"},
        )
        if head is not None:
            model_config["head"] = head
    else:
        if head is not None:
            raise InputError(
                f"head={head!r} is valid only with a module, but the model is {model!r}; leave it "
                "out"
            )
        model_config = models.with_class_names(
            _named(model or made.usual_model, "model"), federation.class_names
        )
        module = models.build(
            shape=federation.shape, classes=federation.outputs, seed=seed, **model_config
        )
    module = made.extend(module, federation.shape, seed)
    count(checkpoint_every, "checkpoint_every")
    imports = tuple((sections or {}).get("imports", ()))
    work = Work(federation, made, module, training, machine, evaluation, seed, imports)
    processes = _processes(machine, engine)
    if rank_of_torchrun():
        told, follower = follow(work)
        return Followed(told["summary"], told["config"], None, follower)
    warm = start_from(start)
    begun = warm.tensors(module) if warm else {}
    config = {
        "method": methods.describe(made),
        "data": dict(data) if data else {"name": federation.name},
        "model": model_config,
        "training": to_plain(training),
        "machine": to_plain(machine),
        "evaluation": to_plain(evaluation),
        "seed": seed,
        "checkpoint_every": checkpoint_every,
        **({"start": to_plain(warm)} if warm else {}),
        **(sections or {}),
    }
    directory = Path(out) if out is not None else None
    with ExitStack() as until_done:
        # Processes that torchrun has started wait already, and must hear of errors.
        waiting = processes > 1 and started_by_torchrun()
        team = until_done.enter_context(joined(work)) if waiting else None
        config, finished, longer = _open(
            directory, config, federation, machine, module, begun, resume, attached or {}, processes
        )
        if longer and directory:
            _refuse_to_lengthen(
                directory,
                training,
                made,
                best=evaluation.select == "best" and engine is not StackedEngine,
            )
        chosen = config["resolved"].get("chunk")
        if isinstance(chosen, int):
            machine = Machine(**{**to_plain(machine), "chunk": chosen})
        if processes > 1 and not (waiting or finished):
            team = until_done.enter_context(started(work, processes))
        trainer = Trainer(
            federation,
            made,
            module,
            training,
            machine,
            evaluation,
            seed,
            directory,
            checkpoint_every,
            team.engine if team else engine,
            begun,
        )
        if directory:
            trainer.identity = _identity(config)
        there = directory is not None and directory.exists()
        if directory and there:
            until_done.enter_context(sole_writer(directory))
        if directory and (finished or (longer and (directory / SUMMARY).exists())):
            verify(directory)
        if longer and directory:
            _lengthen(directory, _yaml(config), attached or {})
        if resume:
            trainer.restore_checkpoint(finished=finished)
        if longer:
            # The callback stopped the shorter run.
            trainer.stopped = None
        trainer.begin()
        if chosen is None:
            measures = machine.chunk == "measure" and training.rounds > 0
            measured = trainer.measure_chunk() if measures else trainer.engine.chunk
            config["resolved"]["chunk"] = measured
            if directory:
                if not there:
                    # The directory is created after all checks, so that invalid settings create no
                    # directory.
                    directory.mkdir(parents=True, exist_ok=True)
                    until_done.enter_context(sole_writer(directory))
                    # Another run may have used the directory in the meantime.
                    _refuse_a_run_in(directory)
                _begin(directory, _yaml(config), attached or {})
        if finished and directory:
            run = Run(read_json(directory / SUMMARY), config, directory, trainer)
        else:
            shown = json.loads(json.dumps(config, default=repr))
            listeners = Listeners(callbacks, shown, directory)
            try:
                trainer.run(on_round, listeners)
                run = _finished(trainer, config, directory)
            except BaseException as error:
                listeners.end(error=error)
                raise
            listeners.end(run.summary)
        if team:
            team.result = {"summary": run.summary, "config": config}
        return run


def _processes(machine: Machine, engine: MakeEngine) -> int:
    """Return how many processes a run has, and refuse several where they are of no use."""
    processes = processes_of(machine)
    if processes > 1 and engine is not StackedEngine:
        raise InputError(
            f"machine.processes is {processes}, but on Flower every client has a process of its "
            "own; leave it out"
        )
    return processes


def _begin(directory: Path, config: bytes, attached: Mapping[str, bytes]) -> None:
    """Write the first files of a run.

    The configuration is written last: a directory with this file contains a run.
    """
    for name, content in attached.items():
        write_atomically(directory / name, content)
    write_sums(
        directory,
        {name: _sha256(content) for name, content in {**attached, CONFIG: config}.items()},
    )
    write_atomically(directory / CONFIG, config)


def _lengthen(directory: Path, config: bytes, attached: Mapping[str, bytes]) -> None:
    """Write the configuration of a longer run.

    The order matters: a run with a summary is complete, and a configuration that differs from its
    checksum is damaged. So both configurations have a checksum until the old one is replaced.
    """
    (directory / SUMMARY).unlink(missing_ok=True)
    sums = {name: _sha256(content) for name, content in {**attached, CONFIG: config}.items()}
    has_sums = read_sums(directory) is not None
    if has_sums:
        write_sums(directory, sums, {CONFIG: _sha256((directory / CONFIG).read_bytes())})
    write_atomically(directory / CONFIG, config)
    if has_sums:
        write_sums(directory, sums)


def _finished(trainer: Trainer, config: dict[str, Any], directory: Path | None) -> Run:
    """Write the results to the run directory, if there is one."""
    summary = trainer.summary()
    if directory:
        selected = trainer.selected()
        save_tensors(
            directory / GLOBAL,
            selected.shared,
            {"round": selected.round, "whole": trainer.has_global},
        )
        if names := trainer.federation.client_names:
            write_atomically(
                directory / NAMES, json.dumps(names, ensure_ascii=False, indent=0).encode() + b"\n"
            )
        if selected.own:
            save_tensors(
                directory / PERSONAL,
                selected.own,
                {"round": selected.round, "clients": selected.clients},
            )
        if trainer.method.local.makes_index:
            trainer.client_index().write(directory / INDEX)
        content = json.dumps(summary, indent=2).encode() + b"\n"
        # A run that an older version started has no checksums, and gets none at the end.
        if (sums := read_sums(directory)) is not None:
            journals = {
                journal.path.name: journal.digest
                for journal in trainer.journals.values()
                if journal.path
            }
            there = {
                name: digest for name, digest in journals.items() if (directory / name).exists()
            }
            named = {NAMES: _sha256((directory / NAMES).read_bytes())} if names else {}
            write_sums(directory, {**sums, **there, **named, SUMMARY: _sha256(content)})
        # The summary is written last: a run with a summary is complete.
        write_atomically(directory / SUMMARY, content)
    return Run(summary, config, directory, trainer)


def load(
    run: str | Path,
    client: int | str | None = None,
    *,
    local: bool = False,
    module: nn.Module | None = None,
    trust: bool = False,
) -> nn.Module:
    """Return a trained model from a run directory.

    If clients keep parts of the shared model, such as FedPer's head, there is no global model
    unless the run used ``evaluation.average_kept``.

    Parameters
    ----------
    run : path
        The run directory.
    client : int or str, optional
        The client whose personal model is returned, by number, or by name if clients have names. It
        is the model that was evaluated; unseen clients have adapted the global one. The global
        model by default.
    local : bool
        Whether to return the client's local model instead: after its training in the last round,
        before aggregation, with the parts that it keeps. The run must have used
        ``evaluation.keep_local``.
    module : nn.Module, optional
        The model's architecture. It is needed only if the run used a custom module and not a named
        model. It is divided into features and head as in training.
    trust : bool
        Whether to execute the code that the run imports, unless this process has imported it
        already. Anyone may have put code into the directory, so without ``trust`` such a run is
        refused, and the error names the files.

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
    import_of_run(config.get("imports", []), directory, trust=trust)
    try:
        module = _model_of(config, directory, module)
    except InputError:
        raise
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        RuntimeError,
        OverflowError,
        MemoryError,
    ) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"cannot build the model that {directory / CONFIG} describes ({said})"
        ) from error
    # Runs of older versions contain their frozen tensors.
    recorded = config["resolved"].get("frozen")
    if recorded is not None and not is_frozen_digest(recorded, module):
        raise InputError(
            f"the frozen tensors of the model differ from those of the run in {directory}: their "
            f"hash is {frozen_digest(module)}, the run's {recorded}; the run's model is "
            f"{config['model']}"
        )
    number = _number(client, read_names(directory))
    if local:
        return _undivided(_filled(convert(module), _local(read_local(directory), number)), config)
    shared, note = load_tensors(directory / GLOBAL)
    own: Tree = {}
    clients: list[int] = []
    if (directory / PERSONAL).exists():
        own, held = load_tensors(directory / PERSONAL)
        clients = _noted(held, "clients", list, directory / PERSONAL)
    chosen = Models(_noted(note, "round", int, directory / GLOBAL), shared, clients, own)
    whole = _noted(note, "whole", bool, directory / GLOBAL)
    filled = _module(convert(module), chosen, config["resolved"]["clients"], number, whole=whole)
    return _undivided(filled, config)


def _divided(module: nn.Module, head: str | None) -> nn.Module:
    """Divide a module into features and head, if the head is named."""
    return module if head is None else with_head(module, head)


def _undivided(module: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Return the original module, if it was divided by the argument ``head``."""
    return (
        module.whole().eval()
        if isinstance(module, Headed) and "head" in config["model"]
        else module
    )


def _model_of(config: Mapping[str, Any], directory: Path, module: nn.Module | None) -> nn.Module:
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
        module = _divided(copy.deepcopy(module), config["model"].get("head"))
    method = methods.build(**config["method"])
    return method.extend(module, tuple(resolved["shape"]), config["seed"])


def _noted(note: Mapping[str, Any], key: str, kind: type[S], path: Path) -> S:
    """Return a value that the note of a file must have."""
    value = note.get(key)
    if not isinstance(value, kind):
        raise RunError(f"{path} is not a file of a run's models: its note has no {key}")
    return value


def read_names(directory: Path) -> list[str] | None:
    """Read the names of a run's clients by number; ``None`` if they have no names."""
    if not (directory / NAMES).exists():
        return None
    if (directory / SUMMARY).exists():
        verify(directory, NAMES)
    names = read_json(directory / NAMES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunError(f"{directory / NAMES} must contain a list of names")
    return names


def read_config(directory: Path) -> dict[str, Any]:
    """Read a run's configuration. A missing or a changed one is refused."""
    path = directory / CONFIG
    if path.exists():
        verify(directory, CONFIG)
    try:
        config = yaml_from(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"{directory} holds no run: cannot read {path.name} ({said})") from error
    if not isinstance(config, dict) or not isinstance(config.get("resolved"), dict):
        raise InputError(f"{directory} holds no run: {path.name} is not a run's configuration")
    return config


def _number(client: int | str | None, names: Sequence[str] | None) -> int | None:
    """Return the number of a client by name, and refuse a number that could also be a name."""
    if client is None:
        return None
    if not isinstance(client, str):
        if isinstance(client, bool) or not hasattr(client, "__index__"):
            raise InputError(
                f"client {client!r} is not a client; pass its number, a whole number, or its name"
            )
        number, own, names = int(client), str(int(client)), names or ()
        called = names[number] if 0 <= number < len(names) else None
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


def _local(models: Models, client: int | None) -> Tree:
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


def _module(
    module: nn.Module, chosen: Models, registered: int, client: int | None, *, whole: bool
) -> nn.Module:
    """Fill a module with the global model, or with a client's model if ``client`` is given.

    If clients keep parts of the shared model, there is no complete global model, and only clients
    that have taken part have a model.
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
    if client is not None:
        if not chosen.own:
            raise InputError(
                f"client {client} has no personal model; with this method all clients use the "
                "global model"
            )
        if not 0 <= client < registered:
            raise InputError(f"client {client} does not exist; valid: 0 to {registered - 1}")
        # A client that has never taken part still has the global model.
        if client in chosen.clients:
            row = chosen.clients.index(client)
            tensors = personal_model(
                chosen.shared, {name: stack[row] for name, stack in chosen.own.items()}
            )
    return _filled(module, tensors)


def _filled(module: nn.Module, tensors: Tree) -> nn.Module:
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


def _open(
    directory: Path | None,
    config: dict[str, Any],
    federation: Federation,
    machine: Machine,
    module: nn.Module,
    begun: Tree,
    resume: bool,
    attached: Mapping[str, bytes],
    processes: int,
) -> tuple[dict[str, Any], bool, bool]:
    """Complete the configuration and check the directory.

    Return whether the run in it is finished, and whether it is made longer.
    """
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
    if directory is None:
        return config, False, False
    if (directory / CONFIG).exists():
        if not resume:
            _refuse_a_run_in(directory)
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
        longer = found["training"]["rounds"] < config["training"]["rounds"]
        if longer:
            found["training"]["rounds"] = config["training"]["rounds"]
        # Trackers are not part of the experiment.
        there, here = (
            {**given, "tracking": None} for given in (found, json.loads(json.dumps(config)))
        )
        if difference := first_difference(there, here):
            # Runs of older versions differ in settings that did not exist. The error about the
            # version is clearer.
            refuse_another_version(directory)
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
        finished = (directory / SUMMARY).exists()
        if finished and not (directory / CHECKPOINT).exists():
            raise RunError(
                f"the run in {directory} is finished, but its {CHECKPOINT} is missing; its results "
                "are intact and there is nothing to resume. equipoise.load reads its models"
            )
        return (
            {**config, "resolved": resolved | ({"chunk": chunk} if chunk else {})},
            finished and not longer,
            longer,
        )
    if directory.exists() and (
        not directory.is_dir() or not all(_left_over(p, attached) for p in directory.iterdir())
    ):
        raise InputError(f"{directory} exists and is not a run directory; choose another")
    return config, False, False


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


def _refuse_to_lengthen(directory: Path, training: Training, method: Method, *, best: bool) -> None:
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


def _check_code(directory: Path, attached: Mapping[str, bytes]) -> None:
    """Refuse to resume a run with other code than that with which it started."""
    for name, content in attached.items():
        path = directory / name
        if not path.exists():
            # Runs of older versions may lack a copy.
            continue
        verify(directory, name)
        if path.read_bytes() != content:
            raise InputError(
                f"{directory} holds another experiment: {name} differs from the copy there, with "
                f"which the run started; resume with that copy (equipoise run {directory / CONFIG} "
                "--resume --trust) or choose another directory"
            )


def _left_over(path: Path, attached: Mapping[str, bytes]) -> bool:
    """Return whether a file may be from a process that was killed before its run began."""
    first = (*attached, SUMS, CONFIG)
    if path.name == SUMS or path.name in {f"{name}.tmp" for name in first}:
        return True
    return path.is_file() and path.read_bytes() == attached.get(path.name)


def _identity(config: Mapping[str, Any]) -> str:
    """Return a hash of a run's settings without its number of rounds and its trackers."""
    resolved = {
        name: value
        for name, value in config["resolved"].items()
        if name not in ("clients", "chunk")
    }
    training = {name: value for name, value in config["training"].items() if name != "rounds"}
    same = {**config, "resolved": resolved, "training": training, "tracking": None}
    return _sha256(json.dumps(same, sort_keys=True).encode())[:16]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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


def _refuse_a_run_in(directory: Path) -> None:
    if (directory / CONFIG).exists():
        raise InputError(
            f"{directory} already holds a run; resume it (--resume) or choose another directory"
        )


def first_difference(found: Any, wanted: Any, path: str = "") -> str | None:
    """Return the first key in which nested mappings differ, or ``None``.

    Examples
    --------
    >>> first_difference({"training": {"rounds": 1}}, {"training": {"rounds": 2}})
    'training.rounds is 1 there and 2 here'
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*found, *(k for k in wanted if k not in found)]:
            inner = first_difference(
                found.get(key), wanted.get(key), f"{path}.{key}" if path else str(key)
            )
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
            f"{name} must be of the class {kind.__name__} (from equipoise import {kind.__name__}), "
            f"got {settings!r}"
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
