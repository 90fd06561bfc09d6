"""Performance and fairness metrics of a federation.

All formulas are population formulas: the clients evaluated are the whole population, so sums are
divided by ``K`` and never by ``K - 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.errors import InputError

__all__ = [
    "GROUP_METRICS",
    "METRICS",
    "Better",
    "Metric",
    "Summary",
    "jain_index",
    "pair_sum",
    "per_group",
    "summarize",
    "tails",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Better = Literal["high", "low", "as v_k"]


class Metric(NamedTuple):
    """The meaning of a metric.

    It has a formula, one line of text, whether high or low is better, and a few words for tables
    and charts. ``as v_k`` means as for the values of clients: high for accuracies, low for losses.

    Examples
    --------
    >>> METRICS["group_gap"].formula
    'max_g m_g - min_g m_g'
    >>> METRICS["group_gap"].label
    'gap between groups'
    """

    formula: str
    description: str
    better: Better
    label: str


METRICS: dict[str, Metric] = {
    "mean": Metric(
        "Σ_k v_k / K", "mean over clients: each client counts once", "as v_k", "mean over clients"
    ),
    "mean_samples": Metric(
        "Σ_k n_k v_k / Σ_k n_k",
        "mean over samples: each client counts by its number of samples",
        "as v_k",
        "mean over samples",
    ),
    "mean_groups": Metric(
        "Σ_g m_g / G",
        "mean over groups: each group counts once, however many clients it has",
        "as v_k",
        "mean over groups",
    ),
    "sigma_clients": Metric(
        "√(Σ_k (v_k - mean)² / K)", "standard deviation over clients", "low", "σ over clients"
    ),
    "pair_sum": Metric(
        "Σ_i Σ_j (v_i - v_j)²",
        "sum over pairs of clients of squared differences",
        "low",
        "sum of squared differences",
    ),
    "sigma_groups": Metric(
        "√(Σ_g (m_g - mean_groups)² / G)",
        "standard deviation over group means",
        "low",
        "σ over groups",
    ),
    "worst10": Metric(
        "mean of the ⌈K/10⌉ worst v_k",
        "mean of the worst 10 % of clients, at least one client",
        "as v_k",
        "worst tenth of clients",
    ),
    "best10": Metric(
        "mean of the ⌈K/10⌉ best v_k",
        "mean of the best 10 % of clients, at least one client",
        "as v_k",
        "best tenth of clients",
    ),
    "worst_client": Metric("worst v_k", "value of the worst client", "as v_k", "worst client"),
    "worst_group": Metric("worst m_g", "mean of the worst group", "as v_k", "worst group"),
    "best_group": Metric("best m_g", "mean of the best group", "as v_k", "best group"),
    "group_gap": Metric(
        "max_g m_g - min_g m_g",
        "largest difference between two group means",
        "low",
        "gap between groups",
    ),
    "gap_variance": Metric(
        "Σ_k (gap_k - mean gap)² / K",
        "variance of the generalization gap, gap_k = loss_k(global) - loss_k(local) on validation "
        "data",
        "low",
        "variance of generalization gaps",
    ),
    "gap_pair_sum": Metric(
        "Σ_i Σ_j (gap_i - gap_j)²",
        "sum over pairs of clients of squared differences of the generalization gap",
        "low",
        "sum of squared differences of generalization gaps",
    ),
    "jain": Metric(
        "(Σ_k v_k)² / (K Σ_k v_k²)",
        "Jain index: 1 when all clients are equal, 1/K when one has everything",
        "high",
        "Jain index",
    ),
}
"""Every metric by name, in the order of reports.

``v_k`` is the value of client k, ``n_k`` its number of samples, and ``m_g`` the mean of ``v_k``
over the clients of group g. K clients and G groups have a value.
"""

GROUP_METRICS = ("mean_groups", "sigma_groups", "worst_group", "best_group", "group_gap")
"""The metrics of group means. With a single group they are its mean, or 0."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of one value per client: all metrics and the number of clients.

    Attributes
    ----------
    mean, mean_samples, mean_groups, sigma_clients, pair_sum, sigma_groups, worst10, best10 : float
        See ``METRICS``. ``mean_samples`` is ``None`` without sample counts.
    worst_client, worst_group, best_group, group_gap, gap_variance, gap_pair_sum, jain : float
        See ``METRICS``. ``gap_variance`` and ``gap_pair_sum`` are ``None`` if no client has a
        generalization gap.
    worst_client_id, worst_group_id, best_group_id : int
        The client as a position in ``values``, and the groups as numbers in ``groups``. The lowest
        in case of ties.
    clients : int
        The number of clients with a value.
    left_out : int
        The number of clients without a value, because they have no samples in this split.

    Examples
    --------
    >>> summary = summarize([0.9, 0.8, 0.4], groups=[0, 0, 1])
    >>> summary.worst_group, summary.worst_group_id
    (0.4, 1)
    """

    mean: float
    mean_samples: float | None
    mean_groups: float
    sigma_clients: float
    pair_sum: float
    sigma_groups: float
    worst10: float
    best10: float
    worst_client: float
    worst_group: float
    best_group: float
    group_gap: float
    gap_variance: float | None
    gap_pair_sum: float | None
    jain: float
    worst_client_id: int
    worst_group_id: int
    best_group_id: int
    clients: int
    left_out: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Return all fields by name, ready for JSON.

        Returns
        -------
        dict
            The metrics first, in the order of ``METRICS``.

        Examples
        --------
        >>> list(summarize([1.0], groups=[0]).as_dict())[:3]
        ['mean', 'mean_samples', 'mean_groups']
        """
        return asdict(self)


