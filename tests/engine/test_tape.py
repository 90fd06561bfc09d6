"""Tapes: the same bits as the program, and programs that no tape may stand for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.data.cache import MappedArray
from equipoise.engine import stacked, tape
from equipoise.engine.settings import Machine, Training
from equipoise.engine.tape import RUNS_BEFORE, Apart, NotRecordable, Tapes, record
from equipoise.method import LocalRule, Method, Phase
from equipoise.methods import build
from equipoise.methods.fedsam import SharpnessGradient
from equipoise.models.base import Model
from equipoise.optimizers import Adam, Schedule, Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.every_method import SETTINGS, fits, trained_by
from tests.engine.federations import images
from tests.engine.local_rules import Declared


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stacked_gradient(weight, x, y):
    """The gradient of many clients, as a step computes it."""
    leaf = weight.detach().requires_grad_()

    def of_one(weight, x, y):
        return nn.functional.cross_entropy(torch.relu(x @ weight), y)

    losses = torch.func.vmap(of_one)(leaf, x, y)
    return [losses.detach(), *torch.autograd.grad(losses.sum(), [leaf])]


def batches(seed):
    y = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, (3, 5)))
    return [drawn(3, 6, 4, seed=seed), drawn(3, 5, 6, seed=seed + 100), y]


def test_a_tape_gives_the_bits_of_the_program():
    recorded, outputs = record(stacked_gradient, batches(0))
    assert torch.equal(outputs[1], stacked_gradient(*batches(0))[1])
    for seed in range(5):
        found, wanted = recorded(*batches(seed)), stacked_gradient(*batches(seed))
        assert all(map(torch.equal, found, wanted))
        assert [t.stride() for t in found] == [t.stride() for t in wanted]


def code_of(recorded):
    return recorded.__wrapped__.__code__.co_code


def test_operations_without_effect_are_left_out():
    plain, _ = record(lambda x: [x.exp()], [drawn(3)])
    padded, _ = record(
        lambda x: [(x.view(3).expand(3).detach() * 1).exp(), x.sin()][:1], [drawn(3)]
    )
    assert code_of(padded) == code_of(plain)


def test_what_depends_on_no_input_is_computed_once():
    x, other = torch.ones(3), torch.zeros(3)
    recorded, _ = record(lambda x: [x + torch.arange(3).exp()], [x])
    plain, _ = record(lambda x: [x + other], [x])
    assert code_of(recorded) == code_of(plain)
    assert torch.equal(recorded(x)[0], x + torch.arange(3).exp())
    # But not if it is changed, by the program or by whoever gets it.
    changing, _ = record(lambda x: [torch.zeros(3).add_(x), torch.zeros(3)], [x])
    for _ in range(2):
        total, zeros = changing(x)
        assert (total.tolist(), zeros.tolist()) == ([1.0] * 3, [0.0] * 3)
        zeros += 1


def test_changes_in_place_are_repeated_in_order():
    def program(x, y):
        total = x.clone()
        view = total[1:]
        before = view.sum()
        view.mul_(y)
        return [total, before, view.sum()]

    recorded, _ = record(program, [drawn(4), drawn(3)])
    given = [drawn(4, seed=1), drawn(3, seed=2)]
    assert all(map(torch.equal, recorded(*given), program(*given)))


def test_a_tensor_that_was_given_twice_may_be_two_in_the_next_run():
    x = drawn(3)
    recorded, _ = record(lambda a, b: [a - 2 * b], [x, x])
    one, other = drawn(3, seed=1), drawn(3, seed=2)
    assert torch.equal(recorded(one, other)[0], one - 2 * other)


def test_other_tensors_are_read_in_every_run():
    scale = torch.tensor(2.0)
    recorded, _ = record(lambda x: [x * scale], [drawn(3)])
    scale.fill_(3.0)
    assert torch.equal(recorded(torch.ones(3))[0], torch.full((3,), 3.0))


def test_memory_is_freed_as_by_the_program():
    recorded, _ = record(lambda x: [x.exp().sin().cos()], [drawn(3)])
    variables = recorded.__wrapped__.__code__.co_varnames
    # The input, and three results of which two are deleted on the way.
    assert len(variables) == 4


@pytest.mark.parametrize(
    "program",
    [
        lambda x: [x * x.sum().item()],
        lambda x: [x if x[0] > 0 else -x],
        lambda x: [x + torch.rand(3)],
        lambda x: [nn.functional.dropout(x)],
        lambda x: [x[x > 0]],
        lambda x: [x.nonzero()],
        lambda x: [x + max(x.tolist())],
        lambda x: [x + float(x.numpy().max())],
    ],
    ids=["item", "branch", "random", "dropout", "mask", "nonzero", "list", "array"],
)
def test_programs_that_depend_on_values_or_chance_are_not_recorded(program):
    state = torch.get_rng_state()
    with pytest.raises(NotRecordable):
        record(program, [drawn(3)])
    assert torch.equal(torch.get_rng_state(), state)


def carried_out(tapes, name, program, given):
    """Run a program of one argument."""
    return tapes.carry_out(name, lambda _, own: program(own), Apart(()), given)


def test_a_program_that_cannot_be_recorded_runs_from_python():
    tapes = Tapes()
    for number in range(6):
        found = carried_out(tapes, "item", lambda x: x * x.item(), torch.tensor(float(number)))
        assert found == number**2
    assert tapes.repeated == 0


def repeated_gradients(lstm):
    """Compute gradients of an LSTM six times, and count how many a tape has made."""
    tapes = Tapes()

    def gradient(x):
        return torch.autograd.grad(lstm(x)[0].square().sum(), [*lstm.parameters()])

    for seed in range(6):
        x = drawn(4, 2, 2, seed=seed).float()
        found = carried_out(tapes, "lstm", gradient, x)
        assert all(map(torch.equal, found, gradient(x)))
    return tapes.repeated


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both_ways", [False, True])
def test_the_gradient_of_an_lstm_is_repeated(both_ways, layers):
    lstm = nn.LSTM(2, 3, layers, bidirectional=both_ways)
    assert repeated_gradients(lstm) == 6 - RUNS_BEFORE - 2


def test_operations_that_cannot_be_called_from_python_are_not_repeated(monkeypatch):
    """Without what oneDNN keeps for the gradient of an LSTM, its gradient gets None for it."""
    monkeypatch.setattr(tape, "_KEEPING", set())
    lstm = nn.LSTM(2, 3)
    with_onednn = torch.backends.mkldnn.is_available()
    assert repeated_gradients(lstm) == (0 if with_onednn else 6 - RUNS_BEFORE - 2)


def test_a_tape_that_returns_something_else_is_never_used():
    """Numbers that do not come from tensors are constants to a tape."""
    tapes, calls = Tapes(), count()
    for number in range(8):
        x = drawn(3, seed=number)
        assert torch.equal(carried_out(tapes, "count", lambda x: x + next(calls), x), x + number)
    assert tapes.repeated == 0


def test_nan_does_not_keep_a_tape_from_being_used():
    tapes = Tapes()
    for _ in range(6):
        found = carried_out(tapes, "nan", lambda x: x * 2, torch.tensor([float("nan"), 1.0]))
        assert found[1] == 2
    assert tapes.repeated == 6 - RUNS_BEFORE - 2


def test_shapes_layouts_names_and_forms_are_told_apart():
    tapes = Tapes()

    def carried(name, given):
        return carried_out(tapes, name, lambda own: {k: v + 1 for k, v in own.items()}, given)

    for _ in range(5):
        carried("a", {"x": torch.zeros(2, 3)})
    assert tapes.repeated == 1
    for name, given in [
        ("b", {"x": torch.zeros(2, 3)}),
        ("a", {"x": torch.zeros(3, 2)}),
        ("a", {"x": torch.zeros(3, 2).t()}),
        ("a", {"x": torch.zeros(2, 3, dtype=torch.float64)}),
        ("a", {"y": torch.zeros(2, 3)}),
    ]:
        assert list(carried(name, given)) == list(given)
    assert tapes.repeated == 1


def test_what_lasts_is_told_apart_by_shapes_layouts_and_forms_but_not_by_values():
    tapes, given = Tapes(), torch.ones(2)

    def product(lasting, own):
        return {name: factor * own for name, factor in lasting.items()}

    for number in range(6):
        found = tapes.carry_out("product", product, Apart({"x": torch.tensor(number)}), given)
        assert found["x"].tolist() == [number, number]
    assert tapes.repeated == 6 - RUNS_BEFORE - 2
    for lasting in ({"y": torch.tensor(3)}, {"x": torch.tensor(3.0)}, {"x": torch.ones(1)}):
        found = tapes.carry_out("product", product, Apart(lasting), given)
        assert list(found) == list(lasting)
        assert found[next(iter(found))].tolist() == (next(iter(lasting.values())) * given).tolist()
    assert tapes.repeated == 6 - RUNS_BEFORE - 2


def test_programs_do_not_keep_the_tensors_that_last():
    tapes = Tapes()
    lasting = Apart({"x": torch.ones(2)})
    known = weakref.ref(lasting.given["x"])
    tapes.carry_out("neg", lambda lasting, own: own - lasting["x"], lasting, torch.ones(2))
    del lasting
    assert known() is None


def test_the_programs_that_were_used_least_recently_are_forgotten(monkeypatch):
    monkeypatch.setattr(tape, "MOST_PROGRAMS", 2)
    tapes = Tapes()
    for _ in range(6):
        for name in range(3):
            carried_out(tapes, name, torch.neg, torch.zeros(2))
    assert tapes.repeated == 0
    assert len(tapes._programs) == 2


@pytest.fixture
def tapes_made(monkeypatch):
    """The tapes of all engines that the test makes."""
    made = []

    class Kept(Tapes):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(stacked, "Tapes", Kept)
    # Short runs have tapes as well.
    monkeypatch.setattr(tape, "RUNS_BEFORE", 0)
    return made


def assert_same_bits(method, what, chunk, tapes_made):
    """Compare a run with tapes to one without, and return how often a tape was used."""
    wanted = trained_by(method, what, chunk=chunk)
    assert not tapes_made
    found = trained_by(method, what, chunk=chunk, replay=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    return sum(tapes.repeated for tapes in tapes_made)


# Rules with other gradients, several phases, memories, personal models, buffers and groups. All
# methods are compared with one client at a time in test_exactness_methods.py.
@pytest.mark.parametrize(
    "method",
    [
        *("scaffold", "ditto", "fedrep", "fedcrc", "fedbn", "fedsam", "perfedavg, hessian"),
        *("grace", "feddyn", "moon, projection", "client2vec", "gifair", "fedgcr"),
    ],
)
def test_a_run_gives_the_same_bits_with_tapes(method, tapes_made):
    what = next(what for what in SETTINGS if fits(method, what))
    assert assert_same_bits(method, what, 4, tapes_made) > 0


@pytest.mark.parametrize(
    ("what", "chunk"),
    [*((what, 4) for what in SETTINGS), ("images", 1), ("text", 1), ("prompts", 1)],
)
def test_a_run_of_any_model_gives_the_same_bits_with_tapes(what, chunk, tapes_made):
    method = "fedavg" if fits("fedavg", what) else "fedclip, contrastive"
    assert assert_same_bits(method, what, chunk, tapes_made) > 0


def run(method="fedavg", *, rounds=8, federation=None, machine=None, **training):
    """Train all of a few equal clients, so that all steps have one shape."""
    torch.manual_seed(0)
    trainer = Trainer(
        federation or images(sizes=[16] * 4),
        method if isinstance(method, Method) else build(method),
        Model(nn.Flatten(), nn.Linear(50, 4)),
        Training(rounds=rounds, batch_size=8, **training),
        Machine(device="cpu", **(machine or {})),
        Evaluation(every=0),
        seed=0,
    )
    trainer.run()
    return trainer


@pytest.mark.parametrize(
    "training",
    [
        {"schedule": Schedule(kind="exponential", decay=0.9)},
        {"optimizer": Adam(lr=0.01)},
        {"optimizer": Sgd(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)},
        {"clip": 0.1},
    ],
    ids=["schedule", "adam", "dampening", "clip"],
)
def test_optimizers_and_schedules_do_not_depend_on_tapes(training):
    found, wanted = (run(machine={"replay": replay}, **training) for replay in (True, False))
    assert torch.equal(found.global_model["head.weight"], wanted.global_model["head.weight"])
    # Two steps a round: of the first five, two are run, one is recorded and one checked.
    assert found.engine.workshop._tapes.repeated == 16 - RUNS_BEFORE - 2


def test_a_rule_that_follows_the_learning_rate_is_recorded_for_each_rate():
    halved = {"rounds": 16, "schedule": Schedule(kind="steps", at=(8,), factors=(0.5,))}
    found, wanted = (
        run("perfedavg", machine={"replay": replay}, **halved) for replay in (True, False)
    )
    assert torch.equal(found.global_model["head.weight"], wanted.global_model["head.weight"])
    # A step uses two batches, so there is one a round.
    assert found.engine.workshop._tapes.repeated == 2 * (8 - RUNS_BEFORE - 2)


def test_a_penalty_in_the_losses_of_a_gradient_rule_is_recorded():
    rule = Declared(phase=Phase(gradient=SharpnessGradient(0.05)))
    method = replace(build("fedavg"), local=rule)
    found, wanted = (run(method, machine={"replay": replay}) for replay in (True, False))
    assert torch.equal(found.global_model["head.weight"], wanted.global_model["head.weight"])
    assert found.engine.workshop._tapes.repeated == 16 - RUNS_BEFORE - 2


def test_samples_on_disk_are_read_and_not_recorded(tmp_path):
    data = images(sizes=[16] * 4)
    stored = MappedArray.write(tmp_path / "x.npy", tuple(data.x.shape), data.x.dtype, [data.x])
    on_disk = replace(data, x=stored)
    found, wanted = run(federation=on_disk), run(federation=data)
    assert torch.equal(found.global_model["head.weight"], wanted.global_model["head.weight"])
    assert found.engine.workshop._tapes is None


def test_steps_that_take_much_memory_are_not_recorded(monkeypatch):
    wanted = run()
    # Flatten passes 50 numbers a sample on, and the head makes 4, for 8 samples of 4 clients.
    monkeypatch.setattr(tape, "LARGEST_BYTES", 4 * 8 * 4 * 54 - 1)
    found = run(machine={"chunk": 4})
    assert found.engine.workshop._tapes is None
    assert torch.equal(found.global_model["head.weight"], wanted.global_model["head.weight"])
    monkeypatch.setattr(tape, "LARGEST_BYTES", 4 * 8 * 4 * 54)
    assert run(machine={"chunk": 4}).engine.workshop._tapes is not None


def test_a_loss_that_depends_on_values_still_trains():
    @dataclass(frozen=True)
    class Cautious(LocalRule):
        def phases(self):
            return [Phase(loss=self.loss)]

        @staticmethod
        def loss(client):
            losses = client.task_loss()
            return losses * (2 if losses.mean().item() > 1 else 1)

    method = replace(build("fedavg"), local=Cautious())
    found, wanted = (run(method, machine={"replay": r, "chunk": 1}) for r in (True, False))
    assert torch.equal(found.global_model["head.weight"], wanted.global_model["head.weight"])
    assert found.engine.workshop._tapes.repeated == 0


def test_a_rule_that_is_not_hashable_trains_without_tapes():
    @dataclass
    class Plain(LocalRule):
        pass

    found = run(replace(build("fedavg"), local=Plain()))
    assert torch.equal(found.global_model["head.weight"], run().global_model["head.weight"])
    assert found.engine.workshop._tapes.repeated == 0
