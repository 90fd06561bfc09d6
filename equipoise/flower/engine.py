"""The engine that runs on Flower: its cohorts exchange messages with clients."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise import tasks
from equipoise.attributes import Counting
from equipoise.engine.cohort_checks import (
    check_rows,
    evaluations_for,
    question_of,
    refuse_second_training,
)
from equipoise.engine.contract import LOST, ClientsLost, Personal
from equipoise.engine.delivered import Delivered
from equipoise.engine.evaluation import Measured
from equipoise.engine.layout import Layout
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.flower.nodes import Answers, Nodes, reasons
from equipoise.flower.reports import EVALUATED, Declared, Number, Numbers, measured_by
from equipoise.flower.roster import Roster
from equipoise.flower.schema import ANSWER, KEPT, REPORTS, UPDATE, UPLOAD, Answer, Schema, alike
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
from equipoise.method import LocalRule, Method, Reports, Updates, mix_tree
from equipoise.metrics import Metric
from equipoise.random import Purpose, fold
from equipoise.tree import PERSONAL, Tree, digest

log = logging.getLogger("flwr.equipoise")


@dataclass
class Ledger:
    """The valid version of each client's memory: the last round in which its answer was used.

    Attributes
    ----------
    now, saved, best : dict
        The round for each client: the current one, that of the latest checkpoint, and that at the
        best round so far.
    durable : bool
        Whether there are checkpoints to resume from.
    """

    durable: bool = True
    now: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    best: dict[int, int] = field(default_factory=dict)

    def oldest(self, client: int) -> int:
        """Return the oldest version of a client's memory that may still be needed."""
        candidates = [self.saved.get(client, 0) if self.durable else self.now.get(client, 0)]
        candidates += [self.best.get(client, 0)] if self.best else []
        return min(candidates)


@dataclass(frozen=True)
class Moved:
    """The bytes of an exchange: of tensors and reports, down and up, and of everything else."""

    down: int
    up: int
    overhead: int = 0


