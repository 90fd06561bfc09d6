"""Attributes of samples on Flower: clients count, send counts, and the server checks them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from equipoise import tasks
from equipoise.attributes import column_of, read_column
from equipoise.config import load_experiment
from equipoise.errors import RunError
from equipoise.flower.checks import Misfit
from equipoise.flower.reports import Declared
from equipoise.flower.schema import Schema
from tests.attributed import people
from tests.flower.loop import misbehaving, own_nodes, run_on_loop, write_experiment
from tests.flower.parity import compare

EVALUATION = {"local": True, "min_cell": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four clients' directories; each has women and men, and people of several origins."""
    folder = tmp_path_factory.mktemp("attributes")
    x, y, attributes = people()
    for client in range(4):
        own = np.arange(len(y)) % 4 == client
        (folder / "silos" / f"client-{client}").mkdir(parents=True)
        columns = {f"attribute.{name}": values[own] for name, values in attributes.items()}
        np.savez(folder / "silos" / f"client-{client}" / "data.npz", x=x[own], y=y[own], **columns)
    return folder


def experiment(folder, **sections):
    data = {"name": "silos", "root": str(folder / "silos"), "classes": 2}
    sections = {
        "data": data,
        "model": "logistic",
        "training": {"rounds": 2},
        "evaluation": EVALUATION,
        **sections,
    }
    return write_experiment(folder, **sections)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_counts_are_the_same_and_cost_no_message(method, folder):
    alone, run, grid = compare(experiment(folder, method=method), folder)
    for key in ("results", "validation"):
        assert set(alone.summary[key]) == set(run.summary[key])
        for model, whose in alone.summary[key].items():
            ours, theirs = (
                whose["seen"]["attributes"],
                run.summary[key][model]["seen"]["attributes"],
            )
            assert ours == theirs
            assert set(ours) == {"sex", "origin"}
    assert alone.summary["results"]["global"]["seen"]["attributes"]["origin"]["withheld"] > 0
    assert grid.kinds.count("evaluate.models") == 8


def test_small_cells_do_not_leave_a_client(folder):
    seen = []

    def look(node, message, reply):
        for name in ("global.val", "global.test"):
            seen.append(
                {} if reply.has_error() else dict(reply.content.metric_records.get(name, {}))
            )
        return reply

    run_on_loop(experiment(folder), own_nodes(folder), tamper=look)
    counts = [
        (read_column(name), value)
        for numbers in seen
        for name, value in numbers.items()
        if read_column(name)
    ]
    assert {name[0] for name, _ in counts} == {"sex", "origin"}
    small = [
        (name, value)
        for name, value in counts
        if name[2] in ("n", "positives", "negatives") and 0 < value < 4
    ]
    assert small == []


def test_a_node_may_withhold_more(folder):
    nodes = own_nodes(folder)
    nodes[1] |= {"min-cell": 50}
    nodes[2] |= {"min-cell": 2}
    run, _ = run_on_loop(experiment(folder), nodes)
    usual, _ = run_on_loop(experiment(folder), own_nodes(folder))
    rows, expected = (
        [
            row
            for row in r.trainer.metrics
            if (row["round"], row["model"], row["split"]) == (2, "global", "test")
        ]
        for r in (run, usual)
    )
    assert "attributes" not in rows[1]
    assert [rows[c] for c in (0, 2, 3)] == [expected[c] for c in (0, 2, 3)]
    found = run.summary["results"]["global"]["seen"]["attributes"]["sex"]
    assert (found["withheld"], found["withheld_clients"]) == (rows[1]["n"], 1)


def changed(**counts):
    """Make a client report other counts of women for the global model on its test data."""

    def wrong(message, reply):
        numbers = dict(reply.content.metric_records["global.test"])
        reply.content["global.test"] = MetricRecord(
            numbers | {column_of("sex", "Female", name): value for name, value in counts.items()}
        )
        return reply

    return wrong


def test_a_client_with_counts_that_cannot_be_right_is_not_evaluated(folder, tmp_path):
    path = experiment(folder, flower={"min_clients": 3, "retries": 0})
    tamper = misbehaving(1, "evaluate.models", 2, changed(n=1e9))
    run, _ = run_on_loop(path, own_nodes(folder), tmp_path / "run", tamper=tamper)
    (reason,) = list(run.trainer.rounds)[-1]["not_evaluated"].values()
    assert reason == "answered with 1e+09 samples by sex, but has 24 in test of the global model"
    assert run.summary["results"]["global"]["seen"]["clients"] == 3
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_wrong_positive_class_is_refused_by_clients(folder):
    path = experiment(folder, evaluation={"positive": 5}, flower={"wait": 0.1})
    assert load_experiment(path).evaluation.positive == 5
    with pytest.raises(RunError, match="evaluation.positive must be a class from 0 to 1, got 5"):
        run_on_loop(path, own_nodes(folder))


@pytest.mark.parametrize(
    "name",
    [
        "[" * 20_000,
        '["sex",  "Female", "n"]',
        column_of("sex", "\x1b[2J", "n"),
        column_of("x" * 301, "Female", "n"),
        column_of("x" * 10**6, "Female", "n"),
    ],
)
def test_names_of_counts_that_no_client_writes_are_ignored(name):
    numbers = Declared(tasks.build("classification")).of_model("global", {"val": 0, "test": 9})
    schema = Schema(client=0, round=1, numbers=numbers, counted={"global.val": 0, "global.test": 9})
    test = MetricRecord({"loss": 0.5, "accuracy": 0.5, name: 5})
    note = ConfigRecord({"client": 0, "round": 1})
    answer = schema.read(RecordDict({"global.test": test, "note": note}))
    assert answer.numbers["global.test"] == {"loss": 0.5, "accuracy": 0.5}


def test_a_reason_shows_the_name_of_an_attribute_in_part():
    schema = Schema(client=0, round=1, numbers={"global.test": {}}, counted={"global.test": 9})
    test = MetricRecord({column_of("x" * 300, "v", "n"): 12})
    note = ConfigRecord({"client": 0, "round": 1})
    with pytest.raises(Misfit, match=r"answered with 12 samples by x+\.\.\. in test of the global"):
        schema.read(RecordDict({"global.test": test, "note": note}))
