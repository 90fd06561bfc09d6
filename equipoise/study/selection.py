"""DomainBed's three rules to choose hyper-parameters if groups are left out in turn.

Gulrajani and Lopez-Paz (ICLR 2021) compare three rules for a domain that is left out:

- ``training-domain``: the values with the best mean on the validation data of the other domains;
- ``leave-one-domain-out``: the values that work best on other domains that are left out as well.
  Every two domains are left out together once. For a domain, the runs without it and a second
  domain are compared by the accuracy on the second one, averaged over all second domains;
- ``oracle``: the values with the best accuracy on the left-out domain itself. This is not a fair
  choice, because it uses test data, and it is labelled accordingly.

All rules report the accuracy on the left-out domain of the run that was trained on all others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equipoise.run.records import task_of
from equipoise.study.metrics import value_of
from equipoise.study.numbers import number

if TYPE_CHECKING:
    from equipoise.study.results import Results

__all__ = ["RULES", "Selected", "pair_label", "select_by_rules"]

RULES: dict[str, str] = {
    "training-domain": "training-domain validation",
    "leave-one-domain-out": "leave-one-domain-out cross-validation",
    "oracle": "test-domain oracle (chosen by test data)",
}
"""The rules by name, and their names in tables."""


def pair_label(one: str, other: str) -> str:
    """Return the label of the setting in which the groups of two folds are left out together.

    Examples
    --------
    >>> pair_label("photo", "art")
    'art+photo'
    """
    return "+".join(sorted((one, other)))


@dataclass(frozen=True)
class Selected:
    """The choice of a rule for a left-out group.

    Attributes
    ----------
    group : str
        The group that is left out.
    values : mapping
        The chosen hyper-parameters.
    score : float
        The score used for the choice.
    tested : float
        The mean over the clients of the left-out group.

    Examples
    --------
    >>> Selected("photo", {"mu": 1.0}, score=0.8, tested=0.7).tested
    0.7
    """

    group: str
    values: Mapping[str, Any]
    score: float
    tested: float


def select_by_rules(results: Results, setting: str) -> dict[str, dict[str, list[Selected]]]:
    """Return the choices of every rule in a study that has been tuned.

    Parameters
    ----------
    results : Results
        The results of a study that was made with ``tune=True``.
    setting : str
        The label of its folds.

    Returns
    -------
    dict
        For every rule of ``tuning.selection`` and method, one choice for each fold. A method
        without a grid has nothing to choose and is the same by all rules. Folds without a finished
        run are left out. Empty if the study is not tuned or if the label has no folds.

    Examples
    --------
    >>> from equipoise.study import Results, study_from
    >>> study = study_from({"base": {"data": "digits"}, "methods": ["fedavg"]})
    >>> select_by_rules(Results(study, {}, {}), "base")
    {}
    """
    study = results.study
    if not study.tried or setting not in study.folds:
        return {}
    with_grid = {label for variants in study.tried.values() for label in variants}
    methods: dict[str, Mapping[str, Mapping[str, Any]]] = {
        label: {label: {}} for label in study.methods if label not in with_grid
    }
    methods |= study.tried
    chooser = _Chooser(results, study.folds[setting])
    return {
        rule: {label: chooser.choose(rule, variants) for label, variants in methods.items()}
        for rule in study.tuning.selection
    }


def selection_table(
    results: Results, setting: str
) -> tuple[str, list[str], list[list[str]]] | None:
    """Return title, header and rows of the table of rules; None without tuning or folds."""
    found = select_by_rules(results, setting)
    if not found:
        return None
    folds = len(results.study.folds[setting])
    rows = []
    for method in next(iter(found.values())):
        tested = [[one.tested for one in by_method[method]] for by_method in found.values()]
        rows.append(
            [
                method,
                *(number(statistics.fmean(own)) if len(own) == folds else "–" for own in tested),
            ]
        )
    title = f"{setting}: mean over left-out groups, hyper-parameters chosen for each by"
    return title, ["method", *(RULES[rule] for rule in found)], rows


class _Chooser:
    """Look up scores in the runs of a study."""

    def __init__(self, results: Results, folds: tuple[str, ...]) -> None:
        self._folds = folds
        self._runs = {
            (job.setting, job.method): results.summaries[job.path]
            for job in results.study.jobs
            if job.path in results.summaries
        }
        self._group = {
            job.setting: str(job.experiment.data["leave_out"]) for job in results.study.jobs
        }

    def choose(self, rule: str, variants: Mapping[str, Mapping[str, Any]]) -> list[Selected]:
        chosen = []
        for fold in self._folds:
            group = self._group[fold]
            found = {}
            for label, values in variants.items():
                score, tested = self._score(rule, fold, label), self._tested(fold, label, group)
                if score is not None and tested is not None:
                    found[label] = Selected(group, values, score, tested)
            if found:
                sign = 1 if self._higher_is_better else -1
                chosen.append(max(found.values(), key=lambda one: sign * one.score))
        return chosen

    @property
    def _higher_is_better(self) -> bool:
        return all(task_of(summary).higher_is_better for summary in self._runs.values())

    def _score(self, rule: str, fold: str, label: str) -> float | None:
        if rule == "oracle":
            return self._tested(fold, label, self._group[fold])
        if rule == "training-domain":
            summary = self._runs.get((fold, label))
            return None if summary is None else value_of(summary, "mean")
        scores = [
            self._tested(pair_label(fold, other), label, self._group[other])
            for other in self._folds
            if other != fold
        ]
        known = [score for score in scores if score is not None]
        return statistics.fmean(known) if known and len(known) == len(scores) else None

    def _tested(self, setting: str, label: str, group: str) -> float | None:
        """Return the mean over the clients of a left-out group on test data."""
        summary = self._runs.get((setting, label))
        if summary is None:
            return None
        # The results of a tuned study are those on validation data.
        return value_of({**summary, "results": summary.get("tested", {})}, f"unseen.groups.{group}")
