"""Hashes on a GPU are those of the host, bit by bit.

They run on a GPU, or slowly on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.func import grad, vmap

from equipoise import random
from equipoise.random import fold, fold_tensor, permutations

pytest.importorskip("triton", reason="needs Triton, which only PyTorch's GPU builds bring")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import hash_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = torch.iinfo(torch.int64).max
KEYS = torch.tensor([0, 1, -1, LARGEST, -LARGEST - 1, 0x123456789ABCDEF], device=DEVICE)


@pytest.fixture
def launches(monkeypatch):
    """Use the kernel, on the CPU too, and list its calls."""
    calls = []

    class Listed:
        @property
        def Mixed(self):
            calls.append(1)
            return hash_kernels.Mixed

    monkeypatch.setattr(random, "_kernels", lambda z: Listed())
    return calls


def unsigned(keys):
    return [key % 2**64 for key in keys.flatten().tolist()]


@pytest.mark.parametrize("coordinates", [(0,), (5, 7), (2**40, -1, 3)], ids=str)
def test_keys_are_folded_with_numbers_as_on_the_host(launches, coordinates):
    found = fold_tensor(KEYS, *coordinates)
    assert unsigned(found) == [fold(key, *coordinates) for key in KEYS.tolist()]
    assert len(launches) == len(coordinates)


def test_keys_are_folded_with_tensors_as_on_the_host(launches):
    numbers = torch.arange(700, device=DEVICE)
    found = fold_tensor(KEYS[:2].unsqueeze(1), 4, numbers)
    wanted = [fold(key, 4, number) for key in KEYS[:2].tolist() for number in range(700)]
    assert found.shape == (2, 700)
    assert unsigned(found) == wanted
    assert unsigned(fold_tensor(7, 8, numbers[:3])) == [fold(7, 8, number) for number in range(3)]
    assert fold_tensor(KEYS[:0], 3).shape == (0,)


def test_layouts_of_memory_do_not_matter(launches):
    keys = torch.arange(24, device=DEVICE).view(2, 3, 4)
    for view in (keys.transpose(0, 2), keys[:, ::2], keys[0, 0, 0], keys[:1].expand(3, 3, 4)):
        found = fold_tensor(view, 1)
        assert found.shape == view.shape
        assert unsigned(found) == [fold(key, 1) for key in view.flatten().tolist()]


def test_every_client_of_a_stack_has_its_own_hashes_in_losses(launches):
    def loss(weight, key):
        return (weight * random.uniform(fold_tensor(key, 2, torch.arange(3, device=DEVICE)))).sum()

    weights = torch.ones(len(KEYS), 3, device=DEVICE)
    found = vmap(grad(loss))(weights, KEYS)
    assert torch.equal(found, grad(lambda w: vmap(loss)(w, KEYS).sum())(weights))
    wanted = [[(fold(key, 2, n) >> 40) / 2**24 for n in range(3)] for key in KEYS.tolist()]
    assert found.tolist() == wanted
    nested = vmap(vmap(lambda key: fold_tensor(key, 6), in_dims=1, out_dims=1))(KEYS.view(2, 3, 1))
    assert unsigned(nested) == [fold(key, 6) for key in KEYS.tolist()]


def test_permutations_are_the_same_with_the_kernel(launches, monkeypatch):
    sizes = torch.tensor([3, 9, 1, 4, 9, 0], device=DEVICE)
    found = permutations(KEYS, sizes, 9)
    monkeypatch.setattr(random, "_kernels", lambda z: None)
    assert torch.equal(found, permutations(KEYS, sizes, 9))
    assert len(launches) == 1
