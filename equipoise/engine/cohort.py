"""The in-process engine: a cohort that answers with stacked tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap

from equipoise.client import Client
from equipoise.engine.batches import Batches, draw_batches
from equipoise.engine.chunking import chunk_by_rule
from equipoise.engine.contract import Personal
from equipoise.engine.data import DeviceData
from equipoise.engine.evaluation import Measured, evaluate_shared, evaluate_stacked
from equipoise.engine.local import Chunk, Pace, Workshop, finish_chunk
from equipoise.engine.memory import Memory, MemoryStore
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine, Training
from equipoise.engine.task import Task
from equipoise.errors import InputError, unknown
from equipoise.federation import Federation, Split
from equipoise.method import LocalRule, Method, Phase, Reports, Updates, mix_tree
from equipoise.models.layers import Forward
from equipoise.optimizers import Column, TorchOptimizer
from equipoise.random import Purpose, choose, fold, fold_tensor
from equipoise.tree import PERSONAL, Parts, Tree, select, size_in_bytes

# cuBLAS is deterministic only with a fixed workspace, and reads this once, before its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# The one tree of a client's memory that the engine itself reads: the parts its local rule keeps.
KEPT = "kept"

_REPORT_SPLITS = {
    "loss_before": "train",
    "loss_after": "train",
    "val_loss_before": "val",
    "val_loss_after": "val",
}


class StackedEngine:
    """Carries methods out in this process; see :class:`equipoise.engine.contract.Engine`.

    Parameters
    ----------
    federation : Federation
        The clients and their data; evaluation is always on these.
    model : nn.Module
        With ``features`` and ``head``.
    training : Training
        How clients train.
    machine : Machine
        Where, and in which arithmetic.
    seed : int
        Of all random numbers.
    view : Federation, optional
        What to train on, if it is not the federation itself.

    Examples
    --------
    >>> from equipoise.data import load
    >>> from equipoise.methods import build as method
    >>> from equipoise.models import build as model
    >>> digits = load("digits")
    >>> engine = StackedEngine(digits, model("logistic", shape=digits.shape, classes=10), Training(), Machine(device="cpu"))
    >>> cohort = engine.cohort(method("fedavg"), np.array([0, 1]), round_=0)
    >>> updates = cohort.train({"model": engine.network.initial()}, {}, method("fedavg").local)
    >>> updates.params["head.bias"].shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        federation: Federation,
        model: nn.Module,
        training: Training,
        machine: Machine,
        seed: int = 0,
        view: Federation | None = None,
    ) -> None:
        self.federation, self.training, self.machine, self.seed = federation, training, machine, seed
        self.view = view or federation
        device = machine.torch_device
        self.network = Network(model, Task(federation.task), device, machine.dtype, machine.autocast)
        self.data = DeviceData(self.view, device, machine.dtype)
        if len(self.data):
            self.network.try_out(*self.data.fetch(torch.arange(min(3, len(self.data)))), federation.outputs)
        self.memory = MemoryStore()
        self.absent: dict[int, str] = {}
        self.workshop = Workshop(replays=machine.replay and self.data.on_gpu)
        self._train_indices = torch.from_numpy(self.view.train.indices).to(device)
        if isinstance(machine.chunk, int):
            self.chunk = machine.chunk
        else:
            self.chunk = chunk_by_rule(
                self.network, self.data.inputs(torch.zeros(1, dtype=torch.int64))[0], training.batch_size
            )

    def cohort(self, method: Method, clients: NDArray[np.int64], round_: int) -> StackedCohort:
        """Gather clients for a round (counted from 0)."""
        return StackedCohort(self, method, np.sort(clients), round_)

    def evaluate(
        self, model: Tree, clients: NDArray[np.int64], *, personal: Personal | None = None
    ) -> dict[str, Measured]:
        """Evaluate the global model, or the personal models made of it, on the clients' validation and test splits."""
        splits = {name: self.federation.split(name) for name in ("val", "test")}
        if personal is None:
            return {n: evaluate_shared(self.network, self.data, model, split, clients) for n, split in splits.items()}
        still, own = self.personal_models(model, personal, clients)
        return {
            name: evaluate_stacked(self.network, self.data, own, still, split, clients, self.chunk)
            for name, split in splits.items()
        }

    def averaged_kept(self, method: Method, model: Tree) -> Tree:
        """Average what clients keep of the shared model, weighted as the method weighs clients."""
        clients = np.array(self.memory.clients, dtype=np.int64)
        layout = Layout(method.local, model)
        memory, _ = self.memory.read(clients, layout.first_memory(method.local, model), self.network.device)
        own = {name: stack for name, stack in memory[KEPT].items() if not name.startswith(PERSONAL)}
        return mix_tree(own, self.cohort(method, clients, 0).prior)

    def personal_models(self, model: Tree, personal: Personal, clients: NDArray[np.int64]) -> tuple[Tree, Tree]:
        """Return what clients' personal models share, and what differs, stacked in the order of ``clients``."""
        rule = personal.method.local
        layout = Layout(rule, model)
        memory, seen = self.memory.read(clients, layout.first_memory(rule, model), self.network.device)
        own = _personal_parts(memory.get(KEPT, {}))
        # Whoever holds no training samples cannot change its model.
        able = self.view.split("train").sizes[clients] > 0
        if rule.adapt():
            strangers = able & ~seen.cpu().numpy() if layout.kept else able
            own = self._tried(Adapting(rule), model, own, MemoryStore(), clients, strangers, personal)
        if personal.fine_tune:
            whole = {name: own.get(name, _repeated(tensor, len(clients))) for name, tensor in model.items()}
            begun = MemoryStore()
            begun.write(clients, {KEPT: whole})
            begun.commit()
            own = self._tried(FineTuning(personal.fine_tune), model, whole, begun, clients, able, personal)
        return {name: tensor for name, tensor in model.items() if name not in own}, own

    def _tried(
        self,
        rule: LocalRule,
        model: Tree,
        own: Tree,
        memory: MemoryStore,
        clients: NDArray[np.int64],
        who: NDArray[np.bool_],
        personal: Personal,
    ) -> Tree:
        """Return what personal models are made of after some clients follow a rule, whose memory is a passing one."""
        if not who.any():
            return own
        members = clients[who]
        # The learning rate is that of the latest round.
        cohort = StackedCohort(self, personal.method, members, max(personal.round - 1, 0), memory, Purpose.ADAPT)
        cohort.wanted_reports.clear()
        updates = cohort.train({"model": model}, {}, rule)
        memory.commit()
        kept, _ = memory.read(members, Layout(rule, model).first_memory(rule, model), self.network.device)
        where = torch.from_numpy(np.flatnonzero(who)).to(self.network.device)
        made = dict(own)
        for name, stack in {**updates.params, **updates.buffers, **_personal_parts(kept.get(KEPT, {}))}.items():
            made[name] = made.get(name, _repeated(model[name], len(clients))).index_copy(0, where, stack)
        return made

    @property
    def remembering(self) -> list[int]:
        """The clients that have a memory, in rising order."""
        return self.memory.clients

    def newcomers(self) -> Sequence[int]:
        """Nobody: all clients are there from the start."""
        return ()

    def keep(self) -> None:
        """Do nothing: models that may count are copied."""

    def commit(self, cohort: StackedCohort) -> None:
        """Make what was written in the cohort's round the newest memory."""
        self.memory.commit()

    def export(self) -> Tree:
        """Return all memories."""
        return self.memory.export()

    def restore(self, tensors: Tree) -> None:
        """Take memories back."""
        device = self.network.device
        self.memory.restore({n: t if n == "clients" else t.to(device) for n, t in tensors.items()})


