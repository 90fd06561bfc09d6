"""Files that are complete or unchanged, in directories with one writer at a time."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import RunError
from equipoise.run.files import Journal, load_tensors, save_tensors, sole_writer, write_atomically
from tests.peak import PEAK


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "note"
    write_atomically(path, b"a long first content")
    write_atomically(path, b"short")
    assert path.read_bytes() == b"short"
    assert [entry.name for entry in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_on_the_way_leaves_the_old_content(step, tmp_path, monkeypatch):
    path = tmp_path / "note"
    write_atomically(path, b"old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(RunError, match=r"cannot write .*note: disk full"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("note", b"old")]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


WRITER = """
import sys, time
from pathlib import Path
from equipoise.run.files import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_killed_writer_leaves_the_directory_to_others(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "in\n"
        with pytest.raises(RunError, match="another process"), sole_writer(tmp_path):
            pytest.fail("two writers")
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        with sole_writer(tmp_path):
            assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    asked = []

    def unsupported(*given):
        asked.append(given)
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with sole_writer(tmp_path), sole_writer(tmp_path):
        assert len(asked) == 2


def test_the_content_is_durable_before_it_takes_the_place_of_the_old(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))[1]
        )
    write_atomically(tmp_path / "note", b"content")
    # The file, its new name, and the folder with the name.
    assert calls == ["fsync", "replace", "fsync"]


def test_a_file_of_tensors_that_does_not_fit_leaves_the_old_one(tmp_path):
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"w": torch.ones(2)})
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"cannot write .*model\.safetensors: .*File too large"):
            save_tensors(path, {"w": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [
        (path.name, before)
    ]


SAVER = """
import sys, torch
from pathlib import Path
from equipoise.run.files import save_tensors
tensors = {str(number): torch.ones(1 << 22) for number in range(16)}
save_tensors(Path(sys.argv[1]), {"w": torch.ones(2)})
before = peak()
save_tensors(Path(sys.argv[1]), tensors)
print(peak() - before)
"""


def test_tensors_are_written_without_a_copy_of_the_file(tmp_path):
    grown = subprocess.run(
        [sys.executable, "-c", PEAK + SAVER, tmp_path / "w"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (tmp_path / "w").stat().st_size > 1 << 28
    assert int(grown) < 1 << 26


def test_tensors_and_their_note_come_back(tmp_path):
    tensors = {
        "b": torch.arange(6.0).view(2, 3).T,
        "a": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
    }
    note = {"round": 3, "best": None, "marks": {"metrics": 10}, "clients": [1, 2]}
    save_tensors(tmp_path / "file", tensors, note)
    found, found_note = load_tensors(tmp_path / "file")
    assert found_note == note
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_tensor_may_have_several_names(tmp_path):
    """As in a checkpoint of Client2Vec around FAA, both of which keep the ids of all clients."""
    ids = torch.arange(3)
    save_tensors(tmp_path / "file", {"a/ids": ids, "b/ids": ids, "none": ids[:0], "zero": ids[:0]})
    found, _ = load_tensors(tmp_path / "file")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a/ids": [0, 1, 2],
        "b/ids": [0, 1, 2],
        "none": [],
        "zero": [],
    }


def test_tensors_lie_in_memory_as_fresh_ones_do(tmp_path):
    """PyTorch aligns tensors to 64 bytes; in the file they follow each other without gaps."""
    save_tensors(tmp_path / "file", {str(size): torch.arange(float(size)) for size in range(1, 20)})
    assert all(
        tensor.data_ptr() % 64 == 0 for tensor in load_tensors(tmp_path / "file")[0].values()
    )


def test_the_order_of_names_does_not_change_the_bytes(tmp_path):
    one, two = torch.ones(2), torch.zeros(3)
    save_tensors(tmp_path / "first", {"x": one, "y": two}, {"a": 1, "b": 2})
    save_tensors(tmp_path / "second", {"y": two, "x": one}, {"b": 2, "a": 1})
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_a_file_cut_anywhere_is_refused_and_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"w": torch.arange(4.0)}, {"round": 1})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(RunError, match=r"cannot read .*model.safetensors"):
            load_tensors(path)


def test_missing_and_foreign_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(RunError, match=r"cannot read .*nowhere"):
        load_tensors(tmp_path / "nowhere")
    with pytest.raises(RunError, match="cannot read"):
        load_tensors(tmp_path)
    save_file({"w": torch.ones(1)}, tmp_path / "foreign")
    with pytest.raises(RunError, match="not written by Equipoise"):
        load_tensors(tmp_path / "foreign")


ROWS = st.lists(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none()),
    max_size=5,
)


@given(before=ROWS, after=ROWS, again=ROWS)
def test_a_journal_in_memory_goes_back_to_its_mark(before, after, again):
    journal = Journal(None)
    journal.append(before)
    mark = journal.mark()
    journal.append(after)
    journal.rewind(mark)
    journal.append(again)
    assert list(journal) == before + again


@pytest.mark.parametrize("use", ["flush", "mark", "digest", "rows", "complete", "append"])
def test_rows_that_are_written_later_are_there_when_the_journal_is_used(use, tmp_path):
    path = tmp_path / "rows.jsonl"
    journal, plain = Journal(path), Journal(None)
    journal.append_later(lambda: ['{"round": 1}'])
    journal.append_later(lambda: ['{"round": 2}'])
    assert not path.exists()
    {
        "flush": journal.flush,
        "mark": journal.mark,
        "digest": lambda: journal.digest,
        "rows": lambda: list(journal),
        "complete": lambda: list(journal.complete()),
        "append": lambda: journal.append([]),
    }[use]()
    assert path.read_text() == '{"round": 1}\n{"round": 2}\n'
    assert journal.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    plain.append_later(lambda: ['{"round": 1}'])
    assert plain.mark() == 1


def test_a_journal_on_disk_goes_back_to_its_mark(tmp_path):
    journal = Journal(tmp_path / "rows.jsonl")
    assert (journal.mark(), list(journal)) == (0, [])
    journal.append([{"round": 1, "name": "naïve"}, {"round": 2}])
    mark = journal.mark()
    assert mark == (tmp_path / "rows.jsonl").stat().st_size
    journal.append([{"round": 3}])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"round": 4, "tr')

    reopened = Journal(tmp_path / "rows.jsonl")
    reopened.rewind(mark)
    assert list(reopened) == [{"round": 1, "name": "naïve"}, {"round": 2}]
    reopened.append([{"round": 5}])
    assert [
        json.loads(line)["round"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    ] == [1, 2, 5]


@pytest.mark.parametrize("missing", [False, True])
def test_a_journal_that_lost_rows_is_refused(missing, tmp_path):
    journal = Journal(tmp_path / "rows.jsonl")
    journal.append([{"round": 1}, {"round": 2}])
    mark = journal.mark()
    if missing:
        (tmp_path / "rows.jsonl").unlink()
    else:
        os.truncate(tmp_path / "rows.jsonl", mark - 1)
    with pytest.raises(
        RunError, match=r"rows.jsonl is shorter than when the checkpoint was written"
    ):
        journal.rewind(mark)
