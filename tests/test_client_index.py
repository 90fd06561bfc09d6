"""The client index: its checks, its file, and similarities by hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from equipoise import Federation, train
from equipoise.client_index import (
    ClientIndex,
    directions,
    index_of,
    similarity_by_group,
    similarity_to,
)
from equipoise.data.encode import encode_federation
from equipoise.errors import InputError
from equipoise.run.files import save_tensors


def index(clients=5, made_by="a hash"):
    draws = torch.Generator().manual_seed(1)
    features, labels = (torch.randn(clients, width, generator=draws) for width in (4, 3))
    return ClientIndex(np.arange(clients) * 2, features, labels, made_by)


def test_what_is_written_is_read(tmp_path):
    written = index()
    written.write(tmp_path / "index")
    found = ClientIndex.read(tmp_path / "index")
    assert found.ids.tolist() == [0, 2, 4, 6, 8]
    assert torch.equal(found.features, written.features)
    assert torch.equal(found.labels, written.labels)
    assert found.made_by == "a hash"
    assert found.digest() == written.digest()


def test_the_hash_depends_on_everything():
    usual = index()
    changed = [
        ClientIndex(usual.ids + 1, usual.features, usual.labels, usual.made_by),
        ClientIndex(usual.ids, usual.features + 1e-6, usual.labels, usual.made_by),
        ClientIndex(usual.ids, usual.features, -usual.labels, usual.made_by),
        index(made_by="another hash"),
    ]
    assert len({usual.digest(), *(other.digest() for other in changed)}) == 5


def test_rows_follow_the_ids():
    given = index()
    turned = ClientIndex(
        given.ids[::-1].copy(), given.features.flip(0), given.labels.flip(0), given.made_by
    )
    assert turned.digest() == given.digest()
    two = given.of(np.array([2, 6]))
    assert torch.equal(two.features, given.features[[1, 3]])
    assert torch.equal(two.labels, given.labels[[1, 3]])


@pytest.mark.parametrize(
    ("ids", "features", "labels", "message"),
    [
        (
            [0, 0],
            torch.ones(2, 2),
            torch.ones(2, 2),
            "client 0 occurs more than once in the client index",
        ),
        (
            [0.5, 1],
            torch.ones(2, 2),
            torch.ones(2, 2),
            "ids of a client index must be a list of whole numbers",
        ),
        (
            [],
            torch.ones(0, 2),
            torch.ones(0, 2),
            "ids of a client index must be a list of whole numbers",
        ),
        (
            [0, 1],
            torch.ones(3, 2),
            torch.ones(2, 2),
            r"features .* each of 2 clients, got shape \(3, 2\)",
        ),
        ([0, 1], torch.ones(2, 2), torch.ones(2), r"labels .* each of 2 clients, got shape \(2,\)"),
        (
            [0, 1],
            torch.full((2, 2), torch.nan),
            torch.ones(2, 2),
            "features of a client index must be finite",
        ),
        (
            [0, 1],
            torch.ones(2, 2),
            torch.ones(2, 2).int(),
            "labels of a client index must be finite",
        ),
    ],
)
def test_refusals(ids, features, labels, message):
    with pytest.raises(InputError, match=message):
        ClientIndex(np.array(ids), features, labels)


def test_clients_that_are_not_in_the_index_are_named():
    with pytest.raises(
        InputError,
        match="no rows for 2 of 3 clients, such as client 3; it has 5 clients, from 0 to 8",
    ):
        index().of(np.array([2, 3, 99]))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="is not a client index: cannot read"):
        ClientIndex.read(tmp_path / "nothing")
    save_tensors(tmp_path / "model", {"w": torch.ones(2)}, {"round": 3})
    with pytest.raises(InputError, match="is not a client index: it has w"):
        ClientIndex.read(tmp_path / "model")


def cosine(one, other):
    return float(np.dot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))


@pytest.mark.parametrize("compare", ["both", "features", "labels"])
def test_similarities_in_numpy(compare):
    given, sizes, members = index(), np.array([3.0, 1.0, 4.0, 1.0, 5.0]), [0, 3, 4]
    vectors = {"both": ("features", "labels"), "features": ("features",), "labels": ("labels",)}[
        compare
    ]
    rows = [getattr(given, name).numpy().astype(float) for name in vectors]
    pairs = np.array(
        [[np.mean([cosine(r[i], r[j]) for r in rows]) for j in range(5)] for i in range(5)]
    )
    np.testing.assert_allclose(given.similarity(compare).numpy(), pairs, atol=1e-6)
    wanted = pairs[:, members] @ sizes[members] / sizes[members].sum()
    found = similarity_to(
        given.features.double(),
        given.labels.double(),
        torch.from_numpy(sizes),
        torch.tensor(members),
        compare,
    )
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-7)


def test_a_vector_of_zeros_is_similar_to_nothing():
    found = similarity_to(
        torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.ones(2, 2), torch.ones(2), torch.tensor([1])
    )
    assert found.tolist() == pytest.approx([0.5, 1.0])


def test_an_unknown_part_of_the_index_is_refused():
    with pytest.raises(
        InputError, match="unknown part of a client index 'feature'; did you mean 'features'"
    ):
        directions(torch.ones(1, 2), torch.ones(1, 2), "feature")


def test_similarity_by_group_in_numpy():
    given, groups = index(6), np.array([0, 0, 2, 2, 2, 5])
    pairs = given.similarity().numpy()
    found = similarity_by_group(given, groups)
    within = [pairs[i, j] for i in range(6) for j in range(6) if i != j and groups[i] == groups[j]]
    between = [pairs[i, j] for i in range(6) for j in range(6) if groups[i] != groups[j]]
    assert found["within"] == pytest.approx(np.mean(within), abs=1e-6)
    assert found["between"] == pytest.approx(np.mean(between), abs=1e-6)
    nearest = [
        max((j for j in range(6) if j != i), key=lambda j, i=i: pairs[i, j]) for i in range(6)
    ]
    assert found["nearest"] == pytest.approx(np.mean(groups[nearest] == groups))
    assert found["groups"][0][1] == pytest.approx(pairs[:2, 2:5].mean(), abs=1e-6)
    assert np.isnan(found["groups"][2][2]), "a group of one client has no pairs"


SHARED = Path(__file__).parents[2] / "shared"
PACS = Path(os.environ.get("EQUIPOISE_DATA", SHARED / "data")) / "pacs"
ENCODER = SHARED / "weights" / "vit-small-14"


def pacs():
    """Ten clients with 24 real images in each of four domains."""
    domains = sorted(folder.name for folder in PACS.iterdir() if folder.is_dir())
    classes = sorted(folder.name for folder in (PACS / domains[0]).iterdir())
    draws = np.random.default_rng(0)
    x, y = [], []
    for domain in domains:
        files = [
            (file, c)
            for c, name in enumerate(classes)
            for file in sorted((PACS / domain / name).glob("*.jpg"))
        ]
        for position in draws.permutation(len(files))[:240]:
            file, label = files[position]
            x.append(np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1))
            y.append(label)
    groups = {client: domains[client // 10] for client in range(40)}
    pixels = torch.from_numpy(np.stack(x)).float() / 255
    return Federation.from_arrays(
        pixels,
        np.array(y),
        clients=np.arange(960) // 24,
        groups=groups,
        splits=(1, 0, 0),
        classes=len(classes),
    )


@pytest.mark.slow
@pytest.mark.skipif(not (PACS.exists() and ENCODER.exists()), reason=f"needs {PACS} and {ENCODER}")
def test_the_nearest_client_is_in_the_same_domain_on_real_pictures(tmp_path, monkeypatch):
    """Both strategies, with random label vectors and short training."""
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    encoded = encode_federation(pacs(), str(ENCODER))
    how = {
        "model": {"name": "dsaign", "feedforward": 256},
        "batch_size": 128,
        "optimizer": {"name": "adam", "lr": 1e-3},
    }
    for method, length in (
        ({"name": "central", "samples": 128, "local": "dsaign"}, {"rounds": 30}),
        ({"name": "fedavg", "local": "dsaign"}, {"rounds": 15, "epochs": 4, "cohort": 0.25}),
    ):
        made = index_of(train(encoded, method=method, **how, **length).model(), encoded)
        found = similarity_by_group(made, encoded.groups)
        assert found["nearest"] >= 38 / 40
        assert found["within"] - found["between"] > 0.25