class StackedCohort:
    """The clients of one round, stacked chunk by chunk; see :class:`equipoise.method.Cohort`.

    ``bytes_down`` and ``bytes_up`` count what has crossed the door so far.
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
        # Training itself has no purpose in its keys: it is what all other uses differ from.
        self.purpose = purpose
        self.ids = clients
        train = engine.view.train
        self.sizes = train.offsets[clients + 1] - train.offsets[clients]
        self.groups = engine.view.groups[clients]
        counts = torch.from_numpy(self.sizes.astype(np.float64))
        self.prior = counts / counts.sum() if method.weights == "size" else torch.full_like(counts, 1 / len(counts))
        self.wanted_reports = set(method.aggregation.needs)
        self.left_out: dict[int, str] = {}
        self.bytes_down = self.bytes_up = 0

    def train(self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule) -> Updates:
        """Send, have every client train, and collect; see :meth:`equipoise.method.Cohort.train`."""
        engine = self.engine
        layout = Layout(local, shared["model"])
        memory, seen = self.memory.read(self.ids, layout.first_memory(local, shared["model"]), engine.network.device)
        self._count_down(shared, each, layout, seen)

        order = np.argsort(-self.sizes, kind="stable")
        model, count = shared["model"], len(self.ids)
        # One stack for the whole cohort: chunks train views of it in place, so nothing is joined afterwards.
        stack = {name: _repeated(model[name], count) for name in layout.shared}
        collected: list[tuple[Memory, dict[str, Tree], Reports]] = []
        size = 1 if any(isinstance(self._optimizer(p), TorchOptimizer) for p in local.phases()) else engine.chunk
        for start in range(0, len(order), size):
            members = order[start : start + size]
            own = {name: rows[start : start + len(members)] for name, rows in stack.items()}
            collected.append(self._train_members(members, own, shared, each, local, layout, memory, seen))

        back = torch.from_numpy(np.argsort(order))
        in_order = bool((order[1:] > order[:-1]).all())

        def gather(stacks: list[Tensor]) -> Tensor:
            """Join stacks of clients, and put them in the order of the cohort's ids."""
            joined = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
            return joined if in_order else joined[back.to(joined.device)]

        def gather_tree(trees: list[Tree]) -> Tree:
            return {name: gather([tree[name] for tree in trees]) for name in trees[0]}

        def gather_trees(groups: list[dict[str, Tree]]) -> dict[str, Tree]:
            return {name: gather_tree([group[name] for group in groups]) for name in groups[0]}

        memories, uploads, reports = zip(*collected, strict=True)
        self.memory.forget_pending()
        self.memory.write(self.ids, gather_trees(list(memories)))
        sent = gather_tree([stack])
        updates = Updates(
            params={n: t for n, t in sent.items() if n not in engine.network.buffers},
            buffers={n: t for n, t in sent.items() if n in engine.network.buffers},
            uploads=gather_trees(list(uploads)),
            reports=gather_tree(list(reports)),
        )
        self.bytes_up += size_in_bytes([updates.params, updates.buffers, updates.uploads, updates.reports])
        return updates

    def evaluate(self, params: Tree, split: str) -> Reports:
        """Ask for loss and metrics of a model on the clients' own split."""
        engine = self.engine
        measured = evaluate_shared(engine.network, engine.data, params, engine.view.split(split), self.ids)
        self.bytes_down += len(self.ids) * size_in_bytes(params)
        answer = {name: torch.from_numpy(values) for name, values in measured.items()}
        self.bytes_up += size_in_bytes(answer)
        return answer

    def ask(self, question: str, *args: Any) -> Any:
        """Ask a client-side question of the local rule; each client looks at its whole training split.

        The question is a method of the local rule that takes a :class:`Client` and ``args`` and returns tensors.
        """
        local, engine = self.method.local, self.engine
        if not callable(getattr(local, question, None)) or hasattr(LocalRule, question):
            own = {name for name in dir(type(local)) if not name.startswith("_") and not hasattr(LocalRule, name)}
            raise unknown("question", question, own, where=f"the local rule {type(local).__name__}")
        model = args[0] if args and isinstance(args[0], dict) else engine.network.initial()
        layout = Layout(local, model)
        memory, seen = self.memory.read(self.ids, layout.first_memory(local, model), engine.network.device)
        keys = self._keys(self.ids)

        def of_one_client(x: Tensor, y: Tensor, mask: Tensor, memory: Memory, seen: Tensor, key: Tensor) -> Any:
            kept = memory.get(KEPT, {})
            client = Client(
                network=engine.network,
                params={**model, **kept},
                x=x,
                y=y,
                forward=Forward(train=False, mask=mask, key=key, stacked=True),
                sent={"model": model},
                each={},
                memory=memory,
                seen=seen,
            )
            return getattr(local, question)(client, *args)

        answers = []
        for start in range(0, len(self.ids), engine.chunk):
            stop = min(start + engine.chunk, len(self.ids))
            batches = self._whole_split(self.ids[start:stop])
            x, y = engine.data.fetch(batches.positions[:, 0])
            width = torch.arange(x.shape[1], device=x.device)
            mask = (width < torch.from_numpy(batches.counts[:, :1]).to(x.device)).to(engine.network.dtype)
            part = {name: {n: t[start:stop] for n, t in tree.items()} for name, tree in memory.items()}
            answers.append(vmap(of_one_client)(x, y, mask, part, seen[start:stop], keys[start:stop]))
        self.bytes_down += len(self.ids) * size_in_bytes(args)
        leaves = [torch.utils._pytree.tree_flatten(answer) for answer in answers]
        joined = [torch.cat(parts) for parts in zip(*(flat for flat, _ in leaves), strict=True)]
        answer = torch.utils._pytree.tree_unflatten(joined, leaves[0][1])
        self.bytes_up += size_in_bytes(answer)
        return answer

    def without(self, ids: Iterable[int]) -> StackedCohort:
        """Return the cohort less some clients."""
        return StackedCohort(
            self.engine, self.method, np.setdiff1d(self.ids, list(ids)), self.round, self.memory, *self.purpose
        )

    def _whole_split(self, clients: NDArray[np.int64]) -> Batches:
        sizes = self.engine.view.train.sizes[clients]
        return self._draw(clients, 0, batch_size=int(sizes.max()), epochs=1, steps=1, shuffle=False)

    def _keys(self, clients: NDArray[np.int64]) -> Tensor:
        device = self.engine.network.device
        return fold_tensor(fold(self.engine.seed, self.round, *self.purpose), torch.from_numpy(clients).to(device))

    def _draw(self, clients: NDArray[np.int64], phase: int, **how: Any) -> Batches:
        engine = self.engine
        keys = self._keys(clients)
        return draw_batches(engine.view.train, engine._train_indices, clients, keys, phase=phase, **how)

    def _optimizer(self, phase: Any) -> Any:
        return phase.optimizer or self.engine.training.optimizer

    def _train_members(
        self,
        members: NDArray[np.int64],
        moving: Tree,
        shared: Mapping[str, Tree],
        each: Mapping[str, Tensor],
        local: LocalRule,
        layout: Layout,
        memory: Memory,
        seen: Tensor,
    ) -> tuple[Memory, dict[str, Tree], Reports]:
        """Train the moving parameters of one chunk in place, and give its new memory, uploads and reports."""
        engine, training = self.engine, self.engine.training
        device = engine.network.device
        everyone = len(members) == len(self.ids) and bool((np.diff(members) == 1).all())
        where = torch.from_numpy(members).to(device)

        def of_members(tree: Mapping[str, Tensor]) -> Tree:
            return {name: t.to(device) if everyone else t.to(device)[where] for name, t in tree.items()}

        own_memory = {name: of_members(tree) for name, tree in memory.items()}
        kept = own_memory.pop(KEPT, {})
        model = shared["model"]
        chunk = Chunk(
            network=engine.network,
            data=engine.data,
            augment=training.augment,
            params={**moving, **kept},
            still={n: t for n, t in model.items() if n not in moving and n not in kept},
            sent=shared,
            each=of_members(each),
            memory=own_memory,
            seen=seen if everyone else seen[where],
        )
        reports = self._losses("before", chunk, members)
        batches: list[Batches] = []
        paces = []
        for index, phase in enumerate(local.phases()):
            if phase.batch == "same" and batches:
                batches.append(batches[-1])
            else:
                how = {
                    "epochs": phase.epochs or training.epochs,
                    "steps": phase.steps or (None if phase.epochs else training.steps),
                    "a_step": phase.gradient.batches,
                }
                batches.append(
                    self._draw(
                        self.ids[members], index, batch_size=training.batch_size, shuffle=training.shuffle, **how
                    )
                )
            optimizer = self._optimizer(phase)
            lr: Column = optimizer.lr * training.schedule.factor(self.round, training.rounds)
            if "step_factor" in chunk.each:
                lr = lr * chunk.each["step_factor"]
            paces.append(Pace(optimizer, lr, training.clip))
        losses, steps = engine.workshop.train(chunk, local, batches, paces)
        remembered, uploads = finish_chunk(chunk, local, steps, paces[0].lr)
        reports |= {"train_loss": losses, "steps": steps} | self._losses("after", chunk, members)
        if "lr" in self.wanted_reports:
            reports["lr"] = torch.as_tensor(paces[0].lr, dtype=torch.float64).cpu().expand(len(members)).clone()
        if layout.kept:
            remembered = {KEPT: {name: chunk.params[name] for name in layout.kept}, **remembered}
        return remembered, uploads, reports

    def _losses(self, when: str, chunk: Chunk, members: NDArray[np.int64]) -> Reports:
        """Compute the reports somebody needs, of the models as they are before or after local training."""
        engine = self.engine
        reports = {}
        for name in sorted(report for report in self.wanted_reports if report.endswith(when)):
            split, clients = self._reported(engine.view.split(_REPORT_SPLITS[name]), self.ids[members])
            shared = {n: t for n, t in chunk.params.items() if not n.startswith(PERSONAL)}
            measured: Measured = evaluate_stacked(
                engine.network, engine.data, shared, chunk.still, split, clients, len(members)
            )
            reports[name] = torch.from_numpy(measured["loss"])
        return reports

    def _reported(self, split: Split, clients: NDArray[np.int64]) -> tuple[Split, NDArray[np.int64]]:
        """Return the samples that clients' reports look at, and the clients' places among them."""
        limit = self.engine.training.report_samples
        if limit is None:
            return split, clients
        own = [split.of(int(client)) for client in clients]
        keys = [fold(self.engine.seed, self.round, int(client), Purpose.REPORT) for client in clients]
        drawn = [held[choose(key, len(held), min(limit, len(held)))] for key, held in zip(keys, own, strict=True)]
        return Split.from_lists(drawn), np.arange(len(clients))

    def _count_down(self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], layout: Layout, seen: Tensor) -> None:
        kept_here = {name.removeprefix(PERSONAL) for name in layout.kept if not name.startswith(PERSONAL)}
        kept = size_in_bytes({n: t for n, t in shared["model"].items() if n in kept_here})
        strangers = len(self.ids) - int(seen.sum()) if kept else 0
        self.bytes_down += len(self.ids) * (size_in_bytes(shared) - kept) + strangers * kept + size_in_bytes(dict(each))


