"""When clients are evaluated, what is measured, and which round is reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.attributes import counting_of
from equipoise.checks import UNLESS_DEFAULT, count, one_of
from equipoise.engine.adapting import Adapting, FineTuning
from equipoise.engine.chunking import fits_beside
from equipoise.engine.contract import ADVICE, Engine, Personal, RoundCohort, number_and_name
from equipoise.engine.evaluation import Measured
from equipoise.engine.layout import Layout
from equipoise.engine.settings import FineTune, Training
from equipoise.errors import InputError, RunError, unknown
from equipoise.fairness import summarize
from equipoise.federation import Federation
from equipoise.method import Method, State, Updates
from equipoise.metrics import Metric, check_metrics, computed, several_from
from equipoise.run.client_rows import ClientRows, Holders, client_rows
from equipoise.run.records import Row
from equipoise.tree import PERSONAL, Tree


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When clients are evaluated, and which round is reported.

    Parameters
    ----------
    every : int
        Number of rounds between evaluations. The last round is evaluated, too. With 0, models are
        never evaluated.
    select : {"last", "best"}
        Report and keep the models of the last round, or of the round with the lowest mean
        validation loss over seen clients. Test data are never used to choose.
    select_by : str, optional
        What to use instead of the validation loss, for ``select`` and ``patience``: the task's
        score, or one of ``metrics``. It is averaged over the seen clients that have a value.
    select_on : {"clients", "server"}
        Which validation data to use for ``select`` and ``patience``: those of the seen clients, or
        those of the server (``data.server_val``, ``Federation.server``).
    last : int, optional
        Report means over this number of evaluated rounds at the end, or over all if there are
        fewer. Values are averaged for each client, and then summarised. ``select`` still determines
        which models are kept.
    patience : int, optional
        Stop if the validation loss, or ``select_by``, has not improved for this number of
        evaluations.
    metrics : sequence of str or Metric
        Metrics in addition to the loss and the task's score: names from
        :func:`equipoise.metrics.names`, or custom metrics (:class:`equipoise.metrics.Metric`).
    fine_tune : FineTune, optional
        Local steps that every client makes before its personal model is evaluated, starting from
        the global or its personal model.
    local : bool
        Whether to evaluate the local models as well: the model of each client of the round's cohort
        after its training, before aggregation. This takes a pass over the cohort's validation and
        test data, and no message.
    keep_local : bool
        Whether to keep the local models of the last round; see :func:`equipoise.load`.
    average_kept : bool
        For methods whose clients keep parts of the shared model: whether to evaluate a global model
        in which these parts are the mean of the clients' parts. Without it there is no global model
        to evaluate.
    positive : int or str, optional
        For data with attributes: the class, by number or name, that counts as a positive prediction
        in selection rates, TPR and FPR. By default class 1 if there are two classes. With more
        classes there are no rates by default.
    min_cell : int
        For data with attributes: the smallest number of samples for which a client reports counts.
        Counts of smaller cells do not leave the client; see
        :class:`equipoise.attributes.Counting`. With 1, nothing is withheld.

    Examples
    --------
    >>> Evaluation(every=5, select="best", patience=3).due(10, last=False)
    True
    >>> evaluation = Evaluation(metrics=["auroc", "ece"], select="best", select_by="auroc")
    >>> [metric.name for metric in evaluation.metrics]
    ['auroc', 'ece']
    """

    every: int = 1
    select: str = "last"
    patience: int | None = None
    fine_tune: FineTune | None = None
    average_kept: bool = False
    local: bool = False
    keep_local: bool = False
    metrics: Sequence[str | Metric] = field(default=(), metadata={UNLESS_DEFAULT: True})
    select_by: str | None = field(default=None, metadata={UNLESS_DEFAULT: True})
    positive: int | str | None = field(default=None, metadata={UNLESS_DEFAULT: True})
    min_cell: int = field(default=5, metadata={UNLESS_DEFAULT: True})
    select_on: str = field(default="clients", metadata={UNLESS_DEFAULT: True})
    last: int | None = field(default=None, metadata={UNLESS_DEFAULT: True})

    def __post_init__(self) -> None:
        """Look up metrics by name, and refuse settings that contradict each other."""
        object.__setattr__(self, "metrics", several_from(self.metrics, "evaluation.metrics"))
        count(self.every, "evaluation.every", least=0)
        count(self.min_cell, "evaluation.min_cell")
        if isinstance(self.positive, bool) or not isinstance(self.positive, int | str | None):
            raise InputError(
                f"evaluation.positive must be a class, by number or name, got {self.positive!r}"
            )
        one_of(self.select, ("last", "best"), "evaluation.select")
        one_of(self.select_on, ("clients", "server"), "evaluation.select_on")
        if self.patience is not None:
            count(self.patience, "evaluation.patience")
        if self.every == 0 and self.chooses:
            raise InputError(
                "evaluation.select 'best' and evaluation.patience need evaluation.every of at "
                "least 1"
            )
        if self.last is not None:
            count(self.last, "evaluation.last")
            if self.every == 0:
                raise InputError("evaluation.last needs evaluation.every of at least 1")
        if self.every == 0 and self.local:
            raise InputError("evaluation.local needs evaluation.every of at least 1")
        if self.select_by is not None and not self.chooses:
            raise InputError(
                "evaluation.select_by needs evaluation.select 'best' or evaluation.patience"
            )

    @property
    def chooses(self) -> bool:
        """Whether values on validation data decide which round is reported, or the last one."""
        return self.select == "best" or self.patience is not None

    def due(self, round_: int, *, last: bool) -> bool:
        """Return whether to evaluate after a round (counted from 1)."""
        return self.every > 0 and (last or round_ % self.every == 0)


