"""The client index: its checks, its file, and similarities by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from equipoise import Federation, train
from equipoise.cli.show.federation import read_index
from equipoise.client_index import (
    ClientIndex,
    directions,
    index_for,
    index_of,
    make_index,
    similarity_by_group,
    similarity_to,
)
from equipoise.data.encode import encode_federation
from equipoise.errors import InputError
from equipoise.run.files import save_tensors
from tests.rounds import everyone_of

NAMES = ("St. Anna", "Süd", "Lake, M", "client 0", "W10")


def index(rows=5, made_by="a hash", **more):
    draws = torch.Generator().manual_seed(1)
    features, labels = (torch.randn(rows, width, generator=draws) for width in (4, 3))
    return ClientIndex(np.arange(rows) * 2, features, labels, made_by, **more)


@pytest.mark.parametrize("more", [{}, {"names": NAMES, "clients": 12, "epsilon": 0.5}])
def test_what_is_written_is_read(more, tmp_path):
    written = index(**more)
    written.write(tmp_path / "index")
    found = ClientIndex.read(tmp_path / "index")
    assert found.ids.tolist() == [0, 2, 4, 6, 8]
    assert torch.equal(found.features, written.features)
    assert torch.equal(found.labels, written.labels)
    assert found.made_by == "a hash"
    about = {name: getattr(found, name) for name in ("names", "clients", "epsilon")}
    assert about == {"names": None, "clients": None, "epsilon": None} | more
    assert found.digest() == written.digest()


def test_the_hash_depends_on_everything():
    usual = index()
    changed = [
        ClientIndex(usual.ids + 1, usual.features, usual.labels, usual.made_by),
        ClientIndex(usual.ids, usual.features + 1e-6, usual.labels, usual.made_by),
        ClientIndex(usual.ids, usual.features, -usual.labels, usual.made_by),
        index(made_by="another hash"),
        index(names=NAMES),
        index(names=NAMES[::-1]),
    ]
    assert len({usual.digest(), *(other.digest() for other in changed)}) == 7


def test_the_hash_without_names_is_that_of_older_versions():
    """A run that an older version started can be resumed."""
    given = ClientIndex(np.arange(2), torch.eye(2), torch.ones(2, 3), "abc", 0.5, clients=2)
    assert given.digest() == "127f68a12fd61d73eefe4ca1701b3818"


def test_rows_follow_the_ids():
    given = index(names=NAMES)
    turned = ClientIndex(
        given.ids[::-1].copy(),
        given.features.flip(0),
        given.labels.flip(0),
        given.made_by,
        names=NAMES[::-1],
    )
    assert turned.names == NAMES
    assert turned.digest() == given.digest()
    two = given.of(np.array([2, 6]))
    assert torch.equal(two.features, given.features[[1, 3]])
    assert torch.equal(two.labels, given.labels[[1, 3]])
    assert two.names == (NAMES[1], NAMES[3])


# ---- clients of a run ----------------------------------------------------------------------------


def written(folder, **more):
    index(**more).write(folder / "index")
    return folder / "index"


def test_clients_are_found_by_name(tmp_path):
    """In another order, without one, with other numbers and with another number of clients."""
    path, rows = written(tmp_path, names=NAMES, clients=9), [4, 1, 0, 3]
    everyone = everyone_of([0, 1, 2, 7], [NAMES[row] for row in rows], clients=8)
    found = index_for(path, everyone)
    assert found.ids.tolist() == [0, 1, 2, 7]
    assert found.names == everyone.names
    assert torch.equal(found.features, index().features[rows])
    assert torch.equal(found.labels, index().labels[rows])


@pytest.mark.parametrize("names", [None, ["a", "b"]])
@pytest.mark.parametrize("made_of", [None, 9])
def test_clients_are_found_by_number_in_an_index_without_names(names, made_of, tmp_path):
    path = written(tmp_path, clients=made_of)
    for clients in (9, None):
        found = index_for(path, everyone_of([2, 6], names, clients=clients))
        assert torch.equal(found.features, index().features[[1, 3]])


@pytest.mark.parametrize(
    ("names", "clients", "warns"),
    [(["a", "b"], 9, True), (["a", "b"], None, False), (None, 9, False)],
)
def test_a_run_says_if_only_the_order_tells_named_clients_apart(
    names, clients, warns, tmp_path, caplog
):
    path = written(tmp_path)
    index_for(path, everyone_of([2, 6], names, clients=clients))
    assert (f"{path} has no names of clients, so it is assumed" in caplog.text) == warns


@pytest.mark.parametrize(
    ("about", "names", "clients", "message"),
    [
        (
            {"names": NAMES},
            ["Süd", "Nord", "W1"],
            9,
            "has no rows for 2 of 3 clients: 'Nord', 'W1'; it has 'St. Anna', 'Süd', 'Lake, M', "
            "'client 0', 'W10'; valid: an index that has a row for each client",
        ),
        # Client 0 of the index is another one, which only has this name.
        (
            {"names": NAMES},
            None,
            9,
            r"goes by .* \('St. Anna', .*\), but the federation has no names of clients; valid: ",
        ),
        ({"names": NAMES}, ["Süd", "W10", "Süd"], 9, "names .* two are called 'Süd'; valid: names"),
        ({"clients": 9}, None, 8, "of 9 clients and has no names, .* the federation has 8; valid"),
        ({"clients": 9}, ["a", "b", "c"], 10, "of 9 clients .* the federation has 10; valid"),
        ({}, None, 8, "of 9 or more clients .* the federation has 8; valid: an index of as many"),
    ],
    ids=["unknown names", "no names", "the same name", "fewer", "more", "fewer in an old file"],
)
def test_an_index_of_other_clients_is_refused(about, names, clients, message, tmp_path):
    path = written(tmp_path, **about)
    with pytest.raises(InputError, match=f"^{path}: the client index .*{message}"):
        index_for(path, everyone_of([0, 2, 4], names, clients=clients))


def test_the_file_is_named_if_a_number_has_no_row(tmp_path):
    path = written(tmp_path)
    with pytest.raises(InputError, match=f"^{path}: the client index has no rows for 1 of 2 "):
        index_for(path, everyone_of([0, 1]))


def of_names(*names):
    """A federation whose clients have two samples each, with the length of the name as features."""
    clients = np.repeat(names, 2)
    x = torch.tensor([[float(len(name)), 1.0] for name in clients])
    return Federation.from_arrays(x, np.arange(len(x)) % 2, clients=clients, splits=(1, 0, 0))


def sums(x, y):
    return x, torch.eye(2)[y]


def test_an_index_has_the_names_of_its_federation():
    made = make_index(of_names("b", "aaa", "cc"), sums)
    assert (made.names, made.clients) == (("b", "aaa", "cc"), 3)
    data = of_names("b", "aaa", "cc")
    alike = ("b", "b", "cc")
    for names in (None, ("client 0", "client 1", "client 2"), alike):
        nameless = make_index(replace(data, client_names=names), sums)
        assert (nameless.names, nameless.clients) == (None, 3)


def test_a_run_writes_the_names_of_its_clients(tmp_path):
    x, clients = torch.randn(30, 16), np.repeat(["Süd", "W10", "Lake, M"], 10)
    train(
        Federation.from_arrays(x, np.arange(30) % 2, clients=clients, unseen=["W10"]),
        method={"name": "fedavg", "local": "dsaign"},
        model={"name": "dsaign", "feedforward": 8},
        rounds=1,
        out=tmp_path / "run",
    )
    found = ClientIndex.read(tmp_path / "run" / "client_index.safetensors")
    assert (found.names, found.clients) == (("Süd", "W10", "Lake, M"), 3)


def test_an_index_is_shown_for_the_clients_that_a_federation_has(tmp_path):
    made = make_index(of_names("b", "aaa", "cc"), sums)
    made.write(tmp_path / "index")
    found, digest = read_index(tmp_path / "index", of_names("dddd", "cc", "b"))
    assert digest == made.digest()
    assert found.ids.tolist() == [1, 2]
    assert found.features.tolist() == [[2.0, 1.0], [1.0, 1.0]]
    with pytest.raises(InputError, match=r"none of its clients \('b', 'aaa', 'cc'\) is in "):
        read_index(tmp_path / "index", of_names("x", "y"))
    replace(made, names=None).write(tmp_path / "index")
    assert torch.equal(read_index(tmp_path / "index", of_names(*"abc"))[0].features, made.features)
    with pytest.raises(InputError, match="--index .*index: .* of 3 clients .* federation has 2"):
        read_index(tmp_path / "index", of_names("b", "aaa"))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"names": NAMES[:4]}, "must be a list of 5 names, one for each client, got"),
        ({"names": "abcde"}, "must be a list of 5 names, one for each client, got 'abcde'"),
        ({"names": ("a", "b", "a", "c", "d")}, "two clients of the client index are called 'a'"),
        ({"names": ("a", "b", 3, "c", "d")}, "a name in a client index must be text, got 3"),
        ({"clients": 8}, "clients of a client index must be a whole number of at least 9, got 8"),
    ],
)
def test_names_and_numbers_that_are_refused(more, message):
    with pytest.raises(InputError, match=message):
        index(**more)


def test_a_file_with_other_names_is_refused(tmp_path):
    given = index()
    tensors = {"ids": torch.from_numpy(given.ids), "features": given.features}
    note = {"kind": "client index", "made_by": "", "names": 5}
    save_tensors(tmp_path / "index", tensors | {"labels": given.labels}, note)
    with pytest.raises(InputError, match=f"^{tmp_path / 'index'}: names .* must be a list of 5"):
        ClientIndex.read(tmp_path / "index")


def test_a_directory_is_no_index(tmp_path):
    with pytest.raises(
        InputError, match=f"^{tmp_path} is a directory, .*; valid: the client_index.safetensors of"
    ):
        ClientIndex.read(tmp_path)
    index().write(tmp_path / "client_index.safetensors")
    with pytest.raises(InputError, match=f"; valid: {tmp_path / 'client_index.safetensors'}$"):
        ClientIndex.read(tmp_path)


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
