"""Steps recorded and replayed: what is kept, what is dropped, and what happens if it fails."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.cli.show.run import show_run
from equipoise.engine import blocks, replay, stacked, workshop
from equipoise.engine.phase_run import PhaseRun, Shape, Span
from equipoise.engine.replay import CudaRecorder, Replay
from equipoise.engine.settings import Machine, Training
from equipoise.engine.workshop import Workshop
from equipoise.host_copy import HostCopy
from equipoise.methods import build, names
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from equipoise.run.api import train
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from equipoise.tree import Magnitudes
from tests.engine.comparison import distance
from tests.engine.every_method import SETTINGS, VARIANTS, setting_for, skipped, trained_by
from tests.engine.federations import images
from tests.engine.gpu import needs_gpu
from tests.engine.rerun import Rerun


@dataclass(frozen=True)
class Given:
    x: torch.Tensor
    factor: float = 1.0


class Adding:
    """A program that adds what it is given to a total, and remembers how it was called."""

    def __init__(self, replay, device="cpu"):
        self.replay, self.total = replay, torch.zeros(3, device=device)
        self.ran, self.otherwise = 0, 0

    def program(self, given):
        self.ran += 1
        for each in given:
            self.total.add_(each.x * each.factor)

    def another_way(self):
        self.otherwise += 1

    def __call__(self, value, name="step", owner=0, otherwise=None):
        inputs = [Given(torch.full((3,), float(value), device=self.total.device))]
        self.replay.carry_out(owner, name, self.program, lambda: inputs, otherwise)


def test_a_program_runs_once_is_recorded_and_then_replayed():
    recorder = Rerun()
    add = Adding(Replay(recorder))
    for value in (1, 10, 100, 1000):
        add(value)
    assert add.total.tolist() == [1111.0] * 3
    assert (recorder.recorded, len(add.replay)) == (1, 1)
    # Another name, or another owner, is another program.
    add(1, name="other")
    add(1, owner=1)
    assert recorder.recorded == 1
    add(1, name="other")
    assert (recorder.recorded, add.total[0].item()) == (2, 1114.0)


def test_another_way_is_taken_until_a_program_is_recorded_the_third_time():
    recorder = Rerun()
    add = Adding(Replay(recorder))
    for _ in range(4):
        add(1, otherwise=add.another_way)
    assert (add.otherwise, recorder.recorded, add.total[0].item()) == (2, 1, 2.0)


def test_the_least_recently_used_graph_is_dropped_unless_it_is_in_use(monkeypatch):
    monkeypatch.setattr(replay, "MOST_GRAPHS", 2)
    monkeypatch.setattr(replay, "RECENT", 3)
    recorder = Rerun()
    add = Adding(Replay(recorder))
    for name in ("a", "a", "b", "b"):
        add(1, name)
    add(1, "a")
    assert (recorder.recorded, len(add.replay)) == (2, 2)
    # "b" was used a call before "a", and 3 calls before this one: it stays, and "c" runs plainly.
    add(1, "c")
    add(1, "c")
    assert recorder.recorded == 2
    # Now it was used 4 calls before.
    add(1, "c")
    assert recorder.recorded == 3
    ran = add.ran
    add(1, "a")
    add(1, "c")
    add(1, "b")
    # A replayed program of this recorder runs, too; "b" has lost its recording.
    assert (recorder.recorded, add.ran - ran, len(add.replay)) == (3, 3, 2)
    assert add.total[0].item() == 11.0


def test_only_so_many_programs_are_remembered(monkeypatch):
    monkeypatch.setattr(replay, "RECENT", 5)
    recorder = Rerun()
    add = Adding(Replay(recorder))
    for name in [*range(20), *range(20)]:
        add(1, name)
    assert recorder.recorded == 0
    for name in [*range(5), *range(5)]:
        add(1, name)
    assert recorder.recorded == 5


def test_all_graphs_are_dropped_when_their_pool_is_too_large():
    recorder = Rerun(most_bytes=35)
    add = Adding(Replay(recorder))
    for name in "abcd":
        add(1, name)
        add(1, name)
    assert (len(add.replay), recorder.bytes, recorder.begun) == (4, 40, 0)
    add(1, "e")
    add(1, "e")
    assert (len(add.replay), recorder.bytes, recorder.begun) == (1, 10, 1)
    # They are recorded again when they come again.
    add(1, "a")
    add(1, "a")
    assert len(add.replay) == 2


def test_a_program_that_needs_more_than_the_pool_should_have_is_not_dropped_again_and_again():
    recorder = Rerun(most_bytes=5)
    add = Adding(Replay(recorder))
    for _ in range(3):
        for name in "ab":
            add(1, name)
    assert (recorder.recorded, recorder.begun) == (2, 0)


def test_memory_that_runs_out_is_freed_before_a_program_is_given_up():
    recorder = Rerun()
    add = Adding(Replay(recorder))
    add(1, "a")
    add(1, "a")
    add(1, "b")
    recorder.fails = [torch.OutOfMemoryError("full")]
    add(1, "b")
    assert (len(add.replay), recorder.begun, add.replay.failure) == (1, 1, None)
    add(1, "c")
    ended = RuntimeError("the capture has failed")
    ended.__context__ = torch.OutOfMemoryError("full")
    recorder.fails = [ended, torch.OutOfMemoryError("still\nfull")]
    with pytest.warns(UserWarning, match="which is slower: still full"):
        add(1, "c")
    assert add.replay.failure == "still full"
    # Nothing is recorded any more.
    add(1, "c")
    assert (recorder.recorded, add.total[0].item()) == (2, 7.0)


def test_the_first_error_of_a_capture_is_reported():
    recorder = Rerun()
    add = Adding(Replay(recorder))
    add(1, "a")
    ended = RuntimeError("operation failed due to a previous error during capture")
    ended.__context__ = RuntimeError("this operation waits for the host")
    recorder.fails = [ended]
    with pytest.warns(UserWarning, match="which is slower: this operation waits for the host"):
        add(1, "a")


def test_graphs_of_an_owner_are_forgotten():
    recorder = Rerun()
    add = Adding(Replay(recorder))
    for owner in (0, 0, 1, 1):
        add(1, owner=owner)
    add.replay.forget(0)
    assert (len(add.replay), recorder.begun) == (1, 0)
    add(1, owner=0)
    assert recorder.recorded == 2
    add.replay.forget(1)
    assert (len(add.replay), recorder.begun) == (0, 1)


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self, held):
        self.held, self.itself = held, self


def test_graphs_that_lose_their_owner_during_a_recording_wait_for_its_end():
    """CUDA refuses to destroy a graph while another is captured."""
    old = Replay(Rerun())
    for _ in range(2):
        # The recording must not lead back to the object that keeps it.
        old.carry_out(0, "step", print, list)
    graph = weakref.ref(old._graphs[(0, "step")][0])
    garbage = [Cycle(old)]
    seen = []

    class Collecting(Rerun):
        def record(self, program):
            seen.append(gc.isenabled())
            garbage.clear()
            gc.collect()
            seen.append(graph() is not None)
            return super().record(program)

    del old
    add = Adding(Replay(Collecting()))
    add(1)
    assert graph() is not None
    add(1)
    assert seen == [False, True]
    assert graph() is None
    assert gc.isenabled()


def listed_spans(*spans):
    return [
        Span(turn, first, count, Shape(active, 8, masked, None))
        for turn, first, count, active, masked in spans
    ]


def test_blocks_end_where_clients_finish_and_where_a_recording_is_full(monkeypatch):
    monkeypatch.setattr(blocks, "STEPS_A_GRAPH", 4)

    class Fixed:
        """A phase whose clients and masks are listed step by step."""

        def __init__(self, *steps):
            self.steps = steps

        def shape_of(self, step):
            return Shape(self.steps[step][0], 8, self.steps[step][1], None)

    full, last, fewer = (5, False), (5, True), (3, False)
    run = Fixed(full, full, full, full, full, full, last, fewer, fewer)
    spans = list(blocks.spans_of([run], [(step, 0) for step in range(9)]))
    assert spans == listed_spans(
        (0, 0, 4, 5, False), (0, 4, 2, 5, False), (0, 6, 1, 5, True), (0, 7, 2, 3, False)
    )
    assert [len(block) for block in blocks.blocks_of(spans)] == [1, 2, 1]
    # Two phases in turns, of which the second ends earlier for some.
    runs = [Fixed(full, full), Fixed(full, fewer)]
    spans = list(blocks.spans_of(runs, [(0, 0), (0, 1), (1, 0), (1, 1)]))
    assert [len(block) for block in blocks.blocks_of(spans)] == [3, 1]


def trained(method, what, recorder=None, *, shapes=None, rounds=4):
    """Train unequal clients, in chunks of at most four."""
    federation, model, lr = SETTINGS[what]
    data, made = federation(), build(**VARIANTS.get(method, {"name": method}))
    trainer = Trainer(
        data,
        made,
        made.extend(model(), data.shape, 0),
        Training(
            rounds=rounds, cohort=7, batch_size=8, epochs=3, optimizer=Sgd(lr=lr, momentum=0.5)
        ),
        Machine(device="cpu", precision="float64", chunk=4),
        Evaluation(every=0),
        seed=0,
    )
    if recorder is not None:
        trainer.engine.workshop = Workshop(Replay(recorder))
    trainer.run()
    return trainer


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("fedavg", "images"),
        ("scaffold", "images"),
        ("feddyn", "images"),
        ("fedrep", "images"),
        ("ditto", "images"),
        ("perfedavg, hessian", "images"),
        ("grace", "images"),
        ("fedcrc", "text"),
    ],
)
def test_blocks_of_steps_give_the_numbers_of_single_steps(method, what):
    recorder = Rerun()
    found, wanted = trained(method, what, recorder), trained(method, what)
    assert recorder.recorded > 0
    models = [
        {f"global {name}": tensor for name, tensor in each.global_model.items()}
        for each in (found, wanted)
    ]
    assert distance(*models, skipped(models[1], what)) <= 1e-9


def equal_clients(rounds, recorder, sizes=(20,) * 6):
    trainer = Trainer(
        images(sizes=list(sizes)),
        build("fedavg"),
        Model(nn.Flatten(), nn.Linear(50, 4)),
        Training(rounds=rounds, cohort=3, batch_size=8),
        Machine(device="cpu", chunk=10),
        Evaluation(every=0),
        seed=0,
    )
    trainer.engine.workshop = Workshop(Replay(recorder))
    trainer.run()
    return trainer


def test_a_round_of_equal_clients_is_one_replay():
    recorder = Rerun()
    trainer = equal_clients(5, recorder)
    # Two full batches and one of four samples: a recording of the first kind, one of the second
    # from round 2 on, and from round 3 on one of the whole round.
    kinds = [name for _, name in trainer.engine.workshop._replay._graphs]
    steps = [[(count, shape.masked) for _, _, count, shape in name] for name in kinds]
    assert sorted(steps) == [[(1, False)], [(1, True)], [(2, False), (1, True)]]


def test_shapes_of_chunks_that_are_not_used_are_dropped(monkeypatch):
    monkeypatch.setattr(workshop, "MOST_SHAPES", 2)
    recorder = Rerun()
    engine = equal_clients(4, recorder).engine
    assert recorder.recorded > 0
    assert len(engine.workshop._trainings) == 1

    def train_with(clients, round_):
        method = build("fedavg")
        cohort = engine.cohort(method, torch.arange(clients).numpy(), round_)
        cohort.train({"model": engine.network.initial()}, {}, method.local)

    for round_, clients in enumerate((2, 4, 5)):
        train_with(clients, round_)
    assert [training.chunk.seen.shape[0] for training in engine.workshop._trainings.values()] == [
        4,
        5,
    ]
    # The graphs went with the tensors they use.
    owners = {owner for owner, _ in engine.workshop._replay._graphs}
    assert owners <= {training.number for training in engine.workshop._trainings.values()}
    # By bytes, only the newest shape stays.
    recorder.most_bytes = 1
    train_with(6, 3)
    assert len(engine.workshop._trainings) == 1


def test_a_run_whose_steps_cannot_be_replayed_says_so_in_its_summary(capsys):
    refusing = Rerun(fails=[RuntimeError("operation not permitted [b]when[/b] capturing")])
    with pytest.warns(UserWarning, match="cannot be replayed"):
        trainer = equal_clients(3, refusing)
    reason = "operation not permitted [b]when[/b] capturing"
    said = f"steps ran from Python and were not replayed on the GPU: {reason}"
    assert trainer.summary()["slowed_by"] == [said]
    assert "slowed_by" not in equal_clients(3, Rerun()).summary()
    run = train(
        images(splits=(0.6, 0.2, 0.2)), rounds=1, machine=Machine(device="cpu"), model="logistic"
    )
    show_run(run)
    assert "slow" not in capsys.readouterr().out
    run.summary["slowed_by"] = [said]
    show_run(run)
    assert f"slower than it could be: {said}" in " ".join(capsys.readouterr().out.split())


def test_a_gpu_without_kernels_or_samples_is_said_to_be_slow(monkeypatch):
    engine = equal_clients(1, Rerun()).engine
    monkeypatch.setattr(stacked, "why_not", lambda device: "Triton is not installed")
    assert engine.slowed_by == []
    monkeypatch.setattr(engine, "network", SimpleNamespace(device=torch.device("cuda", 0)))
    assert engine.slowed_by == [
        "steps ran from Python and were not replayed on the GPU: the samples are not in the memory "
        "of the GPU",
        "GPU kernels were not used: Triton is not installed",
    ]
    # Who switches replaying off knows why.
    monkeypatch.setattr(engine, "machine", Machine(device="cpu", replay=False))
    assert engine.slowed_by == ["GPU kernels were not used: Triton is not installed"]


def test_work_of_the_host_is_done_once_when_steps_have_been_launched():
    recorder = Rerun()
    engine = equal_clients(1, recorder).engine
    done = []
    # Without a GPU there is nothing to wait for.
    engine.while_busy(lambda: done.append("now"))
    assert done == ["now"]
    engine.workshop.meanwhile.append(lambda: done.append(recorder.recorded))
    method = build("fedavg")
    for round_ in range(2):
        cohort = engine.cohort(method, torch.arange(3).numpy(), round_)
        cohort.train({"model": engine.network.initial()}, {}, method.local)
    # The first kind of step was recorded in the round before, the second in this one.
    assert done == ["now", 2]


class NoScalars(TorchDispatchMode):
    """Refuses to read a tensor's number on the host, which no recording may do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def with_rules_of_their_own():
    """Return methods and variants, one for each local rule."""
    built = {method: build(method) for method in names()}
    built |= {method: build(**options) for method, options in VARIANTS.items()}
    return list({repr(method.local): name for name, method in reversed(built.items())}.values())