@dataclass(frozen=True)
class Models:
    """The models of one round: the shared model, and the clients' own parts, stacked."""

    round: int
    shared: Tree
    clients: list[int]
    own: Tree


@dataclass
class Standing:
    """The best round so far, by validation loss or ``evaluation.select_by``.

    Attributes
    ----------
    best_round : int or None
        The round with the lowest mean validation loss so far.
    best_loss : float
        Its loss. For metrics that should be high, the negative value.
    stale : int
        The number of evaluations since.
    """

    best_round: int | None = None
    best_loss: float = float("inf")
    stale: int = 0

    def improves(self, round_: int, loss: float) -> bool:
        """Record an evaluation, and return whether it is the best so far.

        Examples
        --------
        >>> standing = Standing()
        >>> standing.improves(1, 0.5), standing.improves(2, 0.7), standing.stale
        (True, False, 1)
        """
        self.stale += 1
        if loss >= self.best_loss:
            return False
        self.best_round, self.best_loss, self.stale = round_, loss, 0
        return True


@dataclass(frozen=True)
class Reported:
    """What clients have sent with their updates about their own models.

    This is kept until the rows are made, and the updates are not: they take as much memory as all
    trained models.

    Attributes
    ----------
    ids : int array
        The clients.
    losses : dict of int to float
        The validation loss of each client's model after training, if clients report it.
    local_metrics : dict
        Loss and metrics of these models by split, with ``evaluation.local``.
    """

    ids: NDArray[np.int64]
    losses: Mapping[int, float]
    local_metrics: Mapping[str, Measured]

    @classmethod
    def of(cls, updates: Updates | None, cohort: RoundCohort | None) -> Reported:
        """Return what a cohort has sent. Before round 1 there are no updates and no cohort."""
        if updates is None or cohort is None:
            return cls(np.empty(0, np.int64), {}, {})
        losses = updates.reports.get("val_loss_after")
        of_clients = (
            [] if losses is None else zip(cohort.ids.tolist(), losses.tolist(), strict=True)
        )
        return cls(cohort.ids, dict(of_clients), cohort.local_metrics)


