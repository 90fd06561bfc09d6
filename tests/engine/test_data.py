"""Samples on the device, on the host and on disk: the same batches, without unnecessary reading."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from equipoise import Federation, Machine, train
from equipoise.data.cache import MappedArray
from equipoise.engine import data as engine_data
from equipoise.engine.data import DeviceData
from equipoise.method import LocalRule, Phase
from equipoise.methods import build
from tests.peak import PEAK

CPU = torch.device("cpu")


class Counted:
    """Samples that record which rows were read."""

    def __init__(self, values):
        self.values, self.read = values, []
        self.shape, self.dtype, self.digest = tuple(values.shape), values.dtype, "0" * 64

    def __len__(self):
        return len(self.values)

    def __getitem__(self, positions):
        self.read.append(positions if isinstance(positions, slice) else positions.tolist())
        return self.values[positions].clone()


def federation(x):
    """Six clients of ten samples each."""
    return Federation.from_arrays(x, torch.arange(60) % 3, clients=np.arange(60) // 10)


def images(dtype=torch.float32):
    return torch.from_numpy(
        np.random.default_rng(0).normal(100, 50, (60, 1, 4, 4)).clip(0, 255)
    ).to(dtype)


def mapped(tmp_path, x):
    return MappedArray.write(tmp_path / "x.npy", tuple(x.shape), x.dtype, x.split(16))


@pytest.mark.parametrize("given", [torch.uint8, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float64])
def test_mapped_samples_are_those_of_the_tensor(tmp_path, given, wanted):
    x = images(given)
    whole, stored = (
        DeviceData(federation(samples), CPU, wanted) for samples in (x, mapped(tmp_path, x))
    )
    assert len(whole) == len(stored) == 60
    positions = torch.tensor([[[5, 5, 59], [0, 3, 5]]])
    for a, b in zip(whole.fetch(positions), stored.fetch(positions), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert whole.inputs(positions).dtype == (wanted if given.is_floating_point else given)
    assert torch.equal(stored.inputs(positions), x[positions].to(stored.inputs(positions).dtype))


def test_each_row_is_read_once_and_in_rising_order():
    samples = Counted(images())
    data = DeviceData(federation(samples), CPU, torch.float32)
    samples.read.clear()
    data.inputs(torch.tensor([[7, 2, 7], [50, 2, 2]]))
    assert samples.read == [[2, 7, 50]]


def test_a_tensor_that_does_not_fit_is_read_in_batches(monkeypatch):
    x = images(torch.float64)
    monkeypatch.setattr(engine_data, "_fits", lambda size, device: False)
    data = DeviceData(federation(x), CPU, torch.float32)
    positions = torch.tensor([[9, 9], [1, 8]])
    assert data.x is x
    assert torch.equal(data.inputs(positions), x[positions].float())


def test_samples_can_be_read_inside_vmap_and_grad():
    x = images()
    data = DeviceData(federation(Counted(x)), CPU, torch.float32)
    positions = torch.tensor([[4, 1, 1], [2, 2, 30]])

    def loss(weight, places):
        return (data.inputs(places) * weight).sum()

    found = vmap(grad(loss))(torch.ones(2), positions)
    assert torch.allclose(found, x[positions].flatten(1).sum(1))
    columns = vmap(data.inputs, in_dims=1, out_dims=1)(positions)
    assert torch.equal(columns, x[positions])
    assert not data.inputs(positions).requires_grad


def test_a_run_reads_what_its_batches_need_and_nothing_else():
    samples = Counted(images())
    clients = federation(samples)
    samples.read.clear()
    # Clients 0 and 1 hold samples 0 to 19. Only they are evaluated: the others have no samples.
    few = dataclasses.replace(
        clients,
        **{
            name: dataclasses.replace(
                clients.split(name),
                indices=clients.split(name).indices[: clients.split(name).offsets[2]],
                offsets=clients.split(name).offsets[:3],
            )
            for name in ("train", "val", "test")
        },
        groups=clients.groups[:2],
        unseen=clients.unseen[:2],
        client_names=clients.client_names[:2],
    )
    samples.read.clear()
    train(few, model="logistic", rounds=2, batch_size=4)
    rows = [row for batch in samples.read for row in batch]
    assert set(rows) == set(range(20))
    assert max(len(batch) for batch in samples.read) <= 20


# On a GPU, steps with samples in its memory are replayed, with batches of one width. Steps with
# mapped samples are not.
ON_CPU = Machine(device="cpu")


@pytest.mark.parametrize("model", ["mlp", "cnn2"])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto"])
def test_training_on_mapped_samples_gives_the_same_numbers(tmp_path, model, method):
    x = images() / 255
    runs = [
        train(
            federation(samples),
            method=method,
            model=model,
            rounds=2,
            batch_size=4,
            epochs=2,
            seed=3,
            machine=ON_CPU,
        )
        for samples in (x, mapped(tmp_path, x))
    ]
    assert runs[0].summary["results"] == runs[1].summary["results"]
    models = [run.model(client=0) if method == "fedper" else run.model() for run in runs]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@dataclasses.dataclass(frozen=True)
class HeadSeesX(LocalRule):
    """Train the head long enough for z to be computed once, but read x as well."""

    def phases(self):
        return (
            Phase(
                move="head", epochs=3, loss=lambda c: c.task_loss() * c.x.flatten(1).mean(1).abs()
            ),
        )


def test_a_loss_may_read_mapped_samples_while_features_rest(tmp_path):
    x = images() / 255
    method = dataclasses.replace(build("fedavg"), local=HeadSeesX())
    runs = [
        train(
            federation(samples),
            method=method,
            model="mlp",
            rounds=2,
            batch_size=4,
            machine=Machine(device="cpu", chunk=3),
        )
        for samples in (x, mapped(tmp_path, x))
    ]
    for one, other in zip(runs[0].model().parameters(), runs[1].model().parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("given", [torch.uint8, torch.float64])
def test_samples_reach_a_gpu_from_everywhere(tmp_path, monkeypatch, given):
    x, gpu = images(given), torch.device("cuda")
    wanted = torch.float32 if given.is_floating_point else given
    resident, stored = (
        DeviceData(federation(samples), gpu, torch.float32) for samples in (x, mapped(tmp_path, x))
    )
    monkeypatch.setattr(engine_data, "_LARGEST_SHARE", 0.0)
    too_large = DeviceData(federation(x), gpu, torch.float32)
    assert [data.on_gpu for data in (resident, stored, too_large)] == [True, False, False]
    positions = torch.tensor([[5, 5, 59], [0, 3, 5]], device=gpu)
    for data in (resident, stored, too_large):
        samples, targets = data.fetch(positions)
        assert samples.is_cuda
        assert targets.is_cuda
        assert torch.equal(samples.cpu(), x[positions.cpu()].to(wanted))
        assert torch.equal(targets.cpu(), positions.cpu() % 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["mlp", "cnn2"])
def test_training_on_a_gpu_from_disk_gives_the_same_numbers(tmp_path, model):
    x, machine = images() / 255, Machine(device="cuda")
    runs = [
        train(federation(samples), model=model, rounds=2, batch_size=4, epochs=2, machine=machine)
        for samples in (x, mapped(tmp_path, x))
    ]
    for one, other in zip(*(run.model().parameters() for run in runs), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


# 16 GiB of zeros, which the file system stores as a sparse file.
PROGRAM = """
import json, os, resource, sys
import numpy as np
import torch
from torch import nn
from equipoise import Federation, train
from equipoise.data.cache import _END, _MARK, MappedArray, _head
from equipoise.federation import Split
from equipoise.models.base import Model

