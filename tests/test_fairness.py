"""The fairness metrics: numbers by hand, properties, refusals, and the documentation."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import InputError
from equipoise.fairness import METRICS, Summary, jain_index, pair_sum, per_group, summarize, tails

NAN = math.nan

# Six clients of three groups. Means of the groups: (0.9 + 0.8 + 0.7) / 3 = 0.8, (0.6 + 0.4) / 2 =
# 0.5, 0.2.
VALUES = [0.9, 0.6, 0.8, 0.2, 0.7, 0.4]
GROUPS = [0, 1, 0, 2, 0, 1]
SIZES = [10, 20, 10, 5, 30, 25]

accuracies = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=40
)


def _columns(clients: list[tuple[float, int, int]]) -> tuple[list[float], list[int], list[int]]:
    values, groups, sizes = zip(*clients, strict=True)
    return list(values), list(groups), list(sizes)


def test_every_metric_by_hand() -> None:
    gap = [0.1, 0.3, 0.1, 0.3, 0.1, 0.3]
    summary = summarize(VALUES, GROUPS, weights=SIZES, gap=gap)
    expected = {
        "mean": 3.6 / 6,
        "mean_samples": (9 + 12 + 8 + 1 + 21 + 10) / 100,
        "mean_groups": (0.8 + 0.5 + 0.2) / 3,
        "sigma_clients": math.sqrt((0.09 + 0 + 0.04 + 0.16 + 0.01 + 0.04) / 6),
        # Pairs with the first client, with the second, and so on.
        "pair_sum": 2
        * ((9 + 1 + 49 + 4 + 25) + (4 + 16 + 1 + 4) + (36 + 1 + 16) + (25 + 4) + 9)
        / 100,
        "sigma_groups": math.sqrt((0.09 + 0 + 0.09) / 3),
        "worst10": 0.2,
        "best10": 0.9,
        "worst_client": 0.2,
        "worst_group": 0.2,
        "best_group": 0.8,
        "group_gap": 0.6,
        "gap_variance": 0.01,
        "gap_pair_sum": 2 * 9 * 0.2**2,
        "jain": 3.6**2 / (6 * (0.81 + 0.36 + 0.64 + 0.04 + 0.49 + 0.16)),
        "worst_client_id": 3,
        "worst_group_id": 2,
        "best_group_id": 0,
        "clients": 6,
        "left_out": 0,
    }
    assert summary.as_dict() == pytest.approx(expected)


def test_for_losses_the_highest_is_the_worst() -> None:
    loss = summarize(VALUES, GROUPS, weights=SIZES, higher_is_better=False)
    accuracy = summarize(VALUES, GROUPS, weights=SIZES)
    assert (loss.worst_client, loss.worst_client_id) == (0.9, 0)
    assert (loss.worst_group, loss.worst_group_id) == (accuracy.best_group, accuracy.best_group_id)
    assert (loss.best_group, loss.best_group_id) == (accuracy.worst_group, accuracy.worst_group_id)
    assert (loss.worst10, loss.best10) == (accuracy.best10, accuracy.worst10)
    for name in (
        "mean",
        "mean_samples",
        "mean_groups",
        "sigma_clients",
        "sigma_groups",
        "group_gap",
        "jain",
    ):
        assert getattr(loss, name) == getattr(accuracy, name)


@pytest.mark.parametrize(
    ("clients", "tenth"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3), (70, 7), (101, 11)]
)
def test_a_tenth_is_rounded_up(clients: int, tenth: int) -> None:
    shuffled = np.random.default_rng(clients).permutation(clients)
    worst, best = tails(shuffled)
    assert worst == pytest.approx(sum(range(tenth)) / tenth)
    assert best == pytest.approx(sum(range(clients - tenth, clients)) / tenth)


def test_clients_without_a_value_are_left_out_and_counted() -> None:
    full = summarize([0.5, 0.25], [0, 2], weights=[4, 8])
    holed = summarize([NAN, 0.5, NAN, 0.25], [1, 0, 0, 2], weights=[0, 4, 0, 8])
    assert holed.left_out == 2
    assert holed.worst_client_id == 3
    unchanged = {f.name for f in fields(Summary)} - {"left_out", "worst_client_id"}
    assert {name: getattr(holed, name) for name in unchanged} == {
        name: getattr(full, name) for name in unchanged
    }


def test_a_value_measured_on_no_samples_is_no_value() -> None:
    assert summarize([0.0, 0.75], [0, 0], weights=[0, 3]).mean == 0.75


def test_a_diverged_client_cannot_vanish_from_the_mean() -> None:
    with pytest.raises(
        InputError, match="values has nan for client 1, which has 7 samples in weights"
    ):
        summarize([0.5, NAN], [0, 0], weights=[3, 7])


def test_gaps_are_of_the_clients_that_have_one() -> None:
    summary = summarize([0.5, 0.5, NAN], [0, 0, 0], gap=[1.0, NAN, 3.0])
    assert (summary.gap_variance, summary.gap_pair_sum) == (pytest.approx(1.0), pytest.approx(8.0))
    for summary in (summarize([0.5], [0], gap=[NAN]), summarize([0.5], [0])):
        assert summary.gap_variance is None
        assert summary.gap_pair_sum is None


@given(accuracies)
def test_sums_over_pairs_by_definition(clients: list[tuple[float, int, int]]) -> None:
    values, groups, _ = _columns(clients)
    summary = summarize(values, groups, gap=values)
    total = 0.0
    for one in values:
        for other in values:
            total += (one - other) ** 2
    assert (
        pair_sum(values)
        == summary.pair_sum
        == summary.gap_pair_sum
        == pytest.approx(total, abs=1e-9)
    )
    assert summary.pair_sum == pytest.approx(
        2 * len(values) ** 2 * summary.sigma_clients**2, abs=1e-9
    )


def test_ties_go_to_the_lowest_number() -> None:
    tied = summarize([0.5, 0.5, 0.5], [4, 2, 9])
    assert (tied.worst_client_id, tied.worst_group_id, tied.best_group_id) == (0, 2, 2)


def test_no_weights_no_mean_over_samples() -> None:
    assert summarize(VALUES, GROUPS).mean_samples is None


def test_jain_by_hand() -> None:
    assert jain_index([1, 2, 3]) == pytest.approx(36 / (3 * 14))
    assert jain_index([0, 0, 0]) == 1.0
    assert jain_index([1e-200, 1e-200]) == 1.0
    assert jain_index([1e200, 0]) == 0.5


def test_per_group_names_every_group() -> None:
    means = per_group([0.5, 1.0, 0.25, NAN], [0, 0, 1, 2], ["plain", "inverted", "rotated"])
    assert means == {"plain": 0.75, "inverted": 0.25, "rotated": None}
    assert per_group([0.5, 0.0], [0, 0], ["plain"], weights=[3, 0]) == {"plain": 0.5}


def test_per_group_refuses_a_group_without_a_name() -> None:
    with pytest.raises(InputError, match="groups has group 2, but names has only 2 names"):
        per_group([0.5, 1.0], [0, 2], ["plain", "inverted"])


def test_as_dict_is_json_in_the_order_of_the_metrics() -> None:
    row = summarize(VALUES, GROUPS, weights=SIZES, gap=VALUES).as_dict()
    assert list(row)[: len(METRICS)] == list(METRICS)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


@given(clients=accuracies, seed=st.integers(0, 1000))
def test_the_order_of_clients_does_not_matter(
    clients: list[tuple[float, int, int]], seed: int
) -> None:
    shuffled = [clients[i] for i in np.random.default_rng(seed).permutation(len(clients))]
    rows = []
    for order in (clients, shuffled):
        values, groups, sizes = _columns(order)
        rows.append(summarize(values, groups, weights=sizes, gap=values).as_dict())
    for name in METRICS:
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-9, abs=1e-12)


@given(clients=accuracies)
def test_metrics_bound_each_other(clients: list[tuple[float, int, int]]) -> None:
    values, groups, sizes = _columns(clients)
    s = summarize(values, groups, weights=sizes)
    slack = 1e-12
    ascending = [s.worst_client, s.worst10, s.mean, s.best10, max(values)]
    assert all(a <= b + slack for a, b in pairwise(ascending))
    assert s.worst_client - slack <= s.worst_group <= s.mean_groups + slack
    assert s.mean_groups - slack <= s.best_group <= max(values) + slack
    assert s.mean_samples is not None
    assert min(values) - slack <= s.mean_samples <= max(values) + slack
    assert 1 / len(values) - slack <= s.jain <= 1
    assert s.group_gap == pytest.approx(s.best_group - s.worst_group, abs=slack)
    # Popoviciu: a standard deviation is at most half the range.
    assert s.sigma_groups <= s.group_gap / 2 + slack
    assert s.sigma_clients <= (max(values) - min(values)) / 2 + slack


@given(clients=accuracies)
def test_metrics_match_plain_loops(clients: list[tuple[float, int, int]]) -> None:
    values, groups, sizes = _columns(clients)
    count = len(values)
    mean = sum(values) / count
    members = {
        g: [v for v, h in zip(values, groups, strict=True) if h == g] for g in sorted(set(groups))
    }
    means = {g: sum(vs) / len(vs) for g, vs in members.items()}
    centre = sum(means.values()) / len(means)
    s = summarize(values, groups, weights=sizes)
    assert s.mean == pytest.approx(mean, abs=1e-12)
    assert s.mean_samples == pytest.approx(
        sum(n * v for v, n in zip(values, sizes, strict=True)) / sum(sizes), abs=1e-12
    )
    assert s.mean_groups == pytest.approx(centre, abs=1e-12)
    assert s.sigma_clients == pytest.approx(
        math.sqrt(sum((v - mean) ** 2 for v in values) / count), abs=1e-9
    )
    assert s.sigma_groups == pytest.approx(
        math.sqrt(sum((m - centre) ** 2 for m in means.values()) / len(means)), abs=1e-9
    )
    assert means[s.worst_group_id] == pytest.approx(min(means.values()), abs=1e-12)
    assert values[s.worst_client_id] == min(values)


@given(value=st.floats(0, 1), groups=st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_equal_clients_leave_nothing_to_even_out(value: float, groups: list[int]) -> None:
    s = summarize([value] * len(groups), groups)
    assert s.jain == pytest.approx(1)
    assert max(s.sigma_clients, s.sigma_groups, s.group_gap) == pytest.approx(0, abs=1e-12)


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_one_group_has_no_spread_and_one_client_a_group_is_the_spread_over_clients(
    values: list[float],
) -> None:
    together = summarize(values, [3] * len(values))
    assert together.sigma_groups == together.group_gap == 0
    assert together.mean_groups == pytest.approx(together.mean, abs=1e-12)
    apart = summarize(values, range(len(values)))
    assert apart.sigma_groups == pytest.approx(apart.sigma_clients, abs=1e-12)
    assert apart.mean_groups == pytest.approx(apart.mean, abs=1e-12)


@given(value=st.floats(1e-6, 1e6), count=st.integers(1, 50))
def test_one_client_with_everything_gives_the_lowest_jain_index(value: float, count: int) -> None:
    assert jain_index([value] + [0.0] * (count - 1)) == pytest.approx(1 / count)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"values": [], "groups": []},
            "none of the 0 clients in values has a value; at least one is needed",
        ),
        (
            {"values": [NAN], "groups": [0]},
            "none of the 1 clients in values has a value; at least one is needed",
        ),
        (
            {"values": [0.5, math.inf]},
            "values has inf for client 1; only finite numbers are valid",
        ),
        (
            {"values": [NAN, -math.inf]},
            "values has -inf for client 1; only finite numbers are valid",
        ),
        ({"values": 0.5}, "values must have one number per client, got an array of shape ()"),
        ({"values": ["a", "b"]}, "values must have one number per client, got ['a', 'b']"),
        ({"groups": [0]}, "groups has 1 entries, but values has 2; one per client is needed"),
        ({"groups": [0, -1]}, "groups has -1 for client 1; only whole numbers from 0 are valid"),
        (
            {"groups": [0.5, 1]},
            "groups has 0.5 for client 0; only whole numbers from 0 are valid",
        ),
        (
            {"groups": [0, NAN]},
            "groups has nan for client 1; only whole numbers from 0 are valid",
        ),
        (
            {"groups": [0, math.inf]},
            "groups has inf for client 1; only whole numbers from 0 are valid",
        ),
        ({"weights": [1]}, "weights has 1 entries, but values has 2; one per client is needed"),
        (
            {"weights": [1, -2]},
            "weights has -2.0 for client 1; only numbers of samples from 0 are valid",
        ),
        (
            {"weights": [NAN, 1]},
            "weights has nan for client 0; only numbers of samples from 0 are valid",
        ),
        (
            {"weights": [0, 0]},
            "none of the 2 clients in values has a value; at least one is needed",
        ),
        ({"gap": [0.5]}, "gap has 1 entries, but values has 2; one per client is needed"),
        (
            {"gap": [NAN, math.inf]},
            "gap has inf for client 1; only finite numbers are valid",
        ),
    ],
)
def test_refusals_name_the_value(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        summarize(**{"values": [0.5, 0.6], "groups": [0, 1], **arguments})  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize("metric", [tails, jain_index])
def test_empty_input_is_refused(metric: object) -> None:
    with pytest.raises(InputError, match="values is empty; at least one client is needed"):
        metric([])  # type: ignore[operator]


def test_the_documentation_quotes_every_metric_as_it_is() -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [
        line
        for line in page.splitlines()
        if line.startswith("| `") and line.split("`")[1] in METRICS
    ]
    cells = {
        name: (metric.formula, metric.description, metric.better)
        for name, metric in METRICS.items()
    }
    assert rows == [f"| `{name}` | {' | '.join(metric)} |" for name, metric in cells.items()]
