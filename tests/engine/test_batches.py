"""Batches: every sample once per epoch, only the client's own samples, independent of the chunk."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from equipoise.engine import batches as batches_module
from equipoise.engine.batches import draw_batches
from equipoise.federation import Split
from equipoise.random import Purpose, fold, fold_tensor
from tests.engine.comparison import distance
from tests.engine.federations import SIZES as SIZES_OF_IMAGES
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import mlp
from tests.rounds import engine_run

# Client 0 holds 7 samples, client 1 none, client 2 twelve, client 3 one, client 4 eight. Positions
# are scattered.
HELD = [range(100, 107), [], range(40, 52), [3], range(60, 68)]
SPLIT = Split.from_lists([list(held) for held in HELD])
SIZES = {0: 7, 2: 12, 3: 1, 4: 8}
ORDERED = np.array([2, 4, 0, 3])


def drawn(
    clients=ORDERED, *, phase=0, batch_size=4, epochs=2, steps=None, shuffle=True, key=11, a_step=1
):
    keys = fold_tensor(key, torch.from_numpy(clients))
    sizes = SPLIT.sizes[clients]
    work = np.full_like(sizes, steps) if steps else -(-epochs * -(-sizes // batch_size) // a_step)
    how = {
        "phase": phase,
        "batch_size": batch_size,
        "steps": work,
        "shuffle": shuffle,
        "a_step": a_step,
    }
    return draw_batches(SPLIT, torch.from_numpy(SPLIT.indices), clients, keys, **how)


def samples_of(batches, row):
    """The samples of every step of a client, without padding."""
    return [
        batches.positions[row, s, : batches.counts[row, s]].tolist()
        for s in range(batches.steps[row])
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 12, 50])
def test_every_sample_is_seen_exactly_once_an_epoch(batch_size, shuffle):
    batches = drawn(batch_size=batch_size, epochs=3, shuffle=shuffle)
    for row, client in enumerate(ORDERED):
        steps = samples_of(batches, row)
        an_epoch = -(-SIZES[client] // batch_size)
        assert len(steps) == 3 * an_epoch
        for epoch in range(3):
            seen = [
                sample
                for step in steps[epoch * an_epoch : (epoch + 1) * an_epoch]
                for sample in step
            ]
            assert sorted(seen) == list(HELD[client])
            if not shuffle:
                assert seen == list(HELD[client])


@pytest.mark.parametrize("a_step", [1, 2])
def test_places_say_where_positions_are_among_the_samples_held(a_step):
    batches = drawn(a_step=a_step)
    assert batches.held.tolist() == [position for client in ORDERED for position in HELD[client]]
    assert batches.sizes.tolist() == [12, 8, 7, 1]
    found = [batches.held[place].item() for place in batches.index.flatten()]
    assert found == batches.positions.flatten().tolist()
    # No position belongs to another client, including padding.
    for row, (first, end) in enumerate([(0, 12), (12, 20), (20, 27), (27, 28)]):
        assert first <= int(batches.index[row].min()) <= int(batches.index[row].max()) < end


def test_counts_and_steps_by_hand():
    batches = drawn(batch_size=5, epochs=1)
    assert batches.steps.tolist() == [3, 2, 2, 1]
    made = [batches.counts[row, : batches.steps[row]].tolist() for row in range(4)]
    assert made == [[5, 5, 2], [5, 3], [5, 2], [1]]
    assert [batches.active(step) for step in range(4)] == [4, 3, 1, 0]


def test_samples_are_counted_as_often_as_they_are_seen():
    assert drawn(batch_size=5, epochs=3).samples().tolist() == [36, 24, 21, 3]
    assert drawn(batch_size=5, steps=4).samples().tolist() == [5 + 5 + 2 + 5, 16, 14, 4]
    assert drawn(batch_size=5, epochs=1, a_step=2).samples().tolist() == [5 + 5 + 2 + 5, 8, 7, 2]


@pytest.mark.parametrize(
    ("a_step", "epochs", "steps"),
    [(2, 1, [2, 1, 1, 1]), (2, 3, [5, 3, 3, 2]), (3, 2, [2, 2, 2, 1])],
)
def test_steps_of_several_batches_take_the_next_of_one_stream(a_step, epochs, steps):
    # An epoch has 3, 2, 2 and 1 batches of 5.
    several = drawn(batch_size=5, epochs=epochs, a_step=a_step)
    assert several.steps.tolist() == steps
    one_by_one = drawn(batch_size=5, epochs=20)
    for row in range(4):
        count = a_step * steps[row]
        assert several.counts[row, :count].tolist() == one_by_one.counts[row, :count].tolist()
        for batch in range(count):
            real = several.counts[row, batch]
            assert torch.equal(
                several.positions[row, batch, :real], one_by_one.positions[row, batch, :real]
            )
        assert torch.equal(several.keys[row, :count], one_by_one.keys[row, :count])
    assert several.of_step(1) == slice(a_step, 2 * a_step)
    assert one_by_one.of_step(1) == 1


def test_a_fixed_number_of_steps_takes_so_many_times_the_batches():
    several = drawn(batch_size=5, steps=2, a_step=3)
    assert several.steps.tolist() == [2, 2, 2, 2]
    assert several.counts.tolist() == drawn(batch_size=5, steps=6).counts.tolist()


@pytest.mark.parametrize(("name", "few"), [("permutations", 0), ("permutations_array", 1000)])
def test_small_clients_draw_no_orders_they_never_use(monkeypatch, name, few):
    drawn_epochs = []
    original = getattr(batches_module, name)
    monkeypatch.setattr(batches_module, "FEW", few)

    def listening(keys, sizes, width):
        drawn_epochs.append(keys.shape[1])
        return original(keys, sizes, width)

    monkeypatch.setattr(batches_module, name, listening)
    # The largest client makes 12 steps per epoch, the smallest one.
    drawn(batch_size=1, epochs=2)
    drawn(batch_size=1, steps=5)
    assert drawn_epochs == [2, 5]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("how", [{}, {"batch_size": 5, "steps": 4}, {"epochs": 3, "a_step": 2}])
def test_the_host_draws_the_same_batches_as_the_device(monkeypatch, how, shuffle):
    monkeypatch.setattr(batches_module, "FEW", 0)
    of_device = drawn(shuffle=shuffle, **how)
    monkeypatch.setattr(batches_module, "FEW", 1000)
    of_host = drawn(shuffle=shuffle, **how)
    for field in ("positions", "index", "keys", "held"):
        mine, other = getattr(of_host, field), getattr(of_device, field)
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other), field
    assert of_host.counts.tolist() == of_device.counts.tolist()


def test_padding_repeats_samples_of_the_client():
    batches = drawn(batch_size=5)
    for row, client in enumerate(ORDERED):
        assert set(batches.positions[row].flatten().tolist()) <= set(HELD[client])


def test_a_fixed_number_of_steps_runs_through_epochs_alike_for_all():
    batches = drawn(batch_size=5, steps=4)
    assert batches.steps.tolist() == [4, 4, 4, 4]
    assert [batches.active(step) for step in range(5)] == [4, 4, 4, 4, 0]
    assert batches.counts.tolist() == [[5, 5, 2, 5], [5, 3, 5, 3], [5, 2, 5, 2], [1, 1, 1, 1]]
    by_epochs = drawn(batch_size=5, epochs=2)
    assert samples_of(batches, 1) == samples_of(by_epochs, 1), (
        "the same shuffles as two epochs of two steps"
    )


def test_epochs_phases_and_keys_have_orders_of_their_own():
    first, second = (list(chain(*samples_of(drawn(), 0)[a : a + 3])) for a in (0, 3))
    assert first != second
    assert samples_of(drawn(phase=1), 0) != samples_of(drawn(phase=0), 0)
    assert samples_of(drawn(key=12), 0) != samples_of(drawn(key=11), 0)


def test_the_order_is_the_hash_worked_out_in_integers():
    batches = drawn(batch_size=4, phase=3)
    key = fold(11, 4)
    order = sorted(range(8), key=lambda i: fold(key, Purpose.SHUFFLE, 3, 1, i) & ((1 << 63) - 1))
    assert list(chain(*samples_of(batches, 1)[2:4])) == [60 + i for i in order]


def test_step_keys_are_hashes_of_client_phase_and_step():
    batches = drawn(phase=2)
    found = [[int(key) & ((1 << 64) - 1) for key in row] for row in batches.keys]
    longest = int(batches.steps.max())
    assert found == [
        [fold(fold(11, int(c)), Purpose.STEP, 2, s) for s in range(longest)] for c in ORDERED
    ]


def test_batches_do_not_depend_on_chunk_mates():
    together = drawn(batch_size=3)
    for row, client in enumerate(ORDERED):
        alone = drawn(np.array([client]), batch_size=3)
        assert samples_of(alone, 0) == samples_of(together, row)
        assert torch.equal(alone.keys[0], together.keys[row, : alone.keys.shape[1]])


def test_without_shuffling_epochs_repeat():
    steps = samples_of(drawn(batch_size=5, shuffle=False), 2)
    assert steps == [[100, 101, 102, 103, 104], [105, 106]] * 2


# ---- parts of batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 12])
def test_halves_are_the_halves_of_each_batch(batch_size):
    """The second half is the larger one, and both halves of a single sample are that sample."""
    whole = drawn(batch_size=batch_size, epochs=2)
    halves = whole.split(2)
    assert halves.steps.tolist() == whole.steps.tolist()
    assert halves.a_step == 2
    for row in range(len(ORDERED)):
        for step, samples in enumerate(samples_of(whole, row)):
            half = len(samples) // 2
            for batch, wanted in (
                (2 * step, samples[: max(1, half)]),
                (2 * step + 1, samples[half:]),
            ):
                count = halves.counts[row, batch]
                assert halves.positions[row, batch, :count].tolist() == wanted
                assert torch.equal(
                    halves.held[halves.index[row, batch]], halves.positions[row, batch]
                )


def test_parts_by_hand():
    """Client 2 holds 12 samples, in batches of 5, 5 and 2; client 3 holds one."""
    parts = drawn(batch_size=5, epochs=1).split(3)
    assert parts.counts[0].tolist() == [1, 2, 2, 1, 2, 2, 1, 1, 1]
    assert parts.counts[3, :3].tolist() == [1, 1, 1]
    assert parts.samples().tolist() == [13, 5 + 3, 5 + 3, 3]
    assert parts.of_step(1) == slice(3, 6)


def test_padding_of_parts_repeats_samples_of_the_client():
    halves = drawn(batch_size=5).split(2)
    for row, client in enumerate(ORDERED):
        assert set(halves.positions[row].flatten().tolist()) <= set(HELD[client])


def test_parts_have_random_numbers_of_their_own_whatever_their_chunk_mates():
    halves = drawn(batch_size=3).split(2)
    assert len(halves.keys.unique()) == halves.keys.numel()
    for row, client in enumerate(ORDERED):
        alone = drawn(np.array([client]), batch_size=3).split(2)
        assert torch.equal(alone.keys[0], halves.keys[row, : alone.keys.shape[1]])
        for batch in range(2 * int(alone.steps[0])):
            count = alone.counts[0, batch]
            assert count == halves.counts[row, batch]
            assert torch.equal(
                alone.positions[0, batch, :count], halves.positions[row, batch, :count]
            )


# ---- batches larger than clients -----------------------------------------------------------------


def test_batches_are_no_wider_than_the_fullest_client():
    split = Split.from_lists([list(range(8 * client, 8 * client + 8)) for client in range(3)])
    clients = np.arange(3)
    how = {"phase": 0, "steps": np.ones(3, np.int64), "shuffle": True}
    keys = fold_tensor(11, torch.from_numpy(clients))
    batches = draw_batches(
        split, torch.from_numpy(split.indices), clients, keys, batch_size=32, **how
    )
    assert batches.positions.shape == (3, 1, 8)
    assert batches.counts.tolist() == [[8]] * 3


@pytest.mark.parametrize("how", [{"epochs": 3}, {"steps": 4}, {"epochs": 3, "a_step": 2}])
def test_any_batch_larger_than_the_largest_client_is_the_same(how):
    largest = drawn(batch_size=12, **how)
    huge = drawn(batch_size=1_000_000, **how)
    assert huge.positions.shape[-1] == 12
    for field in ("positions", "held", "index", "keys"):
        assert torch.equal(getattr(huge, field), getattr(largest, field)), field
    assert huge.counts.tolist() == largest.counts.tolist()
    assert huge.steps.tolist() == largest.steps.tolist()


@pytest.mark.parametrize("chunk", [1, 3, 10])
@pytest.mark.parametrize("method", ["fedavg", "perfedavg"])
def test_training_with_any_batch_larger_than_the_largest_client_is_the_same(method, chunk):
    def trained(batch_size):
        return engine_run(
            mlp(0.3),
            images(),
            THREE_COHORTS,
            chunk=chunk,
            method=method,
            batch_size=batch_size,
            epochs=2,
        )

    wanted = trained(max(SIZES_OF_IMAGES))
    assert distance(trained(10**6), wanted) == 0
    assert distance(trained(20), wanted) > 1e-6


@pytest.mark.parametrize("a_step", [1, 2])
def test_a_full_batch_is_no_wider_than_the_largest_client(a_step):
    """Memory depends on the data, however large the batch size is."""
    batches = drawn(batch_size=1_000_000, a_step=a_step)
    assert batches.positions.shape[2] == max(SIZES.values())
    for row, client in enumerate(ORDERED):
        assert all(sorted(step) == list(HELD[client]) for step in samples_of(batches, row))
    assert torch.equal(batches.positions, drawn(batch_size=12, a_step=a_step).positions)


def test_tensors_are_moved_together_and_keep_their_shapes():
    given = {
        "matrix": np.arange(6).reshape(2, 3),
        "none": np.empty(0, np.int64),
        "transposed": np.arange(6).reshape(2, 3).T,
    }
    # The CPU by another name: a device that tensors have to be moved to.
    moved = batches_module._moved(given, torch.device("cpu", 0))
    assert moved["matrix"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert moved["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert moved["none"].tolist() == []
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved.values()}) == 1
