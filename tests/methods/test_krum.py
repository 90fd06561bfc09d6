"""Krum and multi-Krum: scores by hand, and which clients are kept."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.method import Updates
from equipoise.methods import build
from equipoise.methods.krum import Krum, MultiKrum, krum_scores, squared_distances


def updates_of(clients, seed=0):
    draws = np.random.default_rng(seed)
    received = {
        "w": torch.from_numpy(draws.normal(size=(3, 2))),
        "b": torch.from_numpy(draws.normal(size=4)),
    }
    params = {
        name: tensor + torch.from_numpy(draws.normal(size=(clients, *tensor.shape)))
        for name, tensor in received.items()
    }
    return received, Updates(params, {}, {}, {})


def scores_by_hand(params, f):
    """Blanchard et al.: the sum of squared distances to the n − f − 2 nearest others."""
    flat = np.concatenate([stack.flatten(1).numpy() for stack in params.values()], axis=1)
    scores = []
    for client in range(len(flat)):
        others = sorted(
            float(((flat[client] - flat[o]) ** 2).sum()) for o in range(len(flat)) if o != client
        )
        scores.append(sum(others[: len(flat) - f - 2]))
    return np.array(scores)


@pytest.mark.parametrize("f", [0, 1, 2])
def test_scores_and_choices_equal_the_papers(f):
    received, updates = updates_of(8)
    wanted = scores_by_hand(updates.params, f)
    np.testing.assert_allclose(
        krum_scores(squared_distances(received, updates), f).numpy(), wanted, rtol=1e-12
    )
    ids = np.arange(10, 18)
    cohort = SimpleNamespace(ids=ids)
    best = ids[np.argsort(wanted)]
    assert set(Krum(f=f).screen(received, updates, cohort).dropped) == set(best[1:].tolist())
    for m, kept in ((None, 8 - f), (3, 3)):
        screened = MultiKrum(f=f, m=m).screen(received, updates, cohort)
        assert set(screened.dropped) == set(best[kept:].tolist())
        assert screened.updates is updates


def test_float32_updates_are_scored_as_exactly_as_they_are():
    draws = torch.Generator().manual_seed(0)
    received = {"w": torch.randn(300_000, generator=draws)}
    moved = received["w"] + 0.01 * torch.randn(8, 300_000, generator=draws)
    scores = krum_scores(squared_distances(received, Updates({"w": moved}, {}, {}, {})), 1)
    # Differences as float32 has them.
    exact = (moved - received["w"]).double()
    np.testing.assert_allclose(scores.numpy(), scores_by_hand({"w": exact}, 1), rtol=1e-6)


@pytest.mark.parametrize("where", ["params", "buffers", "uploads"])
def test_a_client_far_away_in_anything_it_sends_is_dropped(where):
    received, updates = updates_of(7)
    draws = np.random.default_rng(1)
    # Statistics are a million times larger than parameters, but must not dominate the distance.
    trees = {
        "params": updates.params["w"],
        "buffers": 1e6 * torch.from_numpy(draws.normal(size=(7, 5))),
        "uploads": 1e-6 * torch.from_numpy(draws.normal(size=(7, 5))),
    }
    trees[where][4] *= 100
    full = Updates(updates.params, {"mean": trees["buffers"]}, {"c": {"w": trees["uploads"]}}, {})
    received["mean"] = torch.zeros(5).double()
    assert MultiKrum().screen(received, full, SimpleNamespace(ids=np.arange(7))).dropped == (4,)


def test_equal_scores_keep_the_lower_ids():
    received = {"w": torch.zeros(1)}
    updates = Updates({"w": torch.ones(5, 1)}, {"m": torch.zeros(5, 1)}, {}, {})
    assert Krum().screen(
        {**received, "m": torch.zeros(1)}, updates, SimpleNamespace(ids=np.arange(5))
    ).dropped == (
        1,
        2,
        3,
        4,
    )


def test_how_many_clients_are_needed():
    assert [Krum(f=f).least_clients() for f in (0, 1, 2)] == [3, 5, 7]
    assert MultiKrum(f=1, m=6).least_clients() == 7
    for options, fault in (({"f": -1}, r"krum\.f"), ({"f": 1.5}, r"krum\.f")):
        with pytest.raises(InputError, match=fault):
            build("fedavg", guard={"name": "krum", **options})
    with pytest.raises(InputError, match=r"multikrum\.m must be a whole number of at least 1"):
        MultiKrum(m=0)
