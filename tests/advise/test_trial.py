"""The trial: its plan, its cost, and when it contradicts an advice."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from equipoise.advise import FAMILIES, Advice, plan_trial
from equipoise.config import experiment_from
from equipoise.errors import InputError
from equipoise.run.files import Journal
from equipoise.study import Results

SMALL = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"rounds": 2, "cohort": 4},
    "seed": 5,
}
LABELS = ["fedavg", "feddyn", "fedavgm", "ditto", "fedavg-finetuned", "term", "local"]


def trial_of(mapping=SMALL, **options):
    experiment = experiment_from(mapping)
    return plan_trial(experiment, experiment.federation(), seconds_a_round=0.5, **options)


@pytest.mark.parametrize(("rounds", "planned"), [(2, 10), (60, 20), (1000, 100)])
def test_a_third_of_the_rounds(rounds, planned):
    trial = trial_of({**SMALL, "training": {"rounds": rounds}})
    assert trial.rounds == planned
    assert {job.experiment.training.rounds for job in trial.study.jobs} == {planned}
    assert trial_of({**SMALL, "training": {"rounds": rounds}}, rounds=3).rounds == 3


def test_the_study_is_the_experiment_with_one_or_two_methods_of_each_family():
    evaluation = {"select": "best", "patience": 3, "local": True, "last": 2, "metrics": ["auroc"]}
    trial = trial_of({**SMALL, "method": "gifair", "evaluation": evaluation}, seeds=3, by="worst10")
    study = trial.study
    assert (list(study.methods), study.seeds, study.split) == (LABELS, (5, 6, 7), "val")
    for job in study.jobs:
        made = job.experiment
        assert (made.model["hidden"], made.training.cohort, made.data["seed"]) == ([4], 4, 5)
        assert (made.evaluation.select, made.evaluation.last, made.evaluation.local) == (
            "last",
            None,
            False,
        )
        assert bool(made.evaluation.fine_tune) == (job.method == "fedavg-finetuned")
    assert study.metrics[0] == trial.by == "worst10"


def test_without_validation_data_test_data_are_used():
    data = {"name": "digits", "splits": [0.8, 0.0, 0.2]}
    assert trial_of({**SMALL, "data": data}).study.split == "test"


def test_the_cost_is_that_of_all_runs():
    trial = trial_of(seeds=2)
    factors = [method["cost"] for family in FAMILIES.values() for method in family.methods]
    assert trial.seconds == pytest.approx(0.5 * 10 * 2 * sum(factors))
    assert (
        trial.cost
        == f"7 methods × 2 seeds × 10 rounds, about {round(trial.seconds)} s on this machine"
    )
    assert "about 3 min" in replace(trial, seconds=180.0).cost
    assert "about 2.0 h" in replace(trial, seconds=7200.0).cost


def test_rounds_are_timed_if_nobody_knows_how_long_they_take():
    experiment = experiment_from(SMALL)
    assert 0 < plan_trial(experiment, experiment.federation()).seconds < 600


# ---- verdicts ------------------------------------------------------------------------------------


def results_of(trial, directory, scores):
    """Write the rows of runs in which each client has a score, and summarise their means."""
    summaries = {}
    for job in trial.study.jobs:
        values = scores[job.method]
        path = directory / job.path
        path.mkdir(parents=True, exist_ok=True)
        same = {
            "round": 10,
            "model": "global",
            "split": "val",
            "unseen": False,
            "group": "all",
            "n": 9,
            "loss": 1.0,
        }
        Journal(path / "metrics.jsonl").append(
            [{**same, "client": client, "accuracy": value} for client, value in enumerate(values)]
        )
        part = {"mean": float(np.mean(values)), "groups": {}}
        summaries[job.path] = {
            "score": "accuracy",
            "round": 10,
            "results": {"global": {"seen": part}},
        }
    return Results(trial.study, summaries, {}, directory)


def scored(**means):
    """Ten clients around the mean of each method, with different noise for each."""
    random = np.random.default_rng(0)
    return {
        label: means.get(label.replace("-", "_"), 0.5) + 0.02 * random.normal(size=10)
        for label in LABELS
    }


def test_an_advice_is_supported_if_its_family_is_best(tmp_path):
    trial = trial_of(seeds=1)
    results = results_of(trial, tmp_path, scored(ditto=0.8, fedavg_finetuned=0.9))
    verdict = trial.judge(Advice("personal", ()), results, tmp_path)
    found = (verdict.supported, verdict.pick, verdict.advised, verdict.family)
    assert found == (True, "fedavg-finetuned", "fedavg-finetuned", "personal")
    assert verdict.difference == 0


def test_an_advice_is_supported_if_others_are_better_by_chance_only(tmp_path):
    trial = trial_of(seeds=1)
    scores = scored(fedavg=0.8)
    scores["feddyn"] = scores["fedavg"] + np.linspace(-0.04, 0.05, 10)
    verdict = trial.judge(Advice("average", ()), results_of(trial, tmp_path, scores), tmp_path)
    assert (verdict.supported, verdict.pick, verdict.advised) == (True, "feddyn", "fedavg")
    assert verdict.difference == pytest.approx(0.005)
    assert verdict.standard_error == pytest.approx(
        np.std(np.linspace(-0.04, 0.05, 10), ddof=1) / 10**0.5
    )


def test_few_clients_and_one_seed_are_compared_over_clients(tmp_path):
    trial = trial_of(seeds=1)
    gains = np.array([0.1, 0.8, 0.0, 0.0])
    scores = {label: np.full(4, 0.2) for label in LABELS}
    scores["feddyn"] = scores["fedavg"] + gains
    verdict = trial.judge(Advice("average", ()), results_of(trial, tmp_path, scores), tmp_path)
    assert verdict.standard_error == pytest.approx(np.std(gains, ddof=1) / 2)
    assert (verdict.supported, verdict.pick) == (True, "feddyn")


def test_an_advice_is_contradicted_if_another_family_is_clearly_better(tmp_path):
    trial = trial_of(seeds=1)
    scores = scored(fedavg=0.8)
    scores["feddyn"] = scores["fedavg"] + np.linspace(0.04, 0.05, 10)
    verdict = trial.judge(Advice("average", ()), results_of(trial, tmp_path, scores), tmp_path)
    assert (verdict.supported, verdict.pick, verdict.family) == (False, "feddyn", "corrected")
    assert verdict.advised == "fedavg"


def test_low_values_win_where_they_are_better(tmp_path):
    trial = replace(trial_of(seeds=1), by="loss")
    results = results_of(trial, tmp_path, scored())
    for path, summary in results.summaries.items():
        summary["results"]["global"]["seen"]["loss"] = 0.1 if "ditto" in str(path) else 1.0
    assert trial.judge(Advice("average", ()), results, tmp_path).pick == "ditto"


def test_a_trial_whose_runs_failed_cannot_judge(tmp_path):
    trial = trial_of(seeds=1)
    lost = {job.path: "it diverged" for job in trial.study.jobs}
    with pytest.raises(InputError, match="the trial cannot judge the advice: it diverged"):
        trial.judge(Advice("average", ()), Results(trial.study, {}, lost), tmp_path)


def test_a_trial_on_the_digits(tmp_path):
    trial = trial_of(rounds=2, seeds=1)
    results = trial.study.run(tmp_path)
    assert results.failures == {}
    verdict = trial.judge(Advice("corrected", ()), results, tmp_path)
    means = {}
    for label in LABELS:
        summary = json.loads((tmp_path / f"base/{label}/seed5/summary.json").read_text())
        found = summary["validation"]
        means[label] = found["personal" if "personal" in found else "global"]["seen"]["mean"]
    best = max(means, key=means.__getitem__)
    assert verdict.pick == best
    assert verdict.difference == pytest.approx(means[best] - max(means["feddyn"], means["fedavgm"]))
