"""A run in several processes: each trains, asks and evaluates some of the clients.

Process 0 is the server. It runs the round loop with a :class:`SpreadEngine`, which divides the
clients of each task among the processes, its own included, and puts the answers in the order of
the clients. The other processes wait for tasks (:func:`~equipoise.engine.share.serve`). Every
process has an ordinary :class:`~equipoise.engine.stacked.StackedEngine`, so a client is computed by
the same code as in a run with one process.

Clients that keep a memory always belong to the same process, and only this process holds their
memories. Where nothing is kept, clients are divided anew for every task, so that all processes have
about the same work. Both follow from the federation, the cohort and the number of processes alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.engine import share
from equipoise.engine.contract import Personal
from equipoise.engine.evaluation import Measured
from equipoise.engine.link import Alone, Link
from equipoise.engine.share import Adapted, Ints, Share
from equipoise.engine.spread_answers import Answers
from equipoise.engine.spread_cohort import SpreadCohort
from equipoise.engine.stack import repeated
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.method import Method, mix_tree
from equipoise.tree import Tree


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
        The connection to the others, each of which runs :func:`~equipoise.engine.share.serve`.
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

    def __init__(self, here: StackedEngine, link: Link | Alone, method: Method) -> None:
        self.here, self.link, self.method = here, link, method
        self._share = Share(here, method)
        link.device = here.network.device
        local, model = method.local, here.network.initial()
        self.remembers = here.remembers(local, model)

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
            answer, failure = share.attempt(self._share, task, *of(0), common)
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
    def slowed_by(self) -> list[str]:
        """What makes steps slower, in this process and, as long as they run, in the others."""
        own, *others = self.everywhere("slowed_by")
        named = ((f"process {rank}", each) for rank, each in enumerate(others, start=1))
        return own + [f"{name}: {what}" for name, each in named for what in each]

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

    @property
    def keeps_samples(self) -> bool:
        """Always false: other processes have samples, too."""
        return False

    def while_busy(self, work: Callable[[], None]) -> None:
        """Do some work while the GPU of this process trains; without a GPU, now."""
        self.here.while_busy(work)

    def after_launch(self, work: Callable[[], None]) -> None:
        """Do some work now: evaluation never waits for the next round."""
        work()

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
