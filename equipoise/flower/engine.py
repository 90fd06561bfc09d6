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
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise import tasks
from equipoise.engine.cohort import check_rows, evaluations_for, question_of, refuse_second_training
from equipoise.engine.contract import LOST, ClientsLost, Personal
from equipoise.engine.delivered import Delivered
from equipoise.engine.evaluation import Measured
from equipoise.engine.layout import Layout
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine
from equipoise.errors import InputError, RunError
from equipoise.flower.nodes import Answers, Nodes, reasons
from equipoise.flower.roster import Roster
from equipoise.flower.wire import (
    EVALUATION,
    LOCAL,
    bytes_of,
    from_record,
    numbers_of,
    pack,
    settings_of,
    tensor_bytes_of,
    to_record,
    unpack,
    without_evaluation,
)
from equipoise.method import LocalRule, Method, Reports, Updates, mix_tree
from equipoise.metrics import COLUMNS, Metric
from equipoise.random import Purpose, fold
from equipoise.tree import PERSONAL, Tree, digest, unusable

log = logging.getLogger("flwr.equipoise")

SPLITS = ("val", "test")


@dataclass
class Ledger:
    """Which round's memory is valid for each client: that of the last round in which its answer was used.

    Attributes
    ----------
    now, saved, best : dict
        The round for each client: the current one, that of the latest checkpoint, and that at the best round so far.
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
    """The bytes of an exchange: those of tensors and reports, down and up, and those of names, headers and settings."""

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
        With ``features`` and ``head``.
    machine : Machine
        Where the server combines, and in which arithmetic.
    seed : int
        Of the server's random numbers.
    rounds : int
        How many rounds the run lasts.
    durable : bool
        Whether the run has checkpoints.
    both : bool
        Whether clients evaluate their personal models along with the global one, in one exchange.
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
    ) -> None:
        self.nodes, self.run, self.roster, self.machine, self.both = nodes, run, roster, machine, both
        self.seed, self.rounds = seed, rounds
        self.delivered = Delivered()
        self.settings = nodes.settings
        self.network = Network(model, tasks.build(roster.task), machine.torch_device, machine.dtype, machine.autocast)
        self.layout = Layout(method.local, self.network.initial())
        self.ledger = Ledger(durable)
        self._finished = 0
        self.absent: dict[int, str] = {}
        self.metrics: tuple[Metric, ...] = ()
        self._measured: tuple[Tree, Answers] | None = None
        self._averaged: tuple[dict[int, int], Tree] | None = None

    def newcomers(self) -> list[int]:
        """Admit clients that have registered since the last call."""
        return self.nodes.newcomers()

    def cohort(self, method: Method, clients: NDArray[np.int64], round_: int) -> FlowerCohort:
        """Gather clients for a round (counted from 0)."""
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
        return _measured(answers.answered, clients, kind)

    def _ask_for_metrics(self, model: Tree, clients: NDArray[np.int64], personal: Personal | None) -> Answers:
        kinds = "personal" if personal else "global personal" if self.both else "global"
        asked = [client for client in clients.tolist() if client in self.roster.known]
        contents = self.messages(asked, self._finished, model, models=kinds)
        requests = {client: ("evaluate.models", content) for client, content in contents.items()}

        def wrong(client: int, content: RecordDict) -> str | None:
            sizes, score = self.roster.known[client].sizes, self.network.task.score
            problems = (_wrong_metrics(content, kind, sizes, score) for kind in kinds.split())
            return next((problem for problem in problems if problem), None)

        answers = self.nodes.insist(requests, self._finished, wrong, min(self.settings.min_clients, len(asked)))
        self.absent = dict(answers.failed)
        return answers

    def averaged_kept(self, method: Method, model: Tree) -> Tree:
        """Ask clients for the parts of the shared model that they keep, and average them."""
        if self._averaged is None or self._averaged[0] != self.ledger.now:
            contents = self.messages(self.ledger.now, self._finished, model)
            requests = {client: ("query.kept", content) for client, content in contents.items()}
            names = [name for name in Layout(method.local, model).kept if not name.startswith(PERSONAL)]
            expected = {name: model[name] for name in names}
            trees: dict[int, Tree] = {}

            def wrong(client: int, content: RecordDict) -> str | None:
                try:
                    trees[client] = _fitting(content.array_records.get("kept"), expected)
                except _Misfit as error:
                    return str(error)
                return None

            answers = self.nodes.insist(requests, self._finished, wrong, 1)
            if not trees:
                raise RunError(f"nobody sent what it keeps of the model ({reasons(answers.failed)})")
            ids = sorted(trees)
            prior = self.cohort(method, np.array(ids), 0).prior
            self._averaged = dict(self.ledger.now), mix_tree(self.stacked([trees[c] for c in ids], names), prior)
        return self._averaged[1]

    def kept_parts(self, method: Method, model: Tree, clients: NDArray[np.int64]) -> Tree:
        """Return nothing: parts that clients keep do not leave them; see :meth:`refuse_keeping_local`."""
        return {}

    def refuse_keeping_local(self, method: Method) -> None:
        """Refuse to save local models that are not what clients send anyway."""
        kept = [name for name in self.layout.kept if not name.startswith(PERSONAL)]
        if kept:
            raise InputError(
                f"evaluation.keep_local: clients of method {method.name!r} keep parts of the model ({kept[0]}), which "
                "do not leave them on Flower; choose a method without such parts, or run it in one process"
            )
        if self.settings.privacy is not None:
            raise InputError(
                "evaluation.keep_local: with flower.privacy the server receives clipped or noisy updates, and not the "
                "models that clients have trained; leave out one of them"
            )

    def personal_models(self, model: Tree, personal: Personal, clients: NDArray[np.int64]) -> tuple[Tree, Tree]:
        """Return the model without personal parts: these stay with the clients; see :meth:`hand_out`."""
        return dict(model), {}

    @property
    def remembering(self) -> list[int]:
        """Always empty: memories are on the clients' disks."""
        return []

    def hand_out(self, model: Tree, round_: int, *, personal: bool, best: bool) -> dict[int, str]:
        """Have every client save its final model; return the reason for each client that failed.

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
        answers = self.nodes.ask(requests, round_)
        return answers.failed

    # ---- memory ------------------------------------------------------------------------------------------------------

    def commit(self, cohort: FlowerCohort) -> None:
        """Make the memories that a cohort wrote in its round the newest ones."""
        self._finished = cohort.round + 1
        for name in cohort.delivers:
            self.delivered.mark(name, cohort.ids)
        self.ledger.now |= {int(client): self._finished for client in cohort.ids}

    def keep(self) -> None:
        """Keep the memories of this round: it is the best one so far."""
        self.ledger.best = dict(self.ledger.now)

    def export(self) -> Tree:
        """Return the ledger, and which clients hold what is sent once."""
        self.ledger.saved = dict(self.ledger.now)
        clients = sorted(self.ledger.now)
        rounds = {"now": self.ledger.now, "best": self.ledger.best}
        columns = {name: [of.get(client, 0) for client in clients] for name, of in rounds.items()}
        rows = {n: torch.tensor(values, dtype=torch.int64) for n, values in {"clients": clients, **columns}.items()}
        return {**rows, **self.delivered.export()}

    def restore(self, tensors: Tree) -> None:
        """Read what :meth:`export` wrote."""
        columns = self.delivered.restore(tensors)
        if columns:
            clients, now, best = (columns[name].tolist() for name in ("clients", "now", "best"))
            self.ledger.now = dict(zip(clients, now, strict=True))
            self.ledger.saved = dict(self.ledger.now)
            self._finished = max(now, default=0)
            self.ledger.best = {c: version for c, version in zip(clients, best, strict=True) if version}

    # ---- messages ----------------------------------------------------------------------------------------------------

    def messages(
        self,
        clients: Iterable[int],
        round_: int,
        model: Tree,
        versions: Mapping[int, int] | None = None,
        **settings: Any,
    ) -> dict[int, RecordDict]:
        """Make the contents of messages to clients: a model and settings, including the version of the memory.

        Tensors that no client trains for the others are part of the initial model of both sides.
        They are sent only if the server has changed them. A hash confirms that both sides have the
        same values.
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
            contents[client] = RecordDict({"model": record, "settings": ConfigRecord(settings | memory)})
        return contents

    def count(self, requests: Mapping[int, tuple[str, RecordDict]], answers: Answers) -> Moved:
        """Count the bytes of an exchange, without what is for evaluation."""
        sent = [without_evaluation(content) for _, content in requests.values()]
        came = [without_evaluation(content) for content in answers.answered.values()]
        moved = Moved(down=sum(map(tensor_bytes_of, sent)), up=sum(map(tensor_bytes_of, came)))
        whole = sum(map(bytes_of, [*sent, *came]))
        return dataclasses.replace(moved, overhead=whole - moved.down - moved.up)

    def stacked(self, rows: list[Tree], names: Iterable[str]) -> Tree:
        """Stack clients' tensors, on the server's device."""
        return {name: torch.stack([row[name] for row in rows]).to(self.network.device) for name in names}


