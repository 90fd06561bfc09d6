"""A run in several processes: each trains, asks and evaluates some of the clients.

Process 0 is the server. It runs the round loop with a :class:`SpreadEngine`, which divides the
clients of each task among the processes, its own included, and puts the answers in the order of
the clients. The other processes wait for tasks (:func:`serve`). Every process has an ordinary
:class:`~equipoise.engine.stacked.StackedEngine`, so a client is computed by the same code as in a
run with one process.

Clients that keep a memory always belong to the same process, and only this process holds their
memories. Where nothing is kept, clients are divided anew for every task, so that all processes have
about the same work. Both follow from the federation, the cohort and the number of processes alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from equipoise import reused_memory
from equipoise.engine.cohort import StackedCohort
from equipoise.engine.contract import Personal
from equipoise.engine.evaluation import Measured
from equipoise.engine.link import Link
from equipoise.engine.stack import repeated
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.method import LocalRule, Method, Reports, mix_tree
from equipoise.tree import Tree

Ints = NDArray[np.int64]
STOP = "stop"


def balanced(work: NDArray[Any], parts: int) -> Ints:
    """Divide clients so that all parts have about the same work.

    The client with the most work goes to the part with the least so far, then the next one.

    Parameters
    ----------
    work : array
        The work of each client.
    parts : int
        How many parts there are.

    Returns
    -------
    int array
        The part of each client.

    Examples
    --------
    >>> balanced(np.array([1, 5, 1, 4, 1]), 2).tolist()
    [1, 0, 0, 1, 1]
    """
    if not len(work) or work.min() == work.max():
        return np.arange(len(work)) % parts
    part_of = np.empty(len(work), np.int64)
    loads = [(0.0, part) for part in range(parts)]
    for client in np.argsort(-work, kind="stable").tolist():
        load, part = loads[0]
        part_of[client] = part
        heapq.heapreplace(loads, (load + float(work[client]), part))
    return part_of


class Share:
    """What one process does for its clients.

    Every public method is a task. It takes the clients of this process, then the rows of these
    clients, and returns rows of answers in the order of the clients.

    Parameters
    ----------
    engine : StackedEngine
        The engine of this process.
    method : Method
        What is federated.
    """

    def __init__(self, engine: StackedEngine, method: Method) -> None:
        self.engine, self.method = engine, method

    def train(
        self,
        clients: Ints,
        rows: Tree,
        *,
        shared: Mapping[str, Tree],
        round_: int,
        wanted: Sequence[str],
        evaluates_local: bool,
    ) -> tuple[Tree, dict[str, Tree], Reports, dict[str, Measured]]:
        """Train clients; their memories stay here."""
        cohort = self._cohort(clients, round_)
        cohort.wanted_reports, cohort.evaluates_local = set(wanted), evaluates_local
        return *cohort.carry_out(shared, rows, self.method.local), cohort.local_metrics

    def ask(
        self,
        clients: Ints,
        rows: Tree,
        *,
        question: str,
        args: Sequence[Any],
        model: Tree | None,
        split: str,
        round_: int,
    ) -> Any:
        """Ask clients a question of the method."""
        return self._cohort(clients, round_).answers(question, args, model, split, rows)

    def measure(
        self, clients: Ints, rows: Tree, *, params: Tree, split: str, round_: int
    ) -> Measured:
        """Return loss and metrics of a model for the method."""
        return self._cohort(clients, round_).measured(params, split)

    def evaluate(
        self, clients: Ints, rows: Tree, *, model: Tree, adapted: Adapted | None
    ) -> dict[str, Measured]:
        """Evaluate the global model, or personal ones."""
        personal = adapted.by(self.method) if adapted else None
        return self.engine.evaluate(model, clients, personal=personal)

    def personal_models(self, clients: Ints, rows: Tree, *, model: Tree, adapted: Adapted) -> Tree:
        """Return what differs between the personal models of clients."""
        return self.engine.personal_models(model, adapted.by(self.method), clients)[1]

    def kept_parts(self, clients: Ints, rows: Tree, *, model: Tree) -> Tree:
        """Return what clients keep of the shared model."""
        return self.engine.kept_parts(self.method, model, clients)

    def remembering(self, clients: Ints, rows: Tree) -> list[int]:
        """List the clients whose memories are here."""
        return self.engine.remembering

    def commit(self, clients: Ints, rows: Tree, *, ids: Ints) -> None:
        """Make what clients wrote in a round their newest memory."""
        self.engine.memory.commit(ids)

    def export(self, clients: Ints, rows: Tree) -> Tree:
        """Return the memories that are here."""
        return self.engine.memory.export()

    def restore(self, clients: Ints, rows: Tree) -> None:
        """Hold these memories and no others."""
        device = self.engine.network.device
        stacks = {name: stack.to(device) for name, stack in rows.items()}
        ids = {"clients": torch.from_numpy(clients)}
        self.engine.memory.restore({**ids, **stacks} if len(clients) else {})

    def _cohort(self, clients: Ints, round_: int) -> StackedCohort:
        return self.engine.cohort(self.method, clients, round_)


@dataclass(frozen=True)
class Adapted:
    """Which personal models are meant, without the method, which every process has."""

    fine_tune: tuple[Any, ...]
    round: int

    def by(self, method: Method) -> Personal:
        """Add the method."""
        return Personal(method, self.fine_tune, self.round)


# Tasks that every process carries out, whether or not it has clients.
_EVERYWHERE = frozenset({"remembering", "commit", "export", "restore"})


def serve(link: Link, share: Callable[[], Share]) -> Any:
    """Carry out the tasks that process 0 sends, until it says to stop.

    Parameters
    ----------
    link : Link
        The connection to process 0.
    share : callable
        Makes what this process works with. If that fails, process 0 is told when it sends its
        first task.

    Returns
    -------
    object
        What process 0 says at the end.
    """
    made: Share | None = None
    failure: Exception | None = None
    try:
        made = share()
        link.device = made.engine.network.device
    except Exception as error:
        failure = error
    while True:
        task, chunk, common = link.broadcast()
        if task == STOP:
            return common
        clients, rows = link.receive(0)
        answer: Any = None
        if made is not None:
            made.engine.chunk = chunk
            answer, failure = _tried(made, task, clients, rows, common)
        link.send((answer, _described(failure)), 0)


def _tried(
    share: Share, task: str, clients: Ints, rows: Tree, common: Mapping[str, Any]
) -> tuple[Any, Exception | None]:
    """Carry out a task, and return the answer, or why there is none."""
    if not len(clients) and task not in _EVERYWHERE:
        return None, None
    try:
        return getattr(share, task)(clients, rows, **common), None
    except Exception as error:
        return None, error


def _described(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Return an error as it is raised in process 0: others may not even be picklable."""
    if error is None:
        return None
    if isinstance(error, InputError | RunError):
        return type(error) if type(error) in (InputError, RunError) else RunError, str(error)
    return RunError, f"{type(error).__name__}: {error}"


