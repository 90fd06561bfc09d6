"""The round loop: select, send, train, combine, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equipoise.data.augment import check_augmentations
from equipoise.engine.chunking import fastest
from equipoise.engine.cohort import Adapting, FineTuning, Layout, StackedEngine, exact_arithmetic
from equipoise.engine.contract import ClientsLost, Engine, Personal, RoundCohort
from equipoise.engine.settings import FineTune, Machine, Training
from equipoise.errors import InputError, RunError, unknown
from equipoise.federation import Federation
from equipoise.method import Aggregation, Method, State, Updates, combined
from equipoise.random import Purpose, fold
from equipoise.run.files import Journal, load_tensors, save_tensors
from equipoise.run.records import Row, client_rows, summarize_rows
from equipoise.tree import PERSONAL, Tree, flat_rows, tree_map

MakeEngine = Callable[[Federation, nn.Module, Training, Machine, int, Federation], Engine]

CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When clients are evaluated, and which round counts.

    Parameters
    ----------
    every : int
        Evaluate after every so many rounds, and after the last; 0 never.
    select : {"last", "best"}
        Report and keep the models of the last round, or of the round with the lowest mean validation loss over seen
        clients. Test data never decides.
    patience : int, optional
        Stop when the validation loss has not improved for so many evaluations.
    fine_tune : FineTune, optional
        Local steps every client makes from its model, or its personal model, before its personal model is evaluated.
    average_kept : bool
        For a method whose clients keep parts of the shared model for themselves: whether to evaluate a global model
        in which those parts are the mean of the clients' own. Without it there is no global model to evaluate.

    Examples
    --------
    >>> Evaluation(every=5, select="best", patience=3).due(10, last=False)
    True
    """

    every: int = 1
    select: str = "last"
    patience: int | None = None
    fine_tune: FineTune | None = None
    average_kept: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 0:
            raise InputError(f"evaluation.every must be a whole number of at least 0, got {self.every!r}")
        if self.select not in ("last", "best"):
            raise unknown("value", self.select, ("last", "best"), where="evaluation.select")
        patience = self.patience
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise InputError(f"evaluation.patience must be a whole number of at least 1, got {patience!r}")
        if self.every == 0 and (self.select == "best" or self.patience is not None):
            raise InputError("evaluation.select 'best' and evaluation.patience need evaluation.every of at least 1")

    def due(self, round_: int, *, last: bool) -> bool:
        """Say whether to evaluate after a round (counted from 1)."""
        return self.every > 0 and (last or round_ % self.every == 0)


@dataclass(frozen=True)
class Progress:
    """What a run says of itself after a round; the scores are of the latest evaluation, if there was one."""

    round: int
    rounds: int
    train_loss: float
    mean: float | None = None
    worst: float | None = None
    sigma: float | None = None


@dataclass(frozen=True)
class Models:
    """The models of one round: the global one, and the own parts of every client that has taken part, stacked."""

    round: int
    shared: Tree
    clients: list[int]
    own: Tree


