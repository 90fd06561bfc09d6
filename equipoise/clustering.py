"""Clusters of clients by a vector that each of them sends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import unknown
from equipoise.random import fold
from equipoise.solvers import Floats, shortest_mixture

Labels = NDArray[np.int64]

CLUSTERINGS = ("gmm", "kmeans", "agglomerative")
CHOICES = ("fixed", "bic", "stability")
# Initializations of a fit, of which the best one is used.
_TRIES = 10
# Stability clusters this many subsets of the points, each with this share of them.
_RESAMPLES, _SHARE = 10, 0.8


def cluster(points: Floats, number: int, *, kind: str = "gmm", key: int = 0) -> Labels:
    """Divide points into clusters.

    Parameters
    ----------
    points : float array of shape [n, d]
        One row per client.
    number : int
        How many clusters. If there are fewer distinct points, each of them is a cluster.
    kind : {"gmm", "kmeans", "agglomerative"}
        A Gaussian mixture with spherical covariances, initialized by k-means; k-means; or Ward's
        agglomerative clustering. Full covariances cannot be estimated from few clients in many
        dimensions.
    key : int
        Key of the random numbers.

    Returns
    -------
    int array
        The cluster of each point, numbered from 0 in the order of the clusters' first points. A
        mixture may leave components without points, so there may be fewer clusters than asked for.

    Examples
    --------
    >>> cluster(np.array([[5.0], [0.0], [0.1], [5.2]]), 2).tolist()
    [0, 1, 1, 0]
    """
    if kind not in CLUSTERINGS:
        raise unknown("clustering", kind, CLUSTERINGS)
    distinct, same = np.unique(points, axis=0, return_inverse=True)
    if number >= len(distinct):
        return _in_order(same.reshape(-1))
    if number == 1:
        return np.zeros(len(points), np.int64)
    return _in_order(_FITS[kind](_scaled(points), number, fold(key, number) % 2**32))


def _gmm(points: Floats, number: int, seed: int) -> Labels:
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(number, covariance_type="spherical", n_init=_TRIES, random_state=seed)
    return _quietly(mixture.fit_predict, points)


def _kmeans(points: Floats, number: int, seed: int) -> Labels:
    from sklearn.cluster import KMeans

    return _quietly(KMeans(number, n_init=_TRIES, random_state=seed).fit_predict, points)


def _agglomerative(points: Floats, number: int, seed: int) -> Labels:
    from sklearn.cluster import AgglomerativeClustering

    return _quietly(AgglomerativeClustering(number).fit_predict, points)


_FITS: dict[str, Callable[[Floats, int, int], Labels]] = {
    "gmm": _gmm,
    "kmeans": _kmeans,
    "agglomerative": _agglomerative,
}


def _quietly(fit: Callable[[Floats], Any], points: Floats) -> Labels:
    """Fit without warnings, because clusters that have not converged can still be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(fit(points), dtype=np.int64)


def _scaled(points: Floats) -> Floats:
    """Return points with mean 0, divided by one number so that their mean square is 1.

    Mixtures add a constant to variances to keep them positive. Its effect should not depend on the
    scale of the points. Coordinates keep their relative scales.
    """
    centred = points - points.mean(0)
    scale = np.sqrt(np.square(centred).mean())
    return centred / scale if scale > 0 else centred


