"""Sums and copies of stacked tensors: PyTorch's operations, and the kernels that replace them."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from equipoise import stacks
from equipoise.engine.phase_run import PhaseRun
from equipoise.engine.replay import Replay
from equipoise.engine.settings import Machine, Training
from equipoise.engine.workshop import Workshop
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.random import seeded
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from equipoise.stacks import chosen_rows, copy_all, put_rows, weighted_sums
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.rerun import Rerun
from tests.models import conftest  # noqa: F401  It repairs Triton's interpreter.

pytest.importorskip("triton", reason="needs Triton, which only PyTorch's GPU builds bring")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import stack_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["plain", "kernels"])
def called(request, monkeypatch):
    """Run with and without kernels, and list the calls of kernels."""
    calls = []

    class Listed:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(stack_kernels, name)

    served = Listed() if request.param == "kernels" else None
    monkeypatch.setattr(stacks, "kernels_for", lambda device: served)
    return calls if served else None


def stack(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def layouts():
    """Stacks whose rows are contiguous, strided, transposed, numbers, empty, or all the same."""
    return [
        stack(4, 3, 2),
        stack(4, 6)[:, ::2],
        stack(4, 3, 2, seed=1).transpose(1, 2),
        stack(4),
        stack(4, 0),
        stack(5, seed=2).expand(4, 5),
    ]


def test_sums_are_the_same_in_every_layout(called):
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    for found, given in zip(weighted_sums(layouts(), weights), layouts(), strict=True):
        wanted = torch.einsum("k,k...->...", weights, given.cpu().double()).float()
        torch.testing.assert_close(found.cpu(), wanted)
    assert weighted_sums([], weights) == []
    assert called in (None, ["weighted_sums"])


def test_rows_are_put_into_stacks_of_other_types(called):
    target = torch.full((3, 2), 7, dtype=torch.float64, device=DEVICE)
    source = stack(2, 2)
    put_rows([target], [source], torch.tensor([2, 0]))
    assert torch.equal(target[[2, 0]], source.double())
    assert target[1].tolist() == [7, 7]
    assert called in (None, [])


def test_types_that_the_kernels_cannot_add_are_added_by_torch(called):
    given = [stack(4, 3), stack(4, 3, dtype=torch.bfloat16)]
    weights = torch.full((4,), 0.25)
    for found, rows in zip(weighted_sums(given, weights), given, strict=True):
        torch.testing.assert_close(found, rows.double().mean(0).to(rows.dtype))
    assert called in (None, [])


def test_every_client_has_one_weight(called):
    with pytest.raises(InputError, match="5 weights for a stack of 4 clients"):
        weighted_sums([stack(4, 3)], torch.ones(5))
    assert called in (None, [])


def test_rows_are_chosen_in_every_layout(called):
    rows = torch.tensor([2, 0, 2])
    for found, given in zip(chosen_rows(layouts(), rows), layouts(), strict=True):
        assert torch.equal(found, given[rows.to(DEVICE)])
        found.zero_()
    assert called in (None, ["copy_rows"])
    flags = torch.tensor([True, False, True], device=DEVICE)
    assert chosen_rows([flags], rows)[0].tolist() == [True, True, True]


def test_rows_are_put_into_their_places_from_every_layout(called):
    places = torch.tensor([4, 0, 2])
    sources = layouts()
    targets = [torch.full((5, *source.shape[1:]), 7, dtype=source.dtype) for source in sources]
    targets = [target.to(DEVICE) for target in targets]
    put_rows(targets, [source[:3] for source in sources], places)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target[places.to(DEVICE)], source[:3])
        assert (target[[1, 3]] == 7).all()
    assert called in (None, ["copy_rows"])
    flags = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    put_rows([flags], [torch.ones(1, dtype=torch.bool)], torch.tensor([1]))
    assert flags.tolist() == [False, True, False]
    put_rows([], [], torch.tensor([], dtype=torch.int64))


def test_all_tensors_are_copied_whatever_their_layout_and_type(called):
    model = [stack(3, 2), stack(dtype=torch.float64), stack(2), stack(2, 3).T]
    sources = [
        *(
            tensor.expand(count, *tensor.shape)
            for count, tensor in zip((4, 4, 3, 4), model, strict=True)
        ),
        stack(4, 2),
        torch.tensor(7, device=DEVICE),
        torch.tensor([True, False], device=DEVICE),
    ]
    targets = [
        torch.zeros_like(source, memory_format=torch.contiguous_format) for source in sources
    ]
    copy_all(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
    # Of three clients and of four, in two types; the transposed tensor is left to PyTorch.
    assert called in (None, ["copy_rows"] * 3)


def trained(recorder=None):
    """Train three of five unequal clients a round, in the memory of a recording or in place."""
    with seeded(0):
        features = nn.Sequential(nn.Flatten(), nn.Linear(50, 3), nn.BatchNorm1d(3))
        model = Model(features, nn.Linear(3, 4))
    trainer = Trainer(
        images(sizes=[5, 9, 7, 12, 8]),
        build("fedavg"),
        model,
        Training(rounds=2, cohort=3, batch_size=4),
        Machine(device=DEVICE, replay=False),
        Evaluation(every=0),
        seed=0,
    )
    if recorder is not None:
        trainer.engine.workshop = Workshop(Replay(recorder))
    trainer.run()
    return trainer.global_model


def test_a_run_copies_and_adds_all_tensors_of_a_round_together(called, monkeypatch):
    found = trained(Rerun())
    # The model to all clients, their updates in the order of their ids, and the mean. In the first
    # round the memory of the workshop is a copy already, but it is filled all the same.
    assert called in (None, ["copy_rows", "copy_rows", "weighted_sums"] * 2)
    monkeypatch.setattr(stacks, "kernels_for", lambda device: None)
    assert distance(found, trained()) <= 1e-6


class Launches(TorchDispatchMode):
    """Count operations that compute or copy something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and "empty" not in function.__name__
        return function(*args, **(kwargs or {}))


def launches_of_a_round(layers, clients):
    """The operations of a round outside of local steps."""
    features = [nn.Flatten(), nn.Linear(50, 2), *(nn.Linear(2, 2) for _ in range(layers))]
    trainer = Trainer(
        images(sizes=[4] * clients),
        build("fedavg"),
        Model(nn.Sequential(*features), nn.Linear(2, 4)),
        Training(rounds=5, batch_size=4),
        Machine(device=DEVICE, replay=False, chunk=clients),
        Evaluation(every=0),
        seed=0,
    )
    trainer.engine.workshop = Workshop(Replay(Rerun()))
    counted = []

    def next_round(progress):
        counted.append(launches.count)
        launches.count = 0

    with Launches() as launches:
        trainer.run(next_round)
    # From round 3 on, all steps are replayed. The last round draws no batches ahead.
    assert counted[2] == counted[3]
    return counted[3]


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the operations of the stand-in on a CPU")
def test_operations_outside_of_steps_depend_neither_on_clients_nor_on_tensors(monkeypatch):
    class Quiet:
        """The kernels; what their launches do is not counted."""

        def __getattr__(self, name):
            def call(*given):
                with _disable_current_modes():
                    return getattr(stack_kernels, name)(*given)

            return call

    monkeypatch.setattr(stacks, "kernels_for", lambda device: Quiet())
    monkeypatch.setattr(PhaseRun, "advance", lambda *given: None)
    few = launches_of_a_round(layers=1, clients=2)
    assert few <= 200
    assert launches_of_a_round(layers=5, clients=2) == few
    assert launches_of_a_round(layers=1, clients=7) == few
