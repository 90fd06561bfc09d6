"""The training of rounds, which may begin before the host has checked the round before."""

from __future__ import annotations

import copy
import logging
from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.chunking import fastest, fits_twice
from equipoise.engine.contract import Engine, Launched, RoundCohort
from equipoise.engine.stacked import StackedEngine
from equipoise.method import Method, Sampler, State, Updates
from equipoise.run.evaluation import Evaluator
from equipoise.run.later import LaterRounds, Once
from equipoise.run.participants import Participants
from equipoise.run.round_rows import Clock
from equipoise.run.round_steps import Aggregated, RoundSteps
from equipoise.tree import Tree, size_in_bytes

log = logging.getLogger("equipoise")
# The report from which the variance of gaps is computed.
_GAPS = "val_loss_after"


@dataclass(frozen=True)
class Begun:
    """A round whose training has been launched.

    Attributes
    ----------
    number : int
        The number of the round, from 1.
    state : State
        The state with which it begins.
    prepared : State
        The same after ``prepare`` of the aggregation.
    cohort : RoundCohort
        The clients that train.
    receivers : int
        How many clients received the model.
    everyone : bool
        Whether these are all registered clients.
    asked : list of RoundCohort
        The cohorts that were asked before.
    reports_gaps : bool
        Whether clients send a report that only the evaluation needs.
    sent : Tree
        The model that they received.
    launched : Launched
        Their training.
    """

    number: int
    state: State
    prepared: State
    cohort: RoundCohort
    receivers: int
    everyone: bool
    asked: list[RoundCohort]
    reports_gaps: bool
    sent: Tree
    launched: Launched


@dataclass(frozen=True)
class Ended:
    """A round after aggregation.

    Attributes
    ----------
    state : State
        The next state.
    trained : Updates
        The updates of all clients that trained, before a guard has changed them.
    trained_ids : int array
        The ids of these clients.
    updates : Updates
        The updates that were combined.
    cohort : RoundCohort
        The clients that sent them.
    guarded : bool
        Whether there is a guard.
    """

    state: State
    trained: Updates
    trained_ids: NDArray[np.int64]
    updates: Updates
    cohort: RoundCohort
    guarded: bool

    def as_trained(self) -> Updates:
        """Return the updates of the cohort as its clients trained them."""
        if not self.guarded:
            return self.updates
        return self.trained.of(np.isin(self.trained_ids, self.cohort.ids))


def may_run_ahead(engine: Engine, method: Method, *, cohort: int, everyone: bool) -> bool:
    """Return whether a round may begin before the host has checked the updates of the last one.

    A GPU then goes on without waiting for the host. If an update cannot be used, the round that has
    begun is dropped. So this is allowed only if it leaves no trace: clients remember nothing,
    nothing is sent only once, there is no guard, and neither aggregation nor sampler reads reports.

    Parameters
    ----------
    engine : Engine
        The engine that trains.
    method : Method
        The method.
    cohort : int
        The number of clients in a round.
    everyone : bool
        Whether these are all clients, so that there is nothing to choose.
    """
    if not isinstance(engine, StackedEngine) or not engine.defers:
        return False
    sampler, aggregation, model = method.sampler, method.aggregation, engine.network.initial()
    chooses_ahead = everyone or sampler.looks_ahead
    return (
        method.guard is None
        and aggregation.combines_ahead
        and not aggregation.sends_once
        and chooses_ahead
        and type(sampler).learn is Sampler.learn
        and not engine.remembers(method.local, model)
        and fits_twice(cohort * size_in_bytes(model), engine.network.device)
    )


