"""Tutorials are carried out as they are written, with small copies of their data."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
import torch

from tests.data.small_adult import write_adult

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


def test_adult(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    write_adult(tmp_path / "data" / "adult", train=900, test=900)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    threads = torch.get_num_threads()
    failed, tried = doctest.testfile(
        str(TUTORIALS / "adult.md"), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    torch.set_num_threads(threads)
    assert failed == 0
    assert (tmp_path / "adult.svg").read_text().count("<use ") >= 6
    assert tried >= 25
    summaries = list((tmp_path / "runs" / "adult").rglob("summary.json"))
    assert len(summaries) == 12
    for path in summaries:
        results = json.loads(path.read_text())["results"]
        assert set(results["global"]["seen"]["attributes"]) == {"sex", "race"}


def test_every_tutorial_is_carried_out():
    assert {page.stem for page in TUTORIALS.glob("*.md")} == {"adult"}
