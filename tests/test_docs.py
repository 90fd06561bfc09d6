"""The pages of the documentation: their examples run, and their tables are complete."""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path

import pytest

from equipoise import losses, methods, metrics, parity, tasks, tracking

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    "page",
    [
        "architecture",
        "client2vec",
        "client_index",
        "metrics",
        "figures",
        "report",
        "own_models",
        "tracking",
    ],
)
def test_the_examples_run(page, monkeypatch):
    # Examples register their own methods.
    monkeypatch.setattr(methods, "_PARTS", dict(methods._discover()))
    monkeypatch.setattr(methods, "_METHODS", set(methods._METHODS))
    monkeypatch.setattr(tasks, "_TASKS", dict(tasks._discover()))
    monkeypatch.setattr(metrics, "_METRICS", dict(metrics._discover()))
    monkeypatch.setattr(tracking, "TRACKERS", dict(tracking.TRACKERS))
    monkeypatch.setattr(losses, "LOSSES", dict(losses.LOSSES))
    failed, tried = doctest.testfile(
        str(DOCS / f"{page}.md"), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0
    assert tried >= 5


def long_lines(text):
    """Return the numbers of lines that could be wrapped: not tables, code, HTML or single words."""
    found, code = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            code = not code
        elif len(line) > 100 and not code and not line.lstrip().startswith(("|", "<")):
            found += [number] if " " in line.strip()[2:] else []
    return found


def test_long_lines_are_found():
    long = "word " * 30
    text = f"{long}\n| {long}\n```\n{long}\n```\n- {long}\n<img {long}>\n- {'x' * 120}\n{long[:99]}"
    assert long_lines(text) == [1, 6]


def test_prose_is_wrapped_at_100_characters():
    home = DOCS.parent
    pages = [*DOCS.rglob("*.md"), *(home / "benchmarks").glob("*.md"), *home.glob("*.md")]
    # The others are generated.
    written = [page for page in pages if not {"_build", "methods"} & set(page.parts)]
    assert len(written) > 30
    found = {str(page.relative_to(home)): long_lines(page.read_text()) for page in written}
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_the_architecture_names_every_part():
    text = (DOCS / "architecture.md").read_text()
    for slot, kind in (
        ("sampler", "Sampler"),
        ("local", "LocalRule"),
        ("aggregation", "Aggregation"),
        ("view", "View"),
        ("guard", "Guard"),
    ):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{kind}` |")]
        own = {
            n
            for n in methods.fitting(slot)
            if methods.part_class(n).__module__.startswith("equipoise.")
        }
        assert set(re.findall("`([a-z]+)`", row.split("|", 3)[3])) == own


def test_the_page_on_security_names_every_guard_and_its_options():
    text = (DOCS / "security.md").read_text()
    table = text.partition("| guard or aggregation |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {re.search("`(?:guard: )?([a-z]+)`", line)[1]: line for line in table}
    assert set(named) == {*methods.fitting("guard"), "median", "trimmedmean"}
    for name, line in named.items():
        assert set(methods.options_of(name)) <= set(re.findall("`([a-z]+)`", line.split("|")[3]))


def test_the_architecture_names_every_task():
    table = (DOCS / "architecture.md").read_text().split("\n## Tasks\n")[1].split("\n```")[0]
    own = {
        name
        for name, task in tasks._discover().items()
        if task.__module__.startswith("equipoise.tasks.")
    }
    assert set(re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)) == own
    for name in own:
        assert f"`{tasks.build(name).score}`" in next(
            line for line in table.splitlines() if line.startswith(f"| `{name}`")
        )


def test_the_page_on_own_models_lists_every_loss_with_its_tasks_and_options():
    table = (
        (DOCS / "own_models.md")
        .read_text()
        .split("\n## A loss for the whole task\n")[1]
        .split("\n```python")[0]
    )
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    listed = {
        name.strip("`"): (task, re.findall("`([a-z]+)`", options))
        for name, task, options, _ in rows
    }
    own = {
        name: entry
        for name, entry in losses.LOSSES.items()
        if getattr(losses, entry.make.__name__, None) is entry.make  # not those of doctests
    }
    assert listed == {
        name: (", ".join(entry.tasks), losses.options_of(name)) for name, entry in own.items()
    }


def test_the_page_on_metrics_lists_every_metric_of_outputs():
    text = (
        (DOCS / "metrics.md")
        .read_text()
        .split("\n## Metrics of outputs\n")[1]
        .split("\n```python")[0]
    )
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    listed = {name.strip("`"): (task, better) for name, task, _, better, _ in rows}
    own = [metric for metric in metrics._discover().values() if not metric._own]
    assert listed == {m.name: (m.tasks[0], "high" if m.higher_is_better else "low") for m in own}


def test_the_page_on_metrics_has_every_figure_of_attributes():
    text = (
        (DOCS / "metrics.md").read_text().split("\n## Attributes of samples\n")[1].split("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall("`([a-z_]+)`", row)}
    assert listed == {*parity.RATES, *parity.FIGURES, "worst_value", "worst"}


def test_the_page_on_tracking_has_every_tracker_and_its_options():
    text = (DOCS / "tracking.md").read_text()
    for name, place in tracking.TRACKERS.items():
        if not isinstance(place, str):
            continue
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        options = [
            field.name for field in dataclasses.fields(tracking.tracker_of(name)) if field.init
        ]
        assert set(options) <= set(re.findall("`([a-z]+)`", row.split("|")[3]))
