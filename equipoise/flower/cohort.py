"""The cohorts of the engine on Flower: the clients of one round, reached by messages."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from equipoise.engine.cohort_checks import (
    check_rows,
    evaluations_for,
    question_of,
    refuse_second_training,
)
from equipoise.engine.contract import LOST, ClientsLost, Launched
from equipoise.engine.evaluation import Measured
from equipoise.engine.layout import Layout
from equipoise.errors import InputError, RunError
from equipoise.flower.nodes import Answers, reasons
from equipoise.flower.reports import EVALUATED, Numbers, measured_by
from equipoise.flower.schema import ANSWER, REPORTS, UPDATE, UPLOAD, Answer, Schema, alike
from equipoise.flower.shares import capped_shares
from equipoise.flower.wire import (
    EVALUATION,
    LOCAL,
    bytes_of,
    pack,
    tensor_bytes_of,
    to_record,
    unpack,
    without_evaluation,
)
from equipoise.method import LocalRule, Method, Reports, Updates
from equipoise.random import Purpose, fold
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.flower.engine import FlowerEngine

log = logging.getLogger("flwr.equipoise")


class FlowerCohort:
    """The clients of one round; see :class:`equipoise.engine.contract.RoundCohort`.

    After training, ``ids`` and the other attributes contain only clients whose answers are used;
    ``left_out`` lists the others. A client that does not answer a later question is dropped,
    together with its update.
    """

    def __init__(
        self, engine: FlowerEngine, method: Method, clients: NDArray[np.int64], round_: int
    ) -> None:
        self.engine, self.method, self.round = engine, method, round_
        self.wanted_reports = set(method.aggregation.needs)
        self.evaluates_local = False
        self._evaluated: dict[int, Numbers] = {}
        self.left_out: dict[int, str] = {}
        self.bytes_down = self.bytes_up = self.bytes_overhead = 0
        self.messages = self.evaluations = 0
        self.key = fold(engine.seed, round_, Purpose.SERVER)
        self.score, self.higher_is_better = (
            engine.network.task.score,
            engine.network.task.higher_is_better,
        )
        self.delivers: set[str] = set()
        # Number of clients that answered and whose updates the server then dropped.
        self._dropped = 0
        self._trained = False
        self._gather(clients)

    @property
    def rounds(self) -> int:
        """The number of rounds of the run.

        If the method has read this, the run cannot be extended.
        """
        self.engine.total_was_read = True
        return self.engine.rounds

    @property
    def names(self) -> tuple[str, ...]:
        """The names with which the clients have registered."""
        return tuple(map(self.engine.roster.client_name, self.ids.tolist()))

    @property
    def clients(self) -> None:
        """Not known: clients may join at any time."""

    def _gather(self, clients: NDArray[np.int64]) -> None:
        self.ids = clients
        self.sizes = self.engine.roster.split("train").sizes[clients]
        self.groups = self.engine.roster.groups[clients]
        counts = torch.from_numpy(self.sizes.astype(np.float64))
        by_size = self.method.weights == "size"
        shares = counts / counts.sum() if by_size else torch.full_like(counts, 1 / len(counts))
        self.prior = capped_shares(shares, self.engine.settings.max_share)

    def train(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> Updates:
        """Train every client and collect updates; see :meth:`equipoise.method.Cohort.train`."""
        refuse_second_training(self._trained)
        self._trained = True
        self._refuse_unprotected(local)
        if local != self.method.local:
            raise InputError(
                f"method {self.method.name!r} trains with another local rule than its own, "
                f"{type(local).__name__}; on Flower clients follow only the rule of the experiment"
            )
        model = shared["model"]
        messages = self._messages_of_training(shared, each)
        expected = {name: model[name] for name in Layout(local, model).shared}
        uploads = [f"{UPLOAD}{name}" for name in local.uploads]

        def read(client: int, content: RecordDict) -> Answer:
            sizes = self.engine.roster.known[client].sizes
            reports = self.wanted_reports | ({"method_terms"} if local.adds_terms else set())
            numbers = {REPORTS: self.engine.declared.of_training(reports, sizes)}
            counted = {}
            if self.evaluates_local:
                numbers |= self.engine.declared.of_model(LOCAL, sizes)
                counted = {f"{LOCAL}.{split}": sizes[split] for split in EVALUATED}
            return self._schema(
                client,
                trees={UPDATE: expected},
                open_trees=tuple(uploads),
                numbers=numbers,
                counted=counted,
                withheld=messages.withheld[client],
            ).read(content)

        self.evaluations += len(self.ids) * evaluations_for(self.method.aggregation.needs)
        answers = self._answers_of_training(messages, read)
        self.left_out |= answers.failed
        kept = alike(answers.answered)
        self.left_out |= {
            client: "answered with uploads of other shapes"
            for client in set(answers.answered) - set(kept)
        }
        self._require(len(kept))
        if self.left_out:
            log.warning("round %d continues without %s", self.round + 1, reasons(self.left_out))
        self._gather(np.array(sorted(kept)))
        rows = [kept[client] for client in sorted(kept)]
        if self.evaluates_local:
            self._evaluated = {client: answer.numbers for client, answer in kept.items()}
        stack = self.engine.stacked([row.trees[UPDATE] for row in rows], expected)
        buffers = self.engine.network.buffers
        return Updates(
            params={n: t for n, t in stack.items() if n not in buffers},
            buffers={n: t for n, t in stack.items() if n in buffers},
            uploads={name.removeprefix(UPLOAD): self._uploads(rows, name) for name in uploads},
            reports=_reports(rows),
        )

    def launch_training(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> Launched:
        """Like :meth:`train`, which waits for the clients."""
        return Launched.ended(self.train(shared, each, local))

    def _messages_of_training(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor]
    ) -> _Messages:
        delivered, sends_once = self.engine.delivered, self.method.aggregation.sends_once
        once = {n: delivered.digest_of(t) for n, t in shared.items() if n in sends_once}
        self.delivers = set(once.values())
        contents = self.engine.messages(
            self.ids.tolist(),
            self.round,
            shared["model"],
            reports=json.dumps(sorted(self.wanted_reports)),
            once=json.dumps(once),
        )
        more = {name: to_record(tree) for name, tree in shared.items() if name != "model"}
        withheld: dict[int, frozenset[str]] = {}
        for row, (client, content) in enumerate(contents.items()):
            held = frozenset(
                n for n, known in once.items() if not delivered.missing(known, [client])
            )
            withheld[client] = held
            content.update(
                {f"sent.{name}": record for name, record in more.items() if name not in held}
            )
            content["each"] = to_record({name: rows[row] for name, rows in each.items()})
            if self.evaluates_local:
                content[EVALUATION] = ConfigRecord({LOCAL: True})
        return _Messages(contents, more, withheld)

    def _answers_of_training(
        self, messages: _Messages, read: Callable[[int, RecordDict], Answer]
    ) -> Answers[Answer]:
        """Ask clients to train; ask again those that have lost a tree that is sent only once."""
        answers = self._insist("train", messages.contents, read)
        lacking = [client for client, answer in answers.answered.items() if answer.lacks]
        for client in lacking:
            log.warning(
                "client %d no longer has a tree that is sent once; it is sent again", client
            )
            self.engine.delivered.unmark(client)
            messages.complete(client)
            del answers.answered[client]
        if lacking:
            contents = {client: messages.contents[client] for client in lacking}
            again = self._insist("train", contents, read, self._enough - len(answers.answered))
            answers.answered |= again.answered
            answers.failed |= again.failed
        return answers

    def evaluate(self, params: Tree, split: str) -> Reports:
        """Ask for loss and metrics of a model on the clients' own split."""

        def read(client: int, content: RecordDict) -> Answer:
            needed = bool(self.engine.roster.known[client].sizes[split])
            numbers = {REPORTS: self.engine.declared.measured(f"{split} {{}}", needed=needed)}
            return self._schema(client, numbers=numbers).read(content)

        self.evaluations += len(self.ids)
        versions = None
        if self._trained and self.engine.layout.kept_of_shared:
            # The kept parts as trained in this round, which are not committed yet.
            versions = dict.fromkeys(self.ids.tolist(), self.round + 1)
        contents = self.engine.messages(
            self.ids.tolist(), self.round, params, versions, split=split
        )
        return _reports(self._all("evaluate", contents, read))

    def ask(
        self,
        question: str,
        *args: Any,
        model: Tree | None = None,
        split: str = "train",
        each: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Ask every client a question of the local rule; see `equipoise.method.Cohort.ask`."""
        question_of(self.method, question)
        if self.engine.settings.privacy is not None:
            raise InputError(
                f"flower.privacy protects parameters, but method {self.method.name!r} also asks "
                f"clients for {question!r}; choose another method or leave flower.privacy out"
            )
        check_rows(each or {}, len(self.ids))
        text, tensors = pack(list(args))
        asked: dict[str, Any] = {
            "question": question,
            "arguments": text,
            "split": split,
            "about_a_model": model is not None,
        }
        contents = self.engine.messages(self.ids.tolist(), self.round, model or {}, **asked)
        record = to_record(tensors)
        for row, content in enumerate(contents.values()):
            content["arguments"] = record
            content["each"] = to_record({name: rows[row] for name, rows in (each or {}).items()})

        def read(client: int, content: RecordDict) -> Answer:
            return self._schema(client, open_trees=(ANSWER,), question=True).read(content)

        answers = self._all("query.ask", contents, read)
        parts = [answer.trees[ANSWER] for answer in answers]
        device = self.engine.network.device
        joined = {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}
        return unpack(answers[0].form, joined)

    def _schema(self, client: int, **expected: Any) -> Schema:
        largest = 1e6 * self.engine.settings.max_answer
        return Schema(client=client, round=self.round, largest=largest, **expected)

    def without(self, ids: Iterable[int], dropped: str | None = None) -> FlowerCohort:
        """Return the cohort without some clients; see `equipoise.engine.contract.RoundCohort`."""
        lost = set(ids)
        rest = copy.copy(self)
        rest.left_out = {**dict.fromkeys(lost, dropped or LOST), **self.left_out}
        rest._dropped += len(lost) if dropped else 0
        rest._require(len(self.ids) - len(lost))
        rest._gather(np.setdiff1d(self.ids, list(lost)))
        return rest

    def _insist(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        read: Callable[[int, RecordDict], Answer],
        enough: int | None = None,
    ) -> Answers[Answer]:
        requests = {client: (kind, content) for client, content in contents.items()}
        answers = self.engine.nodes.insist(
            requests, self.round, read, self._enough if enough is None else enough
        )
        self.messages += len(requests)
        moved = _moved(requests, answers)
        self.bytes_down += moved.down
        self.bytes_up += moved.up
        self.bytes_overhead += moved.overhead
        return answers

    def _all(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        read: Callable[[int, RecordDict], Answer],
    ) -> list[Answer]:
        answers = self._insist(kind, contents, read)
        for client in set(answers.answered) - set(alike(answers.answered)):
            del answers.answered[client]
            answers.failed[client] = "answered in another form than the others"
        if answers.failed:
            self.left_out |= answers.failed
            self._require(len(answers.answered))
            raise ClientsLost(answers.failed)
        return [answers.answered[client] for client in sorted(answers.answered)]

    @property
    def _enough(self) -> int:
        return min(self.engine.settings.min_clients, len(self.ids))

    def _require(self, count: int) -> None:
        wanted = self.engine.settings.min_clients
        count += self._dropped
        if count < wanted:
            raise RunError(
                f"round {self.round + 1}: {count} of {count - self._dropped + len(self.left_out)} "
                f"clients answered, and flower.min_clients is {wanted} ({reasons(self.left_out)}); "
                "the last checkpoint is intact"
            )

    @property
    def local_metrics(self) -> dict[str, Measured]:
        """Loss and metrics of local models; see :class:`equipoise.engine.contract.RoundCohort`."""
        return measured_by(self._evaluated, self.ids.tolist(), LOCAL) if self._evaluated else {}

    def _uploads(self, rows: list[Answer], record: str) -> Tree:
        trees = [row.trees[record] for row in rows]
        return self.engine.stacked(trees, trees[0])

    def _refuse_unprotected(self, local: LocalRule) -> None:
        """Refuse differential privacy if clients send more than the protected parameters."""
        if self.engine.settings.privacy is None:
            return
        self.engine.settings.privacy.check(local)
        if self.engine.network.buffers:
            raise InputError(
                "flower.privacy would put noise on the statistics of BatchNorm; choose a model "
                "with GroupNorm"
            )


@dataclass(frozen=True)
class _Messages:
    """The messages of training.

    Attributes
    ----------
    contents : dict
        The content for each client.
    more : dict
        The records of all trees that are sent beside the model.
    withheld : dict
        The names of trees that are not sent to a client, because it has them.
    """

    contents: dict[int, RecordDict]
    more: dict[str, ArrayRecord]
    withheld: dict[int, frozenset[str]]

    def complete(self, client: int) -> None:
        """Add the trees that were withheld from a client."""
        self.contents[client].update({f"sent.{name}": tree for name, tree in self.more.items()})
        self.withheld[client] = frozenset()


@dataclass(frozen=True)
class _Moved:
    """The bytes of an exchange: of tensors and reports, down and up, and of everything else."""

    down: int
    up: int
    overhead: int


def _moved(requests: Mapping[int, tuple[str, RecordDict]], answers: Answers[Answer]) -> _Moved:
    """Return the bytes of an exchange, without those for evaluation."""
    sent = [without_evaluation(content) for _, content in requests.values()]
    came = [without_evaluation(answer.content) for answer in answers.answered.values()]
    down, up = sum(map(tensor_bytes_of, sent)), sum(map(tensor_bytes_of, came))
    return _Moved(down, up, overhead=sum(map(bytes_of, [*sent, *came])) - down - up)


def _reports(rows: list[Answer]) -> Reports:
    reports = [row.numbers[REPORTS] for row in rows]
    return {
        name: torch.tensor([report[name] for report in reports], dtype=torch.float64)
        for name in reports[0]
    }
