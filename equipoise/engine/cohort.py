"""The cohort of the in-process engine, which answers with stacked tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from equipoise import reused_memory
from equipoise.engine.chunk import Chunk
from equipoise.engine.cohort_checks import (
    check_rows,
    evaluations_for,
    question_of,
    refuse_second_training,
)
from equipoise.engine.contract import ADVICE, LOST, Launched, number_and_name
from equipoise.engine.evaluation import Measured, evaluate_shared, evaluate_stacked
from equipoise.engine.facts import compute_fact, facts_before
from equipoise.engine.layout import KEPT, Layout
from equipoise.engine.local import finish_chunk
from equipoise.engine.memory import Memory, MemoryStore
from equipoise.engine.planning import Planner
from equipoise.engine.questions import asked_of, part_of, sums_over_samples
from equipoise.engine.reports import Reporter
from equipoise.exchange import UnreadReports
from equipoise.method import LocalRule, Method, Reports, Updates
from equipoise.random import Purpose, fold
from equipoise.stacks import chosen_rows
from equipoise.tree import Magnitudes, Tree, size_in_bytes, unusable

if TYPE_CHECKING:
    from equipoise.engine.stacked import StackedEngine

log = logging.getLogger("equipoise")


class StackedCohort:
    """The clients of one round, stacked chunk by chunk; see :class:`equipoise.method.Cohort`.

    ``bytes_down`` and ``bytes_up`` are the bytes sent between server and clients so far.
    ``delivers`` has the trees that clients keep after the round. ``local_metrics`` has loss and
    metrics of the models that clients have trained, by split, if ``evaluates_local`` is set.
    """

    def __init__(
        self,
        engine: StackedEngine,
        method: Method,
        clients: NDArray[np.int64],
        round_: int,
        memory: MemoryStore | None = None,
        *purpose: Purpose,
    ) -> None:
        self.engine, self.method, self.round = engine, method, round_
        self.memory = engine.memory if memory is None else memory
        # Keys of training have no purpose; those of all other uses have one.
        self.purpose = purpose
        self._gather(clients)
        self.key = fold(engine.seed, round_, Purpose.SERVER)
        self.score, self.higher_is_better = (
            engine.network.task.score,
            engine.network.task.higher_is_better,
        )
        self.wanted_reports = set(method.aggregation.needs)
        self.evaluates_local = False
        self.local_metrics: dict[str, Measured] = {}
        self.left_out: dict[int, str] = {}
        self.bytes_down = self.bytes_up = self.bytes_overhead = 0
        self.messages = self.evaluations = 0
        self.delivers: set[str] = set()
        self._trained = False

    @property
    def rounds(self) -> int:
        """The number of rounds of the run.

        If the method has read this, the run cannot be extended.
        """
        self.engine.total_was_read = True
        return self.engine.training.rounds

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients. Most methods never read them."""
        return tuple(map(self.engine.view.client_name, self.ids.tolist()))

    @property
    def clients(self) -> int:
        """The number of all clients of the federation."""
        return self.engine.view.clients

    def _gather(self, clients: NDArray[np.int64]) -> None:
        self.ids = clients
        train = self.engine.view.train
        self.sizes = train.offsets[clients + 1] - train.offsets[clients]
        self._planner = Planner(self.engine, clients, self.sizes, self.round, self.purpose)
        self.groups = self.engine.view.groups[clients]
        counts = torch.from_numpy(self.sizes.astype(np.float64))
        by_size = self.method.weights == "size"
        self.prior = counts / counts.sum() if by_size else torch.full_like(counts, 1 / len(counts))

    # ---- training --------------------------------------------------------------------------------

    def train(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> Updates:
        """Train every client and collect updates; see :meth:`equipoise.method.Cohort.train`."""
        return self.launch_training(shared, each, local).wait()

    def launch_training(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> Launched:
        """Like :meth:`train`, without waiting for a GPU."""
        refuse_second_training(self._trained)
        self._trained = True
        model = shared["model"]
        self._count_down(shared, each, Layout(local, model))
        self.messages += len(self.ids)
        self.evaluations += len(self.ids) * evaluations_for(self.method.aggregation.needs)
        sent, uploads, reports = self.launch(shared, each, local)
        buffers = self.engine.network.buffers
        updates = Updates(
            params={n: t for n, t in sent.items() if n not in buffers},
            buffers={n: t for n, t in sent.items() if n in buffers},
            uploads=uploads,
            reports=UnreadReports(),
        )
        # A GPU computes the norms right after the last step, before the host waits for either.
        norms = None
        if self._checks_updates:
            norms = Magnitudes(stack for tree in _trees(updates) for stack in tree.values())
        self.bytes_up += size_in_bytes([updates.params, updates.buffers, updates.uploads])

        def wait() -> Updates:
            trained = replace(updates, reports=reports())
            self.bytes_up += size_in_bytes(trained.reports)
            return trained if norms is None else self._usable(trained, model, norms)

        return Launched(updates, wait)

    def carry_out(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> tuple[Tree, dict[str, Tree], Reports]:
        """Train all clients, and write their memories beside those committed.

        Returns
        -------
        tuple
            What clients send back of the model, their uploads and their reports, stacked in the
            order of ``ids``.
        """
        sent, uploads, reports = self.launch(shared, each, local)
        return sent, uploads, reports()

    def launch(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> tuple[Tree, dict[str, Tree], Callable[[], Reports]]:
        """Do the same as :meth:`carry_out`, but do not wait for a GPU.

        Returns
        -------
        tuple
            As there, with a function that waits for the reports and returns them.
        """
        engine, model = self.engine, shared["model"]
        layout = Layout(local, model)
        memory, seen = self._read_memory(local, model)
        work, order, divided = self._planner.divided(local)
        # One stack for the whole cohort: chunks train views of it, so nothing is joined afterwards.
        # It begins as the model, unless clients train in memory of the workshop, as on a GPU.
        begun = {
            name: model[name].expand(len(self.ids), *model[name].shape) for name in layout.shared
        }
        optimizers = [self._planner.optimizer(phase) for phase in local.phases()]
        elsewhere = engine.workshop.trains_copies(optimizers) and not self._asks_before(local)
        stack = {
            name: reused_memory.empty(rows.shape, rows.dtype, rows.device)
            for name, rows in begun.items()
        }
        if not elsewhere:
            for name, rows in begun.items():
                stack[name].copy_(rows)
        collected: list[tuple[Memory, dict[str, Tree], Callable[[], Reports]]] = []
        start = 0
        for members in divided:
            own, received = (
                {name: rows[start : start + len(members)] for name, rows in tree.items()}
                for tree in (stack, begun if elsewhere else stack)
            )
            steps = [of_phase[members] for of_phase in work]
            collected.append(
                self._train_members(
                    members, received, own, shared, each, local, layout, memory, seen, steps
                )
            )
            start += len(members)
        while engine.launched:
            engine.launched.pop(0)()
        if engine.network.device.type == "cpu":
            # The module holds a view of the stack, whose memory the next round needs.
            engine.network.release()

        back = torch.from_numpy(np.argsort(order))
        in_order = bool((order[1:] > order[:-1]).all())

        def gather(stacks: list[Tensor]) -> Tensor:
            """Concatenate stacks of clients, in the order of the cohort's ids."""
            joined = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
            return joined if in_order else joined[back.to(joined.device)]

        def gather_tree(trees: list[Tree]) -> Tree:
            return {name: gather([tree[name] for tree in trees]) for name in trees[0]}

        def gather_trees(groups: list[dict[str, Tree]]) -> dict[str, Tree]:
            return {name: gather_tree([group[name] for group in groups]) for name in groups[0]}

        memories, uploads, reports = zip(*collected, strict=True)
        # A round that is repeated after a failure starts from the last committed memories.
        self.memory.forget_pending()
        self.memory.write(self.ids, gather_trees(list(memories)))
        if not in_order:
            stack = dict(zip(stack, chosen_rows(list(stack.values()), back), strict=True))
        return (
            stack,
            gather_trees(list(uploads)),
            lambda: gather_tree([of_chunk() for of_chunk in reports]),
        )

    def draw_ahead(self, local: LocalRule) -> None:
        """Draw the batches of the first chunk, so that training can begin at once later."""
        self._planner.draw_ahead(local)

    def work_of(self, local: LocalRule) -> list[NDArray[np.int64]]:
        """Return how many steps each client makes, one array a phase."""
        return self._planner.work_of(local)

    @property
    def _checks_updates(self) -> bool:
        """Whether clients whose updates cannot be used are left out."""
        return len(self.ids) > 1 and not self.purpose

    def _usable(self, updates: Updates, model: Tree, norms: Magnitudes) -> Updates:
        """Leave out clients whose updates cannot be used, unless none can be used.

        If no update can be used, the settings are wrong and not a client. The round loop then
        raises an error.
        """
        faults = unusable(_trees(updates), model, norms)
        if not faults or len(faults) == len(self.ids):
            return updates
        named = {int(self.ids[position]): reason for position, reason in faults.items()}
        view = self.engine.view
        log.warning(
            "round %d continues without %s%s",
            self.round + 1,
            ", ".join(f"{number_and_name(c, view)}: {why}" for c, why in named.items()),
            "" if self.engine.gave_advice else f"; {ADVICE}",
        )
        self.engine.gave_advice = True
        kept = ~np.isin(self.ids, list(named))
        self._leave_out(named)
        return updates.of(kept)

    def _train_members(
        self,
        members: NDArray[np.int64],
        received: Tree,
        moving: Tree,
        shared: Mapping[str, Tree],
        each: Mapping[str, Tensor],
        local: LocalRule,
        layout: Layout,
        memory: Memory,
        seen: Tensor,
        work: list[NDArray[np.int64]],
    ) -> tuple[Memory, dict[str, Tree], Callable[[], Reports]]:
        """Train one chunk, and return its new memory, uploads and what waits for its reports.

        Trained tensors are written to ``moving``, which may be the same tensors as ``received``.
        """
        engine, clients = self.engine, self.ids[members]
        device, keys, train = engine.network.device, self._planner.keys, engine.view.train
        everyone = len(members) == len(self.ids) and bool((np.diff(members) == 1).all())
        where = None if everyone else torch.from_numpy(members).to(device, non_blocking=True)

        def of_members(tree: Mapping[str, Tensor]) -> Tree:
            there = {name: tensor.to(device) for name, tensor in tree.items()}
            return there if where is None else {name: t[where] for name, t in there.items()}

        own_memory = {name: of_members(tree) for name, tree in memory.items()}
        kept = own_memory.pop(KEPT, {})
        model = shared["model"]
        chunk = Chunk(
            network=engine.network,
            data=engine.data,
            augment=engine.training.augment,
            params={**received, **kept},
            still={n: t for n, t in model.items() if n not in moving and n not in kept},
            sent=shared,
            each=of_members(each),
            memory=own_memory,
            seen=seen if where is None else seen[where],
            round=torch.full((), self.round, device=device),
        )
        reporter = Reporter(engine, self.round, self.wanted_reports)
        before = reporter.launch("before", chunk, clients)
        own_memory |= facts_before(local, chunk, clients, keys, train)
        batches, paces = self._planner.of_chunk(local, members, work, chunk.each)
        own = {**moving, **kept}
        trained = engine.workshop.train(chunk, local, batches, paces, own)
        chunk = replace(chunk, params=own)
        remembered, uploads = finish_chunk(chunk, local, trained.steps, paces[0].lr)
        facts = {name: own_memory[name] for name in local.facts()}
        for name, fact in local.facts().items():
            if fact.model == "trained":
                facts[name] = compute_fact(name, fact, chunk, clients, keys, train)
        evaluated = reporter.evaluate(chunk, clients) if self.evaluates_local else {}
        self._add_local_metrics(evaluated, members)
        after = reporter.launch("after", chunk, clients, evaluated)
        of_steps = reporter.of_steps(paces, work, local.proximal)
        if layout.kept:
            remembered = {KEPT: {name: chunk.params[name] for name in layout.kept}, **remembered}
        sent_facts = {name: tree for name, tree in facts.items() if name in local.uploads}
        return (
            {**remembered, **facts},
            {**uploads, **sent_facts},
            lambda: before() | trained.reports() | after() | of_steps,
        )

    def _asks_before(self, local: LocalRule) -> bool:
        """Return whether clients look at the model that they received, before they train it."""
        return bool(local.facts()) or any(name.endswith("_before") for name in self.wanted_reports)

    def _add_local_metrics(
        self, evaluated: Mapping[str, Measured], members: NDArray[np.int64]
    ) -> None:
        """Add loss and metrics of the models of a trained chunk to ``local_metrics``."""
        for split, measured in evaluated.items():
            columns = self.local_metrics.setdefault(split, {})
            for name, values in measured.items():
                columns.setdefault(name, np.full(len(self.ids), np.nan))[members] = values

    def _read_memory(self, local: LocalRule, model: Tree) -> tuple[Memory, Tensor]:
        first = self.engine.first_memory(local, model)
        return self.memory.read(self.ids, first, self.engine.network.device, maybe=local.facts())

    # ---- questions -------------------------------------------------------------------------------

    def evaluate(self, params: Tree, split: str) -> Reports:
        """Ask for loss and metrics of a model on the clients' own split."""
        measured = self.measured(params, split)
        self.bytes_down += len(self.ids) * self._size_sent(
            params, Layout(self.method.local, params)
        )
        self.messages += len(self.ids)
        self.evaluations += len(self.ids)
        answer = {name: torch.from_numpy(values) for name, values in measured.items()}
        self.bytes_up += size_in_bytes(answer)
        return answer

    def measured(self, params: Tree, split: str) -> Measured:
        """Return loss and metrics of a model on the clients' own split.

        Clients that keep parts of the shared model use their own, as trained in this round.
        """
        engine, samples = self.engine, self.engine.view.split(split)
        names = Layout(self.method.local, params).kept_of_shared
        if not names:
            return evaluate_shared(engine.network, engine.data, params, samples, self.ids)
        first = {KEPT: {name: params[name] for name in names}}
        own = self.memory.newest(self.ids, first, engine.network.device)[KEPT]
        still = {name: tensor for name, tensor in params.items() if name not in own}
        return evaluate_stacked(
            engine.network, engine.data, own, still, samples, self.ids, engine.chunk
        )

    def ask(
        self,
        question: str,
        *args: Any,
        model: Tree | None = None,
        split: str = "train",
        each: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Ask every client a question; see :meth:`equipoise.method.Cohort.ask`."""
        question_of(self.method, question)
        rows = dict(each or {})
        check_rows(rows, len(self.ids))
        said = self.answers(question, args, model, split, rows)
        self.messages += len(self.ids)
        sent = 0
        if model is not None:
            sent = self._size_sent(model, Layout(self.method.local, model))
        self.bytes_down += len(self.ids) * (size_in_bytes(args) + sent) + size_in_bytes(rows)
        self.bytes_up += size_in_bytes(tree_flatten(said)[0])
        return said

    def answers(
        self,
        question: str,
        args: Sequence[Any],
        model: Tree | None,
        split: str,
        rows: Mapping[str, Tensor],
    ) -> Any:
        """Return the clients' answers to a question, stacked in the order of ``ids``."""
        local, engine = self.method.local, self.engine
        answer = question_of(self.method, question)
        finished_by = getattr(answer, "finished_by", None)
        asked_part = getattr(answer, "__self__", None)
        finish = getattr(asked_part, finished_by) if finished_by else None
        samples = engine.view.split(split)
        begun = engine.network.initial() if model is None else model
        memory, seen = self._read_memory(local, begun)
        kept = memory.pop(KEPT, {})
        answers = []
        for start in range(0, len(self.ids), engine.chunk):
            here = torch.arange(start, min(start + engine.chunk, len(self.ids)), device=seen.device)
            chunk = Chunk(
                network=engine.network,
                data=engine.data,
                augment=(),
                params=kept,
                still={name: tensor for name, tensor in (model or {}).items() if name not in kept},
                sent={} if model is None else {"model": model},
                each={name: row.to(seen.device) for name, row in rows.items()},
                memory=memory,
                seen=seen,
                round=torch.tensor(self.round, device=seen.device),
            )
            part = part_of(chunk, here)
            clients = self.ids[here.cpu().numpy()]
            asked = asked_of(
                part, samples, clients, self._planner.keys(clients), part.params, part.still
            )
            sums = sums_over_samples(
                asked, lambda client: answer(client, *args), f"the question {question!r}"
            )
            answers.append(vmap(finish)(sums) if finish else sums)
        leaves = [tree_flatten(said) for said in answers]
        joined = [torch.cat(parts) for parts in zip(*(flat for flat, _ in leaves), strict=True)]
        return tree_unflatten(joined, leaves[0][1])

    def without(self, ids: Iterable[int], dropped: str | None = None) -> StackedCohort:
        """Return the cohort less some clients; see `equipoise.engine.contract.RoundCohort`."""
        rest = copy.copy(self)
        rest._leave_out(dict.fromkeys(ids, dropped or LOST))
        return rest

    def _leave_out(self, reasons: Mapping[int, str]) -> None:
        kept = ~np.isin(self.ids, list(reasons))
        self.local_metrics = {
            split: {name: values[kept] for name, values in columns.items()}
            for split, columns in self.local_metrics.items()
        }
        self.left_out = {**reasons, **self.left_out}
        self._gather(self.ids[kept])

    # ---- bytes -----------------------------------------------------------------------------------

    def _count_down(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], layout: Layout
    ) -> None:
        clients, delivered = len(self.ids), self.engine.delivered
        self.bytes_down += clients * self._size_sent(shared["model"], layout) + size_in_bytes(
            dict(each)
        )
        for name, tree in shared.items():
            if name in self.method.aggregation.sends_once:
                digest = delivered.digest_of(tree)
                self.delivers.add(digest)
                self.bytes_down += len(
                    delivered.missing(digest, self.ids.tolist())
                ) * size_in_bytes(tree)
            elif name != "model":
                self.bytes_down += clients * size_in_bytes(tree)

    def _size_sent(self, model: Tree, layout: Layout) -> int:
        travelling = layout.travelling(model, self.engine.network.initial())
        return size_in_bytes([model[name] for name in travelling])


def _trees(updates: Updates) -> list[Tree]:
    """Return everything in updates that is checked."""
    return [updates.params, updates.buffers, *updates.uploads.values()]
