"""What the server and the clients exchange in a round, and sums over clients.

Import these from :mod:`equipoise.method`, the interface of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.errors import InputError, RunError, unknown
from equipoise.stacks import weighted_sums
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.method import LocalRule

Reports = dict[str, Tensor]

REQUESTED_REPORTS = (
    *(f"{split}loss_{when}" for split in ("", "val_") for when in ("before", "after")),
    *(f"{split}score_{when}" for split in ("", "val_") for when in ("before", "after")),
    *("lr", "gradient_weight"),
)
"""Reports that clients send only if the aggregation ``needs`` them."""


class _ExplainedReports(Reports):
    """Reports whose error for a missing one says how to get it."""

    def __missing__(self, name: str) -> Tensor:
        if name in REQUESTED_REPORTS:
            raise InputError(
                f"updates.reports has no {name!r}, because the aggregation does not request it; "
                f"add it: needs = ({name!r},)"
            )
        raise unknown("report", name, {*REQUESTED_REPORTS, *self}, where="updates.reports")


class UnreadReports(Reports):
    """The reports of clients that are still training. To read them is an error.

    Examples
    --------
    >>> UnreadReports().get("train_loss")
    Traceback (most recent call last):
    equipoise.errors.RunError: reports were read before the clients had trained; an aggregation with
    reads_reports = False must not read them
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise RunError(
            "reports were read before the clients had trained; an aggregation with reads_reports = "
            "False must not read them"
        )

    __getitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = keys = values = items = copy = __or__ = __ror__ = _refuse


@dataclass(frozen=True)
class Updates:
    """What a cohort sends back, stacked on a leading axis in the order of its ids.

    Attributes
    ----------
    params, buffers : Tree
        The shared parameters and buffers, ``[K, ...]`` each.
    uploads : dict of Tree
        What the local rule sends in addition; see ``LocalRule.uploads``.
    reports : dict of Tensor
        Numbers of each client, float64 ``[K]``: ``train_loss``, the task's loss on the batches of
        training; ``method_terms``, what the local rule added to it, if it has losses or penalties
        of its own; ``steps``; and those that the aggregation ``needs``.
    """

    params: Tree
    buffers: Tree
    uploads: dict[str, Tree]
    reports: Reports

    def __post_init__(self) -> None:
        """Let reports explain why one is missing, unless they do so themselves."""
        if type(self.reports) is dict:
            object.__setattr__(self, "reports", _ExplainedReports(self.reports))

    @property
    def param_names(self) -> list[str]:
        """The names of the parameters. Unlike ``params``, it never makes a copy of rows.

        Examples
        --------
        >>> Updates({"w": torch.zeros(3), "b": torch.zeros(3)}, {}, {}, {}).param_names
        ['w', 'b']
        """
        return list(self.params)

    def of(self, which: NDArray[np.bool_]) -> Updates:
        """Return the updates of some of the clients.

        Their rows are copied when they are read for the first time. :func:`mix` needs no copy.

        Examples
        --------
        >>> Updates({"w": torch.arange(3)}, {}, {}, {}).of(np.array([True, False, True])).params
        {'w': tensor([0, 2])}
        """
        return _Assembled.from_rows(self, len(which), taken=torch.from_numpy(np.flatnonzero(which)))

    def with_rows(self, which: NDArray[np.bool_], rows: Updates) -> Updates:
        """Return updates of the same clients, some of whose rows are replaced.

        Rows are put together when they are read for the first time. On a CPU :func:`mix` does
        without this copy.

        Parameters
        ----------
        which : bool array
            The clients whose rows are replaced.
        rows : Updates
            Their new rows. Tensors that it does not hold are not changed. It has a tree, perhaps
            an empty one, for every tree of uploads.

        Examples
        --------
        >>> two = Updates({"w": torch.tensor([1.0, 9.0])}, {}, {}, {})
        >>> two.with_rows(np.array([False, True]), Updates({"w": torch.ones(1)}, {}, {}, {})).params
        {'w': tensor([1., 1.])}
        """
        changed = torch.from_numpy(np.flatnonzero(which)), rows
        return _Assembled.from_rows(self, len(which), changed=changed)

    def mixed(self, weights: Tensor, upload: str | None = None) -> Tree:
        """Return a weighted sum over the clients; see :func:`mix`."""
        return mix_tree(self._mixable(upload), weights)

    def _mixable(self, upload: str | None) -> Tree:
        """Return the parameters and buffers together, or a tree of uploads."""
        return {**self.params, **self.buffers} if upload is None else self.uploads[upload]