def _in_order(labels: Labels) -> Labels:
    """Return the labels with clusters numbered by their first points."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.reshape(-1)]


def centres_of(points: Floats, memberships: Floats) -> Floats:
    """Return the means of clusters, weighted by memberships; NaN for clusters without members.

    Parameters
    ----------
    points : float array of shape [n, d]
        One row per client.
    memberships : float array of shape [n, clusters]
        How much each client belongs to each cluster.

    Returns
    -------
    float array of shape [clusters, d]
        The means.

    Examples
    --------
    >>> centres_of(np.array([[1.0], [3.0], [8.0]]), np.eye(2)[[0, 0, 1]]).tolist()
    [[2.0], [8.0]]
    """
    totals = memberships.sum(0)[:, None]
    empty = totals == 0
    return np.where(empty, np.nan, memberships.T @ points / np.where(empty, 1.0, totals))


def numbered(labels: Labels, points: Floats, before: Floats) -> Labels:
    """Return the numbers of clusters, matched to the nearest clusters of the round before.

    The assignment with the smallest sum of squared distances between centres is used (Kuhn, 1955).
    The remaining clusters get unused numbers.

    Parameters
    ----------
    labels : int array
        The cluster of each point.
    points : float array of shape [n, d]
        The points.
    before : float array of shape [numbers, d]
        The last centre of each number; NaN where a number has not been used.

    Returns
    -------
    int array
        The number of each point's cluster.

    Examples
    --------
    >>> before = np.array([[1.2], [np.nan], [4.0]])
    >>> numbered(np.array([0, 1]), np.array([[5.0], [1.0]]), before).tolist()
    [2, 0]
    """
    from scipy.optimize import linear_sum_assignment

    centres = centres_of(points, np.eye(labels.max() + 1)[labels])
    distances = np.square(centres[:, None] - before).sum(-1)
    unused = np.isnan(distances)
    # Larger than the sum of all distances, so that used numbers are assigned first.
    distances[unused] = 1 + np.nansum(distances)
    _, numbers = linear_sum_assignment(distances)
    return np.asarray(numbers, dtype=np.int64)[labels]


def mixture_shares(point: Floats, centres: Floats) -> Floats:
    """Return the shares of the mixture of centres that is nearest to a point.

    The mean vector of a client with data of two types lies between the means of both. So the
    weights m on the simplex that minimise ‖point − Σ m_t H_t‖² estimate the share of each type in
    its data.

    Parameters
    ----------
    point : float array of shape [d]
        The mean vector of a client.
    centres : float array of shape [clusters, d]
        H.

    Returns
    -------
    float array
        m, one share per cluster.

    Examples
    --------
    >>> mixture_shares(np.array([0.25, 0.1]), np.array([[0.0, 0.0], [1.0, 0.0]])).round(6).tolist()
    [0.75, 0.25]
    """
    away = centres - point
    gram = away @ away.T
    largest = np.abs(gram).max()
    return shortest_mixture(gram / largest if largest > 0 else gram, radius=1.0)


def nearest(points: Floats, centres: Floats) -> Labels:
    """Return the number of the nearest centre of each point.

    Examples
    --------
    >>> nearest(np.array([[0.2], [3.0]]), np.array([[0.0], [1.0]])).tolist()
    [0, 1]
    """
    distances = np.stack([np.square(points - centre).sum(1) for centre in centres])
    return np.asarray(distances.argmin(0), dtype=np.int64)


def choose_number(
    points: Floats, most: int, *, by: str = "bic", kind: str = "gmm", key: int = 0
) -> int:
    """Choose how many clusters there are.

    Parameters
    ----------
    points : float array of shape [n, d]
        One row per client.
    most : int
        The largest number to consider.
    by : {"bic", "stability"}
        ``bic``: the number with the smallest Bayesian information criterion of a mixture of
        spherical Gaussians with a common variance. ``stability``: the number, at least two, for
        which clusterings of subsets of the points agree best, by the mean adjusted Rand index; the
        largest of equally stable numbers.
    kind, key
        As in :func:`cluster`.

    Returns
    -------
    int
        At least 1. No more than half the number of distinct points, so that a variance can be
        estimated.

    Examples
    --------
    >>> draws = np.random.default_rng(0)
    >>> centres = np.repeat([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]], 6, axis=0)
    >>> points = centres + 0.1 * draws.normal(size=(18, 2))
    >>> choose_number(points, 6), choose_number(points, 6, by="stability")
    (3, 3)
    """
    if by not in CHOICES[1:]:
        raise unknown("choice", by, CHOICES[1:])
    most = min(most, len(np.unique(points, axis=0)) // 2)
    numbers = range(1 if by == "bic" else 2, most + 1)
    if not numbers:
        return 1
    scaled = _scaled(points)
    if by == "bic":
        return min(
            numbers, key=lambda number: _bic(scaled, cluster(scaled, number, kind=kind, key=key))
        )
    return max(
        numbers, key=lambda number: (round(_stability(scaled, number, kind, key), 6), number)
    )


def cluster_points(
    points: Floats, number: int, *, kind: str = "gmm", choice: str = "fixed", key: int = 0
) -> Labels:
    """Divide points into a fixed or a chosen number of clusters.

    Parameters
    ----------
    points : float array of shape [n, d]
        One row per client.
    number : int
        The number of clusters, or the largest number to consider.
    kind, key
        As in :func:`cluster`.
    choice : {"fixed", "bic", "stability"}
        As in :func:`choose_number`.

    Returns
    -------
    int array
        The cluster of each point.

    Examples
    --------
    >>> cluster_points(np.array([[0.0], [0.1], [5.0], [5.1]]), 2).tolist()
    [0, 0, 1, 1]
    """
    if choice != "fixed":
        number = choose_number(points, number, by=choice, kind=kind, key=key)
    return cluster(points, number, kind=kind, key=key)


def _bic(points: Floats, labels: Labels) -> float:
    """Return −2 log L + k log n of a mixture with these clusters and a single variance.

    With a variance of its own, a cluster of a single client would have an infinite likelihood.
    """
    (n, d), members = points.shape, np.bincount(labels)
    spread = np.square(points - centres_of(points, np.eye(len(members))[labels])[labels]).sum()
    variance = max(spread / (d * (n - len(members))), 1e-12)
    likelihood = (members * np.log(members / n)).sum() - n * d / 2 * np.log(2 * np.pi * variance)
    likelihood -= spread / (2 * variance)
    return float(-2 * likelihood + (len(members) * (d + 1)) * np.log(n))


def _stability(points: Floats, number: int, kind: str, key: int) -> float:
    from sklearn.metrics import adjusted_rand_score

    whole = cluster(points, number, kind=kind, key=key)
    size = max(number, round(_SHARE * len(points)))
    scores = []
    for resample in range(_RESAMPLES):
        own = fold(key, number, resample)
        part = np.sort(np.random.default_rng(own).permutation(len(points))[:size])
        # A subset may have no points of small clusters. Then others must not be divided instead.
        found = cluster(points[part], len(np.unique(whole[part])), kind=kind, key=own)
        scores.append(adjusted_rand_score(whole[part], found))
    return float(np.mean(scores))


def purity(labels: Labels, groups: Labels) -> float:
    """Return the share of clients whose group is the most frequent one in their cluster.

    FedGCR's table 3 calls it clustering accuracy.

    Examples
    --------
    >>> purity(np.array([0, 0, 0, 1]), np.array([2, 2, 1, 1]))
    0.75
    """
    counts = np.zeros((labels.max() + 1, groups.max() + 1))
    np.add.at(counts, (labels, groups), 1)
    return float(counts.max(1).sum() / len(labels))
