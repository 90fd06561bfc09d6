"""Small optimization problems that the server solves between rounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Floats = NDArray[np.float64]

_LARGE = 1e6


def project_to_simplex(point: Floats) -> Floats:
    """Return the nearest weights that are not negative and sum to one.

    The solution is max(v − θ, 0), with θ such that it sums to one. θ follows from the sorted values
    (Held et al., 1974).

    Parameters
    ----------
    point : float array
        v, not empty.

    Returns
    -------
    float array
        The Euclidean projection of v onto the simplex.

    Examples
    --------
    >>> project_to_simplex(np.array([0.5, 1.0, -0.25])).tolist()
    [0.25, 0.75, 0.0]
    """
    if abs(point.max()) > _LARGE:
        # Subtracting the same number from all values does not change the projection. Without it, a
        # difference of one could be lost in rounding.
        point = point - point.max()
    falling = np.sort(point)[::-1]
    # For every i, θ if the first i values stay positive. The largest i for which they do is right.
    thresholds = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    threshold = thresholds[np.flatnonzero(falling > thresholds)[-1]]
    return np.maximum(point - threshold, 0.0)


def shortest_mixture(gram: Floats, *, radius: float) -> Floats:
    """Return the weights of the shortest mixture of vectors, near equal weights.

    They minimise ½ λᵀGλ over weights that are not negative, sum to one, and differ from 1/n by at
    most ``radius``.

    Parameters
    ----------
    gram : float array of shape [n, n]
        G, the inner products of the vectors.
    radius : float
        ε, from 0 (equal weights) to 1 (any weights).

    Returns
    -------
    float array
        λ.

    Examples
    --------
    >>> shortest_mixture(np.diag([1.0, 4.0]), radius=1.0).round(6).tolist()
    [0.8, 0.2]
    """
    count = len(gram)
    equal = np.full(count, 1 / count)
    low, high = np.maximum(equal - radius, 0.0), np.minimum(equal + radius, 1.0)
    if radius == 0 or count == 1:
        return equal
    found = minimize(
        lambda weights: 0.5 * weights @ gram @ weights,
        equal,
        jac=lambda weights: gram @ weights,
        bounds=list(zip(low, high, strict=True)),
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    return _polished(gram, np.clip(found.x, low, high), low, high)


def _polished(gram: Floats, weights: Floats, low: Floats, high: Floats) -> Floats:
    """Return the exact solution on an iterate's active set, if it is feasible and no longer."""
    near = 1e-6
    free = np.flatnonzero((weights > low + near) & (weights < high - near))
    fixed = np.where(weights <= low + near, low, high)
    fixed[free] = 0.0
    # Stationarity on the free weights and a sum of one. The multiplier is the last unknown.
    border = np.ones((len(free), 1))
    system = np.block([[gram[np.ix_(free, free)], border], [border.T, np.zeros((1, 1))]])
    start = fixed.copy()
    start[free] = weights[free]
    # If vectors are dependent, there are many exact solutions. The nearest one is feasible.
    correction = np.linalg.lstsq(
        system, np.append(-gram[free] @ start, 1 - start.sum()), rcond=None
    )[0]
    exact = start.copy()
    exact[free] += correction[:-1]
    feasible = bool((exact >= low).all() and (exact <= high).all()) and abs(exact.sum() - 1) < 1e-12
    no_longer = exact @ gram @ exact <= weights @ gram @ weights + 1e-12 * np.abs(gram).max()
    return exact if feasible and no_longer else weights / weights.sum()
