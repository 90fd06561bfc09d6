"""FedAvg: the weighted mean, which clients it averages, and how they are sampled."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import nn

from equipoise.errors import InputError
from equipoise.method import State, Updates, mix, mix_tree
from equipoise.methods import build
from equipoise.methods.fedavg import FedAvg
from equipoise.models.base import Model
from tests.rounds import linear, play, random_regression, scalar, targets, weight


def test_parameters_and_buffers_are_averaged_by_the_prior():
    updates = Updates(
        params={"head.weight": torch.tensor([[1.0, 2.0], [3.0, 6.0], [10.0, 20.0]])},
        buffers={"features.running_mean": torch.tensor([[4.0], [8.0], [0.0]])},
        uploads={},
        reports={},
    )
    state = State(
        3,
        {
            "head.weight": torch.zeros(2),
            "features.running_mean": torch.zeros(1),
            "fixed": torch.ones(1),
        },
    )
    cohort = SimpleNamespace(prior=torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64))
    new = FedAvg().combine(state, updates, cohort)
    assert new.model["head.weight"].tolist() == [0.5 + 0.75 + 2.5, 1 + 1.5 + 5]
    assert new.model["features.running_mean"].tolist() == [4.0]
    assert new.model["fixed"].tolist() == [1.0]
    assert state.model["head.weight"].tolist() == [0.0, 0.0], "combine is pure"


def test_a_round_of_unequal_clients_by_hand():
    # One step of rate 0.1 on (w - t)² from w = 1 leads to 1 - 0.2 (1 - t): 1.4 for t = 3 and 0.6
    # for t = -1.
    federation = targets(3.0, -1.0, samples=[1, 3])
    by_size = play(build("fedavg"), federation, scalar(1.0), [[0, 1]], steps=1)
    assert weight(by_size.model) == pytest.approx(0.25 * 1.4 + 0.75 * 0.6, abs=1e-15)
    alike = play(build("fedavg", weights="uniform"), federation, scalar(1.0), [[0, 1]], steps=1)
    assert weight(alike.model) == pytest.approx(1.0, abs=1e-15)


def test_batchnorm_statistics_are_averaged_like_parameters():
    torch.manual_seed(0)
    module = Model(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    federation = random_regression([4, 12])
    played = play(build("fedavg"), federation, module, [[0, 1]], batch_size=50)
    means = [federation.x[torch.from_numpy(federation.train.of(k))].mean(0) for k in (0, 1)]
    wanted = 0.1 * (0.25 * means[0] + 0.75 * means[1])
    torch.testing.assert_close(played.model["features.running_mean"], wanted, rtol=0, atol=1e-14)


def test_one_full_batch_step_everywhere_is_one_step_on_the_pooled_data():
    federation = random_regression([3, 8, 5])
    played = play(build("fedavg"), federation, linear(), [[0, 1, 2]], steps=1, batch_size=100)
    x, y = federation.x.numpy(), federation.y.numpy()
    start = linear().head.weight.detach().numpy()[0]
    step = start - 0.1 * 2 / len(y) * x.T @ (x @ start - y)
    np.testing.assert_allclose(played.model["head.weight"].numpy()[0], step, atol=1e-14)


def test_only_the_cohort_counts():
    played = play(build("fedavg"), targets(3.0, -1.0, 100.0), scalar(0.0), [[1, 0]], steps=1)
    assert weight(played.model) == pytest.approx(0.2 * 1.0, abs=1e-15)
    assert played.cohorts[0].ids.tolist() == [0, 1]


def test_sums_are_taken_in_float64():
    rows = {"w": torch.tensor([[1e8], [1.0], [-1e8]], dtype=torch.float32)}
    assert mix_tree(rows, torch.full((3,), 0.5))["w"].tolist() == [0.5]
    assert mix_tree(rows, torch.full((3,), 0.5))["w"].dtype == torch.float32


def test_single_numbers_and_masks_are_averaged():
    stacked = {
        "temperature": torch.tensor([1.0, 3.0, 5.0]),
        "mask": torch.tensor([[0.0, -torch.inf]] * 3),
    }
    mixed = mix_tree(stacked, torch.tensor([0.25, 0.75, 0.0]))
    # 1/4 · 1 + 3/4 · 3; a client with weight zero takes nothing from the mask.
    assert mixed["temperature"].shape == ()
    assert mixed["temperature"].item() == 2.5
    assert mixed["mask"].tolist() == [0.0, -torch.inf]
    assert mix_tree(stacked, torch.zeros(3))["temperature"].item() == 0.0


def test_a_model_larger_than_a_piece_is_mixed_without_seams():
    rows = torch.arange(3 * 700_001, dtype=torch.float64).view(3, 700_001)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    mixed = mix(Updates({"w": rows}, {"b": torch.zeros(3, 0)}, {}, {}), weights)
    torch.testing.assert_close(mixed["w"], 0.2 * rows[0] + 0.3 * rows[1] + 0.5 * rows[2])
    assert mixed["b"].shape == (0,)


@pytest.mark.parametrize(
    ("sampling", "shares"), [("size", [0.1, 0.6, 0.3]), ("uniform", [1 / 3, 1 / 3, 1 / 3])]
)
def test_clients_are_chosen_by_size_or_uniformly(sampling, shares):
    sampler = build("fedavg", sampling=sampling).sampler
    clients = {"ids": np.array([3, 4, 8]), "sizes": np.array([10, 60, 30])}
    drawn = [
        sampler.select(State(0, {}), SimpleNamespace(key=key, **clients), 1)[0]
        for key in range(3000)
    ]
    counts = [drawn.count(client) for client in clients["ids"]]
    assert chisquare(counts, np.array(shares) * 3000).pvalue > 1e-3


def test_unknown_weights_are_refused():
    with pytest.raises(InputError, match="'siez'.*did you mean 'size'"):
        build("fedavg", weights="siez")
