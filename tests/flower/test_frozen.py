"""Models with frozen parts on Flower: the numbers and bytes of one process, equal weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import models
from equipoise.data.silos import silo_federation
from equipoise.errors import RunError
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen
from equipoise.run.files import load_tensors
from tests.flower.loop import own_nodes, run_on_loop, write_experiment, write_silos
from tests.flower.parity import compare, with_clients
from tests.tiny_encoder import write_encoder

PROMPTS = {"name": "vitprompts", "patch": 4, "width": 16, "depth": 1, "heads": 2}
# For prompts and head of ten classes, in float64; every client reports training loss, steps and a
# validation loss.
PROMPT_BYTES, HEAD_BYTES, REPORTS = 8 * 4 * 16, 8 * 10 * 17, 3 * 8


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    return write_silos(tmp_path_factory.mktemp("frozen") / "silos")


@pytest.fixture
def folder(tmp_path, silos, monkeypatch):
    (tmp_path / "silos").symlink_to(silos)
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def rows_of_bytes(run):
    return [(row["bytes_down"], row["bytes_up"]) for row in run.trainer.rounds]


# Methods for models of other kinds.
OTHERS = {"fedbn", "fedgc", "fedgcr"}
# Parts that methods add to the model.
BROUGHT = {
    "harmofl": {"inputs.amplitude"},
    "client2vec": {"projection.weight", "projection_head.weight", "projection_head.bias"},
}


@pytest.mark.parametrize("name", [name for name in with_clients() if name not in OTHERS])
def test_every_method_moves_the_same_bytes_and_gives_the_same_numbers(name, folder):
    path = write_experiment(
        folder,
        method=name,
        model=PROMPTS,
        training={"rounds": 2, "cohort": 3, "optimizer": {"lr": 0.1}},
    )
    alone, run, _ = compare(path, folder)
    assert rows_of_bytes(alone) == rows_of_bytes(run)
    assert len(rows_of_bytes(run)) == 2
    assert set(run.trainer.state.model) == {
        "features.prompts",
        "head.weight",
        "head.bias",
    } | BROUGHT.get(name, set())


@pytest.mark.parametrize(
    ("name", "moved", "reports"),
    [
        ("fedavg", PROMPT_BYTES + HEAD_BYTES, REPORTS),
        # These report the terms that they add to the loss.
        ("ditto", PROMPT_BYTES + HEAD_BYTES, REPORTS + 8),
        ("scaffold", 2 * (PROMPT_BYTES + HEAD_BYTES), REPORTS + 8),
        # If clients keep their heads there is no global model, and no gap is computed.
        ("fedper", PROMPT_BYTES, REPORTS - 8),
        ("local", 0, REPORTS - 8),
    ],
)
def test_bytes_by_hand(name, moved, reports, folder):
    path = write_experiment(folder, method=name, model=PROMPTS, training={"rounds": 2, "cohort": 3})
    alone, run, _ = compare(path, folder)
    for made in (alone, run):
        assert rows_of_bytes(made) == [(3 * moved, 3 * (moved + reports))] * 2


def test_what_a_client_keeps_on_its_disk_holds_nothing_that_is_frozen(folder):
    path = write_experiment(folder, method="ditto", model=PROMPTS, training={"rounds": 2})
    run_on_loop(path, own_nodes(folder))
    files = list((folder / "memory").glob("*/runs/*/client-*/*.safetensors"))
    assert len(files) >= 8
    for file in files:
        names = {
            name.rpartition("/")[2].removeprefix("personal.") for name in load_tensors(file)[0]
        }
        assert names - {"clients"} == {"features.prompts", "head.weight", "head.bias"}


@pytest.mark.parametrize("encode", [True, False])
def test_clients_encode_their_own_samples(encode, folder):
    path = write_experiment(
        folder, model=PROMPTS, training={"rounds": 2}, machine={"encode": encode}
    )
    alone, _, _ = compare(path, folder)
    assert alone.trainer.engine.network.encoded == encode
    arrays = (
        [np.load(file) for file in (folder / "cache" / "arrays").glob("*.npy")] if encode else []
    )
    # One array of all samples for the run in one process, and one for each client.
    sizes = sorted(len(array) for array in arrays)
    assert len(sizes) == (5 if encode else 0)
    assert not sizes or sizes[-1] == sum(sizes[:-1]) == len(alone.trainer.federation.x)


def test_silos_may_be_encoded_by_a_pretrained_model(folder):
    source = write_encoder(folder / "encoder")
    path = write_experiment(
        folder,
        data={"encode": source, "encode_size": 16},
        model={"name": "logistic"},
        training={"rounds": 2},
    )
    # Embeddings are float32, and a client encodes its samples in other batches than the run in one
    # process.
    alone, run, _ = compare(path, folder, tolerance=1e-5)
    assert alone.trainer.federation.shape == (8,)
    assert run.trainer.state.model["head.weight"].shape == (10, 8)


# ---- other weights -------------------------------------------------------------------------------


class Weights:
    """The source of the next model's frozen tensors."""

    seed = 0


def with_weights(shape, classes):
    """A model whose frozen tensors do not depend on the run's seed."""
    draws = torch.Generator().manual_seed(Weights.seed)
    layer = nn.Linear(64, 12)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(12, 64, generator=draws) / 8)
    return Model(
        nn.Sequential(nn.Flatten(), Frozen(layer), nn.Linear(12, 8)), nn.Linear(8, classes)
    )


@pytest.fixture
def own_model(monkeypatch):
    monkeypatch.setattr(models, "MODELS", {**models.MODELS, "weights": with_weights})


def differing(clients):
    """Write clients' data, and make some of them build their model with other weights."""

    def data(node):
        directory = Path(node["data"])
        Weights.seed = int(int(directory.name[-1]) in clients)
        return silo_federation(
            directory, splits=(0.7, 0.1, 0.2), classes=10, task="classification", seed=0
        )

    return data


def test_a_client_with_other_frozen_weights_is_left_out_and_the_reason_named(folder, own_model):
    path = write_experiment(
        folder, model={"name": "weights"}, training={"rounds": 2}, flower={"min_clients": 2}
    )
    run, _ = run_on_loop(path, own_nodes(folder), data=differing({1}))
    rows = list(run.trainer.rounds)
    assert [set(row["left_out"]) for row in rows] == [{"1"}, {"1"}]
    assert "frozen tensors of the client's model have the hash" in rows[0]["left_out"]["1"]
    assert [row["cohort"] for row in rows] == [3, 3]


def test_a_run_in_which_all_have_other_frozen_weights_ends(folder, own_model):
    path = write_experiment(folder, model={"name": "weights"}, training={"rounds": 2})

    # The server builds its model last, after all clients have registered.
    def tamper(node, message, reply):
        Weights.seed = 0
        return reply

    with pytest.raises(
        RunError,
        match=r"0 of 4 clients answered.*the frozen tensors of the client's model have the hash",
    ):
        run_on_loop(path, own_nodes(folder), data=differing(range(4)), tamper=tamper)
