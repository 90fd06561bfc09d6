"""The parts of methods: which clients take part, what they do, how updates are combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.client import Finished
from equipoise.errors import InputError, unknown
from equipoise.exchange import REQUESTED_REPORTS, Cohort, State, Updates
from equipoise.phases import Fact, Phase
from equipoise.tree import Parts, Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation


class Sees(IntEnum):
    """What the server sees of a single client, from least to most."""

    NOTHING = 0
    SUMS = 1
    SCALARS = 2
    UPDATES = 3
    REPRESENTATIONS = 4
    DATA = 5

    @property
    def words(self) -> str:
        """The level in words, as in the documentation."""
        return _SEES_WORDS[self]


_SEES_WORDS = {
    Sees.NOTHING: "nothing",
    Sees.SUMS: "sums only",
    Sees.SCALARS: "per-client scalars",
    Sees.UPDATES: "per-client updates",
    Sees.REPRESENTATIONS: "representations",
    Sees.DATA: "all data",
}


class Part:
    """What all parts have: a name, what the server sees of clients, and the usual model.

    Attributes
    ----------
    needs_everyone : bool
        Whether the part needs all registered clients before round 1; see ``begin``.
    needs_images : bool
        Whether the part needs images. Then ``client.x`` is the samples themselves, not encoded by
        the model's stem. Samples of another shape are refused.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    sees: ClassVar[Sees] = Sees.NOTHING
    usual_model: ClassVar[str | None] = None
    needs_everyone: ClassVar[bool] = False
    needs_images: ClassVar[bool] = False

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Return the model with the parts that the method adds, such as a projection.

        The method can add submodules beside ``features`` and ``head``
        (``model.add_module("projection", ...)``), which losses apply with
        :meth:`equipoise.client.Client.part`. It can add a module ``model.inputs``, which is applied
        to samples first. Or it can return another model. Parameters are drawn from the run's seed,
        so they are the same in every process.

        Parameters
        ----------
        model : nn.Module
            The model, which may be changed. A model without ``features`` and ``head`` is refused if
            the method needs them.
        shape : tuple of int
            The shape of one sample. :func:`equipoise.models.base.width_of` returns the width of z.
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
        """The group of each client, as a position among the federation's group names."""

    def cohort(self, ids: NDArray[np.int64]) -> Cohort:
        """Return a cohort of some clients, to ask them before the choice."""


class Sampler(Part):
    """Which clients take part in a round?

    Attributes
    ----------
    reads_state : bool
        Whether the choice depends on more of the state than the number of the round, or on what
        clients are asked. Where it does not, the next cohort is chosen while a GPU trains the one
        before. Subclasses do not inherit a ``False``, because they may choose differently.
    """

    reads_state: ClassVar[bool] = True

    @property
    def looks_ahead(self) -> bool:
        """Whether cohorts can be chosen ahead: the class itself says ``reads_state = False``."""
        return "reads_state" in vars(type(self)) and not self.reads_state

    def begin(self, state: State, everyone: Cohort) -> State:
        """Set up what the sampler keeps. Called before round 1 if it ``needs_everyone``."""
        return state

    def admit(self, state: State, everyone: Cohort) -> State:
        """Add clients that have registered since :meth:`begin`, which is repeated by default."""
        return self.begin(state, everyone)

    def select(self, state: State, candidates: Candidates, count: int) -> NDArray[np.int64]:
        """Choose clients.

        Parameters
        ----------
        state : State
            The state of the server.
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
        """Return the state after a round, with what the sampler keeps of the cohort."""
        return state


class LocalRule(Part):
    """What does each client do, and what does it keep?

    Attributes
    ----------
    keeps : parts
        Parts that stay on the client between rounds and are never sent. A part below ``personal``
        begins as a copy of the received part of the same name. Together with the global model they
        form the client's personal model.
    receives : tuple of str
        What the rule needs from the server in addition to the model.
    uploads : tuple of str
        What a client sends in addition to the parameters: made by :meth:`finish`, or one of
        :meth:`facts`.
    interleaved : bool
        Whether phases alternate batch by batch instead of running one after the other.
    proximal : float
        The factor μ of a term μ/2 ‖w − wᵗ‖² in the loss, where wᵗ is the received model. FedNova
        uses it.
    makes_index : bool
        Whether the trained model makes a client index. Then the rule has a question ``own_index``,
        which returns the ``features`` and the ``labels`` of a client's index, and every run writes
        the index of all clients.
    """

    makes_index: ClassVar[bool] = False
    keeps: Parts = ()
    receives: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    interleaved: bool = False
    proximal: float = 0.0

    @property
    def adds_terms(self) -> bool:
        """Whether the loss has further terms, which clients report as ``method_terms``."""
        return any(phase.adds_terms for phase in self.phases())

    def index_epsilon(self) -> float | None:
        """Return the ε of the client index, if clients add noise to it."""
        return None

    def phases(self) -> Sequence[Phase]:
        """List the phases of local training."""
        return (Phase(),)

    def adapt(self) -> Sequence[Phase]:
        """List the phases that adapt the global model of a client without a memory.

        They run when personal models are evaluated: for clients that have never taken part, and for
        all clients if the rule keeps no parts. Their results are neither kept nor sent.
        """
        return ()

    def facts(self) -> Mapping[str, Fact]:
        """Return the facts that a client computes from its own data, by name; see :class:`Fact`."""
        return {}

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Return the memory of a client that has never taken part, without kept parts.

        ``model`` is the model that it receives.
        """
        return {}

    def finish(self, client: Finished) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """Return the client's new memory and its uploads after local training.

        Kept parts are those after training, unless the memory has a tree ``kept`` with others.
        """
        return {}, {}

    @property
    def finishes(self) -> bool:
        """Whether :meth:`finish` has something to do."""
        return type(self).finish is not LocalRule.finish


