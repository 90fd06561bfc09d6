"""The round loop: select, prepare, send, train, guard, combine, evaluate, save."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise import tasks
from equipoise.client_index import ClientIndex
from equipoise.data.augment import check_augmentations
from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.chunking import fastest
from equipoise.engine.cohort import StackedCohort
from equipoise.engine.contract import ClientsLost, Engine, RoundCohort
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.federation import Federation
from equipoise.method import (
    Aggregation,
    Guard,
    Method,
    Sampler,
    State,
    Updates,
    check_state,
    combine_checked,
)
from equipoise.random import Purpose, fold
from equipoise.run.callbacks import Listeners
from equipoise.run.candidates import Registered
from equipoise.run.checkpoint import (
    BEST,
    CHECKPOINT,
    IF_LONGER,
    LOCAL,
    Checkpoint,
    read_checkpoint,
    read_local,
    read_models,
    save_models,
)
from equipoise.run.evaluation import Evaluation, Evaluator, Models, Standing, diverged
from equipoise.run.files import Journal
from equipoise.run.records import Row
from equipoise.run.round_rows import BYTES, Clock, cohort_and_notes, counted
from equipoise.run.summary import summary_of
from equipoise.tree import Tree, digest, flat_rows, magnitudes

log = logging.getLogger("equipoise")

# The key of waiting clients in the state, and the number of rounds until all are asked again.
_WAITING, _ASK_AGAIN = "waiting", 10

_BYTES_OF_A_REPORT = 8
MakeEngine = Callable[[Federation, nn.Module, Training, Machine, int, Federation], Engine]


@dataclass(frozen=True)
class Progress:
    """The progress of a run after a round, with the scores of the latest evaluation, if any."""

    round: int
    rounds: int
    train_loss: float
    mean: float | None = None
    worst: float | None = None
    sigma: float | None = None


class Trainer:
    """One run, round after round.

    Parameters
    ----------
    federation : Federation
        The clients.
    method : Method
        The method.
    model : nn.Module
        The model, with the parts that the method adds.
    training, machine, evaluation
        The settings.
    seed : int
        Of all random numbers.
    directory : Path, optional
        Where journals and checkpoints are written. Without it nothing is written.
    checkpoint_every : int
        Rounds between checkpoints.
    engine : callable
        Makes the engine that runs the method.
    start : Tree, optional
        Tensors that replace those of the initial model.

    Attributes
    ----------
    stopped : str or None
        Why a callback has stopped the run.
    """

    def __init__(
        self,
        federation: Federation,
        method: Method,
        model: nn.Module,
        training: Training,
        machine: Machine,
        evaluation: Evaluation,
        seed: int,
        directory: Path | None = None,
        checkpoint_every: int = 1,
        engine: MakeEngine = StackedEngine,
        start: Tree | None = None,
    ) -> None:
        self.federation, self.method, self.training, self.evaluation = (
            federation,
            method,
            training,
            evaluation,
        )
        self.directory, self.checkpoint_every, self.seed = directory, checkpoint_every, seed
        self.view = method.view.of(federation)
        check_augmentations(training.augment, federation.shape, tasks.build(federation.task))
        self.engine = engine(
            federation, model, training, machine.carrying_out(method), seed, self.view
        )
        # If only the server trains, it uses another engine with the gathered samples.
        self._trains: Engine = self.engine
        pools = self.view is not federation or method.view.gathers
        for setting in ("fine_tune", "keep_local"):
            if pools and getattr(evaluation, setting):
                raise InputError(
                    f"evaluation.{setting} needs clients that train; method {method.name!r} pools "
                    "their data"
                )
        initial = self.engine.network.initial()
        self.state = State(
            0, {**initial, **{n: tensor.to(initial[n]) for n, tensor in (start or {}).items()}}
        )
        self._register()
        self._refuse_to_train_nothing()
        self._refuse_too_few_for_the_guard()
        self.evaluator = Evaluator(federation, method, self.engine, training, evaluation)
        # A mask may contain −∞ from the start. Only tensors that were finite are checked.
        self._begun_finite = {
            name for name, tensor in self.state.model.items() if bool(torch.isfinite(tensor).all())
        }
        self._everyone: RoundCohort | None = None
        self.metrics, self.rounds, self.timings, self.server = (
            Journal(directory / f"{name}.jsonl" if directory else None)
            for name in ("metrics", "rounds", "timings", "server")
        )
        self.bytes = dict.fromkeys(BYTES, 0)
        self.stopped: str | None = None
        self._listeners = Listeners()
        # A hash of the run's configuration, which its checkpoints contain.
        self.identity = ""
        self._saved_round = 0
        self._best_models: Models | None = None
        self._local_models: Models | None = None
        self._if_longer: dict[str, Any] | None = None

    def _register(self) -> None:
        # Computed once. With a million clients, this takes longer than drawing the cohort.
        registered = self.view.seen
        if len(self._waiting):
            registered = np.setdiff1d(registered, self._waiting)
        self._registered = registered
        # Cohorts of coming rounds that are already chosen, by the number of the round, and the
        # cohorts that the sampler has asked.
        self._ahead: dict[int, tuple[RoundCohort, list[RoundCohort]]] = {}
        pooled = self.view is not self.federation
        self._cohort_size = (
            len(registered) if pooled else self.training.cohort_size(len(registered))
        )
        self._train_sizes = self.view.split("train").sizes[registered]

    def _refuse_to_train_nothing(self) -> None:
        local = self.method.local
        trains = self.training.rounds or local.keeps or local.adapt() or self.evaluation.fine_tune
        if trains and not self.engine.network.initial():
            raise InputError(
                "the model has no parameter that can be trained, so it can only be evaluated: "
                "with training.rounds of 0 and a method without personal models, such as fedavg; "
                f"got {self.training.rounds} rounds of {self.method.name!r}"
            )

    def _refuse_too_few_for_the_guard(self) -> None:
        guard = self.method.guard
        if guard is not None and self.training.rounds and self._cohort_size < guard.least_clients():
            raise InputError(
                f"the guard {guard.name!r} needs {guard.least_clients()} clients per round, but a "
                f"cohort has {self._cohort_size}; choose a larger training.cohort or other options "
                "of method.guard"
            )

    # ---- the loop --------------------------------------------------------------------------------

    def run(
        self, on_round: Callable[[Progress], None] | None = None, listeners: Listeners | None = None
    ) -> None:
        """Train until the last round, or until ``patience`` or a callback stops the run.

        With 0 rounds, evaluate the initial model.
        """
        self.begin()
        self._listeners = listeners or Listeners()
        with exact_arithmetic(self.engine.machine):
            self._listeners.begin(self)
            try:
                if not self.training.rounds:
                    self._only_evaluate()
                while self.state.round < self.training.rounds and not self._ends_early:
                    progress = self._round()
                    if on_round:
                        on_round(progress)
            finally:
                self.metrics.flush()

    @property
    def _ends_early(self) -> bool:
        return self.evaluator.out_of_patience or self.stopped is not None

    @property
    def _that_need_everyone(self) -> list[Sampler | Aggregation]:
        sampler, aggregation = self.method.sampler, self.method.aggregation
        # One part may be both.
        parts: list[Sampler | Aggregation] = [sampler]
        parts += [] if sampler == aggregation else [aggregation]
        return [part for part in parts if part.needs_everyone]

    def begin(self) -> None:
        """Call ``begin`` of the parts. Ask all clients only if a part needs it."""
        if (
            self.method.view.gathers
            and self.view is self.federation
            and self.state.round < self.training.rounds
        ):
            self._gather()
        if (
            self.state.round
            or self._everyone
            or not self._that_need_everyone
            or not self.training.rounds
        ):
            return
        with exact_arithmetic(self.engine.machine):
            self._everyone = self._ask_everyone("begin", self._registered)

    @property
    def _waiting(self) -> NDArray[np.int64]:
        """Clients that do not take part because they did not answer when they joined."""
        waiting = self.state.server.get(_WAITING)
        return np.empty(0, np.int64) if waiting is None else waiting["ids"].numpy()

    def _ask_everyone(self, what: str, candidates: NDArray[np.int64]) -> RoundCohort:
        """Call ``begin`` or ``admit`` of the parts that need everyone.

        Candidates that do not answer wait. If one of the other clients does not answer, all
        candidates wait, so that the values of that client are kept.
        """
        begins = what == "begin"
        members = candidates if begins else np.union1d(self._registered, candidates)
        everyone, state, admitted = (
            self.engine.cohort(self.method, members, 0),
            self.state,
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
            state = self.state
        waiting = np.setdiff1d(candidates, admitted)
        kept = {name: tree for name, tree in state.server.items() if name != _WAITING}
        if len(waiting):
            log.warning("clients %s take no part until everyone is asked again", waiting.tolist())
            kept[_WAITING] = {"ids": torch.from_numpy(waiting)}
        self.state = replace(state, server=kept)
        if len(waiting) or not begins:
            self._register()
        return everyone

    def _gather(self) -> None:
        """Ask all clients for samples for the server to train on. A resumed run asks again."""
        federation, everyone = self.federation, self.engine.cohort(self.method, self._registered, 0)
        while True:
            try:
                x, y = self.method.view.gather(everyone)
                break
            except ClientsLost as lost:
                everyone = everyone.without(lost.ids)
        self._everyone = everyone
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
        self._trains = StackedEngine(self.view, network.blank(), self.training, machine, self.seed)
        self._register()

    def _admit(self) -> list[RoundCohort]:
        """Admit clients that have registered since the last round. Return the cohorts asked."""
        newcomers = self.engine.newcomers()
        again = len(self._waiting) and self.state.round % _ASK_AGAIN == 0
        if not (newcomers or again) or self.method.view.gathers:
            return []
        if not (self.state.round or self._everyone):
            self._register()
            return []
        candidates = np.setdiff1d(self.view.seen, self._registered)
        return [self._ask_everyone("admit", candidates)]

    def _round(self) -> Progress:
        clock = Clock(self.engine.network.device)
        number = self.state.round + 1
        last = number == self.training.rounds
        due = self.evaluation.due(number, last=last)
        # A longer run would not evaluate after this round.
        only_as_last = due and not self.evaluation.due(number, last=False)
        admitting = self._admit()
        chosen = self._ahead.pop(number) if number in self._ahead else None
        cohort, asked = chosen or self._select(self.state.round)
        reports_gaps = due and self.view is self.federation and self.evaluator.has_global
        if reports_gaps:
            cohort.wanted_reports.add("val_loss_after")
        # With pooled data, clients do not train.
        cohort.evaluates_local = due and self.evaluation.local and self.view is self.federation
        prepared, cohort = self._prepare(cohort)
        report_bytes = 0
        if reports_gaps and "val_loss_after" not in self.method.aggregation.needs:
            report_bytes = _BYTES_OF_A_REPORT * len(cohort.ids)
        if not last:
            self._trains.while_busy(self._look_ahead)
        sent, trained = self._train(prepared, cohort, number)
        clock.lap("train")
        updates, who_trained = trained, cohort.ids
        if self.method.guard is not None:
            prepared, updates, cohort = self._screen(
                self.method.guard, prepared, sent, trained, cohort, number
            )
            clock.lap("guard")
        updates, cohort = self._aggregate(prepared, updates, cohort, number)
        clock.lap("combine")
        self._trains.commit(cohort)
        # The bytes of questions before round 1 are counted in round 1.
        cohorts = [
            *admitting,
            *asked,
            *([self._everyone] if number == 1 and self._everyone else []),
        ]
        if self._trains is self.engine:
            cohorts.append(cohort)
        moved = {name: sum(getattr(each, name) for each in cohorts) for name in BYTES}
        self.bytes = {name: before + moved[name] for name, before in self.bytes.items()}
        losses: Row = {
            name: float((updates.reports[name] * cohort.prior).sum())
            for name in ("train_loss", "method_terms")
            if name in updates.reports
        }
        row: Row = {"round": number, "cohort": len(cohort.ids), **losses}
        left_out = {
            client: reason for each in cohorts for client, reason in each.left_out.items()
        } | cohort.left_out
        left_out = {
            client: reason for client, reason in left_out.items() if client not in cohort.ids
        }
        if left_out:
            row["left_out"] = {str(client): reason for client, reason in sorted(left_out.items())}
        rest = {
            name: sum(getattr(each, name) for each in cohorts)
            for name in ("messages", "evaluations")
        }
        everyone = len(cohort.ids) == len(self._registered)
        written = cohort_and_notes(self.state, cohort, everyone=everyone)
        if only_as_last:
            fewer = moved | {"bytes_up": moved["bytes_up"] - report_bytes}
            self._remember_for_longer(row | rest | counted(fewer) | written, report_bytes)
        if due:
            self._evaluate(updates, cohort, only_as_last=only_as_last)
            clock.lap("evaluate")
            row |= self._absent()
        row |= rest | counted(moved) | written
        self._listeners.round(dict(row), evaluated=due)
        if self.stopped is not None and not due and self.evaluation.every:
            # The last round is always evaluated.
            self._evaluate(updates, cohort)
            row |= self._absent()
        if self._listeners:
            clock.lap("callbacks")
        self.rounds.append([row])
        self.timings.append([{"round": number, **clock.laps}])
        ends = last or self._ends_early
        if ends and self.evaluation.keep_local:
            # The trained models, not those that a guard has changed.
            own = trained.of(np.isin(who_trained, cohort.ids)) if self.method.guard else updates
            self._local_models = self.evaluator.local_models(sent, own, cohort, number)
            if self.directory:
                # Before the checkpoint, because a run that is resumed after its last round cannot
                # compute them again.
                save_models(self.directory / LOCAL, self._local_models)
        if self.directory and (ends or number % self.checkpoint_every == 0):
            self.save_checkpoint()
        return Progress(number, self.training.rounds, losses["train_loss"], **self.evaluator.latest)

    def _absent(self) -> Row:
        """Return the clients that did not answer in evaluation, for the row of the round."""
        absent = {str(client): reason for client, reason in sorted(self.engine.absent.items())}
        return {"not_evaluated": absent} if absent else {}

    def _only_evaluate(self) -> None:
        # A run that was interrupted after its checkpoint has its metrics already.
        if not self.evaluation.due(0, last=True) or next(iter(self.metrics), None):
            return
        clock = Clock(self.engine.network.device)
        self._remember_for_longer()
        self._evaluate(only_as_last=True)
        clock.lap("evaluate")
        self.timings.append([{"round": 0, **clock.laps}])
        self.save_checkpoint()

    def _look_ahead(self) -> None:
        """Choose the next cohort and draw its first batches, if this round cannot change them."""
        sampler = type(self.method.sampler)
        everyone = self._cohort_size == len(self._registered)
        if not isinstance(self._trains, StackedEngine) or (
            vars(sampler).get("reads_state", True) and not everyone
        ):
            return
        cohort, asked = self._select(self.state.round + 1)
        cast(StackedCohort, cohort).draw_ahead(self.method.local)
        self._ahead = {self.state.round + 2: (cohort, asked)}

    def _select(self, round_: int) -> tuple[RoundCohort, list[RoundCohort]]:
        """Return the cohort of a round (from 0), and the cohorts that the sampler asked before."""

        def gather(ids: NDArray[np.int64]) -> RoundCohort:
            return self._trains.cohort(self.method, ids, round_)

        if self._cohort_size == len(self._registered):
            return gather(self._registered), []
        key = fold(self.seed, round_, Purpose.SAMPLE)
        candidates = Registered(self._registered, self._train_sizes, key, self.view, gather)
        while True:
            try:
                cohort = gather(self._chosen(candidates, round_))
                break
            except ClientsLost as lost:
                candidates = candidates.without(lost.ids)
        for before in candidates.asked:
            cohort.left_out |= before.left_out
        return cohort, candidates.asked

    def _chosen(self, candidates: Registered, round_: int) -> NDArray[np.int64]:
        """Return the choice of the sampler for a round, checked."""
        sampler, count = self.method.sampler, min(self._cohort_size, len(candidates.ids))
        answer = sampler.select(replace(self.state, round=round_), candidates, count)
        chosen: NDArray[np.int64] = np.asarray(answer)
        fits = chosen.ndim == 1 and len(chosen) == count and np.issubdtype(chosen.dtype, np.integer)
        if fits:
            chosen = np.sort(chosen)
            found = np.searchsorted(candidates.ids, chosen) % len(candidates.ids)
            fits = bool((np.diff(chosen) > 0).all() and (candidates.ids[found] == chosen).all())
        if not fits:
            shown = chosen.tolist()[:8] if chosen.ndim == 1 else answer
            raise InputError(
                f"sampler {sampler.name or type(sampler).__name__!r} chose {shown!r}; "
                f"valid: {count} distinct ids of registered clients"
            )
        return chosen

    def _prepare(self, cohort: RoundCohort) -> tuple[State, RoundCohort]:
        """Return the state with which the round begins. Lost clients are left out."""
        aggregation = self.method.aggregation
        while True:
            begun = replace(self.state, notes={})
            try:
                where = f"aggregation {aggregation.name or type(aggregation).__name__!r}: prepare"
                return check_state(begun, aggregation.prepare(begun, cohort), where), cohort
            except ClientsLost as lost:
                cohort = cohort.without(lost.ids)

    def _train(self, prepared: State, cohort: RoundCohort, number: int) -> tuple[Tree, Updates]:
        """Return the model that was sent to the clients, and their updates."""
        shared, each = self.method.aggregation.send(prepared, cohort)
        updates = cohort.train(shared, each, self.method.local)
        finite = torch.isfinite(
            updates.reports["train_loss"] + updates.reports.get("method_terms", 0)
        )
        self._refuse_non_finite(finite, cohort, number, "training loss")
        return shared["model"], updates

    def _screen(
        self,
        guard: Guard,
        prepared: State,
        sent: Tree,
        updates: Updates,
        cohort: RoundCohort,
        number: int,
    ) -> tuple[State, Updates, RoundCohort]:
        """Apply the guard to all updates. Clients that it drops are left out of the round."""
        if len(cohort.ids) < guard.least_clients():
            raise RunError(
                f"round {number}: the guard {guard.name!r} needs the updates of "
                f"{guard.least_clients()} clients, but only {len(cohort.ids)} sent a usable "
                f"one{self._intact}"
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
                f"round {number}: the guard {guard.name!r} dropped all clients{self._intact}"
            )
        prepared = prepared.with_notes(guard_dropped=sorted(screened.dropped))
        rest = cohort.without(screened.dropped, f"dropped by the guard {guard.name!r}")
        return prepared, screened.updates.of(kept), rest

    @property
    def _intact(self) -> str:
        return (
            f"; the checkpoint of round {self._saved_round} is intact" if self._saved_round else ""
        )

    def _aggregate(
        self, prepared: State, updates: Updates, cohort: RoundCohort, number: int
    ) -> tuple[Updates, RoundCohort]:
        """Return the next state. If clients are lost, everything is repeated without them."""
        while True:
            try:
                state = combine_checked(self.method.aggregation, prepared, updates, cohort)
                break
            except ClientsLost as lost:
                updates = updates.of(~np.isin(cohort.ids, lost.ids))
                cohort = cohort.without(lost.ids)
        checked = [t for name, t in state.model.items() if name in self._begun_finite]
        suspects = [
            tensor
            for tensor, norm in zip(checked, magnitudes(checked), strict=True)
            if not math.isfinite(norm)
        ]
        if not all(bool(torch.isfinite(tensor).all()) for tensor in suspects):
            finite = torch.ones(len(cohort.ids), dtype=torch.bool)
            for name, stack in (*updates.params.items(), *updates.buffers.items()):
                if name in self._begun_finite:
                    finite &= flat_rows(torch.isfinite(stack)).all(1).cpu()
            self._refuse_non_finite(finite, cohort, number, "model")
            raise RunError(f"round {number}: the global model is not finite after aggregation")
        self.state = replace(self.method.sampler.learn(state, cohort), round=number)
        return updates, cohort

    def _refuse_non_finite(
        self, finite: Tensor, cohort: RoundCohort, number: int, what: str
    ) -> None:
        if not bool(finite.all()):
            client = int(cohort.ids[int((~finite).nonzero()[0])])
            raise diverged(number, what, client, self.view, self._saved_round)

    # ---- evaluation ------------------------------------------------------------------------------

    def _evaluate(
        self,
        updates: Updates | None = None,
        cohort: RoundCohort | None = None,
        *,
        only_as_last: bool = False,
    ) -> None:
        rows = self.evaluator.evaluate(self.state, updates, cohort)
        for row in rows:
            if not math.isfinite(row["loss"]):
                what = f"{row['split']} loss of the {row['model']} model"
                raise diverged(
                    row["round"], what, row["client"], self.federation, self._saved_round
                )
        self.metrics.append(rows, later=True)
        # A callback may read the file.
        if self._listeners:
            self.metrics.flush()
        else:
            self._trains.while_busy(self.metrics.flush)
        of_server = self.evaluator.evaluate_server(self.state)
        if of_server:
            self.server.append(of_server)
        if self.evaluator.follow(self.state.round, rows, of_server):
            self._best_models = self.evaluator.models(self.state)
            self.engine.keep()
            # The models of the last round can be made from the checkpoint. So the file keeps those
            # of the best round before, which a longer run may need.
            if self.directory and not only_as_last:
                save_models(self.directory / BEST, self._best_models)
        self._listeners.evaluated(rows)

    @property
    def has_global(self) -> bool:
        """Whether there is a complete global model."""
        return self.evaluator.has_global

    @property
    def global_model(self) -> Tree:
        """The global model that is evaluated and saved."""
        return self.evaluator.global_model(self.state)

    def personal_models(self, clients: NDArray[np.int64]) -> tuple[Tree, Tree]:
        """Return the shared tensors of personal models, and the others stacked over ``clients``."""
        return self.evaluator.personal_models(self.state, clients)

    def selected(self) -> Models:
        """Return the models of the reported round."""
        if self.evaluator.selected_round(self.state.round) == self.state.round:
            return self.evaluator.models(self.state)
        if self._best_models is None and self.directory:
            self._best_models = read_models(self.directory / BEST)
        return self._best_models or self.evaluator.models(self.state)

    def local_models(self) -> Models:
        """Return the local models of the last round, if ``evaluation.keep_local`` is set."""
        if self._local_models is None:
            if self.directory is None:
                raise InputError(
                    "the run has kept no local models; train it with evaluation.keep_local: true"
                )
            self._local_models = read_local(self.directory)
        return self._local_models

    def client_index(self) -> ClientIndex:
        """Return the client index that the selected model makes, of all clients with training data.

        Unseen clients are included, and on Flower those that have joined since. The bytes are not
        counted, as in evaluation.
        """
        rule, model = self.method.local, self.selected().shared
        if not rule.makes_index:
            raise InputError(
                f"method {self.method.name!r} makes no client index; valid: the local rule dsaign, "
                "as in method: {name: fedavg, local: dsaign}"
            )
        clients = np.flatnonzero(self.federation.split("train").sizes)
        cohort = self.engine.cohort(self.method, clients, self.state.round)
        while True:
            try:
                found = cohort.ask("own_index", model=model)
                break
            except ClientsLost as lost:
                cohort = cohort.without(lost.ids)
        features, labels = (found[name].float().cpu() for name in ("features", "labels"))
        made_by = digest({**model, f"frozen {self.engine.network.frozen_digest}": torch.empty(0)})
        return ClientIndex(cohort.ids, features, labels, made_by, rule.index_epsilon())

    def summary(self) -> dict[str, Any]:
        """Summarise the reported round, or the last rounds if they are averaged."""
        return summary_of(self)

    @property
    def not_replayed(self) -> str | None:
        """Why steps are not replayed as CUDA graphs, or ``None`` if they are."""
        return self.engine.not_replayed or self._trains.not_replayed

    # ---- checkpoints -----------------------------------------------------------------------------

    @property
    def journals(self) -> dict[str, Journal]:
        """The journals by name."""
        return {
            "metrics": self.metrics,
            "rounds": self.rounds,
            "timings": self.timings,
            "server": self.server,
        }

    def save_checkpoint(self) -> None:
        """Write everything that the next round depends on, after the journals are on disk."""
        if self.directory is None:
            return
        standing = self.evaluator.standing
        note = {
            "bytes": self.bytes,
            "best_round": standing.best_round,
            "best_loss": standing.best_loss if standing.best_round else None,
            "stale": standing.stale,
            **({"stopped": self.stopped} if self.stopped else {}),
            "marks": {name: journal.mark() for name, journal in self.journals.items()},
            "sha256": {name: journal.digest for name, journal in self.journals.items()},
            "run": self.identity,
            "total_was_read": self._total_was_read,
        }
        if self._if_longer is not None:
            note[IF_LONGER] = self._if_longer
        Checkpoint(self.state, self.engine.export(), note).save(self.directory)
        self._saved_round = self.state.round

    def restore_checkpoint(self, *, finished: bool = False) -> None:
        """Resume from the last checkpoint of the directory, or start if there is none yet.

        Parameters
        ----------
        finished : bool
            Whether the run is finished. Then no file is changed.

        Raises
        ------
        RunError
            If the journals have rounds, but there is no checkpoint. Or if the checkpoint belongs to
            another run, or a journal was changed since.
        """
        if self.directory is None:
            return
        note: dict[str, Any] = {}
        found = read_checkpoint(self.directory, self.state, self.engine.network.device)
        if found is None:
            if any(row["round"] > self.checkpoint_every for row in self.rounds.complete()):
                raise RunError(
                    f"{self.directory} has journals of past rounds but no checkpoint, so the run "
                    "cannot be resumed; nothing was changed. Restore checkpoint.safetensors, or "
                    "start again in another directory"
                )
        else:
            if found.note.get("run", self.identity) != self.identity:
                raise RunError(
                    f"{self.directory / CHECKPOINT} is the checkpoint of another run; restore the "
                    "file that belongs to this run"
                )
            try:
                note = self._go_on_from(found)
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(
                    f"{self.directory / CHECKPOINT} does not fit this run ({error!r})"
                ) from error
            if self.evaluator.standing.best_round and (self.directory / BEST).exists():
                # Check the file now and not after the last round, which may be days later.
                read_models(self.directory / BEST)
        marks, digests = (note.get(key, {}) for key in ("marks", "sha256"))
        # All journals are checked before any of them is changed.
        for name, journal in self.journals.items():
            journal.check(marks.get(name, 0), digests.get(name))
        if finished:
            return
        for name, journal in self.journals.items():
            journal.truncate(marks.get(name, 0))
        if note.get("row"):
            self.rounds.append([json.loads(note["row"])])

    def _go_on_from(self, found: Checkpoint) -> dict[str, Any]:
        """Restore a checkpoint, and return its note, changed if the run is made longer."""
        self.state = found.state
        self.engine.restore(found.memory)
        note = dict(found.note)
        self.engine.total_was_read = note.get("total_was_read", False)
        if self.state.round < self.training.rounds:
            note |= self._longer(note)
        self.bytes = {name: note["bytes"][name] for name in BYTES}
        self.stopped = note.get("stopped")
        best = note["best_loss"] if note["best_loss"] is not None else float("inf")
        self.evaluator.standing = Standing(note["best_round"], best, note["stale"])
        self._saved_round = self.state.round
        if len(self._waiting):
            self._register()
        return note

    @property
    def _total_was_read(self) -> bool:
        return self.engine.total_was_read or self._trains.total_was_read

    def _remember_for_longer(self, row: Row | None = None, report_bytes: int = 0) -> None:
        """Record the state of the run before an evaluation that only the last round has.

        If the run is made longer, its journals are rewound to here, ``row`` replaces the round's
        row, and the bytes of the report for that evaluation are not counted.
        """
        standing = self.evaluator.standing
        rewound = {"metrics": self.metrics, "rounds": self.rounds, "server": self.server}
        self._if_longer = {
            "marks": {name: journal.mark() for name, journal in rewound.items()},
            "sha256": {name: journal.digest for name, journal in rewound.items()},
            "bytes": self.bytes | {"bytes_up": self.bytes["bytes_up"] - report_bytes},
            "best_round": standing.best_round,
            "best_loss": standing.best_loss if standing.best_round else None,
            "stale": standing.stale,
            # As text, because notes sort their keys.
            "row": json.dumps(row) if row else None,
        }

    def _longer(self, note: Mapping[str, Any]) -> dict[str, Any]:
        """Return what differs in a checkpoint's note if its round is no longer the last one."""
        if IF_LONGER not in note:
            return {}
        before = note[IF_LONGER]
        return {**before, **{key: {**note[key], **before[key]} for key in ("marks", "sha256")}}

    def measure_chunk(self) -> int:
        """Choose the chunk size by timing the first cohort. The trained models are dropped."""
        engine = self.engine
        cohort_size = self._cohort_size
        if engine.network.unstackable:
            return 1
        candidates = sorted(
            {1, min(4, cohort_size), min(16, cohort_size), min(64, cohort_size), cohort_size}
        )

        def seconds(chunk: int) -> float:
            engine.chunk = chunk
            prepared, cohort = self._prepare(self._select(self.state.round)[0])
            clock = Clock(engine.network.device)
            shared, each = self.method.aggregation.send(prepared, cohort)
            cohort.train(shared, each, self.method.local)
            clock.lap("train")
            return clock.laps["train"]

        self.begin()
        with exact_arithmetic(engine.machine):
            engine.chunk = fastest(candidates, seconds)
        return engine.chunk
