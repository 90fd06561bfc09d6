"""Whole numbers that a model has no row for are found on the host, before a GPU sees them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import Federation, tasks, train
from equipoise.data.cache import MappedArray
from equipoise.engine import encoding, lookups
from equipoise.engine.lookups import check_lookups
from equipoise.engine.network import Network
from equipoise.errors import InputError
from equipoise.splits import Split
from tests.models.stacks import operations

ROWS, COLUMNS = 7, 5


def tokens():
    """Numbers below ``ROWS`` of 26 samples."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, ROWS, (26, COLUMNS)))


def federation(x):
    """Two clients with 8 samples for training and 2 for tests; ann validates with 2 of her own.

    The others are in no split.
    """
    return Federation(
        x=x,
        y=torch.arange(len(x)) % 3,
        train=Split.from_lists([range(8), range(12, 20)]),
        val=Split.from_lists([[8, 9], []]),
        test=Split.from_lists([[10, 11], [22, 23]]),
        groups=np.array([0, 0]),
        group_names=("all",),
        unseen=np.array([False, False]),
        client_names=("ann", "bob"),
    )


class Embedded(nn.Module):
    """A table for each of some columns."""

    def __init__(self, rows=(ROWS,) * COLUMNS):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(each, 2) for each in rows)
        self.head = nn.Linear(2 * len(rows), 3)

    def forward(self, x):
        return self.head(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], dim=1))


def check(model, x):
    network = Network(model, tasks.build("classification"))
    check_lookups(network, federation(x), torch.arange(3))


def test_samples_within_the_rows_are_accepted():
    check(Embedded(), tokens())


@pytest.mark.parametrize(
    ("sample", "named"),
    [(5, "sample 5 of client 0"), (9, "sample 9 of client 0"), (23, "sample 23 of client 1")],
    ids=["train", "val", "test"],
)
def test_a_number_beyond_the_rows_is_found_in_every_split(sample, named):
    x = tokens()
    x[sample, 3] = 9
    with pytest.raises(InputError, match=rf"{named} .*an embedding fewer rows than 10\?"):
        check(Embedded(), x)


def test_a_number_below_zero_is_named():
    x = tokens()
    x[17, 2] = -1
    with pytest.raises(InputError, match=r"sample 17 of client 1 .*an embedding has no row -1 "):
        check(Embedded(), x)


def test_every_column_is_tried_with_its_own_largest_number():
    x = tokens()
    x[:, 0] += 100
    rows = (ROWS + 100, *(ROWS,) * (COLUMNS - 1))
    check(Embedded(rows), x)
    x[22, 4] = ROWS
    with pytest.raises(InputError, match="sample 22 of client 1"):
        check(Embedded(rows), x)


def test_samples_that_nobody_uses_are_left_out_unless_the_trial_takes_them():
    x = tokens()
    x[24, 0] = x[20, 1] = 50
    check(Embedded(), x)
    network = Network(Embedded(), tasks.build("classification"))
    with pytest.raises(InputError, match="the model cannot take sample 24:"):
        check_lookups(network, federation(x), torch.tensor([24]))


def test_a_number_of_the_server_is_found():
    x = tokens()
    data = Federation.from_arrays(
        x,
        torch.arange(26) % 3,
        clients=[0, 1] * 13,
        splits=(1, 0, 0),
        server={"test": (torch.full((1, COLUMNS), 8), [0])},
    )
    network = Network(Embedded(), tasks.build("classification"))
    with pytest.raises(InputError, match="sample 26:"):
        check_lookups(network, data, torch.arange(3))


def test_samples_on_disk_are_read_in_blocks(tmp_path, monkeypatch):
    x = tokens()
    x[11, 1], x[23, 1] = 8, 9
    monkeypatch.setattr(
        lookups, "blocks", lambda x: ((i, x[i : i + 3]) for i in range(0, len(x), 3))
    )
    stored = MappedArray.write(tmp_path / "x.npy", tuple(x.shape), x.dtype, x.split(16))
    with pytest.raises(InputError, match="sample 23 of client 1"):
        check(Embedded(), stored)


class Counting(nn.Module):
    """Refuses a class beyond its own with an error that does not speak of an index."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(COLUMNS * ROWS, 3)

    def forward(self, x):
        return self.head(F.one_hot(x, ROWS).flatten(1).to(self.head.weight.dtype))


def test_any_error_of_some_samples_is_reported():
    x = tokens()
    check(Counting(), x)
    x[10, 0] = ROWS
    with pytest.raises(InputError, match="sample 10 of client 0 .*Class values must be smaller"):
        check(Counting(), x)


class ForGpus(Embedded):
    """A model whose kernels do not exist on a CPU."""

    def forward(self, x):
        raise NotImplementedError("no kernel for this device")


def test_a_model_that_only_a_gpu_can_call_is_left_to_its_trial():
    check(ForGpus(), tokens())


class Increasing(Embedded):
    """Takes samples whose numbers do not all agree, as samples of extremes do."""

    def forward(self, x):
        if bool((x == x[:, :1]).all(1).any()):
            raise ValueError("a sample of one number")
        return super().forward(x)


def test_numbers_that_no_sample_holds_together_refuse_nothing():
    x = tokens()
    x[:, 0] = torch.arange(26) % ROWS
    x[:, 1] = (x[:, 0] + 1) % ROWS
    check(Increasing(), x)


@pytest.mark.parametrize("x", [torch.zeros(26, 5), torch.zeros(26, 1, 2, 2, dtype=torch.uint8)])
def test_floating_point_and_images_of_bytes_are_not_read(x, monkeypatch):
    monkeypatch.setattr(lookups, "blocks", None)
    check(ForGpus(), x)


def test_single_numbers_and_small_types():
    model = nn.Sequential(nn.Embedding(ROWS, 3))
    check(model, torch.arange(26, dtype=torch.int32) % ROWS)
    with pytest.raises(InputError, match="fewer rows than 8"):
        check(model, torch.arange(26, dtype=torch.int32) % (ROWS + 1))


def test_the_model_and_its_samples_are_left_as_they_were():
    x, model = tokens(), Embedded().train()
    before = x.clone()
    called = operations(lambda: check(model, x))
    assert "aten::embedding" in called
    assert model.training
    assert torch.equal(x, before)


def test_the_host_checks_numbers_before_the_device_sees_a_sample(tmp_path, monkeypatch):
    """The trial is the first to call the model on the device."""

    def tried_out(*_):
        raise AssertionError("the trial would have ended the CUDA context")

    monkeypatch.setattr(encoding, "try_out", tried_out)
    x = tokens()
    x[0, 0] = x[23, 0] = 9
    with pytest.raises(InputError, match="has an embedding fewer rows than 10"):
        train(federation(x), model=Embedded(), rounds=1, out=tmp_path / "run")


def test_a_rare_number_in_the_test_split_of_one_client_ends_no_run(tmp_path):
    x = tokens()
    x[22, 4] = ROWS
    with pytest.raises(InputError, match=r"sample 22 of client 1 \('bob'\): .*fewer rows than 8"):
        train(federation(x), model=Embedded(), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
