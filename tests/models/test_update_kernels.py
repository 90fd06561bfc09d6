"""The kernels of steps against PyTorch's operations.

They run on a GPU, where they must have the same bits, or slowly on the CPU in Triton's interpreter.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from equipoise.optimizers import Sgd, steps
from equipoise.optimizers.penalties import Penalties

pytest.importorskip("triton", reason="needs Triton, which is not made for this system")

from equipoise.models import update_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, STEPS = 3, 3
# Rows below, at and above a block; single numbers; more tensors than share a launch.
SHAPES = [(5, 7), (), (64,), (1,), (16, 4), (65, 2), (3,), (2, 3, 2), (130,), (1, 1)]
RULES = {
    "plain": {},
    "decay": {"weight_decay": 0.3},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.4},
    "nesterov": {"momentum": 0.7, "nesterov": True},
    "all": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.05},
}
# The strength of a penalty, and whether it has a linear part.
PENALTIES = {"anchors": (0.7, False), "linear": (0.0, True), "both": (0.7, True)}


def normal(*shape, seed=0):
    values = np.asarray(np.random.default_rng(seed).normal(size=shape))
    return torch.from_numpy(values).float().to(DEVICE)


def assert_same(found, wanted, atol=3e-7):
    for own, other in zip(found, wanted, strict=True):
        if DEVICE == "cuda":
            assert torch.equal(own, other)
        else:
            torch.testing.assert_close(own, other, rtol=1e-6, atol=atol)


@pytest.fixture
def launches(monkeypatch):
    """Use the kernels on this device with small blocks, and count the tensors of launches."""
    sizes = []

    def counted(triples, divided=update_kernels._launches):
        groups = list(divided(triples))
        sizes.append([len(group) for group in groups])
        return groups

    monkeypatch.setattr(update_kernels, "_launches", counted)
    monkeypatch.setattr(update_kernels, "_BLOCK", 64)
    monkeypatch.setattr(update_kernels, "_SMALL_BLOCK", 64)
    monkeypatch.setattr(update_kernels, "_SMALL", 192)
    monkeypatch.setattr(steps, "kernels_for", lambda lr: update_kernels)
    return sizes


def penalties_on(clients, strength, sloped):
    """A penalty on parameters of the shapes; some anchors are views of larger tensors."""
    anchors = [normal(*shape, 2, seed=50 + i)[..., 0] for i, shape in enumerate(SHAPES)]
    linear = [normal(clients, *shape, seed=70 + i) for i, shape in enumerate(SHAPES)]
    return Penalties(strength, anchors, linear if sloped else None)


def of_first(penalties, rows):
    """The penalty on the first clients of a stack."""
    return penalties._replace(linear=penalties.linear and list(map(rows, penalties.linear)))


def trajectory(optimizer, clients, active=None, gradient=lambda step: step, penalty=None):
    """Make steps on the first clients of a stack, and return parameters and state."""
    params = [normal(clients, *shape, seed=i) for i, shape in enumerate(SHAPES)]
    state = optimizer.begin(params)
    lr = torch.tensor([0.1, 0.05, 1 / 3], dtype=torch.float64, device=DEVICE)
    active = clients if active is None else active

    def rows(tensor):
        return tensor[0] if active == 1 else tensor[:active]

    step = optimizer.step
    if penalty is not None:
        penalties = of_first(penalties_on(clients, *penalty), rows)
        step = partial(optimizer.penalized_step, penalties=penalties)
    for count in range(1, STEPS + 1):
        gradients = [
            gradient(normal(clients, *shape, seed=100 * count + i))
            for i, shape in enumerate(SHAPES)
        ]
        step(
            [rows(param) for param in params],
            [rows(each) for each in gradients],
            {name: [rows(tensor) for tensor in tensors] for name, tensors in state.items()},
            rows(lr),
            count,
        )
    return [*params, *state.get("momentum", [])]


def plain(monkeypatch, *given, **options):
    with monkeypatch.context() as patch:
        patch.setattr(steps, "kernels_for", lambda lr: None)
        return trajectory(*given, **options)


@pytest.mark.parametrize("active", [3, 2, 1])
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_pytorchs_operations(rule, active, launches, monkeypatch):
    """Clients that have finished do not change."""
    optimizer = Sgd(lr=0.1, **RULES[rule])
    found = trajectory(optimizer, CLIENTS, active)
    assert len(launches) == STEPS
    wanted = plain(monkeypatch, optimizer, CLIENTS, active)
    assert_same(found, wanted)


@pytest.mark.skipif(
    update_kernels._TOGETHER == 1, reason="kernels of this Triton take no tuples of tensors"
)
def test_small_tensors_share_launches(launches):
    trajectory(Sgd(lr=0.1), CLIENTS)
    assert launches == [[1, 1, 8]] * STEPS


def test_older_versions_of_triton_launch_a_kernel_a_tensor(launches, monkeypatch):
    monkeypatch.setattr(update_kernels, "_TOGETHER", 1)
    optimizer = Sgd(lr=0.1, momentum=0.5)
    found = trajectory(optimizer, CLIENTS)
    assert launches == [[1] * len(SHAPES)] * STEPS
    wanted = plain(monkeypatch, optimizer, CLIENTS)
    assert_same(found, wanted)


@pytest.mark.parametrize("rule", ["plain", "all"])
def test_tensors_that_do_not_follow_each_other_in_memory_are_updated_plainly(
    rule, launches, monkeypatch
):
    def transposed(gradient):
        return gradient.mT.contiguous().mT if gradient.dim() == 3 else gradient

    optimizer = Sgd(lr=0.1, **RULES[rule])
    found = trajectory(optimizer, CLIENTS, gradient=transposed)
    matrices = [shape for shape in SHAPES if len(shape) == 2 and min(shape) > 1]
    assert sum(launches[0]) == len(SHAPES) - len(matrices)
    wanted = plain(monkeypatch, optimizer, CLIENTS, gradient=transposed)
    assert_same(found, wanted)


def test_other_types_are_updated_plainly(launches):
    param, gradient = normal(2, 3).double(), normal(2, 3, seed=1).double()
    wanted = param - 0.5 * gradient
    lr = torch.full((2,), 0.5, dtype=torch.float64, device=DEVICE)
    Sgd(lr=0.5).step([param], [gradient], {}, lr, 1)
    assert torch.equal(param, wanted)
    assert not any(launches)


def test_a_stack_of_nothing(launches):
    param = torch.zeros(2, 0, device=DEVICE)
    Sgd(lr=0.5).step([param], [param], {}, torch.ones(2, dtype=torch.float64, device=DEVICE), 1)
    assert not any(launches)


@pytest.mark.parametrize("active", [3, 2, 1])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("rule", ["plain", "decay", "all"])
def test_steps_add_the_gradient_of_a_penalty(rule, penalty, active, launches, monkeypatch):
    """Before decay and momentum."""
    optimizer, given = Sgd(lr=0.1, **RULES[rule]), {"penalty": PENALTIES[penalty]}
    found = trajectory(optimizer, CLIENTS, active, **given)
    assert len(launches) == STEPS
    assert_same(found, plain(monkeypatch, optimizer, CLIENTS, active, **given), atol=1e-6)
    for own, other in zip(found, trajectory(optimizer, CLIENTS, active), strict=True):
        assert float((own - other).abs().max()) > 1e-3


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_on_tensors_that_are_updated_plainly(penalty, launches, monkeypatch):
    def transposed(gradient):
        return gradient.mT.contiguous().mT if gradient.dim() == 3 else gradient

    optimizer = Sgd(lr=0.1, **RULES["all"])
    given = {"gradient": transposed, "penalty": PENALTIES[penalty]}
    found = trajectory(optimizer, CLIENTS, **given)
    assert sum(launches[0]) < len(SHAPES)
    assert_same(found, plain(monkeypatch, optimizer, CLIENTS, **given), atol=1e-6)


@pytest.mark.parametrize("active", [3, 2, 1])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("together", [16, 1])
def test_the_value_of_a_penalty(together, penalty, active, launches, monkeypatch):
    """s/2 ‖w − anchor‖² + ⟨w, v⟩ of every client before the step, and the same bits twice."""
    monkeypatch.setattr(update_kernels, "_TOGETHER", min(together, update_kernels._TOGETHER))

    def rows(tensor):
        return tensor[0] if active == 1 else tensor[:active]

    shapes = [*SHAPES, (0,)]
    params = [normal(CLIENTS, *shape, seed=i) for i, shape in enumerate(shapes)]
    strength, sloped = PENALTIES[penalty]
    penalties = penalties_on(CLIENTS, strength, sloped)
    penalties.anchors.append(params[-1][0])
    if sloped:
        penalties.linear.append(params[-1])
    wanted = torch.zeros(CLIENTS, dtype=torch.float64, device=DEVICE)
    for index, param in enumerate(params):
        way = (param.double() - penalties.anchors[index].double()).reshape(CLIENTS, -1)
        wanted += strength / 2 * way.square().sum(1)
        if sloped:
            product = param.double() * penalties.linear[index].double()
            wanted += product.reshape(CLIENTS, -1).sum(1)
    found = [penalties_in_a_step(params, of_first(penalties, rows), rows) for _ in range(2)]
    torch.testing.assert_close(found[0], rows(wanted), rtol=1e-5, atol=1e-4)
    assert torch.equal(*found)
    shared = [8, 1, 1] if active > 1 else [10]
    assert sorted(launches[0], reverse=True) == (
        shared if update_kernels._TOGETHER > 1 else [1] * len(SHAPES)
    )


def penalties_in_a_step(params, penalties, rows):
    """What a step of the first clients returns; it does not change the tensors."""
    lr = rows(torch.ones(CLIENTS, dtype=torch.float64, device=DEVICE))
    chosen = [rows(param).clone() for param in params]
    gradients = [torch.ones_like(param) for param in chosen]
    return Sgd(lr=1.0).penalized_step(chosen, gradients, {}, lr, 1, penalties)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("some", [True, False])
def test_the_value_of_a_penalty_on_tensors_of_which_kernels_update_some_or_none(
    some, penalty, launches
):
    """Kernels read float32 only."""
    params = [
        normal(CLIENTS, *shape, seed=i).to(torch.float32 if some and i % 2 else torch.float64)
        for i, shape in enumerate(SHAPES)
    ]
    penalties = penalties_on(CLIENTS, *PENALTIES[penalty])
    wanted = penalties.values([param.double() for param in params])
    found = penalties_in_a_step(params, penalties, lambda tensor: tensor)
    assert sum(launches[0]) == (len(SHAPES) // 2 if some else 0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, check_dtype=False)