class Alone:
    """The connection of a process without others."""

    rank, size = 0, 1
    device = torch.device("cpu")

    def broadcast(self, message: Any = None) -> Any:
        """Return the message."""
        return message

    def send(self, message: Any, to: int) -> None:
        """Refuse: there is nobody."""
        raise RunError(f"there is no process {to}")

    def receive(self, source: int) -> Any:
        """Refuse: there is nobody."""
        raise RunError(f"there is no process {source}")


class _OfHere:
    """An attribute of the engine of this process."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, spread: SpreadEngine, owner: type | None = None) -> Any:
        return getattr(spread.here, self._name)

    def __set__(self, spread: SpreadEngine, value: Any) -> None:
        setattr(spread.here, self._name, value)


class SpreadEngine:
    """Divides clients among processes; see :class:`equipoise.engine.contract.Engine`.

    Parameters
    ----------
    here : StackedEngine
        The engine of this process, which is process 0.
    link : Link
        The connection to the others, each of which runs :func:`serve`.
    method : Method
        What is federated.
    """

    network: Any = _OfHere()
    machine: Any = _OfHere()
    chunk: Any = _OfHere()
    absent: Any = _OfHere()
    metrics: Any = _OfHere()
    counting: Any = _OfHere()
    total_was_read: Any = _OfHere()
    not_replayed: Any = _OfHere()

    def __init__(self, here: StackedEngine, link: Link | Alone, method: Method) -> None:
        self.here, self.link, self.method = here, link, method
        self._share = Share(here, method)
        link.device = here.network.device
        local, model = method.local, here.network.initial()
        self.remembers = bool(
            here.first_memory(local, model)
            or local.facts()
            or type(local).finish is not LocalRule.finish
        )

    @cached_property
    def _owners(self) -> Ints:
        """The process that holds each client's memory."""
        return balanced(self.here.federation.train.sizes, self.link.size)

    def divided(self, clients: Ints, work: NDArray[Any]) -> Ints:
        """Return the process that carries out a task for each client."""
        return self._owners[clients] if self.remembers else balanced(work, self.link.size)

    def carry_out(
        self,
        task: str,
        clients: Ints,
        processes: Ints,
        rows: Mapping[str, Tensor] | None = None,
        **common: Any,
    ) -> Answers:
        """Have every process carry out a task for its clients.

        Parameters
        ----------
        task : str
            A method of :class:`Share`.
        clients : int array
            For which clients.
        processes : int array
            The process of each client.
        rows : mapping of Tensor, optional
            One row a client.
        **common
            What all processes are given.
        """
        link, rows = self.link, rows or {}
        places = [np.flatnonzero(processes == rank) for rank in range(link.size)]

        def of(rank: int) -> tuple[Ints, Tree]:
            where = torch.from_numpy(places[rank])
            own = {name: stack[where.to(stack.device)] for name, stack in rows.items()}
            return clients[places[rank]], own

        link.broadcast((task, self.chunk, common))
        for rank in range(1, link.size):
            link.send(of(rank), rank)
        try:
            answer, failure = _tried(self._share, task, *of(0), common)
        finally:
            # Whatever happens here, the others are ready for the next task.
            answers = [link.receive(rank) for rank in range(1, link.size)]
        if failure is not None:
            raise failure
        for rank, (_, said) in enumerate(answers, start=1):
            if said is not None:
                kind, message = said
                raise kind(message if kind is InputError else f"process {rank}: {message}")
        return Answers(places, [answer, *(found for found, _ in answers)], len(clients))

    def everywhere(self, task: str, **common: Any) -> list[Any]:
        """Have every process carry out a task, and return the answers in the order of processes."""
        nobody = np.empty(0, np.int64)
        return self.carry_out(task, nobody, nobody, **common).each

    def gather(self) -> None:
        """Go on alone, with the memories of all clients, so that the other processes can end."""
        memories = self.export()
        self.link = Alone()
        vars(self).pop("_owners", None)
        self.restore(memories)

    # ---- what the round loop expects of an engine ------------------------------------------------

    def cohort(self, method: Method, clients: Ints, round_: int) -> SpreadCohort:
        """Gather clients for a round (counted from 0)."""
        plain = self.here.cohort(method, clients, round_)
        return SpreadCohort(self, plain)

    def evaluate(
        self, model: Tree, clients: Ints, *, personal: Personal | None = None
    ) -> dict[str, Measured]:
        """Evaluate the global model, or the personal models made of it."""
        splits = [self.here.federation.split(name) for name in ("val", "test")]
        work = sum((split.sizes[clients] for split in splits), np.ones(len(clients)))
        adapted = Adapted(personal.fine_tune, personal.round) if personal else None
        answers = self.carry_out(
            "evaluate", clients, self.divided(clients, work), model=model, adapted=adapted
        )
        return {split: answers.measured(itemgetter(split)) for split in ("val", "test")}

    def launch_evaluation(
        self, model: Tree, clients: Ints, *, personal: Personal | None = None
    ) -> Callable[[], dict[str, Measured]]:
        """Evaluate models, and return a function that returns the values."""
        measured = self.evaluate(model, clients, personal=personal)
        return lambda: measured

    def evaluate_server(self, model: Tree) -> dict[str, Measured]:
        """Evaluate the global model on the samples that the server holds, by split."""
        return self.here.evaluate_server(model)

    def averaged_kept(self, method: Method, model: Tree) -> Tree:
        """Average what clients keep of the shared model, weighted as the method weighs clients."""
        clients = np.array(self.remembering, dtype=np.int64)
        prior = self.here.cohort(method, clients, 0).prior
        return mix_tree(self.kept_parts(method, model, clients), prior)

    def kept_parts(self, method: Method, model: Tree, clients: Ints) -> Tree:
        """Return what clients keep of the shared model, stacked in the order of ``clients``."""
        answers = self.carry_out("kept_parts", clients, self._owners[clients], model=model)
        return answers.tree(lambda found: found)

    def refuse_keeping_local(self, method: Method) -> None:
        """Refuse nothing: all updates arrive here."""

    def personal_models(self, model: Tree, personal: Personal, clients: Ints) -> tuple[Tree, Tree]:
        """Return what clients' personal models share, and what differs."""
        work = self.here.view.split("train").sizes[clients]
        answers = self.carry_out(
            "personal_models",
            clients,
            self.divided(clients, work),
            model=model,
            adapted=Adapted(personal.fine_tune, personal.round),
        )
        # A process in which no client has a part of its own has none in its answer.
        names = {name for _, found in answers.given for name in found}
        complete = answers.changed(
            lambda found, count: {
                name: found.get(name, repeated(tensor, count))
                for name, tensor in model.items()
                if name in names
            }
        )
        own = complete.tree(lambda found: found)
        return {name: tensor for name, tensor in model.items() if name not in own}, own

    @property
    def remembering(self) -> list[int]:
        """The clients that have a memory, in rising order."""
        if not self.remembers:
            return []
        return sorted(client for found in self.everywhere("remembering") for client in found)

    def newcomers(self) -> Sequence[int]:
        """Return nobody: all clients are there from the start."""
        return ()

    def keep(self) -> None:
        """Do nothing: models that may count are copied."""

    @property
    def defers(self) -> bool:
        """Always false: the values of all processes are there when evaluation ends."""
        return False

    def while_busy(self, work: Callable[[], None]) -> None:
        """Do some work while the GPU of this process trains; without a GPU, now."""
        self.here.while_busy(work)

    def commit(self, cohort: SpreadCohort) -> None:
        """Make what the cohort's clients wrote in its round their newest memory."""
        if self.remembers:
            self.everywhere("commit", ids=cohort.ids)
        for name in cohort.delivers:
            self.here.delivered.mark(name, cohort.ids)

    def export(self) -> Tree:
        """Return all memories, and who holds what was sent once."""
        delivered = self.here.delivered.export()
        found = [tree for tree in self.everywhere("export") if tree] if self.remembers else []
        device = self.network.device
        names = found[0] if found else {}
        joined = {name: torch.cat([tree[name].to(device) for tree in found]) for name in names}
        return {**joined, **delivered}

    def restore(self, tensors: Tree) -> None:
        """Read what :meth:`export` wrote, in a run with any number of processes."""
        rows = self.here.delivered.restore(tensors)
        clients = rows.pop("clients", torch.empty(0, dtype=torch.int64)).cpu().numpy()
        self.carry_out("restore", clients, self._owners[clients], rows)