class Layout:
    """Which tensors of a client move up, which stay with it, and which neither move nor differ.

    Parameters
    ----------
    local : LocalRule
        Whose phases and kept parts to lay out.
    model : Tree
        The global model.
    """

    def __init__(self, local: LocalRule, model: Tree) -> None:
        parts = (local.keeps,) if isinstance(local.keeps, str) else local.keeps
        self.kept: list[str] = []
        for part in parts:
            if part == "personal" or part.startswith(PERSONAL):
                base = part.removeprefix("personal").removeprefix(".") or "all"
                self.kept += [PERSONAL + name for name in select(model, base)]
            else:
                self.kept += select(model, part)
        names = [*model, *(name for name in self.kept if name.startswith(PERSONAL))]
        moving = {name for phase in local.phases() for name in select(names, phase.move)}
        if stray := sorted(name for name in moving if name.startswith(PERSONAL) and name not in self.kept):
            raise InputError(f"{type(local).__name__} moves {stray[0]} but does not keep it")
        self.shared = [name for name in model if name in moving and name not in self.kept]

    def first_memory(self, local: LocalRule, model: Tree) -> Memory:
        """Return the memory of a client that has never taken part."""
        memory = local.first_memory(model)
        if self.kept:
            memory = {KEPT: {name: model[name.removeprefix(PERSONAL)] for name in self.kept}, **memory}
        return memory


