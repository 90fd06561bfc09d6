"""SCAFFOLD against the paper's algorithm in NumPy, its limiting cases, and its purpose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.data import load
from equipoise.engine.evaluation import evaluate_shared
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.models.base import Model
from equipoise.optimizers import Schedule, Sgd
from tests import quick
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.small_models import mlp
from tests.rounds import linear, play, random_regression, scalar, targets, weight


def scaffold_in_numpy(federation, start, cohorts, *, lr, server_lr, steps):
    """Algorithm 1 of Karimireddy et al. with option II and full-batch gradients of the MSE."""
    held = [federation.train.of(k) for k in range(federation.clients)]
    data = [(federation.x[samples].numpy(), federation.y[samples].numpy()) for samples in held]
    x, c = start.copy(), np.zeros_like(start)
    own = [np.zeros_like(start) for _ in data]
    for cohort in cohorts:
        moves, changes = [], []
        for k in cohort:
            features, y_true = data[k]
            y = x.copy()
            for _ in range(steps):
                gradient = 2 / len(y_true) * features.T @ (features @ y - y_true)
                y = y - lr * (gradient - own[k] + c)
            new = own[k] - c + (x - y) / (steps * lr)
            moves.append(y - x)
            changes.append(new - own[k])
            own[k] = new
        x = x + server_lr * np.mean(moves, axis=0)
        c = c + len(cohort) / len(data) * np.mean(changes, axis=0)
    return x, c, own


def memory_of(played, clients):
    """The control variates in clients' memories, read from the engine."""
    first = {"control": {"head.weight": torch.full((1, 3), torch.nan, dtype=torch.float64)}}
    return played.engine.memory.read(np.asarray(clients), first)[0]["control"]["head.weight"][
        :, 0
    ].numpy()


def test_a_learning_rate_of_0_leaves_control_variates_as_they_are():
    data = random_regression((7, 4, 9))
    how = {"steps": 2, "batch_size": 64, "optimizer": Sgd(lr=0.1)}
    schedule = Schedule(kind="steps", at=(1,), factors=(0.0,))
    one = play(build("scaffold"), data, linear(), [[0, 1, 2]], **how)
    two = play(build("scaffold"), data, linear(), [[0, 1, 2]] * 2, schedule=schedule, **how)
    np.testing.assert_array_equal(memory_of(two, [0, 1, 2]), memory_of(one, [0, 1, 2]))
    control = one.states[-1].server["control"]["head.weight"]
    assert torch.equal(two.states[-1].server["control"]["head.weight"], control)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize(
    "cohorts",
    [[[0, 1, 2]] * 2, [[0, 2], [1, 2], [0, 1]], [[1], [0], [1]]],
    ids=["full", "two", "one"],
)
def test_rounds_equal_the_papers_algorithm(cohorts, server_lr, chunk):
    federation = random_regression([6, 6, 6])
    start = linear().head.weight.detach().numpy()[0]
    played = play(
        build("scaffold", lr=server_lr),
        federation,
        linear(),
        cohorts,
        chunk=chunk,
        steps=4,
        batch_size=10,
        optimizer=Sgd(lr=0.05),
    )
    x, c, own = scaffold_in_numpy(federation, start, cohorts, lr=0.05, server_lr=server_lr, steps=4)
    np.testing.assert_allclose(played.model["head.weight"].numpy()[0], x, atol=1e-13)
    np.testing.assert_allclose(
        played.states[-1].server["control"]["head.weight"].numpy()[0], c, atol=1e-13
    )
    seen = sorted({k for cohort in cohorts for k in cohort})
    np.testing.assert_allclose(memory_of(played, seen), [own[k] for k in seen], atol=1e-13)


@pytest.mark.parametrize(
    "cohorts", [[[0, 1, 2]] * 3, [[0, 2], [1], [1, 2]]], ids=["full", "partial"]
)
def test_the_server_control_is_the_mean_of_all_clients_controls(cohorts):
    """c = 1/N Σ c_k always holds, because c changes by |S|/N times the mean change."""
    federation = random_regression([4, 9, 6])
    played = play(
        build("scaffold"),
        federation,
        linear(),
        cohorts,
        epochs=2,
        batch_size=4,
        optimizer=Sgd(lr=0.03),
    )
    own = memory_of(played, [0, 1, 2])
    np.testing.assert_allclose(
        played.states[-1].server["control"]["head.weight"].numpy()[0], own.mean(0), atol=1e-13
    )
    assert np.abs(own.mean(0)).max() > 1e-3


