"""Stacked optimizers against ``torch.optim``, names and refusals, and schedules by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.optimizers import Adam, Schedule, Sgd, TorchOptimizer, optimizer_named

SHAPES = [(3, 2), (4,), ()]
STEPS = 6

CASES = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "dampening": 0.4}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    ("adam", {}),
    ("adam", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    ("adamw", {}),
    ("adamw", {"betas": (0.5, 0.9), "weight_decay": 0.3}),
]
TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def normal(*shape, seed):
    return torch.from_numpy(np.asarray(np.random.default_rng(seed).normal(size=shape)))


def stack(clients, seed):
    return [normal(clients, *shape, seed=seed + i) for i, shape in enumerate(SHAPES)]


def by_torch(name, options, start, gradients, lr):
    """One client's trajectory; ``lr`` may change from step to step."""
    leaves = [tensor.clone().requires_grad_() for tensor in start]
    optimizer = TORCH[name](leaves, lr=lr[0], **options)
    for rate, step in zip(lr, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for leaf, gradient in zip(leaves, step, strict=True):
            leaf.grad = gradient.clone()
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize(
    ("rates", "recorded"), [("one number", False), ("a column", False), ("a column", True)]
)
def test_stacked_steps_are_those_of_torch_optim(name, options, rates, recorded):
    clients = 4
    optimizer = optimizer_named(name, lr=0.05, **options)
    params = stack(clients, 0)
    start = [tensor.clone() for tensor in params]
    gradients = [stack(clients, 100 * step + 50) for step in range(STEPS)]
    lr = 0.05 if rates == "one number" else torch.tensor([0.05, 0.1, 0.0, 0.2], dtype=torch.float64)
    state = optimizer.begin(params)
    for count, step in enumerate(gradients, start=1):
        number = torch.tensor(count, dtype=torch.float64) if recorded else count
        optimizer.step(params, [g.clone() for g in step], state, lr, number)
    for client in range(clients):
        rate = lr if isinstance(lr, float) else lr[client].item()
        own = [[tensor[client] for tensor in step] for step in gradients]
        wanted = by_torch(name, options, [tensor[client] for tensor in start], own, [rate] * STEPS)
        for found, tensor in zip(params, wanted, strict=True):
            torch.testing.assert_close(found[client], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_clients_that_have_finished_rest(name, options):
    """Steps get views of the first rows, down to a single one without a leading axis."""
    optimizer = optimizer_named(name, lr=0.05, **options)
    params = stack(3, 0)
    start = [tensor.clone() for tensor in params]
    gradients = [stack(3, 100 * step + 50) for step in range(STEPS)]
    lr = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)
    state = optimizer.begin(params)
    active_at = [3, 3, 2, 2, 1, 1]

    def rows(tensor, active):
        return tensor[0] if active == 1 else tensor[:active]

    for count, (active, step) in enumerate(zip(active_at, gradients, strict=True), start=1):
        views = {moment: [rows(t, active) for t in tensors] for moment, tensors in state.items()}
        optimizer.step(
            [rows(t, active) for t in params],
            [rows(g, active).clone() for g in step],
            views,
            rows(lr, active),
            count,
        )
    for client in range(3):
        made = sum(active > client for active in active_at)
        own = [[tensor[client] for tensor in step] for step in gradients[:made]]
        wanted = by_torch(
            name, options, [tensor[client] for tensor in start], own, [lr[client].item()] * made
        )
        for found, tensor in zip(params, wanted, strict=True):
            torch.testing.assert_close(found[client], tensor, rtol=1e-12, atol=1e-12)


def test_any_other_optimizer_is_torchs_own():
    optimizer = optimizer_named("rmsprop", lr=0.01, alpha=0.8, momentum=0.5)
    assert isinstance(optimizer, TorchOptimizer)
    params = stack(1, 0)
    leaves = [tensor[0].clone().requires_grad_() for tensor in params]
    theirs = torch.optim.RMSprop(leaves, lr=0.01, alpha=0.8, momentum=0.5)
    state = optimizer.begin(params)
    for count in range(1, 4):
        gradients = [tensor[0] for tensor in stack(1, count)]
        optimizer.step(
            [t[0] for t in params], [g.clone() for g in gradients], state, 0.01 * count, count
        )
        theirs.param_groups[0]["lr"] = 0.01 * count
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        theirs.step()
    for found, leaf in zip(params, leaves, strict=True):
        torch.testing.assert_close(found[0], leaf.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_defaults_are_torchs(name):
    ours = optimizer_named(name, lr=0.1)
    theirs = TORCH[name]([torch.zeros(1, requires_grad=True)], lr=0.1).defaults
    shared = [
        option
        for option in ("momentum", "dampening", "nesterov", "weight_decay", "betas", "eps")
        if option in theirs
    ]
    for option in shared:
        if hasattr(ours, option):
            assert getattr(ours, option) == theirs[option], option
    assert len(shared) >= 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sdg", {}, "unknown optimizer 'sdg'; did you mean 'sgd'"),
        ("lbfgs", {}, "unknown optimizer 'lbfgs'"),
        ("sgd", {"momentun": 0.9}, "option of optimizer sgd 'momentun'; did you mean 'momentum'"),
        ("adam", {"decoupled": True}, "option of optimizer adam 'decoupled'"),
        ("sgd", {"lr": -0.1}, "optimizer.lr must be a finite number of at least 0, got -0.1"),
        ("sgd", {"lr": math.inf}, "optimizer.lr"),
        ("sgd", {"lr": "fast"}, "optimizer.lr must be a finite number of at least 0, got 'fast'"),
        ("sgd", {"lr": True}, "optimizer.lr must be a finite number of at least 0, got True"),
        ("rmsprop", {"lr": -1}, "optimizer.lr must be a finite number of at least 0, got -1"),
        ("sgd", {"momentum": -1}, "optimizer.momentum"),
        ("sgd", {"momentum": 1.0}, "optimizer.momentum must be at least 0 and below 1, got 1.0"),
        ("sgd", {"momentum": 1.5}, "optimizer.momentum must be at least 0 and below 1, got 1.5"),
        (
            "sgd",
            {"momentum": 0.9, "dampening": 2},
            "optimizer.dampening must be at least 0 and at most 1, got 2",
        ),
        (
            "sgd",
            {"weight_decay": 100},
            "optimizer.weight_decay must be at least 0 and at most 10, got 100",
        ),
        (
            "adam",
            {"weight_decay": math.nan},
            "optimizer.weight_decay must be at least 0 and at most 10, got nan",
        ),
        ("adam", {"eps": 2.0}, "optimizer.eps must be at least 0 and at most 1, got 2.0"),
        ("sgd", {"nesterov": True}, "nesterov needs a momentum above 0 and dampening 0"),
        ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs"),
        ("adam", {"betas": (0.9, 1.0)}, r"optimizer.betas must be two numbers in \[0, 1\)"),
        ("adam", {"betas": [0.9]}, "optimizer.betas"),
        ("adamw", {"weight_decay": -1.0}, "optimizer.weight_decay"),
        ("rmsprop", {"lr": 0.1, "alpa": 0.9}, "torch.optim.RMSprop refuses its options.*alpa"),
        ("rmsprop", {"lr": 0.1, "alpha": -1.0}, "torch.optim.RMSprop refuses its options"),
    ],
)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(InputError, match=message):
        optimizer_named(name, **options)