class _Assembled(Updates):
    """Rows of other updates, which are put together when they are read for the first time.

    New memory for many rows costs more time than all that most aggregations do with them, because
    of its page faults. If fields are given, as ``dataclasses.replace`` does, they are used instead.

    Attributes
    ----------
    _all : Updates
        The updates that have the rows.
    _clients : int
        How many clients they have.
    _changed : tuple of Tensor and Updates, optional
        Positions of clients among them, ascending, and the rows that replace theirs.
    _taken : Tensor, optional
        Positions of the clients that these updates have, ascending. By default all of them.
    """

    _all: Updates
    _clients: int
    _changed: tuple[Tensor, Updates] | None
    _taken: Tensor | None

    @classmethod
    def from_rows(
        cls,
        updates: Updates,
        clients: int,
        changed: tuple[Tensor, Updates] | None = None,
        taken: Tensor | None = None,
    ) -> _Assembled:
        """Return updates that consist of rows of others; see the attributes."""
        made = cls.__new__(cls)
        vars(made).update(_all=updates, _clients=clients, _changed=changed, _taken=taken)
        return made

    @cached_property
    def params(self) -> Tree:
        return self._together(lambda updates: updates.params)

    @cached_property
    def buffers(self) -> Tree:
        return self._together(lambda updates: updates.buffers)

    @cached_property
    def uploads(self) -> dict[str, Tree]:
        return {
            name: self._together(partial(Updates._mixable, upload=name))
            for name in self._all.uploads
        }

    @cached_property
    def reports(self) -> Reports:
        return _ExplainedReports(self._together(lambda updates: updates.reports))

    @property
    def param_names(self) -> list[str]:
        return super().param_names if "params" in vars(self) else self._all.param_names

    def mixed(self, weights: Tensor, upload: str | None = None) -> Tree:
        """Sum without a copy, unless there is one already. Clients not taken have weight 0."""
        fields = {"params", "buffers"} if upload is None else {"uploads"}
        already_read = not fields.isdisjoint(vars(self))
        if already_read or (self._taken is not None and len(weights) != len(self._taken)):
            return super().mixed(weights, upload)
        if self._taken is not None:
            taken, of_all = self._taken.to(weights.device), weights.new_zeros(self._clients)
            weights = of_all.index_copy(0, taken, weights)
        if self._changed is None:
            return self._all.mixed(weights, upload)
        places, rows = self._changed
        return mix_tree(self._all._mixable(upload), weights, (places, rows._mixable(upload)))

    def _together(self, tree_of: Callable[[Updates], Tree]) -> Tree:
        """Put one tree together. Tensors whose rows are all the same as before are not copied."""
        made = tree_of(self._all)
        if self._changed is not None:
            places, rows = self._changed
            changed = tree_of(rows)
            made = {
                name: stack.index_copy(0, places.to(stack.device), changed[name])
                if name in changed
                else stack
                for name, stack in made.items()
            }
        if self._taken is not None:
            made = {
                name: stack.index_select(0, self._taken.to(stack.device))
                for name, stack in made.items()
            }
        return made


