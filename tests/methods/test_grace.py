"""GRACE: the server's weights by hand, edge cases, and the client's steps with other servers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.method import State, Updates
from equipoise.methods import build
from equipoise.methods.grace import agreement_weights, mean_cosines
from tests.engine.comparison import distance
from tests.engine.five_clients import EVERYONE, SIZES
from tests.engine.small_models import normalised
from tests.methods.decoupled import played

ZERO = State(0, {"a": torch.zeros(2).double(), "b": torch.zeros(1).double()})


def updates(*clients):
    """One client per triple of numbers: two in tensor ``a`` and one in tensor ``b``."""
    rows = torch.tensor(clients, dtype=torch.float64)
    return Updates({"a": rows[:, :2], "b": rows[:, 2:]}, {}, {}, {})


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---- weights -------------------------------------------------------------------------------------


def test_cosines_of_whole_updates_by_hand():
    """cos(1, 2) = 8/9, cos(1, 3) = 0 and cos(2, 3) = −1/(3 √2)."""
    found = mean_cosines(ZERO, updates((1, 2, 2), (2, 2, 1), (0, 1, -1)))
    one, two = 8 / 9, 1 / (3 * np.sqrt(2))
    assert found.tolist() == pytest.approx([one / 2, (one + two) / 2, two / 2])


def test_cosines_of_tensors_by_hand():
    """In ``a``: cos(1, 2) = 1, cos(1, 3) = cos(2, 3) = 0.

    In ``b``: 1, −1 and −1. The mean of both is 1, −1/2 and −1/2; with weights 1 and 0 only ``a`` is
    used.
    """
    given = updates((1, 0, 2), (3, 0, 1), (0, 2, -5))
    assert mean_cosines(ZERO, given, "tensors").tolist() == pytest.approx([0.25, 0.25, -0.5])
    assert mean_cosines(ZERO, given, "early_tensors").tolist() == pytest.approx([0.5, 0.5, 0.0])


def test_cosines_of_one_tensor_alone():
    given = Updates({"a": numbers([1, 1], [1, 0])}, {}, {}, {})
    for similarity in ("model", "tensors", "early_tensors"):
        assert mean_cosines(ZERO, given, similarity).tolist() == pytest.approx([np.sqrt(0.5)] * 2)


def test_a_client_alone_and_one_that_did_not_move():
    assert mean_cosines(ZERO, updates((1, 2, 2))).tolist() == [1.0]
    assert mean_cosines(ZERO, updates((1, 2, 2), (0, 0, 0), (1, 2, 2))).tolist() == pytest.approx(
        [0.5, 0, 0.5]
    )


def test_weights_by_hand():
    prior = numbers(0.5, 0.25, 0.25)
    assert agreement_weights(prior, numbers(0.2, 0.6, 0.4)).tolist() == pytest.approx(
        [0.1 / 0.35, 0.15 / 0.35, 0.1 / 0.35]
    )
    # The smallest is −0.1, so the cosines become 0.301, 0.001 and 0.201.
    shifted = np.array([0.5 * 0.301, 0.25 * 0.001, 0.25 * 0.201])
    found = agreement_weights(prior, numbers(0.2, -0.1, 0.1))
    assert found.tolist() == pytest.approx((shifted / shifted.sum()).tolist())


def test_clients_that_agree_on_nothing_keep_their_prior():
    prior = numbers(0.7, 0.3)
    assert agreement_weights(prior, numbers(0.0, 0.0)).tolist() == [0.7, 0.3]
    assert agreement_weights(prior, numbers(-0.4, -0.4)).tolist() == pytest.approx([0.7, 0.3])


# ---- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_a_round_by_hand(server_lr):
    found = played(build("grace", server_lr=server_lr), normalised(), [EVERYONE])
    before, after, sent = found.states[0].model, found.model, found.updates[0]
    gradients = np.stack(
        [
            np.concatenate(
                [(before[n] - rows[k]).numpy().ravel() for n, rows in sent.params.items()]
            )
            for k in EVERYONE
        ]
    )
    cosines = [
        np.mean(
            [
                g @ h / np.linalg.norm(g) / np.linalg.norm(h)
                for j, h in enumerate(gradients)
                if j != k
            ]
        )
        for k, g in enumerate(gradients)
    ]
    np.testing.assert_allclose(found.states[-1].notes["cosines"].numpy(), cosines, atol=1e-12)
    cosines = np.array(cosines) - min(0, *cosines) + (1e-3 if min(cosines) < 0 else 0)
    weights = np.array(SIZES) * cosines / (np.array(SIZES) * cosines).sum()
    np.testing.assert_allclose(found.states[-1].notes["weights"].numpy(), weights, atol=1e-12)
    wanted = {}
    for name, rows in {**sent.params, **sent.buffers}.items():
        mean = sum(weight * row for weight, row in zip(weights, rows, strict=True))
        rate = server_lr if name in sent.params else 1.0
        wanted[name] = (1 - rate) * before[name] + rate * mean
    assert distance(after, wanted) <= 1e-9


def test_each_half_works_with_other_parts():
    client = played(build("grace", aggregation="fedavg"), normalised())
    assert distance(client.model, played(build("bgp", restore=True), normalised()).model) == 0
    server = played(build("fedprox", mu=0.5, aggregation="grace"), normalised(), [EVERYONE])
    prox = played(build("fedprox", mu=0.5), normalised(), [EVERYONE])
    for name, rows in prox.updates[0].params.items():
        assert torch.equal(server.updates[0].params[name], rows)
    assert distance(server.model, prox.model) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": 0.0}, r"grace\.server_lr must be a finite number above 0, got 0\.0"),
        ({"similarity": "layers"}, r"unknown value 'layers' in grace\.similarity"),
        ({"align": -1.0}, r"grace\.align must be a finite number of at least 0"),
        ({"meta": False}, r"grace\.restore needs pairs of steps"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("grace", **options)
