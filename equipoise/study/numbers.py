"""The numbers of tables: means, standard deviations and paired differences over runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Statistics = tuple[float | None, float | None, int]


def mean_and_std(values: Iterable[float]) -> Statistics:
    """Return mean, sample standard deviation and number of values; None if undefined."""
    numbers = list(values)
    mean = statistics.fmean(numbers) if numbers else None
    return mean, statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers)


def number(value: float) -> str:
    """Return a number as a cell of a table."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


@dataclass(frozen=True)
class Difference:
    """The difference between two methods, from pairs of runs that differ only in the method.

    Attributes
    ----------
    mean : float or None
        The mean difference; None without pairs.
    std : float or None
        The sample standard deviation (n - 1) of the differences; None for fewer than two pairs.
    standard_error : float or None
        ``std`` divided by √n.
    pairs : int
        The number n of pairs.
    p : float or None
        The p-value of a two-sided paired t-test over seeds, after Holm's correction over all
        methods except the baseline; None for fewer than ``LEAST_SEEDS`` seeds. Left-out groups are
        averaged first, because pairs of one seed share clients.

    Examples
    --------
    >>> Difference.of([0.03, 0.01, 0.02, 0.02]).cell
    '+0.020 ± 0.004 (0.008; 4)'
    """

    mean: float | None
    std: float | None
    standard_error: float | None
    pairs: int
    p: float | None = None

    @classmethod
    def of(cls, differences: Sequence[float], p: float | None = None) -> Difference:
        """Summarize the differences of all pairs."""
        mean, std, pairs = mean_and_std(differences)
        return cls(mean, std, None if std is None else std / math.sqrt(pairs), pairs, p)

    @property
    def cell(self) -> str:
        """The difference as a cell of a table."""
        if self.mean is None:
            return "–"
        mean = f"+{number(self.mean)}" if self.mean >= 0 else number(self.mean)
        if self.std is None or self.standard_error is None:
            return f"{mean} ({self.pairs})"
        tested = "" if self.p is None else f"; p = {self.p:.3f}"
        return f"{mean} ± {number(self.standard_error)} ({number(self.std)}; {self.pairs}{tested})"
