"""The numbers of tables: means, standard deviations and paired differences over runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Statistics = tuple[float | None, float | None, int]
# Numbers with three decimals, such as accuracies. A column of smaller numbers has more decimals.
USUAL = ".3f"
_SMALL, _MOST_DECIMALS = 0.01, 6


def mean_and_std(values: Iterable[float]) -> Statistics:
    """Return mean, sample standard deviation and number of values; None if undefined."""
    numbers = list(values)
    mean = statistics.fmean(numbers) if numbers else None
    return mean, statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers)


def style_of(values: Iterable[float | None]) -> str:
    """Return the format of the numbers in a column.

    There are three decimals. If all numbers are below 0.01, the largest has two significant digits.

    Examples
    --------
    >>> style_of([0.5, 0.0002]), style_of([0.00027, 0.00004]), style_of([2e-7])
    ('.3f', '.5f', '.1e')
    """
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    if largest == 0 or largest >= _SMALL:
        return USUAL
    decimals = 1 - math.floor(math.log10(largest))
    return f".{decimals}f" if decimals <= _MOST_DECIMALS else ".1e"


def number(value: float | None, style: str = USUAL) -> str:
    """Return a number as a cell of a table.

    Parameters
    ----------
    value : float or None
        The number, if there is one.
    style : str
        The format of the column. A number that would be 0 in it has a format of its own.

    Returns
    -------
    str
        The cell.

    Examples
    --------
    >>> number(0.12345), number(None), number(12345.6), number(0.00027), number(0.00027, ".6f")
    ('0.123', '–', '12,346', '0.00027', '0.000270')
    """
    return "–" if value is None else _rounded(value, _style_for(value, style))


def numbers(values: Iterable[float | None]) -> list[str]:
    """Return numbers that are shown together, with the same format.

    Examples
    --------
    >>> numbers([0.00027, None, 0.0031]), numbers([0.00027, 0.31])
    (['0.0003', '–', '0.0031'], ['0.00027', '0.310'])
    """
    there = list(values)
    style = style_of(there)
    return [number(value, style) for value in there]


def with_spread(mean: float, spread: float | None, style: str = USUAL) -> str:
    """Return mean ± spread as a cell of a table, both with the same number of decimals.

    Examples
    --------
    >>> with_spread(0.85, 0.0002), with_spread(0.00027, 0.00004), with_spread(0.5, None)
    ('0.850 ± 0.000', '0.00027 ± 0.00004', '0.500')
    """
    own = _style_for(mean, style)
    return _rounded(mean, own) + ("" if spread is None else f" ± {_rounded(spread, own)}")


def _style_for(value: float, style: str) -> str:
    """Return the format of a number in a column; another one if it would be 0, but is not."""
    return style if value == 0 or float(format(value, style)) else style_of([value])


def _rounded(value: float, style: str) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else format(value, style)


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
        return self.in_style(USUAL)

    def in_style(self, style: str) -> str:
        """Return the difference as a cell of a table, in the format of its metric."""
        if self.mean is None:
            return "–"
        mean = f"{'+' if self.mean >= 0 else ''}{_rounded(self.mean, style)}"
        if self.std is None or self.standard_error is None:
            return f"{mean} ({self.pairs})"
        tested = "" if self.p is None else f"; p = {self.p:.3f}"
        error, std = _rounded(self.standard_error, style), _rounded(self.std, style)
        return f"{mean} ± {error} ({std}; {self.pairs}{tested})"