class Cohort(Protocol):
    """The clients that take part in this round.

    The server part of a method communicates with clients only through the cohort.

    Attributes
    ----------
    ids : int array
        The ids of the clients, ascending.
    sizes, groups : int array
        The number of training samples of each client, and the position of its group among the
        federation's group names. Both are public: clients send them when they register.
    names : tuple of str
        The names of the clients, which are public, too; ``"client 12"`` for one without a name.
    clients : int or None
        The number of all clients of the federation; ``None`` on Flower, where clients may join.
    prior : Tensor
        The clients' weights before the aggregation changes them, ``[K]``, float64, summing to one.
    key : int
        Key of the server's own random numbers in this round; see :mod:`equipoise.random`.
    rounds : int
        The number of rounds of the run. A run whose method has read it cannot be made longer.
    score : str
        The main metric of :meth:`evaluate`, such as ``accuracy``.
    higher_is_better : bool
        Whether a higher score is better.
    """

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    groups: NDArray[np.int64]
    prior: Tensor
    key: int
    score: str
    higher_is_better: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients, in the order of ``ids``."""

    @property
    def clients(self) -> int | None:
        """The number of all clients of the federation, if no more may join."""

    @property
    def rounds(self) -> int:
        """The number of rounds of the run."""

    def train(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> Updates:
        """Send ``shared`` to all clients and row k of ``each`` to client k, and run ``local``."""

    def evaluate(self, params: Tree, split: str) -> Reports:
        """Return the loss and metrics of a model on each client's own split, ``[K]`` each.

        Clients that keep parts of the shared model use their own: after training those of this
        round.
        """

    def ask(
        self,
        question: str,
        *args: Any,
        model: Tree | None = None,
        split: str = "train",
        each: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Ask every client a question and stack the answers.

        A question is a method of the local rule, or of the aggregation if the rule has none of this
        name. It takes a :class:`~equipoise.client.Client` with one batch, and ``args``, and returns
        sums over the samples of that batch. The engine calls it for each batch of the client's
        split and adds the sums. With :func:`~equipoise.method.finished_by` the client computes its
        answer from the sums.

        Parameters
        ----------
        question : str
            The method's name.
        *args
            Sent to all clients: tensors, numbers, text, and trees of them.
        model : Tree, optional
            The model that clients use. Without one, ``client.params`` contains only the client's
            kept parts.
        split : {"train", "val", "test"}
            The samples that clients use.
        each : mapping of Tensor, optional
            Row k is sent to client k, where it is ``client.each``.

        Returns
        -------
        object
            What the question returns, with a leading axis of clients.
        """


@dataclass(frozen=True)
class State:
    """The state of the server between rounds.

    Attributes
    ----------
    round : int
        The number of finished rounds.
    model : Tree
        The global model.
    server : dict of Tree
        What the server's parts keep between rounds, by name (a momentum, a control variate). A tree
        with ``ids`` has one row per registered client and stays on the CPU; see :func:`locate`.
    notes : dict
        Additions to the round's record in ``rounds.jsonl``: weights, gaps, clusters. Tensors are
        written as lists. The rows of a tensor with one row per client are in the order of the
        cohort. Notes last for one round.

    Examples
    --------
    >>> state = State(0, {"w": torch.zeros(1)}).with_notes(weights=torch.tensor([0.25, 0.75]))
    >>> state.notes
    {'weights': tensor([0.2500, 0.7500])}
    """

    round: int
    model: Tree
    server: dict[str, Tree] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def with_global(self, model: Tree) -> State:
        """Return a state in which some tensors of the global model are replaced."""
        return replace(self, model={**self.model, **model})

    def with_server(self, **trees: Tree) -> State:
        """Return a state in which some of the server's trees are replaced."""
        return replace(self, server={**self.server, **trees})

    def with_notes(self, **notes: Any) -> State:
        """Return a state with more notes for the round's record."""
        return replace(self, notes={**self.notes, **notes})


Weights = Tensor | Sequence[float] | NDArray[np.floating]
"""One weight per client."""