def test_one_step_of_one_round_by_hand():
    # From w = 1, F = (w - 3)² has gradient -4: y = 1.4 and c_k = (1 - 1.4) / 0.1 = -4; N = 2, one
    # takes part: c = -2.
    played = play(
        build("scaffold"),
        targets(3.0, -1.0),
        scalar(1.0),
        [[0], [1]],
        steps=1,
        optimizer=Sgd(lr=0.1),
    )
    assert weight(played.states[1].model) == pytest.approx(1.4, abs=1e-14)
    assert played.states[1].server["control"]["head.weight"].item() == pytest.approx(
        -2.0, abs=1e-13
    )
    # The other: gradient 2 (1.4 + 1) = 4.8, corrected by c = -2 to 2.8.
    assert weight(played.model) == pytest.approx(1.4 - 0.28, abs=1e-14)


def test_at_the_optimum_clients_stand_still():
    """With c_k = ∇F_k at the optimum of the mean, corrected gradients vanish, unlike in FedAvg."""
    how = {"steps": 10, "optimizer": Sgd(lr=0.05)}
    corrected = play(build("scaffold"), targets(3.0, -1.0), scalar(5.0), [[0, 1]] * 60, **how)
    assert weight(corrected.model) == pytest.approx(1.0, abs=1e-9)
    assert corrected.updates[-1].params["head.weight"].flatten().tolist() == pytest.approx(
        [1.0, 1.0], abs=1e-9
    )
    plain = play(build("fedavg"), targets(3.0, -1.0), scalar(1.0), [[0, 1]], **how)
    assert abs(plain.updates[0].params["head.weight"].flatten()[0].item() - 1.0) > 1


def test_with_one_client_it_is_fedavg():
    federation = images(sizes=[30])
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    corrected = play(build("scaffold"), federation, mlp(), [[0]] * 3, **how)
    plain = play(build("fedavg"), federation, mlp(), [[0]] * 3, **how)
    assert distance(corrected.model, plain.model) <= 1e-12


def test_the_first_round_is_fedavg_for_everyone():
    federation = images()
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    corrected = play(build("scaffold", weights="size"), federation, mlp(), [range(10)], **how)
    plain = play(build("fedavg"), federation, mlp(), [range(10)], **how)
    assert distance(corrected.model, plain.model) <= 1e-12


def test_controls_follow_the_learning_rate_of_the_round():
    """Full-batch single steps make c_k the plain gradient, whatever the learning rate schedule."""
    schedule = Schedule(kind="exponential", decay=0.5)
    played = play(
        build("scaffold"),
        targets(3.0),
        scalar(1.0),
        [[0], [0]],
        steps=1,
        optimizer=Sgd(lr=0.1),
        schedule=schedule,
    )
    # Round 0 leads from 1 to 1.4; in round 1 the gradient there is 2 (1.4 - 3).
    assert played.states[-1].server["control"]["head.weight"].item() == pytest.approx(
        -3.2, abs=1e-13
    )


def test_batchnorm_statistics_are_averaged_and_not_corrected():
    torch.manual_seed(0)
    module = Model(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    federation = random_regression([6, 6])
    how = {"steps": 2, "batch_size": 10, "optimizer": Sgd(lr=0.01)}
    corrected = play(build("scaffold", lr=0.5), federation, module, [[0, 1]] * 3, **how)
    means = torch.stack(
        [federation.x[torch.from_numpy(federation.train.of(k))].mean(0) for k in (0, 1)]
    ).mean(0)
    # Two steps of momentum 0.1 in each of three rounds.
    wanted = (1 - 0.9**6) * means
    torch.testing.assert_close(corrected.model["features.running_mean"], wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", quick.only([0], [0, 1, 2]))
def test_label_skew_and_many_local_epochs_hurt_it_less_than_fedavg_on_digits(seed):
    digits = load("digits", partition={"name": "dirichlet", "clients": 10, "beta": 0.1}, seed=seed)
    module = build_model("mlp", shape=digits.shape, classes=10, hidden=(32,), seed=seed)
    losses = {}
    for name in ("fedavg", "scaffold"):
        how = {"epochs": 5, "batch_size": 20, "optimizer": Sgd(lr=0.1)}
        played = play(
            build(name, weights="size"),
            digits,
            module,
            [digits.seen] * 15,
            seed=seed,
            precision="float32",
            **how,
        )
        engine, train = played.engine, digits.train
        measured = evaluate_shared(engine.network, engine.data, played.model, train, digits.seen)[
            "loss"
        ]
        losses[name] = np.average(measured, weights=train.sizes)
    assert losses["scaffold"] < 0.85 * losses["fedavg"], losses


def test_clients_count_alike_by_default_as_in_the_paper():
    assert build("scaffold").weights == "uniform"
    assert build("scaffold", weights="size").weights == "size"
