"""What the server stores for clients when new clients join."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.method import State
from equipoise.methods import build


def everyone(ids, sizes, losses=None):
    """A cohort with sizes and losses."""
    counts = torch.tensor(sizes, dtype=torch.float64)
    return SimpleNamespace(
        ids=np.array(ids),
        sizes=np.array(sizes),
        groups=np.arange(len(ids)),
        prior=counts / counts.sum(),
        evaluate=lambda model, split: {"loss": torch.tensor(losses, dtype=torch.float64)},
    )


MODEL = {"w": torch.tensor([1.0])}


def test_scaffold_keeps_the_mean_of_all_control_variates():
    method = build("scaffold").aggregation
    state = method.begin(State(0, MODEL), everyone([0, 2], [1, 1]))
    # Two clients with control variates 3 and 5; a third joins with 0.
    state = state.with_server(control={"w": torch.tensor([4.0])})
    admitted = method.admit(state, everyone([0, 1, 2], [1, 1, 1]))
    assert admitted.server["control"]["w"].item() == pytest.approx((3 + 5 + 0) / 3)
    assert admitted.server["clients"]["count"].item() == 3


def test_gifair_keeps_losses_and_works_out_the_rest_for_everyone():
    method = build("gifair", lam=0.5).aggregation
    state = method.begin(State(0, MODEL), everyone([0, 2], [10, 30], [1.0, 2.0]))
    state = state.with_server(
        clients={**state.server["clients"], "loss": torch.tensor([0.25, 0.5], dtype=torch.float64)}
    )
    now = everyone([0, 1, 2], [10, 60, 30], [7.0, 8.0, 9.0])
    admitted = method.admit(state, now).server["clients"]
    assert admitted["loss"].tolist() == [0.25, 8.0, 0.5]
    fresh = method.begin(State(0, MODEL), now).server["clients"]
    for name in ("ids", "group", "prior", "scale"):
        assert torch.equal(admitted[name], fresh[name])


def test_afl_keeps_the_mixture_and_the_mean_model():
    method = build("afl").aggregation
    state = method.begin(State(0, MODEL), everyone([0, 2], [1, 3]))
    weight, mean = torch.tensor([0.9, 0.1], dtype=torch.float64), {"w": torch.tensor([5.0])}
    state = state.with_server(clients={**state.server["clients"], "weight": weight}, mean=mean)
    admitted = method.admit(state, everyone([0, 1, 2], [1, 1, 2]))
    assert admitted.server["clients"]["weight"].tolist() == [0.9, 0.25, 0.1]
    assert admitted.server["mean"] is mean


def test_what_is_not_about_clients_stays():
    method = build("fedavgm").aggregation
    kept = {"momentum": {"w": torch.tensor([2.0])}}
    state = State(3, MODEL, kept)
    assert method.admit(state, everyone([0], [1])).server["momentum"]["w"].item() == 2.0
