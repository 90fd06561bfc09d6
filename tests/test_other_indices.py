"""Indices that Client2Vec is compared with, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise import Evaluation, Federation, train
from equipoise.errors import InputError
from equipoise.other_indices import class_prototypes, feature_average, head_weights


@pytest.fixture
def federation():
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(30, 16, generator=draws)
    y = torch.randint(3, (30,), generator=draws)
    # Client 1 has only class 2.
    clients = np.repeat([0, 1, 2], 10)
    y[10:20] = 2
    return Federation.from_arrays(x, y, clients=clients, classes=3)


def samples_of(federation, client):
    rows = torch.from_numpy(federation.train.of(client))
    return federation.x[rows].numpy(), federation.y[rows].numpy()


def test_feature_averages_and_label_vectors(federation):
    vectors = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    index = feature_average(federation, vectors)
    for client in range(3):
        x, y = samples_of(federation, client)
        assert index.features[client].numpy() == pytest.approx(x.mean(0), abs=1e-6)
        assert index.labels[client].numpy() == pytest.approx(vectors.numpy()[y].mean(0), abs=1e-6)


def test_prototypes_are_means_by_class_and_zero_without_samples(federation):
    index = class_prototypes(federation)
    for client in range(3):
        x, y = samples_of(federation, client)
        wanted = [
            x[y == label].mean(0) if (y == label).any() else np.zeros(16) for label in range(3)
        ]
        assert index.features[client].numpy() == pytest.approx(np.concatenate(wanted), abs=1e-5)
        assert index.labels[client].numpy() == pytest.approx(
            [(y == label).mean() for label in range(3)], abs=1e-6
        )
    assert not index.features[1, :32].any()


def test_indices_do_not_depend_on_the_default_type(federation):
    single = class_prototypes(federation)
    torch.set_default_dtype(torch.float64)
    try:
        double = class_prototypes(federation)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(single.features, double.features)
    assert torch.equal(single.labels, double.labels)


def test_weights_of_local_heads(federation):
    run = train(
        federation, model="logistic", rounds=2, cohort=2, evaluation=Evaluation(keep_local=True)
    )
    index = head_weights(run)
    assert len(index.ids) == 2
    for row, client in enumerate(index.ids):
        head = run.local_model(int(client)).head
        wanted = torch.cat([head.weight.flatten(), head.bias]).detach()
        torch.testing.assert_close(index.features[row], wanted)


def test_refusals(federation):
    with pytest.raises(InputError, match=r"a row for each of 3 classes, got shape \(2, 5\)"):
        feature_average(federation, torch.ones(2, 5))
    numbers = Federation.from_arrays(
        torch.ones(4, 2), torch.ones(4), clients=[0, 0, 1, 1], task="regression"
    )
    with pytest.raises(InputError, match="label indices need classes"):
        class_prototypes(numbers)
    with pytest.raises(InputError, match="keep_local"):
        head_weights(train(federation, rounds=1))
