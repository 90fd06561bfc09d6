"""Values of few samples, and values that several clients share, on the terminal and in reports."""

from __future__ import annotations

import numpy as np
import pytest

from equipoise import Federation, Training
from equipoise.cli.show.run import show_run
from equipoise.report import write_report
from tests.report.pages import Page
from tests.run.small import small_run


def constant(sizes, groups=None):
    """Clients whose samples are all the same. The label of every client is its own.

    So a model predicts the label of one client for all samples. That client has accuracy 1, and all
    others have accuracy 0.
    """
    labels = np.repeat(np.arange(len(sizes)), sizes)
    names = np.array([f"ward {label}" for label in labels])
    return Federation.from_arrays(
        np.zeros((len(labels), 4)),
        labels,
        clients=names,
        groups={f"ward {k}": group for k, group in enumerate(groups)} if groups else None,
        splits=(0.6, 0.2, 0.2),
        name="wards",
    )


def shown(capsys, run):
    """Return what the terminal and the report show."""
    capsys.readouterr()
    show_run(run)
    return capsys.readouterr().out, Page(write_report([run.directory]).read_text())


@pytest.fixture
def untrained(tmp_path):
    def make(*args):
        return small_run(tmp_path / "run", federation=constant(*args), training=Training(rounds=0))

    return make


def test_the_worst_client_has_one_test_sample_and_shares_its_value(untrained, capsys):
    run = untrained([5, 5, 5, 5])
    worst = run.summary["results"]["global"]["seen"]["worst_client_name"]
    terminal, page = shown(capsys, run)
    (line,) = [line for line in terminal.splitlines() if "served worst" in line]
    assert line.split("  ")[0] == worst
    assert line.rstrip().endswith(
        "← served worst (1 test sample; 2 other clients have the same value)"
    )
    assert f"{worst} (0.000; 1 test sample; 2 other clients have the same value)." in page.text
    few = "4 of 4 clients have fewer than 10 test samples, so their values are uncertain."
    assert few in terminal
    assert few in page.text
    (header,) = [line for line in terminal.splitlines() if line.startswith("client")]
    assert "test samples" in header
    for row in page.table("Accuracy of each client").values():
        assert row["test samples"] == "1"


def test_the_worst_client_with_enough_samples_needs_no_words(untrained, capsys):
    run = untrained([60, 60])
    worst = run.summary["results"]["global"]["seen"]["worst_client_name"]
    terminal, page = shown(capsys, run)
    (line,) = [line for line in terminal.splitlines() if "served worst" in line]
    assert line.rstrip().endswith("← served worst")
    assert f"{worst} (0.000)." in page.text
    assert "uncertain" not in terminal + page.text


def test_groups_are_marked_too(untrained, capsys):
    # Groups have 2, 12 and 12 test samples, and each has the client of at least one label.
    run = untrained([5, 5, 60, 60], ["a", "a", "b", "c"])
    part = run.summary["results"]["global"]["seen"]
    terminal, page = shown(capsys, run)
    start = terminal.index("who is left behind")
    rows = {line.split()[0]: line.split() for line in terminal[start:].splitlines()[2:5]}
    assert [rows[group][2] for group in "abc"] == ["2", "12", "12"]
    tied = [group for group, mean in part["groups"].items() if mean == 0]
    name = part["worst_group_name"]
    said = ["2 test samples"] if name == "a" else []
    said += ["1 other group has the same value"] if len(tied) == 2 else []
    assert said
    (line,) = [line for line in terminal.splitlines() if "served worst" in line]
    assert line.split()[0] == name
    assert f"({'; '.join(said)})" in line
    assert f"group {name} ({'; '.join(['0.000', *said])}) and client" in page.text
    assert "2 of 4 clients have fewer than 10 test samples" in terminal
