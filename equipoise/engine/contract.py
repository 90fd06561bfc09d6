"""The interface of engines, in this process or on Flower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise.attributes import Counting
from equipoise.engine.evaluation import Measured
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine
from equipoise.errors import RunError
from equipoise.method import Cohort, LocalRule, Method, Phase, Updates
from equipoise.metrics import Metric
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation

# The reason for clients that are left out because they did not answer a question after training.
LOST = "lost after training"
# What to do if numbers of a client are not finite or too large.
ADVICE = "a smaller learning rate or training.clip may help"


def number_and_name(client: int, federation: Federation) -> str:
    """Return the number of a client for messages, with its name if it has one.

    Examples
    --------
    >>> from equipoise.data import load
    >>> number_and_name(7, load("digits"))
    'client 7 (plain 8)'
    """
    number, name = f"client {client}", federation.client_name(client)
    return number if name == number else f"{number} ({name})"


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


@dataclass(frozen=True)
class Launched:
    """The training of a cohort, which a GPU may still carry out.

    Attributes
    ----------
    updates : Updates
        What clients send, without reports if they are still training. It has not been checked.
    wait : callable
        Waits for the training, and returns the updates with reports. Clients whose updates cannot
        be used are then left out of them and of the cohort.
    """

    updates: Updates
    wait: Callable[[], Updates]

    @classmethod
    def ended(cls, updates: Updates) -> Launched:
        """Return training that has ended."""
        return cls(updates, lambda: updates)


class RoundCohort(Cohort, Protocol):
    """The interface of cohorts for the round loop.

    Attributes
    ----------
    wanted_reports : set of str
        Reports that the round loop needs in addition to those of the aggregation.
    evaluates_local : bool
        Whether clients evaluate the models that they train in this round. Set by the round loop
        before training.
    left_out : dict
        Clients that were asked but are left out of this round, with the reason. ``ids`` and the
        other attributes then contain only the remaining clients.
    bytes_up, bytes_down : int
        Bytes of tensors and reports sent to and from the server so far.
    bytes_overhead : int
        Bytes of names, headers and settings, if messages are sent.
    messages : int
        Number of messages to clients so far. Each has one answer.
    evaluations : int
        Number of times that clients have evaluated a model on a split for the method: in questions,
        and for the reports that the aggregation needs.
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
        """Loss and metrics of local models on ``val`` and ``test``, in the order of ``ids``.

        A local model is the model of a client after its training in this round, before aggregation.
        Empty unless ``evaluates_local`` was set. Methods do not see these values. Their bytes are
        not counted, because they are part of evaluation.
        """

    def launch_training(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> Launched:
        """Launch what :meth:`train` does.

        Only the cohort of an engine that :attr:`~Engine.defers` work may return before the clients
        have trained.
        """

    def without(self, ids: Iterable[int], dropped: str | None = None) -> RoundCohort:
        """Return the cohort without some clients, which are then in ``left_out``.

        Parameters
        ----------
        ids : iterable of int
            The clients.
        dropped : str, optional
            Why the server drops them. By default they were lost after training. Dropped clients
            count as clients that have answered.
        """


@dataclass(frozen=True)
class Personal:
    """The description of personal models.

    Attributes
    ----------
    method : Method
        Its local rule defines what clients keep, and how clients without a memory adapt.
    fine_tune : tuple of Phase
        Phases of fine-tuning after that.
    round : int
        Number of finished rounds.
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
        Number of clients that are stacked.
    absent : dict
        Clients that did not answer in the last evaluation, with the reason.
    metrics : tuple of Metric
        Metrics of evaluation in addition to the loss and the task's own metrics. Set by the round
        loop.
    counting : Counting or None
        Counts clients' samples by their attributes in evaluation. Set by the round loop if it has
        the data.
    total_was_read : bool
        Whether the method has read the number of rounds from a cohort, so that its results depend
        on it.
    """

    network: Network
    machine: Machine
    chunk: int
    absent: dict[int, str]
    metrics: tuple[Metric, ...]
    counting: Counting | None
    total_was_read: bool

    def newcomers(self) -> Sequence[int]:
        """Add clients that have registered since the last call to the federation; return them."""

    def cohort(self, method: Method, clients: NDArray[np.int64], round_: int) -> RoundCohort:
        """Return the cohort of a round (counted from 0)."""

    def evaluate(
        self, model: Tree, clients: NDArray[np.int64], *, personal: Personal | None = None
    ) -> dict[str, Measured]:
        """Evaluate the global model, or personal models made from it, on ``val`` and ``test``."""

    def launch_evaluation(
        self, model: Tree, clients: NDArray[np.int64], *, personal: Personal | None = None
    ) -> Callable[[], dict[str, Measured]]:
        """Begin the same as :meth:`evaluate`, and return a function that waits for the values.

        Only an engine that :attr:`defers` work may return before the values are computed.
        """

    def evaluate_server(self, model: Tree) -> dict[str, Measured]:
        """Return metrics of the global model on the server's samples, by split."""

    def averaged_kept(self, method: Method, model: Tree) -> Tree:
        """Return the mean of the parts that clients keep, with the method's weights."""

    def kept_parts(self, method: Method, model: Tree, clients: NDArray[np.int64]) -> Tree:
        """Return the parts of the shared model that clients keep, stacked as in ``clients``."""

    def refuse_keeping_local(self, method: Method) -> None:
        """Raise an error with the reason if the server cannot save the local models of clients."""

    def personal_models(
        self, model: Tree, personal: Personal, clients: NDArray[np.int64]
    ) -> tuple[Tree, Tree]:
        """Return common and stacked tensors of personal models, in the order of ``clients``."""

    @property
    def slowed_by(self) -> list[str]:
        """What is known to make steps on a GPU slower than they could be, one text each."""

    @property
    def remembering(self) -> list[int]:
        """The clients whose memories are available here, in ascending order."""

    @property
    def defers(self) -> bool:
        """Whether evaluation may end, and :meth:`while_busy` do its work, in the next round."""

    @property
    def keeps_samples(self) -> bool:
        """Whether the samples are in the memory of a GPU."""

    def while_busy(self, work: Callable[[], None]) -> None:
        """Do some work of the host that nobody waits for: now, or while a GPU trains.

        It may never be done if no further round is trained.
        """

    def after_launch(self, work: Callable[[], None]) -> None:
        """Do some work when a GPU has got the training of all clients of a round: now without one.

        It may never be done if no further round is trained.
        """

    def commit(self, cohort: Any) -> None:
        """Mark the memories that a cohort wrote in its round as the newest ones."""

    def keep(self) -> None:
        """Keep the current memories, because the models of this round are the best so far."""

    def export(self) -> Tree:
        """Return the state of the engine for a checkpoint."""

    def restore(self, tensors: Tree) -> None:
        """Read what :meth:`export` wrote."""
