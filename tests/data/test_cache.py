"""Arrays on disk: what is written is read, and damaged files are detected."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.data.cache import _END, MappedArray, _head, cache_directory, cached
from equipoise.errors import InputError, RunError
from equipoise.samples import Samples

KEY = hashlib.sha256(b"key").hexdigest()
VALUES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, 3, 4, 5), dtype=np.uint8))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path, values=VALUES, pieces=7):
    return MappedArray.write(path, tuple(values.shape), values.dtype, values.split(pieces))


def entry(cache):
    return cache / "arrays" / f"{KEY}.npy"


def get(values=VALUES, calls=None):
    def rows():
        if calls is not None:
            calls.append(1)
        yield from values.split(7)

    return cached(KEY, tuple(values.shape), values.dtype, rows)


def forbidden():
    raise AssertionError("the entry is there already")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.bool,
    ],
)
def test_values_of_every_type_come_back(tmp_path, dtype):
    values = VALUES.to(dtype)
    array = write(tmp_path / "a.npy", values)
    assert isinstance(array, Samples)
    assert (array.shape, array.dtype, len(array)) == ((50, 3, 4, 5), dtype, 50)
    assert torch.equal(array[:], values)
    assert torch.equal(array[3:9], values[3:9])
    positions = torch.tensor([[4, 4, 0], [49, 1, 4]])
    assert torch.equal(array[positions], values[positions])
    assert torch.equal(array[positions.numpy()], values[positions])


def test_the_file_is_an_ordinary_npy_file(tmp_path):
    write(tmp_path / "a.npy", VALUES.float())
    assert np.array_equal(np.load(tmp_path / "a.npy"), VALUES.float().numpy())
    vector = write(tmp_path / "b.npy", torch.arange(10))
    assert np.load(tmp_path / "b.npy").tolist() == list(range(10)) == vector[:].tolist()


@pytest.mark.parametrize("system", ["linux", "windows"])
@pytest.mark.parametrize(
    "positions",
    [
        slice(None),
        slice(40, 3, -9),
        slice(9, 9),
        torch.tensor([-1, 0, -50]),
        torch.tensor([[3, 4], [5, 6], [8, 9]]),
        torch.tensor([], dtype=torch.int64),
        torch.arange(50) % 3 == 0,
        np.array([7, 7, 8]),
    ],
    ids=str,
)
def test_rows_are_those_of_numpy(tmp_path, monkeypatch, positions, system):
    if system == "windows":
        monkeypatch.delattr(os, "preadv")
    chosen = positions.numpy() if isinstance(positions, torch.Tensor) else positions
    for values in (VALUES, VALUES[:, 0, 0, 0].double()):
        found = write(tmp_path / "a.npy", values)[positions]
        assert np.array_equal(found.numpy(), values.numpy()[chosen])
        assert found.dtype == values.dtype


@pytest.mark.parametrize("position", [50, -51])
def test_there_are_no_rows_beyond_the_last(tmp_path, position):
    with pytest.raises(IndexError, match=f"^an array of 50 rows has no row {position}$"):
        write(tmp_path / "a.npy")[torch.tensor([0, position])]


CUT = """
import os, sys
import torch
from equipoise.data.cache import MappedArray
from equipoise.errors import InputError

array = MappedArray.write(sys.argv[1], (64, 1 << 16), torch.uint8, [torch.ones(64, 1 << 16).byte()])
os.truncate(sys.argv[1], 1 << 20)
for positions in (slice(None), torch.tensor([3, 60])):
    try:
        print(array[positions].sum())
    except InputError as error:
        print(error)
