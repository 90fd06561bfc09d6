"""Families of methods, and which of them fits a federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.advise.measure import Measured

__all__ = ["FAMILIES", "Advice", "Family", "recommend"]

# From these values on, a difference between clients is called clear or strong.
CLEAR_LABELS, STRONG_LABELS = 0.1, 0.3
CLEAR_FEATURES, STRONG_FEATURES = 0.05, 0.2
CLEAR_SIZES = 5.0
FEW_TAKE_PART = 0.3


@dataclass(frozen=True)
class Family:
    """Methods with the same idea.

    Attributes
    ----------
    title : str
        The idea in a few words.
    methods : tuple of mappings
        Those that a trial compares, as in a study. ``cost`` is the time of a round as a multiple of
        FedAvg's; it is not part of the study.

    Examples
    --------
    >>> FAMILIES["personal"].title
    'a personal model for each client'
    """

    title: str
    methods: tuple[Mapping[str, Any], ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """What the methods are called in tables."""
        return tuple(str(method.get("label", method["name"])) for method in self.methods)


FINE_TUNED = {
    "name": "fedavg",
    "label": "fedavg-finetuned",
    "set": {"evaluation.fine_tune": {"epochs": 5}},
}
FAMILIES: dict[str, Family] = {
    "average": Family(
        "one shared model, clients weighted by size", ({"name": "fedavg", "cost": 1},)
    ),
    "corrected": Family(
        "one shared model, with the drift of clients corrected",
        ({"name": "feddyn", "cost": 1.2}, {"name": "fedavgm", "cost": 1}),
    ),
    "personal": Family(
        "a personal model for each client",
        ({"name": "ditto", "cost": 2}, {**FINE_TUNED, "cost": 1.3}),
    ),
    "fair": Family(
        "one shared model, clients served worst weigh more", ({"name": "term", "cost": 1.1},)
    ),
    "alone": Family("each client alone", ({"name": "local", "cost": 1},)),
}
"""The families that a trial compares. The last one is a reference: if it is best, federating does not help."""


@dataclass(frozen=True)
class Advice:
    """Which family fits, and why.

    Attributes
    ----------
    family : str
        A key of ``FAMILIES``.
    reasons : tuple of str
        What the numbers say, in sentences.
    notes : tuple of str
        What else to consider.

    Examples
    --------
    >>> Advice("average", ("Clients are alike.",)).family
    'average'
    """

    family: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()


def recommend(measured: Measured, *, batchnorm: bool = False) -> Advice:
    """Return which family of methods fits a federation.

    Parameters
    ----------
    measured : Measured
        Its numbers.
    batchnorm : bool
        Whether the model has BatchNorm layers.

    Returns
    -------
    Advice
        The family, reasons and notes.

    Examples
    --------
    >>> from equipoise import Training
    >>> from equipoise.advise.measure import measure
    >>> from equipoise.data import load
    >>> recommend(measure(load("digits"), Training())).family
    'corrected'
    """
    labels, features = measured.label_skew or 0.0, measured.feature_shift or 0.0
    reasons, notes = [], _notes(measured)
    if labels >= CLEAR_LABELS:
        held = f"{measured.labels_held:.0f}" if measured.labels_held is not None else "few"
        reasons.append(
            f"Clients have different labels (skew {labels:.2f}; half of them have {held} labels or "
            "fewer). A client is tested on labels like its own, so a model that knows them has an "
            "advantage over one for all labels."
        )
    if features >= CLEAR_FEATURES:
        where = ""
        if measured.between_groups is not None:
            where = f", {measured.between_groups:.0%} of it between groups"
        reasons.append(
            f"Inputs of the same label differ between clients (shift {features:.2f}{where}). "
            "Updates of clients point in different directions, and plain averaging makes slow "
            "progress."
        )
        if batchnorm:
            notes.append(
                "The model has BatchNorm: fedbn keeps it with the clients and suits inputs that "
                "differ."
            )
    if measured.size_skew >= CLEAR_SIZES:
        reasons.append(
            f"Clients have different sizes ({measured.smallest:,} to {measured.largest:,} training "
            f"samples, the largest {measured.size_skew:.0f} times the median). Weights by size "
            "make use of all samples; small clients have too few for models of their own."
        )
        notes.append(
            "Look at the worst tenth of clients: term or qffl help if small clients are left "
            "behind."
        )
    if labels >= STRONG_LABELS or (labels >= CLEAR_LABELS and features < CLEAR_FEATURES):
        family = "personal"
    elif features >= CLEAR_FEATURES:
        family = "corrected"
    else:
        family = "average"
        if not reasons:
            reasons.append(
                "Clients differ in labels, inputs and sizes by chance only, so plain averaging "
                "fits."
            )
    return Advice(family, tuple(reasons), tuple(notes))


def _notes(measured: Measured) -> list[str]:
    notes = []
    if measured.participation <= FEW_TAKE_PART:
        notes.append(
            f"Only {measured.participation:.0%} of the clients take part in a round. Results vary "
            "with the last cohort: use evaluation.last. Methods whose clients keep something "
            "between rounds (ditto, scaffold, feddyn) use it seldom; fine-tuning needs no memory."
        )
    if measured.unseen:
        notes.append(
            f"{measured.unseen} clients are held out of training. Without data of their own they "
            "can only use the shared model, so look at its results for unseen clients too."
        )
    if measured.groups > 1 and (measured.between_groups or 0) > 0.5:
        notes.append(
            "Groups differ: compare their means, and see gifair or term with tilts: groups if one "
            "is left behind."
        )
    return notes
