"""Stages of Client2Vec on Flower: the same network and client index as in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.client_index import ClientIndex
from equipoise.config import load_experiment
from tests.flower.loop import (
    error,
    misbehaving,
    own_nodes,
    run_on_loop,
    write_experiment,
    write_silos,
)
from tests.flower.parity import compare
from tests.tiny_bert import write_bert

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
METHODS = {
    "federated": {"name": "fedavg", "local": "dsaign"},
    "global": {"name": "fedavg", "local": "dsaign", "view": {"name": "gathered", "samples": 5}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four clients of the digits as embeddings, and a text encoder of equal width."""
    folder = tmp_path_factory.mktemp("stages")
    for silo in write_silos(folder / "silos").iterdir():
        held = np.load(silo / "data.npz")
        np.savez(silo / "data.npz", x=held["x"].reshape(-1, 64), y=held["y"])
    write_bert(folder / "texts", width=64)
    return folder


def experiment(folder, strategy, **more):
    model = {
        "name": "dsaign",
        "feedforward": 8,
        "depth": 1,
        "text": str(folder / "texts"),
        "class_names": NAMES,
    }
    training = {"rounds": 2, "cohort": 3, "optimizer": {"name": "adam", "lr": 0.01}}
    return write_experiment(
        folder, method=METHODS[strategy], model=model, training=training, **more
    )


@pytest.mark.parametrize("strategy", METHODS)
def test_a_stage_is_the_same(strategy, folder, tmp_path):
    path = experiment(folder, strategy)
    compare(path, folder)
    load_experiment(path).run(tmp_path / "here")
    run_on_loop(path, own_nodes(folder), tmp_path / "there")
    here, there = (
        ClientIndex.read(tmp_path / place / "client_index.safetensors")
        for place in ("here", "there")
    )
    assert here.ids.tolist() == there.ids.tolist() == [0, 1, 2, 3]
    assert here.names == there.names == tuple(f"client-{number}" for number in range(4))
    torch.testing.assert_close(here.features, there.features, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(here.labels, there.labels, rtol=1e-6, atol=1e-6)


def test_a_client_that_does_not_answer_sends_nothing_to_the_server(folder):
    """Without client 2 the server trains on the samples of the others."""
    path = experiment(folder, "global", flower={"min_clients": 2, "retries": 0})
    refuses = misbehaving(2, "query.ask", 0, error)
    run, _ = run_on_loop(path, own_nodes(folder), tamper=refuses)
    assert run.trainer.view.train.sizes.tolist() == [15]