@dataclass(frozen=True)
class Answers:
    """The answers of all processes to one task.

    Attributes
    ----------
    places : list of int array
        Where the clients of each process are among all clients of the task.
    each : list
        The answer of each process.
    clients : int
        How many clients there are.
    """

    places: list[Ints]
    each: list[Any]
    clients: int

    @property
    def given(self) -> list[tuple[Ints, Any]]:
        """The answers of the processes that have clients."""
        return [(w, found) for w, found in zip(self.places, self.each, strict=True) if len(w)]

    def changed(self, change: Callable[[Any, int], Any]) -> Answers:
        """Change the answer of each process that has clients; the number of these is given too."""
        pairs = zip(self.places, self.each, strict=True)
        each = [change(found, len(where)) if len(where) else None for where, found in pairs]
        return Answers(self.places, each, self.clients)

    def stack(self, part: Callable[[Any], Tensor]) -> Tensor:
        """Put one stack of all answers in the order of clients."""
        stacks = [(where, part(found)) for where, found in self.given]
        first = stacks[0][1]
        if len(stacks) == 1:
            return first
        joined = reused_memory.empty((self.clients, *first.shape[1:]), first.dtype, first.device)
        for where, rows in stacks:
            joined[torch.from_numpy(where).to(joined.device)] = rows
        return joined

    def tree(self, part: Callable[[Any], Mapping[str, Tensor]]) -> Tree:
        """Put the stacks of a tree in the order of clients."""
        names = part(self.given[0][1]) if self.given else {}
        return {name: self.stack(partial(_leaf_of, part, name)) for name in names}

    def measured(self, part: Callable[[Any], Measured]) -> Measured:
        """Put measured values in the order of clients; NaN where a process has not measured one."""
        joined: Measured = {}
        for where, found in self.given:
            for name, values in part(found).items():
                joined.setdefault(name, np.full(self.clients, np.nan))[where] = values
        return joined


