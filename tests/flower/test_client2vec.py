"""Client2Vec around every method gives the same numbers in one process and by messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise import methods
from equipoise.client_index import ClientIndex
from equipoise.methods.client2vec import USES
from tests.engine.every_method import model_for_digits
from tests.flower.loop import write_experiment, write_silos
from tests.flower.parity import compare, with_clients

TRAINING = {"rounds": 2, "cohort": 3, "optimizer": {"lr": 0.1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four clients' directories, and an index of the clients."""
    folder = tmp_path_factory.mktemp("client2vec")
    write_silos(folder / "silos")
    torch.manual_seed(0)
    ClientIndex(np.arange(4), torch.randn(4, 6), torch.randn(4, 3)).write(
        folder / "index.safetensors"
    )
    return folder


def test_an_index_from_a_file_gives_the_same(folder):
    method = {"name": "client2vec", "host": "fedprox", "index": str(folder / "index.safetensors")}
    _, run, grid = compare(write_experiment(folder, method=method, training=TRAINING), folder)
    assert "query.ask" not in grid.kinds
    assert run.trainer.state.model["projection.weight"].shape[0] == 6


def test_a_noised_index_gives_the_same(folder):
    method = {"name": "client2vec", "clip": 0.5, "noise": 2.0}
    _, run, grid = compare(write_experiment(folder, method=method, training=TRAINING), folder)
    assert grid.kinds.count("query.ask") == 4
    assert next(iter(run.trainer.rounds))["notes"]["index_epsilon"] > 0


@pytest.mark.parametrize(
    ("method", "asked"),
    [
        ({"name": "fedgc", "clip": 0.5, "noise": 2.0}, 4),
        ({"name": "fedgcr"}, 4),
        ({"name": "fedavg", "aggregation": {"name": "fedgr", "groups": "index"}}, 0),
        ({"name": "gifair", "choice": "fixed"}, 0),
    ],
    ids=["fedgc", "fedgcr", "fedgr", "gifair"],
)
def test_clusters_of_an_index_are_the_same(method, asked, folder):
    about = {"index": str(folder / "index.safetensors"), "clusters": 2}
    inside = method.get("aggregation")
    method = {**method, "aggregation": inside | about} if inside else method | about
    model = model_for_digits(method["name"])
    _, run, grid = compare(
        write_experiment(folder, method=method, training=TRAINING, model=model), folder
    )
    assert grid.kinds.count("query.ask") == asked
    assert set(next(iter(run.trainer.rounds))["notes"]["clusters"]) == {0, 1}


def test_clients_are_found_by_the_names_with_which_they_register(folder):
    """The index is of other numbers, in another order, and of a client that has left."""
    names = ("client-3", "left", "client-1", "client-0", "client-2")
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [0.0, 1.0], [1.0, 0.1]])
    index = ClientIndex(np.arange(5) + 7, features, torch.ones(5, 2), names=names)
    index.write(folder / "named.safetensors")
    about = {"index": str(folder / "named.safetensors"), "clusters": 2, "choice": "fixed"}
    training = TRAINING | {"cohort": 4}
    path = write_experiment(folder, method={"name": "gifair", **about}, training=training)
    _, run, _ = compare(path, folder)
    assert next(iter(run.trainer.rounds))["notes"]["clusters"] == [0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("host", sorted(set(with_clients()) - {"local", "client2vec"}))
@pytest.mark.parametrize("uses", [*((use,) for use in USES), USES], ids="+".join)
def test_every_host_gives_the_same(host, uses, folder):
    if "aggregation" in uses and methods.build(host).aggregation.ignores_prior:
        pytest.skip(f"{host} ignores the prior")
    method = {"name": "client2vec", "host": host, "uses": list(uses)}
    model = model_for_digits(host)
    compare(write_experiment(folder, method=method, training=TRAINING, model=model), folder)
