"""Harmful YAML and JSON end in one line, soon."""

from __future__ import annotations

import resource
import time

import pytest

from equipoise.config import experiment_from, load_experiment
from equipoise.data.silos import silos
from equipoise.documents import read_json
from equipoise.errors import InputError, RunError
from equipoise.study import load_study
from equipoise.text import printable, unprintable_in

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
HARMFUL = {
    "alias bomb": (BOMB, "with its aliases written out it has more than 200000 values"),
    "alias bomb in data": (
        f"data:\n  {BOMB.replace(chr(10), chr(10) + '  ')}",
        "with its aliases written out",
    ),
    "recursive alias": ("data: &a {name: *a}", "an alias refers to a value that contains it"),
    "recursive document": (
        "&a\ndata: digits\nmodel: *a",
        "an alias refers to a value that contains it",
    ),
    "deep lists": ("data: " + "[" * 5000 + "]" * 5000, "values are nested more than 40 deep"),
    "deep mappings": (
        "\n".join(" " * depth + "a:" for depth in range(500)),
        "values are nested more than 40 deep",
    ),
    "a key beside a merge key twice": (
        "data: digits\ntraining: {<<: {rounds: 2}, epochs: 1, epochs: 2}",
        "the key 'epochs' comes twice",
    ),
    "digits": (
        "data: digits\nseed: " + "9" * 5000,
        "a number has 5000 digits; at most 64 are read",
    ),
    "hexadecimal digits": ("data: digits\nseed: 0x" + "f" * 5000, "a number has 5002 digits"),
    "sexagesimal digits": (
        "data: digits\nseed: " + "1:" * 100_000 + "1",
        "a number has 200001 digits",
    ),
    "no date": (
        "data: digits\nseed: 2001-99-99",
        "'2001-99-99' has no value (month must be in 1..12)",
    ),
    "no number": ("data: digits\nseed: !!int abc", "'abc' has no value"),
    "no time": ("data: digits\nseed: !!timestamp abc", "'abc' has no value"),
    "code": ("data: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "megabytes": (
        "data: [" + "1," * 600_000 + "]",
        "it has 1200008 characters; at most 1048576 are read",
    ),
    "binary": ("data: \x00", "special characters are not allowed"),
}


@pytest.mark.parametrize(("text", "message"), HARMFUL.values(), ids=HARMFUL)
def test_harmful_yaml_is_one_line(text, message, tmp_path):
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    began, held = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (load_experiment, load_study):
        with pytest.raises(InputError) as caught:
            read(path)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 10
    # In kB on Linux.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 300_000


def test_an_alias_that_repeats_a_value_is_fine(tmp_path):
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "data: &name digits\nmodel: {name: mlp, hidden: &sizes [8]}\nmethod: {name: fedavg}\nseed: "
        "3"
    )
    assert load_experiment(path).model["hidden"] == [8]


def test_the_description_of_a_silo_is_bounded_too(tmp_path):
    (tmp_path / "c1").mkdir()
    (tmp_path / "c1" / "client.yaml").write_text(BOMB)
    (tmp_path / "c1" / "data.npz").write_bytes(b"")
    with pytest.raises(InputError, match="data.npz|aliases"):
        silos(root=str(tmp_path))


@pytest.mark.parametrize("seed", [10**5000, -(10**5000), [10**5000]], ids=["high", "low", "list"])
def test_numbers_that_cannot_be_written_out_are_refused(seed):
    with pytest.raises(InputError, match="too long to show|must be from 0"):
        experiment_from({"data": "digits", "seed": seed})


def test_long_values_are_shortened_in_messages():
    with pytest.raises(InputError) as caught:
        experiment_from({"data": "digits", "seed": "x" * 1_000_000})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    ["", '{"a": ', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\xff"],
    ids=["empty", "cut", "deep", "digits", "bytes"],
)
def test_damaged_json_is_one_line(text, tmp_path):
    path = tmp_path / "summary.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(RunError, match="cannot read .*summary.json"):
        read_json(path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", "plain"),
        ("Zürich 東京 ‍", "Zürich 東京 ‍"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\r\nb", r"a\r\nb"),
        ("\x9b2J", r"\x9b2J"),
        ("‮abc", r"\u202eabc"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_written_out(text, wanted):
    assert printable(text) == wanted
    assert unprintable_in(text) == (text != wanted)
    assert not unprintable_in(printable(text))
