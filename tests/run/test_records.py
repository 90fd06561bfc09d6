"""Rows of clients, and summaries of rows, against numbers computed by hand."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import Evaluation, Federation, fairness, tasks, train
from equipoise.federation import Split
from equipoise.metrics import Metric
from equipoise.metrics import build as build_metric
from equipoise.run.client_rows import Holders, client_rows
from equipoise.run.records import summarize_rows
from tests.run.small import rows_of, small_run

TASK = tasks.build("classification")


def four_clients():
    """Clients of 2, 0, 1 and 3 test samples, in groups x, y, x, z; the last is unseen."""
    test = Split.from_lists([[4, 5], [], [6], [7, 8, 9]])
    return Federation(
        x=torch.zeros(10, 2),
        y=torch.zeros(10, dtype=torch.int64),
        train=Split.from_lists([[0], [1], [2], [3]]),
        val=Split.from_lists([[], [], [], []]),
        test=test,
        groups=np.array([0, 1, 0, 2]),
        group_names=("x", "y", "z"),
        unseen=np.array([False, False, False, True]),
    )


def row(
    client,
    accuracy,
    *,
    group="x",
    n=10,
    unseen=False,
    model="global",
    split="test",
    loss=1.0,
    **more,
):
    return {
        "round": 3,
        "model": model,
        "split": split,
        "client": client,
        "group": group,
        "unseen": unseen,
        "n": n,
        "loss": loss,
        "accuracy": accuracy,
        **more,
    }


def test_rows_hold_the_clients_with_samples_in_their_order():
    measured = {
        "loss": np.array([0.5, np.nan, 0.25, 2.0]),
        "accuracy": np.array([1.0, np.nan, 0.0, 0.5]),
    }
    rows = client_rows(
        Holders.of(four_clients(), np.arange(4), "test"),
        measured,
        round_=3,
        model="global",
        split="test",
        task=TASK,
        gaps={2: 0.125},
    )
    assert list(rows) == [
        row(0, 1.0, group="x", n=2, loss=0.5),
        row(2, 0.0, group="x", n=1, loss=0.25, gap=0.125),
        row(3, 0.5, group="z", n=3, unseen=True, loss=2.0),
    ]


def test_rows_of_some_clients_take_their_values_by_position():
    measured = {"loss": np.array([7.0, 8.0])}
    holders = Holders.of(four_clients(), np.array([3, 0]), "test")
    rows = client_rows(holders, measured, round_=1, model="personal", split="test", task=TASK)
    assert [(r["client"], r["n"], r["loss"]) for r in rows] == [(3, 3, 7.0), (0, 2, 8.0)]


@pytest.mark.parametrize(
    ("gaps", "metrics", "names"),
    [
        ({}, (), ("x", "y", "z")),
        ({2: 0.125}, (), ("ä%s", '"y"', "%")),
        ({0: 1e-17}, (build_metric("auroc"),), ("x", "y", "z")),
    ],
    ids=["plain", "gap", "metric"],
)
def test_lines_of_rows_are_those_of_json(gaps, metrics, names):
    measured = {
        "loss": np.array([0.1, np.nan, 1 / 3, 1e300]),
        "accuracy": np.array([1.0, np.nan, np.inf, np.nan]),
        "auroc": np.array([0.5, np.nan, np.nan, 7.0]),
        "50%": np.array([-0.0, np.nan, 5e-324, 1e16]),
    }
    federation = replace(four_clients(), group_names=names)
    rows = client_rows(
        Holders.of(federation, np.arange(4), "test"),
        measured,
        round_=3,
        model="global",
        split="test",
        task=TASK,
        gaps=gaps,
        metrics=metrics,
    )
    assert rows.lines() == [json.dumps(row) for row in rows]
    assert len(rows.lines()) == len(rows) == 3
    # Clients 2 and 3 have no valid AUROC.
    assert len(rows.special) == len(gaps) + (2 if metrics else 0)


def test_no_client_with_samples_gives_no_line():
    holders = Holders.of(four_clients(), np.arange(4), "val")
    measured = {"loss": np.full(4, np.nan)}
    rows = client_rows(holders, measured, round_=1, model="global", split="val", task=TASK)
    assert (rows.lines(), list(rows), rows.diverged()) == ([], [], None)


def test_columns_of_seen_clients_leave_out_rows_without_a_value():
    metric = build_metric("auroc")
    measured = {"loss": np.array([0.5, np.nan, 0.25, 2.0]), "auroc": np.array([np.nan, 0, 0.75, 1])}
    rows = client_rows(
        Holders.of(four_clients(), np.arange(4), "test"),
        measured,
        round_=1,
        model="global",
        split="test",
        task=TASK,
        metrics=[metric],
    )
    # Client 3 is unseen, and client 1 has no samples.
    assert rows.of_seen("loss").tolist() == [0.5, 0.25]
    assert rows.sizes_of_seen.tolist() == [2, 1]
    assert rows.of_seen("auroc").tolist() == [0.75]
    assert rows.of_seen("other").tolist() == []


def test_the_first_client_whose_loss_is_not_finite_is_named():
    measured = {"loss": np.array([0.5, np.nan, -np.inf, np.nan])}
    holders = Holders.of(four_clients(), np.arange(4), "test")
    rows = client_rows(holders, measured, round_=1, model="global", split="test", task=TASK)
    assert rows.diverged() == 2


def test_clients_are_described_again_only_if_something_has_changed():
    federation, clients = four_clients(), np.arange(4)
    before = Holders.of(federation, clients, "test")
    assert Holders.of(federation, clients.copy(), "test", before) is before
    changed = [
        (federation, clients[::-1], "test"),
        (federation, clients[:3], "test"),
        (federation, clients, "train"),
        (replace(federation, groups=np.array([0, 1, 2, 2])), clients, "test"),
        (replace(federation, group_names=("x", "y", "u")), clients, "test"),
        (replace(federation, unseen=np.zeros(4, bool)), clients, "test"),
    ]
    for arguments in changed:
        found, fresh = Holders.of(*arguments, before), Holders.of(*arguments)
        assert found is not before
        assert found.texts == fresh.texts


def test_a_summary_worked_out_by_hand():
    rows = [
        row(0, 0.5, group="a", n=10, loss=1.0),
        row(1, 1.0, group="a", n=30, loss=0.5),
        row(4, 0.25, group="b", n=10, loss=3.0),
        row(5, 0.0, group="b", n=50, unseen=True, loss=9.0),
        row(0, 0.0, group="a", split="val", gap=0.1),
        row(4, 0.0, group="b", split="val", gap=0.5),
    ]
    result = summarize_rows(rows, TASK)
    assert set(result) == {"global"}
    seen, unseen = result["global"]["seen"], result["global"]["unseen"]
    assert seen["mean"] == pytest.approx(1.75 / 3)
    assert seen["mean_samples"] == pytest.approx((5 + 30 + 2.5) / 50)
    assert seen["mean_groups"] == pytest.approx((0.75 + 0.25) / 2)
    assert (seen["worst_client"], seen["worst_client_id"]) == (0.25, 4)
    assert (seen["worst_group"], seen["worst_group_name"], seen["best_group_name"]) == (
        0.25,
        "b",
        "a",
    )
    assert seen["group_gap"] == pytest.approx(0.5)
    assert seen["groups"] == {"a": 0.75, "b": 0.25}
    assert seen["loss"] == pytest.approx(1.5)
    # Two clients have a gap, 0.1 and 0.5: each is 0.2 from their mean.
    assert seen["gap_variance"] == pytest.approx(0.04)
    assert "worst_group_id" not in seen
    assert (
        unseen["mean"],
        unseen["worst_client_id"],
        unseen["clients"],
        unseen["gap_variance"],
    ) == (0.0, 5, 1, None)
    assert unseen["groups"] == {"b": 0.0}


def test_a_summary_is_that_of_fairness_for_random_rows():
    rng = np.random.default_rng(0)
    rows = [
        row(
            client,
            float(rng.random()),
            group="abcd"[client % 4],
            n=int(rng.integers(1, 50)),
            gap=float(rng.normal()),
        )
        for client in range(37)
    ]
    found = summarize_rows(rows, TASK)["global"]["seen"]
    wanted = fairness.summarize(
        [r["accuracy"] for r in rows],
        [r["client"] % 4 for r in rows],
        weights=[r["n"] for r in rows],
        gap=[r["gap"] for r in rows],
    ).as_dict()
    for name in fairness.METRICS:
        assert found[name] == pytest.approx(wanted[name], rel=1e-12), name


def test_gaps_of_clients_without_test_samples_count():
    rows = [row(0, 0.5), *(row(k, 0.5, split="val", gap=gap) for k, gap in ((0, 0.1), (1, 0.5)))]
    for split in ("test", "val"):
        seen = summarize_rows(rows, TASK, split=split)["global"]["seen"]
        # Each is 0.2 from the mean, and they are 0.4 from each other, counted twice.
        assert seen["gap_variance"] == pytest.approx(0.04)
        assert seen["gap_pair_sum"] == pytest.approx(0.32)


def test_global_and_personal_models_are_summarised_apart():
    rows = [
        row(0, 0.5),
        row(1, 0.75),
        row(0, 0.25, model="personal"),
        row(1, 0.75, split="val", gap=1.0),
    ]
    result = summarize_rows(rows, TASK)
    assert result["global"]["seen"]["mean"] == 0.625
    assert result["personal"]["seen"]["mean"] == 0.25
    # The gap is that of the global model; a personal model has none.
    assert result["global"]["seen"]["gap_variance"] == 0.0
    assert result["personal"]["seen"]["gap_variance"] is None
    assert summarize_rows(rows, TASK, split="val")["global"]["seen"]["clients"] == 1
    assert summarize_rows([], TASK) == {}


def test_a_regression_is_judged_by_its_loss_and_the_worst_client_has_the_largest():
    rng = np.random.default_rng(0)
    clients = np.repeat(np.arange(4), 20)
    x = rng.normal(size=(80, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + clients * rng.normal(size=80)
    federation = Federation.from_arrays(x, y, clients=clients, task="regression")
    run = train(federation, model="logistic", rounds=3)
    assert run.summary["score"] == "loss"
    losses = {
        r["client"]: r["loss"]
        for r in run.trainer.metrics
        if (r["round"], r["split"]) == (3, "test")
    }
    module = run.model()
    for client, loss in losses.items():
        held = torch.from_numpy(federation.test.of(client))
        with torch.no_grad():
            error = (module(federation.x[held]).flatten() - federation.y[held]).square().mean()
        assert loss == pytest.approx(float(error), rel=1e-5)
    seen = run.summary["results"]["global"]["seen"]
    assert seen["worst_client_id"] == max(losses, key=losses.get)
    assert seen["worst_client"] == max(losses.values())
    assert seen["mean"] == pytest.approx(sum(losses.values()) / 4)


def test_summaries_with_as_many_groups_as_clients_take_linear_time():
    rows = [row(client, client / 40_000, group=f"g{client}") for client in range(40_000)]
    began = time.process_time()
    summary = summarize_rows(rows, TASK)["global"]["seen"]
    # Searching each group in a list of all groups took 25 s.
    assert time.process_time() - began < 5
    assert summary["groups"]["g10000"] == 0.25


def test_clients_without_samples_are_counted_and_their_groups_stay():
    """Client 1, alone in group y, has no test samples; the last client is unseen."""
    rows = [row(0, 1.0, n=2), row(2, 0.5, n=1), row(3, 0.25, group="z", n=3, unseen=True)]
    auroc = Metric(function=lambda output, y: None, name="auroc", higher_is_better=True)
    found = summarize_rows(
        rows, tasks.build("classification"), federation=four_clients(), metrics=[auroc]
    )["global"]
    assert (found["seen"]["clients"], found["seen"]["left_out"]) == (2, 1)
    assert found["seen"]["groups"] == {"x": 0.75, "y": None}
    assert (found["seen"]["mean_groups"], found["seen"]["worst_group_name"]) == (0.75, "x")
    named = {"0": "undefined", "2": "undefined", "1": "no samples"}
    assert (
        found["seen"]["metrics"]["auroc"]["left_out"],
        found["seen"]["metrics"]["auroc"]["left_out_clients"],
    ) == (
        3,
        named,
    )
    assert (found["unseen"]["left_out"], found["unseen"]["groups"]) == (0, {"z": 0.25})
    without = summarize_rows(rows, tasks.build("classification"))["global"]["seen"]
    assert (without["left_out"], without["groups"]) == (0, {"x": 0.75})


def test_of_local_models_only_clients_that_took_part_are_counted():
    rows = [
        row(0, 1.0, model="local"),
        row(2, 0.5, model="local"),
        row(1, 0.5, model="local", split="val", group="y"),
    ]
    found = summarize_rows(rows, tasks.build("classification"), federation=four_clients())["local"][
        "seen"
    ]
    assert found["left_out"] == 1
    found = summarize_rows(rows[:2], tasks.build("classification"), federation=four_clients())[
        "local"
    ]["seen"]
    assert found["left_out"] == 0


def documented(begin, end):
    """The entries of the tables between two lines of docs/metrics.md."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = [
        line.split("|")[1]
        for line in page.split(begin)[1].split(end)[0].splitlines()
        if line.startswith("| ")
    ]
    return {name for cell in cells for name in re.findall(r"`([a-z_.]+)`", cell)}


