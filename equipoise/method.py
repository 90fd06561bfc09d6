"""The words a method is written in.

A method answers a few questions, one part each: who takes part (:class:`Sampler`), what each client does and keeps
(:class:`LocalRule`), how updates become the new global model (:class:`Aggregation`), on which view of the federation
all this happens (:class:`View`), and which updates are trusted how far (:class:`Guard`, optional). A part is a frozen dataclass of its hyper-parameters; parts combine freely, and
:class:`Method` refuses combinations in which one part reads what no other provides. The papers' parts live in
``equipoise/methods``, one file a paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.client import Client, Finished
from equipoise.errors import InputError, unknown
from equipoise.random import Purpose, fold, seeded
from equipoise.tree import PERSONAL, Parts, Tree, flat_rows, pieces

if TYPE_CHECKING:
    from equipoise.federation import Federation
    from equipoise.optimizers import Column, Optimizer


class Sees(IntEnum):
    """What the server gets to see of a single client, from least to most."""

    NOTHING = 0
    SUMS = 1
    SCALARS = 2
    UPDATES = 3
    REPRESENTATIONS = 4
    DATA = 5

    @property
    def words(self) -> str:
        """The level in the words of the documentation."""
        return _SEES_WORDS[self]


_SEES_WORDS = {
    Sees.NOTHING: "nothing",
    Sees.SUMS: "sums only",
    Sees.SCALARS: "per-client scalars",
    Sees.UPDATES: "per-client updates",
    Sees.REPRESENTATIONS: "representations",
    Sees.DATA: "all data",
}

Reports = dict[str, Tensor]


@dataclass(frozen=True)
class Updates:
    """What a cohort sends back, stacked on a leading axis in the order of its ids.

    Attributes
    ----------
    params, buffers : Tree
        The parameters and the buffers the clients share, ``[K, ...]`` each.
    uploads : dict of Tree
        What the local rule sends besides (see ``LocalRule.uploads``).
    reports : dict of Tensor
        Per-client numbers, float64 ``[K]``: ``train_loss``, ``steps``, and those the aggregation ``needs``.
    """

    params: Tree
    buffers: Tree
    uploads: dict[str, Tree]
    reports: Reports

    def of(self, which: NDArray[np.bool_]) -> Updates:
        """Return the updates of some of the clients.

        Examples
        --------
        >>> Updates({"w": torch.arange(3)}, {}, {}, {}).of(np.array([True, False, True])).params
        {'w': tensor([0, 2])}
        """
        chosen = torch.from_numpy(np.flatnonzero(which))

        def of_chosen(tree: Mapping[str, Tensor]) -> Tree:
            return {name: stack[chosen.to(stack.device)] for name, stack in tree.items()}

        uploads = {name: of_chosen(tree) for name, tree in self.uploads.items()}
        return Updates(of_chosen(self.params), of_chosen(self.buffers), uploads, of_chosen(self.reports))


class Cohort(Protocol):
    """The clients taking part in this round. A method's server half reaches its clients through it alone.

    Attributes
    ----------
    ids : int array
        Who is here, ascending.
    sizes, groups : int array
        How many training samples each of them holds, and its group's position among the federation's group names.
        Both are public: a client tells the server when it registers.
    prior : Tensor
        The clients' weights before the aggregation changes them, ``[K]``, float64, summing to one.
    key : int
        Key of the server's own random numbers in this round; see :mod:`equipoise.random`.
    rounds : int
        How many rounds the run lasts.
    score : str
        The metric of :meth:`evaluate` that tables lead with, such as ``accuracy``.
    higher_is_better : bool
        Whether a higher score is better.
    """

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    groups: NDArray[np.int64]
    prior: Tensor
    key: int
    rounds: int
    score: str
    higher_is_better: bool

    def train(self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule) -> Updates:
        """Send ``shared`` to all and row k of ``each`` to client k; have them carry out ``local``."""

    def evaluate(self, params: Tree, split: str) -> Reports:
        """Ask for loss and metrics of a model on the clients' own split, ``[K]`` each."""

    def ask(
        self,
        question: str,
        *args: Any,
        model: Tree | None = None,
        split: str = "train",
        each: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Ask every client a question and stack the answers.

        A question is a method of the local rule, or of the aggregation if the rule has none of this name. It takes a :class:`~equipoise.client.Client` with one
        batch, and ``args``, and returns sums over the samples of that batch. The engine goes through the
        client's split batch by batch and adds the answers up.

        Parameters
        ----------
        question : str
            The method's name.
        *args
            Sent to all clients: tensors, numbers, text, and trees of them.
        model : Tree, optional
            The model to ask about. Without one, ``client.params`` holds the client's kept parts only.
        split : {"train", "val", "test"}
            The samples to look at.
        each : mapping of Tensor, optional
            Row k is sent to client k, which finds it in ``client.each``.

        Returns
        -------
        object
            What the question returns, with a leading axis of clients.
        """


@dataclass(frozen=True)
class State:
    """What the server knows between rounds.

    Attributes
    ----------
    round : int
        Rounds finished.
    model : Tree
        The global model.
    server : dict of Tree
        What the server's parts keep between rounds, by name (a momentum, a control variate). A tree with
        ``ids`` holds one row a registered client and stays on the CPU; see :func:`locate`.
    notes : dict
        What the round's record in ``rounds.jsonl`` is to say besides: weights, gaps, clusters. Tensors
        are written as lists; one with a row a client follows the order of the cohort. Notes last for one
        round.

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
        """Replace tensors of the global model; those not named stay."""
        return replace(self, model={**self.model, **model})

    def with_server(self, **trees: Tree) -> State:
        """Replace what the server keeps, by name."""
        return replace(self, server={**self.server, **trees})

    def with_notes(self, **notes: Any) -> State:
        """Add notes to the round's record."""
        return replace(self, notes={**self.notes, **notes})


def mix(updates: Updates, weights: Tensor) -> Tree:
    """Sum the clients' parameters and buffers with weights, in float64 and in the order of the clients.

    Parameters
    ----------
    updates : Updates
        What the cohort sent.
    weights : Tensor
        One weight a client, ``[K]``, normally summing to one.

    Returns
    -------
    Tree
        In the dtype of the updates.

    Examples
    --------
    >>> two = Updates({"w": torch.tensor([[1.0], [3.0]])}, {}, {}, {})
    >>> mix(two, torch.tensor([0.5, 0.5]))
    {'w': tensor([2.])}
    """
    return {**mix_tree(updates.params, weights), **mix_tree(updates.buffers, weights)}


def mix_tree(stacked: Tree, weights: Tensor) -> Tree:
    """Do what :func:`mix` does, for one stacked tree.

    Examples
    --------
    >>> mix_tree({"w": torch.tensor([[1.0], [3.0]])}, torch.tensor([0.25, 0.75]))
    {'w': tensor([2.5000])}
    """
    mixed = {}
    # Skip zero-weight clients: 0 · inf is NaN, and a mask may hold infinities.
    counted = weights.nonzero().flatten()
    weights = weights[counted]
    for name, stack in stacked.items():
        rows = stack if len(counted) == len(stack) else stack[counted.to(stack.device)]
        weights = weights.to(rows.device, torch.float64)
        sums = [torch.mv(piece.double().T, weights) for piece in pieces(flat_rows(rows))]
        mixed[name] = (sums[0] if len(sums) == 1 else torch.cat(sums)).view(rows.shape[1:]).to(rows.dtype)
    return mixed


def shift(state: State, updates: Updates, weights: Tensor, simplex: Tensor) -> Tree:
    """Move the global parameters along the clients' differences from them: w + Σ a_k (w_k − w).

    Weights a that do not sum to one lengthen or shorten the step and lose nothing of w. BatchNorm buffers are no
    directions but statistics, so they are averaged.

    Parameters
    ----------
    state : State
        Holds w.
    updates : Updates
        What the cohort sent.
    weights : Tensor
        a, one number a client.
    simplex : Tensor
        The weights of the buffers, summing to one.

    Returns
    -------
    Tree
        The shared parameters and buffers.

    Examples
    --------
    >>> two = Updates({"w": torch.tensor([[1.0], [3.0]])}, {}, {}, {})
    >>> shift(State(0, {"w": torch.tensor([2.0])}), two, torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.5]))
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
        What the server keeps of every registered client, ``[N, ...]`` each, and their ``ids``.
    cohort : Cohort
        Whom to find.

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


Loss = Callable[[Client], Tensor]


def task_loss(client: Client) -> Tensor:
    """Return the task's own loss (cross-entropy or squared error) of the client's current parameters, sample by sample."""
    return client.task_loss()


def personal_loss(client: Client) -> Tensor:
    """Return the task's own loss of the client's personal model, sample by sample."""
    return client.personal().task_loss()


Value = Callable[[list[Tensor]], Tensor]


def plain_gradient(value: Value, params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Take the gradient where the parameters are.

    Parameters
    ----------
    value : callable
        Gives every client's loss, ``[K]``, for a list of stacked parameters.
    params : list of Tensor
        The stacked parameters that move.

    Returns
    -------
    tuple
        The losses, and one gradient a parameter.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in params]
    losses = value(leaves)
    gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    pairs = zip(gradients, leaves, strict=True)
    return losses.detach(), [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in pairs]


class Gradient(Protocol):
    """How a step's gradient is taken.

    A rule that makes steps of its own may follow the learning rate of the training settings; see :class:`FollowsRate`.
    """

    @property
    def batches(self) -> int:
        """How many batches a step looks at; see :func:`equipoise.engine.batches.draw_batches`."""

    def __call__(self, values: Sequence[Value], params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Take the gradient.

        Parameters
        ----------
        values : sequence of callable
            One a batch: gives every client's loss on that batch, ``[K]``, for a list of stacked parameters. BatchNorm
            statistics follow the first call of a step and no other.
        params : list of Tensor
            The stacked parameters that move; with a single client they are not stacked and a loss is a scalar, so only
            operations that do not mind are portable.

        Returns
        -------
        tuple
            The losses to report, and one gradient a parameter.
        """


@runtime_checkable
class FollowsRate(Protocol):
    """A gradient rule that depends on the learning rate of the step."""

    def at_rate(self, lr: Column) -> Gradient:
        """Return the rule for a learning rate: one number, or a column over the stacked clients."""


@dataclass(frozen=True)
class PlainGradient:
    """The gradient where the parameters are, batch by batch.

    Examples
    --------
    >>> PlainGradient()([lambda params: params[0].square()], [torch.tensor(3.0)])
    (tensor(9.), [tensor(6.)])
    """

    batches = 1

    def __call__(self, values: Sequence[Value], params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Take the gradient; see :func:`plain_gradient`."""
        return plain_gradient(values[0], params)


_BATCHES = ("next", "same", "split")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of local training.

    Parameters
    ----------
    move : str or tuple of str
        The parts that move; the others stay bit for bit.
    loss : callable or tuple of callable
        Per-sample values of one client; the engine takes the mean over the samples that are not padding. Several losses
        take turns, batch by batch: with two of them, the first is used for batches 1, 3, 5, ... and the second for
        batches 2, 4, 6, ... So a gradient that looks at two batches has a loss for each of them. With a gradient that
        looks at one, steps take turns, and all of them are made by one optimizer.
    gradient : Gradient
        How the gradient is taken, and how many batches a step looks at.
    epochs, steps : int, optional
        How long; by default what the training settings say. Where steps take turns, each loss lasts that long.
    optimizer : Optimizer, optional
        By default the one of the training settings.
    batch : {"next", "same", "split"}
        ``next``: every batch of a step is a batch of its own. ``same``, in interleaved phases: the phase uses the batches
        that the phase before has just used. ``split``: the batches of a step are parts of one batch; see
        :meth:`equipoise.engine.batches.Batches.split`.

    Examples
    --------
    >>> Phase(loss=(task_loss, personal_loss)).turns
    2
    """

    move: Parts = "all"
    loss: Loss | tuple[Loss, ...] = task_loss
    gradient: Gradient = PlainGradient()
    epochs: int | None = None
    steps: int | None = None
    optimizer: Optimizer | None = None
    batch: str = "next"

    def __post_init__(self) -> None:
        """Refuse lengths that are none, losses without a batch, and a phase that shares batches but sets their number."""
        for name in ("epochs", "steps"):
            if (length := getattr(self, name)) is not None and not length >= 1:
                raise InputError(f"a Phase lasts at least 1 of its {name}, got {length!r}")
        if self.batch not in _BATCHES:
            raise unknown("batch", self.batch, _BATCHES, where="Phase")
        if len(self.losses) != 1 and (not self.losses or len(self.losses) % self.gradient.batches):
            raise InputError(
                f"a Phase has {len(self.losses)} losses for the {self.gradient.batches} batches of its gradient; "
                "valid: one loss, or a multiple of that number"
            )
        if self.batch == "same" and (self.epochs is not None or self.steps is not None):
            raise InputError("a Phase with batch='same' lasts as long as the phase before; it takes no epochs or steps")

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The losses that take turns."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def turns(self) -> int:
        """How many steps it takes until the same losses are used again."""
        return max(1, len(self.losses) // self.gradient.batches)

    def losses_in(self, step: int) -> tuple[Loss, ...]:
        """Return the loss of each batch that a step looks at; steps are counted from 0."""
        batches, losses = self.gradient.batches, self.losses
        return tuple(losses[(step * batches + batch) % len(losses)] for batch in range(batches))


FACT_MODELS = ("first", "received", "trained")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What a client works out from its own training samples without training: label counts, a mean image.

    The engine goes through the samples batch by batch, so a fact takes little memory however many samples
    a client holds. The client's memory keeps it under its name; a fact that the rule names in ``uploads``
    is sent with the training reply too.

    Parameters
    ----------
    sums : callable
        Takes a :class:`~equipoise.client.Client` with one batch and returns a tree of sums over its samples.
        Padding must not count; see :meth:`equipoise.client.Client.sum`.
    then : callable, optional
        Makes the fact, a tree, from the sums over all samples. By default the fact is the sums.
    model : {"first", "received", "trained"}
        The model the sums are computed with. ``first``: the model every client begins with, once, when the
        client first takes part. ``received``: the received model, before training. ``trained``: the client's
        own model after training. Losses find facts of the first two in ``client.memory`` in the same round,
        and those of the trained model in the client's next one; before that, they are zero.

    Examples
    --------
    >>> Fact(sums=lambda client: {"samples": client.sum(torch.ones_like(client.y))}, model="first").model
    'first'
    """

    sums: Callable[[Client], Tree]
    then: Callable[[Tree], Tree] | None = None
    model: str = "received"

    def __post_init__(self) -> None:
        """Refuse an unknown model."""
        if self.model not in FACT_MODELS:
            raise unknown("model", self.model, FACT_MODELS, where="Fact")


class Part:
    """What every part has: a name for messages and tables, what it lets the server see, and the model it asks for.

    Attributes
    ----------
    needs_everyone : bool
        Whether the part must see all registered clients before round 1; see ``begin``.
    needs_images : bool
        Whether the part works on images, so that ``client.x`` must be the samples themselves and not
        what the model's stem made of them. Samples of another shape are refused.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    sees: ClassVar[Sees] = Sees.NOTHING
    usual_model: ClassVar[str | None] = None
    needs_everyone: ClassVar[bool] = False
    needs_images: ClassVar[bool] = False

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Return the model with the parts that the method brings, such as a projection or an adapter.

        Parts are submodules beside ``features`` and ``head`` (``model.add_module("projection", ...)``), which
        losses apply with :meth:`equipoise.client.Client.part`; a module ``model.inputs`` that changes samples
        before anything else; or the method returns another model. Their parameters are drawn from the run's seed, so they are the same in
        every process.

        Parameters
        ----------
        model : nn.Module
            With ``features`` and ``head``; it may be changed.
        shape : tuple of int
            The shape of one sample; :func:`equipoise.models.base.width_of` gives that of z.
        """
        return model


class Candidates(Protocol):
    """The registered clients that a sampler chooses from.

    Attributes
    ----------
    ids : int array
        Their numbers, ascending.
    sizes, groups : int array
        The number of training samples and the group of each.
    key : int
        Key of the sampler's random numbers in this round.
    """

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    key: int

    @property
    def groups(self) -> NDArray[np.int64]:
        """The group of each, as a position among the federation's group names."""

    def cohort(self, ids: NDArray[np.int64]) -> Cohort:
        """Gather some of them, to be asked before the choice is made."""


class Sampler(Part):
    """Who takes part in a round?"""

    def begin(self, state: State, everyone: Cohort) -> State:
        """Set up what the sampler keeps, once before round 1, if it ``needs_everyone``."""
        return state

    def admit(self, state: State, everyone: Cohort) -> State:
        """Take in clients that have registered since :meth:`begin`, which by default is done again."""
        return self.begin(state, everyone)

    def select(self, state: State, candidates: Candidates, count: int) -> NDArray[np.int64]:
        """Choose clients.

        Parameters
        ----------
        state : State
            What the server knows.
        candidates : Candidates
            The registered clients.
        count : int
            How many clients to choose.

        Returns
        -------
        int array
            ``count`` distinct ids; their order does not matter.
        """
        raise NotImplementedError

    def learn(self, state: State, cohort: Cohort) -> State:
        """Return the state after a round in which a cohort took part, if the sampler keeps anything of it."""
        return state


class LocalRule(Part):
    """What does each client do, and what does it keep for itself?

    Attributes
    ----------
    keeps : parts
        Parts that stay with the client between rounds and never travel. A part below ``personal`` begins as a copy of
        the received part of the same name. Together with the global model they make the client's personal model.
    receives : tuple of str
        What the rule expects the server to send besides the model.
    uploads : tuple of str
        What a client sends besides the parameters: made by :meth:`finish`, or one of :meth:`facts`.
    interleaved : bool
        Whether phases take turns batch by batch instead of following each other.
    makes_index : bool
        Whether the trained model makes a client index. Then the rule has a question ``index_sums``,
        which returns the sums of the feature and of the label indices of samples and their number,
        and every run leaves the index of all clients.
    """

    makes_index: ClassVar[bool] = False
    keeps: Parts = ()
    receives: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    interleaved: bool = False

    def phases(self) -> Sequence[Phase]:
        """List the phases of local training."""
        return (Phase(),)

    def adapt(self) -> Sequence[Phase]:
        """List the phases by which a client without a memory makes the global model its own before it uses it.

        They run when personal models are evaluated: for clients that have never taken part, and for all clients if the
        rule keeps no parts. Nothing of them is remembered or sent.
        """
        return ()

    def facts(self) -> Mapping[str, Fact]:
        """Name what a client works out from its own data; see :class:`Fact`."""
        return {}

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Return the memory of a client that has never taken part, from the model it receives (kept parts aside)."""
        return {}

    def finish(self, client: Finished) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """Return the client's new memory and its uploads, after local training.

        Kept parts stay as training left them, unless the memory names them in a tree ``kept``.
        """
        return {}, {}


class Aggregation(Part):
    """How do updates become the new global model?

    Attributes
    ----------
    needs : tuple of str
        Reports the engine computes whatever the local rule: ``loss_before`` and ``loss_after`` (on the training split),
        ``val_loss_before`` and ``val_loss_after``, the same with ``score`` for ``loss``, and ``lr`` (the learning rate of
        the round).
    sends : tuple of str
        What :meth:`send` sends besides the model.
    sends_once : tuple of str
        Those of ``sends`` that never change, such as an index. A client receives each once and keeps it; later
        messages name it by its hash.
    collects : tuple of str
        Uploads of the local rule that :meth:`combine` uses.
    usual_weights : {"size", "uniform"}
        The cohort's prior in the paper.
    ignores_prior : str, optional
        Why the cohort's prior does not change the result, if it does not: what clients are weighted by instead.
    lasting : tuple of str, optional
        Of the numbers kept of every client, those that stay when clients join; all by default.
    """

    usual_weights: ClassVar[str] = "size"
    ignores_prior: ClassVar[str | None] = None
    lasting: ClassVar[tuple[str, ...] | None] = None
    needs: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    sends_once: tuple[str, ...] = ()
    collects: tuple[str, ...] = ()

    def begin(self, state: State, everyone: Cohort) -> State:
        """Set up what the server keeps, once before round 1, if the aggregation ``needs_everyone``.

        All registered clients are there to be asked.
        """
        return state

    def admit(self, state: State, everyone: Cohort) -> State:
        """Take in clients that have registered since :meth:`begin`, which is done again for everyone.

        Of clients already there, the numbers in ``lasting`` stay what they were, and so does all that is not about
        single clients.
        """
        fresh = self.begin(replace(state, server={}), everyone)
        lasting = {n: carried_over(tree, fresh.server.get(n, tree), self.lasting) for n, tree in state.server.items()}
        return fresh.with_server(**lasting)

    def prepare(self, state: State, cohort: Cohort) -> State:
        """Return the state with which a round begins: ask the cohort whatever :meth:`send` must know.

        The server keeps what the returned state says, as after :meth:`combine`.
        """
        return state

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Say what goes to all clients (``model`` at least) and what to each (row k to client k).

        A row named ``step_factor`` scales that client's steps.
        """
        return {"model": state.model}, {}

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Make the next state; pure, so that it can be run again without a client that fails."""
        raise NotImplementedError

    def evaluated(self, state: State) -> Tree:
        """Return the model that is evaluated and handed out, where it is not the one sent to clients."""
        return state.model


@dataclass(frozen=True)
class Screened:
    """What a guard makes of the updates of a round.

    Attributes
    ----------
    updates : Updates
        The updates of all clients of the cohort, changed or not.
    dropped : tuple of int
        The ids of the clients whose updates are not used.
    notes : dict
        What the round's record says of it, under names that begin with ``guard_``; see :class:`State`. A tensor with a
        row a client is valid only if no client is dropped.
    """

    updates: Updates
    dropped: tuple[int, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


class Guard(Part):
    """Which updates are trusted, and how far?

    A guard sees all updates that have arrived before the aggregation does. It changes them, or drops clients. It must
    treat everything that the aggregation may use: parameters, buffers and uploads.
    """

    def least_clients(self) -> int:
        """Return how many updates the guard needs; a round with fewer stops the run."""
        return 1

    def screen(self, received: Tree, updates: Updates, cohort: Cohort) -> Screened:
        """Return the updates to use; pure.

        Parameters
        ----------
        received : Tree
            The model that the clients received.
        updates : Updates
            What they sent.
        cohort : Cohort
            Who they are.
        """
        raise NotImplementedError


def combine_checked(aggregation: Aggregation, state: State, updates: Updates, cohort: Cohort) -> State:
    """Have an aggregation combine, and see that what comes back is a state with a model like the one before.

    Parameters
    ----------
    aggregation : Aggregation
        Combines.
    state : State
        What the server knows.
    updates : Updates
        What the cohort sent.
    cohort : Cohort
        Who is here.

    Returns
    -------
    State
        The next state.

    Examples
    --------
    >>> class Forgetful(Aggregation):
    ...     name = "forgetful"
    ...     def combine(self, state, updates, cohort):
    ...         return State(state.round, {})
    >>> combine_checked(Forgetful(), State(0, {"w": torch.zeros(2)}), Updates({}, {}, {}, {}), None)
    Traceback (most recent call last):
    equipoise.errors.InputError: aggregation 'forgetful': combine left w out of the model; it must keep all names and shapes
    """
    after: object = aggregation.combine(state, updates, cohort)
    return check_state(state, after, f"aggregation {aggregation.name or type(aggregation).__name__!r}: combine")


def check_state(state: State, after: object, where: str) -> State:
    """Return the state that a part made of another one, or raise if the model has other names or shapes."""
    if not isinstance(after, State):
        raise InputError(f"{where} must return a State, got {type(after).__name__}")
    for name in {**state.model, **after.model}:
        if name not in after.model:
            fault = f"left {name} out of the model"
        elif name not in state.model:
            fault = f"added {name} to the model"
        elif not isinstance(after.model[name], Tensor):
            fault = f"made {name} a {type(after.model[name]).__name__} and no tensor"
        elif after.model[name].shape != state.model[name].shape:
            shapes = [tuple(tree[name].shape) for tree in (state.model, after.model)]
            fault = f"changed the shape of {name} from {shapes[0]} to {shapes[1]}"
        else:
            continue
        raise InputError(f"{where} {fault}; it must keep all names and shapes")
    return after


def carried_over(old: Tree, new: Tree, lasting: tuple[str, ...] | None = None) -> Tree:
    """Put what lasts of clients into a tree made for more of them; a tree that is not about clients stays.

    Parameters
    ----------
    old, new : Tree
        What the server keeps of the clients registered before, and of those registered now, with their ``ids``.
    lasting : tuple of str, optional
        The names that keep their old values; all by default.

    Returns
    -------
    Tree
        Like ``new``.

    Examples
    --------
    >>> old = {"ids": torch.tensor([1, 4]), "last": torch.tensor([7, 8])}
    >>> carried_over(old, {"ids": torch.tensor([1, 2, 4]), "last": torch.tensor([0, 0, 0])})["last"]
    tensor([7, 0, 8])
    """
    if "ids" not in new:
        return old
    where = torch.searchsorted(new["ids"], old["ids"])
    names = [name for name in new if name != "ids" and (lasting is None or name in lasting)]
    return {**new, **{name: new[name].index_put((where,), old[name]) for name in names}}


class View(Part):
    """On which view of the federation does training happen?

    Attributes
    ----------
    gathers : bool
        Whether the server trains alone, on samples that it asks all clients for before round 1; see
        :meth:`gather`.
    """

    gathers: ClassVar[bool] = False

    def of(self, federation: Federation) -> Federation:
        """Return the federation to train on; evaluation is always on the original."""
        return federation

    def gather(self, everyone: Cohort) -> tuple[Tensor, Tensor]:
        """Ask all registered clients for the samples to train on, if the view ``gathers``.

        Returns
        -------
        tuple of Tensor
            Samples and targets.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Method:
    """Parts put together: what is federated.

    Parameters
    ----------
    name : str
        What tables call it.
    sampler, local, aggregation, view : part
        The answers to the four questions.
    weights : {"size", "uniform"}
        The cohort's prior: what a client counts before the aggregation has its say.
    guard : Guard, optional
        What happens to updates before they are combined; nothing by default.

    Examples
    --------
    >>> from equipoise.methods import build
    >>> build("fedprox", mu=0.1, sampling="size").local
    FedProx(mu=0.1)
    """

    name: str
    sampler: Sampler
    local: LocalRule
    aggregation: Aggregation
    view: View
    weights: str = "size"
    guard: Guard | None = None

    def __post_init__(self) -> None:
        """Refuse a part that reads what no other part provides."""
        if self.guard is not None and self.local.keeps == "all":
            raise InputError(
                f"method {self.name!r}: its clients keep the whole model and send nothing, so the guard "
                f"{self.guard.name!r} has nothing to do; leave it out"
            )
        for reader, wants, giver, gives in (
            (self.local, self.local.receives, self.aggregation, self.aggregation.sends),
            (self.aggregation, self.aggregation.collects, self.local, self.local.uploads),
        ):
            if missing := set(wants) - set(gives):
                raise InputError(
                    f"method {self.name!r}: {type(reader).__name__} needs {', '.join(sorted(missing))}, "
                    f"which {type(giver).__name__} does not provide"
                )
        if strays := set(self.aggregation.sends_once) - set(self.aggregation.sends):
            raise InputError(
                f"method {self.name!r}: {type(self.aggregation).__name__} sends {', '.join(sorted(strays))} once, "
                "but does not name it in sends"
            )
        if self.view.gathers and self.local.keeps:
            raise InputError(
                f"method {self.name!r}: {type(self.local).__name__} keeps parts with clients, but with the view "
                f"{type(self.view).__name__} the server trains alone"
            )
        whole = self.aggregation
        if isinstance(whole, LocalRule) and whole.keeps and whole != self.local:
            raise InputError(
                f"method {self.name!r}: {type(whole).__name__} keeps personal parts in its own local rule, "
                f"which {type(self.local).__name__} takes the place of"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The answers to the questions; without a guard there is none among them."""
        guard = () if self.guard is None else (self.guard,)
        return self.sampler, self.local, self.aggregation, self.view, *guard

    def extend(self, model: nn.Module, shape: tuple[int, ...], seed: int) -> nn.Module:
        """Return the model with what the parts bring, drawn from the seed; see :meth:`Part.extend`."""
        if self.needs_images and len(shape) != 3:
            raise InputError(
                f"method {self.name!r} works on images of shape (channels, height, width), but a sample has shape "
                f"{tuple(shape)}; valid: a source of images, without data.encode"
            )
        with seeded(fold(seed, Purpose.EXTEND)):
            for part in dict.fromkeys(self.parts):
                model = part.extend(model, shape)
        return model

    @property
    def sees(self) -> Sees:
        """The most that any part lets the server see, those inside other parts included."""
        return max(shown.sees for part in self.parts for shown in (part, *held_by(part)))

    @property
    def needs_images(self) -> bool:
        """Whether a part works on images, those inside other parts included."""
        return any(shown.needs_images for part in self.parts for shown in (part, *held_by(part)))

    @property
    def usual_model(self) -> str:
        """The model to use where none is named."""
        return next((part.usual_model for part in self.parts if part.usual_model), "mlp")

    @property
    def personal(self) -> bool:
        """Whether clients end up with models of their own."""
        return bool(self.local.keeps or self.local.adapt())


def held_by(part: Part) -> list[Method | Part]:
    """List the methods and parts that a part has as options.

    Examples
    --------
    >>> from equipoise.methods import build
    >>> held_by(build("fedprox").local)
    []
    """
    options: list[Any] = [getattr(part, option.name) for option in fields(part)] if is_dataclass(part) else []
    return [option for option in options if isinstance(option, (Method, Part))]


def personal_model(model: Tree, kept: Tree) -> Tree:
    """Lay a client's kept parts over the global model.

    Examples
    --------
    >>> glob = {"features.w": torch.zeros(1), "head.w": torch.zeros(1)}
    >>> personal_model(glob, {"personal.head.w": torch.ones(1)})
    {'features.w': tensor([0.]), 'head.w': tensor([1.])}
    """
    return {**model, **{name.removeprefix(PERSONAL): tensor for name, tensor in kept.items()}}
