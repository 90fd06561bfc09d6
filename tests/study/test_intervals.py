"""Bootstrap intervals over clients: against SciPy, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from equipoise.fairness import per_group, summarize
from equipoise.study.intervals import (
    LEAST_CLIENTS,
    OF_CLIENTS,
    OF_GROUPS,
    interval,
    resampled_interval,
)

GROUPS = [f"g{client % 3}" for client in range(24)]


def scores(seeds=2, clients=24):
    return np.random.default_rng(0).uniform(0.3, 0.9, size=(seeds, clients))


def test_the_mean_has_scipys_interval():
    values = scores(seeds=1)
    found = resampled_interval(values, GROUPS, "mean")
    expected = stats.bootstrap((values[0],), np.mean).confidence_interval
    # Other draws, so only approximately equal.
    assert found == pytest.approx(tuple(expected), abs=0.01)


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("metric", [*OF_CLIENTS, *OF_GROUPS])
def test_metrics_are_those_of_summaries(metric, higher):
    """On all clients, drawn once each, every metric equals that of ``fairness``."""
    values = scores(seeds=1)[0]
    ids = [int(name[1:]) for name in GROUPS]
    whole = summarize(values, ids, higher_is_better=higher).as_dict()
    means = per_group(values, ids, ["g0", "g1", "g2"])
    if metric in OF_CLIENTS:
        found = OF_CLIENTS[metric](values, higher)
        expected = whole["mean" if metric == "loss" else metric]
    else:
        found = OF_GROUPS[metric](np.array(list(means.values())), higher)
        expected = means["g0"] if metric == "groups.NAME" else whole[metric]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "metric", ["mean", "sigma_clients", "worst10", "mean_groups", "groups.NAME"]
)
def test_an_interval_holds_the_value_and_is_the_same_again(metric):
    values, group = scores(), "g1" if metric == "groups.NAME" else ""
    low, high = resampled_interval(values, GROUPS, metric, group=group)
    ids = [int(name[1:]) for name in GROUPS]
    own = [
        per_group(row, ids, ["g0", "g1", "g2"])["g1"]
        if group
        else getattr(summarize(row, ids), metric)
        for row in values
    ]
    assert low < np.mean(own) < high
    assert (low, high) == resampled_interval(values, GROUPS, metric, group=group)


def test_seeds_are_drawn_together():
    """A client keeps its values of all seeds, so repeating a seed has no effect."""
    values = scores(seeds=1)
    once = resampled_interval(values, GROUPS, "sigma_clients")
    assert resampled_interval(
        np.repeat(values, 3, axis=0), GROUPS, "sigma_clients"
    ) == pytest.approx(once, abs=1e-12)


def test_where_there_is_none():
    assert resampled_interval(scores(clients=LEAST_CLIENTS - 1), GROUPS, "mean") is None
    assert resampled_interval(scores(clients=LEAST_CLIENTS), GROUPS, "mean") is not None
    assert resampled_interval(scores(clients=19), GROUPS[:19], "worst10") is None
    assert resampled_interval(scores(), GROUPS, "worst_client") is None
    alone = ["only", *GROUPS[1:]]
    assert resampled_interval(scores(), alone, "mean_groups") is None
    assert resampled_interval(scores(), alone, "mean") is not None


def test_clients_that_are_all_alike_have_an_interval_of_no_width():
    assert resampled_interval(np.full((2, 24), 0.5), GROUPS, "mean") == (0.5, 0.5)
    assert resampled_interval(np.full((2, 24), 0.5), GROUPS, "sigma_clients") == (0.0, 0.0)


@pytest.mark.parametrize("metric", ["mean", "sigma_clients"])
def test_intervals_hold_the_truth_about_as_often_as_they_say(metric):
    random, trials = np.random.default_rng(4), 200
    truth = {"mean": 0.5, "sigma_clients": 12**-0.5}[metric]
    held = 0
    for _ in range(trials):
        low, high = resampled_interval(random.uniform(size=(1, 60)), ["all"] * 60, metric)
        held += low <= truth <= high
    assert 0.88 < held / trials <= 1.0


def rows(values, groups, *, split="test", model="global", unseen=False):
    same = {"round": 1, "model": model, "split": split, "unseen": unseen, "n": 5, "loss": 1.0}
    return [
        {**same, "client": client, "group": group, "accuracy": value}
        for client, (value, group) in enumerate(zip(values, groups, strict=True))
    ]


def test_runs_are_read_by_model_split_and_clients():
    summary = {
        "score": "accuracy",
        "results": {"global": {"seen": {"mean": 0.5}}},
        "validation": {},
    }
    summary["validation"] = summary["results"]
    values = scores()
    runs = [(summary, [*rows(own, GROUPS), *rows(1 - own, GROUPS, split="val")]) for own in values]
    assert interval(runs, "mean", split="test") == resampled_interval(values, GROUPS, "mean")
    assert interval(runs, "val.mean", split="test") == resampled_interval(
        1 - values, GROUPS, "mean"
    )
    assert interval(runs, "mean", split="val") == resampled_interval(1 - values, GROUPS, "mean")
    assert interval(runs, "groups.g2", split="test") == resampled_interval(
        values, GROUPS, "groups.NAME", group="g2"
    )
    assert interval(runs, "unseen.mean", split="test") is None
    assert interval(runs, "bytes_up", split="test") is None
    other = [runs[0], (summary, rows(values[1], GROUPS[::-1]))]
    assert interval(other, "mean_groups", split="test") is None
    assert interval(other, "mean", split="test") == interval(runs, "mean", split="test")
