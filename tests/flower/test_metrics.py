"""Metrics of outputs on Flower: clients compute them, and the server checks the values."""

from __future__ import annotations

import json

import pytest
from flwr.app import MetricRecord

from equipoise import metrics
from tests.flower.loop import misbehaving, own_nodes, run_on_loop, write_experiment, write_silos
from tests.flower.parity import compare

OWN = """
from equipoise import metrics


@metrics.register(higher_is_better=False, range=(0, 1), tasks=["classification"])
def share_of_wrong_large(output, y):
    large = y >= 5
    return (output.argmax(1) != y)[large].double().mean() if large.any() else None
"""
EVALUATION = {"metrics": ["share_of_wrong_large", "accuracy", "auroc", "ece"], "local": True}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    metrics.names()
    monkeypatch.setattr(metrics, "_METRICS", dict(metrics._METRICS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four clients' directories, and a file with a metric."""
    folder = tmp_path_factory.mktemp("metrics")
    write_silos(folder / "silos")
    (folder / "metric_of_large.py").write_text(OWN)
    return folder


def experiment(folder, **sections):
    # The file is imported once; the registry is restored after each test.
    exec((folder / "metric_of_large.py").read_text(), {"__name__": "metric_of_large"})
    return write_experiment(
        folder,
        **{
            "imports": "metric_of_large.py",
            "training": {"rounds": 2},
            "evaluation": EVALUATION,
            **sections,
        },
    )


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_metrics_of_clients_are_the_same_and_only_numbers_travel(method, folder):
    alone, run, grid = compare(experiment(folder, method=method), folder)
    for one, other in ((alone.summary[key], run.summary[key]) for key in ("results", "validation")):
        assert one.keys() == other.keys()
        for model in one:
            ours, theirs = (part[model]["seen"]["metrics"] for part in (one, other))
            assert ours.keys() == theirs.keys() == set(EVALUATION["metrics"])
            for name in ours:
                assert ours[name].get("mean") == pytest.approx(theirs[name].get("mean"), rel=1e-9)
                assert ours[name]["left_out_clients"] == theirs[name]["left_out_clients"]

    assert (
        run.summary["results"]["global"]["seen"]["metrics"]["share_of_wrong_large"]["clients"] >= 3
    )

    without, other = run_on_loop(
        experiment(folder, method=method, evaluation={"metrics": [], "local": True}),
        own_nodes(folder),
    )
    assert grid.kinds == other.kinds
    counted = ("bytes_up", "bytes_down", "bytes_overhead", "messages")
    ours, theirs = (
        [[row[name] for name in counted] for row in r.trainer.rounds] for r in (run, without)
    )
    assert ours == theirs


def changed(**values):
    """Make a client report other numbers for the global model on its test data."""

    def wrong(message, reply):
        numbers = dict(reply.content.metric_records["global.test"]) | values
        reply.content["global.test"] = MetricRecord(
            {name: value for name, value in numbers.items() if value is not None}
        )
        return reply

    return wrong


def test_implausible_values_are_left_out_and_named(folder, tmp_path):
    wrong = changed(
        auroc=7.5, ece=float("inf"), share_of_wrong_large=float("nan"), client=3.0, round=99.0
    )
    run, _ = run_on_loop(
        experiment(folder),
        own_nodes(folder),
        tmp_path / "run",
        tamper=misbehaving(1, "evaluate.models", 2, wrong),
    )
    rows = [
        row
        for row in run.trainer.metrics
        if (row["round"], row["model"], row["split"]) == (2, "global", "test")
    ]
    assert [row["client"] for row in rows] == [0, 1, 2, 3]
    assert rows[1]["left_out"] == {
        "auroc": "7.5 is not in the range from 0 to 1",
        "ece": "inf is not in the range from 0 to 1",
        "share_of_wrong_large": "undefined",
    }
    assert not {"auroc", "ece", "share_of_wrong_large"} & set(rows[1])
    part = run.summary["results"]["global"]["seen"]
    assert part["clients"] == 4
    assert part["metrics"]["ece"]["left_out_clients"] == {
        "1": "inf is not in the range from 0 to 1"
    }
    assert part["metrics"]["ece"]["mean"] == pytest.approx(
        sum(rows[c]["ece"] for c in (0, 2, 3)) / 3
    )
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize(("accuracy", "said"), [(float("nan"), "nan"), (None, "nothing")])
def test_a_client_without_a_score_is_not_evaluated(accuracy, said, folder):
    path = experiment(
        folder, flower={"min_clients": 3, "retries": 0}, evaluation={"metrics": ["auroc"]}
    )
    tamper = misbehaving(1, "evaluate.models", 2, changed(accuracy=accuracy))
    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    last = list(run.trainer.rounds)[-1]
    assert last["not_evaluated"] == {
        "1": f"answered with {said} as test accuracy of the global model"
    }