def test_the_documentation_lists_what_runs_leave(tmp_path):
    evaluation = Evaluation(metrics=["auroc"], local=True, select="best", select_by="auroc")
    run = small_run(
        tmp_path / "run", {"name": "scaffold", "guard": "norm"}, evaluation=evaluation, rounds=2
    )
    part = run.summary["results"]["global"]["seen"]
    of_part = documented("Each of these parts", "At its top")
    assert set(part) == set(fairness.METRICS) | of_part
    assert set(part["metrics"]["auroc"]) - set(fairness.METRICS) == of_part - {
        "loss",
        "metrics",
    } | {"left_out_clients"}
    top = documented("At its top", "A row of `metrics.jsonl`")
    # These are there only if there is something to report.
    rare = {"bytes_overhead", "slowed_by", "updates_left_out", "without_result"}
    assert set(run.summary) | rare == top | {"results", "validation"}
    in_rows = {name for found in rows_of(tmp_path / "run") for name in found}
    columns = documented("A row of `metrics.jsonl`", "A row of `rounds.jsonl`")
    assert in_rows - {"accuracy", "auroc"} == columns - {"evaluation.metrics"}
    in_rounds = {name for found in rows_of(tmp_path / "run", "rounds") for name in found}
    others = {"left_out", "not_evaluated", "bytes_overhead"}
    assert in_rounds | others == documented("A row of `rounds.jsonl`", "A row of `timings.jsonl`")
    timed = {name for found in rows_of(tmp_path / "run", "timings") for name in found}
    assert timed == {"round", "train", "guard", "combine", "evaluate"}
