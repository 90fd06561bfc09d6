"""Rounds that begin before the host has checked the updates of the round before."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.engine.chunking import fits_twice
from equipoise.engine.contract import Engine, Launched, RoundCohort
from equipoise.engine.stacked import StackedEngine
from equipoise.method import Method, Sampler, State
from equipoise.tree import Tree, size_in_bytes


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
    asked: list[RoundCohort]
    reports_gaps: bool
    sent: Tree
    launched: Launched


def may_run_ahead(engine: Engine, method: Method, *, cohort: int, everyone: bool) -> bool:
    """Return whether a round may begin before the host has checked the updates of the last one.

    A GPU then goes on without waiting for the host. If an update cannot be used, the round that has
    begun is dropped. So it must not have changed anything: no client remembers anything, nothing is
    sent only once, and neither aggregation nor sampler reads what clients report.

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
