"""The pages on architecture, metrics and figures: their examples run, and the tables name what there is."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from equipoise import methods, tasks

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["architecture", "metrics", "figures", "report"])
def test_the_examples_run(page, monkeypatch):
    # Examples register methods of their own.
    monkeypatch.setattr(methods, "_PARTS", dict(methods._discover()))
    monkeypatch.setattr(methods, "_METHODS", set(methods._METHODS))
    monkeypatch.setattr(tasks, "_TASKS", dict(tasks._discover()))
    failed, tried = doctest.testfile(
        str(DOCS / f"{page}.md"), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0
    assert tried >= 5


def test_the_architecture_names_every_part():
    text = (DOCS / "architecture.md").read_text()
    for slot, kind in (
        ("sampler", "Sampler"),
        ("local", "LocalRule"),
        ("aggregation", "Aggregation"),
        ("view", "View"),
    ):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{kind}` |")]
        own = {n for n in methods.fitting(slot) if methods.part_class(n).__module__.startswith("equipoise.")}
        assert set(re.findall("`([a-z]+)`", row.split("|", 3)[3])) == own


def test_the_architecture_names_every_task():
    table = (DOCS / "architecture.md").read_text().split("\n## Tasks\n")[1].split("\n```")[0]
    own = {name for name, task in tasks._discover().items() if task.__module__.startswith("equipoise.tasks.")}
    assert set(re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)) == own
    for name in own:
        assert f"`{tasks.build(name).score}`" in next(
            line for line in table.splitlines() if line.startswith(f"| `{name}`")
        )
