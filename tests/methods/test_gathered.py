"""DSA-IGN's losses in NumPy, server training on gathered samples, and the index of a run."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from equipoise import train
from equipoise.client_index import ClientIndex, index_of, similarity_by_group
from equipoise.config import experiment_from
from equipoise.data import load
from equipoise.engine.settings import Machine
from equipoise.engine.stacked import StackedEngine, Training
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.method import Sees
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.models.pretrained import encoder, text_encoder
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.rounds import minimised, play
from tests.tiny_bert import write_bert
from tests.tiny_clip import write_clip
from tests.tiny_encoder import write_encoder

FEDERATED = {"name": "fedavg", "local": "dsaign"}
GLOBAL = {"name": "fedavg", "local": "dsaign", "view": {"name": "gathered", "samples": 6}}
SMALL = {"name": "dsaign", "feedforward": 12, "depth": 1}
HOW = {"rounds": 2, "epochs": 2, "batch_size": 8, "optimizer": {"name": "adam", "lr": 1e-2}}
FLOAT64 = Machine(device="cpu", precision="float64")


def embeddings(sizes=(4, 9, 5, 12), unseen=()):
    """Clients of two domains, which differ in different directions."""
    draws = torch.Generator().manual_seed(3)
    domains = torch.arange(len(sizes)) % 2
    shifts = 3 * torch.randn(2, 16, generator=draws, dtype=torch.float64)
    clients = np.repeat(np.arange(len(sizes)), sizes)
    x = (
        torch.randn(len(clients), 16, generator=draws, dtype=torch.float64)
        + shifts[domains[clients]]
    )
    return Federation.from_arrays(
        x,
        torch.arange(len(clients)) % 4,
        clients=clients,
        groups={client: f"domain {domain}" for client, domain in enumerate(domains.tolist())},
        splits=(0.8, 0.1, 0.1),
        classes=4,
        unseen=list(unseen),
    )


def losses_of(x, y, *, seed=4, **which):
    """The loss of a batch as computed by the engine, and its inputs."""
    model = build_model(
        "dsaign", shape=(16,), classes=4, feedforward=12, depth=1, seed=seed
    ).double()
    data = Federation.from_arrays(x, y, clients=np.zeros(len(y), int), splits=(1, 0, 0), classes=4)
    method = build(
        "fedavg",
        local={"name": "dsaign", **dict.fromkeys(("div", "sim", "orth", "recon"), False), **which},
    )
    engine = StackedEngine(
        data, model, Training(rounds=1, batch_size=64, optimizer=Sgd(lr=0.1)), FLOAT64
    )
    cohort = engine.cohort(method, np.array([0]), 0)
    found = minimised(cohort.train({"model": engine.network.initial()}, {}, method.local).reports)
    split = model.features(x).detach().numpy()
    return float(found), model, split[:, :16], split[:, 16:]


@pytest.fixture
def batch():
    draws = torch.Generator().manual_seed(0)
    return torch.randn(5, 16, generator=draws, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def test_the_loss_of_labels_by_hand(batch):
    found, model, z, _ = losses_of(*batch, sim=True)
    vectors = model.head.vectors.numpy()
    assert found == pytest.approx(
        np.mean([1 - cosine(z[j], vectors[batch[1][j]]) for j in range(5)]), rel=1e-9
    )


def test_the_loss_of_orthogonality_by_hand(batch):
    found, _, z, u = losses_of(*batch, orth=True)
    assert found == pytest.approx(np.abs(z @ u.T).sum() / 25, rel=1e-9)


def test_the_loss_of_reconstruction_by_hand(batch):
    found, model, z, u = losses_of(*batch, recon=True)
    made = np.concatenate([z, u], 1) @ model.reconstruction.weight.detach().numpy().T
    assert found == pytest.approx(((made - batch[0].numpy()) ** 2).sum() / (5 * 16), rel=1e-9)


def test_the_loss_of_diversity_by_hand(batch):
    found, _, _, u = losses_of(*batch, div=True)
    wanted = [
        math.log(sum(math.exp(cosine(u[j], u[k])) for k in range(5) if k != j)) for j in range(5)
    ]
    assert found == pytest.approx(np.mean(wanted), rel=1e-9)


def test_the_losses_are_summed(batch):
    alone = [losses_of(*batch, **{name: True})[0] for name in ("div", "sim", "orth", "recon")]
    every = losses_of(*batch, div=True, sim=True, orth=True, recon=True)[0]
    assert every == pytest.approx(sum(alone), rel=1e-9)


def test_stacked_clients_with_padding_equal_one_by_one():
    data, method = embeddings((1, 9, 5, 17)), build(**FEDERATED)
    model = build_model("dsaign", shape=(16,), classes=4, feedforward=12, depth=1).double()
    how = {"batch_size": 4, "epochs": 2, "optimizer": Sgd(lr=0.02)}
    one, all_ = (
        play(method, data, model, [range(4)] * 2, chunk=chunk, **how).model for chunk in (1, 4)
    )
    assert distance(all_, one) <= 1e-9


def test_the_server_gathers_distinct_samples_of_every_client():
    data = embeddings((4, 9, 5, 12))
    method = build(**GLOBAL)
    model = build_model(shape=(16,), classes=4, **SMALL)
    engine = StackedEngine(data, model, Training(), FLOAT64)
    everyone = engine.cohort(method, data.seen, 0)
    x, y = method.view.gather(everyone)
    rows = [np.flatnonzero((data.x == sample).all(1).numpy()) for sample in x]
    assert all(len(row) == 1 for row in rows)
    found = np.concatenate(rows)
    assert len(set(found)) == len(found)
    assert torch.equal(data.y[torch.from_numpy(found)], y)
    held = [int(np.isin(data.train.of(client), found).sum()) for client in range(4)]
    assert held == [min(6, size) for size in data.train.sizes]
    again = method.view.gather(engine.cohort(method, data.seen, 0))
    assert torch.equal(again[0], x)
    other = StackedEngine(data, model, Training(), FLOAT64, seed=1)
    assert not torch.equal(method.view.gather(other.cohort(method, data.seen, 0))[0], x)


def test_global_training_is_that_of_one_client_with_the_gathered_samples():
    data = embeddings()
    run = train(data, method=GLOBAL, model=SMALL, machine=FLOAT64, **HOW)
    pool = run.trainer.view
    assert pool.train.sizes.tolist() == [int(np.minimum(6, data.train.sizes).sum())]
    alone = train(pool, method=FEDERATED, model=SMALL, machine=FLOAT64, **HOW)
    assert distance(run.trainer.state.model, alone.trainer.state.model) <= 1e-9


def test_only_the_samples_are_sent():
    data = embeddings()
    run = train(data, method=GLOBAL, model=SMALL, machine=FLOAT64, **HOW)
    first, second = run.trainer.rounds
    # Six positions to each client; six embeddings of 16 numbers and six labels back.
    assert first["bytes_down"] == 4 * 6 * 8
    assert first["bytes_up"] == 4 * 6 * (16 + 1) * 8
    assert (second["bytes_down"], second["bytes_up"], second["messages"]) == (0, 0, 0)


def test_a_gathered_run_is_resumed(tmp_path):
    data = embeddings()
    whole = train(data, method=GLOBAL, model=SMALL, machine=FLOAT64, out=tmp_path / "whole", **HOW)
    stopped = pytest.raises(KeyboardInterrupt)

    def stop(progress):
        raise KeyboardInterrupt

    with stopped:
        train(
            data,
            method=GLOBAL,
            model=SMALL,
            machine=FLOAT64,
            out=tmp_path / "run",
            on_round=stop,
            **HOW,
        )
    resumed = train(
        data, method=GLOBAL, model=SMALL, machine=FLOAT64, out=tmp_path / "run", resume=True, **HOW
    )
    assert distance(resumed.trainer.state.model, whole.trainer.state.model) == 0
    assert resumed.trainer.bytes == whole.trainer.bytes
    one, other = (
        ClientIndex.read(tmp_path / name / "client_index.safetensors") for name in ("run", "whole")
    )
    assert one.digest() == other.digest()


@pytest.mark.parametrize("method", [FEDERATED, GLOBAL], ids=["federated", "global"])
def test_a_run_leaves_the_index_of_all_clients(method, tmp_path):
    data = embeddings(unseen=[2])
    run = train(data, method=method, model=SMALL, machine=FLOAT64, out=tmp_path / "run", **HOW)
    index = ClientIndex.read(tmp_path / "run" / "client_index.safetensors")
    wanted = index_of(run.model(), data)
    assert index.ids.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(index.features, wanted.features, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(index.labels, wanted.labels, rtol=1e-5, atol=1e-6)
    assert len(index.made_by) >= 16
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2
    assert build(**method).sees == Sees.REPRESENTATIONS


@pytest.mark.parametrize(
    "method", [FEDERATED, {**GLOBAL, "view": "gathered"}], ids=["federated", "global"]
)
def test_the_index_separates_two_domains(method):
    data = embeddings((20,) * 8)
    how = {**HOW, "rounds": 10}
    found = similarity_by_group(
        train(data, method=method, model=SMALL, machine=FLOAT64, **how).trainer.client_index(),
        data.groups,
        "features",
    )
    assert found["within"] - found["between"] > 0.3
    assert found["nearest"] == 1


def test_refusals():
    with pytest.raises(
        InputError, match=r"gathered\.samples must be a whole number of at least 1, got 0"
    ):
        build("fedavg", local="dsaign", view={"name": "gathered", "samples": 0})
    with pytest.raises(
        InputError, match="client2vec cannot wrap 'fedavg': its clients do not train"
    ):
        build("client2vec", host=GLOBAL)
    with pytest.raises(
        InputError, match="FedPer keeps parts with clients, but with the view Gathered"
    ):
        build("fedper", view="gathered")
    with pytest.raises(InputError, match="chosen_samples"):
        train(embeddings(), method={"name": "fedavg", "view": "gathered"}, rounds=1)
    pictures = Federation.from_arrays(
        torch.zeros(4, 1, 4, 4), torch.tensor([0, 1, 0, 1]), clients=[0, 0, 1, 1]
    )
    with pytest.raises(
        InputError,
        match=r"a sample has shape \(1, 4, 4\); valid: vectors, as data.encode makes them",
    ):
        train(pictures, method=GLOBAL, model=SMALL, rounds=1)
    with pytest.raises(InputError, match="method 'fedavg' makes no client index"):
        train(embeddings(), rounds=1).trainer.client_index()


@pytest.mark.parametrize("pair", ["clip", "two encoders"])
def test_a_stage_from_files(pair, tmp_path, monkeypatch):
    """An experiment with encoders on disk, and its index against their embeddings."""
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    if pair == "clip":
        images = texts = write_clip(tmp_path / "clip", width=16, longest=40)
    else:
        images, texts = write_encoder(tmp_path / "images", width=16), write_bert(tmp_path / "texts")
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    content = {
        "data": {"name": "digits", "encode": images, "encode_size": 16},
        "model": {**SMALL, "text": texts, "class_names": names},
        "method": GLOBAL,
        "training": {"rounds": 1, "epochs": 2, "optimizer": {"name": "adam"}},
        "machine": {"device": "cpu"},
    }
    run = experiment_from(content).run(tmp_path / "run")
    index, digits = ClientIndex.read(tmp_path / "run" / "client_index.safetensors"), load("digits")
    assert index.features.shape == index.labels.shape == (22, 16)
    vectors = text_encoder(texts)(
        [f"A photo of {'an' if name == 'eight' else 'a'} {name}" for name in names]
    )
    held = torch.from_numpy(digits.train.of(3))
    pictures = digits.x[held].float().expand(-1, 3, -1, -1)
    resized = torch.nn.functional.interpolate(
        pictures, size=(16, 16), mode="bilinear", antialias=True
    )
    with torch.no_grad():
        u = run.model().features(encoder(images)(resized))[:, 16:].mean(0)
    torch.testing.assert_close(index.features[3], u, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        index.labels[3], vectors[digits.y[held]].mean(0), rtol=1e-3, atol=1e-4
    )
