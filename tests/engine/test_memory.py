"""Memories of clients: versions, new clients, growth, and checkpoints."""

from __future__ import annotations

import numpy as np
import torch

from equipoise.engine.memory import MemoryStore

FIRST = {"kept": {"w": torch.tensor([-1.0, -2.0])}, "other": {"b": torch.tensor(0.5)}}


def memory(*values):
    """The memories of some clients, with a different number each."""
    column = torch.tensor(values)
    return {"kept": {"w": torch.stack([column, 10 * column], 1)}, "other": {"b": column + 0.25}}


def read(store, *clients):
    found, seen = store.read(np.array(clients), FIRST)
    return found["kept"]["w"].tolist(), found["other"]["b"].tolist(), seen.tolist()


def test_strangers_get_the_first_memory():
    assert read(MemoryStore(), 4, 0) == ([[-1.0, -2.0]] * 2, [0.5, 0.5], [False, False])


def test_trees_that_nobody_has_written_are_the_first_ones():
    """A rule may read a first memory that its ``finish`` never returns."""
    store = MemoryStore()
    written = memory(1.0, 2.0)
    for clients in ([7, 2], [2, 9]):
        store.write(np.array(clients), {"kept": written["kept"]})
        assert store.newest(np.array([2]), FIRST)["other"]["b"].tolist() == [0.5]
        store.commit()
    assert read(store, 7, 2) == ([[1.0, 10.0], [1.0, 10.0]], [0.5, 0.5], [True, True])
    assert read(store, 4, 9) == ([[-1.0, -2.0], [2.0, 20.0]], [0.5, 0.5], [False, True])


def test_nobody_has_no_memory():
    store = MemoryStore()
    for _ in range(2):
        found, seen = store.read(np.array([], dtype=np.int64), FIRST)
        assert found["kept"]["w"].shape == (0, 2)
        assert found["other"]["b"].shape == seen.shape == (0,)
        store.write(np.array([7]), memory(1.0))
        store.commit()


def test_memories_come_back_to_their_clients_in_any_order():
    store = MemoryStore()
    store.write(np.array([7, 2, 900_000]), memory(1.0, 2.0, 3.0))
    store.commit()
    weights, biases, seen = read(store, 2, 5, 900_000, 7)
    assert weights == [[2.0, 20.0], [-1.0, -2.0], [3.0, 30.0], [1.0, 10.0]]
    assert biases == [2.25, 0.5, 3.25, 1.25]
    assert seen == [True, False, True, True]


def test_a_round_reads_what_was_committed_before_it():
    store = MemoryStore()
    store.write(np.array([1]), memory(1.0))
    assert read(store, 1)[2] == [False]
    store.commit()
    store.write(np.array([1]), memory(5.0))
    assert read(store, 1)[0] == [[1.0, 10.0]]
    store.forget_pending()
    store.commit()
    assert read(store, 1)[0] == [[1.0, 10.0]], "what was forgotten is not committed"
    store.write(np.array([1]), memory(6.0))
    store.commit()
    store.commit()
    assert read(store, 1)[0] == [[6.0, 60.0]]


def test_reading_gives_copies():
    store = MemoryStore()
    store.write(np.array([1]), memory(1.0))
    store.commit()
    found, _ = store.read(np.array([1, 2]), FIRST)
    found["kept"]["w"].zero_()
    assert read(store, 1, 2)[0] == [[1.0, 10.0], [-1.0, -2.0]]
    assert FIRST["kept"]["w"].tolist() == [-1.0, -2.0]


def test_it_grows_with_those_who_take_part():
    store = MemoryStore()
    for round_ in range(20):
        clients = np.array([round_, 1000 + round_, 0])
        store.write(clients, memory(float(round_), round_ + 0.5, -float(round_)))
        store.commit()
    weights, _, seen = read(store, *range(20), *range(1000, 1020))
    assert all(seen)
    assert [w[0] for w in weights[1:20]] == list(range(1, 20))
    assert [w[0] for w in weights[20:]] == [r + 0.5 for r in range(20)]
    assert weights[0][0] == -19.0, "the newest version counts"
    exported = store.export()
    assert len(exported["clients"]) == 39 + 1
    assert all(len(stack) == 40 for stack in exported.values())


def test_a_checkpoint_brings_everything_back_and_drops_what_was_pending():
    store = MemoryStore()
    store.write(np.array([3, 8]), memory(1.0, 2.0))
    store.commit()
    store.write(np.array([3]), memory(9.0))
    other = MemoryStore()
    other.write(np.array([5]), memory(4.0))
    other.restore({name: tensor.clone() for name, tensor in store.export().items()})
    other.commit()
    assert read(other, 3, 8, 5) == (
        [[1.0, 10.0], [2.0, 20.0], [-1.0, -2.0]],
        [1.25, 2.25, 0.5],
        [True, True, False],
    )
    other.write(np.array([8, 5]), memory(7.0, 6.0))
    other.commit()
    assert read(other, 3, 8, 5)[0] == [[1.0, 10.0], [7.0, 70.0], [6.0, 60.0]]


def test_nothing_remembered_is_nothing_exported():
    store = MemoryStore()
    assert store.export() == {}
    store.write(np.array([1]), {})
    store.commit()
    assert store.export() == {}
    store.restore({})
    assert read(store, 1)[2] == [False]


def test_a_commit_of_other_clients_changes_nothing():
    store = MemoryStore()
    store.write(np.array([4]), memory(1.0))
    store.commit(np.array([7]))
    assert (store.clients, store.export()) == ([], {})
    store.write(np.array([7]), memory(2.0))
    store.commit(np.array([7]))
    assert read(store, 4, 7)[2] == [False, True]