@dataclass(frozen=True)
class Adapting(LocalRule):
    """What a client without a memory does to make the received model its own; see :meth:`LocalRule.adapt`."""

    rule: LocalRule

    @property
    def keeps(self) -> Parts:  # type: ignore[override]
        """Keep what the rule keeps."""
        return self.rule.keeps

    def phases(self) -> Sequence[Phase]:
        """Adapt."""
        return self.rule.adapt()

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Begin with what the rule begins with."""
        return self.rule.first_memory(model)


@dataclass(frozen=True)
class FineTuning(LocalRule):
    """Local steps that start from a client's personal model."""

    steps: tuple[Phase, ...]
    keeps = "all"

    def phases(self) -> Sequence[Phase]:
        """Fine-tune."""
        return self.steps


def _personal_parts(kept: Tree) -> Tree:
    """Return kept parts the names they have in the personal model."""
    return {name.removeprefix(PERSONAL): stack for name, stack in kept.items()}


def _repeated(tensor: Tensor, count: int) -> Tensor:
    return tensor.expand(count, *tensor.shape).clone()


@contextmanager
def exact_arithmetic(machine: Machine) -> Iterator[None]:
    """Ask PyTorch for deterministic kernels, and for TF32 only if the machine settings say so, while the block runs."""
    cudnn, matmul, deterministic = torch.backends.cudnn, torch.backends.cuda.matmul, torch.utils.deterministic
    # Deterministic mode would also overwrite all fresh memory, which costs time and matters only to code that reads it.
    wanted = (
        (cudnn, "benchmark", False),
        (cudnn, "allow_tf32", machine.tf32),
        (matmul, "allow_tf32", machine.tf32),
        (deterministic, "fill_uninitialized_memory", False),
    )
    found = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
    mode = torch.get_deterministic_debug_mode()
    # As ``use_deterministic_algorithms(True)``, which would also import PyTorch's compiler: a second at every start.
    torch.set_deterministic_debug_mode("error")
    for owner, name, value in wanted:
        setattr(owner, name, value)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        for owner, name, value in found:
            setattr(owner, name, value)