class RoundTraining:
    """Trains one round after the other.

    Parameters
    ----------
    participants : Participants
        Who trains, with which method and settings.
    evaluator : Evaluator
        What is evaluated after a round.
    later : LaterRounds
        Earlier rounds whose rows are not written yet.
    finite : set of str
        The tensors of the model that must be finite.

    Attributes
    ----------
    saved_round : int
        The round of the last checkpoint, for errors. 0 if there is none.
    without_step : int
        The number of rounds whose aggregation has set nothing of what clients sent.
    """

    def __init__(
        self,
        participants: Participants,
        evaluator: Evaluator,
        later: LaterRounds,
        finite: Set[str],
    ) -> None:
        self.participants, self.evaluator, self._later = participants, evaluator, later
        self.method, self.training = participants.method, participants.training
        self.saved_round = self.without_step = 0
        self._finite = finite
        # The next round, if it has begun, and whether it may before this one has ended.
        self._next: Begun | None = None
        self._runs_ahead = may_run_ahead(
            self._engine,
            self.method,
            cohort=participants.cohort_size,
            everyone=participants.everyone_trains,
        )

    @property
    def _engine(self) -> Engine:
        return self.participants.trains

    def due(self, number: int) -> bool:
        """Return whether a round ends with an evaluation."""
        return self.evaluator.evaluation.due(number, last=number == self.training.rounds)

    def steps(self, number: int) -> RoundSteps:
        """Return the steps of a round."""
        return RoundSteps(
            number, self.method, self.participants.view, self._finite, self.saved_round
        )

    def begin(self, state: State) -> Begun:
        """Return the next round. Its training is launched, unless it has been launched ahead."""
        begun, self._next = self._next, None
        if begun is None or begun.number != state.round + 1:
            # A round that was interrupted is repeated, and so is the one that had begun after it.
            begun = self._launch(state)
        return begun

    def _launch(self, state: State, *, ahead: bool = False) -> Begun:
        """Launch the training of the round after a state.

        If the round before has ended, the host meanwhile chooses the next cohort, and finishes and
        launches evaluations. A round that begins ``ahead`` does none of this.
        """
        number = state.round + 1
        state, admitting = self.participants.admit(state)
        cohort, asked = self.participants.next_cohort(state)
        reports_gaps = self.due(number) and self._ask_for_evaluation(cohort)
        steps = self.steps(number)
        prepared, cohort = steps.prepare(state, cohort)
        receivers, registered = len(cohort.ids), len(self.participants.registered)
        finish, launch = Once(self._later.finish_ended), Once(self._later.launch)
        if not ahead:
            if number < self.training.rounds:
                self._engine.while_busy(lambda: self.participants.look_ahead(state))
            self._engine.while_busy(finish)
            self._engine.after_launch(launch)
        sent, launched = steps.launch(prepared, cohort)
        if not ahead:
            # Without a chunk of clients to train, the engine has not called them.
            finish()
            launch()
        return Begun(
            number,
            state,
            prepared,
            cohort,
            receivers,
            receivers == registered,
            [*admitting, *asked],
            reports_gaps,
            sent,
            launched,
        )

    def _ask_for_evaluation(self, cohort: RoundCohort) -> bool:
        """Let clients report what the evaluation after this round needs.

        Returns
        -------
        bool
            Whether they send a report that the method itself does not need.
        """
        # With pooled data, clients do not train.
        if self.participants.pooled:
            return False
        cohort.evaluates_local = self.evaluator.evaluation.local
        if not self.evaluator.has_global:
            return False
        cohort.wanted_reports.add(_GAPS)
        return _GAPS not in self.method.aggregation.needs

    def end(self, begun: Begun, clock: Clock, *, later: bool) -> Ended:
        """Wait for a round, make the next state, and commit the memories of clients.

        The next round begins before that, if it may. Unless the rows of this round may be written
        ``later``, those of all earlier ones are written here.
        """
        prepared, cohort = begun.prepared, begun.cohort
        steps, guard = self.steps(begun.number), self.method.guard
        may_go_ahead = later and self._may_go_ahead(begun.number)
        aggregated = self._go_ahead(begun) if may_go_ahead else None
        went_ahead = aggregated is not None
        # A round that has begun ahead has not launched the evaluation of the round before it.
        self._later.launch()
        if went_ahead:
            self._later.finish_ended()
        trained = steps.wait(begun.launched, cohort)
        # If the next round has been launched, waiting for the device would wait for it, too.
        clock.lap("train", since=self._later.evaluated_at, wait=not went_ahead)
        if self._later and not later:
            self._later.finish()
            clock.lap("wait")
        usable = len(cohort.ids) == begun.receivers
        if not usable:
            # The next round has begun with updates that cannot be used.
            aggregated = self._next = None
        elif may_go_ahead and not went_ahead:
            self._runs_ahead = False
        updates, trained_ids = trained, cohort.ids
        if guard is not None:
            prepared, updates, cohort = steps.screen(guard, prepared, begun.sent, trained, cohort)
            clock.lap("guard")
        state, updates, cohort = steps.combine(prepared, updates, cohort, aggregated)
        before = begun.state.model
        if updates.param_names and all(t is before[n] for n, t in state.model.items()):
            self.without_step += 1
        clock.lap("combine", wait=not went_ahead)
        self._engine.commit(cohort)
        return Ended(state, trained, trained_ids, updates, cohort, guarded=guard is not None)

    def _may_go_ahead(self, number: int) -> bool:
        """Return whether the next round may begin before this one has been checked."""
        beside = not self.due(number) or self.evaluator.can_be_beside
        return self._runs_ahead and beside and not self.evaluator.evaluation.local

    def _go_ahead(self, begun: Begun) -> Aggregated | None:
        """Combine updates, and begin the next round, before the host has checked the updates.

        If one of the two fails, both are repeated when the updates have been checked. Updates that
        cannot be used may be the cause, or two rounds need too much memory. If it fails then, the
        error is raised.
        """
        # A copy, because questions are counted by the cohort, and would be counted twice.
        cohort = copy.copy(begun.cohort)
        try:
            aggregated = self.steps(begun.number).aggregate(
                begun.prepared, begun.launched.updates, cohort
            )
            if cohort.messages > begun.cohort.messages:
                return None
            self._next = self._launch(replace(aggregated.state, round=begun.number), ahead=True)
        except Exception:
            log.debug("round %d cannot begin ahead", begun.number + 1, exc_info=True)
            return None
        return aggregated

    def measure_chunk(self, state: State) -> int:
        """Choose the chunk size by timing the first cohort. The trained models are dropped."""
        engine, participants = self.participants.engine, self.participants
        cohort_size, steps = participants.cohort_size, self.steps(state.round + 1)
        if engine.network.unstackable:
            return 1
        candidates = sorted(
            {1, min(4, cohort_size), min(16, cohort_size), min(64, cohort_size), cohort_size}
        )

        def seconds(chunk: int) -> float:
            engine.chunk = chunk
            chosen, _ = participants.select(state, state.round)
            prepared, cohort = steps.prepare(state, chosen)
            clock = Clock(engine.network.device)
            _, launched = steps.launch(prepared, cohort)
            launched.wait()
            clock.lap("train")
            return clock.laps["train"]

        with exact_arithmetic(engine.machine):
            engine.chunk = fastest(candidates, seconds)
        return engine.chunk
