"""Aggregations and guards of Equipoise for Flower apps with a ``ClientApp`` of their own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray
from torch import Tensor

from equipoise import methods
from equipoise.checks import name_and_options
from equipoise.errors import InputError, RunError
from equipoise.flower.checks import Misfit
from equipoise.flower.registration import LARGEST_SIZE
from equipoise.flower.reports import Number
from equipoise.flower.schema import tree_like
from equipoise.flower.wire import from_record, to_record
from equipoise.method import Method, Sees, State, Updates, combine_checked
from equipoise.random import Purpose, fold
from equipoise.tree import Tree

log = logging.getLogger("flwr.equipoise")


class AggregationStrategy(FedAvg):
    """Flower's ``FedAvg`` strategy with an aggregation, and perhaps a guard, of Equipoise.

    It is for apps that keep their own ``ClientApp`` with its own training loop. Clients are chosen,
    evaluated and waited for by Flower. Nothing is written to disk.

    Clients answer as they do for ``FedAvg``: with one ``ArrayRecord`` and one ``MetricRecord``, in
    which ``num-examples`` is their number of training samples. If the aggregation ``needs`` reports
    such as ``loss_before``, the loss of the received model on the client's training data, the
    ``MetricRecord`` must contain them under these names. Answers with other names or shapes, with
    NaN or without a report are left out with a warning.

    Parameters
    ----------
    method : str or mapping
        The method, as in an experiment: a name, or a mapping with ``name``, options and ``guard``.
        Only its aggregation is used, so methods that change what clients do are refused.
    seed : int
        Seed of the server's random numbers, if the aggregation uses any.
    **options
        Those of ``flwr.serverapp.strategy.FedAvg``, such as ``fraction_train``.

    Examples
    --------
    >>> AggregationStrategy({"name": "qffl", "q": 2.0}, fraction_train=0.5).needs
    ('loss_before', 'lr')
    >>> AggregationStrategy("ditto")
    Traceback (most recent call last):
    equipoise.errors.InputError: method 'ditto' changes what clients do, so it needs the client app
    of Equipoise; valid here: methods that change the aggregation only, such as qffl or median
    """

    def __init__(self, method: str | Mapping[str, Any], *, seed: int = 0, **options: Any) -> None:
        name, chosen = name_and_options(method, "method")
        self.method = methods.build(name, **chosen)
        _check_only_aggregates(self.method)
        self.seed = seed
        super().__init__(**options)
        self._rounds = 0
        self._state: State | None = None
        self._sent = ArrayRecord()
        # Nodes by the order of their first answers: aggregations number clients from 0.
        self._number_of: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    @property
    def needs(self) -> tuple[str, ...]:
        """The reports that clients must send besides ``num-examples``."""
        return self.method.aggregation.needs

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *more: Any,
        **named: Any,
    ) -> Result:
        """Run all rounds; see ``flwr.serverapp.strategy.Strategy.start``."""
        self._rounds, self._state = num_rounds, None
        return super().start(grid, initial_arrays, num_rounds, *more, **named)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose clients and make their messages, as ``FedAvg`` does."""
        self._sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the updates that can be used."""
        # Flower's own check would end the run because of one wrong answer.
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        sent = from_record(self._sent)
        usual = _usual_form(reply.content for reply in valid)
        rows: dict[int, _Row] = {}
        for reply in sorted(valid, key=lambda reply: reply.metadata.src_node_id):
            node = reply.metadata.src_node_id
            try:
                row = self._read(reply.content, sent, usual)
            except Misfit as error:
                log.warning("round %d continues without node %d: %s", server_round, node, error)
                continue
            number = self._number_of.setdefault(node, len(self._number_of))
            rows[number] = row
            self._sizes.setdefault(number, row.size)
        if not rows:
            return None, None
        model = self._combine(server_round, sent, dict(sorted(rows.items())))
        used = [rows[number].content for number in sorted(rows)]
        return to_record(model), self.train_metrics_aggr_fn(used, self.weighted_by_key)

    def _read(self, content: RecordDict, sent: Tree, usual: _Form) -> _Row:
        if _form_of(content) != usual:
            raise Misfit("answered with other records or metrics than most clients")
        if (len(content.array_records), len(content.metric_records)) != (1, 1):
            raise Misfit("answered without exactly one ArrayRecord and one MetricRecord")
        (arrays,), (metrics,) = content.array_records.values(), content.metric_records.values()
        size = Number(called=self.weighted_by_key, low=1.0, high=LARGEST_SIZE).read(
            metrics.get(self.weighted_by_key)
        )
        reports = {
            name: Number(called=f"{name} (its MetricRecord)").read(metrics.get(name))
            for name in self.needs
        }
        return _Row(content, tree_like(arrays, sent), int(size), reports)

    def _combine(self, server_round: int, sent: Tree, rows: Mapping[int, _Row]) -> Tree:
        aggregation, guard = self.method.aggregation, self.method.guard
        cohort = self._cohort(server_round, rows)
        before = State(server_round - 1, sent)
        if self._state is not None:
            before = replace(before, server=self._state.server)
        if aggregation.needs_everyone and (self._state is None or _strangers(before, rows)):
            everyone = self._cohort(server_round, self._sizes)
            begin = aggregation.begin if self._state is None else aggregation.admit
            before = begin(before, everyone)
        counters = {name for name, tensor in sent.items() if not tensor.is_floating_point()}
        stack = {
            name: torch.stack([row.tree[name] for row in rows.values()])
            for name in sent
            if name not in counters
        }
        updates = Updates(
            params={name: t for name, t in stack.items() if not _is_statistic(name)},
            buffers={name: t for name, t in stack.items() if _is_statistic(name)},
            uploads={},
            reports={
                name: torch.tensor([row.reports[name] for row in rows.values()]).double()
                for name in self.needs
            },
        )
        if guard is not None:
            if len(rows) < guard.least_clients():
                raise RunError(
                    f"round {server_round}: the guard {guard.name!r} needs the updates of "
                    f"{guard.least_clients()} clients, but only {len(rows)} sent a usable one"
                )
            screened = guard.screen(sent, updates, cohort)
            updates = screened.updates
            if screened.dropped:
                log.warning("round %d: dropped clients %s", server_round, [*screened.dropped])
                kept = ~np.isin(cohort.ids, screened.dropped)
                updates = updates.of(kept)
                cohort = self._cohort(server_round, cohort.ids[kept].tolist())
        combined = combine_checked(aggregation, before, updates, cohort)
        self._state = replace(combined, round=server_round)
        if aggregation.evaluated(self._state) is not self._state.model:
            raise InputError(
                f"method {self.method.name!r} evaluates another model than the one that clients "
                "receive, which Flower's strategies cannot; for afl, set average: false"
            )
        # Integers, such as the number of batches that BatchNorm has seen, are not averaged.
        largest = {n: torch.stack([r.tree[n] for r in rows.values()]).amax(0) for n in counters}
        return {name: largest.get(name, self._state.model[name]) for name in sent}

    def _cohort(self, server_round: int, numbers: Iterable[int]) -> _Nodes:
        ids = np.array(sorted(numbers), np.int64)
        sizes = np.array([self._sizes[number] for number in ids.tolist()], np.int64)
        shares = torch.from_numpy(sizes.astype(np.float64))
        if self.method.weights != "size":
            shares = torch.ones_like(shares)
        key = fold(self.seed, server_round - 1, Purpose.SERVER)
        return _Nodes(self.method.name, ids, sizes, shares / shares.sum(), key, self._rounds)


@dataclass(frozen=True)
class _Row:
    """The answer of one client."""

    content: RecordDict
    tree: Tree
    size: int
    reports: dict[str, float]


@dataclass
class _Nodes:
    """A cohort that cannot be asked; see `equipoise.method.Cohort`."""

    method: str
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    prior: Tensor
    key: int
    rounds: int
    score: str = "accuracy"
    higher_is_better: bool = True
    groups: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = np.zeros(len(self.ids), np.int64)

    def train(self, *_: Any) -> NoReturn:
        """Refuse to train clients."""
        self._refuse()

    def evaluate(self, *_: Any) -> NoReturn:
        """Refuse to evaluate models on clients."""
        self._refuse()

    def ask(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to ask questions."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"method {self.method!r} asks clients questions, so it needs the client app of "
            f"Equipoise; {_VALID}"
        )


_VALID = "valid here: methods that change the aggregation only, such as qffl or median"


def _check_only_aggregates(method: Method) -> None:
    plain = methods.build("fedavg")
    sends_more = bool(method.aggregation.sends or method.aggregation.collects)
    # Representations are the answer to a question.
    asks = method.sees >= Sees.REPRESENTATIONS
    if (method.local, method.view) != (plain.local, plain.view) or sends_more or asks:
        raise InputError(
            f"method {method.name!r} changes what clients do, so it needs the client app of "
            f"Equipoise; {_VALID}"
        )
    if method.sampler != plain.sampler:
        raise InputError(
            f"method {method.name!r} chooses clients by {method.sampler.name!r}, but here Flower "
            "chooses them; leave out sampling"
        )


_Form = frozenset[tuple[str, str, int]]


def _form_of(content: RecordDict) -> _Form:
    """Return the names of all metrics with their records, and the lengths of lists; 0 is a number.

    Flower's functions that aggregate metrics need the same for all clients.
    """
    found = [
        (record, name, len(value) if isinstance(value, list) else 0)
        for record, metrics in content.metric_records.items()
        for name, value in metrics.items()
    ]
    return frozenset([*found, *((record, "", 0) for record in content.array_records)])


def _usual_form(contents: Iterable[RecordDict]) -> _Form:
    return max(
        Counter(map(_form_of, contents)).items(), key=lambda c: c[1], default=(frozenset(), 0)
    )[0]


def _is_statistic(name: str) -> bool:
    """Return whether a floating-point tensor is a statistic of BatchNorm."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _strangers(state: State, numbers: Iterable[int]) -> bool:
    known = {
        number for tree in state.server.values() if "ids" in tree for number in tree["ids"].tolist()
    }
    return not known.issuperset(numbers)
