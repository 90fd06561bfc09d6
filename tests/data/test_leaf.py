"""LEAF's format from small files written by the tests, and its vocabulary."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch

from equipoise.data import load
from equipoise.data.leaf import CHARACTERS, draw_clients, encode, leaf, read_leaf
from equipoise.errors import InputError

SPEECH = (
    "Now is the winter of our discontent Made glorious summer by this sun of York; "
    "And all the clouds"
)


def document(held):
    users = {user: {"x": x, "y": y} for user, (x, y) in held.items()}
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(y["y"]) for y in users.values()],
            "user_data": users,
        }
    )


def write(path, held):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(held))


def picture(value):
    return [value / 1000 + place / 1000 for place in range(784)]


def femnist(*labels):
    return [picture(label) for label in labels], list(labels)


def text(first, count):
    """Samples of 80 characters and the next one, cut as in LEAF."""
    return [SPEECH[i : i + 80] for i in range(first, first + count)], [
        SPEECH[i + 80] for i in range(first, first + count)
    ]


def test_the_vocabulary_has_eighty_different_characters():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80
    # Positions in LEAF's own list.
    assert [CHARACTERS.index(c) for c in "\n !.09?AZ]az}"] == [
        0,
        1,
        2,
        10,
        11,
        20,
        24,
        25,
        50,
        52,
        53,
        78,
        79,
    ]


def test_encode_by_hand():
    assert encode("").tolist() == []
    assert encode(CHARACTERS).tolist() == list(range(80))
    assert encode("a B\n}").tolist() == [53, 1, 26, 0, 79]


@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        ("’‘", "''"),
        ("“”", '""'),
        ("–—", "--"),
        ("èÉçÔï", "eEcOi"),
        ("æœÆŒ", "aoAO"),
        ("…", "."),
        ("\t\xa0@✓漢", "     "),
    ],
)
def test_other_characters_take_their_plainest_form(odd, plain):
    assert "".join(CHARACTERS[number] for number in encode(odd)) == plain


def test_read_puts_clients_of_several_files_together(tmp_path):
    write(tmp_path / "1.json", {"ann": ([[1]], [1]), "bob": ([[2]], [2])})
    (tmp_path / "2.json.gz").write_bytes(
        gzip.compress(document({"ann": ([[3], [4]], [3, 4])}).encode())
    )
    assert read_leaf([tmp_path / "1.json", tmp_path / "2.json.gz"]) == {
        "ann": ([[1], [3], [4]], [1, 3, 4]),
        "bob": ([[2]], [2]),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not in LEAF's format"),
        ("[]", "is not in LEAF's format"),
        ('{"users": ["ann"], "user_data": {}}', "KeyError: 'ann'"),
        ('{"users": ["ann"], "user_data": {"ann": {"x": [1]}}}', "KeyError: 'y'"),
        (
            '{"users": ["ann"], "user_data": {"ann": {"x": [1], "y": []}}}',
            "client 'ann' of .* has 1 samples in x and 0",
        ),
    ],
)
def test_files_in_another_format_are_refused(tmp_path, content, message):
    path = tmp_path / "odd.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_leaf([path])
    assert str(path) in str(caught.value)


def test_femnist_by_writer(tmp_path):
    write(
        tmp_path / "femnist" / "data" / "train" / "all_data_0.json",
        {"f1": femnist(3, 61), "f2": femnist(0, 1, 2)},
    )
    write(tmp_path / "femnist" / "data" / "test" / "all_data_0.json", {"f1": femnist(40)})
    federation = load("leaf", root=str(tmp_path))
    assert federation.client_names == ("f1", "f2")
    assert (federation.classes, federation.shape, federation.name) == (62, (1, 28, 28), "femnist")
    assert federation.y.tolist() == [3, 61, 40, 0, 1, 2]
    assert [
        sum(federation.split(name).sizes[k] for name in ("train", "val", "test")) for k in (0, 1)
    ] == [3, 3]
    # Row by row: pixel 2 of row 1 has index 30.
    assert federation.x.dtype == torch.float32
    assert float(federation.x[2, 0, 1, 2]) == pytest.approx((40 + 30) / 1000)


def test_shakespeare_by_role(tmp_path):
    held = {"THE_PLAY_RICHARD": text(0, 5), "THE_PLAY_YORK": text(5, 4)}
    write(tmp_path / "leaf" / "shakespeare" / "all_data" / "all_data.json", held)
    federation = load("leaf", dataset="shakespeare", root=str(tmp_path))
    assert (federation.classes, federation.shape, federation.name) == (80, (80,), "shakespeare")
    assert federation.x.dtype == federation.y.dtype == torch.int64
    assert federation.client_names == tuple(held)
    assert ["".join(CHARACTERS[n] for n in row) for row in federation.x] == [
        SPEECH[i : i + 80] for i in range(9)
    ]
    assert "".join(CHARACTERS[n] for n in federation.y) == SPEECH[80:89]


def test_clients_are_drawn_by_the_seed_among_those_with_three_samples(tmp_path):
    held = {f"w{i}": femnist(*range(2 + (i > 0))) for i in range(9)}
    write(tmp_path / "femnist" / "all.json", held)
    drawn = [
        tuple(dict.fromkeys(leaf(root=str(tmp_path), clients=4, seed=seed).ids.tolist()))
        for seed in range(20)
    ]
    assert drawn[0] == tuple(
        dict.fromkeys(leaf(root=str(tmp_path), clients=4, seed=0).ids.tolist())
    )
    assert all(
        len(names) == 4 and list(names) == sorted(names) and "w0" not in names for names in drawn
    )
    assert len(set(drawn)) > 10
    assert len(set(leaf(root=str(tmp_path)).ids)) == 9
    with pytest.raises(
        InputError, match="9 clients of LEAF's femnist requested, but there are only 8"
    ):
        leaf(root=str(tmp_path), clients=9)


def test_draw_is_uniform():
    counts = np.zeros(5)
    draws = np.random.default_rng(0)
    for _ in range(2000):
        counts[draw_clients(range(5), 2, draws, "clients")] += 1
    # Each is drawn 2/5 of the time: 800, plus or minus 22.
    assert np.abs(counts - 800).max() < 90


def test_clients_without_samples_are_left_out(tmp_path):
    write(tmp_path / "shakespeare" / "all.json", {"mute": ([], []), "york": text(0, 3)})
    assert set(leaf(dataset="shakespeare", root=str(tmp_path)).ids) == {"york"}
    write(tmp_path / "femnist" / "all.json", {"mute": ([], [])})
    with pytest.raises(InputError, match="no client of LEAF's femnist in .*femnist holds a sample"):
        leaf(root=str(tmp_path))


@pytest.mark.parametrize("clients", [0, -1, 1.5, True])
def test_other_numbers_of_clients_are_refused(clients):
    with pytest.raises(InputError, match="must be a whole number"):
        draw_clients("abc", clients, np.random.default_rng(0), "clients")


@pytest.mark.parametrize(
    ("dataset", "held", "message"),
    [
        ("femnist", ([[0.0] * 783], [1]), "images that are not 784 numbers each"),
        ("femnist", ([["dark"] * 784], [1]), "images that are not 784 numbers each"),
        ("femnist", ([[0.0] * 784], [62]), "labels that are not whole numbers from 0 to 61"),
        ("femnist", ([[0.0] * 784], ["a"]), "labels that are not whole numbers from 0 to 61"),
        ("shakespeare", ([[1, 2]], ["a"]), "samples that are not text"),
        (
            "shakespeare",
            (["ab", "abc"], ["a", "b"]),
            "a sample of 3 characters, but the first sample has 2",
        ),
        ("shakespeare", (["ab"], ["cd"]), "a next character that is not one character"),
    ],
)
def test_samples_of_the_wrong_kind_are_refused(tmp_path, dataset, held, message):
    write(tmp_path / dataset / "all.json", {"ann": held})
    with pytest.raises(InputError, match=f"client 'ann' of LEAF's {dataset} has {message}"):
        leaf(dataset=dataset, root=str(tmp_path))