class FlowerEngine:
    """Runs methods on Flower; see :class:`equipoise.engine.contract.Engine`.

    Parameters
    ----------
    nodes : Nodes
        The nodes through which clients are reached.
    run : callable
        Returns the name of the run, under which clients keep their memories.
    method : Method
        What is federated.
    roster : Roster
        The registered clients.
    model : nn.Module
        The model; methods that name parts need one with ``features`` and ``head``.
    machine : Machine
        Where the server combines, and in which arithmetic.
    seed : int
        Seed of the server's random numbers.
    rounds : int
        Number of rounds of the run.
    durable : bool
        Whether the run has checkpoints.
    both : bool
        Whether clients evaluate their personal models and the global one in the same exchange.
    holding : StackedEngine, optional
        An engine for the samples that the server holds, if there are any.
    """

    chunk = 1

    def __init__(
        self,
        nodes: Nodes,
        run: Callable[[], str],
        method: Method,
        roster: Roster,
        model: nn.Module,
        machine: Machine,
        seed: int = 0,
        rounds: int = 1,
        *,
        durable: bool = True,
        both: bool = False,
        holding: StackedEngine | None = None,
    ) -> None:
        self.holding = holding
        self.nodes, self.run, self.roster, self.machine, self.both = (
            nodes,
            run,
            roster,
            machine,
            both,
        )
        self.seed, self.rounds = seed, rounds
        self.delivered = Delivered()
        self.settings = nodes.settings
        self.network = Network(
            model, tasks.build(roster.task), machine.torch_device, machine.dtype, machine.autocast
        )
        self.layout = Layout(method.local, self.network.initial())
        self.ledger = Ledger(durable)
        self._finished = 0
        self.absent: dict[int, str] = {}
        self._evaluated = -1
        self.total_was_read = False
        self.not_replayed: str | None = None
        self.metrics: tuple[Metric, ...] = ()
        self.counting: Counting | None = None
        self._measured: tuple[Tree, Answers[Answer]] | None = None
        self._averaged: tuple[dict[int, int], Tree] | None = None

    def newcomers(self) -> list[int]:
        """Admit clients that have registered since the last call."""
        return self.nodes.newcomers()

    def cohort(self, method: Method, clients: NDArray[np.int64], round_: int) -> FlowerCohort:
        """Return the cohort of a round (counted from 0)."""
        return FlowerCohort(self, method, np.sort(clients), round_)

    def evaluate(
        self, model: Tree, clients: NDArray[np.int64], *, personal: Personal | None = None
    ) -> dict[str, Measured]:
        """Evaluate the global model, or the personal models derived from it, on the clients.

        Clients that do not answer, or answer with NaN, are named in ``absent``.
        """
        kind = "personal" if personal else "global"
        if personal and self._measured and _same(self._measured[0], model):
            answers = self._measured[1]
        else:
            answers = self._ask_for_metrics(model, clients, personal)
        self._measured = (model, answers) if self.both and not personal else None
        said = {client: answer.numbers for client, answer in answers.answered.items()}
        return measured_by(said, clients.tolist(), kind)

    def launch_evaluation(
        self, model: Tree, clients: NDArray[np.int64], *, personal: Personal | None = None
    ) -> Callable[[], dict[str, Measured]]:
        """Evaluate models, and return a function that returns the values."""
        measured = self.evaluate(model, clients, personal=personal)
        return lambda: measured

    @property
    def declared(self) -> Declared:
        """The values that clients may report."""
        return Declared(self.network.task, self.settings.max_loss, tuple(self.metrics))

    def _ask_for_metrics(
        self, model: Tree, clients: NDArray[np.int64], personal: Personal | None
    ) -> Answers[Answer]:
        kinds = "personal" if personal else "global personal" if self.both else "global"
        asked = [client for client in clients.tolist() if client in self.roster.known]
        contents = self.messages(asked, self._finished, model, models=kinds)
        requests = {client: ("evaluate.models", content) for client, content in contents.items()}

        def read(client: int, content: RecordDict) -> Answer:
            sizes = self.roster.known[client].sizes
            numbers: dict[str, dict[str, Number]] = {}
            for kind in kinds.split():
                numbers |= self.declared.of_model(kind, sizes)
            counted = {
                f"{kind}.{split}": sizes[split] for kind in kinds.split() for split in EVALUATED
            }
            return Schema(
                client=client, round=self._finished, numbers=numbers, counted=counted
            ).read(content)

        answers = self.nodes.insist(
            requests, self._finished - 1, read, min(self.settings.min_clients, len(asked))
        )
        # Global and personal models may be evaluated one after the other. A client that fails in
        # one of them is left out of both.
        before = self.absent if self._evaluated == self._finished else {}
        self.absent, self._evaluated = before | answers.failed, self._finished
        return answers

    def evaluate_server(self, model: Tree) -> dict[str, Measured]:
        """Return metrics of the global model on the server's samples, by split."""
        if self.holding is None:
            return {}
        self.holding.metrics = self.metrics
        return self.holding.evaluate_server(model)

    def averaged_kept(self, method: Method, model: Tree) -> Tree:
        """Ask clients for the parts of the shared model that they keep, and average them."""
        if self._averaged is None or self._averaged[0] != self.ledger.now:
            contents = self.messages(self.ledger.now, self._finished, model)
            requests = {client: ("query.kept", content) for client, content in contents.items()}
            names = [
                name for name in Layout(method.local, model).kept if not name.startswith(PERSONAL)
            ]
            expected = {name: model[name] for name in names}

            def read(client: int, content: RecordDict) -> Answer:
                return Schema(client=client, round=self._finished, trees={KEPT: expected}).read(
                    content
                )

            answers = self.nodes.insist(requests, self._finished - 1, read, 1)
            if not answers.answered:
                raise RunError(
                    f"no client sent the parts that it keeps ({reasons(answers.failed)})"
                )
            if answers.failed:
                log.warning("the mean of the kept parts is without %s", reasons(answers.failed))
            ids = sorted(answers.answered)
            prior = self.cohort(method, np.array(ids), 0).prior
            rows = [answers.answered[client].trees[KEPT] for client in ids]
            self._averaged = dict(self.ledger.now), mix_tree(self.stacked(rows, names), prior)
        return self._averaged[1]

    def kept_parts(self, method: Method, model: Tree, clients: NDArray[np.int64]) -> Tree:
        """Return nothing: parts that clients keep stay there; see :meth:`refuse_keeping_local`."""
        return {}

    def refuse_keeping_local(self, method: Method) -> None:
        """Refuse to save local models if they differ from what clients send."""
        kept = [name for name in self.layout.kept if not name.startswith(PERSONAL)]
        if kept:
            raise InputError(
                f"evaluation.keep_local: clients of method {method.name!r} keep parts of the model "
                f"({kept[0]}), which do not leave them on Flower; choose a method without such "
                "parts, or run it in one process"
            )
        if self.settings.privacy is not None:
            raise InputError(
                "evaluation.keep_local: with flower.privacy the server receives clipped or noisy "
                "updates, and not the models that clients have trained; leave out one of them"
            )

    def personal_models(
        self, model: Tree, personal: Personal, clients: NDArray[np.int64]
    ) -> tuple[Tree, Tree]:
        """Return the model without personal parts, which stay on clients; see :meth:`hand_out`."""
        return dict(model), {}

    @property
    def remembering(self) -> list[int]:
        """Always empty: memories are on the clients' disks."""
        return []

    def hand_out(self, model: Tree, round_: int, *, personal: bool, best: bool) -> dict[int, str]:
        """Make every client save its final model; return the reason for each that failed.

        Parameters
        ----------
        model : Tree
            The global model of the selected round.
        round_ : int
            That round.
        personal : bool
            Whether clients derive personal models from it.
        best : bool
            Whether the round is the best one rather than the last.
        """
        versions = self.ledger.best if best else self.ledger.now
        contents = self.messages(self.roster.known, round_, model, versions, personal=personal)
        requests = {client: ("query.adopt", content) for client, content in contents.items()}
        answers = self.nodes.ask(requests, round_ - 1)
        return answers.failed

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def defers(self) -> bool:
        """Always false: clients train elsewhere."""
        return False

    def while_busy(self, work: Callable[[], None]) -> None:
        """Do some work now: clients train elsewhere."""
        work()

    def commit(self, cohort: FlowerCohort) -> None:
        """Mark the memories that a cohort wrote in its round as the newest ones."""
        self._finished = cohort.round + 1
        for name in cohort.delivers:
            self.delivered.mark(name, cohort.ids)
        self.ledger.now |= {int(client): self._finished for client in cohort.ids}

    def keep(self) -> None:
        """Keep the memories of this round, which is the best one so far."""
        self.ledger.best = dict(self.ledger.now)

    def export(self) -> Tree:
        """Return the ledger, and which clients hold the trees that are sent only once."""
        self.ledger.saved = dict(self.ledger.now)
        clients = sorted(self.ledger.now)
        rounds = {"now": self.ledger.now, "best": self.ledger.best}
        columns = {name: [of.get(client, 0) for client in clients] for name, of in rounds.items()}
        rows = {
            n: torch.tensor(values, dtype=torch.int64)
            for n, values in {"clients": clients, **columns}.items()
        }
        return {**rows, **self.delivered.export()}

    def restore(self, tensors: Tree) -> None:
        """Read what :meth:`export` wrote."""
        columns = self.delivered.restore(tensors)
        if columns:
            clients, now, best = (columns[name].tolist() for name in ("clients", "now", "best"))
            self.ledger.now = dict(zip(clients, now, strict=True))
            self.ledger.saved = dict(self.ledger.now)
            self._finished = max(now, default=0)
            self.ledger.best = {
                c: version for c, version in zip(clients, best, strict=True) if version
            }

    # ---- messages --------------------------------------------------------------------------------

    def messages(
        self,
        clients: Iterable[int],
        round_: int,
        model: Tree,
        versions: Mapping[int, int] | None = None,
        **settings: Any,
    ) -> dict[int, RecordDict]:
        """Return the contents of messages to clients: a model and settings.

        The settings include the version of the memory. Tensors that are not trained and shared are
        part of the initial model of both sides. They are sent only if the server has changed them.
        A hash confirms that both sides have the same values.
        """
        versions = self.ledger.now if versions is None else versions
        initial = self.network.initial()
        sent = self.layout.travelling(model, initial)
        record = to_record({name: model[name] for name in sent})
        held = digest({name: initial[name] for name in model if name not in sent})
        frozen = self.network.frozen_digest or ""
        settings |= {"run": self.run(), "round": round_, "held": held, "frozen": frozen}
        contents = {}
        for client in clients:
            memory = {"version": versions.get(client, 0), "oldest": self.ledger.oldest(client)}
            contents[client] = RecordDict(
                {"model": record, "settings": ConfigRecord(settings | memory)}
            )
        return contents

    def count(
        self, requests: Mapping[int, tuple[str, RecordDict]], answers: Answers[Answer]
    ) -> Moved:
        """Return the bytes of an exchange, without those for evaluation."""
        sent = [without_evaluation(content) for _, content in requests.values()]
        came = [without_evaluation(answer.content) for answer in answers.answered.values()]
        moved = Moved(down=sum(map(tensor_bytes_of, sent)), up=sum(map(tensor_bytes_of, came)))
        whole = sum(map(bytes_of, [*sent, *came]))
        return dataclasses.replace(moved, overhead=whole - moved.down - moved.up)

    def stacked(self, rows: list[Tree], names: Iterable[str]) -> Tree:
        """Stack clients' tensors on the server's device."""
        return {
            name: torch.stack([row[name] for row in rows]).to(self.network.device) for name in names
        }


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
        model = shared["model"]
        self._refuse_unprotected(local)
        settings: dict[str, Any] = {"reports": json.dumps(sorted(self.wanted_reports))}
        if local != self.method.local:
            raise InputError(
                f"method {self.method.name!r} trains with another local rule than its own, "
                f"{type(local).__name__}; on Flower clients follow only the rule of the experiment"
            )
        once = {
            n: self.engine.delivered.digest_of(t)
            for n, t in shared.items()
            if n in self._sends_once
        }
        self.delivers = set(once.values())
        settings["once"] = json.dumps(once)
        more = {f"sent.{name}": to_record(tree) for name, tree in shared.items() if name != "model"}
        contents = self.engine.messages(self.ids.tolist(), self.round, model, **settings)
        withheld: dict[int, frozenset[str]] = {}
        for row, (client, content) in enumerate(contents.items()):
            held = {
                n for n, known in once.items() if not self.engine.delivered.missing(known, [client])
            }
            withheld[client] = frozenset(held)
            content.update(
                {
                    name: record
                    for name, record in more.items()
                    if name.removeprefix("sent.") not in held
                }
            )
            content["each"] = to_record({name: rows[row] for name, rows in each.items()})
            if self.evaluates_local:
                content[EVALUATION] = ConfigRecord({LOCAL: True})
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
                withheld=withheld[client],
            ).read(content)

        self.evaluations += len(self.ids) * evaluations_for(self.method.aggregation.needs)
        answers = self._insist("train", contents, read)
        lacking = {
            client: contents[client] for client, answer in answers.answered.items() if answer.lacks
        }
        if lacking:
            for client, content in lacking.items():
                log.warning(
                    "client %d no longer has a tree that is sent once; it is sent again", client
                )
                self.engine.delivered.unmark(client)
                content.update(more)
                del answers.answered[client]
                withheld[client] = frozenset()
            again = self._insist("train", lacking, read, self._enough - len(answers.answered))
            answers.answered |= again.answered
            answers.failed |= again.failed
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

    def evaluate(self, params: Tree, split: str) -> Reports:
        """Ask for loss and metrics of a model on the clients' own split."""

        def read(client: int, content: RecordDict) -> Answer:
            needed = bool(self.engine.roster.known[client].sizes[split])
            numbers = {REPORTS: self.engine.declared.measured(f"{split} {{}}", needed=needed)}
            return self._schema(client, numbers=numbers).read(content)

        self.evaluations += len(self.ids)
        contents = self.engine.messages(self.ids.tolist(), self.round, params, split=split)
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
        moved = self.engine.count(requests, answers)
        self.bytes_down += moved.down
        self.bytes_up += moved.up
        self.bytes_overhead += moved.overhead
        return answers

    @property
    def _sends_once(self) -> tuple[str, ...]:
        return self.method.aggregation.sends_once

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


def _reports(rows: list[Answer]) -> Reports:
    reports = [row.numbers[REPORTS] for row in rows]
    return {
        name: torch.tensor([report[name] for report in reports], dtype=torch.float64)
        for name in reports[0]
    }


def _same(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(tensor is b[name] for name, tensor in a.items())