torch.set_num_threads(1)
path, rows = sys.argv[1], 16384
head, written = _head((rows, 1024, 1024), torch.uint8), 1_000_000_000
with open(path, "wb") as file:
    file.write(head)
    file.truncate(len(head) + rows * 2**20)
    file.seek(0, 2)
    file.write(_END.pack(_MARK, written, bytes(32)))
os.utime(path, (written, written))

x = MappedArray(path)
assert x.shape == (rows, 1024, 1024)
clients = Split.from_lists([range(10), range(16000, 16010)])
nobody = Split.from_lists([[], []])
federation = Federation(
    x, torch.arange(rows) % 2, clients, nobody, nobody,
    groups=np.zeros(2, np.int64), group_names=("all",), unseen=np.zeros(2, bool),
)
federation.fingerprint()

class Shrink(nn.Module):
    def forward(self, x):
        return x[..., ::64, ::64].float().flatten(1)

before = peak()
run = train(federation, model=Model(Shrink(), nn.Linear(256, 2)), rounds=2, batch_size=5)
print(json.dumps({"grown": peak() - before, "rounds": run.summary["rounds"]}))
"""


def test_memory_does_not_grow_with_the_samples_that_are_not_read(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PEAK + PROGRAM, str(tmp_path / "large.npy")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["rounds"] == 2
    assert said["grown"] < 1 << 30