class Aggregation(Part):
    """How do updates become the new global model?

    Attributes
    ----------
    needs : tuple of str
        Reports that the engine computes for any local rule: ``loss_before`` and ``loss_after`` (on
        the training split), ``val_loss_before`` and ``val_loss_after``, the same with ``score``
        instead of ``loss``, ``lr`` (the learning rate of the round) and ``gradient_weight`` (see
        :func:`equipoise.optimizers.gradient_weights`).
    sends : tuple of str
        What :meth:`send` sends in addition to the model.
    sends_once : tuple of str
        Those of ``sends`` that never change, such as an index. A client receives each once and
        keeps it. Later messages contain only its hash.
    collects : tuple of str
        Uploads of the local rule that :meth:`combine` uses.
    usual_weights : {"size", "uniform"}
        The cohort's prior in the paper.
    ignores_prior : str, optional
        If the cohort's prior does not change the result, what clients are weighted by instead.
    lasting : tuple of str, optional
        The names of the values of clients that are kept when further clients join; all by default.
    reads_reports : bool
        Whether :meth:`prepare`, :meth:`send` or :meth:`combine` reads reports of clients, or asks
        them something. Where none of them does, a GPU combines updates and trains the next cohort
        before the host has checked the updates. Subclasses do not inherit a ``False``, because they
        may read reports.
    """

    reads_reports: ClassVar[bool] = True
    usual_weights: ClassVar[str] = "size"
    ignores_prior: ClassVar[str | None] = None
    lasting: ClassVar[tuple[str, ...] | None] = None
    needs: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    sends_once: tuple[str, ...] = ()
    collects: tuple[str, ...] = ()

    @property
    def combines_ahead(self) -> bool:
        """Whether updates can be combined ahead: the class says ``reads_reports = False``."""
        return "reads_reports" in vars(type(self)) and not self.reads_reports

    def begin(self, state: State, everyone: Cohort) -> State:
        """Set up what the server keeps. Called before round 1 if it ``needs_everyone``.

        ``everyone`` is a cohort of all registered clients.
        """
        return state

    def admit(self, state: State, everyone: Cohort) -> State:
        """Add clients that have registered since :meth:`begin`, which is repeated for everyone.

        For clients that were registered before, the values in ``lasting`` are kept. Trees without
        values of clients are kept as well.
        """
        fresh = self.begin(replace(state, server={}), everyone)
        lasting = {
            n: carried_over(tree, fresh.server.get(n, tree), self.lasting)
            for n, tree in state.server.items()
        }
        return fresh.with_server(**lasting)

    def prepare(self, state: State, cohort: Cohort) -> State:
        """Return the state with which a round begins.

        Here an aggregation can ask the cohort for what :meth:`send` needs. The server keeps the
        returned state, as after :meth:`combine`.
        """
        return state

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Return what all clients receive (at least ``model``), and what each client receives.

        Row k of the second mapping is sent to client k. A row ``step_factor`` scales the client's
        steps.
        """
        return {"model": state.model}, {}

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Return the next state. It must be pure, since it is repeated if a client fails.

        If it sets the global model, it must set every tensor that clients send.
        """
        raise NotImplementedError

    def evaluated(self, state: State) -> Tree:
        """Return the model that is evaluated and saved, by default the one sent to clients."""
        return state.model