@pytest.mark.parametrize("method", with_rules_of_their_own())
def test_no_step_of_a_method_reads_a_number_on_the_host(method, monkeypatch):
    advance, steps = PhaseRun.advance, []

    def watched(self, *given):
        steps.append(given)
        with NoScalars():
            advance(self, *given)

    monkeypatch.setattr(PhaseRun, "advance", watched)
    # One client at a time, because vmap would hide an index that is read as a number.
    trained_by(method, setting_for(method), chunk=1, rounds=1)
    assert steps


@pytest.mark.parametrize("chunk", [10, 1])
def test_the_host_waits_only_when_everything_of_a_round_has_been_launched(monkeypatch, chunk):
    engine = equal_clients(3, Rerun()).engine
    engine.chunk = chunk
    order = []

    def watched(kind, name, what):
        original = getattr(kind, name)

        def noted(self, *args):
            order.append(what)
            return original(self, *args)

        monkeypatch.setattr(kind, name, noted)

    watched(Workshop, "train", "train")
    watched(Magnitudes, "__init__", "norms")
    watched(HostCopy, "read", "wait")
    method = build("fedavg")
    cohort = engine.cohort(method, torch.arange(3).numpy(), 5)
    cohort.train({"model": engine.network.initial()}, {}, method.local)
    trained = 3 if chunk == 1 else 1
    # Losses of every chunk, and then the norms, which are all float32.
    assert order == [*["train"] * trained, "norms", *["wait"] * (trained + 1)]