def summarize(
    values: ArrayLike,
    groups: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    gap: ArrayLike | None = None,
    higher_is_better: bool = True,
) -> Summary:
    """Compute every fairness metric from one value per client.

    Parameters
    ----------
    values : array-like of float
        One value per client, such as its accuracy or its loss. NaN means that the client has no
        samples in this split. It is left out.
    groups : array-like of int
        The group of each client.
    weights : array-like of float, optional
        The number of samples behind each value. A client without samples is left out. A client with
        samples must have a value, so that a diverged model is not dropped from the mean.
    gap : array-like of float, optional
        The generalization gap of each client. NaN means that it has no validation samples.
    higher_is_better : bool
        ``False`` for losses. Then the worst client is the one with the highest value.

    Returns
    -------
    Summary
        See ``METRICS`` for the formulas.

    Examples
    --------
    >>> summary = summarize([0.9, 0.7, 0.5], groups=[0, 0, 1], weights=[10, 10, 20])
    >>> round(summary.mean, 3), round(summary.mean_samples, 3), round(summary.mean_groups, 3)
    (0.7, 0.65, 0.65)
    >>> summarize([0.2, 1.5], groups=[0, 0], higher_is_better=False).worst_client
    1.5
    """
    measured = _Measured.check(values, groups, weights)
    kept = measured.values
    group_ids, group_means = _group_means(kept, measured.groups)
    worst_at, best_at = (np.argmin, np.argmax) if higher_is_better else (np.argmax, np.argmin)
    worst, worst_group, best_group = worst_at(kept), worst_at(group_means), best_at(group_means)
    worst10, best10 = tails(kept, higher_is_better=higher_is_better)
    gaps = None if gap is None else _known_gaps(gap, clients=measured.clients + measured.left_out)
    return Summary(
        mean=float(kept.mean()),
        mean_samples=None
        if measured.weights is None
        else float(np.average(kept, weights=measured.weights)),
        mean_groups=float(group_means.mean()),
        sigma_clients=float(kept.std()),
        pair_sum=pair_sum(kept),
        sigma_groups=float(group_means.std()),
        worst10=worst10,
        best10=best10,
        worst_client=float(kept[worst]),
        worst_group=float(group_means[worst_group]),
        best_group=float(group_means[best_group]),
        group_gap=float(np.ptp(group_means)),
        gap_variance=None if gaps is None else float(gaps.var()),
        gap_pair_sum=None if gaps is None else pair_sum(gaps),
        jain=jain_index(kept),
        worst_client_id=int(measured.ids[worst]),
        worst_group_id=int(group_ids[worst_group]),
        best_group_id=int(group_ids[best_group]),
        clients=measured.clients,
        left_out=measured.left_out,
    )


def per_group(
    values: ArrayLike, groups: ArrayLike, names: Sequence[str], *, weights: ArrayLike | None = None
) -> dict[str, float | None]:
    """Return the mean over the clients of each group.

    Parameters
    ----------
    values, groups, weights : array-like
        As for :func:`summarize`.
    names : sequence of str
        The name of each group.

    Returns
    -------
    dict
        Mean by group name. ``None`` for a group without values.

    Examples
    --------
    >>> per_group([0.5, 1.0, 0.25], groups=[0, 0, 1], names=["plain", "inverted", "rotated"])
    {'plain': 0.75, 'inverted': 0.25, 'rotated': None}
    """
    measured = _Measured.check(values, groups, weights)
    group_ids, group_means = _group_means(measured.values, measured.groups)
    if group_ids[-1] >= len(names):
        raise InputError(f"groups has group {group_ids[-1]}, but names has only {len(names)} names")
    means = dict(zip(group_ids.tolist(), group_means.tolist(), strict=True))
    return {name: means.get(group) for group, name in enumerate(names)}


