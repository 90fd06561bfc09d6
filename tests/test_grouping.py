"""Clusters from round to round: clients that keep theirs, what is sent, and new clients."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.grouping import place
from equipoise.method import State
from equipoise.methods.fedgc import FedGC

float64 = partial(torch.tensor, dtype=torch.float64)


def cohort_of(ids, key=0):
    return SimpleNamespace(ids=np.array(ids), key=key)


def grouped(method, rounds):
    """Cluster in one round after the other; return the states."""
    state, states = State(0, {"w": torch.zeros(1)}), []
    for number, (ids, points) in enumerate(rounds):
        state = method.grouped(state, float64(points).unsqueeze(1), cohort_of(ids, number))
        states.append(state)
    return states


def test_absent_clients_keep_their_clusters_and_count_for_centres():
    method = FedGC(clusters=2)
    first, second = grouped(
        method, [([0, 1, 2, 3], [1.0, 1.2, 5.0, 5.2]), ([1, 3, 7], [5.1, 5.0, 1.1])]
    )
    assert first.notes["clusters"].tolist() == [0, 0, 1, 1]
    assert first.server["clusters"]["h"].flatten().tolist() == pytest.approx([1.1, 5.1])
    # Client 1 has changed its type; clients 0 and 2 are absent.
    assert second.notes["clusters"].tolist() == [1, 1, 0]
    assert second.server["clients"]["ids"].tolist() == [0, 1, 2, 3, 7]
    assert second.server["clusters"]["h"].flatten().tolist() == pytest.approx(
        [(1.0 + 1.1) / 2, (5.1 + 5.0 + 5.0) / 3]
    )
    shared, each = method.send(second, cohort_of([2, 5, 7]))
    assert shared["centres"]["h"].flatten().tolist() == pytest.approx([1.05, 5.033333], rel=1e-6)
    # Client 5 is not known yet.
    assert each["cluster"].tolist() == [1, -1, 0]


def test_fewer_clients_than_clusters_and_clusters_without_members():
    method = FedGC(clusters=4)
    two, moved = grouped(method, [([0, 1], [1.0, 9.0]), ([0, 1], [9.5, 9.5])])
    assert two.notes["clusters"].tolist() == [0, 1]
    shared, _ = method.send(two, cohort_of([0, 1]))
    assert shared["centres"]["h"].flatten().tolist() == [1, 9]
    # Both are in cluster 1 now. Cluster 0 is not sent, but its centre and its number are kept.
    assert moved.notes["clusters"].tolist() == [1, 1]
    shared, each = method.send(moved, cohort_of([0, 1]))
    assert shared["centres"]["h"].flatten().tolist() == [9.5]
    assert each["cluster"].tolist() == [0, 0]
    assert moved.server["clusters"]["h"].flatten().tolist()[:2] == [1, 9.5]
    back = method.grouped(moved, float64([[1.5]]), cohort_of([1], 2))
    assert back.notes["clusters"].tolist() == [0]


def test_the_number_of_clusters_may_be_chosen_each_round():
    points = [0.0, 0.1, 0.2, 5.0, 5.1, 5.2, 9.0, 9.1]
    for choice in ("bic", "stability"):
        (state,) = grouped(FedGC(clusters=4, choice=choice), [(range(8), points)])
        assert state.notes["clusters"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_hybrid_clients_belong_to_two_clusters():
    method = FedGC(clusters=2, soft=True)
    rounds = [(range(5), [0.0, 0.0, 8.0, 8.0, 8.0]), (range(6), [0.0, 0.0, 8.0, 8.0, 8.0, 2.0])]
    _, state = grouped(method, rounds)
    # With client 5 the first centre is 2/3, so that it is (8 − 2)/(8 − 2/3) of the first type.
    share = 6 / (8 - 2 / 3)
    assert state.notes["memberships"][5].tolist() == pytest.approx([share, 1 - share], abs=1e-6)
    _, each = method.send(state, cohort_of([0, 5, 9]))
    assert each["membership"].tolist()[1:] == [pytest.approx([share, 1 - share], abs=1e-6), [0, 0]]


def test_clusters_without_members_are_nobodys_place():
    server = {
        "clients": {"share": torch.eye(3).double()[[0, 2, 2]]},
        "clusters": {"h": torch.tensor([[0.0, 0.0], [3.0, 3.0], [4.0, 4.0]]).double()},
    }
    state = State(3, {}, server)
    # The second cluster has no members, although it is nearer.
    assert place(state, torch.tensor([[2.9, 2.9], [0.1, 1.0]])).tolist() == [2, 0]


def test_representations_that_are_not_finite_are_ignored():
    method = FedGC(clusters=2)
    first, second = grouped(method, [([0, 1, 2], [1.0, 5.0, np.nan]), ([0, 1], [np.inf, 5.5])])
    assert first.notes["clusters"].tolist() == [0, 1, -1]
    assert second.notes["clusters"].tolist() == [0, 1]
    assert second.server["clusters"]["h"].flatten().tolist() == [1.0, 5.5]
    (nothing,) = grouped(method, [([0, 1], [np.nan, np.nan])])
    assert nothing.notes["clusters"].tolist() == [-1, -1]
    assert method.send(nothing, cohort_of([0, 1]))[1] == {}
