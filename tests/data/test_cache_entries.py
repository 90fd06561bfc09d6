"""Entries of the cache directory are listed and removed; other files are not touched."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time

import pytest
import torch

from equipoise.data.cache import cached
from equipoise.data.cache_entries import entries, older, remove
from equipoise.errors import RunError

DAY = 24 * 60 * 60


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "arrays"


def key_of(name):
    return hashlib.sha256(name.encode()).hexdigest()


def store(name, rows=4, about=None):
    about = f"squares of {name}" if about is None else about
    blocks = lambda: iter([torch.arange(rows).square()])  # noqa: E731
    return cached(key_of(name), (rows,), torch.int64, blocks, about)


def test_there_may_be_no_directory():
    assert entries() == []


def test_an_entry_has_its_size_its_shape_and_what_it_is(folder):
    array = store("a", rows=1000)
    (entry,) = entries()
    assert (entry.key, entry.state, entry.shape) == (key_of("a"), "complete", (1000,))
    assert entry.about == "squares of a"
    assert {path.name for path in entry.files} == {f"{key_of('a')}.npy", f"{key_of('a')}.txt"}
    assert entry.bytes == array.path.stat().st_size + len("squares of a\n")
    # Times of files are stored in even seconds.
    assert 0 <= entry.days < 60 / DAY


def test_entries_that_were_not_used_for_long(folder, monkeypatch):
    store("a")
    store("b")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 40 * DAY)
    os.utime(folder / f"{key_of('b')}.txt", (now + 35 * DAY,) * 2)
    b, a = entries()
    assert (a.key, b.key) == (key_of("a"), key_of("b"))
    assert (round(a.days, 2), round(b.days, 2)) == (40, 5)
    assert (older([b, a], 30), older([b, a], 3), older([b, a], 41)) == ([a], [b, a], [])


def test_the_last_use_is_recorded(folder):
    store("a")
    described = folder / f"{key_of('a')}.txt"
    os.utime(described, (0, 0))
    store("a")
    assert time.time() - described.stat().st_mtime < 60


def test_entries_without_a_record_of_what_they_are(folder):
    store("a", about="")
    (entry,) = entries()
    assert (entry.about, entry.state, len(entry.files)) == (None, "complete", 1)


@pytest.mark.parametrize("how", ["truncated", "changed", "foreign"])
def test_damaged_entries_are_listed_as_such(folder, how):
    path = store("a", rows=1000).path
    content = path.read_bytes()
    broken = {
        "truncated": content[:-10],
        "changed": content[:-1000] + bytes(1000 - 64) + content[-64:],
        "foreign": b"mine",
    }
    path.write_bytes(broken[how])
    os.utime(path, (5, 5))
    (entry,) = entries()
    assert (entry.state, entry.shape, entry.about) == ("damaged", None, "squares of a")
    # It is removed whatever its age.
    assert older([entry], 10**6) == [entry]
    assert remove(entry)
    assert list(folder.iterdir()) == []
    assert store("a", rows=1000)[:3].tolist() == [0, 1, 4]


def test_only_files_of_the_cache_are_listed_and_removed(folder, tmp_path):
    store("a")
    elsewhere = tmp_path / "precious.npy"
    elsewhere.write_bytes(b"precious")
    others = ["notes.txt", "mine.npy", f"{key_of('b')}.npy.bak", f"{key_of('b')}.png", "ABCD.npy"]
    for name in others:
        (folder / name).write_text("keep me")
    (folder / f"{key_of('c')}.npy").symlink_to(elsewhere)
    (folder / f"{key_of('d')}.npy").mkdir()
    found = entries()
    assert [entry.key for entry in found] == [key_of("a")]
    assert all(map(remove, found))
    links = {f"{key_of('c')}.npy", f"{key_of('d')}.npy"}
    assert {path.name for path in folder.iterdir()} == {*others, *links}
    assert elsewhere.read_bytes() == b"precious"


def test_what_a_killed_process_left_is_listed_and_removed(folder):
    store("a")
    left = folder / f"{key_of('b')}.npy.{'0' * 16}.tmp"
    left.write_bytes(bytes(100))
    states = {entry.key: (entry.state, entry.bytes) for entry in entries()}
    assert states[key_of("b")] == ("unfinished", 100)
    assert [remove(entry) for entry in entries() if entry.state == "unfinished"] == [True]
    assert [entry.key for entry in entries()] == [key_of("a")]


COMPUTING = """
import hashlib, sys, time, torch
from equipoise.data.cache import cached
def rows():
    yield torch.zeros(1)
    print("computing", flush=True)
    sys.stdin.readline()
    yield torch.ones(1)
print(cached(sys.argv[1], (2,), torch.float32, rows, "slow")[:].tolist(), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locks of this kind")
def test_an_entry_that_a_process_computes_is_left_alone(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", COMPUTING, key_of("a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "computing\n"
    (entry,) = entries()
    assert (entry.state, entry.about) == ("unfinished", "slow")
    assert not remove(entry)
    assert process.communicate("go\n")[0] == "[0.0, 1.0]\n"
    (entry,) = entries()
    assert entry.state == "complete"
    assert remove(entry)
    assert list(folder.iterdir()) == []


def test_an_array_in_use_survives_its_removal(folder):
    array = store("a")
    assert all(map(remove, entries()))
    assert array[:].tolist() == [0, 1, 4, 9]


def test_a_directory_that_cannot_be_read_is_named(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("not a directory")
    with pytest.raises(RunError, match="cannot read the cache directory .*arrays"):
        entries()