class Evaluator:
    """Evaluate the models of a run after a round.

    Parameters
    ----------
    federation : Federation
        The clients. They are always evaluated on their own data, with any view.
    method : Method
        The method.
    engine : Engine
        The engine that runs it.
    training : Training
        The training settings, which fine-tuning also uses.
    evaluation : Evaluation
        What to evaluate.

    Attributes
    ----------
    has_global : bool
        Whether there is a complete global model. If clients keep parts of it, there is none.
    latest : dict
        The scores of the latest evaluation.
    """

    def __init__(
        self,
        federation: Federation,
        method: Method,
        engine: Engine,
        training: Training,
        evaluation: Evaluation,
    ) -> None:
        self.federation, self.method, self.engine, self.evaluation = (
            federation,
            method,
            engine,
            evaluation,
        )
        self.standing = Standing()
        self.latest: dict[str, Any] = {}
        # The clients of the latest rows, by model and split.
        self._holders: dict[tuple[str, str], Holders] = {}
        initial = engine.network.initial()
        layout = Layout(method.local, initial)
        keeps_shared = any(not name.startswith(PERSONAL) for name in layout.kept)
        self._averages_kept = keeps_shared and evaluation.average_kept
        # A model without trained tensors is the same for all clients.
        self.has_global = not initial or (
            bool(layout.shared) and (not keeps_shared or evaluation.average_kept)
        )
        self._fine_tune = (
            (evaluation.fine_tune.phase(training.optimizer),) if evaluation.fine_tune else ()
        )
        # Made here, so that a missing part is refused before training and not at the first
        # evaluation.
        adaptations = [
            rule for rule in (Adapting(method.local), FineTuning(self._fine_tune)) if rule.phases()
        ]
        self._adapts = bool([Layout(rule, initial) for rule in adaptations])
        self.has_personal = method.personal or self._adapts
        if evaluation.keep_local:
            engine.refuse_keeping_local(method)
        task, self.metrics = (
            engine.network.task,
            several_from(evaluation.metrics, "evaluation.metrics"),
        )
        check_metrics(self.metrics, task, engine.network.measures)
        engine.metrics = computed(self.metrics, task)
        # On Flower, clients have the attributes and make the counts.
        if federation.attributes:
            engine.counting = counting_of(
                federation.attributes,
                task,
                federation.classes,
                federation.class_names,
                positive=evaluation.positive,
                min_cell=evaluation.min_cell,
            )
        higher = {"loss": False, task.score: task.higher_is_better}
        higher |= {metric.name: metric.higher_is_better for metric in self.metrics}
        self._by = evaluation.select_by or "loss"
        if self._by not in higher:
            raise unknown("metric", self._by, higher, where="evaluation.select_by")
        self._sign = -1.0 if higher[self._by] else 1.0
        self._refuse_to_choose_without_data()

    def _refuse_to_choose_without_data(self) -> None:
        """Refuse to choose a round if nobody has validation data, before anything is trained.

        On Flower the data are known only when models are evaluated; see :meth:`follow`.
        """
        if not self.evaluation.chooses:
            return
        if self.evaluation.select_on == "server" and not self.has_global:
            raise InputError(
                "evaluation.select_on 'server' needs a global model, but the clients of method "
                f"{self.method.name!r} keep parts of it; valid: evaluation.select_on 'clients', or "
                "evaluation.average_kept: true"
            )
        if not isinstance(self.federation, Federation):
            return
        if self.evaluation.select_on == "server":
            any_data = "val" in self.federation.server
        else:
            any_data = bool(self.federation.split("val").sizes[self.federation.seen].any())
        if not any_data:
            raise self._without_data("any")

    def _without_data(self, what: str) -> InputError:
        on_server = self.evaluation.select_on == "server"
        who = "the server does not have" if on_server else "no seen client has"
        valid = (
            "data.server_val above 0" if on_server else "data.splits with a share for validation"
        )
        return InputError(
            f"choosing a round needs validation data, but {who} {what}; valid: {valid}, or "
            "evaluation.select 'last' without evaluation.patience"
        )

    @property
    def can_be_beside(self) -> bool:
        """Whether a GPU can evaluate a round beside the training of later ones.

        Evaluation must only read the state of its round, the host must wait for nothing, and the
        GPU must have the memory. Personal models are read from memories, which training changes.
        Metrics of all outputs, counts and scores on the server's data are computed on the host.
        The host copies samples that are not on the GPU, and those of models that need the batches
        of each client.
        """
        engine, network = self.engine, self.engine.network
        if not engine.defers or self.has_personal or network.batchwise or not engine.keeps_samples:
            return False
        computes = self.metrics or engine.counting is not None or self.federation.server
        return not computes and fits_beside(network, self._largest_split)

    @cached_property
    def _largest_split(self) -> int:
        splits = (self.federation.split(name) for name in ("val", "test"))
        return max(int(split.sizes.sum()) for split in splits)

    def launch(self, state: State, reported: Reported) -> Callable[[], list[ClientRows]]:
        """Begin to evaluate the models of a round, and return what waits for their rows.

        There is a row for each client, model and split.
        """
        launched: dict[str, tuple[NDArray[np.int64], Callable[[], dict[str, Measured]]]] = {}
        if self.has_global:
            clients, model = np.arange(self.federation.clients), self.global_model(state)
            launched["global"] = clients, self.engine.launch_evaluation(model, clients)
        if self.has_personal:
            clients, model = self._with_personal_models, self._handed_out(state)
            launched["personal"] = (
                clients,
                self.engine.launch_evaluation(model, clients, personal=self._personal(state)),
            )
        make = partial(self._rows, state.round)

        def rows() -> list[ClientRows]:
            found: list[ClientRows] = []
            for model, (clients, read) in launched.items():
                measured = read()
                gaps = _gaps(reported.losses, measured["val"]["loss"]) if model == "global" else {}
                present = ~np.isin(clients, list(self.engine.absent))
                for split in ("val", "test"):
                    columns = {name: of[present] for name, of in measured[split].items()}
                    of_val = gaps if split == "val" else {}
                    found.append(make(model, split, clients[present], columns, of_val))
            for split, own in reported.local_metrics.items():
                found.append(make("local", split, reported.ids, own))
            return found

        return rows

    def _rows(
        self,
        round_: int,
        model: str,
        split: str,
        clients: NDArray[np.int64],
        measured: Measured,
        gaps: Mapping[int, float] | None = None,
    ) -> ClientRows:
        """Return the rows of some clients, which are mostly those of the evaluation before."""
        before = self._holders.get((model, split))
        holders = Holders.of(self.federation, clients, split, before)
        self._holders[model, split] = holders
        return client_rows(
            holders,
            measured,
            round_=round_,
            model=model,
            split=split,
            task=self.engine.network.task,
            gaps=gaps,
            metrics=self.engine.metrics,
        )

    def launch_server(self, state: State) -> Callable[[], list[Row]]:
        """Evaluate the global model on the server's data, and return what makes the rows.

        There is a row for each split of the server; none without data or a global model.
        """
        of_splits = self.engine.evaluate_server(self.global_model(state)) if self.has_global else {}

        def rows() -> list[Row]:
            found: list[Row] = []
            for split, measured in of_splits.items():
                values = {
                    name: float(value[0])
                    for name, value in measured.items()
                    if np.isfinite(value[0])
                }
                if "loss" not in values:
                    raise RunError(
                        f"round {state.round}: the {split} loss of the global model on the "
                        "server's data is not finite"
                    )
                found.append({"round": state.round, "split": split, **values})
            return found

        return rows

    @property
    def _with_personal_models(self) -> NDArray[np.int64]:
        """Return all seen clients, and the unseen clients that can adapt the global model."""
        if not self._adapts:
            return self.federation.seen
        return np.flatnonzero(~self.federation.unseen | (self.federation.split("train").sizes > 0))

    def follow(self, round_: int, rows: Sequence[ClientRows], server: Sequence[Row] = ()) -> bool:
        """Record the latest scores, and return whether to keep the models as the best so far."""
        shown = "personal" if self.has_personal else "global"
        of = {own.split: own for own in rows if own.model == shown and len(own.sizes_of_seen)}
        judged = of.get("val")
        # Seen clients may have only validation data.
        if shown_rows := of.get("test", judged):
            task, sizes = self.engine.network.task, shown_rows.sizes_of_seen
            # All in one group: what is shown does not depend on groups.
            summary = summarize(
                shown_rows.of_seen(task.score),
                np.zeros(len(sizes), np.int64),
                weights=sizes,
                higher_is_better=task.higher_is_better,
            )
            self.latest = {
                "mean": summary.mean,
                "worst": summary.worst_client,
                "sigma": summary.sigma_clients,
            }
        on_server = self.evaluation.select_on == "server"
        if on_server:
            validated = [row for row in server if row["split"] == "val"]
            any_data = bool(validated)
            values = np.array([row[self._by] for row in validated if self._by in row])
        else:
            any_data = judged is not None
            values = judged.of_seen(self._by) if judged else np.empty(0)
        if not len(values):
            if self.evaluation.chooses:
                raise self._without_data(f"a value of {self._by}" if any_data else "any")
            return False
        return (
            self.standing.improves(round_, self._sign * float(np.mean(values)))
            and self.evaluation.select == "best"
        )

    @property
    def out_of_patience(self) -> bool:
        """Whether ``evaluation.patience`` evaluations have brought no improvement."""
        return (
            self.evaluation.patience is not None and self.standing.stale >= self.evaluation.patience
        )

    def selected_round(self, latest: int) -> int:
        """Return the round that is reported."""
        best = self.standing.best_round if self.evaluation.select == "best" else None
        return latest if best is None else best

    # ---- models ----------------------------------------------------------------------------------

    def _handed_out(self, state: State) -> Tree:
        """Return the global model that clients get, without the parts that they keep."""
        return self.method.aggregation.evaluated(state)

    def global_model(self, state: State) -> Tree:
        """Return the global model that is evaluated and saved."""
        model = self._handed_out(state)
        if self._averages_kept:
            model = {**model, **self.engine.averaged_kept(self.method, model)}
        return model

    def personal_models(self, state: State, clients: NDArray[np.int64]) -> tuple[Tree, Tree]:
        """Return the shared tensors of personal models, and the others stacked over ``clients``."""
        return self.engine.personal_models(self._handed_out(state), self._personal(state), clients)

    def models(self, state: State) -> Models:
        """Return the models of a round."""
        clients: list[int] = []
        if self.has_personal:
            # Without adaptation only clients that have taken part have their own models. To adapt,
            # a client needs data.
            able = np.flatnonzero(self.federation.split("train").sizes)
            clients = able.tolist() if self._adapts else self.engine.remembering
        own = self.personal_models(state, np.array(clients))[1] if clients else {}
        return Models(state.round, dict(self.global_model(state)), clients, own)

    def local_models(
        self, sent: Tree, updates: Updates, cohort: RoundCohort, round_: int
    ) -> Models:
        """Return the models that clients trained in a round, with the parts that they keep."""
        kept = self.engine.kept_parts(self.method, sent, cohort.ids)
        own = {**updates.params, **updates.buffers, **kept}
        still = {name: tensor for name, tensor in sent.items() if name not in own}
        return Models(round_, still, cohort.ids.tolist(), own)

    def _personal(self, state: State) -> Personal:
        return Personal(self.method, self._fine_tune, state.round)


def diverged(
    number: int, what: str, client: int, federation: Federation, saved_round: int
) -> RunError:
    """Return the error that names the client with non-finite numbers and the last checkpoint."""
    return RunError(
        f"round {number}: the {what} of {number_and_name(client, federation)} is not finite; "
        f"{ADVICE}{intact(saved_round)}"
    )


def intact(saved_round: int) -> str:
    """Return the end of an error's message that names the last checkpoint, if there is one.

    Examples
    --------
    >>> intact(4)
    '; the checkpoint of round 4 is intact'
    """
    return f"; the checkpoint of round {saved_round} is intact" if saved_round else ""


def _gaps(local: Mapping[int, float], global_loss: NDArray[np.float64]) -> dict[int, float]:
    """Return the generalization gap of each client that has one."""
    gaps = {client: float(global_loss[client]) - loss for client, loss in local.items()}
    return {client: gap for client, gap in gaps.items() if math.isfinite(gap)}
