"""The steps of a round that make the next state: prepare, train, screen, combine."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from equipoise.engine.contract import ClientsLost, Launched, RoundCohort
from equipoise.errors import RunError
from equipoise.federation import Federation
from equipoise.method import Guard, Method, State, Updates, check_state, combine_checked
from equipoise.run.evaluation import diverged, intact
from equipoise.tree import Magnitudes, Tree, flat_rows


@dataclass(frozen=True)
class Aggregated:
    """The next state, which a GPU may still compute.

    Attributes
    ----------
    state : State
        The state.
    checked : list of Tensor
        The tensors of its model that must be finite.
    norms : Magnitudes
        Their norms.
    """

    state: State
    checked: list[Tensor]
    norms: Magnitudes

    def finite(self) -> bool:
        """Wait for the norms, and return whether the model is finite."""
        suspects = [
            tensor
            for tensor, norm in zip(self.checked, self.norms.read(), strict=True)
            if not math.isfinite(norm)
        ]
        return all(bool(torch.isfinite(tensor).all()) for tensor in suspects)


@dataclass(frozen=True)
class RoundSteps:
    """The steps of one round. None of them changes the state that it is given.

    Attributes
    ----------
    number : int
        The number of the round, from 1.
    method : Method
        The method.
    view : Federation
        The clients that train, for their names in errors.
    finite : set of str
        The tensors of the model that must be finite.
    saved_round : int
        The round of the last checkpoint, for errors. 0 if there is none.
    """

    number: int
    method: Method
    view: Federation
    finite: Set[str]
    saved_round: int

    def prepare(self, state: State, cohort: RoundCohort) -> tuple[State, RoundCohort]:
        """Return the state with which the round begins. Lost clients are left out."""
        aggregation = self.method.aggregation
        while True:
            begun = replace(state, notes={})
            try:
                where = f"aggregation {aggregation.name or type(aggregation).__name__!r}: prepare"
                return check_state(begun, aggregation.prepare(begun, cohort), where), cohort
            except ClientsLost as lost:
                cohort = cohort.without(lost.ids)

    def launch(self, prepared: State, cohort: RoundCohort) -> tuple[Tree, Launched]:
        """Return the model that is sent to the clients, and their training."""
        shared, each = self.method.aggregation.send(prepared, cohort)
        return shared["model"], cohort.launch_training(shared, each, self.method.local)

    def wait(self, launched: Launched, cohort: RoundCohort) -> Updates:
        """Wait for the training of a cohort, and return its updates."""
        updates = launched.wait()
        finite = torch.isfinite(
            updates.reports["train_loss"] + updates.reports.get("method_terms", 0)
        )
        self._refuse_non_finite(finite, cohort, "training loss")
        return updates

    def screen(
        self, guard: Guard, prepared: State, sent: Tree, updates: Updates, cohort: RoundCohort
    ) -> tuple[State, Updates, RoundCohort]:
        """Apply the guard to all updates. Clients that it drops are left out of the round."""
        if len(cohort.ids) < guard.least_clients():
            raise RunError(
                f"round {self.number}: the guard {guard.name!r} needs the updates of "
                f"{guard.least_clients()} clients, but only {len(cohort.ids)} sent a usable "
                f"one{intact(self.saved_round)}"
            )
        screened = guard.screen(sent, updates, cohort)
        prepared = prepared.with_notes(
            **{f"guard_{name}": value for name, value in screened.notes.items()}
        )
        if not screened.dropped:
            return prepared, screened.updates, cohort
        kept = ~np.isin(cohort.ids, screened.dropped)
        if not kept.any():
            raise RunError(
                f"round {self.number}: the guard {guard.name!r} dropped all clients"
                f"{intact(self.saved_round)}"
            )
        prepared = prepared.with_notes(guard_dropped=sorted(screened.dropped))
        rest = cohort.without(screened.dropped, f"dropped by the guard {guard.name!r}")
        return prepared, screened.updates.of(kept), rest

    def aggregate(self, prepared: State, updates: Updates, cohort: RoundCohort) -> Aggregated:
        """Combine updates. Do not wait for a GPU, unless the aggregation does."""
        state = combine_checked(self.method.aggregation, prepared, updates, cohort)
        checked = [tensor for name, tensor in state.model.items() if name in self.finite]
        return Aggregated(state, checked, Magnitudes(checked))

    def combine(
        self,
        prepared: State,
        updates: Updates,
        cohort: RoundCohort,
        aggregated: Aggregated | None = None,
    ) -> tuple[State, Updates, RoundCohort]:
        """Return the next state, and the updates and clients from which it was made.

        If clients are lost, everything is repeated without them. ``aggregated`` is the result of
        :meth:`aggregate` if it has been called for these clients.
        """
        while aggregated is None:
            try:
                aggregated = self.aggregate(prepared, updates, cohort)
            except ClientsLost as lost:
                updates = updates.of(~np.isin(cohort.ids, lost.ids))
                cohort = cohort.without(lost.ids)
        if not aggregated.finite():
            finite = torch.ones(len(cohort.ids), dtype=torch.bool)
            for name, stack in (*updates.params.items(), *updates.buffers.items()):
                if name in self.finite:
                    finite &= flat_rows(torch.isfinite(stack)).all(1).cpu()
            self._refuse_non_finite(finite, cohort, "model")
            raise RunError(f"round {self.number}: the global model is not finite after aggregation")
        learned = self.method.sampler.learn(aggregated.state, cohort)
        return replace(learned, round=self.number), updates, cohort

    def _refuse_non_finite(self, finite: Tensor, cohort: RoundCohort, what: str) -> None:
        if not bool(finite.all()):
            client = int(cohort.ids[int((~finite).nonzero()[0])])
            raise diverged(self.number, what, client, self.view, self.saved_round)
