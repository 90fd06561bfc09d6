"""A short comparison on the user's own data that supports or contradicts the advice."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from equipoise.advise.families import FAMILIES, Advice
from equipoise.config import Experiment
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.run.api import train
from equipoise.run.evaluation import Evaluation
from equipoise.study import Results, Study, study_from
from equipoise.study.metrics import apart, model_of, scored, should_be_high, which_of
from equipoise.study.runs import counted_rows

__all__ = ["Trial", "Verdict", "plan_trial"]

# A trial has a third of the rounds, within these bounds.
FEWEST_ROUNDS, MOST_ROUNDS = 10, 100
LEAST_CLIENTS = 5
# A difference of at least this number of standard errors is called clear.
CLEAR = 2.0


@dataclass(frozen=True)
class Verdict:
    """The result of a trial.

    Attributes
    ----------
    supported : bool
        Whether the trial supports the advice: no method of another family is clearly better than
        the best one of the advised family.
    pick : str
        The method to use: the one with the best value of all families.
    family : str
        The family of the pick.
    advised : str
        The best method of the advised family.
    difference, standard_error : float
        The mean difference over clients between the pick and ``advised``, and its standard error.

    Examples
    --------
    >>> Verdict(True, "ditto", "personal", "ditto", 0.0, 0.0).pick
    'ditto'
    """

    supported: bool
    pick: str
    family: str
    advised: str
    difference: float
    standard_error: float


@dataclass(frozen=True)
class Trial:
    """A study of one or two methods of each family, on validation data.

    Attributes
    ----------
    study : Study
        The study.
    rounds : int
        Rounds of each run.
    by : str
        The metric for the choice.
    seconds : float
        The time of all runs one after the other, estimated from rounds of FedAvg.

    Examples
    --------
    >>> from equipoise.config import experiment_from
    >>> experiment = experiment_from({"data": "digits", "training": {"rounds": 60}})
    >>> trial = plan_trial(experiment, experiment.federation(), seeds=2)
    >>> trial.rounds, len(trial.study.jobs)
    (20, 14)
    """

    study: Study
    rounds: int
    by: str
    seconds: float

    @property
    def cost(self) -> str:
        """The cost in words."""
        methods, seeds = len(self.study.methods), len(self.study.seeds)
        runs = f"{methods} methods × {seeds} seed{'s' * (seeds > 1)} × {self.rounds} rounds"
        if self.seconds < 90:
            return f"{runs}, about {max(1, round(self.seconds))} s on this machine"
        if self.seconds < 5400:
            return f"{runs}, about {round(self.seconds / 60)} min on this machine"
        return f"{runs}, about {self.seconds / 3600:.1f} h on this machine"

    def judge(self, advice: Advice, results: Results, directory: Path) -> Verdict:
        """Compare the best method of the advised family with the best of all.

        Parameters
        ----------
        advice : Advice
            The advice.
        results : Results
            The results of the study.
        directory : Path
            The directory of its runs.

        Returns
        -------
        Verdict
            Whether it supports the advice, and the method to use.

        Raises
        ------
        InputError
            If all runs of the advised family or of all others have failed.
        """
        values = {label: results.values("base", label, self.by) for label in self.study.methods}
        means = {label: float(np.mean(list(own.values()))) for label, own in values.items() if own}
        mine = [label for label in FAMILIES[advice.family].labels if label in means]
        if not mine:
            failed = next(iter(results.failures.values()), "no run has a value of the metric")
            raise InputError(f"the trial cannot judge the advice: {failed}")
        summary = next(iter(results.summaries.values()))
        high = should_be_high(self.by, higher_is_better=scored(summary, self.by)[1])
        sign = 1 if high else -1
        best = max(means, key=lambda label: sign * means[label])
        ours = max(mine, key=lambda label: sign * means[label])
        difference = sign * (means[best] - means[ours])
        error = self._standard_error(results, directory, best, ours)
        return Verdict(
            best in mine or difference <= CLEAR * error,
            best,
            _family_of(best),
            ours,
            difference,
            error,
        )

    def _standard_error(self, results: Results, directory: Path, one: str, other: str) -> float:
        """Return the standard error of the difference, over clients or, for few clients, seeds.

        With a single seed it is over clients, however few they are.
        """
        by_client = [self._by_client(results, directory, label) for label in (one, other)]
        common = sorted(by_client[0].keys() & by_client[1].keys())
        ours, theirs = (results.values("base", label, self.by) for label in (one, other))
        differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        if len(common) >= LEAST_CLIENTS or len(differences) < 2:
            differences = [by_client[0][client] - by_client[1][client] for client in common]
        if len(differences) < 2:
            return 0.0
        return float(np.std(differences, ddof=1) / np.sqrt(len(differences)))

    def _by_client(self, results: Results, directory: Path, label: str) -> dict[int, float]:
        """Return the value of each client, averaged over seeds."""
        found: dict[int, list[float]] = {}
        for job in self.study.jobs:
            if job.method != label or job.path not in results.summaries or which_of(self.by):
                continue
            summary = results.summaries[job.path]
            column, wanted = (
                scored(summary, self.by)[0],
                (model_of(summary, self.by), self.study.split),
            )
            unseen = apart(self.by)[1] == "unseen"
            for row in counted_rows(directory / job.path, summary):
                if (
                    (row["model"], row["split"]) == wanted
                    and row["unseen"] == unseen
                    and column in row
                ):
                    found.setdefault(row["client"], []).append(row[column])
        return {client: float(np.mean(values)) for client, values in found.items()}


def _family_of(label: str) -> str:
    return next(name for name, family in FAMILIES.items() if label in family.labels)


def plan_trial(
    experiment: Experiment,
    federation: Federation,
    *,
    rounds: int | None = None,
    seeds: int = 2,
    by: str = "mean",
    seconds_a_round: float | None = None,
) -> Trial:
    """Plan a short comparison of one or two methods of each family.

    Parameters
    ----------
    experiment : Experiment
        The data, model and training. Its method is not used.
    federation : Federation
        Its data.
    rounds : int, optional
        Rounds of each run; by default a third of those of the experiment, from 10 to 100.
    seeds : int
        The number of seeds, starting with that of the experiment. ``data.seed`` stays the same.
    by : str
        The metric for the choice, as in a study.
    seconds_a_round : float, optional
        The time of a round of FedAvg; by default it is measured.

    Returns
    -------
    Trial
        With its cost.
    """
    planned = (
        min(max(experiment.training.rounds // 3, FEWEST_ROUNDS), MOST_ROUNDS)
        if rounds is None
        else rounds
    )
    described = [method for family in FAMILIES.values() for method in family.methods]
    methods = [
        {key: value for key, value in method.items() if key != "cost"} for method in described
    ]
    base = experiment.plain()
    for key in ("method", "seed"):
        base.pop(key, None)
    base["training"] = {**base["training"], "rounds": planned}
    # One evaluation is enough, and runs are not resumed. The plain form has no defaults for these.
    base["evaluation"] = {
        **base["evaluation"],
        "every": planned,
        "select": "last",
        "patience": None,
        "local": False,
    }
    base["evaluation"] |= {"keep_local": False, "fine_tune": None}
    for key in ("select_by", "last"):
        base["evaluation"].pop(key, None)
    base["checkpoint_every"] = planned
    has_validation = bool(federation.split("val").sizes[federation.seen].sum())
    mapping = {
        "base": base,
        "methods": methods,
        "seeds": list(range(experiment.seed, experiment.seed + seeds)),
        "metrics": list(dict.fromkeys([by, "mean", "worst10", "sigma_clients"])),
        "split": "val" if has_validation else "test",
    }
    study = study_from(mapping, "the trial")
    each = _seconds(experiment, federation) if seconds_a_round is None else seconds_a_round
    cost = sum(float(method["cost"]) for method in described)
    return Trial(study, planned, by, each * planned * seeds * cost)


def _seconds(experiment: Experiment, federation: Federation) -> float:
    """Measure a round of FedAvg, without the first one, which is a warm-up."""
    training = replace(experiment.training, rounds=2)
    ends: list[float] = []
    train(
        federation,
        method="fedavg",
        model=experiment.model,
        training=training,
        machine=experiment.machine,
        evaluation=Evaluation(every=0),
        seed=experiment.seed,
        on_round=lambda progress: ends.append(time.perf_counter()),
    )
    return ends[-1] - ends[0]
