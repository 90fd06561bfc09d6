"""Clusters of a client index, its hash, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise import Federation, train
from equipoise.client_index import ClientIndex, make_index
from equipoise.clustering import cluster_points
from equipoise.errors import InputError
from equipoise.index_clusters import index_digest, index_points
from equipoise.method import State
from equipoise.methods import build
from tests.rounds import everyone_of


def test_squared_distances_follow_the_similarity(tmp_path):
    draws = torch.Generator().manual_seed(0)
    features, labels = (
        torch.randn(5, width, generator=draws, dtype=torch.float64) for width in (4, 3)
    )
    index = ClientIndex(np.arange(5), features, labels)
    index.write(tmp_path / "index")
    ids = np.array([0, 1, 3])
    points = index_points(str(tmp_path / "index"), everyone_of(ids))
    similarity = index.similarity()
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


# ---- runs whose clients are not in the order of the index ----------------------------------------

CLIENTS = tuple("abcdef")


def two_kinds(names):
    """Clients of two kinds with different features, by the parity of their letter."""
    clients = np.repeat(names, 8)
    draws = np.random.default_rng(0)
    kinds = np.array([CLIENTS.index(name) % 2 for name in clients])
    x = np.eye(2)[kinds] + 0.1 * draws.uniform(size=(len(kinds), 2))
    return Federation.from_arrays(x, np.arange(len(x)) % 2, clients=clients)


@pytest.mark.parametrize("names", ["fbacde", "abde", "dbfaec"])
@pytest.mark.parametrize(
    "method", [{"name": "gifair"}, {"name": "fedavg", "aggregation": "fedgr"}], ids=str
)
def test_clients_get_the_clusters_of_their_own_index(method, names, tmp_path):
    whole = make_index(two_kinds(CLIENTS), lambda x, y: (x, torch.eye(2)[y]))
    whole.write(tmp_path / "index")
    about = {"index": str(tmp_path / "index"), "clusters": 2, "compare": "features"}
    if "aggregation" in method:
        method = method | {"aggregation": {"name": "fedgr", "groups": "index", **about}}
    else:
        method = method | about
    run = train(two_kinds(list(names)), method=method, model="logistic", rounds=1)
    clusters = next(iter(run.trainer.rounds))["notes"]["clusters"]
    kinds = [CLIENTS.index(name) % 2 for name in names]
    # Clusters are numbered in the order of their first client.
    assert clusters == [kind ^ kinds[0] for kind in kinds]


@pytest.mark.parametrize("names", ["fbacde", "abde", "dbfaec"])
def test_client2vec_gives_clients_their_own_vectors(names, tmp_path):
    whole = make_index(two_kinds(CLIENTS), lambda x, y: (x, torch.eye(2)[y]))
    whole.write(tmp_path / "index")
    method = {"name": "client2vec", "index": str(tmp_path / "index")}
    run = train(two_kinds(list(names)), method=method, model="logistic", rounds=1)
    rows = [CLIENTS.index(name) for name in names]
    kept = run.trainer.state.server["client2vec"]
    torch.testing.assert_close(kept["features"], whole.features[rows].double(), rtol=0, atol=0)


def test_a_client_without_a_vector_ends_the_run_before_it_begins(tmp_path):
    made = make_index(two_kinds(CLIENTS[:4]), lambda x, y: (x, torch.eye(2)[y]))
    made.write(tmp_path / "index")
    for name in ("gifair", "client2vec"):
        with pytest.raises(InputError, match="index: .* no rows for 2 of 6 clients: 'e', 'f'; it"):
            train(
                two_kinds(CLIENTS),
                method={"name": name, "index": str(tmp_path / "index")},
                model="logistic",
                rounds=1,
                out=tmp_path / "run",
            )
        assert not (tmp_path / "run").exists()


def test_a_directory_is_refused_when_the_method_is_made(tmp_path):
    with pytest.raises(InputError, match="is a directory, not a client index; valid: "):
        index_digest(str(tmp_path), None, "gifair")


def test_clients_that_join_get_their_own_vectors(tmp_path):
    made = make_index(two_kinds(CLIENTS), lambda x, y: (x, torch.eye(2)[y]))
    made.write(tmp_path / "index")
    method = build("client2vec", uses=["sampling"], index=str(tmp_path / "index"))
    sizes = np.array([3, 1, 4])
    state = method.sampler.begin(State(0, {}), everyone_of([1, 5], "dc", sizes=sizes[:2]))
    state = method.sampler.admit(state, everyone_of([1, 4, 5], "dfc", sizes=sizes))
    kept = state.server["client2vec"]
    assert kept["ids"].tolist() == [1, 4, 5]
    assert torch.equal(kept["features"], made.features[[3, 5, 2]].double())
    with pytest.raises(InputError, match="no rows for 1 of 4 clients: 'x'; it has 'a', 'b', "):
        method.sampler.admit(state, everyone_of([1, 4, 5, 6], "dfcx", sizes=sizes))
