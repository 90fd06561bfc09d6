"""The norm bound, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.method import Updates
from equipoise.methods import build
from equipoise.methods.normbound import NormBound

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


def test_uploads_far_above_the_median_are_bounded_and_not_dropped():
    """Sums over samples, for example, differ as much as sizes of clients do."""
    uploads = {"sums": {"s": torch.tensor([[1.0], [2.0], [3.0], [100.0]])}}
    updates = Updates({"w": torch.ones(4, 1)}, {}, uploads, {})
    screened = NormBound(multiple=1.0).screen({"w": torch.zeros(1)}, updates, COHORT)
    assert screened.dropped == ()
    assert screened.updates.uploads["sums"]["s"].flatten().tolist() == [1.0, 2.0, 2.0, 2.0]
    assert screened.notes["scaled"] == [7, 9]


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
