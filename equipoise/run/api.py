"""``equipoise.train`` and ``equipoise.load``: runs from Python."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from equipoise import methods, models
from equipoise.checks import count
from equipoise.documents import read_json
from equipoise.engine.settings import Machine, Training
from equipoise.engine.slots import frozen_digest, is_frozen_digest
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.imports import import_of_run
from equipoise.method import Method
from equipoise.run.arguments import (
    keywords_of,
    named,
    names_arguments,
    settings_from,
    training_from,
)
from equipoise.run.callbacks import Callback, Listeners, checked
from equipoise.run.checkpoint import read_local
from equipoise.run.checksums import read_sums, sha256, verify, write_sums
from equipoise.run.directory import (
    CONFIG,
    GLOBAL,
    INDEX,
    NAMES,
    PERSONAL,
    SUMMARY,
    config_bytes,
    files_of,
    read_config,
    read_names,
    refuse_a_run_in,
    write_first_files,
    write_other_config,
)
from equipoise.run.evaluation import Evaluation
from equipoise.run.files import save_tensors, sole_writer, write_atomically
from equipoise.run.plain import to_plain
from equipoise.run.processes import (
    Work,
    follow,
    joined,
    processes_of,
    rank_of_torchrun,
    started,
    started_by_torchrun,
)
from equipoise.run.resuming import identity_of, nothing_left, open_run, refuse_to_lengthen
from equipoise.run.start import Start, start_from
from equipoise.run.trained import (
    chosen_model,
    client_number,
    divided,
    filled,
    local_tensors,
    model_of,
    read_selected,
    undivided,
)
from equipoise.run.trainer import MakeEngine, Progress, Trainer

log = logging.getLogger("equipoise")


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

    def __repr__(self) -> str:
        """Return what was run, and the mean and the worst client of each model that trained."""
        found = {
            model: parts["seen"]
            for model, parts in self.summary.get("results", {}).items()
            if "seen" in parts
        }
        scores = "".join(
            f"; {model} model: {self.summary['score']} {values['mean']:.3f} over clients, "
            f"{values['worst_client']:.3f} for the worst"
            for model, values in found.items()
        )
        return (
            f"<Run of {self.summary['method']} on {self.summary['data']!r}, seed "
            f"{self.summary['seed']}, round {self.summary['round']} of {self.summary['rounds']}"
            f"{scores}>"
        )

    def model(self, client: int | str | None = None) -> nn.Module:
        """Return the global model, or the model that a client uses.

        Parameters
        ----------
        client : int or str, optional
            The client, by number or name. Its model is its personal model, the one that was
            evaluated, or the global model if it has none. The global model by default.

        Returns
        -------
        nn.Module
            In evaluation mode, on the CPU, with the layers of the module that was trained; see
            "Take the model with you" in ``docs/own_models.md``.
        """
        selected = self.trainer.selected()
        blank, federation = self.trainer.engine.network.blank(), self.trainer.federation
        number = client_number(client, federation.client_names)
        module = chosen_model(
            blank, selected, federation.clients, number, whole=self.trainer.has_global
        )
        return undivided(module, self.config)

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
        local = local_tensors(
            self.trainer.local_models(), client_number(client, federation.client_names)
        )
        return undivided(filled(blank, local), self.config)


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


@names_arguments
def train(
    federation: Federation,
    *,
    method: str | Mapping[str, Any] | Method = "fedavg",
    model: str | Mapping[str, Any] | nn.Module | None = None,
    head: str | None = None,
    training: Training | Mapping[str, Any] | None = None,
    machine: Machine | Mapping[str, Any] | None = None,
    evaluation: Evaluation | Mapping[str, Any] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
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
    training : Training or mapping, optional
        How clients train.
    machine : Machine or mapping, optional
        Device and precision.
    evaluation : Evaluation or mapping, optional
        When clients are evaluated, and which round is reported, such as ``{"every": 5}``.
    seed : int
        Seed of the initial model and of all random numbers.
    out : path, optional
        The run directory. Without it nothing is written.
    resume : bool
        Whether to resume the run in the directory. If there is none, a new run starts. If
        ``rounds`` is larger than before, the run is made longer. The results are those of a run
        that had this length from the start. An error is raised if they would differ, because the
        schedule or the method depends on the number of rounds. If ``evaluation.patience`` has ended
        the run, nothing is left to train, and a warning says so.
    checkpoint_every : int, optional
        Rounds between checkpoints. By default there is one after round 1, and then about every ten
        seconds, or less often if a checkpoint takes more than a second: they take about a tenth of
        the time at most. A killed run that is resumed repeats the rounds after its last checkpoint.
        Results do not depend on it, so a run may be resumed with another value. Without one it
        keeps the value it has.
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
        Called with the :class:`~equipoise.run.trainer.Progress` after every round. On a GPU its
        scores may be those of the evaluation before.
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
    # On Flower it is a roster, a federation without data.
    if not hasattr(federation, "fingerprint"):
        raise InputError(
            f"train() takes a federation, got {type(federation).__name__}; use "
            "equipoise.Federation.from_arrays(x, y, clients=...)"
        )
    given = settings_from(training, Training, "training")
    training = training_from(given, settings, method, keywords_of(train))
    machine = settings_from(machine, Machine, "machine") or Machine()
    evaluation = settings_from(evaluation, Evaluation, "evaluation") or Evaluation()
    callbacks = checked(callbacks)
    made = method if isinstance(method, Method) else methods.build(**named(method, "method"))
    if isinstance(model, nn.Module):
        # Copied, because the method may add parts to it.
        module, model_config = (
            divided(copy.deepcopy(model), head),
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
            named(model or made.usual_model, "model"), federation.class_names
        )
        module = models.build(
            shape=federation.shape, classes=federation.outputs, seed=seed, **model_config
        )
    module = made.extend(module, federation.shape, seed)
    if checkpoint_every is not None:
        count(checkpoint_every, "checkpoint_every")
    imports = tuple((sections or {}).get("imports", ()))
    work = Work(federation, made, module, training, machine, evaluation, seed, imports)
    processes = _processes(machine, engine)
    if rank_of_torchrun():
        told, follower = follow(work)
        return Followed(told["summary"], told["config"], None, follower)
    warm = start_from(start)
    begun = warm.tensors(module, federation) if warm else {}
    attached = {**(attached or {}), **files_of(federation)}
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
        config, finished, longer, every_before = open_run(
            directory, config, federation, machine, module, begun, resume, attached, processes
        )
        if longer and directory:
            refuse_to_lengthen(
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
            config["checkpoint_every"],
            team.engine if team else engine,
            begun,
        )
        if directory:
            trainer.identity = identity_of(config)
            trainer.older_identity = identity_of(config, every_before)
        there = directory is not None and directory.exists()
        if directory and there:
            until_done.enter_context(sole_writer(directory))
        if directory and (finished or (longer and (directory / SUMMARY).exists())):
            verify(directory)
        if longer and directory:
            write_other_config(directory, config_bytes(config), attached)
        if resume:
            trainer.restore_checkpoint(finished=finished, every=every_before)
        if directory and not longer and config["checkpoint_every"] != every_before:
            # When the journals have been rewound: until then, the rounds in them had the other one.
            write_other_config(directory, config_bytes(config), attached)
        if longer and directory:
            # Checkpoints of older versions do not say that the shorter run was stopped.
            trainer.stopped = None
            if evaluation.patience and trainer.evaluator.out_of_patience:
                ended = trainer.state.round
                log.warning(nothing_left(directory, ended, training.rounds, evaluation.patience))
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
                    refuse_a_run_in(directory)
                write_first_files(directory, config_bytes(config), attached)
        if finished and directory:
            run = Run(read_json(directory / SUMMARY), config, directory, trainer)
        else:
            if directory:
                # Reports on the unfinished run have names, too.
                _write_names(directory, federation)
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
        # On Flower, clients may have registered during the run.
        _write_names(directory, trainer.federation)
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
            write_sums(directory, {**sums, **there, SUMMARY: sha256(content)})
        # The summary is written last: a run with a summary is complete.
        write_atomically(directory / SUMMARY, content)
    return Run(summary, config, directory, trainer)


def _write_names(directory: Path, federation: Federation) -> None:
    """Write the names of clients, if they have names, and the checksum of the file."""
    if not federation.client_names:
        return
    path = directory / NAMES
    content = json.dumps(federation.client_names, ensure_ascii=False, indent=0).encode() + b"\n"
    # A run that an older version started has no checksums, and gets none.
    if (sums := read_sums(directory)) is not None:
        before = {}
        if path.exists():
            if NAMES in sums:
                verify(directory, NAMES)
            before = {NAMES: sha256(path.read_bytes())}
        write_sums(directory, {**sums, NAMES: sha256(content)}, before)
    write_atomically(path, content)


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
        The client whose model is returned, by number, or by name if clients have names. It is its
        personal model, the one that was evaluated; unseen clients have adapted the global one. If
        the client has none, it is the global model. The global model by default.
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
        In evaluation mode, on the CPU, with the layers of the module that was trained.

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
        module = model_of(config, directory, module)
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
    number = client_number(client, read_names(directory))
    if local:
        return undivided(filled(module, local_tensors(read_local(directory), number)), config)
    chosen, whole = read_selected(directory)
    registered = config["resolved"]["clients"]
    return undivided(chosen_model(module, chosen, registered, number, whole=whole), config)
