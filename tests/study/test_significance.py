"""Ranks and tests of methods: against SciPy, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from equipoise.study.significance import LEAST_SEEDS, LEVEL, against, holm, paired_p, rank_methods


def by_seed(values):
    return {f"method {number}": dict(enumerate(own)) for number, own in enumerate(values)}


@pytest.mark.parametrize("seeds", [2, 5, 12])
def test_p_values_are_scipys(seeds):
    random = np.random.default_rng(seeds)
    for shift in (0.0, 0.3, 3.0):
        a, b = random.normal(size=seeds), random.normal(shift, size=seeds)
        assert paired_p(list(a - b)) == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-9)


def test_differences_without_spread():
    assert paired_p([0.0] * 5) == 1.0
    assert paired_p([0.25] * 5) == 0.0
    # Values from subtraction: equal up to rounding.
    assert paired_p([0.9 - 0.6, 0.8 - 0.5, 0.7 - 0.4, 0.6 - 0.3, 0.5 - 0.2]) == 0.0


def test_holm_by_hand():
    # The smallest is multiplied by four, the next by three, and values do not decrease.
    assert holm([0.04, 0.001, 0.02, 0.5]) == pytest.approx([0.08, 0.004, 0.06, 0.5])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("higher", [True, False])
def test_the_others_are_tested_against_the_best_as_part_of_all_pairs(higher):
    random = np.random.default_rng(0)
    values = random.normal(size=(4, 6)) + np.array([[0.0], [0.1], [2.0], [-2.0]])
    ranking = rank_methods(by_seed(values), higher_is_better=higher)
    order = np.argsort(values.mean(1))[:: -1 if higher else 1]
    assert (ranking.best, ranking.second) == ((f"method {order[0]}",), (f"method {order[1]}",))
    pairs = [(a, b) for a in range(4) for b in range(a)]
    raw = [stats.ttest_rel(values[a], values[b]).pvalue for a, b in pairs]
    # Holm's adjusted values in one line: the running maximum of the sorted values times the number
    # left.
    ranks = np.argsort(raw)
    adjusted = np.minimum(1, np.maximum.accumulate(np.array(raw)[ranks] * np.arange(6, 0, -1)))
    expected = {pairs[position]: value for position, value in zip(ranks, adjusted, strict=True)}
    for other in order[1:]:
        pair = (max(order[0], other), min(order[0], other))
        assert ranking.p[f"method {other}"] == pytest.approx(expected[pair], rel=1e-9)
    assert set(ranking.worse) == {label for label, p in ranking.p.items() if p < LEVEL}


def test_equal_means_share_a_place():
    ranking = rank_methods(
        {"a": {0: 0.5}, "b": {0: 0.7}, "c": {0: 0.7}, "d": {0: 0.5}, "e": {0: 0.1}},
        higher_is_better=True,
    )
    assert (ranking.best, ranking.second, ranking.p) == (("b", "c"), ("a", "d"), None)
    # A mark on all of them would be meaningless.
    assert rank_methods({"a": {0: 0.5}, "b": {0: 0.5}}, higher_is_better=True).best == ()
    assert rank_methods({"a": {0: 0.5}, "b": {}}, higher_is_better=True).best == ()
    assert rank_methods({}, higher_is_better=True).best == ()


def test_methods_that_lack_seeds_are_not_ranked():
    ranking = rank_methods(
        {"a": {0: 0.9}, "b": {0: 0.5, 1: 0.6}, "c": {0: 0.4, 1: 0.5}}, higher_is_better=True
    )
    assert (ranking.best, ranking.second) == (("b",), ("c",))
    # Equal numbers of seeds are not enough: other seeds may be easier.
    different = {"a": {0: 0.9, 1: 0.8}, "b": {1: 0.7, 2: 1.0}}
    assert rank_methods(different, higher_is_better=True).best == ()


def test_below_five_seeds_nothing_is_claimed():
    far_apart = np.array([[0.0], [10.0]]) + np.random.default_rng(0).normal(
        scale=0.01, size=(2, LEAST_SEEDS)
    )
    assert rank_methods(by_seed(far_apart), higher_is_better=True).worse == ("method 0",)
    few = rank_methods(by_seed(far_apart[:, 1:]), higher_is_better=True)
    assert (few.best, few.p, few.worse) == (("method 1",), None, ())
    # Five seeds each, of which only four are shared, are not enough.
    shifted = {"a": dict(enumerate(far_apart[0])), "b": dict(enumerate(far_apart[1], start=1))}
    assert rank_methods(shifted, higher_is_better=True).p is None


@pytest.mark.parametrize(("methods", "seeds"), [(2, 5), (4, 5), (4, 10)])
def test_false_claims_are_about_as_rare_as_the_level_says(methods, seeds):
    """All methods are equal, so every claim that one is worse than the best is false."""
    random, trials, claims = np.random.default_rng(1), 1500, 0
    for _ in range(trials):
        # Common effects of seeds and different spreads must not lead to claims.
        values = random.normal(size=seeds) + random.normal(size=(methods, seeds)) * random.uniform(
            1, 2, (methods, 1)
        )
        claims += bool(rank_methods(by_seed(values), higher_is_better=True).worse)
    # Within three standard errors above; Holm's correction is conservative with correlated tests.
    assert 0.4 * LEVEL < claims / trials < LEVEL + 3 * (LEVEL * (1 - LEVEL) / trials) ** 0.5


def test_true_differences_are_found():
    random, found = np.random.default_rng(2), 0
    for _ in range(200):
        values = (
            random.normal(size=5)
            + random.normal(scale=0.2, size=(3, 5))
            + np.array([[1.5], [0.0], [1.4]])
        )
        found += rank_methods(by_seed(values), higher_is_better=True).worse == ("method 1",)
    assert found > 150


def test_a_baseline_that_was_named_is_one_comparison_for_each_other_method():
    random = np.random.default_rng(3)
    values = random.normal(size=(3, 5))
    found = against(
        *(
            by_seed(values)["method 0"],
            {k: v for k, v in by_seed(values).items() if k != "method 0"},
        )
    )
    raw = [stats.ttest_rel(values[other], values[0]).pvalue for other in (1, 2)]
    assert list(found.values()) == pytest.approx(holm(raw), rel=1e-9)
