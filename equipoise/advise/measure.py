"""Measurements of a federation: sizes, labels, features, groups and participation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.engine.settings import Training
from equipoise.federation import Federation
from equipoise.samples import Samples

__all__ = ["Measured", "measure"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# The largest numbers of samples and of features of a sample, and the number of shuffles of labels.
MOST_SAMPLES = 20_000
MOST_FEATURES = 256
SHUFFLES = 20


@dataclass(frozen=True)
class Measured:
    """Measurements of the clients that train, from their training data.

    Attributes
    ----------
    clients, groups, unseen : int
        The numbers of clients that train, of their groups, and of unseen clients.
    samples, smallest, median, largest : float
        Training samples of all clients, and of the smallest, the median and the largest one.
    label_skew : float or None
        The distance between the label frequencies of a client and those of all clients (half of the
        sum of absolute differences), averaged over clients. It is rescaled so that it is 0 for
        shuffled labels, and close to 1 if each client has a single one of many labels. None without
        labels.
    labels_held : float or None
        The median number of labels of a client.
    feature_shift : float or None
        The share of the variance of inputs within a label that is between clients, from 0 to 1. It
        is rescaled so that it is 0 for shuffled clients. None for inputs that are not numbers.
    between_groups : float or None
        The share of the feature shift that is between groups. None with one group or without a
        shift.
    participation : float
        The share of clients that takes part in a round.

    Examples
    --------
    >>> from equipoise.data import load
    >>> measured = measure(load("digits"), Training())
    >>> measured.clients, measured.groups
    (22, 5)
    """

    clients: int
    groups: int
    unseen: int
    samples: int
    smallest: int
    median: float
    largest: int
    label_skew: float | None
    labels_held: float | None
    feature_shift: float | None
    between_groups: float | None
    participation: float

    @property
    def size_skew(self) -> float:
        """The number of samples of the largest client as a multiple of the median."""
        return self.largest / max(self.median, 1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name, for JSON."""
        return {**asdict(self), "size_skew": self.size_skew}


def measure(federation: Federation, training: Training, *, seed: int = 0) -> Measured:
    """Measure a federation.

    Parameters
    ----------
    federation : Federation
        The data. Only training samples of clients that train are used, 20,000 at most.
    training : Training
        The training settings, for the number of clients that take part in a round.
    seed : int
        Seed of the draws of samples, projections and shuffles.

    Returns
    -------
    Measured
        The numbers.

    Examples
    --------
    >>> from equipoise.data import load
    >>> skewed = {"name": "dirichlet", "clients": 20, "beta": 0.1}
    >>> measure(load("digits", partition=skewed), Training()).label_skew > 0.4
    True
    """
    seen = federation.seen
    sizes = federation.split("train").sizes[seen]
    random = np.random.default_rng(seed)
    held = [federation.split("train").of(client) for client in seen]
    positions, owners = np.concatenate(held), np.repeat(np.arange(len(seen)), sizes)
    labels = federation.y[positions].numpy() if federation.labelled else None
    skew = (None, None) if labels is None else _label_skew(labels, owners, random)
    if len(positions) > MOST_SAMPLES:
        kept = np.sort(random.choice(len(positions), MOST_SAMPLES, replace=False))
        positions, owners, labels = (
            positions[kept],
            owners[kept],
            None if labels is None else labels[kept],
        )
    x = _features(federation.x, positions, random)
    shift: tuple[float | None, float | None] = (None, None)
    if x is not None:
        # Without labels, all samples count as one label.
        kinds = np.zeros(len(owners), np.int64) if labels is None else labels
        shift = _feature_shift(x, kinds, owners, federation.groups[seen], random)
    return Measured(
        clients=len(seen),
        groups=len(np.unique(federation.groups[seen])),
        unseen=int(federation.unseen.sum()),
        samples=int(sizes.sum()),
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        largest=int(sizes.max()),
        label_skew=skew[0],
        labels_held=skew[1],
        feature_shift=shift[0],
        between_groups=shift[1],
        participation=training.cohort_size(len(seen)) / len(seen),
    )


def _label_skew(labels: Ints, owners: Ints, random: np.random.Generator) -> tuple[float, float]:
    """Return the rescaled distance of label frequencies, and the median number of labels."""
    _, coded = np.unique(labels, return_inverse=True)
    clients, classes = int(owners.max()) + 1, int(coded.max()) + 1

    def distance(of: Ints) -> tuple[float, Floats]:
        counts = np.bincount(owners * classes + of, minlength=clients * classes).reshape(
            clients, classes
        )
        having = counts[counts.sum(1) > 0]
        frequencies = having / having.sum(1, keepdims=True)
        overall = counts.sum(0) / counts.sum()
        return float(np.abs(frequencies - overall).sum(1).mean() / 2), having

    found, counts = distance(coded)
    by_chance = float(np.mean([distance(random.permutation(coded))[0] for _ in range(SHUFFLES)]))
    return _rescaled(found, by_chance), float(np.median((counts > 0).sum(1)))


def _features(
    x: torch.Tensor | Samples, positions: Ints, random: np.random.Generator
) -> Floats | None:
    """Return the samples as rows of at most ``MOST_FEATURES`` numbers; None for other data."""
    if not torch.is_floating_point(x[positions[:1]]):
        return None
    rows: Floats = x[positions].flatten(1).double().numpy()
    if rows.shape[1] > MOST_FEATURES:
        # A random projection approximately preserves shares of variance.
        rows = rows @ random.normal(size=(rows.shape[1], MOST_FEATURES)) / np.sqrt(MOST_FEATURES)
    return rows


def _feature_shift(
    x: Floats, labels: Ints, owners: Ints, groups: Ints, random: np.random.Generator
) -> tuple[float | None, float | None]:
    """Return the share of variance within labels between clients, and its part between groups."""
    residuals = x - _means(x, np.unique(labels, return_inverse=True)[1])
    total = float(np.square(residuals).sum())
    if total == 0:
        return None, None
    order = np.argsort(labels, kind="stable")
    edges = np.flatnonzero(np.diff(labels[order])) + 1

    def shuffled(of: Ints) -> Ints:
        """Shuffle the samples of each label, so that different labels do not count as a shift."""
        mixed = of.copy()
        for same in np.split(order, edges):
            mixed[same] = of[random.permutation(same)]
        return mixed

    def share(of: Ints) -> float:
        return float(np.square(_means(residuals, of)).sum()) / total

    chances = [shuffled(owners) for _ in range(SHUFFLES)]
    between = _rescaled(share(owners), float(np.mean([share(each) for each in chances])))
    if len(np.unique(groups)) < 2 or between <= 0:
        return between, None
    of_groups = _rescaled(
        share(groups[owners]), float(np.mean([share(groups[each]) for each in chances]))
    )
    return between, min(1.0, of_groups / between)


def _means(rows: Floats, kinds: Ints) -> Floats:
    """Return for each row the mean over the rows of the same kind."""
    sums = np.zeros((int(kinds.max()) + 1, rows.shape[1]))
    np.add.at(sums, kinds, rows)
    counts = np.bincount(kinds, minlength=len(sums)).clip(1)
    means: Floats = (sums / counts[:, None])[kinds]
    return means


def _rescaled(found: float, by_chance: float) -> float:
    return max(0.0, (found - by_chance) / (1 - by_chance)) if by_chance < 1 else 0.0