def check_needs(aggregation: Aggregation | type[Aggregation]) -> None:
    """Refuse an aggregation, or its class, that needs reports which do not exist.

    Examples
    --------
    >>> class Typo(Aggregation):
    ...     needs = ("loss_befor",)
    >>> check_needs(Typo)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown report 'loss_befor' in needs of Typo; did you mean ...
    """
    needs: Any = aggregation.needs
    kind = aggregation if isinstance(aggregation, type) else type(aggregation)
    # The needs of a wrapper are those of its host, which its class does not know.
    if isinstance(needs, property):
        return
    if not isinstance(needs, tuple | list):
        raise InputError(f"needs of {kind.__name__} is {needs!r}; valid: a tuple of names")
    for name in needs:
        if name not in REQUESTED_REPORTS:
            raise unknown("report", name, REQUESTED_REPORTS, where=f"needs of {kind.__name__}")


def check_phases(local: LocalRule) -> None:
    """Refuse a local rule whose ``phases`` or ``adapt`` returns anything but phases.

    Examples
    --------
    >>> class Single(LocalRule):
    ...     def phases(self):
    ...         return Phase()
    >>> check_phases(Single())
    Traceback (most recent call last):
    equipoise.errors.InputError: phases of Single returns a Phase; valid: a tuple of phases, such as
    (Phase(...),)
    """
    for name, listed in (("phases", local.phases()), ("adapt", local.adapt())):
        found: Any = listed
        if isinstance(found, tuple | list):
            found = next((phase for phase in found if not isinstance(phase, Phase)), None)
            if found is None:
                continue
            what = f"a {type(listed).__name__} with {found!r}"
        else:
            what = "None" if found is None else f"a {type(found).__name__}"
        raise InputError(
            f"{name} of {type(local).__name__} returns {what}; valid: a tuple of phases, such as "
            "(Phase(...),)"
        )


def carried_over(old: Tree, new: Tree, lasting: tuple[str, ...] | None = None) -> Tree:
    """Copy lasting values of clients to a tree with more clients.

    A tree without ``ids`` has no values of clients, and the old one is returned.

    Parameters
    ----------
    old, new : Tree
        What the server keeps of the clients registered before, and of those registered now, with
        their ``ids``.
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
        Whether only the server trains, on samples that it asks all clients for before round 1; see
        :meth:`gather`.
    """

    gathers: ClassVar[bool] = False

    def of(self, federation: Federation) -> Federation:
        """Return the federation to train on. Evaluation always uses the original."""
        return federation

    def gather(self, everyone: Cohort) -> tuple[Tensor, Tensor]:
        """Ask all registered clients for the samples to train on, if the view ``gathers``.

        Returns
        -------
        tuple of Tensor
            Samples and targets.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Screened:
    """The result of a guard.

    Attributes
    ----------
    updates : Updates
        The updates of all clients of the cohort, changed or not.
    dropped : tuple of int
        The ids of the clients whose updates are not used.
    notes : dict
        Notes for the round's record, with names that begin with ``guard_``; see :class:`State`. A
        tensor with a row per client is valid only if no client is dropped.
    """

    updates: Updates
    dropped: tuple[int, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


class Guard(Part):
    """Which updates are trusted, and how far?

    A guard gets all updates before the aggregation does. It changes them or drops clients. It must
    handle everything that the aggregation may use: parameters, buffers and uploads.
    """

    def least_clients(self) -> int:
        """Return how many updates the guard needs. A round with fewer stops the run."""
        return 1

    def screen(self, received: Tree, updates: Updates, cohort: Cohort) -> Screened:
        """Return the updates to use. It must be pure.

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
