"""Which method is best, which is second, and which are significantly worse than the best.

Runs of two methods with the same seed are a pair. The differences of all pairs are tested with a
two-sided paired t-test. The best method is chosen by the same numbers, so the tests of all pairs of
methods are one family, and Holm's correction is for all of them. A correction for the comparisons
with the best method only would be too weak. With fewer than five seeds nothing is tested.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtr

__all__ = [
    "LEAST_SEEDS",
    "LEVEL",
    "TEST",
    "WORSE",
    "Ranking",
    "against",
    "holm",
    "paired_p",
    "rank_methods",
]

LEVEL = 0.05
LEAST_SEEDS = 5
TEST = "two-sided paired t-test over seeds, Holm correction over all pairs of methods"
# In tables, after values that are significantly worse than the best.
WORSE = "†"


def paired_p(differences: Sequence[float]) -> float:
    """Return the p-value of a two-sided paired t-test.

    Parameters
    ----------
    differences : sequence of float
        The differences of all pairs, at least two.

    Returns
    -------
    float
        1 if all differences are 0, and 0 if they all have another common value.

    Examples
    --------
    >>> round(paired_p([0.03, 0.01, 0.02, 0.02, 0.03]), 4)
    0.0042
    """
    mean, deviation, pairs = (
        statistics.fmean(differences),
        statistics.stdev(differences),
        len(differences),
    )
    # The deviation of equal differences is 0, or about one rounding error of their mean.
    if deviation <= 1e-12 * abs(mean) or mean == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stdtr(pairs - 1, -abs(mean) / (deviation / math.sqrt(pairs))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of a family of tests by Holm's method.

    Parameters
    ----------
    p_values : sequence of float
        One for each test.

    Returns
    -------
    list of float
        The corrected p-values in the same order. If all below α are rejected, the probability of a
        false rejection is at most α, even if the tests are dependent.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for done, position in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - done) * p_values[position]))
        corrected[position] = largest
    return corrected


@dataclass(frozen=True)
class Ranking:
    """The ranking of methods by one metric.

    Attributes
    ----------
    best, second : tuple of str
        The methods with the best and the second best mean; several if their means are equal. Empty
        if there are fewer than two methods to compare, or if all means are equal.
    p : dict
        For every other method that could be tested, the corrected p-value of its difference from
        the first of the best.

    Examples
    --------
    >>> ranking = Ranking(best=("a",), second=("b",), p={"b": 0.2, "c": 0.01})
    >>> ranking.worse
    ('c',)
    """

    best: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    p: Mapping[str, float] | None = None

    @property
    def worse(self) -> tuple[str, ...]:
        """The methods that are significantly worse than the best."""
        return tuple(label for label, value in (self.p or {}).items() if value < LEVEL)


def rank_methods(values: Mapping[str, Mapping[int, float]], *, higher_is_better: bool) -> Ranking:
    """Rank methods by their means, and test the others against the best.

    Parameters
    ----------
    values : mapping
        The value of each seed, by method. Methods without all seeds of the others are not ranked,
        because their means are not comparable.
    higher_is_better : bool
        Whether high values are good.

    Returns
    -------
    Ranking
        Without p-values if methods have fewer than ``LEAST_SEEDS`` seeds in common.

    Examples
    --------
    >>> a = [0.90, 0.91, 0.92, 0.90, 0.91]
    >>> b = [0.85, 0.85, 0.86, 0.84, 0.86]
    >>> c = [0.90, 0.90, 0.93, 0.90, 0.90]
    >>> values = {label: dict(enumerate(own)) for label, own in zip("abc", (a, b, c))}
    >>> ranking = rank_methods(values, higher_is_better=True)
    >>> ranking.best, ranking.second, ranking.worse
    (('a',), ('c',), ('b',))
    """
    seeds = {seed for own in values.values() for seed in own}
    complete = {label: own for label, own in values.items() if seeds and seeds == set(own)}
    if len(complete) < 2:
        return Ranking()
    means = {label: statistics.fmean(own.values()) for label, own in complete.items()}
    first, *rest = sorted(set(means.values()), reverse=higher_is_better)
    if not rest:
        return Ranking()
    best = tuple(label for label in means if means[label] == first)
    second = tuple(label for label in means if means[label] == rest[0])
    return Ranking(best, second, _p_of_all(complete, best[0]))


def _p_of_all(values: Mapping[str, Mapping[int, float]], best: str) -> dict[str, float] | None:
    pairs = {
        (a, b): _differences(values[a], values[b]) for a, b in itertools.combinations(values, 2)
    }
    tested = {pair: paired_p(own) for pair, own in pairs.items() if len(own) >= LEAST_SEEDS}
    if not tested:
        return None
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {a if b == best else b: value for (a, b), value in corrected.items() if best in (a, b)}


def against(
    baseline: Mapping[int, float], others: Mapping[str, Mapping[int, float]]
) -> dict[str, float]:
    """Test methods against a baseline.

    Parameters
    ----------
    baseline : mapping
        The value of the baseline for each seed.
    others : mapping
        The values of the other methods.

    Returns
    -------
    dict
        The p-values of those with ``LEAST_SEEDS`` seeds in common with the baseline, corrected by
        Holm's method over these comparisons.

    Examples
    --------
    >>> against(dict(enumerate([0.5, 0.6, 0.5, 0.6])), {"a": dict(enumerate([0.7, 0.8, 0.7, 0.8]))})
    {}
    """
    pairs = {label: _differences(own, baseline) for label, own in others.items()}
    tested = {label: paired_p(own) for label, own in pairs.items() if len(own) >= LEAST_SEEDS}
    return dict(zip(tested, holm(list(tested.values())), strict=True))


def _differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
