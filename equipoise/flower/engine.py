"""The engine that runs on Flower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import nn

from equipoise import tasks
from equipoise.attributes import Counting
from equipoise.engine.contract import Personal
from equipoise.engine.delivered import Delivered
from equipoise.engine.evaluation import Measured
from equipoise.engine.layout import Layout
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.flower.cohort import FlowerCohort
from equipoise.flower.ledger import Ledger
from equipoise.flower.nodes import Answers, Nodes, reasons
from equipoise.flower.reports import EVALUATED, Declared, Number, measured_by
from equipoise.flower.roster import Roster
from equipoise.flower.schema import KEPT, Answer, Schema
from equipoise.flower.wire import to_record
from equipoise.method import Method, mix_tree
from equipoise.metrics import Metric
from equipoise.tree import PERSONAL, Tree, digest

log = logging.getLogger("flwr.equipoise")


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
        self.slowed_by: list[str] = []
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

    @property
    def keeps_samples(self) -> bool:
        """Always false: other processes have samples, too."""
        return False

    def while_busy(self, work: Callable[[], None]) -> None:
        """Do some work now: clients train elsewhere."""
        work()

    def after_launch(self, work: Callable[[], None]) -> None:
        """Do some work now: evaluation never waits for the next round."""
        work()

    def commit(self, cohort: FlowerCohort) -> None:
        """Mark the memories that a cohort wrote in its round as the newest ones."""
        self._finished = cohort.round + 1
        for name in cohort.delivers:
            self.delivered.mark(name, cohort.ids)
        self.ledger.commit(cohort.ids, self._finished)

    def keep(self) -> None:
        """Keep the memories of this round, which is the best one so far."""
        self.ledger.keep()

    def export(self) -> Tree:
        """Return the ledger, and which clients hold the trees that are sent only once."""
        return {**self.ledger.export(), **self.delivered.export()}

    def restore(self, tensors: Tree) -> None:
        """Read what :meth:`export` wrote."""
        columns = self.delivered.restore(tensors)
        if columns:
            self.ledger.restore(columns)
            self._finished = max(self.ledger.now.values(), default=0)

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

    def stacked(self, rows: list[Tree], names: Iterable[str]) -> Tree:
        """Stack clients' tensors on the server's device."""
        return {
            name: torch.stack([row[name] for row in rows]).to(self.network.device) for name in names
        }


def _same(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(tensor is b[name] for name, tensor in a.items())
