"""The interface of engines, in this process or on Flower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from equipoise.attributes import Counting
from equipoise.engine.evaluation import Measured
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine
from equipoise.errors import RunError
from equipoise.method import Cohort, Method, Phase
from equipoise.metrics import Metric
from equipoise.tree import Tree

# The reason of clients that are left out because they did not answer a question after training.
LOST = "lost after training"


class ClientsLost(RunError):
    """Raised by a cohort when clients that have trained do not answer a later question.

    Parameters
    ----------
    ids : iterable of int
        The clients that did not answer.

    Examples
    --------
    >>> ClientsLost([3, 5]).ids
    [3, 5]
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = sorted(ids)
        super().__init__(f"no answer from client {', '.join(map(str, self.ids))}")


class RoundCohort(Cohort, Protocol):
    """A cohort as the round loop sees it.

    Attributes
    ----------
    wanted_reports : set of str
        Reports the round loop wants besides those the aggregation needs.
    evaluates_local : bool
        Whether clients evaluate the models they train in this round. Set by the round loop before
        training.
    left_out : dict
        Clients that were asked but are left out of this round, with the reason. ``ids`` and the
        other attributes then contain the remaining clients only.
    bytes_up, bytes_down : int
        The bytes of tensors and reports that have crossed between server and clients so far.
    bytes_overhead : int
        The bytes of names, headers and settings around them, where messages are sent.
    messages : int
        The messages to clients so far; each has one answer.
    evaluations : int
        How often clients have evaluated a model on a split for the method: in questions, and for
        the reports that the aggregation needs.
    """

    wanted_reports: set[str]
    evaluates_local: bool
    left_out: dict[int, str]
    bytes_up: int
    bytes_down: int
    bytes_overhead: int
    messages: int
    evaluations: int

    @property
    def local_metrics(self) -> dict[str, Measured]:
        """Loss and metrics of the clients' local models on ``val`` and ``test``, in the order of ``ids``.

        A local model is the model of a client after its training in this round, before aggregation.
        Empty unless ``evaluates_local`` was set. Methods do not see these values, and their bytes
        are not counted: they are evaluation.
        """

    def without(self, ids: Iterable[int], dropped: str | None = None) -> RoundCohort:
        """Return the cohort less some clients, which ``left_out`` then names.

        Parameters
        ----------
        ids : iterable of int
            The clients.
        dropped : str, optional
            Why the server drops them. Without it they were lost after training. Dropped clients
            have answered, so they count as clients that did.
        """


@dataclass(frozen=True)
class Personal:
    """Which personal models are meant.

    Attributes
    ----------
    method : Method
        Its local rule says what clients keep, and how those without a memory adapt.
    fine_tune : tuple of Phase
        What every client does after that.
    round : int
        Rounds finished.
    """

    method: Method
    fine_tune: tuple[Phase, ...]
    round: int


class Engine(Protocol):
    """The code that carries out a method.

    Attributes
    ----------
    network : Network
        The model as a function of its parameters.
    machine : Machine
        Device and precision of the server.
    chunk : int
        How many clients are stacked.
    absent : dict
        Clients that did not answer when models were evaluated last, with the reason.
    metrics : tuple of Metric
        What clients measure besides the loss and the task's own metrics when models are evaluated.
        Set by the round loop.
    counting : Counting or None
        Counts clients' samples by their attributes when models are evaluated. Set by the round loop
        where it has the data.
    total_was_read : bool
        Whether the method has asked a cohort how many rounds the run lasts, so that its results
        depend on that.
    """

    network: Network
    machine: Machine
    chunk: int
    absent: dict[int, str]
    metrics: tuple[Metric, ...]
    counting: Counting | None
    total_was_read: bool

    def newcomers(self) -> Sequence[int]:
        """Return the clients that have registered since the last call, and add them to the federation."""

    def cohort(self, method: Method, clients: NDArray[np.int64], round_: int) -> RoundCohort:
        """Gather clients for a round (counted from 0)."""

    def evaluate(
        self, model: Tree, clients: NDArray[np.int64], *, personal: Personal | None = None
    ) -> dict[str, Measured]:
        """Evaluate the global model, or the personal models made of it, on the clients' validation and test splits."""

    def evaluate_server(self, model: Tree) -> dict[str, Measured]:
        """Evaluate the global model on the samples that the server holds, by split; empty if it holds none."""

    def averaged_kept(self, method: Method, model: Tree) -> Tree:
        """Average what clients keep of the shared model, weighted as the method weighs clients."""

    def kept_parts(self, method: Method, model: Tree, clients: NDArray[np.int64]) -> Tree:
        """Return what clients keep of the shared model, stacked in the order of ``clients``."""

    def refuse_keeping_local(self, method: Method) -> None:
        """Raise an error that gives the reason if the server cannot save the local models of clients."""

    def personal_models(
        self, model: Tree, personal: Personal, clients: NDArray[np.int64]
    ) -> tuple[Tree, Tree]:
        """Return what clients' personal models share, and what differs, stacked in the order of ``clients``."""

    @property
    def not_replayed(self) -> str | None:
        """Why steps that should be replayed on a GPU ran from Python, if some are known to."""

    @property
    def remembering(self) -> list[int]:
        """The clients whose memories are at hand here, in rising order."""

    def while_busy(self, work: Callable[[], None]) -> None:
        """Do some work of the host that nobody waits for: now, or while a GPU trains.

        It may never be called if no further round is trained.
        """

    def commit(self, cohort: Any) -> None:
        """Make what the clients of a cohort wrote in its round their newest memory."""

    def keep(self) -> None:
        """Keep the current memories: the models of this round are the best so far."""

    def export(self) -> Tree:
        """Return what a checkpoint must hold of the engine."""

    def restore(self, tensors: Tree) -> None:
        """Read what :meth:`export` wrote."""
