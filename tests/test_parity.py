"""Rates by value, demographic parity and equalised odds, against fairlearn and loops."""

from __future__ import annotations

import numpy as np
import pytest

from equipoise.attributes import column_of
from equipoise.parity import FIGURES, compare, of_client, pooled, wrong_counts
from tests.attributed import by_hand

CASES = [(200, 2, 0.5), (500, 4, 0.2), (60, 3, 0.7)]


def drawn(samples, values, share):
    draws = np.random.default_rng(samples)
    of = draws.choice([f"v{number}" for number in range(values)], samples)
    truth = draws.random(samples) < share + 0.1 * (of == "v1")
    return truth, np.where(draws.random(samples) < 0.3, ~truth, truth), of


def counts(truth, predicted, values):
    """Counts of each value, as computed by a client."""
    found = {}
    for value in sorted(set(values)):
        t, p = truth[values == value], predicted[values == value]
        found[value] = {
            "n": len(t),
            "scored": len(t),
            "score_sum": int((t == p).sum()),
            "selected": int(p.sum()),
            "positives": int(t.sum()),
            "negatives": int((~t).sum()),
            "true_positives": int((t & p).sum()),
            "false_positives": int((~t & p).sum()),
        }
    return found


@pytest.mark.parametrize("case", CASES)
def test_rates_and_figures_are_those_of_a_plain_loop(case):
    truth, predicted, values = drawn(*case)
    found = compare(counts(truth, predicted, values))
    rates, spread = by_hand(truth, predicted, values)
    assert found["values"].keys() == rates.keys()
    for value, wanted in rates.items():
        assert {rate: found["values"][value][rate] for rate in wanted} == pytest.approx(
            wanted, abs=1e-12
        )
    worst = min(rates, key=lambda value: rates[value]["accuracy"])
    assert (found["worst_value"], found["worst"]) == (worst, rates[worst]["accuracy"])
    wanted = {
        "score_difference": spread["accuracy"][0],
        "demographic_parity_difference": spread["selection_rate"][0],
        "demographic_parity_ratio": spread["selection_rate"][1],
        "equal_opportunity_difference": spread["tpr"][0],
        "equalized_odds_difference": max(spread["tpr"][0], spread["fpr"][0]),
        "equalized_odds_ratio": min(spread["tpr"][1], spread["fpr"][1]),
    }
    assert wanted.keys() == FIGURES.keys()
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_rates_and_figures_are_those_of_fairlearn(case):
    fairlearn = pytest.importorskip("fairlearn.metrics")
    from sklearn.metrics import accuracy_score

    truth, predicted, values = drawn(*case)
    found = compare(counts(truth, predicted, values))
    of = {
        "n": fairlearn.count,
        "accuracy": accuracy_score,
        "selection_rate": fairlearn.selection_rate,
        "tpr": fairlearn.true_positive_rate,
        "fpr": fairlearn.false_positive_rate,
    }
    truth, predicted = truth.astype(int), predicted.astype(int)
    frame = fairlearn.MetricFrame(
        metrics=of, y_true=truth, y_pred=predicted, sensitive_features=values
    )
    for value, row in frame.by_group.iterrows():
        for name in of:
            assert found["values"][value][name] == pytest.approx(row[name], abs=1e-12)
    assert found["score_difference"] == pytest.approx(frame.difference()["accuracy"], abs=1e-12)
    for name in set(FIGURES) - {"score_difference"}:
        wanted = getattr(fairlearn, name)(truth, predicted, sensitive_features=values)
        assert found[name] == pytest.approx(wanted, abs=1e-12), name


def test_what_cannot_be_computed_is_none():
    only = {"n": 4, "scored": 4, "score_sum": 3, "selected": 0, "positives": 0, "negatives": 4}
    only |= {"true_positives": 0, "false_positives": 0}
    alone = compare({"m": only})
    assert alone["values"]["m"]["tpr"] is None
    assert [alone[name] for name in FIGURES] == [None] * len(FIGURES)
    # Nothing is predicted positive: the difference is 0, and there is no ratio. One value has no
    # positive target.
    both = compare({"f": {**only, "positives": 2, "negatives": 2}, "m": only})
    assert (both["demographic_parity_difference"], both["demographic_parity_ratio"]) == (0.0, None)
    assert both["equal_opportunity_difference"] is both["equalized_odds_difference"] is None
    assert compare({})["worst_value"] is None


