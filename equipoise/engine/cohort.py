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

from equipoise.engine.batches import Batches, draw_batches
from equipoise.engine.chunking import even_chunks
from equipoise.engine.contract import LOST
from equipoise.engine.evaluation import Measured, evaluate_shared, evaluate_stacked
from equipoise.engine.layout import KEPT, Layout
from equipoise.engine.local import Chunk, Pace, finish_chunk
from equipoise.engine.memory import Memory, MemoryStore
from equipoise.engine.questions import Asked, sums_over_samples
from equipoise.engine.work import batches_a_step, chunks, steps_of
from equipoise.errors import InputError, unknown
from equipoise.federation import Split
from equipoise.method import Aggregation, Fact, LocalRule, Method, Phase, Reports, Updates
from equipoise.optimizers import Column, TorchOptimizer, gradient_weights
from equipoise.random import Purpose, choose, fold, fold_array
from equipoise.stacks import chosen_rows
from equipoise.tree import PERSONAL, Magnitudes, Tree, size_in_bytes, unusable

if TYPE_CHECKING:
    from equipoise.engine.stacked import StackedEngine

log = logging.getLogger("equipoise")

# Steps of each client by phase, the order of clients, and their chunks.
_Division = tuple[list[NDArray[np.int64]], NDArray[np.int64], list[NDArray[np.int64]]]


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
        self._drawn: dict[Any, Batches] = {}

    @property
    def rounds(self) -> int:
        """The number of rounds of the run.

        If the method has read this, the run cannot be extended.
        """
        self.engine.total_was_read = True
        return self.engine.training.rounds

    def _gather(self, clients: NDArray[np.int64]) -> None:
        self.ids = clients
        # What draw_ahead has found, and for which rule and chunk size.
        self._division: tuple[LocalRule, int, _Division] | None = None
        train = self.engine.view.train
        self.sizes = train.offsets[clients + 1] - train.offsets[clients]
        self.groups = self.engine.view.groups[clients]
        counts = torch.from_numpy(self.sizes.astype(np.float64))
        by_size = self.method.weights == "size"
        self.prior = counts / counts.sum() if by_size else torch.full_like(counts, 1 / len(counts))

    # ---- training --------------------------------------------------------------------------------

    def train(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> Updates:
        """Train every client and collect updates; see :meth:`equipoise.method.Cohort.train`."""
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
            reports={},
        )
        # A GPU computes the norms right after the last step, before the host waits for either.
        norms = None
        if self._checks_updates:
            norms = Magnitudes(stack for tree in _trees(updates) for stack in tree.values())
        self.bytes_up += size_in_bytes([updates.params, updates.buffers, updates.uploads])
        updates = replace(updates, reports=reports())
        self.bytes_up += size_in_bytes(updates.reports)
        return updates if norms is None else self._usable(updates, model, norms)

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
        work, order, divided = self._divided(local)
        # One stack for the whole cohort: chunks train views of it, so nothing is joined afterwards.
        # It begins as the model, unless clients train in memory of the workshop, as on a GPU.
        begun = {
            name: model[name].expand(len(self.ids), *model[name].shape) for name in layout.shared
        }
        optimizers = [self._optimizer(phase) for phase in local.phases()]
        elsewhere = engine.workshop.trains_copies(optimizers) and not self._asks_before(local)
        stack = {
            name: torch.empty_like(rows) if elsewhere else rows.clone()
            for name, rows in begun.items()
        }
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
        found = work, _, divided = self._divided(local)
        self._division = local, self.engine.chunk, found
        for members in divided[:1]:
            steps = [of_phase[members] for of_phase in work]
            for index, phase in enumerate(local.phases()):
                if index == 0 or phase.batch != "same":
                    key, draw = self._drawing(index, phase, members, steps[index])
                    self._drawn[key] = draw()

    def _divided(self, local: LocalRule) -> _Division:
        """Return the steps of each client by phase, the order of clients, and their chunks."""
        if self._division is not None:
            rule, chunk, found = self._division
            if rule is local and chunk == self.engine.chunk:
                return found
        work = self.work_of(local)
        # The larger of two clients comes first if they make as many steps.
        order = np.lexsort((-self.sizes, -sum(work, np.zeros_like(self.sizes))))
        alone = any(isinstance(self._optimizer(phase), TorchOptimizer) for phase in local.phases())
        size = 1 if alone else even_chunks(len(self.ids), self.engine.chunk)
        return work, order, list(chunks(order, work, size))

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
        log.warning(
            "round %d continues without %s",
            self.round + 1,
            ", ".join(f"client {c}: {why}" for c, why in named.items()),
        )
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
        engine, training = self.engine, self.engine.training
        device = engine.network.device
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
            augment=training.augment,
            params={**received, **kept},
            still={n: t for n, t in model.items() if n not in moving and n not in kept},
            sent=shared,
            each=of_members(each),
            memory=own_memory,
            seen=seen if where is None else seen[where],
            round=torch.full((), self.round, device=device),
        )
        before = self._reports("before", chunk, members)
        own_memory |= self._facts_before(local, chunk, members)
        batches, paces = self._plan(local, chunk, members, work)
        own = {**moving, **kept}
        trained = engine.workshop.train(chunk, local, batches, paces, own)
        chunk = replace(chunk, params=own)
        remembered, uploads = finish_chunk(chunk, local, trained.steps, paces[0].lr)
        facts = {name: own_memory[name] for name in local.facts()}
        for name, fact in local.facts().items():
            if fact.model == "trained":
                facts[name] = self._worked_out(name, fact, chunk, members)
        after = self._reports("after", chunk, members)
        if "lr" in self.wanted_reports:
            after["lr"] = (
                torch.as_tensor(paces[0].lr, dtype=torch.float64).cpu().expand(len(members)).clone()
            )
        if "gradient_weight" in self.wanted_reports:
            after["gradient_weight"] = _gradient_weight(paces, work, local.proximal)
        if layout.kept:
            remembered = {KEPT: {name: chunk.params[name] for name in layout.kept}, **remembered}
        sent_facts = {name: tree for name, tree in facts.items() if name in local.uploads}
        return (
            {**remembered, **facts},
            {**uploads, **sent_facts},
            lambda: before | trained.reports() | after,
        )

    def _asks_before(self, local: LocalRule) -> bool:
        """Return whether clients look at the model that they received, before they train it."""
        return bool(local.facts()) or any(name.endswith("_before") for name in self.wanted_reports)

    def work_of(self, local: LocalRule) -> list[NDArray[np.int64]]:
        """Return how many steps each client makes, one array a phase."""
        training, keys, adapting = self.engine.training, self._keys(self.ids), bool(self.purpose)
        work: list[NDArray[np.int64]] = []
        for phase in local.phases():
            same = phase.batch == "same" and work
            work.append(
                work[-1] if same else steps_of(phase, training, self.sizes, keys, adapting=adapting)
            )
        return work

    def _plan(
        self,
        local: LocalRule,
        chunk: Chunk,
        members: NDArray[np.int64],
        work: list[NDArray[np.int64]],
    ) -> tuple[list[Batches], list[Pace]]:
        """Return the batches and the pace of every phase."""
        training = self.engine.training
        batches: list[Batches] = []
        paces = []
        for index, phase in enumerate(local.phases()):
            if phase.batch == "same" and batches:
                batches.append(batches[-1])
            else:
                key, draw = self._drawing(index, phase, members, work[index])
                drawn = self._drawn.pop(key, None) or draw()
                batches.append(
                    drawn.split(phase.gradient.batches) if phase.batch == "split" else drawn
                )
            optimizer = self._optimizer(phase)
            factor = (
                training.schedule.factor(self.round, training.rounds) if phase.scheduled else 1.0
            )
            lr: Column = optimizer.lr * factor
            if "step_factor" in chunk.each:
                lr = lr * chunk.each["step_factor"]
            paces.append(Pace(optimizer, lr, training.clip))
        return batches, paces

    def _drawing(
        self, index: int, phase: Phase, members: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> tuple[Any, Callable[[], Batches]]:
        """Return what the batches of a phase depend on in this round, and what draws them."""
        engine, clients, a_step = self.engine, self.ids[members], batches_a_step(phase)

        def draw() -> Batches:
            return draw_batches(
                engine.view.train,
                engine.train_indices,
                clients,
                self._keys(clients),
                phase=index,
                batch_size=engine.training.batch_size,
                steps=steps,
                shuffle=engine.training.shuffle,
                a_step=a_step,
            )

        return (index, a_step, clients.tobytes(), steps.tobytes()), draw

    def _optimizer(self, phase: Phase) -> Any:
        return phase.optimizer or self.engine.training.optimizer

    def _keys(self, clients: NDArray[np.int64]) -> Tensor:
        """Return the keys of clients in this round, on the CPU, because they are few."""
        key = fold(self.engine.seed, self.round, *self.purpose)
        return torch.from_numpy(fold_array(key, clients))

    def _read_memory(self, local: LocalRule, model: Tree) -> tuple[Memory, Tensor]:
        first = self.engine.first_memory(local, model)
        return self.memory.read(self.ids, first, self.engine.network.device, maybe=local.facts())

    # ---- facts -----------------------------------------------------------------------------------

    def _facts_before(self, local: LocalRule, chunk: Chunk, members: NDArray[np.int64]) -> Memory:
        """Return the facts that losses may read."""
        facts: Memory = {}
        for name, fact in local.facts().items():
            known = chunk.memory.get(name)
            if fact.model == "received":
                facts[name] = self._worked_out(name, fact, chunk, members)
            elif fact.model == "trained":
                facts[name] = (
                    self._nothing_known(name, fact, chunk, members) if known is None else known
                )
            elif known is None:
                facts[name] = self._worked_out(name, fact, chunk, members)
            elif len(strangers := np.flatnonzero(~chunk.seen.cpu().numpy())):
                where = torch.from_numpy(strangers).to(chunk.seen.device)
                made = self._worked_out(name, fact, _part_of(chunk, where), members[strangers])
                facts[name] = {
                    leaf: known[leaf].index_copy(0, where, rows) for leaf, rows in made.items()
                }
        return facts

    def _worked_out(
        self,
        name: str,
        fact: Fact,
        chunk: Chunk,
        members: NDArray[np.int64],
        split: Split | None = None,
    ) -> Tree:
        """Return a fact of each client of a chunk, stacked."""
        own, still = (
            ({}, self.engine.network.initial())
            if fact.model == "first"
            else (chunk.params, chunk.still)
        )
        asked = self._asked(split or self.engine.view.train, self.ids[members], own, still, chunk)
        sums = sums_over_samples(asked, fact.sums, f"the fact {name!r}")
        made: Tree = sums if fact.then is None else vmap(fact.then)(sums)
        if not isinstance(made, dict):
            raise InputError(
                f"the fact {name!r} must be a dictionary of tensors, got {type(made).__name__}"
            )
        if strays := [leaf for leaf, rows in made.items() if not isinstance(rows, Tensor)]:
            raise InputError(
                f"the fact {name!r} must be a dictionary of tensors, but {strays[0]!r} is a "
                f"{type(made[strays[0]]).__name__}"
            )
        return made

    def _nothing_known(
        self, name: str, fact: Fact, chunk: Chunk, members: NDArray[np.int64]
    ) -> Tree:
        """Return zeros in the form of a fact that has not been computed yet."""
        train = self.engine.view.train
        clients = np.arange(train.clients) == self.ids[members[0]]
        one_sample = Split(
            train.of(int(self.ids[members[0]]))[:1], np.concatenate([[0], np.cumsum(clients)])
        )
        first = self._worked_out(
            name, fact, _part_of(chunk, torch.zeros(1, dtype=torch.int64)), members[:1], one_sample
        )
        return {
            leaf: torch.zeros_like(rows).expand(len(members), *rows.shape[1:]).clone()
            for leaf, rows in first.items()
        }

    def _asked(
        self, split: Split, clients: NDArray[np.int64], own: Tree, still: Tree, chunk: Chunk
    ) -> Asked:
        return Asked(
            network=self.engine.network,
            data=self.engine.data,
            split=split,
            clients=clients,
            keys=self._keys(clients).to(self.engine.network.device),
            params=own,
            still=still,
            sent=chunk.sent,
            each=chunk.each,
            memory=chunk.memory,
            seen=chunk.seen,
            round=chunk.round,
        )

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
        """Return loss and metrics of a model on the clients' own split."""
        engine = self.engine
        return evaluate_shared(
            engine.network, engine.data, params, engine.view.split(split), self.ids
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
            part = _part_of(chunk, here)
            asked = self._asked(
                samples, self.ids[here.cpu().numpy()], part.params, part.still, part
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

    # ---- reports and bytes -----------------------------------------------------------------------

    def _reports(self, when: str, chunk: Chunk, members: NDArray[np.int64]) -> Reports:
        """Compute the wanted reports of the models before or after local training."""
        reports: Reports = {}
        evaluated: dict[str, Measured] = {}
        if when == "after" and self.evaluates_local:
            evaluated = self._evaluate_local(chunk, members)
        for split, prefix in (("train", ""), ("val", "val_")):
            metrics = {f"{prefix}loss_{when}": "loss", f"{prefix}score_{when}": self.score}
            wanted = {
                name: metric for name, metric in metrics.items() if name in self.wanted_reports
            }
            if wanted:
                samples, clients = self._reported(self.engine.view.split(split), self.ids[members])
                whole = self.engine.training.report_samples is None
                known = evaluated.get(split) if whole else None
                measured = known or self._measure(chunk, samples, clients)
                nothing = np.full(len(members), np.nan)
                reports |= {
                    name: torch.from_numpy(measured.get(metric, nothing))
                    for name, metric in wanted.items()
                }
        return reports

    def _evaluate_local(self, chunk: Chunk, members: NDArray[np.int64]) -> dict[str, Measured]:
        """Evaluate the models of a trained chunk, and add the values to ``local_metrics``."""
        evaluated = {
            split: self._measure(
                chunk, self.engine.view.split(split), self.ids[members], evaluation=True
            )
            for split in ("val", "test")
        }
        for split, measured in evaluated.items():
            columns = self.local_metrics.setdefault(split, {})
            for name, values in measured.items():
                columns.setdefault(name, np.full(len(self.ids), np.nan))[members] = values
        return evaluated

    def _measure(
        self, chunk: Chunk, samples: Split, clients: NDArray[np.int64], *, evaluation: bool = False
    ) -> Measured:
        """Evaluate each client's model as it is now.

        It has the parts that the client keeps, but no second copies (``personal.``). Only for
        ``evaluation`` there is more than the loss and the task's own metrics.
        """
        own = {name: stack for name, stack in chunk.params.items() if not name.startswith(PERSONAL)}
        network, data = self.engine.network, self.engine.data
        more = (self.engine.metrics, self.engine.counting) if evaluation else ((), None)
        return evaluate_stacked(
            network, data, own, chunk.still, samples, clients, len(clients), *more
        )

    def _reported(
        self, split: Split, clients: NDArray[np.int64]
    ) -> tuple[Split, NDArray[np.int64]]:
        """Return the samples that clients' reports look at, and the clients' numbers in it."""
        limit = self.engine.training.report_samples
        if limit is None:
            return split, clients
        own = [split.of(int(client)) for client in clients]
        keys = [
            fold(self.engine.seed, self.round, int(client), Purpose.REPORT) for client in clients
        ]
        drawn = [
            held[choose(key, len(held), min(limit, len(held)))]
            for key, held in zip(keys, own, strict=True)
        ]
        return Split.from_lists(drawn), np.arange(len(clients))

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


def evaluations_for(reports: Iterable[str]) -> int:
    """Count the evaluations that some reports take.

    Loss and score of a model on a split come from the same evaluation.

    Examples
    --------
    >>> evaluations_for(["val_loss_before", "val_loss_after", "val_score_after", "lr"])
    2
    """
    return len(
        {name.replace("score", "loss") for name in reports if name not in ("lr", "gradient_weight")}
    )


def _gradient_weight(
    paces: Sequence[Pace], work: Sequence[NDArray[np.int64]], proximal: float
) -> Tensor:
    """Return the sum of the weights with which gradients enter each client's update."""
    weights = []
    for pace, steps in zip(paces, work, strict=True):
        lr = torch.as_tensor(pace.lr, dtype=torch.float64).cpu().expand(len(steps)).numpy()
        weights.append(gradient_weights(pace.optimizer, steps, proximal * lr))
    return torch.from_numpy(np.sum(weights, axis=0))


def refuse_second_training(trained: bool) -> None:
    """Refuse to train a cohort twice, because the memories of the first training would be lost."""
    if trained:
        raise InputError(
            "this cohort has already trained, and a second training would overwrite the memories "
            "of the first; valid: one train() per round, with a phase for each stage"
        )


def check_rows(each: Mapping[str, Tensor], clients: int) -> None:
    """Refuse tensors for each client that do not have one row per client.

    Examples
    --------
    >>> check_rows({"share": torch.ones(2)}, 3)
    Traceback (most recent call last):
    equipoise.errors.InputError: each['share'] has 2 rows for 3 clients; valid: one row per client
    """
    for name, rows in each.items():
        if len(rows) != clients:
            raise InputError(
                f"each[{name!r}] has {len(rows)} rows for {clients} clients; valid: one row per "
                "client"
            )


def question_of(method: Method, question: str) -> Callable[..., Any]:
    """Return the method that answers a question: of the local rule, or else of the aggregation.

    Examples
    --------
    >>> from equipoise.methods import build
    >>> class Counting(LocalRule):
    ...     def samples(self, client: Client):
    ...         return client.sum(torch.ones_like(client.y))
    >>> question_of(build("fedavg", local=Counting()), "samples").__name__
    'samples'
    """
    for part, kind in ((method.local, LocalRule), (method.aggregation, Aggregation)):
        answer = getattr(part, question, None)
        if callable(answer) and not hasattr(kind, question):
            return answer
    local = method.local
    own = {
        name
        for name in dir(type(local))
        if not name.startswith("_") and not hasattr(LocalRule, name)
    }
    raise unknown("question", question, own, where=f"the local rule {type(local).__name__}")


def repeated(tensor: Tensor, count: int) -> Tensor:
    """Repeat a tensor for every client.

    Examples
    --------
    >>> repeated(torch.zeros(3), 2).shape
    torch.Size([2, 3])
    """
    return tensor.expand(count, *tensor.shape).clone()


def _part_of(chunk: Chunk, where: Tensor) -> Chunk:
    """Return some of a chunk's clients."""

    def chosen(tree: Mapping[str, Tensor]) -> Tree:
        return {name: stack[where.to(stack.device)] for name, stack in tree.items()}

    return replace(
        chunk,
        params=chosen(chunk.params),
        each=chosen(chunk.each),
        memory={name: chosen(tree) for name, tree in chunk.memory.items()},
        seen=chunk.seen[where.to(chunk.seen.device)],
    )
