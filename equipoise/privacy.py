"""Clipping and noise for vectors that leave a client, and the ε that this guarantees."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.checks import count, real
from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.random import Purpose, fold_tensor, normal
from equipoise.tree import Tree


def check_release(name: str, clip: float | None, noise: float, delta: float) -> None:
    """Refuse values for which no ε can be computed.

    Parameters
    ----------
    name : str
        The part whose options these are, for errors.
    clip : float or None
        C, the length to which vectors are clipped.
    noise : float
        σ / C.
    delta : float
        δ, between 0 and 1.

    Examples
    --------
    >>> check_release("fedgc", None, 1.0, 1e-5)
    Traceback (most recent call last):
    equipoise.errors.InputError: fedgc.noise=1.0 is a multiple of fedgc.clip, which is not given
    """
    if clip is not None:
        real(clip, f"{name}.clip")
    if real(noise, f"{name}.noise", least=0) and clip is None:
        raise InputError(f"{name}.noise={noise} is a multiple of {name}.clip, which is not given")
    if not 0 < delta < 1:
        raise InputError(f"{name}.privacy_delta must be between 0 and 1, got {delta!r}")


def noise_sums(client: Client, width: int, purpose: Purpose = Purpose.NOISE) -> Tree:
    """Return standard normal numbers for :func:`released` that can be summed over batches.

    All batches of a client have the same numbers, so the number of batches is returned, too.

    Parameters
    ----------
    client : Client
        A client with one batch, in a question or a fact.
    width : int
        How many numbers are needed.
    purpose : Purpose
        What they are drawn for. Vectors that a client releases in the same round need different
        ones.

    Returns
    -------
    Tree
        ``noise`` and ``passes``. Empty if the client has no random numbers.
    """
    key, like = client.forward.key, client.network
    if key is None:
        return {}
    numbers = normal(fold_tensor(key, purpose, torch.arange(width, device=key.device)), like.dtype)
    return {"noise": numbers, "passes": torch.ones_like(numbers[0])}


def released(
    vector: Tensor, clip: float | None, noise: float = 0.0, draws: Tensor | None = None
) -> Tensor:
    """Return a vector, clipped to a length and with noise if these options are set.

    Parameters
    ----------
    vector : Tensor
        The vector.
    clip : float or None
        C. Without it the vector is returned unchanged.
    noise : float
        σ / C.
    draws : Tensor, optional
        Standard normal numbers, of the length of the vector.

    Returns
    -------
    Tensor
        Like the vector.

    Examples
    --------
    >>> released(torch.tensor([3.0, 4.0]), 1.0)
    tensor([0.6000, 0.8000])
    >>> released(torch.tensor([3.0, 4.0]), 10.0, 0.5, torch.tensor([1.0, -1.0]))
    tensor([ 8., -1.])
    """
    if clip is None:
        return vector
    vector = vector * (clip / vector.norm().clamp(min=clip))
    return vector + noise * clip * draws if noise and draws is not None else vector


def gaussian_epsilon(noise: float, releases: int, delta: float) -> float:
    """Return the ε of vectors that are clipped and released with Gaussian noise.

    Two vectors of length at most C differ by at most 2 C. With noise of standard deviation
    σ = ``noise`` · C, n releases are μ-Gaussian differentially private with μ = 2 √n / ``noise``.
    The ε for a given δ solves δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) (Dong, Roth and Su, 2022). This
    is exact.

    Parameters
    ----------
    noise : float
        σ / C.
    releases : int
        n, how often a vector of the same client is released.
    delta : float
        δ, between 0 and 1.

    Returns
    -------
    float
        ε, at least 0.

    Examples
    --------
    >>> round(gaussian_epsilon(8.0, 1, 1e-5), 3), round(gaussian_epsilon(8.0, 50, 1e-5), 3)
    (0.926, 8.596)
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    mu = 2 * math.sqrt(count(releases, "releases")) / real(noise, "noise")
    if not 0 < real(delta, "delta") < 1:
        raise InputError(f"delta must be a number between 0 and 1, got {delta!r}")

    def excess(epsilon: float) -> float:
        """Return the δ of an ε minus the given δ."""
        lost = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        return lost - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta

    if excess(0.0) <= 0:
        return 0.0
    most = 1.0
    while excess(most) > 0:
        most *= 2
    return float(brentq(excess, 0.0, most, xtol=1e-12))


def released_index(sums: Tree, clip: float | None, noise: float) -> Tree:
    """Make β_f and β_l of a client from sums over its samples, each clipped and noised.

    Parameters
    ----------
    sums : Tree
        ``features`` and ``labels``, sums over samples; ``count``, their number; and, with noise,
        those of :func:`noise_sums`, for both vectors concatenated.
    clip : float or None
        C, the largest length of either vector.
    noise : float
        σ / C.

    Returns
    -------
    Tree
        ``features`` and ``labels``.

    Examples
    --------
    >>> sums = {"features": torch.tensor([6.0, 8.0]), "labels": torch.tensor([2.0])}
    >>> released_index(sums | {"count": torch.tensor(2)}, 1.0, 0)
    {'features': tensor([0.6000, 0.8000]), 'labels': tensor([1.])}
    """
    names = ("features", "labels")
    # Divided in double precision, so that the result does not depend on the precision of the sums.
    means = [(sums[name].double() / sums["count"].double()).to(sums[name].dtype) for name in names]
    both = sums["noise"] / sums["passes"] if noise else None
    draws = [None, None] if both is None else both.split([len(mean) for mean in means])
    return {
        name: released(mean, clip, noise, own)
        for name, mean, own in zip(names, means, draws, strict=True)
    }


def index_epsilon(noise: float, delta: float) -> float | None:
    """Return the ε of a client index that is released once. It consists of two vectors.

    Examples
    --------
    >>> index_epsilon(8.0, 1e-5) == gaussian_epsilon(8.0, 2, 1e-5), index_epsilon(0.0, 1e-5)
    (True, None)
    """
    return gaussian_epsilon(noise, 2, delta) if noise else None