class FlowerCohort:
    """The clients of one round, asked by messages; see :class:`equipoise.engine.contract.RoundCohort`.

    After training, ``ids`` and the other attributes contain only clients whose answers are used;
    ``left_out`` names the others. A client that fails to answer a later question is dropped,
    together with its update.
    """

    def __init__(self, engine: FlowerEngine, method: Method, clients: NDArray[np.int64], round_: int) -> None:
        self.engine, self.method, self.round = engine, method, round_
        self.wanted_reports = set(method.aggregation.needs)
        self.evaluates_local = False
        self._evaluated: dict[int, RecordDict] = {}
        self.left_out: dict[int, str] = {}
        self.bytes_down = self.bytes_up = self.bytes_overhead = 0
        self.messages = self.evaluations = 0
        self.key = fold(engine.seed, round_, Purpose.SERVER)
        self.rounds = engine.rounds
        self.score, self.higher_is_better = engine.network.task.score, engine.network.task.higher_is_better
        self.delivers: set[str] = set()
        # Clients that have answered and whose updates the server then dropped.
        self._dropped = 0
        self._trained = False
        self._gather(clients)

    def _gather(self, clients: NDArray[np.int64]) -> None:
        self.ids = clients
        self.sizes = self.engine.roster.split("train").sizes[clients]
        self.groups = self.engine.roster.groups[clients]
        counts = torch.from_numpy(self.sizes.astype(np.float64))
        by_size = self.method.weights == "size"
        self.prior = counts / counts.sum() if by_size else torch.full_like(counts, 1 / len(counts))

    def train(self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule) -> Updates:
        """Send, have every client train, and collect; see :meth:`equipoise.method.Cohort.train`."""
        refuse_second_training(self._trained)
        self._trained = True
        model = shared["model"]
        self._refuse_unprotected(local)
        settings: dict[str, Any] = {"reports": json.dumps(sorted(self.wanted_reports))}
        if local != self.method.local:
            raise InputError(
                f"method {self.method.name!r} trains with another local rule than its own, {type(local).__name__}; "
                "on Flower clients follow the rule of the experiment and no other"
            )
        once = {n: self.engine.delivered.digest_of(t) for n, t in shared.items() if n in self._sends_once}
        self.delivers = set(once.values())
        settings["once"] = json.dumps(once)
        more = {f"sent.{name}": to_record(tree) for name, tree in shared.items() if name != "model"}
        contents = self.engine.messages(self.ids.tolist(), self.round, model, **settings)
        for row, (client, content) in enumerate(contents.items()):
            held = {f"sent.{n}" for n, known in once.items() if not self.engine.delivered.missing(known, [client])}
            content.update({name: record for name, record in more.items() if name not in held})
            content["each"] = to_record({name: rows[row] for name, rows in each.items()})
            if self.evaluates_local:
                content[EVALUATION] = ConfigRecord({LOCAL: True})
        expected = {name: model[name] for name in Layout(local, model).shared}
        trees: dict[int, Tree] = {}

        def wrong(client: int, content: RecordDict) -> str | None:
            try:
                trees[client] = _fitting(content.array_records.get("update"), expected)
            except _Misfit as error:
                return str(error)
            return (
                self._stale(client, content)
                or self._unreported(client, content)
                or self._unevaluated(client, content)
                or _wrong_uploads(content, local.uploads)
            )

        self.evaluations += len(self.ids) * evaluations_for(self.method.aggregation.needs)
        answers = self._insist("train", contents, lambda client, said: None if _lacks(said) else wrong(client, said))
        lacking = {client: contents[client] for client, said in answers.answered.items() if _lacks(said)}
        if lacking:
            for client, content in lacking.items():
                log.warning("client %d no longer holds what it was sent once, and is sent it again", client)
                self.engine.delivered.unmark(client)
                content.update(more)
                del answers.answered[client]
            again = self._insist("train", lacking, wrong, self._enough - len(answers.answered))
            answers.answered |= again.answered
            answers.failed |= again.failed
        self.left_out |= answers.failed
        kept = _alike(answers.answered, local.uploads)
        self.left_out |= {
            client: "answered with uploads of other shapes" for client in set(answers.answered) - set(kept)
        }
        self._require(len(kept))
        if self.left_out:
            log.warning("round %d goes on without %s", self.round + 1, reasons(self.left_out))
        self._gather(np.array(sorted(kept)))
        rows = [kept[client] for client in sorted(kept)]
        if self.evaluates_local:
            names = [f"{LOCAL}.{split}" for split in SPLITS]
            self._evaluated = {c: RecordDict({name: said[name] for name in names}) for c, said in kept.items()}
        stack = self.engine.stacked([trees[client] for client in sorted(kept)], expected)
        buffers = self.engine.network.buffers
        return Updates(
            params={n: t for n, t in stack.items() if n not in buffers},
            buffers={n: t for n, t in stack.items() if n in buffers},
            uploads={tree: self._uploads(rows, f"upload.{tree}") for tree in local.uploads},
            reports=_reports(rows),
        )

    def evaluate(self, params: Tree, split: str) -> Reports:
        """Ask for loss and metrics of a model on the clients' own split."""

        def wrong(client: int, content: RecordDict) -> str | None:
            loss = numbers_of(content).get("loss")
            if loss is None:
                return "answered without a loss"
            finite = np.isfinite(loss) or not self.engine.roster.known[client].sizes[split]
            return self._stale(client, content) or (None if finite else f"answered with {loss} as {split} loss")

        self.evaluations += len(self.ids)
        contents = self.engine.messages(self.ids.tolist(), self.round, params, split=split)
        return _reports(self._all("evaluate", contents, wrong))

    def ask(
        self,
        question: str,
        *args: Any,
        model: Tree | None = None,
        split: str = "train",
        each: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Ask every client a question of the local rule; see :meth:`equipoise.method.Cohort.ask`."""
        question_of(self.method, question)
        if self.engine.settings.privacy is not None:
            raise InputError(
                f"flower.privacy protects parameters, but method {self.method.name!r} also asks clients for {question!r}; "
                "choose another method or leave flower.privacy out"
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

        def wrong(client: int, content: RecordDict) -> str | None:
            if "answer" not in content.array_records or "form" not in content.config_records:
                return "did not answer the question"
            return self._stale(client, content) or _not_finite(from_record(content.array_records["answer"]))

        answers = self._all("query.ask", contents, wrong)
        parts = [from_record(content.array_records["answer"]) for content in answers]
        device = self.engine.network.device
        joined = {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}
        return unpack(str(answers[0].config_records["form"]["text"]), joined)

    def without(self, ids: Iterable[int], dropped: str | None = None) -> FlowerCohort:
        """Return the cohort less some clients; see :class:`equipoise.engine.contract.RoundCohort`."""
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
        wrong: Callable[[int, RecordDict], str | None],
        enough: int | None = None,
    ) -> Answers:
        requests = {client: (kind, content) for client, content in contents.items()}
        answers = self.engine.nodes.insist(requests, self.round, wrong, self._enough if enough is None else enough)
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
        self, kind: str, contents: Mapping[int, RecordDict], wrong: Callable[[int, RecordDict], str | None]
    ) -> list[RecordDict]:
        answers = self._insist(kind, contents, wrong)
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
                f"round {self.round + 1}: {count} of {count - self._dropped + len(self.left_out)} clients answered, and "
                f"flower.min_clients is {wanted} ({reasons(self.left_out)}); the last checkpoint is intact"
            )

    def _stale(self, client: int, content: RecordDict) -> str | None:
        note = settings_of(content, "note")
        if note.get("client") != client:
            return f"answered as client {note.get('client')}"
        if note.get("round") != self.round:
            return f"answered for round {note.get('round')}, counted from 0, instead of {self.round}"
        return None

    def _unreported(self, client: int, content: RecordDict) -> str | None:
        reports = numbers_of(content)
        sizes = self.engine.roster.known[client].sizes
        for name in ("train_loss", "steps", *sorted(self.wanted_reports)):
            if name not in reports:
                return f"answered without the report {name}"
            # The loss on a split without samples is NaN and is not used.
            empty = not sizes["val" if name.startswith("val_") else "train"]
            if not np.isfinite(reports[name]) and not empty:
                return f"answered with {reports[name]} as {name}"
        return None

    def _unevaluated(self, client: int, content: RecordDict) -> str | None:
        if not self.evaluates_local:
            return None
        return _wrong_metrics(content, LOCAL, self.engine.roster.known[client].sizes, self.score)

    @property
    def local_metrics(self) -> dict[str, Measured]:
        """Loss and metrics of the clients' local models; see :class:`equipoise.engine.contract.RoundCohort`."""
        return _measured(self._evaluated, self.ids, LOCAL) if self._evaluated else {}

    def _uploads(self, rows: list[RecordDict], record: str) -> Tree:
        trees = [from_record(row.array_records[record]) for row in rows]
        return self.engine.stacked(trees, trees[0])

    def _refuse_unprotected(self, local: LocalRule) -> None:
        """Refuse differential privacy if a client sends more than the parameters that are clipped and noised."""
        if self.engine.settings.privacy is None:
            return
        self.engine.settings.privacy.check(local)
        if self.engine.network.buffers:
            raise InputError(
                "flower.privacy would put noise on the statistics of BatchNorm; choose a model with GroupNorm"
            )


def _reports(rows: list[RecordDict]) -> Reports:
    reports = [numbers_of(row) for row in rows]
    return {name: torch.tensor([report[name] for report in reports], dtype=torch.float64) for name in reports[0]}


def _measured(answers: Mapping[int, RecordDict], clients: NDArray[np.int64], kind: str) -> dict[str, Measured]:
    """Read the metrics of one kind of model by split; NaN for clients that did not answer.

    Values that do not fit are left out later, as in one process: see
    :func:`equipoise.run.records.client_rows`. What a client may not set is ignored.
    """
    measured: dict[str, Measured] = {split: {"loss": np.full(len(clients), np.nan)} for split in SPLITS}
    for position, client in enumerate(clients.tolist()):
        if client not in answers:
            continue
        for split, columns in measured.items():
            for name, value in numbers_of(answers[client], f"{kind}.{split}").items():
                if name in COLUMNS and name != "loss":
                    continue
                columns.setdefault(name, np.full(len(clients), np.nan))[position] = value
    return measured


def _wrong_metrics(content: RecordDict, kind: str, sizes: Mapping[str, int], score: str) -> str | None:
    """Say what is wrong with the loss and the score of one kind of model."""
    for split in SPLITS:
        numbers = numbers_of(content, f"{kind}.{split}")
        if "loss" not in numbers:
            return f"answered without metrics of the {kind} model"
        for name in ("loss", score):
            if sizes[split] and not np.isfinite(numbers.get(name, np.nan)):
                return f"answered with {numbers.get(name, 'nothing')} as {split} {name} of the {kind} model"
    return None


class _Misfit(ValueError):
    """An answer that cannot be used; says why."""


def _fitting(record: ArrayRecord | None, expected: Mapping[str, Tensor]) -> Tree:
    """Read the tensors of an answer, and check them against the expected ones."""
    if record is None:
        raise _Misfit("answered without parameters")
    if set(record) != set(expected):
        raise _Misfit(f"answered with other parameters: {', '.join(sorted(set(record) ^ set(expected))[:3])}")
    try:
        tree = from_record(record)
    except ValueError as error:
        raise _Misfit(f"answered with parameters that cannot be read: {error}") from error
    for name, tensor in expected.items():
        if tree[name].shape != tensor.shape or tree[name].dtype != tensor.dtype:
            there, here = ((tuple(t.shape), t.dtype) for t in (tree[name], tensor))
            raise _Misfit(f"answered with {name} of {there[0]} {there[1]} instead of {here[0]} {here[1]}")
    if wrong := _unusable(tree, expected):
        raise _Misfit(wrong)
    return tree


def _unusable(tree: Tree, received: Mapping[str, Tensor]) -> str | None:
    """Say why the tensors of one client cannot be used."""
    return unusable([{name: tensor.unsqueeze(0) for name, tensor in tree.items()}], received).get(0)


def _not_finite(tree: Tree) -> str | None:
    """Name a tensor of an answer that is not finite."""
    faults = (name for name, tensor in tree.items() if not bool(torch.isfinite(tensor).all()))
    return next((f"answered with NaN or infinity in {name}" for name in faults), None)


def _lacks(content: RecordDict) -> bool:
    """Say whether a client has lost what it was sent once."""
    return "lacks" in settings_of(content, "note")


def _wrong_uploads(content: RecordDict, names: Iterable[str]) -> str | None:
    for name in names:
        if f"upload.{name}" not in content.array_records:
            return f"answered without {name}"
        if wrong := _unusable(from_record(content.array_records[f"upload.{name}"]), {}):
            return wrong
    return None


def _alike(answers: Mapping[int, RecordDict], uploads: Iterable[str]) -> dict[int, RecordDict]:
    """Keep the answers whose uploads have the names and shapes that most of them have."""
    forms = {
        client: tuple(
            (record, name, array.shape, array.dtype)
            for record in uploads
            for name, array in content.array_records[f"upload.{record}"].items()
        )
        for client, content in answers.items()
    }
    found = list(forms.values())
    usual = max(found, key=found.count, default=())
    return {client: content for client, content in answers.items() if forms[client] == usual}


def _same(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(tensor is b[name] for name, tensor in a.items())
