"""The difference between two models."""

from __future__ import annotations


def distance(found, wanted, skip=frozenset()):
    """The largest relative difference over the model's tensors."""
    assert set(found) == set(wanted)
    return max(
        float(
            (found[n].double() - wanted[n].double()).norm()
            / wanted[n].double().norm().clamp(min=1e-12)
        )
        for n in wanted
        if n not in skip
    )