def test_an_optimizer_that_cannot_be_replayed_is_named():
    trainer = Trainer(
        images(),
        build("fedavg"),
        Model(nn.Flatten(), nn.Linear(50, 4)),
        Training(rounds=1, cohort=3, optimizer=Sgd(lr=0.1, momentum=0.9, dampening=0.5)),
        Machine(device="cpu", chunk=10),
        Evaluation(every=0),
        seed=0,
    )
    trainer.engine.workshop = Workshop(Replay(Rerun()))
    trainer.run()
    (what,) = trainer.summary()["slowed_by"]
    assert "dampening=0.5" in what


# ---- on a GPU ------------------------------------------------------------------------------------


@needs_gpu
def test_a_graph_freed_by_the_collector_does_not_break_another_recording():
    """A failed recording would be a warning, so an error."""
    thresholds = gc.get_threshold()
    adding = Adding(Replay(CudaRecorder(torch.device("cuda"))), "cuda")
    for _ in range(2):
        adding(1)
    garbage = Cycle(adding.replay)
    del adding
    add = Adding(Replay(CudaRecorder(torch.device("cuda"))), "cuda")

    def many_objects(given):
        # Enough new objects to start the collector, were it on.
        for _ in range(2000):
            Cycle([])
        Adding.program(add, given)

    add.program = many_objects
    add(1)
    del garbage
    gc.set_threshold(1, 1, 1)
    try:
        add(1)
    finally:
        gc.set_threshold(*thresholds)
    add(5)
    assert len(add.replay) == 1
    assert add.total.tolist() == [7.0, 7.0, 7.0]


