"""The round loop: select, prepare, send, train, guard, combine, evaluate, save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equipoise import tasks
from equipoise.client_index import ClientIndex
from equipoise.data.augment import check_augmentations
from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.contract import Engine
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.engine.streams import preferred
from equipoise.errors import InputError, RunError
from equipoise.federation import Federation
from equipoise.method import Method, State
from equipoise.run.callbacks import Listeners
from equipoise.run.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from equipoise.run.checkpoint_note import (
    IF_LONGER,
    as_longer,
    longer_note,
    progress_note,
    rewind,
    standing_in,
)
from equipoise.run.client_rows import ClientRows
from equipoise.run.doubts import nothing_learned, without_step
from equipoise.run.evaluation import Evaluation, Evaluator, Models, Reported, diverged
from equipoise.run.files import Journal
from equipoise.run.indexing import make_index
from equipoise.run.kept_models import KeptModels
from equipoise.run.later import Finish, LaterRounds, Launch
from equipoise.run.participants import Participants
from equipoise.run.records import Row
from equipoise.run.round_rows import (
    BYTES,
    Clock,
    beginning_of_row,
    cohort_and_notes,
    counted,
    not_evaluated,
    summed,
)
from equipoise.run.round_training import Begun, Ended, RoundTraining
from equipoise.run.save_times import SaveTimes
from equipoise.run.summary import summary_of
from equipoise.tree import Tree

log = logging.getLogger("equipoise")
_BYTES_OF_A_REPORT = 8
MakeEngine = Callable[[Federation, nn.Module, Training, Machine, int, Federation], Engine]


@dataclass(frozen=True)
class Progress:
    """The progress of a run after a round, with the scores of the latest evaluation, if any.

    On a GPU a round that is not the last one may be evaluated while later rounds are trained. The
    scores are then those of an earlier evaluation.
    """

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
    checkpoint_every : int, optional
        Rounds between checkpoints; see :class:`~equipoise.run.save_times.SaveTimes`.
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
        checkpoint_every: int | None = None,
        engine: MakeEngine = StackedEngine,
        start: Tree | None = None,
    ) -> None:
        self.federation, self.method, self.training, self.evaluation = (
            federation,
            method,
            training,
            evaluation,
        )
        self.directory, self.seed = directory, seed
        self._save_times = SaveTimes(checkpoint_every)
        view = method.view.of(federation)
        check_augmentations(training.augment, federation.shape, tasks.build(federation.task))
        self.engine = engine(federation, model, training, machine.carrying_out(method), seed, view)
        pools = view is not federation or method.view.gathers
        for setting in ("fine_tune", "keep_local"):
            if pools and getattr(evaluation, setting):
                raise InputError(
                    f"evaluation.{setting} needs clients that train; method {method.name!r} pools "
                    "their data"
                )
        if view.clients != federation.clients and method.personal:
            rule, pooling = method.local, method.view
            raise InputError(
                f"method {method.name!r}: with the local rule {rule.name or type(rule).__name__!r} "
                f"clients have personal models, but the view {pooling.name!r} pools their data; "
                "valid: a local rule without personal models, such as plain, or the view everyone"
            )
        initial = self.engine.network.initial()
        self.state = State(
            0, {**initial, **{n: tensor.to(initial[n]) for n, tensor in (start or {}).items()}}
        )
        self.participants = Participants(federation, view, method, training, self.engine, seed)
        self._refuse_to_train_nothing()
        self._refuse_too_few_for_the_guard()
        self.evaluator = Evaluator(federation, method, self.engine, training, evaluation)
        self.metrics, self.rounds, self.timings, self.server = (
            Journal(directory / f"{name}.jsonl" if directory else None)
            for name in ("metrics", "rounds", "timings", "server")
        )
        self.bytes = dict.fromkeys(BYTES, 0)
        self.stopped: str | None = None
        self._listeners = Listeners()
        # A hash of the run's configuration, which its checkpoints contain.
        self.identity = ""
        # The one that checkpoints of older versions contain instead.
        self.older_identity = ""
        self._kept = KeptModels(directory)
        self._if_longer: dict[str, Any] | None = None
        self._later = LaterRounds(self.engine.network.device, self._append)
        # A mask may contain −∞ from the start. Only tensors that were finite are checked.
        finite = {n for n, tensor in self.state.model.items() if bool(torch.isfinite(tensor).all())}
        self._round_training = RoundTraining(self.participants, self.evaluator, self._later, finite)

    @property
    def view(self) -> Federation:
        """What is trained on: the method's view of the federation."""
        return self.participants.view

    @property
    def _trains(self) -> Engine:
        return self.participants.trains

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
        guard, size = self.method.guard, self.participants.cohort_size
        if guard is not None and self.training.rounds and size < guard.least_clients():
            raise InputError(
                f"the guard {guard.name!r} needs {guard.least_clients()} clients per round, but a "
                f"cohort has {size}; choose a larger training.cohort or other options "
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
        with exact_arithmetic(self.engine.machine), preferred(self.engine.network.device):
            self._listeners.begin(self)
            try:
                if not self.training.rounds:
                    self._only_evaluate()
                loss: float | None = None
                while self.state.round < self.training.rounds and not self._ends_early:
                    progress = self._round()
                    loss = progress.train_loss
                    if on_round:
                        on_round(progress)
                self._say_doubts(loss)
            finally:
                try:
                    self._later.finish()
                finally:
                    self.metrics.flush()

    def _say_doubts(self, loss: float | None) -> None:
        """Warn of a model that was probably not trained; ``loss`` is that of the last round."""
        without = self._round_training.without_step
        if without and without == self.state.round:
            # Single rounds may leave it as it is: an aggregation may collect updates of several.
            aggregation = self.method.aggregation
            name = aggregation.name or type(aggregation).__name__
            log.warning(without_step(name, self.state.round))
        classes, task = self.engine.network.classes, self.engine.network.task
        plain = task.name == "classification" and self.training.loss is None
        if loss is None or not plain or classes is None:
            return
        if doubt := nothing_learned(loss, classes, self.state.round):
            log.warning(doubt)

    @property
    def _ends_early(self) -> bool:
        return self.evaluator.out_of_patience or self.stopped is not None

    def begin(self) -> None:
        """Call ``begin`` of the parts. Ask all clients only if a part needs it."""
        self.state = self.participants.begin(self.state)

    def _round(self) -> Progress:
        clock = Clock(self.engine.network.device)
        self._save_times.begin_round()
        number = self.state.round + 1
        last = number == self.training.rounds
        due = self._round_training.due(number)
        # A longer run would not evaluate after this round.
        only_as_last = due and not self.evaluation.due(number, last=False)
        later = self._may_finish_later(number)
        begun = self._round_training.begin(self.state)
        ended = self._round_training.end(begun, clock, later=later)
        self.state = ended.state
        report_bytes = _BYTES_OF_A_REPORT * begun.receivers if begun.reports_gaps else 0
        beginning, rest = self._rows_of(begun, ended)
        if only_as_last:
            fewer = {"bytes_up": rest["bytes_up"] - report_bytes}
            self._remember_for_longer(beginning | rest | fewer, report_bytes)
        reported, row = Reported.of(ended.updates, ended.cohort), beginning | rest
        launch = self._evaluation(reported, only_as_last=only_as_last) if due else None
        if later and self._waits(launch, row, clock):
            return self._progress(row)
        if launch is not None:
            launch()()
            row = beginning | not_evaluated(self.engine.absent) | rest
            clock.lap("evaluate")
        self._listeners.round(dict(row), evaluated=due)
        if self.stopped is not None and not due and self.evaluation.every:
            # The last round is always evaluated. A longer run would not evaluate after this one.
            self._remember_for_longer(row)
            self._evaluation(reported, only_as_last=True)()()
            row |= not_evaluated(self.engine.absent)
        if self._listeners:
            clock.lap("callbacks")
        self._append(row, clock)
        ends = last or self._ends_early
        if ends and self.evaluation.keep_local:
            # Before the checkpoint, because a run that is resumed after its last round cannot
            # compute them again.
            local = self.evaluator.local_models(
                begun.sent, ended.as_trained(), ended.cohort, number
            )
            self._kept.keep_local(local)
        if ends or self._saves_after(number):
            self.save_checkpoint()
        return self._progress(row)

    def _rows_of(self, begun: Begun, ended: Ended) -> tuple[Row, Row]:
        """Return the two parts of a round's row, around those who did not answer in evaluation.

        The bytes of the round are added to those of the run.
        """
        number, everyone = begun.number, self.participants.everyone
        # The bytes of questions before round 1 are counted in round 1.
        cohorts = [*begun.asked, *([everyone] if number == 1 and everyone else [])]
        if self._trains is self.engine:
            cohorts.append(ended.cohort)
        moved = summed(cohorts, BYTES)
        self.bytes = {name: before + moved[name] for name, before in self.bytes.items()}
        all_train = begun.everyone and len(ended.cohort.ids) == begun.receivers
        return beginning_of_row(number, ended.updates, ended.cohort, cohorts), {
            **summed(cohorts, ("messages", "evaluations")),
            **counted(moved),
            **cohort_and_notes(self.state, ended.cohort, everyone=all_train),
        }

    def _append(self, row: Row, clock: Clock) -> None:
        self.rounds.append([row])
        self.timings.append([{"round": row["round"], **clock.laps}])

    def _progress(self, row: Row) -> Progress:
        return Progress(
            row["round"], self.training.rounds, row["train_loss"], **self.evaluator.latest
        )

    def _saves_after(self, number: int) -> bool:
        """Return whether a round that is not the last one ends with a checkpoint."""
        return self.directory is not None and self._save_times.due(number)

    # ---- rounds that end while the next one is trained -------------------------------------------

    def _may_finish_later(self, number: int) -> bool:
        """Return whether nothing needs the evaluation of a round before the next one is trained."""
        return (
            self.engine.defers
            and number < self.training.rounds
            and not self._listeners
            and self.evaluation.select == "last"
            and self.evaluation.patience is None
            and not self._saves_after(number)
        )

    def _waits(self, launch: Launch | None, row: Row, clock: Clock) -> bool:
        """Let the rows of a round wait for its evaluation and for earlier rounds.

        Returns
        -------
        bool
            Whether they have to wait.
        """
        if launch is not None:
            beside = self.evaluator.can_be_beside
            add = self._later.add_beside if beside else self._later.add_launched
            add(launch, row, clock)
        elif self._later:
            self._later.add_row(row, clock)
        return bool(self._later)

    def _only_evaluate(self) -> None:
        # A run that was interrupted after its checkpoint has its metrics already.
        if not self.evaluation.due(0, last=True) or next(iter(self.metrics), None):
            return
        clock = Clock(self.engine.network.device)
        self._remember_for_longer()
        self._evaluation(Reported.of(None, None), only_as_last=True)()()
        clock.lap("evaluate")
        self.timings.append([{"round": 0, **clock.laps}])
        self.save_checkpoint()

    # ---- evaluation ------------------------------------------------------------------------------

    def _evaluation(self, reported: Reported, *, only_as_last: bool) -> Launch:
        """Return what launches the evaluation of the current state."""
        state = self.state

        def launch() -> Finish:
            read = self.evaluator.launch(state, reported)
            read_server = self.evaluator.launch_server(state)
            return partial(self._record, state, read, read_server, only_as_last=only_as_last)

        return launch

    def _record(
        self,
        state: State,
        read: Callable[[], list[ClientRows]],
        read_server: Callable[[], list[Row]],
        *,
        only_as_last: bool,
    ) -> None:
        """Wait for the values of an evaluation, and record them."""
        rows = read()
        for own in rows:
            if (client := own.diverged()) is not None:
                what = f"{own.split} loss of the {own.model} model"
                raise diverged(
                    own.round, what, client, self.federation, self._round_training.saved_round
                )
        for own in rows:
            self.metrics.append_later(own.lines)
        # A callback may read the file.
        if self._listeners:
            self.metrics.flush()
        else:
            self._trains.while_busy(self.metrics.flush)
        of_server = read_server()
        if of_server:
            self.server.append(of_server)
        if self.evaluator.follow(state.round, rows, of_server):
            best = self.evaluator.models(state)
            self.engine.keep()
            # The models of the last round can be made from the checkpoint. So the file keeps
            # those of the best round before, which a longer run may need.
            self._kept.keep_best(best, write=not only_as_last)
        if self._listeners:
            self._listeners.evaluated([row for own in rows for row in own])

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
        return self._kept.best() or self.evaluator.models(self.state)

    def local_models(self) -> Models:
        """Return the local models of the last round, if ``evaluation.keep_local`` is set."""
        return self._kept.local()

    def client_index(self) -> ClientIndex:
        """Return the client index that the selected model makes, of all clients with training data.

        Unseen clients are included, and on Flower those that have joined since. The bytes are not
        counted, as in evaluation.
        """
        model = self.selected().shared
        return make_index(self.engine, self.method, self.federation, model, self.state.round)

    def summary(self) -> dict[str, Any]:
        """Summarise the reported round, or the last rounds if they are averaged."""
        return summary_of(self)

    @property
    def slowed_by(self) -> list[str]:
        """What made steps on a GPU slower than they could be, one text each."""
        engines = (self.engine, self._trains)
        return list(dict.fromkeys(what for engine in engines for what in engine.slowed_by))

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
        with self._save_times.saving():
            note = {
                **progress_note(self.bytes, self.evaluator.standing, self.journals),
                **(
                    {"stopped": self.stopped, "stopped_rounds": self.training.rounds}
                    if self.stopped
                    else {}
                ),
                "run": self.identity,
                "total_was_read": self._total_was_read,
            }
            if self._if_longer is not None:
                note[IF_LONGER] = self._if_longer
            Checkpoint(self.state, self.engine.export(), note).save(self.directory)
        self._round_training.saved_round = self.state.round

    def restore_checkpoint(self, *, finished: bool = False, every: int | None = None) -> None:
        """Resume from the last checkpoint of the directory, or start if there is none yet.

        Parameters
        ----------
        finished : bool
            Whether the run is finished. Then no file is changed.
        every : int, optional
            The rounds between checkpoints of the run so far; see
            :class:`~equipoise.run.save_times.SaveTimes`.

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
            first_saved = every or 1
            if any(row["round"] > first_saved for row in self.rounds.complete()):
                raise RunError(
                    f"{self.directory} has journals of past rounds but no checkpoint, so the run "
                    "cannot be resumed; nothing was changed. Restore checkpoint.safetensors, or "
                    "start again in another directory"
                )
        else:
            if found.note.get("run", self.identity) not in (self.identity, self.older_identity):
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
            if self.evaluator.standing.best_round:
                # Check the file now and not after the last round, which may be days later.
                self._kept.check_best()
        rewind(self.journals, note, finished=finished)

    def _go_on_from(self, found: Checkpoint) -> dict[str, Any]:
        """Restore a checkpoint, and return its note, changed if the run is made longer."""
        self.state = found.state
        self.engine.restore(found.memory)
        note = dict(found.note)
        self.engine.total_was_read = note.get("total_was_read", False)
        # A callback stopped a run of this length. A longer one goes on.
        if note.get("stopped_rounds", self.training.rounds) == self.training.rounds:
            self.stopped = note.get("stopped")
        if self.state.round < self.training.rounds and self.stopped is None:
            note = as_longer(note)
        self.bytes = {name: note["bytes"][name] for name in BYTES}
        self.evaluator.standing = standing_in(note)
        self._round_training.saved_round = self.state.round
        self.participants.restore(self.state)
        return note

    @property
    def _total_was_read(self) -> bool:
        return self.engine.total_was_read or self._trains.total_was_read

    def _remember_for_longer(self, row: Row | None = None, report_bytes: int = 0) -> None:
        """Record the state of the run before an evaluation that only the last round has.

        If the run is made longer, its journals are rewound to here, ``row`` replaces the round's
        row, and the bytes of the report for that evaluation are not counted.
        """
        moved = self.bytes | {"bytes_up": self.bytes["bytes_up"] - report_bytes}
        rewound = {"metrics": self.metrics, "rounds": self.rounds, "server": self.server}
        self._if_longer = longer_note(moved, self.evaluator.standing, rewound, row)

    def measure_chunk(self) -> int:
        """Choose the chunk size by timing the first cohort. The trained models are dropped."""
        self.begin()
        return self._round_training.measure_chunk(self.state)
