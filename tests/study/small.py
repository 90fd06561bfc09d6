"""Functions to run studies and to read what they write."""

from __future__ import annotations

import sys

import pytest

from equipoise.cli import main


def snapshot(directory):
    """Return inode, modification time and content of all files."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files
    }


def compare(monkeypatch, capsys, *arguments):
    """Call ``equipoise compare``, and return its exit code and output."""
    monkeypatch.setattr(sys, "argv", ["equipoise", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0, *capsys.readouterr()
