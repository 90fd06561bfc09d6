"""The norm bound, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.method import Updates, mix
from equipoise.methods import build
from equipoise.methods.normbound import NormBound
from tests.allocations import Largest

COHORT = SimpleNamespace(ids=np.array([2, 5, 7, 9]))


def random_updates(clients=4, seed=0):
    """Parameters, buffers and uploads of clients with increasing updates."""
    draws = np.random.default_rng(seed)
    growth = np.array([1.0, 2.0, 5.0, 1000.0])[:clients]

    def stack(*shape):
        return torch.from_numpy(
            draws.normal(size=(clients, *shape)) * growth.reshape(-1, *[1] * len(shape))
        )

    received = {"w": torch.from_numpy(draws.normal(size=(3, 2))), "t": torch.tensor(0.5).double()}
    received["mean"] = torch.from_numpy(draws.normal(size=4))
    params = {"w": received["w"] + stack(3, 2), "t": received["t"] + stack()}
    return received, Updates(
        params, {"mean": received["mean"] + stack(4)}, {"c": {"w": stack(3)}}, {}
    )


def by_hand(stacked, origin, bound, multiple):
    """Scale client by client in numpy."""
    names = list(stacked)
    steps = [
        np.concatenate(
            [
                np.ravel(stacked[n][k].numpy() - (origin[n].numpy() if n in origin else 0))
                for n in names
            ]
        )
        for k in range(len(stacked[names[0]]))
    ]
    lengths = [np.sqrt((step**2).sum()) for step in steps]
    # The lower one of the middle two.
    limit = multiple * sorted(lengths)[(len(lengths) - 1) // 2] if bound is None else bound
    return [step * min(1.0, limit / length) for step, length in zip(steps, lengths, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, {"multiple": 1.5}, {"bound": 3.0}, {"bound": 3.0, "multiple": 4.0}]
)
@pytest.mark.parametrize("drop", [None, 5.0])
def test_steps_have_the_lengths_computed_by_hand(options, drop):
    received, updates = random_updates()
    screened = NormBound(**options, drop=drop).screen(received, updates, COHORT)
    bound, multiple = options.get("bound"), options.get("multiple", 2.0)
    # The last client's steps are a thousand times as long as those of the first.
    assert screened.dropped == (() if drop is None else (9,))
    for before, after, origin, limit in (
        (updates.params, screened.updates.params, received, bound),
        (updates.buffers, screened.updates.buffers, received, None),
        (updates.uploads["c"], screened.updates.uploads["c"], {}, None),
    ):
        kept = by_hand(before, origin, limit, multiple)[: None if drop is None else 3]
        for client, wanted in enumerate(kept):
            found = [
                np.ravel(after[n][client].numpy() - (origin[n].numpy() if n in origin else 0))
                for n in before
            ]
            np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-12, atol=1e-13)


def test_updates_within_the_bound_keep_their_bits_and_others_are_named():
    received, updates = random_updates()
    guard = NormBound(bound=20.0, multiple=1e6, drop=None)
    screened = guard.screen(received, updates, COHORT)
    for name, stack in updates.params.items():
        assert torch.equal(screened.updates.params[name][:3], stack[:3])
    assert screened.notes["scaled"] == [9]
    lengths = screened.notes["norms"]
    assert lengths[2] < 20 < lengths[3]
    untouched = NormBound(bound=1e9, multiple=1e9, drop=1e9).screen(received, updates, COHORT)
    assert untouched.updates.params is updates.params
    assert untouched.notes["scaled"] == []


def test_half_of_the_clients_cannot_raise_the_median():
    received = {"w": torch.zeros(1)}
    updates = Updates({"w": torch.tensor([[1.0], [2.0], [1e6], [1e6]])}, {}, {}, {})
    screened = NormBound(multiple=1.0, drop=None).screen(received, updates, COHORT)
    assert screened.updates.params["w"].flatten().tolist() == [1.0, 2.0, 2.0, 2.0]


def test_clients_far_above_the_median_are_dropped():
    received, cohort = {"w": torch.zeros(1)}, SimpleNamespace(ids=np.arange(5))

    def screened(*steps, **options):
        stack = torch.tensor(steps).view(-1, 1)
        return NormBound(**options).screen(received, Updates({"w": stack}, {}, {}, {}), cohort)

    found = screened(1.0, -2.0, 2.0, 10.0, 10.1)
    assert found.dropped == (4,)
    assert found.notes["norms"].tolist() == [1.0, 2.0, 2.0, 10.0]
    assert found.notes["scaled"] == [3]
    assert screened(1.0, -2.0, 2.0, 10.0, 10.1, drop=3.0).dropped == (3, 4)
    # Clients that learn while most others have nothing to learn from.
    assert screened(0.0, 0.0, 0.0, 1.0, 2.0).dropped == ()


def test_updates_of_dropped_clients_are_not_scaled():
    """A scaled copy of all updates would take longer than everything else."""
    received, updates = random_updates()
    screened = NormBound(bound=20.0, multiple=10.0).screen(received, updates, COHORT)
    assert screened.dropped == (9,)
    assert screened.notes["scaled"] == []
    assert screened.updates.params is updates.params
    assert screened.updates.buffers is updates.buffers
    assert screened.updates.uploads["c"] is updates.uploads["c"]


@pytest.mark.parametrize("drop", [None, 5.0])
@pytest.mark.parametrize("bound", [None, 4.0])
def test_sums_are_those_over_rows_that_are_read(bound, drop):
    """Also if other clients are dropped in the same round."""
    received, updates = random_updates()
    guard = NormBound(bound=bound, multiple=1.5, drop=drop)
    screened = guard.screen(received, updates, COHORT)
    assert screened.notes["scaled"] == ([7, 9] if drop is None else [7])
    assert screened.dropped == (() if drop is None else (9,))
    kept = ~np.isin(COHORT.ids, screened.dropped)
    # Rows that are read are those of the tests above.
    read = guard.screen(received, updates, COHORT).updates
    wanted = Updates(read.params, read.buffers, read.uploads, {}).of(kept)
    weights = torch.linspace(0.1, 0.4, int(kept.sum()), dtype=torch.float64)
    for upload in (None, "c"):
        for name, tensor in mix(wanted, weights, upload).items():
            assert torch.equal(mix(screened.updates.of(kept), weights, upload)[name], tensor)


def test_only_rows_of_scaled_clients_are_computed():
    """New memory for all rows would take longer than everything else."""
    received = {"w": torch.zeros(1 << 20)}
    steps = torch.tensor([1.0, 1.0, 1.5, 3.0, 1.0, 2.5, 1.0, 1.0, 1.0, 1.0])
    updates = Updates({"w": steps[:, None].expand(10, 1 << 20).contiguous()}, {}, {}, {})
    cohort = SimpleNamespace(ids=np.arange(10))
    with Largest() as largest:
        screened = NormBound().screen(received, updates, cohort)
        mix(screened.updates, torch.full((10,), 0.1, dtype=torch.float64))
    assert screened.notes["scaled"] == [3, 5]
    # Two rows of float32, or the sum in float64.
    assert largest.bytes == 8 << 20
    shortened = screened.updates.params["w"][:, 0]
    torch.testing.assert_close(shortened, steps.clamp(max=2.0), rtol=1e-6, atol=0)


def test_trees_in_which_nobody_is_scaled_are_not_copied():
    uploads = {"c": {"s": torch.tensor([1.0, 1.0, 1.0, 9.0])}}
    updates = Updates({"w": torch.ones(4, 1)}, {"m": torch.ones(4, 1)}, uploads, {})
    screened = NormBound().screen({"w": torch.zeros(1), "m": torch.zeros(1)}, updates, COHORT)
    assert screened.notes["scaled"] == [9]
    assert screened.updates.params["w"] is updates.params["w"]
    assert screened.updates.buffers["m"] is updates.buffers["m"]
    assert screened.updates.uploads["c"]["s"].tolist() == [1.0, 1.0, 1.0, 2.0]


def test_signs_of_zeros_stay_in_trees_in_which_another_client_is_scaled():
    received = {"w": torch.ones(1), "m": torch.ones(1)}
    params = {"w": torch.tensor([[2.0], [2.0], [-0.0], [9.0]])}
    buffers = {"m": torch.tensor([[2.0], [2.0], [9.0], [-0.0]])}
    screened = NormBound(drop=None).screen(received, Updates(params, buffers, {}, {}), COHORT)
    assert screened.notes["scaled"] == [7, 9]
    assert screened.updates.params["w"].flatten().tolist() == [2.0, 2.0, 0.0, 3.0]
    assert bool(screened.updates.params["w"][2].signbit())
    assert bool(screened.updates.buffers["m"][3].signbit())


def test_uploads_far_above_the_median_are_bounded_and_not_dropped():
    """Sums over samples, for example, differ as much as sizes of clients do."""
    uploads = {"sums": {"s": torch.tensor([[1.0], [2.0], [3.0], [100.0]])}}
    updates = Updates({"w": torch.ones(4, 1)}, {}, uploads, {})
    screened = NormBound(multiple=1.0).screen({"w": torch.zeros(1)}, updates, COHORT)
    assert screened.dropped == ()
    assert screened.updates.uploads["sums"]["s"].flatten().tolist() == [1.0, 2.0, 2.0, 2.0]
    assert screened.notes["scaled"] == [7, 9]


def test_statistics_stay_as_received_if_half_of_the_clients_did_not_change_theirs():
    received, updates = random_updates()
    updates.buffers["mean"][:2] = received["mean"]
    screened = NormBound(drop=None).screen(received, updates, COHORT)
    assert torch.equal(screened.updates.buffers["mean"], received["mean"].expand(4, -1))


def test_a_mask_of_minus_infinity_stays_and_does_not_count():
    received = {"mask": torch.tensor([0.0, -torch.inf])}
    updates = Updates({"mask": torch.tensor([[3.0, -torch.inf], [1.0, -torch.inf]])}, {}, {}, {})
    screened = NormBound(bound=2.0).screen(received, updates, SimpleNamespace(ids=np.arange(2)))
    assert screened.updates.params["mask"].tolist() == [[2.0, -torch.inf], [1.0, -torch.inf]]


def test_a_drop_below_the_median_is_refused():
    with pytest.raises(InputError, match=r"norm\.drop must be a finite number of at least 1"):
        NormBound(drop=0.5)


@pytest.mark.parametrize(
    "options", [{"bound": 0.0}, {"bound": -1.0}, {"multiple": 0.0}, {"multiple": float("nan")}]
)
def test_bounds_that_are_not_positive_are_refused(options):
    with pytest.raises(
        InputError, match=rf"norm\.{next(iter(options))} must be a finite number above 0"
    ):
        build("fedavg", guard={"name": "norm", **options})