class Trainer:
    """One run, round after round.

    Parameters
    ----------
    federation : Federation
        The clients.
    method : Method
        What is federated.
    model : nn.Module
        With ``features`` and ``head``.
    training, machine, evaluation
        The settings.
    seed : int
        Of all random numbers.
    directory : Path, optional
        Where journals and checkpoints go; without one nothing is written.
    checkpoint_every : int
        Rounds between checkpoints.
    engine : callable
        Makes the engine that carries the method out.
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
    ) -> None:
        self.federation, self.method, self.training, self.evaluation = federation, method, training, evaluation
        self.directory, self.checkpoint_every, self.seed = directory, checkpoint_every, seed
        self.view = method.view.of(federation)
        check_augmentations(training.augment, federation.shape)
        self.engine = engine(federation, model, training, machine, seed, self.view)
        if self.view is not federation and evaluation.fine_tune:
            raise InputError(f"evaluation.fine_tune needs clients that train; method {method.name!r} pools their data")
        self._register()
        self.layout = Layout(method.local, self.engine.network.initial())
        keeps_shared = any(not name.startswith(PERSONAL) for name in self.layout.kept)
        self._averages_kept = keeps_shared and evaluation.average_kept
        # Where clients keep parts of the shared model, nobody has it as a whole.
        self.has_global = bool(self.layout.shared) and (not keeps_shared or evaluation.average_kept)
        self._fine_tune = (evaluation.fine_tune.phase(training.optimizer),) if evaluation.fine_tune else ()
        # Laid out now, so that a part that does not exist is refused before training and not at the first evaluation.
        adaptations = [rule for rule in (Adapting(method.local), FineTuning(self._fine_tune)) if rule.phases()]
        self._adapts = bool([Layout(rule, self.engine.network.initial()) for rule in adaptations])
        self._has_personal = method.personal or self._adapts
        self.state = State(0, self.engine.network.initial())
        # A mask may hold −∞ from the start; only what training has made so is a fault.
        self._begun_finite = {name for name, tensor in self.state.model.items() if bool(torch.isfinite(tensor).all())}
        self._everyone: RoundCohort | None = None
        self.metrics, self.rounds, self.timings = (
            Journal(directory / f"{name}.jsonl" if directory else None) for name in ("metrics", "rounds", "timings")
        )
        self.bytes_up = self.bytes_down = 0
        self.best_round: int | None = None
        self._best_loss = float("inf")
        self._best_models: Models | None = None
        self._stale = 0
        self._latest: dict[str, Any] = {}

    def _register(self) -> None:
        # Asked for once: among a million clients, counting who is seen would take longer than drawing the cohort.
        self._registered = registered = self.view.seen
        pooled = self.view is not self.federation
        self._cohort_size = len(registered) if pooled else self.training.cohort_size(len(registered))
        self._train_sizes = self.view.split("train").sizes[registered]

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, on_round: Callable[[Progress], None] | None = None) -> None:
        """Train until the last round, or until validation says to stop."""
        self.begin()
        with exact_arithmetic(self.engine.machine):
            while self.state.round < self.training.rounds and not self._out_of_patience():
                progress = self._round()
                if on_round:
                    on_round(progress)

    def begin(self) -> None:
        """Let the server set up what it keeps, once, if it keeps anything: only then is everyone gathered."""
        aggregation = self.method.aggregation
        if self.state.round or self._everyone or type(aggregation).begin is Aggregation.begin:
            return
        self._everyone = self.engine.cohort(self.method, self._registered, 0)
        with exact_arithmetic(self.engine.machine):
            self.state = aggregation.begin(self.state, self._everyone)

    def _take_in(self) -> None:
        """Take clients in that have come since the last round."""
        if not self.engine.newcomers():
            return
        self._register()
        aggregation = self.method.aggregation
        if (self.state.round or self._everyone) and type(aggregation).begin is not Aggregation.begin:
            self.state = aggregation.admit(self.state, self.engine.cohort(self.method, self._registered, 0))

    def _out_of_patience(self) -> bool:
        return self.evaluation.patience is not None and self._stale >= self.evaluation.patience

    def _round(self) -> Progress:
        clock = _Clock(self.engine.network.device)
        number = self.state.round + 1
        last = number == self.training.rounds
        due = self.evaluation.due(number, last=last)
        self._take_in()
        cohort = self._select()
        if due and self.view is self.federation and self.has_global:
            cohort.wanted_reports.add("val_loss_after")
        updates = self._train(cohort, number)
        clock.lap("train")
        updates, cohort = self._combine(updates, cohort, number)
        clock.lap("combine")
        self.engine.commit(cohort)
        # What everyone was asked before round 1 is moved once, and counted there.
        doors = [cohort, self._everyone] if number == 1 and self._everyone else [cohort]
        moved = {name: sum(getattr(door, name) for door in doors) for name in ("bytes_up", "bytes_down")}
        self.bytes_up += moved["bytes_up"]
        self.bytes_down += moved["bytes_down"]
        loss = float((updates.reports["train_loss"] * cohort.prior).sum())
        row: Row = {"round": number, "cohort": len(cohort.ids), "train_loss": loss}
        if cohort.left_out:
            row["left_out"] = {str(client): reason for client, reason in sorted(cohort.left_out.items())}
        if due:
            self._evaluate(updates, cohort)
            clock.lap("evaluate")
            if self.engine.absent:
                row["not_evaluated"] = {str(client): reason for client, reason in sorted(self.engine.absent.items())}
        self.rounds.append([row | moved])
        self.timings.append([{"round": number, **clock.laps}])
        if self.directory and (last or number % self.checkpoint_every == 0 or self._out_of_patience()):
            self.save_checkpoint()
        return Progress(number, self.training.rounds, loss, **self._latest)

    def _select(self) -> RoundCohort:
        key = fold(self.seed, self.state.round, Purpose.SAMPLE)
        if self._cohort_size == len(self._registered):
            chosen = np.arange(self._cohort_size)
        else:
            chosen = self.method.sampler.select(key, self.state, self._train_sizes, self._cohort_size)
        return self.engine.cohort(self.method, self._registered[chosen], self.state.round)

    def _train(self, cohort: RoundCohort, number: int) -> Updates:
        shared, each = self.method.aggregation.send(self.state, cohort)
        updates = cohort.train(shared, each, self.method.local)
        self._refuse_non_finite(torch.isfinite(updates.reports["train_loss"]), cohort, number, "training loss")
        return updates

    def _combine(self, updates: Updates, cohort: RoundCohort, number: int) -> tuple[Updates, RoundCohort]:
        """Make the next state; clients lost on the way are left out, and everything is reckoned again without them."""
        while True:
            try:
                state = combined(self.method.aggregation, self.state, updates, cohort)
                break
            except ClientsLost as lost:
                updates = updates.rows(~np.isin(cohort.ids, lost.ids))
                cohort = cohort.without(lost.ids)
        checked = [torch.isfinite(tensor).all() for name, tensor in state.model.items() if name in self._begun_finite]
        if checked and not bool(torch.stack(checked).all()):
            finite = torch.ones(len(cohort.ids), dtype=torch.bool)
            for name, stack in (*updates.params.items(), *updates.buffers.items()):
                if name in self._begun_finite:
                    finite &= flat_rows(torch.isfinite(stack)).all(1).cpu()
            self._refuse_non_finite(finite, cohort, number, "model")
            raise RunError(f"round {number}: the global model became non-finite when updates were combined")
        self.state = replace(state, round=number)
        return updates, cohort

    def _refuse_non_finite(self, finite: torch.Tensor, cohort: RoundCohort, number: int, what: str) -> None:
        if bool(finite.all()):
            return
        client = int(cohort.ids[int((~finite).nonzero()[0])])
        raise self._diverged(number, what, client, self.view)

    def _diverged(self, number: int, what: str, client: int, federation: Federation) -> RunError:
        kept = f"; the checkpoint of round {self._saved_round} is intact" if self._saved_round else ""
        return RunError(
            f"round {number}: the {what} of client {client} ({federation.client_name(client)}) is not finite; "
            f"a smaller learning rate or training.clip may help{kept}"
        )

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self, updates: Updates, cohort: RoundCohort) -> None:
        rows: list[Row] = []
        everyone = np.arange(self.federation.clients)
        if self.has_global:
            measured = self.engine.evaluate(self.global_model, everyone)
            gaps = self._gaps(updates, cohort, measured["val"]["loss"])
            rows += self._rows(everyone, measured["val"], "global", "val", gaps)
            rows += self._rows(everyone, measured["test"], "global", "test")
        if self._has_personal:
            # Without a way to make a model its own, a client held out of training has the global one and no other.
            clients = everyone if self._adapts else self.federation.seen
            measured = self.engine.evaluate(self._sent_out, clients, personal=self._personal)
            for split in ("val", "test"):
                rows += self._rows(clients, measured[split], "personal", split)
        rows = [row for row in rows if row["client"] not in self.engine.absent]
        for row in rows:
            if not np.isfinite(row["loss"]):
                what = f"{row['split']} loss of the {row['model']} model"
                raise self._diverged(row["round"], what, row["client"], self.federation)
        self.metrics.append(rows)
        self._follow(rows)

    def _rows(
        self, clients: NDArray[np.int64], measured: Any, model: str, split: str, gaps: Mapping[int, float] | None = None
    ) -> list[Row]:
        return client_rows(
            self.federation, clients, measured, round_=self.state.round, model=model, split=split, gaps=gaps
        )

    def _gaps(self, updates: Updates, cohort: RoundCohort, global_loss: NDArray[np.float64]) -> dict[int, float]:
        local = updates.reports.get("val_loss_after")
        if local is None:
            return {}
        gaps = global_loss[cohort.ids] - local.numpy()
        return {int(c): float(gap) for c, gap in zip(cohort.ids, gaps, strict=True) if np.isfinite(gap)}

    def _follow(self, rows: list[Row]) -> None:
        """Keep the latest scores for the progress bar, and the best models if they are asked for."""
        shown = "personal" if self._has_personal else "global"
        task = self.engine.network.task
        if summary := summarize_rows(rows, task).get(shown, {}).get("seen"):
            names = {"mean": "mean", "worst": "worst_client", "sigma": "sigma_clients"}
            self._latest = {name: summary[metric] for name, metric in names.items()}
        losses = [r["loss"] for r in rows if (r["model"], r["split"], r["unseen"]) == (shown, "val", False)]
        if not losses:
            if self.evaluation.select == "best" or self.evaluation.patience is not None:
                raise InputError("choosing a round needs validation data, but no seen client holds any")
            return
        loss = float(np.mean(losses))
        self._stale += 1
        if loss < self._best_loss:
            self._best_loss, self.best_round, self._stale = loss, self.state.round, 0
            if self.evaluation.select == "best":
                self._keep_best()

    @property
    def _sent_out(self) -> Tree:
        """The global model as clients get it, less what each of them keeps."""
        return self.method.aggregation.evaluated(self.state)

    @property
    def global_model(self) -> Tree:
        """The global model as it is evaluated and handed out."""
        model = self._sent_out
        if self._averages_kept:
            model = {**model, **self.engine.averaged_kept(self.method, model)}
        return model

    @property
    def _personal(self) -> Personal:
        return Personal(self.method, self._fine_tune, self.state.round)

    def personal_models(self, clients: NDArray[np.int64]) -> tuple[Tree, Tree]:
        """Return what clients' personal models share, and what differs, stacked in the order of ``clients``."""
        return self.engine.personal_models(self._sent_out, self._personal, clients)

    # ---- models and checkpoints --------------------------------------------------------------------------------------

    def _keep_best(self) -> None:
        self._best_models = best = self._models()
        self.engine.keep()
        if self.directory:
            tensors = {f"global/{n}": t for n, t in best.shared.items()} | {f"own/{n}": t for n, t in best.own.items()}
            save_tensors(self.directory / BEST, tensors, {"round": best.round, "clients": best.clients})

    def _models(self) -> Models:
        clients: list[int] = []
        if self._has_personal:
            # Who cannot adapt has a model of its own only once it has taken part; who can, needs data to adapt to.
            able = np.flatnonzero(self.federation.split("train").sizes)
            clients = able.tolist() if self._adapts else self.engine.remembering
        own = self.personal_models(np.array(clients))[1] if clients else {}
        return Models(self.state.round, dict(self.global_model), clients, own)

    @property
    def _selected_round(self) -> int:
        best = self.best_round if self.evaluation.select == "best" else None
        return self.state.round if best is None else best

    def selected(self) -> Models:
        """Return the models of the round that counts."""
        if self._selected_round == self.state.round:
            return self._models()
        if self._best_models is None and self.directory:
            tensors, note = load_tensors(self.directory / BEST)
            shared = {n.removeprefix("global/"): t for n, t in tensors.items() if n.startswith("global/")}
            own = {n.removeprefix("own/"): t for n, t in tensors.items() if n.startswith("own/")}
            self._best_models = Models(note["round"], shared, note["clients"], own)
        return self._best_models or self._models()

    def summary(self) -> dict[str, Any]:
        """Summarise the round that counts."""
        number = self._selected_round
        rows = [row for row in self.metrics if row["round"] == number]
        task = self.engine.network.task
        results = summarize_rows(rows, task)
        for part in (part for of_model in results.values() for part in of_model.values()):
            # A number says nothing to those who do not hold the data.
            part["worst_client_name"] = self.federation.client_name(part["worst_client_id"])
        return {
            "method": self.method.name,
            "data": self.federation.name,
            "seed": self.seed,
            "rounds": self.state.round,
            "round": number,
            "select": self.evaluation.select,
            "score": task.score,
            "results": results,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
        }

    _saved_round = 0

    def save_checkpoint(self) -> None:
        """Write all that the next round depends on into one file, after the journals are durable."""
        if self.directory is None:
            return
        journals = {"metrics": self.metrics, "rounds": self.rounds, "timings": self.timings}
        note = {
            "round": self.state.round,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "best_round": self.best_round,
            "best_loss": self._best_loss if self.best_round else None,
            "stale": self._stale,
            "marks": {name: journal.mark() for name, journal in journals.items()},
        }
        tensors = {f"model/{name}": tensor for name, tensor in self.state.model.items()}
        for tree, values in self.state.kept.items():
            tensors |= {f"kept/{tree}/{name}": tensor for name, tensor in values.items()}
        tensors |= {f"memory/{name}": tensor for name, tensor in self.engine.export().items()}
        save_tensors(self.directory / CHECKPOINT, tensors, note)
        self._saved_round = self.state.round

    def restore_checkpoint(self) -> None:
        """Go on from the last checkpoint of the directory, or from the start if there is none."""
        if self.directory is None:
            return
        path = self.directory / CHECKPOINT
        marks: Mapping[str, int] = {}
        if path.exists():
            tensors, note = load_tensors(path)
            model: Tree = {}
            kept: dict[str, Tree] = {}
            memory: Tree = {}
            device = self.engine.network.device
            for name, tensor in tensors.items():
                root, _, rest = name.partition("/")
                if root == "model":
                    model[rest] = tensor.to(device)
                elif root == "kept":
                    tree, _, leaf = rest.partition("/")
                    kept.setdefault(tree, {})[leaf] = tensor
                else:
                    memory[rest] = tensor
            # Numbers of clients stay on the CPU, where the server reckons, whatever device the model is on.
            for tree, values in kept.items():
                kept[tree] = values if "ids" in values else tree_map(lambda tensor: tensor.to(device), values)
            # The tensors of a file come sorted by name; the model's own order is what later sums follow.
            ordered = {name: model[name] for name in self.state.model}
            self.state = State(note["round"], ordered, kept)
            self.engine.restore(memory)
            self.bytes_up, self.bytes_down = note["bytes_up"], note["bytes_down"]
            self.best_round, self._stale = note["best_round"], note["stale"]
            self._best_loss = note["best_loss"] if note["best_loss"] is not None else float("inf")
            self._saved_round = note["round"]
            marks = note["marks"]
        for name in ("metrics", "rounds", "timings"):
            getattr(self, name).rewind(marks.get(name, 0))

    def measure_chunk(self) -> int:
        """Choose the chunk size by timing the first cohort; nothing of what it trains is kept."""
        engine = self.engine
        cohort_size = self._cohort_size
        candidates = sorted({1, min(4, cohort_size), min(16, cohort_size), min(64, cohort_size), cohort_size})

        def seconds(chunk: int) -> float:
            engine.chunk = chunk
            cohort = self._select()
            clock = _Clock(engine.network.device)
            shared, each = self.method.aggregation.send(self.state, cohort)
            cohort.train(shared, each, self.method.local)
            clock.lap("train")
            return clock.laps["train"]

        self.begin()
        with exact_arithmetic(engine.machine):
            engine.chunk = fastest(candidates, seconds)
        return engine.chunk


class _Clock:
    """Seconds between laps, waiting for the device to finish."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.laps: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.laps[name] = round(now - self._start, 6)
        self._start = now