@needs_gpu
def test_many_graphs_in_one_process_under_pressure_of_the_collector():
    """Replays come and go in cycles while others record, and every capture must succeed."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        garbage = []
        for _ in range(20):
            add = Adding(Replay(CudaRecorder(torch.device("cuda"))), "cuda")

            def program(given, add=add):
                garbage.clear()
                for _ in range(50):
                    Cycle([])
                gc.collect(0)
                Adding.program(add, given)

            add.program = program
            for name in range(8):
                for value in (1, 10, 100):
                    add(value, name)
            assert add.replay.failure is None
            assert len(add.replay) == 8
            assert add.total.tolist() == [8 * 111.0] * 3
            garbage.append(Cycle(add))
    finally:
        gc.set_threshold(*thresholds)


@needs_gpu
def test_graphs_share_their_memory_and_give_it_back():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    total = torch.zeros((), device="cuda")
    replay_ = Replay(CudaRecorder(torch.device("cuda")))

    def program(given):
        room = given[0].x.expand(1 << 22) * 2
        total.add_(room.sum())

    inputs = [Given(torch.ones(1, device="cuda"))]
    for name in range(10):
        for _ in range(3):
            replay_.carry_out(0, name, program, lambda: inputs)
    size = 4 << 22
    assert total.item() == 10 * 3 * 2 * (1 << 22)
    # Ten programs of 16 MiB each, in a pool for one.
    assert size <= replay_._recorder.bytes <= 3 * size
    replay_.forget(0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < size