def _leaf_of(part: Callable[[Any], Mapping[str, Tensor]], name: str, found: Any) -> Tensor:
    return part(found)[name]


class SpreadCohort(StackedCohort):
    """The clients of one round, in several processes.

    Parameters
    ----------
    spread : SpreadEngine
        What divides clients among processes.
    plain : StackedCohort
        The same cohort in one process. Whatever concerns the server is taken from it.
    """

    def __init__(self, spread: SpreadEngine, plain: StackedCohort) -> None:
        vars(self).update(vars(plain))
        self.spread = spread

    def launch(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> tuple[Tree, dict[str, Tree], Callable[[], Reports]]:
        """Train all clients, each in its process, and wait for them."""
        if local != self.method.local:
            raise InputError(
                "with several processes, cohort.train takes the method's own local rule only, got "
                f"{local!r}"
            )
        work = np.asarray(sum(self.work_of(local), np.zeros_like(self.sizes)))
        batch = np.minimum(self.sizes, self.engine.training.batch_size)
        answers = self.spread.carry_out(
            "train",
            self.ids,
            self.spread.divided(self.ids, work * batch),
            each,
            shared=dict(shared),
            round_=self.round,
            wanted=sorted(self.wanted_reports),
            evaluates_local=self.evaluates_local,
        )
        sent, uploads, reports, local_metrics = (
            answers.changed(lambda found, count, part=part: found[part])  # type: ignore[misc]
            for part in range(4)
        )
        self.local_metrics = {
            split: local_metrics.measured(itemgetter(split)) for split in local_metrics.given[0][1]
        }
        return (
            sent.tree(lambda found: found),
            {name: uploads.tree(itemgetter(name)) for name in uploads.given[0][1]},
            lambda: reports.tree(lambda found: found),
        )

    def measured(self, params: Tree, split: str) -> Measured:
        """Return loss and metrics of a model on the clients' own split."""
        answers = self._asked_of_all(split, "measure", params=params)
        return answers.measured(lambda found: found)

    def answers(
        self,
        question: str,
        args: Sequence[Any],
        model: Tree | None,
        split: str,
        rows: Mapping[str, Tensor],
    ) -> Any:
        """Return the clients' answers to a question, stacked in the order of ``ids``."""
        answers = self._asked_of_all(split, "ask", rows, question=question, args=args, model=model)
        flat, form = tree_flatten(answers.given[0][1])
        said = answers.changed(lambda found, count: tree_flatten(found)[0])
        leaves = [said.stack(itemgetter(leaf)) for leaf in range(len(flat))]
        return tree_unflatten(leaves, form)

    def _asked_of_all(
        self, split: str, task: str, rows: Mapping[str, Tensor] | None = None, **common: Any
    ) -> Answers:
        work = self.engine.view.split(split).sizes[self.ids] + 1
        processes = self.spread.divided(self.ids, work)
        return self.spread.carry_out(
            task, self.ids, processes, rows, split=split, round_=self.round, **common
        )
