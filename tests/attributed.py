"""A federation with attributes of samples, and its figures computed one sample at a time."""

from __future__ import annotations

import numpy as np

from equipoise import Federation

SAMPLES = 480


def people(seed=0):
    """Features, targets, and the sex and origin of people; what they earn depends on both."""
    draws = np.random.default_rng(seed)
    sex = draws.choice(["Female", "Male"], SAMPLES, p=[0.4, 0.6])
    origin = draws.choice(["north", "south", "west"], SAMPLES, p=[0.6, 0.3, 0.1])
    x = draws.normal(size=(SAMPLES, 4)) + 0.5 * (sex == "Male")[:, None]
    y = (x[:, 0] + 0.8 * (origin == "north") + 0.6 * draws.normal(size=SAMPLES) > 0.6).astype(int)
    return x, y, {"sex": sex, "origin": origin}


def attributed(clients=4, **options):
    """A federation of these people."""
    x, y, attributes = people()
    return Federation.from_arrays(
        x, y, clients=np.arange(SAMPLES) % clients, attributes=attributes, **options
    )


def by_hand(truth, predicted, values):
    """Rates and differences, from lists of samples."""
    rates = {}
    for value in sorted(set(values)):
        own = [
            (bool(t), bool(p))
            for t, p, v in zip(truth, predicted, values, strict=True)
            if v == value
        ]
        of_positives, of_negatives = ([p for t, p in own if t is kind] for kind in (True, False))
        rates[value] = {
            "n": len(own),
            "accuracy": sum(t == p for t, p in own) / len(own),
            "selection_rate": sum(p for _, p in own) / len(own),
            "tpr": sum(of_positives) / len(of_positives) if of_positives else None,
            "fpr": sum(of_negatives) / len(of_negatives) if of_negatives else None,
        }

    def spread(rate):
        found = [of[rate] for of in rates.values() if of[rate] is not None]
        return (
            (max(found) - min(found), min(found) / max(found))
            if len(found) > 1 and max(found)
            else (None, None)
        )

    return rates, {rate: spread(rate) for rate in ("accuracy", "selection_rate", "tpr", "fpr")}
