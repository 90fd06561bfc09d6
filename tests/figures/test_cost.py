"""The cost of rounds, counted by hand for a model of three numbers."""

from __future__ import annotations

import json

import pytest

from equipoise.errors import InputError
from equipoise.figures import cost, cost_table
from equipoise.figures.__main__ import main
from tests.figures.linear_runs import linear_run, world

MODEL = 3 * 8
# Training loss and number of steps; the round loop also needs the validation loss after training.
REPORTS = 2 * 8 + 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cost")
    for method in ("fedavg", "ga", "faa"):
        linear_run(folder / method, world(), method)
    return folder


def test_messages_bytes_and_evaluations(runs):
    fedavg, ga, faa = (cost(runs / method) for method in ("fedavg", "ga", "faa"))
    assert (fedavg.rounds, fedavg.messages, fedavg.evaluations) == (2, 1, 0)
    assert (fedavg.bytes_down, fedavg.bytes_up) == (MODEL, MODEL + REPORTS)
    # The loss of the received model is one more number.
    assert (ga.messages, ga.evaluations, ga.bytes_down, ga.bytes_up) == (
        1,
        2,
        MODEL,
        MODEL + REPORTS + 8,
    )
    # Two averages are sent to be evaluated, and two losses come back. That of the received model is
    # not needed.
    assert (faa.messages, faa.evaluations, faa.bytes_down) == (3, 3, 3 * MODEL)
    assert faa.bytes_up == MODEL + REPORTS + 2 * 8


def test_seconds_are_those_of_training_and_aggregation(runs):
    rows = [json.loads(line) for line in (runs / "faa" / "timings.jsonl").read_text().splitlines()]
    assert cost(runs / "faa").seconds == pytest.approx(
        sum(row["train"] + row["combine"] for row in rows) / 2
    )


def test_the_table_compares_with_its_first_row(runs, capsys):
    assert main(["cost", str(runs / "fedavg"), f"ours={runs / 'faa'}"]) == 0
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [row[0] for row in rows] == ["method", "---", "fedavg", "ours"]
    assert (rows[2][4], rows[3][4], rows[3][1], rows[3][6]) == ("1.00", "3.00", "3.0", "3.0")
    assert rows[3][5] == f"{(MODEL + REPORTS + 16) / (MODEL + REPORTS):.2f}"
    assert cost_table({}).count("\n") == 1


def test_a_run_without_counts_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no finished rounds"):
        cost(tmp_path)
    (tmp_path / "rounds.jsonl").write_text('{"round": 1, "cohort": 2, "train_loss": 1.0}\n')
    with pytest.raises(InputError, match="by a release that did not count messages"):
        cost(tmp_path)
