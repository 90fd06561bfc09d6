"""The in-process engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equipoise import tasks
from equipoise.attributes import Counting
from equipoise.engine.adapting import Adapting, FineTuning
from equipoise.engine.chunking import chunk_by_rule
from equipoise.engine.cohort import StackedCohort
from equipoise.engine.contract import Personal
from equipoise.engine.delivered import Delivered
from equipoise.engine.encoding import open_data
from equipoise.engine.evaluation import (
    Measured,
    evaluate_shared,
    launch_shared,
    launch_stacked,
)
from equipoise.engine.layout import KEPT, Layout
from equipoise.engine.memory import Memory, MemoryStore, checked_memory
from equipoise.engine.network import Network
from equipoise.engine.replay import CudaRecorder, Replay
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stack import repeated
from equipoise.engine.tape import Tapes, pays_for
from equipoise.engine.workshop import Workshop
from equipoise.errors import InputError
from equipoise.federation import Federation, Split
from equipoise.losses import check_loss
from equipoise.method import LocalRule, Method, mix_tree
from equipoise.metrics import Metric
from equipoise.models.kernel_modules import why_not
from equipoise.random import Purpose
from equipoise.tree import PERSONAL, Tree


class StackedEngine:
    """Runs methods in this process; see :class:`equipoise.engine.contract.Engine`.

    Parameters
    ----------
    federation : Federation
        The clients and their data. Evaluation always uses these.
    model : nn.Module
        The model; methods that name parts need one with ``features`` and ``head``.
    training : Training
        Settings of training.
    machine : Machine
        Device and precision.
    seed : int
        Seed of all random numbers.
    view : Federation, optional
        The federation to train on, if it is not ``federation``.

    Examples
    --------
    >>> from equipoise.data import load
    >>> from equipoise.methods import build as method
    >>> from equipoise.models import build as model
    >>> digits = load("digits")
    >>> logistic = model("logistic", shape=digits.shape, classes=10)
    >>> engine = StackedEngine(digits, logistic, Training(), Machine(device="cpu"))
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
        self.federation, self.training, self.machine, self.seed = (
            federation,
            training,
            machine,
            seed,
        )
        self.view = view or federation
        device = machine.torch_device
        task = tasks.build(federation.task)
        check_loss(training.loss, task)
        self.network = Network(
            model,
            task.with_loss(training.loss),
            device,
            machine.dtype,
            machine.autocast,
            machine.frozen_dtype,
        )
        self.data = open_data(self.network, self.view, training, machine)
        self.memory = MemoryStore()
        self.delivered = Delivered()
        self.absent: dict[int, str] = {}
        self.total_was_read = False
        # Whether a warning has said what to do about updates that cannot be used.
        self.gave_advice = False
        # What the host does, once each, when the training of all chunks has been launched.
        self.launched: list[Callable[[], None]] = []
        self.metrics: tuple[Metric, ...] = ()
        self.counting: Counting | None = None
        self.train_indices = torch.from_numpy(self.view.train.indices).to(device)
        largest = int(self.view.train.sizes.max(initial=1))
        samples = min(training.batch_size, largest)
        if isinstance(machine.chunk, int):
            self.chunk = machine.chunk
            if self.chunk > 1 and self.network.unstackable:
                raise InputError(
                    f"machine.chunk is {self.chunk}, but the model cannot be called for many "
                    f"clients at once: {self.network.unstackable}; valid: chunk 1 or auto, which "
                    "trains them one by one"
                )
        else:
            self.chunk = chunk_by_rule(self.network, samples, tf32=machine.tf32)
        together = min(self.chunk, len(self.view.train.sizes))
        taped = self.data.on_cpu and pays_for(self.network, samples * together)
        self.workshop = Workshop(
            Replay(CudaRecorder(device)) if machine.replay and self.data.on_gpu else None,
            Tapes() if machine.replay and taped else None,
        )

    def cohort(self, method: Method, clients: NDArray[np.int64], round_: int) -> StackedCohort:
        """Return the cohort of a round (counted from 0)."""
        if method.needs_images and self.network.encoded:
            raise InputError(
                f"method {method.name!r} works on images, but this engine has encoded them; valid: "
                "an engine made with machine.carrying_out(method)"
            )
        return StackedCohort(self, method, np.sort(clients), round_)

    def first_memory(self, local: LocalRule, model: Tree) -> Memory:
        """Return the memory of a client that has never taken part, without its facts."""
        layout = Layout(local, model)
        kept = {KEPT: layout.kept_parts(model)} if layout.kept else {}
        return {
            **kept,
            **checked_memory(local.first_memory(model), f"first_memory of {type(local).__name__}"),
        }

    def remembers(self, local: LocalRule, model: Tree) -> bool:
        """Return whether clients keep anything from one round to the next."""
        return bool(self.first_memory(local, model) or local.facts() or local.finishes)

    def evaluate(
        self, model: Tree, clients: NDArray[np.int64], *, personal: Personal | None = None
    ) -> dict[str, Measured]:
        """Evaluate the global model, or personal models made from it, on ``val`` and ``test``."""
        return self.launch_evaluation(model, clients, personal=personal)()

    def launch_evaluation(
        self, model: Tree, clients: NDArray[np.int64], *, personal: Personal | None = None
    ) -> Callable[[], dict[str, Measured]]:
        """Do the same as :meth:`evaluate`, but do not wait for a GPU; return what waits."""
        splits = {name: self.federation.split(name) for name in ("val", "test")}
        wanted = (self.metrics, self.counting)
        if personal is None:
            launched = {
                name: launch_shared(self.network, self.data, model, split, clients, *wanted)
                for name, split in splits.items()
            }
        else:
            still, own = self.personal_models(model, personal, clients)
            launched = {
                name: launch_stacked(
                    self.network, self.data, own, still, split, clients, self.chunk, *wanted
                )
                for name, split in splits.items()
            }
        return lambda: {name: read() for name, read in launched.items()}

    def evaluate_server(self, model: Tree) -> dict[str, Measured]:
        """Evaluate the global model on the samples that the server holds, by split."""
        nobody_else = np.array([0])
        return {
            name: evaluate_shared(
                self.network,
                self.data,
                model,
                Split.from_lists([positions]),
                nobody_else,
                self.metrics,
            )
            for name, positions in self.federation.server.items()
        }

    def averaged_kept(self, method: Method, model: Tree) -> Tree:
        """Return the mean of the parts that clients keep, with the method's weights."""
        clients = np.array(self.memory.clients, dtype=np.int64)
        return mix_tree(
            self.kept_parts(method, model, clients), self.cohort(method, clients, 0).prior
        )

    def kept_parts(self, method: Method, model: Tree, clients: NDArray[np.int64]) -> Tree:
        """Return the parts of the shared model that clients keep, stacked as in ``clients``."""
        memory, _ = self.memory.read(
            clients, self.first_memory(method.local, model), self.network.device
        )
        return {
            name: stack
            for name, stack in memory.get(KEPT, {}).items()
            if not name.startswith(PERSONAL)
        }

    def refuse_keeping_local(self, method: Method) -> None:
        """Refuse nothing: all models are in this process."""

    def personal_models(
        self, model: Tree, personal: Personal, clients: NDArray[np.int64]
    ) -> tuple[Tree, Tree]:
        """Return common and stacked tensors of personal models, in the order of ``clients``."""
        rule = personal.method.local
        memory, seen = self.memory.read(
            clients, self.first_memory(rule, model), self.network.device
        )
        own = _personal_parts(memory.get(KEPT, {}))
        # A client without training samples cannot change its model.
        able = self.view.split("train").sizes[clients] > 0
        if rule.adapt():
            strangers = able & ~seen.cpu().numpy() if rule.keeps else able
            own = self._tried(
                Adapting(rule), model, own, MemoryStore(), clients, strangers, personal
            )
        if personal.fine_tune:
            whole = {
                name: own.get(name, repeated(tensor, len(clients)))
                for name, tensor in model.items()
            }
            begun = MemoryStore()
            begun.write(clients, {KEPT: whole})
            begun.commit()
            own = self._tried(
                FineTuning(personal.fine_tune), model, whole, begun, clients, able, personal
            )
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
        """Return parts of personal models after clients run a rule with a temporary memory."""
        if not who.any():
            return own
        members = clients[who]
        # The learning rate is that of the latest round.
        cohort = StackedCohort(
            self, personal.method, members, max(personal.round - 1, 0), memory, Purpose.ADAPT
        )
        cohort.wanted_reports.clear()
        updates = cohort.train({"model": model}, {}, rule)
        memory.commit()
        made, _ = memory.read(members, self.first_memory(rule, model), self.network.device)
        where = torch.from_numpy(np.flatnonzero(who)).to(self.network.device)
        changed = dict(own)
        for name, stack in {
            **updates.params,
            **updates.buffers,
            **_personal_parts(made.get(KEPT, {})),
        }.items():
            changed[name] = changed.get(name, repeated(model[name], len(clients))).index_copy(
                0, where, stack
            )
        return changed

    @property
    def slowed_by(self) -> list[str]:
        """What makes steps on a GPU slower than they could be, one text each."""
        found = []
        on_gpu, not_replayed = self.network.device.type == "cuda", self.workshop.not_replayed
        if on_gpu and self.machine.replay and not self.data.on_gpu:
            not_replayed = "the samples are not in the memory of the GPU"
        if not_replayed is not None:
            found.append(f"steps ran from Python and were not replayed on the GPU: {not_replayed}")
        if on_gpu and (no_kernels := why_not(self.train_indices.device)) is not None:
            found.append(f"GPU kernels were not used: {no_kernels}")
        return found

    @property
    def remembering(self) -> list[int]:
        """The clients that have a memory, in ascending order."""
        return self.memory.clients

    def newcomers(self) -> Sequence[int]:
        """Return an empty list: all clients take part from the start."""
        return ()

    def keep(self) -> None:
        """Do nothing: the best models are copied."""

    @property
    def defers(self) -> bool:
        """Whether a GPU trains while the host does other work."""
        return self.network.device.type == "cuda"

    @property
    def keeps_samples(self) -> bool:
        """Whether the samples are in the memory of the GPU."""
        return self.data.on_gpu

    def while_busy(self, work: Callable[[], None]) -> None:
        """Do some work while a GPU trains the next chunk of clients; without a GPU, now."""
        if self.defers:
            self.workshop.meanwhile.append(work)
        else:
            work()

    def after_launch(self, work: Callable[[], None]) -> None:
        """Do some work when the training of all chunks has been launched; without a GPU, now."""
        if self.defers:
            self.launched.append(work)
        else:
            work()

    def commit(self, cohort: StackedCohort) -> None:
        """Mark the memories that the cohort wrote in its round as the newest ones."""
        self.memory.commit(cohort.ids)
        for name in cohort.delivers:
            self.delivered.mark(name, cohort.ids)

    def export(self) -> Tree:
        """Return all memories, and which clients hold trees that are sent only once."""
        return {**self.memory.export(), **self.delivered.export()}

    def restore(self, tensors: Tree) -> None:
        """Read what :meth:`export` wrote."""
        device = self.network.device
        memories = self.delivered.restore(tensors)
        self.memory.restore({n: t if n == "clients" else t.to(device) for n, t in memories.items()})


def _personal_parts(kept: Tree) -> Tree:
    """Return kept parts with their names in the personal model."""
    return {name.removeprefix(PERSONAL): stack for name, stack in kept.items()}
