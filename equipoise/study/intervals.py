"""Bootstrap intervals over clients: how a metric varies with the choice of clients.

Clients are drawn with replacement, each with its values of all seeds. The metric is computed for
every draw and averaged over seeds. For metrics of groups, clients are drawn within each group.
The interval is BCa (bias-corrected and accelerated), as computed by SciPy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from equipoise.fairness import Floats
from equipoise.run.records import Row
from equipoise.study.metrics import (
    TOTALS,
    apart,
    group_of,
    kind_of,
    model_of,
    of_validation,
    scored,
    which_of,
)

__all__ = ["CONFIDENCE", "LEAST_CLIENTS", "RESAMPLES", "interval", "resampled_interval"]

CONFIDENCE = 0.95
RESAMPLES = 1000
# Intervals from fewer clients are too short. With 20 clients or more, the worst tenth has at least
# two clients.
LEAST_CLIENTS = 10
LEAST_CLIENTS_OF_TAILS = 20
# How many numbers are computed at a time.
AT_A_TIME = 2_000_000

Interval = tuple[float, float]


def _tenth(values: Floats, *, worst_first: bool) -> Floats:
    ordered = np.sort(values, axis=-1)
    tenth = -(-ordered.shape[-1] // 10)
    tail: Floats = (ordered[..., :tenth] if worst_first else ordered[..., -tenth:]).mean(-1)
    return tail


def _jain(values: Floats) -> Floats:
    squares = np.square(values).sum(-1) * values.shape[-1]
    return np.divide(
        np.square(values.sum(-1)), squares, out=np.ones_like(squares), where=squares > 0
    )


# Metrics of one value for each client on the last axis. Only tails depend on whether high values
# are good.
OF_CLIENTS: dict[str, Callable[[Floats, bool], Floats]] = {
    "mean": lambda values, higher: values.mean(-1),
    "loss": lambda values, higher: values.mean(-1),
    "sigma_clients": lambda values, higher: values.std(-1),
    "worst10": lambda values, higher: _tenth(values, worst_first=higher),
    "best10": lambda values, higher: _tenth(values, worst_first=not higher),
    "jain": lambda values, higher: _jain(values),
}
# Metrics of the means of groups on the last axis.
OF_GROUPS: dict[str, Callable[[Floats, bool], Floats]] = {
    "mean_groups": lambda means, higher: means.mean(-1),
    "sigma_groups": lambda means, higher: means.std(-1),
    "worst_group": lambda means, higher: means.min(-1) if higher else means.max(-1),
    "best_group": lambda means, higher: means.max(-1) if higher else means.min(-1),
    "group_gap": lambda means, higher: np.ptp(means, axis=-1),
    "groups.NAME": lambda means, higher: means[..., 0],
}


def resampled_interval(
    values: Floats,
    groups: Sequence[Any],
    metric: str,
    *,
    higher_is_better: bool = True,
    group: str = "",
) -> Interval | None:
    """Return the bootstrap interval of a metric.

    Parameters
    ----------
    values : float array
        One row for each seed, one column for each client.
    groups : sequence
        The group of each client.
    metric : str
        A name of ``OF_CLIENTS`` or ``OF_GROUPS``.
    higher_is_better : bool
        Whether high values of clients are good.
    group : str
        The group, for the metric ``groups.NAME``.

    Returns
    -------
    tuple of float, or None
        None for other metrics, and with too few clients: fewer than ``LEAST_CLIENTS``, fewer than
        ``LEAST_CLIENTS_OF_TAILS`` for the worst and best tenth, or fewer than two in a group.

    Examples
    --------
    >>> accuracies = np.linspace(0.5, 0.9, 20)[None]
    >>> low, high = resampled_interval(accuracies, ["all"] * 20, "mean")
    >>> round(low, 2), round(high, 2)
    (0.65, 0.75)
    """
    clients = values.shape[1]
    drawn: tuple[NDArray[np.int64], ...]
    least = LEAST_CLIENTS_OF_TAILS if metric in ("worst10", "best10") else LEAST_CLIENTS
    if clients < least:
        return None
    if metric in OF_CLIENTS:
        compute = OF_CLIENTS[metric]
        drawn = (np.arange(clients),)

        def statistic(*ids: NDArray[np.int64], axis: int = -1) -> Floats:
            found: Floats = compute(
                values[:, np.moveaxis(ids[0], axis, -1)], higher_is_better
            ).mean(0)
            return found

    elif metric in OF_GROUPS:
        compute = OF_GROUPS[metric]
        members: dict[Any, list[int]] = {}
        for client, own in enumerate(groups):
            if not group or own == group:
                members.setdefault(own, []).append(client)
        if min(map(len, members.values()), default=0) < 2:
            return None
        drawn = tuple(np.array(own) for own in members.values())

        def statistic(*ids: NDArray[np.int64], axis: int = -1) -> Floats:
            means = [values[:, np.moveaxis(own, axis, -1)].mean(-1) for own in ids]
            found: Floats = compute(np.stack(means, axis=-1), higher_is_better).mean(0)
            return found

    else:
        return None
    return _bca(drawn, statistic, batch=max(1, AT_A_TIME // values.size))


def _bca(
    drawn: tuple[NDArray[np.int64], ...], statistic: Callable[..., Floats], *, batch: int
) -> Interval:
    from scipy.stats import bootstrap  # Imported here, because it is slow and not always needed.

    # The same draws for all methods and metrics. The argument has another name since SciPy 1.15.
    newer = tuple(map(int, scipy.__version__.split(".")[:2])) >= (1, 15)
    random = {"rng" if newer else "random_state": np.random.default_rng(0)}
    with warnings.catch_warnings():
        # If all clients have the same value, BCa is undefined, and SciPy warns.
        warnings.simplefilter("ignore")
        found = bootstrap(
            drawn,
            statistic,
            n_resamples=RESAMPLES,
            batch=batch,
            vectorized=True,
            axis=-1,
            confidence_level=CONFIDENCE,
            method="BCa",
            **random,
        )
    low, high = found.confidence_interval
    if not np.isfinite([low, high]).all():
        low, high = np.quantile(
            found.bootstrap_distribution, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
        )
    return float(low), float(high)


def interval(
    runs: Iterable[tuple[Mapping[str, Any], Sequence[Row]]], metric: str, *, split: str
) -> Interval | None:
    """Return the bootstrap interval of a metric of runs that differ only in their seed.

    Parameters
    ----------
    runs : iterable of (summary, rows)
        The content of ``summary.json``, and the rows of ``metrics.jsonl`` that it summarises.
    metric : str
        As in :func:`equipoise.study.study_from`.
    split : str
        The split of metrics without ``val.``.

    Returns
    -------
    tuple of float, or None
        None without runs, for metrics that are not computed from values of clients or begin with
        ``selected.`` or ``each.``, for clients that are not in the same group in all runs, and if
        :func:`resampled_interval` returns None.

    Examples
    --------
    >>> interval([], "mean", split="test") is None
    True
    """
    if metric in TOTALS or which_of(metric):
        return None
    _, who, _ = apart(metric)
    kind, split = kind_of(metric), "val" if of_validation(metric) else split
    found, groups, higher = [], [], True
    for summary, rows in runs:
        column, higher = scored(summary, metric)
        wanted = (model_of(summary, metric), split, who == "unseen")
        mine = [
            row
            for row in rows
            if (row["model"], row["split"], row["unseen"]) == wanted and column in row
        ]
        found.append({row["client"]: float(row[column]) for row in mine})
        groups.append({row["client"]: row["group"] for row in mine})
    common = sorted(set.intersection(*map(set, found))) if found else []
    if not common:
        return None
    if kind in OF_GROUPS and any(
        own[client] != groups[0][client] for own in groups for client in common
    ):
        return None
    values = np.array([[own[client] for client in common] for own in found])
    of_client = [groups[0][client] for client in common]
    return resampled_interval(
        values, of_client, kind, higher_is_better=higher, group=group_of(metric)
    )
