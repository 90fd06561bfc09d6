"""Roles of Shakespeare's plays: small files written by the tests, and counts of the real file."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

from equipoise.data import load
from equipoise.data.leaf import CHARACTERS
from equipoise.data.shakespeare import read_roles, shakespeare, windows
from equipoise.errors import InputError
from tests.data.real_files import SHARED, needs_shared


def spell(numbers):
    return "".join(CHARACTERS[number] for number in numbers)


def speech(role, length):
    """A text in which every position is unique."""
    return "".join(f"{role}{place:04d}" for place in range(length))[:length]


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    """Twelve male and five female roles and one unknown; role i has 100 + 10 i characters."""
    root = tmp_path_factory.mktemp("data")
    genders = ["male"] * 12 + ["female"] * 5 + ["unknown"]
    rows = [
        {
            "play": "Play",
            "role": f"Role {i}",
            "gender": gender,
            "text": speech(chr(65 + i), 100 + 10 * i),
        }
        for i, gender in enumerate(genders)
    ]
    (root / "shakespeare").mkdir()
    (root / "shakespeare" / "roles.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return str(root), rows


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_windows_by_a_slow_loop(stride):
    text = speech("a", 40)
    x, y = windows(text, length=6, stride=stride)
    wanted = [(text[i : i + 6], text[i + 6]) for i in range(0, 34, stride)]
    assert [(spell(before), spell([after])) for before, after in zip(x, y, strict=True)] == wanted


@pytest.mark.parametrize(("length", "samples"), [(4, 1), (5, 0), (6, 0)])
def test_a_short_text_has_few_windows(length, samples):
    x, y = windows("to be", length=length)
    assert (x.shape, y.shape) == ((samples, length), (samples,))


def test_every_role_is_a_client_in_the_group_of_its_gender(plays):
    root, rows = plays
    federation = load("shakespeare", root=root, roles=None)
    assert federation.client_names == tuple(f"Play: Role {i}" for i in range(18))
    assert federation.group_names == ("male", "female", "unknown")
    assert np.bincount(federation.groups).tolist() == [12, 5, 1]
    assert (federation.classes, federation.shape) == (80, (80,))
    assert federation.x.dtype == federation.y.dtype == torch.int64
    for client, row in enumerate(rows):
        mine = np.concatenate(
            [federation.split(name).of(client) for name in ("train", "val", "test")]
        )
        found = sorted(spell(federation.x[i]) + spell(federation.y[i : i + 1]) for i in mine)
        assert found == sorted(row["text"][i : i + 81] for i in range(20 + 10 * client))


def test_scale_keeps_the_beginning_of_each_text(plays):
    root, rows = plays
    source = shakespeare(root=root, roles=None, scale=0.5)
    # Half of 100 + 10 i characters, of which 83 are needed: role 7 (85 characters, 5 samples) and
    # later ones.
    assert Counter(source.ids.tolist()) == {
        f"Play: Role {i}": 50 + 5 * i - 80 for i in range(7, 18)
    }
    assert spell(source.x[0]) == rows[7]["text"][:80]


def test_length_and_stride(plays):
    source = shakespeare(root=plays[0], roles=None, length=20, stride=21)
    sizes = Counter(source.ids.tolist())
    assert source.x.shape[1] == 20
    # Samples without overlap: one for every 21 characters.
    assert sizes == {f"Play: Role {i}": (100 + 10 * i) // 21 for i in range(18)}


def test_roles_are_drawn_by_the_seed(plays):
    drawn = [
        tuple(dict.fromkeys(shakespeare(root=plays[0], roles=4, seed=seed).ids.tolist()))
        for seed in range(20)
    ]
    assert drawn[3] == tuple(
        dict.fromkeys(shakespeare(root=plays[0], roles=4, seed=3).ids.tolist())
    )
    assert {len(names) for names in drawn} == {4}
    assert len(set(drawn)) > 10


def test_roles_are_drawn_by_gender(plays):
    federation = load("shakespeare", root=plays[0], roles={"male": 7, "female": 3})
    assert federation.group_names == ("male", "female")
    assert np.bincount(federation.groups).tolist() == [7, 3]
    only = load("shakespeare", root=plays[0], roles={"female": 5})
    assert only.group_names == ("female",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "31 roles requested, but there are only 18"),
        ({"roles": {"female": 6}}, "6 female roles requested, but there are only 5"),
        (
            {"roles": {"femal": 2}},
            "unknown gender 'femal' in roles of data 'shakespeare'; did you mean 'female'",
        ),
        ({"roles": 0}, "roles must be a whole number of at least 1, got 0"),
        (
            {"roles": {}},
            "no role of .*roles.jsonl has the 83 characters that three samples need at scale=1.0",
        ),
        (
            {"roles": None, "scale": 0.1},
            "no role of .* has the 83 characters that three samples need at scale=0.1",
        ),
        ({"scale": 1.5}, "scale=1.5 of data 'shakespeare' must be a share"),
        ({"scale": 0}, "scale must be a finite number above 0, got 0"),
        ({"length": 0}, "length must be a whole number of at least 1, got 0"),
        ({"stride": 0}, "stride must be a whole number of at least 1, got 0"),
    ],
)
def test_refuses(plays, options, message):
    with pytest.raises(InputError, match=message):
        shakespeare(root=plays[0], **options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is not a JSON object with play, role, gender, text"),
        ('["Hamlet"]', "line 2 of .* is not a JSON object"),
        ('{"play": "P", "role": "R", "gender": "male"}', "KeyError: 'text'"),
        (
            '{"play": "P", "role": "R", "gender": "Male", "text": "T"}',
            "as gender one of male, female, unknown; got gender 'Male'",
        ),
        (
            '{"play": 3, "role": "R", "gender": "male", "text": "T"}',
            "line 2 of .* must hold text only",
        ),
    ],
)
def test_lines_in_another_format_are_refused(tmp_path, line, message):
    path = tmp_path / "roles.jsonl"
    path.write_text('{"play": "P", "role": "R", "gender": "male", "text": "T"}\n' + line)
    with pytest.raises(InputError, match=message):
        read_roles(path)


@needs_shared("shakespeare")
def test_real_counts():
    roles = read_roles(SHARED / "shakespeare" / "roles.jsonl")
    assert Counter(role.gender for role in roles) == {"male": 500, "female": 95, "unknown": 44}
    assert len({role.play for role in roles}) == 29
    assert round(sum(len(role.text) for role in roles) / 1e6, 2) == 3.31
    assert min(len(role.text) for role in roles) >= 500
    hamlet = next(role for role in roles if role.role == "Hamlet")
    assert "To be or not to be" in spell(windows(hamlet.text, length=1)[0][:, 0])


@needs_shared("shakespeare")
def test_real_roles_as_in_the_paper():
    federation = load("shakespeare", root=str(SHARED), scale=0.2)
    assert federation.clients == 31
    by_gender = load("shakespeare", root=str(SHARED), scale=0.2, roles={"male": 25, "female": 10})
    assert by_gender.group_names == ("male", "female")
    assert np.bincount(by_gender.groups).tolist() == [25, 10]
