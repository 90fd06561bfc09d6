"""Families of methods, and which of them fits a federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.advise.measure import Measured

__all__ = ["FAMILIES", "Advice", "Family", "recommend"]

# A difference between clients of at least these values is called clear or strong.
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
        The methods that a trial compares, as in a study. ``cost`` is the time of a round as a
        multiple of FedAvg's. It is not part of the study.

    Examples
    --------
    >>> FAMILIES["personal"].title
    'a personal model for each client'
    """

    title: str
    methods: tuple[Mapping[str, Any], ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the methods in tables."""
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
        "one shared model, with larger weights for the worst clients",
        ({"name": "term", "cost": 1.1},),
    ),
    "alone": Family("each client alone", ({"name": "local", "cost": 1},)),
}
"""The families that a trial compares.

The last one is a reference: if it is best, federated training does not help.
"""


@dataclass(frozen=True)
class Advice:
    """Which family fits, and why.

    Attributes
    ----------
    family : str
        A key of ``FAMILIES``.
    reasons : tuple of str
        The reasons, in sentences.
    notes : tuple of str
        Further notes.

    Examples
    --------
    >>> Advice("average", ("Clients are alike.",)).family
    'average'
    """

    family: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()


def recommend(measured: Measured, *, batchnorm: bool = False) -> Advice:
    """Return the family of methods that fits a federation.

    Parameters
    ----------
    measured : Measured
        The measurements.
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
            "fewer). A client is tested on the same labels, so a personal model has an advantage "
            "over one model for all labels."
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
                "The model has BatchNorm: fedbn keeps it on the clients and suits inputs that "
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
                "Clients differ in labels, inputs and sizes only by chance, so plain averaging "
                "fits."
            )
    return Advice(family, tuple(reasons), tuple(notes))


def _notes(measured: Measured) -> list[str]:
    notes = []
    if measured.participation <= FEW_TAKE_PART:
        notes.append(
            f"Only {measured.participation:.0%} of the clients take part in a round. Results vary "
            "with the last cohort: use evaluation.last. Clients of methods with memory (ditto, "
            "scaffold, feddyn) update it rarely; fine-tuning needs no memory."
        )
    if measured.unseen:
        notes.append(
            f"{measured.unseen} clients are held out of training. Without training data they can "
            "use only the shared model, so compare its results for unseen clients, too."
        )
    if measured.groups > 1 and (measured.between_groups or 0) > 0.5:
        notes.append(
            "Groups differ: compare their means, and try gifair or term with tilts: groups if one "
            "is left behind."
        )
    return notes
