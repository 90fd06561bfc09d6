"""The coordinate-wise median and the trimmed mean, against numpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from equipoise.errors import InputError
from equipoise.method import State, Updates
from equipoise.methods import build
from equipoise.methods.median import trimmed


def combined(method, updates, clients):
    shapes = {**updates.params, **updates.buffers}
    state = State(
        0, {name: torch.zeros(stack.shape[1:], dtype=stack.dtype) for name, stack in shapes.items()}
    )
    # Weights have no effect: a client that claims nearly all samples has no more influence.
    prior = torch.full((clients,), 1e-3, dtype=torch.float64)
    return (
        build(**method)
        .aggregation.combine(state, updates, SimpleNamespace(ids=np.arange(clients), prior=prior))
        .model
    )


def updates_of(clients):
    draws = np.random.default_rng(clients)
    params = {
        "w": torch.from_numpy(draws.normal(size=(clients, 3, 2))),
        "t": torch.from_numpy(draws.normal(size=clients)),
    }
    return Updates(params, {"mean": torch.from_numpy(draws.normal(size=(clients, 4)))}, {}, {})


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7])
def test_medians_equal_numpys(clients):
    updates = updates_of(clients)
    found = combined({"name": "median"}, updates, clients)
    for name, stack in {**updates.params, **updates.buffers}.items():
        np.testing.assert_allclose(
            found[name].numpy(), np.median(stack.numpy(), axis=0), rtol=1e-15
        )


@pytest.mark.parametrize(
    ("clients", "share", "ends"),
    [(10, 0.1, 1), (10, 0.3, 3), (30, 0.1, 3), (10, 0.0, 0), (11, 0.1, 2)],
)
def test_trimmed_means_equal_scipys(clients, share, ends):
    updates = updates_of(clients)
    found = combined({"name": "trimmedmean", "share": share}, updates, clients)
    for name, stack in {**updates.params, **updates.buffers}.items():
        # SciPy rounds down, so it is given the number of values itself.
        wanted = trim_mean(stack.numpy(), (ends + 0.1) / clients, axis=0)
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-12, atol=1e-15)


def test_any_number_of_clients_is_sorted():
    for clients in range(1, 40):
        rows = torch.from_numpy(
            np.random.default_rng(clients).integers(0, 9, size=(clients, 50))
        ).double()
        found = trimmed(Updates({"w": rows}, {}, {}, {}), (clients - 1) // 2)
        np.testing.assert_array_equal(found["w"].numpy(), np.median(rows.numpy(), axis=0))


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_few_clients_are_trimmed_as_far_as_something_remains(clients):
    updates = updates_of(clients)
    found = combined({"name": "trimmedmean", "share": 0.45}, updates, clients)
    np.testing.assert_allclose(
        found["w"].numpy(), np.median(updates.params["w"].numpy(), axis=0), rtol=1e-15
    )


def test_a_model_larger_than_a_piece_has_no_seams_and_single_precision_is_kept():
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 300_001))).float()
    found = trimmed(Updates({"w": rows}, {"empty": torch.zeros(5, 0)}, {}, {}), 2)
    assert found["w"].dtype == torch.float32
    assert torch.equal(found["w"], rows.median(dim=0).values)
    assert found["empty"].shape == (0,)


@pytest.mark.parametrize("share", [-0.1, 0.5, float("nan")])
def test_shares_that_leave_nothing_are_refused(share):
    with pytest.raises(InputError, match=r"trimmedmean\.share must be at least 0 and below 0\.5"):
        build("trimmedmean", share=share)
