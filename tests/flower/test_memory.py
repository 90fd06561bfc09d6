"""Memories on disk: only the valid version is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise.errors import RunError
from equipoise.flower.memory import Versions, home_of, memory_root


@pytest.fixture
def memory(tmp_path):
    return Versions(tmp_path, "run", 3)


def tree(value):
    return {"clients": torch.tensor([3]), "kept/head": torch.full((1, 2), float(value))}


def test_versions_stand_beside_each_other(memory):
    for version in (1, 4, 10):
        memory.write(version, tree(version))
    assert memory.versions == [1, 4, 10]
    assert memory.read(4)["kept/head"].tolist() == [[4.0, 4.0]]
    assert memory.read(0) == {}


def test_a_version_that_is_not_there_is_an_error_that_names_those_that_are(memory):
    memory.write(2, tree(2))
    with pytest.raises(RunError, match=r"round 5 is not in .*client-3 \(versions there: 2\)"):
        memory.read(5)


def test_a_repeated_round_writes_the_same_version_again(memory):
    memory.write(1, tree(1))
    memory.write(1, tree(7))
    assert memory.read(1)["kept/head"].tolist() == [[7.0, 7.0]]
    assert memory.versions == [1]


def test_pruning_keeps_what_can_still_be_asked_for(memory):
    for version in range(1, 7):
        memory.write(version, tree(version))
    memory.prune(oldest=3, newest=5)
    assert memory.versions == [3, 4, 5]


def test_runs_and_clients_do_not_mix(tmp_path):
    Versions(tmp_path, "run", 1).write(1, tree(1))
    assert Versions(tmp_path, "run", 2).versions == []
    assert Versions(tmp_path, "other", 1).versions == []


def test_where_memories_are(monkeypatch, tmp_path):
    monkeypatch.setenv("EQUIPOISE_MEMORY", "/somewhere")
    assert str(memory_root()) == "/somewhere"
    assert str(memory_root("/here")) == "/here"
    monkeypatch.delenv("EQUIPOISE_MEMORY")
    assert memory_root().name == ".equipoise"


def test_a_disk_keeps_its_name(tmp_path):
    assert home_of(tmp_path / "a") == home_of(tmp_path / "a") != home_of(tmp_path / "b")


def test_a_home_on_a_file_system_without_links(tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    assert len(home_of(tmp_path)) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_processes_that_create_a_home_at_once_agree(tmp_path, monkeypatch):
    """Several SuperNodes may share a directory, and none of them sees the file of another yet."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert home_of(tmp_path) == home_of(tmp_path)
    assert [(file.name, file.stat().st_mode & 0o777) for file in tmp_path.iterdir()] == [
        ("home", 0o600)
    ]


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"the memory directory .*file/memory cannot be used: Not a"):
        home_of(tmp_path / "file" / "memory")
