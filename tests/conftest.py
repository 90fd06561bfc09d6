"""Fixtures for tests of several folders."""

from __future__ import annotations

import sys

import hypothesis
import pytest

import equipoise.cli

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("equipoise", deadline=None)
hypothesis.settings.load_profile("equipoise")


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Run a command in an empty directory; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["equipoise", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            equipoise.cli.main()
        return end.value.code or 0, *capsys.readouterr()

    return run
