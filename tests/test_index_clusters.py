"""Clusters of a client index, its hash, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.client_index import ClientIndex
from equipoise.clustering import cluster_points
from equipoise.errors import InputError
from equipoise.index_clusters import index_digest, index_points


def test_squared_distances_follow_the_similarity(tmp_path):
    draws = torch.Generator().manual_seed(0)
    features, labels = (
        torch.randn(5, width, generator=draws, dtype=torch.float64) for width in (4, 3)
    )
    index = ClientIndex(np.arange(5), features, labels)
    index.write(tmp_path / "index")
    ids = np.array([0, 1, 3])
    points, similarity = index_points(str(tmp_path / "index"), ids), index.similarity()
    for i, one in enumerate(ids):
        for j, other in enumerate(ids):
            wanted = 4 - 4 * similarity[one, other].item()
            assert np.square(points[i] - points[j]).sum() == pytest.approx(wanted, abs=1e-12)


def test_the_number_of_clusters_may_be_chosen():
    draws = np.random.default_rng(0)
    points = np.repeat([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]], 6, axis=0) + 0.1 * draws.normal(
        size=(18, 2)
    )
    assert np.bincount(cluster_points(points, 6, choice="bic")).tolist() == [6, 6, 6]
    assert len(np.unique(cluster_points(points, 6))) == 6


def test_the_hash_is_that_of_the_file(tmp_path):
    path = str(tmp_path / "index")
    index = ClientIndex(np.arange(2), torch.eye(2), torch.eye(2))
    assert index_digest(path, "abc", "gifair") == "abc"
    index.write(path)
    assert index_digest(path, None, "gifair") == index.digest()
    with pytest.raises(InputError, match="gifair.digest is 'abc', but that of the index in"):
        index_digest(path, "abc", "gifair")