def test_betas_of_a_configuration_file_become_a_pair():
    assert optimizer_named("adam", betas=[0.8, 0.9]) == Adam(betas=(0.8, 0.9))
    assert optimizer_named("sgd", lr=0.3) == Sgd(lr=0.3)
    assert optimizer_named("adamw").weight_decay == 0.01


# ---- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Schedule(), {0: 1.0, 7: 1.0}),
        (Schedule(kind="exponential", decay=0.5), {0: 1.0, 1: 0.5, 3: 0.125}),
        (
            Schedule(kind="steps", at=(2, 5), factors=(0.1, 0.01)),
            {0: 1.0, 1: 1.0, 2: 0.1, 4: 0.1, 5: 0.01, 9: 0.01},
        ),
        (Schedule(kind="cosine"), {0: 1.0, 5: 0.5, 10: 0.0}),
        (Schedule(kind="cosine", floor=0.2), {0: 1.0, 5: 0.6, 10: 0.2}),
    ],
)
def test_schedules_by_hand(schedule, wanted):
    assert {r: schedule.factor(r, 10) for r in wanted} == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "cosin"}, "did you mean 'cosine'"),
        ({"kind": "steps", "at": (1, 2), "factors": (0.5,)}, "must have the same length"),
        (
            {"kind": "steps", "at": (5, 2), "factors": (0.5, 0.1)},
            "rounds must be in ascending order",
        ),
        (
            {"kind": "exponential", "decay": -0.5},
            "schedule.decay must be at least 0 and at most 1, got -0.5",
        ),
        (
            {"kind": "exponential", "decay": math.nan},
            "schedule.decay must be at least 0 and at most 1, got nan",
        ),
        (
            {"kind": "exponential", "decay": 1.5},
            "schedule.decay must be at least 0 and at most 1, got 1.5",
        ),
        ({"kind": "exponential", "decay": 0}, "schedule.decay must be above 0, got 0"),
        ({"kind": "cosine", "floor": 2}, "schedule.floor must be at least 0 and at most 1, got 2"),
        (
            {"kind": "steps", "at": (-1,), "factors": (0.5,)},
            "each of schedule.at must be a whole number of at least 0",
        ),
        (
            {"kind": "cosine", "floor": -1},
            "schedule.floor must be at least 0 and at most 1, got -1",
        ),
        (
            {"kind": "cosine", "floor": "low"},
            "schedule.floor must be at least 0 and at most 1, got 'low'",
        ),
        (
            {"kind": "steps", "at": (1, 2), "factors": (0.5, -0.1)},
            "each of schedule.factors must be a finite number of at least 0, got -0.1",
        ),
    ],
)
def test_broken_schedules_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Schedule(**options)