def test_equalised_odds_without_false_positives_have_the_ratio_of_tpr():
    value = {"n": 10, "scored": 10, "score_sum": 8, "selected": 2, "positives": 4, "negatives": 6}
    women = {**value, "true_positives": 2, "false_positives": 0}
    men = {**value, "selected": 4, "score_sum": 10, "true_positives": 4, "false_positives": 0}
    assert compare({"f": women, "m": men})["equalized_odds_ratio"] == 0.5


def test_of_equally_bad_values_the_first_by_name_is_the_worst():
    bad, good = ({"n": 2, "scored": 2, "score_sum": hits} for hits in (1, 2))
    for order in ("abc", "cba"):
        given = {value: good if value == "a" else bad for value in order}
        assert compare(given)["worst_value"] == "b"


def test_a_score_that_should_be_low_has_the_highest_value_as_worst():
    counted = {
        "a": {"n": 2, "scored": 2, "score_sum": 1.0},
        "b": {"n": 2, "scored": 2, "score_sum": 3.0},
    }
    found = compare(counted, score="loss", higher_is_better=False)
    assert (found["worst_value"], found["worst"], found["score_difference"]) == ("b", 1.5, 1.0)


def test_counts_of_clients_are_added_up():
    truth, predicted, values = drawn(300, 3, 0.4)
    clients = np.arange(300) % 4
    rows = []
    for client in range(4):
        own = counts(*(of[clients == client] for of in (truth, predicted, values)))
        numbers = {
            column_of("v", value, name): n for value, of in own.items() for name, n in of.items()
        }
        parts = of_client(numbers, 75, score="accuracy", higher_is_better=True)
        assert parts["v"]["withheld"] == 0
        rows.append({"client": client, "n": 75, "attributes": parts})
    # A client that withholds everything has no entry, and one value of another is missing.
    rows.append({"client": 9, "n": 20})
    found = pooled(rows, score="accuracy", higher_is_better=True)["v"]
    whole = compare(counts(truth, predicted, values))
    for name, wanted in whole.items():
        assert found[name] == wanted
    assert (found["withheld"], found["withheld_clients"], found["without_targets"]) == (20, 1, 0)
    odds = [row["attributes"]["v"]["equalized_odds_ratio"] for row in rows[:4]]
    spread = found["over_clients"]["equalized_odds_ratio"]
    assert spread["clients"] == 4
    assert spread["mean"] == pytest.approx(sum(odds) / 4, abs=1e-15)
    assert (spread["worst"], spread["worst_client_id"]) == (min(odds), odds.index(min(odds)))
    parity = [row["attributes"]["v"]["demographic_parity_difference"] for row in rows[:4]]
    assert found["over_clients"]["demographic_parity_difference"]["worst"] == max(parity)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"n": 11}, "answered with 11 samples by sex, but has 10"),
        ({"selected": -1}, "answered with -1 as selected for sex: f"),
        ({"selected": 2.5}, "answered with 2.5 as selected for sex: f"),
        ({"score_sum": float("inf")}, "answered with inf as score_sum for sex: f"),
        ({"true_positives": 9}, "answered with counts that contradict each other for sex: f"),
        ({"positives": None}, "answered with incomplete counts for sex: f"),
        ({"n": None}, "answered with incomplete counts for sex: f"),
    ],
)
def test_counts_that_cannot_be_right_are_refused(changed, reason):
    right = {"n": 10, "scored": 10, "score_sum": 7, "selected": 4, "positives": 5, "negatives": 5}
    right |= {"true_positives": 3, "false_positives": 1}
    if changed == {"n": 11}:
        changed |= {"scored": 11, "positives": 6}
    numbers = {
        column_of("sex", "f", name): number
        for name, number in (right | changed).items()
        if number is not None
    }
    assert (
        wrong_counts({column_of("sex", "f", name): number for name, number in right.items()}, 10)
        is None
    )
    assert wrong_counts({"loss": 0.5, **numbers}, 10) == reason


def test_a_client_cannot_flood_the_server_with_counts():
    reason = "answered with counts of more than 20 attributes, or 100 values of one"
    assert (
        wrong_counts({column_of(f"a{number}", "v", "n"): 1.0 for number in range(21)}, 10) == reason
    )
    assert (
        wrong_counts({column_of("a", f"v{number}", "n"): 0.0 for number in range(101)}, 10)
        == reason
    )
    assert (
        wrong_counts({column_of("a", f"v{number}", "n"): 0.0 for number in range(100)}, 10) is None
    )
