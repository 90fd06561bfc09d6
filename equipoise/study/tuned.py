"""The values that tuning chooses, from the results of a study that tries grids."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equipoise.study.choice import Choice
from equipoise.study.metrics import own_of

if TYPE_CHECKING:
    from equipoise.study.results import Results


def choices_of(results: Results, setting: str) -> dict[str, Choice]:
    """Return the choice for every method with a grid and a successful run."""
    tuning, best = results.study.tuning, {}
    mean_of_first = reference_mean(results, setting)
    reference = mean_of_first
    if reference is None:
        reference = math.inf if results.lower_is_better else -math.inf
    for method, variants in results.study.tried.items():
        measured = {}
        for label in variants:
            mean, by = (tuned(results, setting, label, metric) for metric in ("mean", tuning.by))
            if mean is not None and by is not None:
                measured[label] = (mean, by)
        if measured:
            higher = not results.lower_is_better
            label = tuning.best(
                measured, reference, higher_is_better=higher, by_higher=_by_higher(results)
            )
            similar = tuning.similar(measured, reference, higher_is_better=higher)
            mean, by = measured[label]
            decided = [measured[other] for other in similar] or [(mean, by)]
            best[method] = Choice(
                values=variants[label],
                by=tuning.by,
                split=results.study.split,
                seed=tuning.seed,
                tolerance=tuning.tolerance,
                among=len(measured),
                within_tolerance=len(similar),
                tied=sum(value == by for _, value in decided),
                mean=mean,
                value=by,
                reference=mean_of_first,
            )
    return best


def reference_mean(results: Results, setting: str) -> float | None:
    """Return the mean of the study's first method, the best one if it has a grid."""
    means = (tuned(results, setting, label, "mean") for label in results.study.reference)
    best = min if results.lower_is_better else max
    return best((mean for mean in means if mean is not None), default=None)


def _by_higher(results: Results) -> bool | None:
    """Whether the metric of tuning should be high; None if it is the task's score."""
    own = own_of(results.study.tuning.by)[0]
    declared = (summary.get("metrics", {}).get(own) for summary in results.summaries.values())
    return next((bool(metric["higher_is_better"]) for metric in declared if metric), None)


def tuned(results: Results, setting: str, method: str, metric: str) -> float | None:
    """Return the value of a metric with the seed of tuning."""
    return results.values(setting, method, metric).get(results.study.tuning.seed)
