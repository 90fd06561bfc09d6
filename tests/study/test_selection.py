"""DomainBed's rules to choose hyper-parameters, on runs and on artificial summaries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equipoise.data import load
from equipoise.errors import InputError
from equipoise.study import Results, study_from
from equipoise.study.selection import RULES

GROUPS = ["plain", "rotated", "textured"]
DATA = {"name": "digits", "splits": [0.8, 0.2, 0], "leave_out": GROUPS}
STUDY = {
    "base": {"data": DATA, "model": {"name": "mlp", "hidden": [4]}, "training": {"rounds": 1}},
    "methods": ["fedavg", {"name": "fedprox", "grid": {"mu": [0.1, 1]}}],
    "tuning": {"seed": 5, "selection": list(RULES)},
    "metrics": ["mean"],
}


def test_several_groups_are_left_out_together():
    federation = load("digits", leave_out=["plain", "textured"])
    held_out = {federation.group_names[group] for group in federation.groups[federation.unseen]}
    assert held_out == {"plain", "textured"}
    assert federation.train.sizes[federation.unseen].sum() == 0
    with pytest.raises(InputError, match="did you mean 'plain'"):
        load("digits", leave_out=["textured", "plane"])


def test_every_two_groups_are_left_out_once_for_cross_validation():
    study = study_from(STUDY, tune=True)
    pairs = [job for job in study.jobs if "+" in job.setting]
    assert {job.setting: job.experiment.data["leave_out"] for job in pairs} == {
        "plain+rotated": ["plain", "rotated"],
        "plain+textured": ["plain", "textured"],
        "rotated+textured": ["rotated", "textured"],
    }
    assert {job.method for job in pairs} == set(study.methods)
    assert study.settings == tuple(GROUPS)
    without = {**STUDY, "tuning": {}}
    assert [job for job in study_from(without, tune=True).jobs if "+" in job.setting] == []
    assert [job for job in study_from(STUDY).jobs if "+" in job.setting] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tuning": {"selection": ["oracel"]}},
            "unknown value 'oracel' in tuning of s.yaml: selection; did you mean 'oracle'",
        ),
        (
            {"tuning": {"selection": "oracle"}},
            "tuning of s.yaml: selection must be a list of different names",
        ),
        (
            {"base": {**STUDY["base"], "data": {**DATA, "leave_out": GROUPS[:2]}}},
            "tuning of s.yaml: leave-one-domain-out needs three left-out groups or more in setting "
            "'base', got plain, rotated",
        ),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        study_from({**STUDY, **changes}, "s.yaml", tune=True)


def made_up(study, validation, tested):
    """Make results from validation means by (setting, method) and test means by left-out group."""
    summaries = {}
    for job in study.jobs:
        groups = tested[job.setting, job.method]
        summaries[job.path] = {
            "score": "accuracy",
            "results": {
                "global": {
                    "seen": {"mean": validation.get((job.setting, job.method), 0.0), "groups": {}}
                }
            },
            "tested": {"global": {"unseen": {"mean": 0.0, "groups": groups}}},
        }
    return Results(study, summaries, {})


def test_each_rule_chooses_by_its_own_numbers():
    study = study_from(STUDY, tune=True)
    weak, strong = "fedprox mu=0.1", "fedprox mu=1"
    validation = {
        (group, label): score for group in GROUPS for label, score in ((weak, 0.9), (strong, 0.8))
    }
    tested = {(job.setting, job.method): {} for job in study.jobs}
    # Left out alone: weak is better on plain, strong on the others.
    alone = {"plain": (0.5, 0.4), "rotated": (0.3, 0.6), "textured": (0.2, 0.7)}
    for group, scores in alone.items():
        for label, score in zip((weak, strong), scores, strict=True):
            tested[group, label] = {group: score}
        tested[group, "fedavg"] = {group: 0.1}
    # Left out together: strong is better on average for plain, weak for rotated and textured.
    together = {
        "plain+rotated": ({"plain": 0.6, "rotated": 0.1}, {"plain": 0.1, "rotated": 0.5}),
        "plain+textured": ({"plain": 0.6, "textured": 0.2}, {"plain": 0.2, "textured": 0.3}),
        "rotated+textured": ({"rotated": 0.4, "textured": 0.4}, {"rotated": 0.3, "textured": 0.3}),
    }
    for pair, both in together.items():
        for label, groups in zip((weak, strong), both, strict=True):
            tested[pair, label] = groups
        tested[pair, "fedavg"] = dict.fromkeys(pair.split("+"), 0.1)
    results = made_up(study, validation, tested)
    found = results.selected("base")
    assert list(found) == list(RULES)
    chosen = {
        rule: [one.values["mu"] for one in by_method["fedprox"]]
        for rule, by_method in found.items()
    }
    assert chosen == {
        "training-domain": [0.1, 0.1, 0.1],
        # For plain: (0.1 + 0.2) / 2 against (0.5 + 0.3) / 2; for rotated (0.6 + 0.4) / 2 against
        # (0.1 + 0.3) / 2.
        "leave-one-domain-out": [1, 0.1, 0.1],
        "oracle": [0.1, 1, 1],
    }
    values = {
        rule: [one.tested for one in by_method["fedprox"]] for rule, by_method in found.items()
    }
    assert values == {
        "training-domain": [0.5, 0.3, 0.2],
        "leave-one-domain-out": [0.4, 0.3, 0.2],
        "oracle": [0.5, 0.6, 0.7],
    }
    assert [one.tested for one in found["oracle"]["fedavg"]] == [0.1, 0.1, 0.1]
    title, header, rows = results.selection_table("base")
    assert header == ["method", *RULES.values()]
    assert rows == [["fedavg", "0.100", "0.100", "0.100"], ["fedprox", "0.333", "0.300", "0.600"]]
    assert f"**{title}**" in results.markdown()
    assert "chosen by test data" in results.markdown()
    # If the run of a fold is missing, the mean over folds is not shown.
    partial = {
        path: own
        for path, own in results.summaries.items()
        if path != Path(f"textured/{weak}/seed5")
    }
    partial = {
        path: own for path, own in partial.items() if path != Path(f"textured/{strong}/seed5")
    }
    assert Results(study, partial, {}).selection_table("base")[2][1] == ["fedprox", "–", "–", "–"]


def test_rules_on_runs(tmp_path):
    results = study_from(STUDY, tune=True).run(tmp_path)
    assert results.failures == {}
    plain = json.loads((tmp_path / "results.json").read_text())
    for one in plain["selection"]:
        variants = [one["method"]] if not one["values"] else [f"fedprox mu={mu}" for mu in (0.1, 1)]
        scores = {}
        for label in variants:
            summary = json.loads(
                (tmp_path / one["group"] / label / "seed5/summary.json").read_text()
            )
            tested = summary["results"]["global"]["unseen"]["groups"][one["group"]]
            scores[label] = {
                "training-domain": summary["validation"]["global"]["seen"]["mean"],
                "oracle": tested,
                "tested": tested,
            }
        chosen = f"fedprox mu={one['values']['mu']}" if one["values"] else one["method"]
        assert one["tested"] == scores[chosen]["tested"]
        if one["rule"] in scores[chosen]:
            assert one["score"] == max(own[one["rule"]] for own in scores.values())
    assert len(plain["selection"]) == 3 * 2 * 3
    # Nothing is run again the second time.
    seen = []
    study_from(STUDY, tune=True).run(tmp_path, watch=lambda job, outcome: seen.append(outcome))
    assert set(seen) == {"already there"}