def tails(values: ArrayLike, *, higher_is_better: bool = True) -> tuple[float, float]:
    """Return the means of the worst and of the best tenth of the values.

    A tenth is ``ceil(K / 10)`` values, at least one.

    Parameters
    ----------
    values : array-like of float
        One finite value per client.
    higher_is_better : bool
        ``False`` for losses.

    Returns
    -------
    tuple of float
        Worst, best.

    Examples
    --------
    >>> tails([3, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11])
    (1.5, 10.5)
    """
    ordered = np.sort(_finite(values, "values"))
    tenth = -(-len(ordered) // 10)  # rounded up, in whole numbers
    low, high = float(ordered[:tenth].mean()), float(ordered[-tenth:].mean())
    return (low, high) if higher_is_better else (high, low)


def pair_sum(values: ArrayLike) -> float:
    """Return the sum of squared differences over all ordered pairs.

    The FFT-GP paper calls it variance (eqs. 5 and 6). It is computed as 2 K² times the population
    variance, which takes linear time.

    Parameters
    ----------
    values : array-like of float
        One finite value per client.

    Returns
    -------
    float
        ``Σ_i Σ_j (v_i - v_j)²``.

    Examples
    --------
    >>> pair_sum([1, 2, 6])
    84.0
    """
    numbers = _finite(values, "values")
    return float(2 * len(numbers) * np.square(numbers - numbers.mean()).sum())


def jain_index(values: ArrayLike) -> float:
    """Return the Jain index, from 1/K (one client has everything) to 1 (all are equal).

    Parameters
    ----------
    values : array-like of float
        One finite value per client. The index is meaningful for values that are not negative. If
        all are zero, they count as equal.

    Returns
    -------
    float
        ``(Σ v)² / (K Σ v²)``.

    Examples
    --------
    >>> jain_index([1, 1, 1, 1]), jain_index([1, 0, 0, 0])
    (1.0, 0.25)
    """
    numbers = _finite(values, "values")
    largest = np.abs(numbers).max()
    if largest == 0:
        return 1.0
    # The index does not depend on the scale. This scale prevents under- and overflow of squares.
    shares = numbers / largest
    return min(1.0, float(shares.sum() ** 2 / (len(shares) * np.square(shares).sum())))


@dataclass(frozen=True)
class _Measured:
    """The clients that have a value, checked."""

    ids: Ints
    values: Floats
    groups: Ints
    weights: Floats | None
    left_out: int

    @property
    def clients(self) -> int:
        return len(self.ids)

    @classmethod
    def check(cls, values: ArrayLike, groups: ArrayLike, weights: ArrayLike | None) -> _Measured:
        every = _vector(values, "values")
        group = _whole(groups, "groups", length=len(every))
        has_value = ~np.isnan(every)
        size = None
        if weights is not None:
            size = _sizes(weights, length=len(every))
            lost = np.flatnonzero(~has_value & (size > 0))
            if lost.size:
                client = lost[0]
                raise InputError(
                    f"values has nan for client {client}, which has {size[client]:g} samples in "
                    "weights"
                )
            has_value &= size > 0
        ids = np.flatnonzero(has_value)
        if not ids.size:
            raise InputError(
                f"none of the {len(every)} clients in values has a value; at least one is needed"
            )
        kept = _finite(every[ids], "values", ids=ids)
        return cls(
            ids, kept, group[ids], None if size is None else size[ids], len(every) - len(ids)
        )


def _group_means(values: Floats, groups: Ints) -> tuple[Ints, Floats]:
    ids, member = np.unique(groups, return_inverse=True)
    return ids, np.bincount(member, weights=values) / np.bincount(member)


def _known_gaps(gap: ArrayLike, *, clients: int) -> Floats | None:
    gaps = _vector(gap, "gap", length=clients)
    ids = np.flatnonzero(~np.isnan(gaps))
    return _finite(gaps[ids], "gap", ids=ids) if ids.size else None


def _vector(given: ArrayLike, what: str, *, length: int | None = None) -> Floats:
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{what} must have one number per client, got {given!r}") from None
    if array.ndim != 1:
        raise InputError(
            f"{what} must have one number per client, got an array of shape {array.shape}"
        )
    if length is not None and len(array) != length:
        raise InputError(
            f"{what} has {len(array)} entries, but values has {length}; one per client is needed"
        )
    return array


def _finite(given: ArrayLike, what: str, *, ids: Ints | None = None) -> Floats:
    array = _vector(given, what)
    if not array.size:
        raise InputError(f"{what} is empty; at least one client is needed")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        client = bad[0] if ids is None else ids[bad[0]]
        raise InputError(
            f"{what} has {array[bad[0]]} for client {client}; only finite numbers are valid"
        )
    return array


def _whole(given: ArrayLike, what: str, *, length: int) -> Ints:
    array = _vector(given, what, length=length)
    bad = np.flatnonzero(~np.isfinite(array) | (array < 0) | (array != np.floor(array)))
    if bad.size:
        raise InputError(
            f"{what} has {array[bad[0]]:g} for client {bad[0]}; only whole numbers from 0 are valid"
        )
    return array.astype(np.int64)


def _sizes(given: ArrayLike, *, length: int) -> Floats:
    array = _vector(given, "weights", length=length)
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        raise InputError(
            f"weights has {array[bad[0]]} for client {bad[0]}; only numbers of samples from 0 "
            "are valid"
        )
    return array
