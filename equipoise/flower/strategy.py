"""Aggregations and guards of Equipoise for Flower apps with a ``ClientApp`` of their own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray
from torch import Tensor

from equipoise import methods
from equipoise.checks import name_and_options
from equipoise.errors import InputError, RunError, few
from equipoise.flower.checks import Misfit
from equipoise.flower.registration import LARGEST_SIZE
from equipoise.flower.reports import Number
from equipoise.flower.schema import tree_like
from equipoise.flower.wire import from_record, to_record
from equipoise.method import Cohort, Method, Sees, State, Updates, combine_checked
from equipoise.random import Purpose, fold
from equipoise.tree import Tree, unusable

log = logging.getLogger("flwr.equipoise")


class AggregationStrategy(FedAvg):
    """Flower's ``FedAvg`` strategy with an aggregation, and perhaps a guard, of Equipoise.

    It is for apps that keep their own ``ClientApp`` with its own training loop. Clients are chosen,
    evaluated and waited for by Flower. Nothing is written to disk.

    Clients answer as they do for ``FedAvg``: with one ``ArrayRecord`` and one ``MetricRecord``, in
    which ``num-examples`` is their number of training samples. If the aggregation ``needs`` reports
    such as ``loss_before``, the loss of the received model on the client's training data, the
    ``MetricRecord`` must contain them under these names. Answers with other names or shapes, with
    NaN or without a report are left out with a warning. If none of the answers of a round can be
    used, the run ends with a ``RunError`` that contains the reasons. If no client answers, the
    model stays as it is.

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
    equipoise.flower.strategy.UnsupportedMethod: method 'ditto' changes what clients do, so it
    needs the client app of Equipoise; valid here: methods that change the aggregation only, such as
    qffl or median
    """

    def __init__(self, method: str | Mapping[str, Any], *, seed: int = 0, **options: Any) -> None:
        name, chosen = name_and_options(method, "method")
        self.method = methods.build(name, **chosen)
        _check_only_aggregates(self.method)
        _try_rounds(self.method)
        self.seed = seed
        super().__init__(**options)
        self._begin(rounds=0)

    def _begin(self, rounds: int) -> None:
        self._rounds = rounds
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
        """Run all rounds; see ``flwr.serverapp.strategy.Strategy.start``.

        The result always has arrays: those of the last round in which clients answered, or the
        initial ones if there is none.
        """
        self._begin(num_rounds)
        result = super().start(grid, initial_arrays, num_rounds, *more, **named)
        if not result.arrays:
            log.warning("no round has changed the model: the result has the initial arrays")
            result.arrays = initial_arrays
        return result

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
        if not valid:
            log.warning("round %d: no client answered, so the model stays as it is", server_round)
            return None, None
        sent = from_record(self._sent)
        rows: dict[int, _Row] = {}
        for node, row in self._usable(server_round, valid, sent).items():
            number = self._number_of.setdefault(node, len(self._number_of))
            rows[number] = row
            self._sizes[number] = row.size
        rows = dict(sorted(rows.items()))
        model = self._combine(server_round, sent, rows)
        used = [row.content for row in rows.values()]
        return to_record(model), self.train_metrics_aggr_fn(used, self.weighted_by_key)

    def _usable(self, server_round: int, replies: Iterable[Message], sent: Tree) -> dict[int, _Row]:
        """Return the answers that can be used, by node. Log why others cannot."""
        rows: dict[int, _Row] = {}
        reasons: dict[int, str] = {}
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            try:
                rows[reply.metadata.src_node_id] = self._read(reply.content, sent)
            except Misfit as error:
                reasons[reply.metadata.src_node_id] = str(error)
        if not rows:
            needed = _listed((self.weighted_by_key, *self.needs))
            raise RunError(
                f"round {server_round}: none of the answers can be used: {_summarized(reasons)}. "
                f"Method {self.method.name!r} needs {needed} in the MetricRecord of every client"
            )
        usual = _usual_form(row.content for row in rows.values())
        others = [node for node, row in rows.items() if _form_of(row.content) != usual]
        reasons |= dict.fromkeys(others, "answered with other records or metrics than most clients")
        for node, reason in reasons.items():
            log.warning("round %d continues without node %d: %s", server_round, node, reason)
        return {node: row for node, row in rows.items() if node not in others}

    def _read(self, content: RecordDict, sent: Tree) -> _Row:
        if (len(content.array_records), len(content.metric_records)) != (1, 1):
            raise Misfit("answered without exactly one ArrayRecord and one MetricRecord")
        (arrays,), (metrics,) = content.array_records.values(), content.metric_records.values()
        missing = [name for name in (self.weighted_by_key, *self.needs) if name not in metrics]
        if missing:
            raise Misfit(f"answered without {_listed(missing)} in its MetricRecord")
        size = Number(called=self.weighted_by_key, low=1.0, high=LARGEST_SIZE).read(
            metrics[self.weighted_by_key]
        )
        reports = {name: _report(name).read(metrics[name]) for name in self.needs}
        return _Row(content, tree_like(arrays, sent), int(size), reports)

    def _combine(self, server_round: int, sent: Tree, rows: Mapping[int, _Row]) -> Tree:
        aggregation = self.method.aggregation
        floats = [name for name, tensor in sent.items() if tensor.is_floating_point()]
        updates, cohort = self._screened(
            server_round, sent, self._stacked(rows, floats), self._cohort(server_round, rows)
        )
        before = self._before(server_round, sent, rows)
        after = replace(combine_checked(aggregation, before, updates, cohort), round=server_round)
        _check_evaluates_what_it_sends(self.method, after)
        new = {name: tensor.unsqueeze(0) for name, tensor in after.model.items()}
        if wrong := unusable([new], sent).get(0):
            raise RunError(
                f"round {server_round}: method {self.method.name!r} has computed a model with "
                f"{wrong.removeprefix('answered with ')}, although no update has it; clients "
                f"reported {_ranges(updates.reports)}"
            )
        self._state = after
        # Integers, such as the number of batches that BatchNorm has seen, are not averaged.
        return {
            name: after.model[name]
            if name in floats
            else torch.stack([row.tree[name] for row in rows.values()]).amax(0)
            for name in sent
        }

    def _before(self, server_round: int, sent: Tree, numbers: Iterable[int]) -> State:
        """Return the state before the round, in which all clients that answered are known."""
        aggregation = self.method.aggregation
        before = State(server_round - 1, sent)
        if self._state is not None:
            before = replace(before, server=self._state.server)
        if aggregation.needs_everyone and (self._state is None or _strangers(before, numbers)):
            everyone = self._cohort(server_round, self._sizes)
            begin = aggregation.begin if self._state is None else aggregation.admit
            before = begin(before, everyone)
        return before

    def _stacked(self, rows: Mapping[int, _Row], names: Iterable[str]) -> Updates:
        stack = {name: torch.stack([row.tree[name] for row in rows.values()]) for name in names}
        return Updates(
            params={name: t for name, t in stack.items() if not _is_statistic(name)},
            buffers={name: t for name, t in stack.items() if _is_statistic(name)},
            uploads={},
            reports=_Reports(
                self.method.name,
                {
                    name: torch.tensor(
                        [row.reports[name] for row in rows.values()], dtype=torch.float64
                    )
                    for name in self.needs
                },
            ),
        )

    def _screened(
        self, server_round: int, sent: Tree, updates: Updates, cohort: Cohort
    ) -> tuple[Updates, Cohort]:
        """Return the updates that the guard leaves, and their clients; all without a guard."""
        guard = self.method.guard
        if guard is None:
            return updates, cohort
        if len(cohort.ids) < guard.least_clients():
            raise RunError(
                f"round {server_round}: the guard {guard.name!r} needs the updates of "
                f"{guard.least_clients()} clients, but only {len(cohort.ids)} sent a usable one"
            )
        screened = guard.screen(sent, updates, cohort)
        if not screened.dropped:
            return screened.updates, cohort
        nodes = list(self._number_of)
        log.warning(
            "round %d continues without the nodes %s: dropped by the guard %r",
            server_round,
            ", ".join(str(nodes[number]) for number in screened.dropped),
            guard.name,
        )
        kept = ~np.isin(cohort.ids, screened.dropped)
        return screened.updates.of(kept), self._cohort(server_round, cohort.ids[kept].tolist())

    def _cohort(self, server_round: int, numbers: Iterable[int]) -> Cohort:
        ids = np.array(sorted(numbers), np.int64)
        sizes = np.array([self._sizes[number] for number in ids.tolist()], np.int64)
        key = fold(self.seed, server_round - 1, Purpose.SERVER)
        return _cohort_of(self.method, ids, sizes, key, self._rounds)


@dataclass(frozen=True)
class _Row:
    """The answer of one client."""

    content: RecordDict
    tree: Tree
    size: int
    reports: dict[str, float]


@dataclass
class _Nodes:
    """A cohort that cannot be asked and has no groups; see `equipoise.method.Cohort`."""

    method: str
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    prior: Tensor
    key: int
    rounds: int
    score: str = "accuracy"
    higher_is_better: bool = True

    @property
    def groups(self) -> NoReturn:
        """Refuse to return groups."""
        raise _unsupported(self.method, "uses groups of clients")

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
        raise _unsupported(self.method, "asks clients questions")


def _cohort_of(
    method: Method, ids: NDArray[np.int64], sizes: NDArray[np.int64], key: int, rounds: int
) -> Cohort:
    shares = torch.from_numpy(sizes.astype(np.float64))
    if method.weights != "size":
        shares = torch.ones_like(shares)
    return cast(Cohort, _Nodes(method.name, ids, sizes, shares / shares.sum(), key, rounds))


class _Reports(dict[str, Tensor]):
    """The reports of clients. Others than those that the aggregation needs are refused."""

    def __init__(self, method: str, reports: Mapping[str, Tensor]) -> None:
        super().__init__(reports)
        self._method = method

    def __missing__(self, name: str) -> NoReturn:
        raise _unsupported(self._method, f"with these options uses the report {name!r}")


class UnsupportedMethod(InputError):
    """A method that needs more than a strategy of Flower can do."""


def _unsupported(method: str, does: str) -> UnsupportedMethod:
    return UnsupportedMethod(
        f"method {method!r} {does}, so it needs the client app of Equipoise; valid here: methods "
        "that change the aggregation only, such as qffl or median"
    )


def _check_only_aggregates(method: Method) -> None:
    plain = methods.build("fedavg")
    sends_more = bool(method.aggregation.sends or method.aggregation.collects)
    # Representations are the answer to a question.
    asks = method.sees >= Sees.REPRESENTATIONS
    if (method.local, method.view) != (plain.local, plain.view) or sends_more or asks:
        raise _unsupported(method.name, "changes what clients do")
    if method.sampler != plain.sampler:
        raise InputError(
            f"method {method.name!r} chooses clients by {method.sampler.name!r}, but here Flower "
            "chooses them; leave out sampling"
        )


def _check_evaluates_what_it_sends(method: Method, state: State) -> None:
    if method.aggregation.evaluated(state) is not state.model:
        raise UnsupportedMethod(
            f"method {method.name!r} evaluates another model than the one that clients receive, "
            "which Flower's strategies cannot; for afl, set average: false"
        )


# Some methods ask questions only in every n-th round, such as faa with ``every``.
_TRIED_ROUNDS = 20


def _try_rounds(method: Method) -> None:
    """Combine two updates of a small model, so that a method is refused before clients train."""
    aggregation, rounds = method.aggregation, _TRIED_ROUNDS
    names = ("features.weight", "head.weight")
    ones = np.ones(2, np.int64)
    cohort = _cohort_of(method, np.arange(2), ones, key=0, rounds=rounds)
    updates = Updates(
        params={name: torch.ones(2, 1, 1) for name in names},
        buffers={},
        uploads={},
        reports=_Reports(method.name, {name: torch.ones(2).double() for name in aggregation.needs}),
    )
    state = State(0, {name: torch.zeros(1, 1) for name in names})
    try:
        if aggregation.needs_everyone:
            state = aggregation.begin(state, cohort)
        for number in range(rounds):
            state = combine_checked(aggregation, replace(state, round=number), updates, cohort)
            _check_evaluates_what_it_sends(method, replace(state, round=number + 1))
    except UnsupportedMethod:
        raise
    except Exception:
        # Aggregations of users may need a model with other names. They are tried in round 1.
        log.debug("method %r could not be tried", method.name, exc_info=True)


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


def _report(name: str) -> Number:
    """Return which values of a report are valid."""
    if name in ("lr", "gradient_weight"):
        # Aggregations divide by them.
        return Number(called=name, low=1e-12)
    # A client without validation data has no validation loss. It reports NaN.
    return Number(called=name, needed=not name.startswith("val_"))


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _summarized(reasons: Mapping[int, str]) -> str:
    """Return each reason once, with its nodes."""
    nodes: dict[str, list[int]] = {}
    for node, reason in reasons.items():
        nodes.setdefault(reason, []).append(node)
    shown = [
        f"{reason} ({'node' if len(found) == 1 else 'nodes'} {few(found)})"
        for reason, found in nodes.items()
    ]
    more = [f"and {len(shown) - 3} more reasons"] if len(shown) > 3 else []
    return "; ".join(shown[:3] + more)


def _ranges(reports: Mapping[str, Tensor]) -> str:
    """Return the smallest and the largest value of each report."""
    found = [
        f"{name} from {values.min():g} to {values.max():g}" for name, values in reports.items()
    ]
    return _listed(found) if found else "nothing else"
