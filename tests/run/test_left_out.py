"""Clients whose updates were left out of rounds, in summaries, on the terminal and in reports."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from equipoise import Federation, Training
from equipoise.cli.show.run import show_run
from equipoise.optimizers import Sgd
from equipoise.report import write_report
from equipoise.run.left_out import MOST_LISTED, updates_left_out
from tests.report.pages import Page
from tests.run.small import Stop, promised, rows_of, small_run, stop_after

REASON = "answered with NaN or infinity in features.1.weight"
TRAINING = Training(rounds=4, cohort=3, batch_size=4, optimizer=Sgd(lr=0.1))


def diverging(name="south & east"):
    """A regression with four named clients. The inputs of the second one are much too large."""
    rng = np.random.default_rng(0)
    clients = np.repeat(["north", name, "west", "centre"], 20)
    x = rng.normal(size=(80, 5))
    y = x @ rng.normal(size=5)
    x[clients == name] *= 3000
    return Federation.from_arrays(
        x, y, clients=clients, splits=(0.5, 0.25, 0.25), task="regression", name="wards"
    )


def run_of(out=None, **options):
    options = {"training": TRAINING, "federation": diverging(), **options}
    return small_run(out, model={"name": "mlp", "hidden": [8]}, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    return run_of(directory)


def test_rounds_are_counted_by_hand():
    rows = [
        {"cohort": 4},
        {"cohort": 2, "clients": [0, 2], "left_out": {"1": "lost after training"}},
        {"cohort": 2, "clients": [1, 3]},
        # Not everyone was registered then, so it is not known who took part.
        {"cohort": 3},
        {"cohort": 1, "clients": [0], "left_out": {"1": REASON, "3": "not connected"}},
    ]
    assert updates_left_out(lambda: rows, 4, "abcd".__getitem__) == {
        "clients": 2,
        "worst": [
            {
                "client": 1,
                "name": "b",
                "rounds_left_out": 2,
                "rounds_asked": 4,
                "reason": REASON,
            },
            {
                "client": 3,
                "name": "d",
                "rounds_left_out": 1,
                "rounds_asked": 3,
                "reason": "not connected",
            },
        ],
    }
    assert updates_left_out(lambda: rows[:1], 4, "abcd".__getitem__) == {}


def test_thousands_of_clients_are_counted_but_not_listed():
    left_out = {str(client): "not connected" for client in range(5000)}
    rows = [
        {"cohort": 1, "clients": [5000], "left_out": left_out},
        {"cohort": 5000, "clients": [*range(4998), 4999, 5000], "left_out": {"4998": "late"}},
    ]
    found = updates_left_out(lambda: rows, 5001, str)
    assert (found["clients"], len(found["worst"])) == (5000, MOST_LISTED)
    assert [entry["client"] for entry in found["worst"][:3]] == [4998, 0, 1]


def test_a_diverging_client_is_in_the_summary(finished):
    rows = rows_of(finished.directory, "rounds")
    asked = [row for row in rows if "1" in row.get("left_out", {}) or 1 in row["clients"]]
    assert 0 < len(asked) < len(rows)
    assert finished.summary["updates_left_out"] == {
        "clients": 1,
        "worst": [
            {
                "client": 1,
                "name": "south & east",
                "rounds_left_out": len(asked),
                "rounds_asked": len(asked),
                "reason": REASON,
            }
        ],
    }


def test_a_resumed_or_longer_run_has_the_same_summary(finished, tmp_path):
    with pytest.raises(Stop):
        run_of(tmp_path / "resumed", on_round=stop_after(3))
    run_of(tmp_path / "resumed", resume=True)
    run_of(tmp_path / "longer", training=replace(TRAINING, rounds=2))
    run_of(tmp_path / "longer", resume=True)
    for name in ("resumed", "longer"):
        assert promised(tmp_path / name) == promised(finished.directory)


def test_runs_without_such_clients_have_no_entry(tmp_path):
    assert "updates_left_out" not in small_run(rounds=1).summary


def test_the_terminal_lists_them(finished, capsys):
    show_run(finished)
    text = capsys.readouterr().out
    times = finished.summary["updates_left_out"]["worst"][0]["rounds_left_out"]
    _, _, after = text.partition("updates left out of rounds: 1 client")
    shown = after.splitlines()[2].strip().split("  ")
    assert shown == ["south & east", f"{times} of {times}", REASON]


def test_the_report_shows_them_also_for_unfinished_runs(finished, tmp_path):
    with pytest.raises(Stop):
        run_of(tmp_path / "part", on_round=stop_after(3))
    name = "south & east"
    for directory in (finished.directory, tmp_path / "part"):
        times = sum("left_out" in row for row in rows_of(directory, "rounds"))
        page = Page(write_report([directory]).read_text())
        said = f"Updates of clients were left out of rounds: {name} ({times} of {times} rounds)."
        assert said in page.text
        assert page.table("Updates left out: 1 client") == {
            name: {
                "client": name,
                "rounds left out": f"{times} of {times}",
                "last reason": REASON,
            }
        }
        # Each client that was asked got one message, also the one whose update was left out.
        assert "A client that is asked gets 1.0 messages per round" in page.text


def test_a_warning_names_the_client_and_gives_advice_once(caplog):
    run = run_of()
    where = [row["round"] for row in run.trainer.rounds if "left_out" in row]
    said = [f"round {n} continues without client 1 (south & east): {REASON}" for n in where]
    said[0] += "; a smaller learning rate or training.clip may help"
    assert len(said) > 1
    assert caplog.messages == said


def test_the_report_of_several_runs_says_so(finished, tmp_path):
    run_of(tmp_path / "other", method="fedprox")
    page = Page(
        write_report([finished.directory, tmp_path / "other"], tmp_path / "both.html").read_text()
    )
    for method in ("fedavg", "fedprox"):
        said = f"Updates of clients were left out of rounds of {method}, seed 3: south & east ("
        assert said in page.text


def test_runs_of_earlier_releases_are_read(tmp_path):
    """Their summaries lack the entry, and it is computed from the journal."""
    directory = tmp_path / "older"
    run_of(directory)
    summary = json.loads((directory / "summary.json").read_text())
    del summary["updates_left_out"]
    (directory / "summary.json").write_text(json.dumps(summary))
    (directory / "SHA256SUMS").unlink()
    assert "Updates left out: 1 client" in Page(write_report([directory]).read_text()).tables
