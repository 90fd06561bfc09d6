"""FedNova against the paper's update in plain Python, and its gradient weights in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.optimizers import Adam, Sgd, gradient_weights
from tests.engine.comparison import distance
from tests.rounds import linear, play, random_regression, scalar, targets, weight

TARGETS, COPIES = (3.0, -1.0, 0.5), [1, 4, 2]
ETA = 0.05


def rounds_by_hand(w, *, momentum=0.0, mu=0.0, rounds=2, effective="weights"):
    """Client k makes as many steps as it has samples; F_k(w) = (w - t_k)², ‖a‖₁ of section 4.1."""
    shares = [copies / sum(COPIES) for copies in COPIES]
    for _ in range(rounds):
        directions, lengths = [], []
        for target, steps in zip(TARGETS, COPIES, strict=True):
            own, velocity = w, 0.0
            for _ in range(steps):
                velocity = momentum * velocity + 2 * (own - target) + mu * (own - w)
                own -= ETA * velocity
            length = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
            if mu:
                length = (1 - (1 - ETA * mu) ** steps) / (ETA * mu)
            directions.append((own - w) / length)
            lengths.append(length if effective == "weights" else steps)
        far = sum(share * length for share, length in zip(shares, lengths, strict=True))
        w += far * sum(
            share * direction for share, direction in zip(shares, directions, strict=True)
        )
    return w


@pytest.mark.parametrize("effective", ["weights", "steps"])
@pytest.mark.parametrize("how", [{}, {"momentum": 0.9}, {"mu": 0.7}])
def test_rounds_equal_the_papers_update(how, effective):
    local = {"name": "fedprox", "mu": how["mu"]} if "mu" in how else "plain"
    method = build("fednova", effective=effective, local=local)
    optimizer = Sgd(lr=ETA, momentum=how.get("momentum", 0.0))
    played = play(
        method,
        targets(*TARGETS, samples=COPIES),
        scalar(1.0),
        [[0, 1, 2]] * 2,
        batch_size=1,
        optimizer=optimizer,
    )
    assert weight(played.model) == pytest.approx(
        rounds_by_hand(1.0, **how, effective=effective), rel=1e-9
    )


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_clients_that_do_the_same_work_are_averaged(momentum):
    federation = random_regression([5, 12, 8])
    how = {"steps": 3, "batch_size": 4, "optimizer": Sgd(lr=0.02, momentum=momentum)}
    found, wanted = (
        play(build(name), federation, linear(), [[0, 1, 2]] * 3, **how).model
        for name in ("fednova", "fedavg")
    )
    assert distance(found, wanted) < 1e-9


def test_unequal_work_does_not_change_what_is_minimised():
    """Client 1 makes nine times as many steps; the mean of (w ± 1)² is minimal at 0."""

    def far(name):
        method = build(name, weights="uniform")
        played = play(
            method,
            targets(1.0, -1.0, samples=[1, 9]),
            scalar(0.5),
            [[0, 1]] * 40,
            batch_size=1,
            optimizer=Sgd(lr=0.02),
        )
        return abs(weight(played.model))

    assert far("fedavg") > 0.7
    # The steps of client 1 are not infinitesimal, so a small bias remains.
    assert far("fednova") < 0.1


def test_weights_of_gradients_are_those_of_the_paper():
    steps = np.array([7, 3, 1])
    rho, alpha = 0.9, 0.05
    by_paper = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    np.testing.assert_allclose(gradient_weights(Sgd(lr=1.0, momentum=rho), steps), by_paper)
    np.testing.assert_allclose(
        gradient_weights(Sgd(lr=1.0), steps, alpha), (1 - (1 - alpha) ** steps) / alpha
    )
    columns = np.array([0.1, 0.2, 0.0])
    found = gradient_weights(Sgd(lr=1.0), steps, columns)
    np.testing.assert_allclose(found, [(1 - 0.9**7) / 0.1, (1 - 0.8**3) / 0.2, 1.0])
    assert gradient_weights(Adam(lr=0.1), steps).tolist() == [7.0, 3.0, 1.0]


@pytest.mark.parametrize("how", [{"dampening": 0.3}, {"nesterov": True}])
def test_weights_of_gradients_follow_the_optimizer(how):
    """A constant gradient of 1 moves a parameter by η‖a‖₁."""

    optimizer = Sgd(lr=0.1, momentum=0.8, **how)
    params, gradient = [torch.zeros(1, dtype=torch.float64)], [torch.ones(1, dtype=torch.float64)]
    state = optimizer.begin(params)
    for step in range(1, 6):
        optimizer.step(params, gradient, state, 0.1, step)
    assert -params[0].item() == pytest.approx(0.1 * gradient_weights(optimizer, np.array([5]))[0])


def test_another_length_is_refused():
    with pytest.raises(InputError, match="'mean'"):
        build("fednova", effective="mean")
