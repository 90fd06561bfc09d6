"""What each process of a run does for its clients, and how it waits for tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.engine.cohort import StackedCohort
from equipoise.engine.contract import Personal
from equipoise.engine.evaluation import Measured
from equipoise.engine.link import Link
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.method import Method, Reports
from equipoise.tree import Tree

Ints = NDArray[np.int64]
STOP = "stop"


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

    def slowed_by(self, clients: Ints, rows: Tree) -> list[str]:
        """List what makes steps slower here than they could be."""
        return self.engine.slowed_by

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
_EVERYWHERE = frozenset({"remembering", "slowed_by", "commit", "export", "restore"})


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
            answer, failure = attempt(made, task, clients, rows, common)
        link.send((answer, _described(failure)), 0)


def attempt(
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