def mix(updates: Updates, weights: Weights, upload: str | None = None) -> Tree:
    """Return the weighted sum of the clients' parameters and buffers, or of a tree of uploads.

    Sums are in float64 and in the order of the clients.

    Parameters
    ----------
    updates : Updates
        What the cohort sent.
    weights : Tensor or sequence of float
        One weight per client, ``[K]``, normally summing to one.
    upload : str, optional
        The name of the tree of uploads.

    Returns
    -------
    Tree
        In the dtype of the updates.

    Examples
    --------
    >>> two = Updates({"w": torch.tensor([[1.0], [3.0]])}, {}, {"c": {"v": torch.ones(2)}}, {})
    >>> mix(two, torch.tensor([0.5, 0.5]))
    {'w': tensor([2.])}
    >>> mix(two, [0.5, 0.5], upload="c")
    {'v': tensor(1.)}
    """
    return updates.mixed(_as_tensor(weights), upload)


def _as_tensor(weights: Weights) -> Tensor:
    """Return weights as a vector, and refuse what is not one."""
    if isinstance(weights, Tensor) and weights.dim() == 1:
        return weights
    try:
        made = torch.as_tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"weights are {weights!r}; valid: one number per client, in the order of cohort.ids"
        ) from error
    if made.dim() != 1:
        raise InputError(
            f"weights have the shape {tuple(made.shape)}; valid: one number per client, in the "
            "order of cohort.ids"
        )
    return made


def mix_tree(stacked: Tree, weights: Weights, changed: tuple[Tensor, Tree] | None = None) -> Tree:
    """Return the weighted sum over clients of one stacked tree; see :func:`mix`.

    Parameters
    ----------
    stacked : Tree
        ``[K, ...]`` each.
    weights : Tensor or sequence of float
        ``[K]``.
    changed : tuple of Tensor and Tree, optional
        Positions of clients, ascending, and the rows that count instead of theirs. Tensors that it
        does not hold are not changed.

    Examples
    --------
    >>> mix_tree({"w": torch.tensor([[1.0], [3.0]])}, torch.tensor([0.25, 0.75]))
    {'w': tensor([2.5000])}
    """
    rows = None if changed is None else (changed[0], [changed[1].get(name) for name in stacked])
    sums = weighted_sums(list(stacked.values()), _as_tensor(weights), rows)
    return dict(zip(stacked, sums, strict=True))


def shift(state: State, updates: Updates, weights: Tensor, simplex: Tensor) -> Tree:
    """Add the weighted updates of clients to the global parameters: w + Σ a_k (w_k − w).

    If the weights a do not sum to one, the step is longer or shorter, and w is kept. BatchNorm
    buffers are statistics, so they are averaged instead.

    Parameters
    ----------
    state : State
        The state with w.
    updates : Updates
        What the cohort sent.
    weights : Tensor
        a, one number per client.
    simplex : Tensor
        The weights of the buffers, summing to one.

    Returns
    -------
    Tree
        The shared parameters and buffers.

    Examples
    --------
    >>> two = Updates({"w": torch.tensor([[1.0], [3.0]])}, {}, {}, {})
    >>> state = State(0, {"w": torch.tensor([2.0])})
    >>> shift(state, two, torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.5]))
    {'w': tensor([2.5000])}
    """
    moved = {}
    for name, rows in updates.params.items():
        step = mix_tree({name: rows - state.model[name]}, weights)
        moved[name] = state.model[name] + step[name]
    return {**moved, **mix_tree(updates.buffers, simplex)}


def locate(clients: Tree, cohort: Cohort) -> Tensor:
    """Return the positions of a cohort among all registered clients.

    Parameters
    ----------
    clients : Tree
        What the server keeps for every registered client, ``[N, ...]`` each, and their ``ids``.
    cohort : Cohort
        The clients to find.

    Returns
    -------
    Tensor
        The cohort's positions in the tensors of ``clients``.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> locate({"ids": torch.tensor([0, 2, 5])}, SimpleNamespace(ids=np.array([2, 5])))
    tensor([1, 2])
    """
    return torch.searchsorted(clients["ids"], torch.from_numpy(cohort.ids))
