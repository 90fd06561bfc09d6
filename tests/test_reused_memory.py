"""Memory of large tensors is used again, and never while a tensor needs it."""

from __future__ import annotations

import pytest
import torch

from equipoise import reused_memory
from equipoise.engine.settings import Machine, Training
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.federations import images

LARGE = (3, 1 << 18)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(reused_memory, "_kept", {})


def test_memory_is_used_again_when_a_tensor_is_gone():
    first = reused_memory.empty(LARGE, torch.float32)
    place = first.data_ptr()
    del first
    second = reused_memory.empty((LARGE[1], LARGE[0]), torch.int32)
    assert (second.data_ptr(), second.shape, second.dtype) == (place, (1 << 18, 3), torch.int32)
    assert second.data_ptr() % 64 == 0
    assert second.is_contiguous()


@pytest.mark.parametrize(
    "part", [lambda x: x[1], lambda x: x.T, lambda x: x.numpy(), lambda x: x.detach()]
)
def test_memory_that_is_still_seen_is_not_used_again(part):
    first = reused_memory.empty(LARGE, torch.float32).fill_(1.0)
    seen = part(first)
    del first
    second = reused_memory.empty(LARGE, torch.float32).zero_()
    assert bool((torch.as_tensor(seen) == 1).all())
    del seen, second
    assert sum(map(len, reused_memory._kept.values())) == 2


def test_tensors_of_other_sizes_have_their_own_memory():
    place = reused_memory.empty(LARGE, torch.float32).data_ptr()
    assert reused_memory.empty(LARGE, torch.float64).data_ptr() != place
    assert sorted(map(len, reused_memory._kept.values())) == [1, 1]


def test_small_tensors_and_those_of_other_devices_are_pytorchs():
    small = reused_memory.empty((2, 3), torch.float32)
    elsewhere = reused_memory.empty(LARGE, torch.float32, "meta")
    assert (small.shape, elsewhere.shape, elsewhere.device.type) == ((2, 3), LARGE, "meta")
    assert reused_memory.empty((0, 4), torch.float32).shape == (0, 4)
    del small, elsewhere
    assert reused_memory._kept == {}


def test_only_so_much_memory_is_kept(monkeypatch):
    size = 4 * LARGE[0] * LARGE[1]
    monkeypatch.setattr(reused_memory, "_MOST_KEPT", 2 * size)
    tensors = [reused_memory.empty(LARGE, torch.float32) for _ in range(3)]
    del tensors
    assert {each: len(pieces) for each, pieces in reused_memory._kept.items()} == {size: 2}


@pytest.mark.parametrize("chunk", [1, 10])
def test_a_round_uses_the_memory_of_the_round_before(chunk):
    data = images()
    model = build_model("mlp", shape=data.shape, classes=data.classes, hidden=[6000])
    trainer = Trainer(
        data,
        build("fedavg"),
        model,
        Training(rounds=3, cohort=6, batch_size=8, epochs=1, optimizer=Sgd(lr=0.01)),
        Machine(device="cpu", chunk=chunk),
        Evaluation(every=0),
        seed=0,
    )
    after = []
    trainer.run(
        on_round=lambda _: after.append(
            {id(piece) for pieces in reused_memory._kept.values() for piece in pieces}
        )
    )
    assert after[0]
    assert after[0] == after[1] == after[2]