"""


def test_a_file_that_becomes_shorter_in_use_does_not_end_the_process(tmp_path):
    """With a mapped file, the system sends the signal SIGBUS."""
    done = subprocess.run(
        [sys.executable, "-c", CUT, tmp_path / "a.npy"], stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    said = f"cannot read the array in {tmp_path / 'a.npy'}: it has become shorter; write it again\n"
    assert done.stdout == 2 * said


def test_what_is_read_may_be_changed_and_the_file_stays_as_it_is(tmp_path):
    array = write(tmp_path / "a.npy")
    for chosen in (slice(0, 2), torch.tensor([0, 1])):
        array[chosen].zero_()
    assert torch.equal(array[:], VALUES)


def test_the_digest_is_that_of_the_npy_file(tmp_path):
    array = write(tmp_path / "a.npy")
    content = (tmp_path / "a.npy").read_bytes()
    end = content.index(VALUES.numpy().tobytes()) + VALUES.numel()
    assert array.digest == hashlib.sha256(content[:end]).hexdigest()


def test_the_digest_depends_on_values_type_and_shape_alone(tmp_path):
    one = write(tmp_path / "a.npy").digest
    assert write(tmp_path / "b.npy", pieces=50).digest == one
    changed = VALUES.clone()
    changed[-1, -1, -1, -1] ^= 1
    others = [changed, VALUES.view(50, 60), VALUES.view(torch.int8), VALUES[:49]]
    digests = [write(tmp_path / f"{i}.npy", other).digest for i, other in enumerate(others)]
    assert len({one, *digests}) == 5


def test_another_process_opens_the_file_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    array = write(Path("a.npy"))
    sent = pickle.dumps(array)
    assert len(sent) < 500
    monkeypatch.chdir("/")
    back = pickle.loads(sent)
    assert torch.equal(back[:], VALUES)
    assert back.digest == array.digest


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "message"),
    [
        (
            (3, 2),
            torch.float32,
            [torch.zeros(2, 2)],
            r"the blocks have 2 rows in all, the array of shape \[3, 2\] needs 3",
        ),
        ((3, 2), torch.float32, [torch.zeros(4, 2)], "the blocks have 4 rows in all"),
        (
            (3, 2),
            torch.float32,
            [torch.zeros(3, 3)],
            r"a block of rows is torch.float32 of shape \[3, 3\]",
        ),
        ((3, 2), torch.float32, [torch.zeros(3, 2).double()], "a block of rows is torch.float64"),
        ((0, 2), torch.float32, [], r"an array on disk must have values; its shape is \(0, 2\)"),
        ((3, 0), torch.float32, [torch.zeros(3, 0)], "must have values"),
        (
            (3, 2),
            torch.bfloat16,
            [],
            "an array on disk cannot hold torch.bfloat16, which NumPy does not have",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused(tmp_path, shape, dtype, rows, message):
    with pytest.raises(InputError, match=message):
        MappedArray.write(tmp_path / "a.npy", shape, dtype, rows)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    write(tmp_path / "a.npy")

    def failing():
        yield torch.zeros(1, 2)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        MappedArray.write(tmp_path / "a.npy", (2, 2), torch.float32, failing())
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
    assert torch.equal(MappedArray(tmp_path / "a.npy")[:], VALUES)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(
        RunError, match=r"^cannot write .*missing/a\.npy: .*No such file or directory: '[^']*'$"
    ):
        write(tmp_path / "missing" / "a.npy")


def damage(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-1])
    elif how == "head only":
        path.write_bytes(content[:100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "plain npy":
        np.save(path, VALUES.numpy())
    elif how == "more rows than values":
        head = _head((51, *VALUES.shape[1:]), VALUES.dtype)
        path.write_bytes(head + content[len(head) :])
        os.utime(path, (os.stat(path).st_atime, _END.unpack(content[-_END.size :])[1]))
    elif how == "text":
        path.write_text("no array\n" * 100)
    elif how == "directory":
        path.unlink()
        path.mkdir()
    else:
        place = {
            "first value": content.index(VALUES.numpy().tobytes()),
            "head": 70,
            "digest": -5,
            "mark": -60,
        }[how]
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


DAMAGES = [
    "truncated",
    "head only",
    "empty",
    "plain npy",
    "more rows than values",
    "text",
    "first value",
    "head",
    "digest",
    "mark",
]


@pytest.mark.parametrize("how", [*DAMAGES, "directory"])
def test_damaged_files_are_refused(tmp_path, how):
    write(tmp_path / "a.npy")
    damage(tmp_path / "a.npy", how)
    with pytest.raises(InputError, match=r"cannot read the array in .*a\.npy: .*; write it again"):
        MappedArray(tmp_path / "a.npy")


def test_a_copy_is_compared_with_its_digest_once(tmp_path):
    write(tmp_path / "a.npy")
    copy = tmp_path / "b.npy"
    copy.write_bytes((tmp_path / "a.npy").read_bytes())
    os.utime(copy, (1_000_000_001, 1_000_000_001))
    assert torch.equal(MappedArray(copy)[:], VALUES)
    assert copy.stat().st_mtime == (tmp_path / "a.npy").stat().st_mtime


@pytest.mark.parametrize("chosen", [None, ""])
def test_the_usual_cache_directory(monkeypatch, tmp_path, chosen):
    monkeypatch.delenv("EQUIPOISE_CACHE")
    if chosen is not None:
        monkeypatch.setenv("EQUIPOISE_CACHE", chosen)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_directory() == tmp_path / ".cache" / "equipoise"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_directory() == tmp_path / "elsewhere" / "equipoise"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_directory() == tmp_path / "Library" / "Caches" / "equipoise"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_directory() == tmp_path / "local" / "equipoise"


def test_the_variable_names_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EQUIPOISE_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine"


def test_content_is_made_once(cache):
    calls = []
    first = get(calls=calls)
    again = get(calls=calls)
    assert calls == [1]
    assert torch.equal(first[:], VALUES)
    assert torch.equal(again[:], VALUES)
    assert [path.name for path in (cache / "arrays").iterdir()] == [f"{KEY}.npy"]


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_entries_are_made_again(cache, how):
    get()
    damage(entry(cache), how)
    calls = []
    assert torch.equal(get(calls=calls)[:], VALUES)
    assert calls == [1]
    assert torch.equal(cached(KEY, VALUES.shape, VALUES.dtype, forbidden)[:], VALUES)


def test_an_array_in_use_survives_its_replacement(cache):
    array = get()
    get(VALUES[:20])
    assert torch.equal(array[:], VALUES)


@pytest.mark.parametrize("other", [VALUES.float(), VALUES[:20], VALUES.view(50, 60)])
def test_entries_of_another_shape_or_type_are_made_again(other):
    get()
    assert torch.equal(get(other)[:], other)


def test_what_a_killed_process_left_is_removed(cache):
    (cache / "arrays").mkdir(parents=True)
    (cache / "arrays" / f"{KEY}.npy.0123.tmp").write_bytes(b"half")
    (cache / "arrays" / f"{'0' * 64}.npy.0123.tmp").write_bytes(b"of another array")
    get()
    assert sorted(path.name for path in (cache / "arrays").iterdir()) == [
        f"{'0' * 64}.npy.0123.tmp",
        f"{KEY}.npy",
    ]


def test_errors_while_the_content_is_made_are_passed_on(cache):
    with pytest.raises(OSError, match="^no such picture$"):
        cached(
            KEY, (2, 2), torch.float32, lambda: (_ for _ in ()).throw(OSError("no such picture"))
        )
    assert not entry(cache).exists()
    assert torch.equal(get()[:], VALUES)


@pytest.mark.parametrize(
    "key", ["", "abc", "../../../etc/passwd0", KEY.upper(), "0" * 129, KEY + "\n"]
)
def test_other_keys_are_refused(key):
    with pytest.raises(InputError, match="must be a hash of 16 to 128 hexadecimal digits"):
        cached(key, (1,), torch.uint8, forbidden)


def test_a_cache_directory_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        RunError,
        match=r"cannot write .*/file/arrays/.*; the environment variable EQUIPOISE_CACHE can",
    ):
        get()


WRITER = f"""
import sys, time
import torch
from equipoise.data.cache import cached

def rows():
    with open(sys.argv[1], "a") as file:
        file.write("made\\n")
    for start in range(4):
        time.sleep(0.2)
        yield torch.full((5, 1000), start)

array = cached({KEY!r}, (20, 1000), torch.int64, rows)
print(int(array[:].sum()), array.digest)
"""


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_want_the_same_array_at_once_get_it(cache, tmp_path, locks):
    without = "import equipoise.data.cache as cache\ncache.fcntl = None\n"
    program = WRITER if locks else without + WRITER
    started = [start(program, tmp_path / "made") for _ in range(3)]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(set(said)) == 1
    assert said[0].split()[0] == str(5 * 1000 * (0 + 1 + 2 + 3))
    if locks:  # they make the others wait for the first
        assert (tmp_path / "made").read_text() == "made\n"
    assert [path.name for path in (cache / "arrays").iterdir()] == [f"{KEY}.npy"]


def test_a_killed_writer_leaves_no_entry_and_blocks_nobody(cache, tmp_path):
    process = start(WRITER, tmp_path / "made")
    deadline = time.monotonic() + 60
    while not (tmp_path / "made").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert not entry(cache).exists()
    assert torch.equal(get()[:], VALUES)
    assert not list((cache / "arrays").glob("*.tmp"))
