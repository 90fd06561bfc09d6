"""Client2Vec's experiments say what the paper says, and run on digits as a stand-in for their data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise.client_index import make_index
from equipoise.data import load
from equipoise.study import load_study

HOME = Path(__file__).parents[2] / "experiments" / "client2vec"
HOSTS = ("fedavg", "fedavgm", "feddyn", "moon", "fedlc")
USES = {"i": 1, "i+ii": 2, "i+ii+iii": 3}


@pytest.fixture
def indices(tmp_path, monkeypatch):
    """Leave the indices where the study expects them: those of digits."""
    monkeypatch.chdir(tmp_path)
    index = make_index(load("digits", seed=0), lambda x, y: (x.flatten(1), torch.eye(10)[y]))
    for stage in ("global-500", "federated-500"):
        folder = Path("runs/index-cifar10/base", stage, "seed1")
        folder.mkdir(parents=True)
        index.write(folder / "client_index.safetensors")


@pytest.mark.usefixtures("indices")
def test_every_host_is_there_without_an_index_and_with_more_and_more_uses():
    study = load_study(HOME / "table1-cifar10.yaml", seeds=[1])
    methods = {job.method: job.experiment.method for job in study.jobs}
    assert set(methods) == {
        *HOSTS,
        *(f"{host} {uses}" for host in HOSTS for uses in USES),
        "fedavg i+ii+iii federated",
    }
    for host in HOSTS:
        for label, count in USES.items():
            wrapped = methods[f"{host} {label}"].local
            assert wrapped.host == methods[host]
            assert (len(wrapped.uses), wrapped.tau, wrapped.weight) == (count, 1.0, 5.0)
    for job in study.jobs:
        training = job.experiment.training
        assert (training.rounds, training.epochs, training.cohort, training.optimizer.lr) == (100, 5, 0.1, 1e-2)
        assert training.clip == (10 if job.method.startswith("feddyn") else None)


@pytest.mark.usefixtures("indices")
def test_table_1_in_small(tmp_path):
    overrides = ["data.name=digits", "model.name=mlp", "training.rounds=2", "training.epochs=1", "evaluation.every=2"]
    study = load_study(HOME / "table1-cifar10.yaml", seeds=[1], overrides=overrides)
    results = study.run(tmp_path / "runs" / "small")
    assert len(results.summaries) == len(HOSTS) * (1 + len(USES)) + 1
