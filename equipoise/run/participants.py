"""Which clients take part in a run, and the cohort of each round."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.cohort import StackedCohort
from equipoise.engine.contract import ClientsLost, Engine, RoundCohort
from equipoise.engine.settings import Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.method import Aggregation, Method, Sampler, State
from equipoise.random import Purpose, fold
from equipoise.run.candidates import Registered, chosen_ids

log = logging.getLogger("equipoise")

# The key of waiting clients in the state, and the number of rounds until all are asked again.
_WAITING, _ASK_AGAIN = "waiting", 10

# The cohort of a round, and the cohorts that the sampler asked before its choice.
Choice = tuple[RoundCohort, list[RoundCohort]]


class Participants:
    """The clients that take part in a run.

    The server's state is kept by the round loop. Methods that change it return the new state.

    Parameters
    ----------
    federation : Federation
        The clients.
    view : Federation
        The method's view of them.
    method : Method
        The method.
    training : Training
        The training settings, with the size of cohorts.
    engine : Engine
        The engine of the clients.
    seed : int
        Of the choice of cohorts.

    Attributes
    ----------
    view : Federation
        What is trained on. If the server gathers samples, :meth:`begin` replaces it by them.
    trains : Engine
        The engine that trains: that of the clients, or another one of the server with the gathered
        samples.
    registered : int array
        The clients from which cohorts are chosen, in ascending order.
    cohort_size : int
        The number of clients in a round.
    everyone : RoundCohort or None
        The cohort that was asked before round 1, if there was one.
    """

    def __init__(
        self,
        federation: Federation,
        view: Federation,
        method: Method,
        training: Training,
        engine: Engine,
        seed: int,
    ) -> None:
        self.federation, self.view, self.method, self.training, self.engine, self.seed = (
            federation,
            view,
            method,
            training,
            engine,
            seed,
        )
        self.trains = engine
        self.everyone: RoundCohort | None = None
        self._register(_nobody())

    @property
    def pooled(self) -> bool:
        """Whether clients do not train, because the method pools their data."""
        return self.view is not self.federation

    @property
    def everyone_trains(self) -> bool:
        """Whether all registered clients train in every round."""
        return self.cohort_size == len(self.registered)

    def _register(self, waiting: NDArray[np.int64]) -> None:
        # Computed once. With a million clients, this takes longer than drawing the cohort.
        registered = self.view.seen
        if len(waiting):
            registered = np.setdiff1d(registered, waiting)
        self.registered = registered
        # Choices for coming rounds, by the number of the round.
        self._ahead: dict[int, Choice] = {}
        self.cohort_size = (
            len(registered) if self.pooled else self.training.cohort_size(len(registered))
        )
        self._train_sizes = self.view.split("train").sizes[registered]

    def restore(self, state: State) -> None:
        """Leave out the clients that wait according to the state of a checkpoint."""
        if len(waiting := _waiting(state)):
            self._register(waiting)

    # ---- clients that join -----------------------------------------------------------------------

    @property
    def _that_need_everyone(self) -> list[Sampler | Aggregation]:
        sampler, aggregation = self.method.sampler, self.method.aggregation
        # One part may be both.
        parts: list[Sampler | Aggregation] = [sampler]
        parts += [] if sampler == aggregation else [aggregation]
        return [part for part in parts if part.needs_everyone]

    def begin(self, state: State) -> State:
        """Call ``begin`` of the method's parts. Ask all clients only if a part needs it."""
        if self.method.view.gathers and not self.pooled and state.round < self.training.rounds:
            self._gather(_waiting(state))
        if state.round or self.everyone or not self._that_need_everyone or not self.training.rounds:
            return state
        with exact_arithmetic(self.engine.machine):
            state, self.everyone = self._ask_everyone("begin", self.registered, state)
        return state

    def admit(self, state: State) -> tuple[State, list[RoundCohort]]:
        """Admit clients that have registered since the last round. Return the cohorts asked."""
        newcomers = self.engine.newcomers()
        again = len(_waiting(state)) and state.round % _ASK_AGAIN == 0
        if not (newcomers or again) or self.method.view.gathers:
            return state, []
        if not (state.round or self.everyone):
            self._register(_waiting(state))
            return state, []
        candidates = np.setdiff1d(self.view.seen, self.registered)
        state, asked = self._ask_everyone("admit", candidates, state)
        return state, [asked]

    def _ask_everyone(
        self, what: str, candidates: NDArray[np.int64], before: State
    ) -> tuple[State, RoundCohort]:
        """Call ``begin`` or ``admit`` of the parts that need everyone.

        Candidates that do not answer wait. If one of the other clients does not answer, all
        candidates wait, so that the values of that client are kept.
        """
        begins = what == "begin"
        members = candidates if begins else np.union1d(self.registered, candidates)
        everyone, state, admitted = (
            self.engine.cohort(self.method, members, 0),
            before,
            candidates,
        )
        while len(admitted):
            try:
                for part in self._that_need_everyone:
                    state = getattr(part, what)(state, everyone)
                break
            except ClientsLost as lost:
                mine = bool(np.isin(lost.ids, admitted).all())
                admitted = np.setdiff1d(admitted, lost.ids) if mine else admitted[:0]
                everyone = everyone.without(lost.ids) if mine else everyone
            except InputError as error:
                if begins:
                    raise
                log.warning("clients %s cannot take part: %s", admitted.tolist(), error)
                admitted = admitted[:0]
            state = before
        waiting = np.setdiff1d(candidates, admitted)
        kept = {name: tree for name, tree in state.server.items() if name != _WAITING}
        if len(waiting):
            log.warning("clients %s take no part until everyone is asked again", waiting.tolist())
            kept[_WAITING] = {"ids": torch.from_numpy(waiting)}
        if len(waiting) or not begins:
            self._register(waiting)
        return replace(state, server=kept), everyone

    def _gather(self, waiting: NDArray[np.int64]) -> None:
        """Ask all clients for samples for the server to train on. A resumed run asks again."""
        federation, everyone = self.federation, self.engine.cohort(self.method, self.registered, 0)
        while True:
            try:
                x, y = self.method.view.gather(everyone)
                break
            except ClientsLost as lost:
                everyone = everyone.without(lost.ids)
        self.everyone = everyone
        self.view = Federation.from_arrays(
            x.unflatten(1, federation.shape),
            y,
            clients=np.zeros(len(y), np.int64),
            splits=(1.0, 0.0, 0.0),
            classes=federation.outputs if self.engine.network.task.labels else None,
            task=federation.task,
            name=federation.name,
        )
        network, machine = self.engine.network, self.engine.machine
        self.trains = StackedEngine(self.view, network.blank(), self.training, machine, self.seed)
        self._register(waiting)

    # ---- cohorts ---------------------------------------------------------------------------------

    def next_cohort(self, state: State) -> Choice:
        """Return the cohort of the next round, which may have been chosen ahead."""
        number = state.round + 1
        if number in self._ahead:
            return self._ahead.pop(number)
        return self.select(state, state.round)

    def look_ahead(self, state: State) -> None:
        """Choose the cohort after the next one, if the next round cannot change it.

        Its first batches are drawn, too.
        """
        certain = self.everyone_trains or self.method.sampler.looks_ahead
        if not isinstance(self.trains, StackedEngine) or not certain:
            return
        cohort, asked = self.select(state, state.round + 1)
        cast(StackedCohort, cohort).draw_ahead(self.method.local)
        self._ahead = {state.round + 2: (cohort, asked)}

    def select(self, state: State, round_: int) -> Choice:
        """Return the cohort of a round (from 0), and the cohorts that the sampler asked before."""

        def gather(ids: NDArray[np.int64]) -> RoundCohort:
            return self.trains.cohort(self.method, ids, round_)

        if self.everyone_trains:
            return gather(self.registered), []
        key = fold(self.seed, round_, Purpose.SAMPLE)
        candidates = Registered(self.registered, self._train_sizes, key, self.view, gather)
        while True:
            count = min(self.cohort_size, len(candidates.ids))
            try:
                cohort = gather(
                    chosen_ids(self.method.sampler, replace(state, round=round_), candidates, count)
                )
                break
            except ClientsLost as lost:
                candidates = candidates.without(lost.ids)
        for before in candidates.asked:
            cohort.left_out |= before.left_out
        return cohort, candidates.asked


def _waiting(state: State) -> NDArray[np.int64]:
    """Return the clients that do not take part because they did not answer when they joined."""
    waiting = state.server.get(_WAITING)
    return _nobody() if waiting is None else waiting["ids"].numpy()


def _nobody() -> NDArray[np.int64]:
    return np.empty(0, np.int64)
