"""Studies: their plans, that nothing is repeated, and their tables."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from equipoise.cli.show.progress import progress_of_study
from equipoise.config import experiment_from
from equipoise.errors import InputError
from equipoise.study import Results, Tuning, load_study, study_from, value_of
from equipoise.study.runs import MOST_ON_GPU, at_a_time, carry_out
from tests.engine.gpu import pretend_gpus
from tests.study.small import compare, snapshot
from tests.tiny_clip import write_clip

BASE = {"data": "digits", "model": {"name": "mlp", "hidden": [8]}, "training": {"rounds": 2}}
STUDY = {"base": BASE, "methods": ["fedavg", "local"], "seeds": [0, 1]}


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: these tests compare bits between processes, and threads change rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def score_by_hand(directory, *, model, metric, split="test"):
    """Compute a metric from the rows of metrics.jsonl, in plain Python."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    last = max(row["round"] for row in rows)
    wanted = (last, model, split, False)
    rows = [
        row for row in rows if (row["round"], row["model"], row["split"], row["unseen"]) == wanted
    ]
    values = [row["accuracy"] for row in rows]
    groups = {
        name: [r["accuracy"] for r in rows if r["group"] == name]
        for name in {r["group"] for r in rows}
    }
    means = {name: sum(own) / len(own) for name, own in groups.items()}
    if metric.startswith("groups."):
        return means[metric.removeprefix("groups.")]
    return {
        "mean": sum(values) / len(values),
        "sigma_clients": statistics.pstdev(values),
        "sigma_groups": statistics.pstdev(means.values()),
        "worst_group": min(means.values()),
    }[metric]


def unmarked(markdown):
    """Return the lines of tables without marks."""
    lines = markdown.splitlines()
    return [re.sub(r"\*\*|</?u>| †", "", line) if line.startswith("|") else line for line in lines]


def outcomes(study, out, **options):
    seen = []
    results = study.run(
        out, watch=lambda job, outcome: seen.append((job.path.as_posix(), outcome)), **options
    )
    return results, seen


# ---- planning ------------------------------------------------------------------------------------


def test_methods_by_settings_by_seeds():
    study = study_from(
        {
            "base": BASE,
            "methods": ["fedavg", {"name": "fedprox", "mu": 1, "label": "strong"}],
            "settings": {
                "even": {"data.imbalance": 1},
                "uneven": {"data": {"imbalance": 20}, "training.rounds": 3},
            },
            "seeds": [4, 5],
        }
    )
    assert [job.path.as_posix() for job in study.jobs] == [
        f"{setting}/{method}/seed{seed}"
        for seed in (4, 5)
        for setting in ("even", "uneven")
        for method in ("fedavg", "strong")
    ]
    last = study.jobs[-1].experiment
    expected = experiment_from(
        {
            "method": {"name": "fedprox", "mu": 1.0},
            "data": {"name": "digits", "imbalance": 20},
            "model": {"name": "mlp", "hidden": [8]},
            "training": {"rounds": 3},
            "seed": 5,
        }
    )
    assert last.plain() == expected.plain()
    assert study.jobs[0].experiment.data["imbalance"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": []}, "unknown key 'method' in s.yaml; did you mean 'methods'?"),
        ({"base": None}, "s.yaml: base must be an experiment"),
        (
            {"base": {**BASE, "method": "fedavg"}},
            "s.yaml: base.method is not valid in a study; use methods",
        ),
        ({"base": {**BASE, "seed": 1}}, "s.yaml: base.seed is not valid in a study; use seeds"),
        (
            {"base": {"data": "digits", "trainin": {}}},
            "unknown key 'trainin' in base of s.yaml; did you mean 'training'?",
        ),
        (
            {"methods": "fedavg"},
            "s.yaml: methods must be a list of names or mappings with a name, got 'fedavg'",
        ),
        (
            {"methods": ["fedvag"]},
            "unknown method 'fedvag' in methods of s.yaml; did you mean 'fedavg'?",
        ),
        (
            {"methods": ["fedavg", {"name": "fedavg"}]},
            "s.yaml: two methods are called 'fedavg'; give them different labels",
        ),
        (
            {"methods": [{"name": "fedavg", "label": "../x"}]},
            "has the label '../x', which cannot name a directory",
        ),
        (
            {"methods": [{"mu": 1}]},
            "s.yaml: the method {'mu': 1} in methods has no name; it needs one, such as {name: "
            "fedprox}",
        ),
        (
            {"methods": [{"fedprox": {"mu": 0.1}}]},
            "s.yaml: the method {'fedprox': {'mu': 0.1}} in methods has no name; write {name: "
            "fedprox, mu: 0.1}",
        ),
        ({"settings": []}, "s.yaml: settings must be labels with what they change, got []"),
        ({"settings": {"a": 3}}, "settings.a of s.yaml must hold keys with values, got 3"),
        (
            {"settings": {"a": {"seed": 3}}},
            "settings.a of s.yaml: seed is not valid in a setting; use seeds",
        ),
        (
            {"settings": {"a": {"data.imbalanse": 3}}},
            "unknown key 'data.imbalanse' in settings.a of s.yaml; did you mean",
        ),
        ({"seeds": 3}, "s.yaml: seeds must be a list of different whole numbers, got 3"),
        ({"seeds": [1, 1]}, "s.yaml: seeds must be a list of different whole numbers, got [1, 1]"),
        ({"seeds": [True]}, "s.yaml: seeds must be a list of different whole numbers, got [True]"),
        ({"metrics": ["men"]}, "unknown metric 'men' in metrics of s.yaml; did you mean 'mean'?"),
        ({"metrics": "mean"}, "s.yaml: metrics must be a list of different names, got 'mean'"),
        ({"metrics": ["global.men"]}, "unknown metric 'global.men' in metrics of s.yaml"),
        ({"split": "train"}, "unknown split 'train' in s.yaml. Valid: test, val"),
        ({"tuning": 3}, "tuning of s.yaml must hold keys with values, got 3"),
        ({"tuning": {"sed": 3}}, "unknown key 'sed' in tuning of s.yaml; did you mean 'seed'?"),
        ({"tuning": {"seed": "a"}}, "tuning of s.yaml: seed must be a whole number, got 'a'"),
        ({"seeds": [-1]}, "seeds of s.yaml: seed must be from 0 to"),
        ({"tuning": {"by": "sigma"}}, "unknown metric 'sigma' in tuning of s.yaml"),
        ({"tuning": {"by": "clients"}}, "unknown metric 'clients' in tuning of s.yaml"),
        (
            {"tuning": {"by": "worst_client_id"}},
            "unknown metric 'worst_client_id' in tuning of s.yaml",
        ),
        (
            {"tuning": {"by": "worst_group_name"}},
            "unknown metric 'worst_group_name' in tuning of s.yaml",
        ),
        ({"tuning": {"by": "groups."}}, "unknown metric 'groups.' in tuning of s.yaml"),
        ({"metrics": ["global.bytes_up"]}, "unknown metric 'global.bytes_up' in metrics of s.yaml"),
        (
            {"methods": [{"name": "qffl", "grid": {"q": 1}}]},
            "s.yaml: grid of method 'qffl' must have hyper-parameters with lists of values, got "
            "{'q': 1}",
        ),
        (
            {"methods": [{"name": "qffl", "grid": {"q": [1, 2, 1]}}]},
            "s.yaml: grid of method 'qffl' has q=1 twice",
        ),
        (
            {"methods": [{"name": "fedavg", "grid": {"aggregation": [{"name": "a/b", "q": 1}]}}]},
            "has the label 'fedavg aggregation=a/b,q=1', which cannot name a directory",
        ),
        (
            {"methods": ["fedavg", {"name": "qffl", "grid": {"p": [1, 2]}}]},
            "unknown key 'method.p' in grid of method 'qffl' of s.yaml. Valid with method 'qffl'",
        ),
        (
            {"methods": ["fedavg", {"name": "qffl", "grid": {"q": [1, "two"]}}]},
            "grid of method 'qffl' of s.yaml: method.q must be a number, got 'two'",
        ),
        (
            {"methods": [{"name": "fedavg", "grid": {"training.optimizer.rate": [1]}}]},
            "unknown key 'training.optimizer.rate' in grid of method 'fedavg' of s.yaml",
        ),
        (
            {
                "methods": [
                    {
                        "name": "fedavg",
                        "grid": {"training.epochs": [1, 2]},
                        "set": {"training": {"epochs": 3}},
                    }
                ]
            },
            "grid of method 'fedavg' of s.yaml: training.epochs replaces training.epochs in set of "
            "method 'fedavg' of s.yaml; leave one of them out",
        ),
        (
            {
                "methods": [
                    {
                        "name": "fedavg",
                        "grid": {"training.optimizer.lr": [1], "training.optimizer": ["adam"]},
                    }
                ]
            },
            "training.optimizer replaces training.optimizer.lr in grid of method 'fedavg'",
        ),
        (
            {"methods": [{"name": "fedprox", "grid": {"mu": [1], "method.mu": [2]}}]},
            "method.mu replaces method.mu in grid of method 'fedprox' of s.yaml",
        ),
        (
            {"methods": [{"name": "fedavg", "label": "ö" * 128}]},
            "which is too long to name a directory",
        ),
    ],
)
def test_mistakes_are_found_before_anything_runs(changes, message):
    with pytest.raises(InputError) as caught:
        study_from({**STUDY, **changes}, "s.yaml")
    assert message in str(caught.value)


def test_which_model_a_short_name_means():
    both = {
        "bytes_up": 7,
        "results": {
            "global": {"seen": {"mean": 0.1, "groups": {"a": 0.3}}, "unseen": {"mean": 0.2}},
            "personal": {"seen": {"mean": 0.9, "groups": {"a": 0.8, "b": None}}},
        },
    }
    alone = {"results": {"global": both["results"]["global"]}}
    assert value_of(both, "mean") == 0.9
    assert value_of(alone, "mean") == 0.1
    assert value_of(both, "global.mean") == value_of(both, "global.seen.mean") == 0.1
    assert value_of(both, "unseen.mean") == value_of(both, "global.unseen.mean") == 0.2
    assert value_of(both, "groups.a") == 0.8
    assert value_of(both, "groups.b") is None
    assert value_of(both, "bytes_up") == 7
    assert value_of(alone, "personal.mean") is None
    # Local models are named explicitly, or not used.
    trained = {
        "results": {**alone["results"], "local": {"seen": {"mean": 0.6, "groups": {"a": 0.7}}}}
    }
    assert (value_of(trained, "mean"), value_of(trained, "local.mean")) == (0.1, 0.6)
    assert value_of(trained, "local.groups.a") == 0.7
    assert value_of(trained, "local.unseen.mean") is value_of(alone, "local.mean") is None


# ---- a part of a study ---------------------------------------------------------------------------

WIDE = {
    "base": BASE,
    "methods": [
        "fedavg",
        {"name": "fedprox", "label": "strong", "mu": 1, "grid": {"mu": [1, 2]}},
        "local",
    ],
    "settings": {
        "even": {"data.imbalance": 1},
        "uneven": {"data.imbalance": 20, "training.rounds": 3},
    },
    "seeds": [4, 5],
    "tuning": {"seed": 9, "set": {"training.rounds": 4}},
}


def test_a_part_of_a_study_is_the_same_jobs():
    whole = {job.path: job.experiment.plain() for job in study_from(WIDE).jobs}
    study = study_from(WIDE, settings=["uneven"], methods=["local", "strong"], seeds=[5])
    assert (study.settings, study.methods, study.seeds) == (("uneven",), ("strong", "local"), (5,))
    assert [job.path.as_posix() for job in study.jobs] == [
        "uneven/strong/seed5",
        "uneven/local/seed5",
    ]
    assert all(job.experiment.plain() == whole[job.path] for job in study.jobs)
    assert [job.seed for job in study_from(WIDE, methods=["local"], seeds=[7, 6]).jobs] == [
        7,
        7,
        6,
        6,
    ]


def test_overrides_have_the_last_word():
    study = study_from(
        WIDE, overrides=["training.rounds=1", "data.imbalance=2", "machine.device=cpu"]
    )
    made = [job.experiment for job in study.jobs]
    assert len(made) == 12
    assert {(one.training.rounds, one.data["imbalance"], one.machine.device) for one in made} == {
        (1, 2.0, "cpu")
    }
    assert study.jobs[0].path == study_from(WIDE).jobs[0].path
    tuned = study_from(WIDE, tune=True, overrides=["training.rounds=1"])
    assert {job.experiment.training.rounds for job in tuned.jobs} == {1}


def test_a_part_of_a_study_that_is_tuned_keeps_the_first_method():
    grids = {**WIDE, "methods": [*WIDE["methods"], {"name": "qffl", "grid": {"q": [0, 1]}}]}
    study = study_from(grids, tune=True, methods=["qffl"], settings=["even"], seeds=[2])
    assert [job.path.as_posix() for job in study.jobs] == [
        f"even/{label}/seed2" for label in study.methods
    ]
    assert study.methods == ("fedavg", "qffl q=0", "qffl q=1")
    assert (list(study.tried), study.seeds, study.tuning.seed) == (["qffl"], (2,), 2)
    first = {**grids, "methods": grids["methods"][:0:-1]}
    study = study_from(first, tune=True, methods=["strong"])
    assert study.methods == ("qffl q=0", "qffl q=1", "strong mu=1", "strong mu=2")
    assert (list(study.tried), study.reference) == (["strong"], ("qffl q=0", "qffl q=1"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"settings": ["evn"]},
            "unknown setting 'evn' in --setting; did you mean 'even'? Valid: even, uneven",
        ),
        (
            {"methods": ["fedprox"]},
            "unknown method 'fedprox' in --method. Valid: fedavg, local, strong",
        ),
        ({"seeds": [1, 1]}, "--seed must be a list of different whole numbers, got [1, 1]"),
        ({"seeds": [-1]}, "--seed: seed must be from 0 to"),
        ({"seeds": [1, 2], "tune": True}, "--seed: tuning takes one seed, got 1, 2"),
        ({"methods": ["local"], "tune": True}, "s.yaml: no method has a grid of values to try"),
        (
            {"metrics": ["mean", "mean"]},
            "--metrics must be a list of different names, got ['mean', 'mean']",
        ),
        (
            {"overrides": ["method.mu=2"]},
            "--set method.mu=2: method cannot be set for all runs of a study; change",
        ),
        (
            {"overrides": ["methods=[local]"]},
            "methods cannot be set for all runs of a study; change the methods in",
        ),
        (
            {"overrides": ["seed=2"]},
            "--set seed=2: seed cannot be set for all runs of a study; use --seed",
        ),
        (
            {"overrides": ["trainig.rounds=2"]},
            "unknown key 'trainig' in --set trainig.rounds=2; did you mean 'training'",
        ),
        (
            {"overrides": ["training.rounds=x"]},
            "--set training.rounds=x: training.rounds must be a whole number, got 'x'",
        ),
    ],
)
def test_mistakes_in_choosing_a_part(options, message):
    with pytest.raises(InputError) as caught:
        study_from(WIDE, "s.yaml", **options)
    assert message in str(caught.value)


def test_columns_of_groups_that_the_part_does_not_have_stay_empty(tmp_path):
    write_silos(tmp_path / "silos", all=[0.0])
    silos = {"name": "silos", "root": str(tmp_path / "silos"), "task": "regression"}
    settings = {"mixed": {"data": silos}, "by style": None}
    mapping = {**STUDY, "methods": ["fedavg"], "settings": settings, "metrics": ["groups.plain"]}
    results, _ = outcomes(study_from(mapping, settings=["mixed"], seeds=[0]), tmp_path / "runs")
    assert results.cell("mixed", "fedavg", "groups.plain") == "–"
    assert results.warnings == ["no run has a value of groups.plain"]
    with pytest.raises(InputError, match="unknown group 'plain' in --metrics. Valid: all"):
        study_from(mapping, settings=["mixed"], metrics=["groups.plain"]).run(tmp_path / "again")


# ---- running -------------------------------------------------------------------------------------


def test_tables_equal_what_the_runs_say(tmp_path):
    metrics = ["mean", "sigma_groups", "worst_group", "global.mean"]
    results, _ = outcomes(study_from({**STUDY, "metrics": metrics}), tmp_path)
    groups = ["plain", "blurred", "inverted", "rotated", "textured"]
    assert results.groups("base") == groups
    csv = [line.split(",") for line in results.csv().splitlines()]
    assert csv[0] == [
        "setting",
        "method",
        "model",
        "metric",
        "mean",
        "std",
        "n",
        "rank",
        "p",
        "low",
        "high",
    ]
    models = {(method, metric): model for _, method, model, metric, *_ in csv[1:]}
    found = {(setting, method, metric): row for setting, method, _, metric, *row in csv[1:]}
    for method, model in (("fedavg", "global"), ("local", "personal")):
        for metric in [*metrics[:3], *(f"groups.{group}" for group in groups)]:
            seeds = [
                score_by_hand(
                    tmp_path / "base" / method / f"seed{seed}", model=model, metric=metric
                )
                for seed in (0, 1)
            ]
            mean, std = sum(seeds) / 2, abs(seeds[0] - seeds[1]) / 2**0.5
            row = found["base", method, metric]
            assert [float(row[0]), float(row[1]), int(row[2])] == pytest.approx(
                [mean, std, 2], abs=1e-12
            )
            assert results.cell("base", method, metric) == f"{mean:.3f} ± {std:.3f}"
            assert models[method, metric] == model
            per_seed = f"base,{method},{model},{metric},1,"
            line = next(
                line for line in results.csv_seeds().splitlines() if line.startswith(per_seed)
            )
            assert float(line.removeprefix(per_seed)) == pytest.approx(seeds[1], abs=1e-12)
        worst = min(groups, key=lambda group: float(found["base", method, f"groups.{group}"][0]))
        assert results.worst_group("base", method) == worst
    assert found["base", "local", "global.mean"] == ["", "", "0", "", "", "", ""]
    assert models["fedavg", "global.mean"] == "global"
    assert models["local", "global.mean"] == ""
    markdown = results.markdown()
    assert "mean ± sample standard deviation (n - 1) over 2 seeds" in markdown
    row = " | ".join(results.cell("base", "fedavg", metric) for metric in metrics)
    assert f"| method | model | {' | '.join(metrics)} |" in markdown.splitlines()
    assert f"| fedavg | global | {row} |" in unmarked(markdown)
    row = " | ".join(results.cell("base", "local", f"groups.{group}") for group in groups)
    assert f"| local | personal | {row} |" in unmarked(markdown)
    plain = json.loads((tmp_path / "results.json").read_text())
    assert plain == results.plain()
    said = {(row["method"], row["metric"]): row["model"] for row in plain["results"]}
    assert (said["fedavg", "mean"], said["local", "mean"], said["local", "global.mean"]) == (
        "global",
        "personal",
        None,
    )
    assert plain["warnings"] == []


@pytest.mark.parametrize("split", ["test", "val"])
def test_local_models_are_a_column(tmp_path, split):
    base = {**BASE, "evaluation": {"local": True}}
    study = {
        **STUDY,
        "base": base,
        "methods": ["fedavg"],
        "metrics": ["mean", "local.mean"],
        "split": split,
    }
    results, _ = outcomes(study_from(study), tmp_path)
    for metric, model in (("mean", "global"), ("local.mean", "local")):
        runs = [tmp_path / "base" / "fedavg" / f"seed{seed}" for seed in (0, 1)]
        values = [score_by_hand(run, model=model, metric="mean", split=split) for run in runs]
        assert list(results.values("base", "fedavg", metric).values()) == pytest.approx(
            values, abs=1e-12
        )
    rows = {row["metric"]: row["model"] for row in results.plain()["results"]}
    assert (rows["mean"], rows["local.mean"]) == ("global", "local")


def test_one_seed_has_no_spread(tmp_path):
    results, _ = outcomes(study_from({**STUDY, "seeds": [3], "methods": ["fedavg"]}), tmp_path)
    value = score_by_hand(tmp_path / "base" / "fedavg" / "seed3", model="global", metric="mean")
    assert results.cell("base", "fedavg", "mean") == f"{value:.3f}"
    assert results.spread.endswith("over 1 seed")
    columns = "mean | mean_groups | sigma_clients | sigma_groups | worst10 | worst_group"
    assert results.markdown().splitlines()[2:4] == [
        f"| method | {columns} |",
        "|---|---|---|---|---|---|---|",
    ]


def test_what_is_done_is_left_alone_and_what_is_missing_is_run(tmp_path):
    first, seen = outcomes(study_from({**STUDY, "seeds": [0]}), tmp_path)
    assert [outcome for _, outcome in seen] == ["begun", "done"] * 2
    before = snapshot(tmp_path / "base")
    both, seen = outcomes(study_from(STUDY), tmp_path)
    assert [path for path, outcome in seen if outcome == "done"] == [
        "base/fedavg/seed1",
        "base/local/seed1",
    ]
    after = snapshot(tmp_path / "base")
    assert {path: after[path] for path in before} == before
    assert both.values("base", "fedavg", "mean")[0] == first.values("base", "fedavg", "mean")[0]


def test_two_at_a_time_give_the_same(tmp_path):
    one, _ = outcomes(study_from(STUDY), tmp_path / "one")
    two, seen = outcomes(study_from(STUDY), tmp_path / "two", jobs=2)
    assert sorted(outcome for _, outcome in seen) == ["done"] * 4
    assert two.plain() == one.plain()


def test_as_many_at_a_time_as_fill_the_cores(tmp_path, monkeypatch):
    # A single run is made in this process, whatever the machine.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    results, seen = outcomes(
        study_from({**STUDY, "methods": ["fedavg"], "seeds": [0]}), tmp_path, jobs=None
    )
    assert ([outcome for _, outcome in seen], results.failures) == (["begun", "done"], {})


def test_runs_on_a_gpu_are_as_many_as_its_memory_holds():
    gigabyte = 2**30
    assert at_a_time(40, 16) == 16
    assert at_a_time(5, 16) == 5
    assert at_a_time(40, 16, peak=gigabyte, memory=141 * gigabyte) == MOST_ON_GPU
    # 0.9 · 24 GiB hold four times 4.5 GiB and the half that every process needs.
    assert at_a_time(40, 16, peak=int(4.5 * gigabyte), memory=24 * gigabyte) == 4
    assert at_a_time(40, 16, peak=30 * gigabyte, memory=24 * gigabyte) == 1
    assert at_a_time(40, 2, peak=gigabyte, memory=141 * gigabyte) == 2
    assert at_a_time(0, 2) == 1
    two = {"memory": 24 * gigabyte, "gpus": 2}
    assert at_a_time(40, 16, peak=int(4.5 * gigabyte), **two) == 8
    assert at_a_time(40, 6, peak=int(4.5 * gigabyte), **two) == 6
    assert at_a_time(40, 99, peak=0, **two) == 2 * MOST_ON_GPU
    assert at_a_time(40, 16, peak=30 * gigabyte, **two) == 1


@pytest.mark.parametrize(
    ("device", "runs_at_a_time", "gpus"),
    [("cuda", 8, [0, 1] * 4), ("auto", 8, [0, 1] * 4), ("cuda:1", 4, None), ("cpu", 16, [])],
)
def test_processes_of_a_study_use_the_gpus_in_turn(
    device, runs_at_a_time, gpus, tmp_path, monkeypatch
):
    """The first run alone has shown that a GPU holds four of them."""
    chosen, workers, gigabyte = pretend_gpus(monkeypatch, 2), [], 2**30
    for name, answer in {
        "reset_peak_memory_stats": None,
        "max_memory_reserved": int(4.5 * gigabyte),
        "mem_get_info": (0, 24 * gigabyte),
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)
    monkeypatch.setattr("equipoise.study.runs._run", lambda job, *given: {})

    class Pool:
        def __init__(self, count, context, initializer, initargs):
            workers.append(count)
            for _ in range(count):
                initializer(*initargs)

        def submit(self, function, *given):
            done = Future()
            done.set_result(function(*given))
            return done

        def shutdown(self, **how):
            pass

    monkeypatch.setattr("equipoise.study.runs.ProcessPoolExecutor", Pool)
    base = {**BASE, "machine": {"device": device}}
    study = study_from({**STUDY, "base": base, "seeds": list(range(10))})
    finished = list(carry_out(study.jobs, tmp_path, None, "test", lambda job, what: None))
    assert len(finished) == len(study.jobs) == 20
    assert workers == [runs_at_a_time]
    assert gpus is None or chosen == gpus


@pytest.mark.parametrize("jobs", ["0", "-1", "many", "1.5", ""])
def test_numbers_of_jobs_that_make_no_sense_are_refused(tmp_path, monkeypatch, capsys, jobs):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(STUDY))
    code, _, stderr = compare(monkeypatch, capsys, "small.yaml", f"--jobs={jobs}")
    assert (code, stderr) == (
        2,
        f"error: --jobs must be a whole number from 1, or auto, got {jobs!r}\n",
    )


def test_lines_of_progress_say_how_much_time_is_left(capsys):
    study, now = study_from(STUDY), [0.0]
    with progress_of_study(4, clock=lambda: now[0]) as watch:
        watch(study.jobs[0], "already there")
        for job in study.jobs[1:]:
            watch(job, "begun")
            now[0] += 90
            watch(job, "done")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "already there",
        "done (about 3 min left)",
        "done (about 90 s left)",
        "done",
    ]


@dataclass(frozen=True)
class Rounds:
    """Notes the rounds of each run in a file; other processes get a copy."""

    directory: Path

    def __call__(self, job):
        def note(progress):
            with (self.directory / f"{job.method}{job.seed}").open("a") as lines:
                lines.write(f"{os.getpid()} {progress.round}\n")

        return note


@pytest.mark.parametrize("jobs", [1, 2])
def test_rounds_are_told_in_the_process_of_each_run(jobs, tmp_path):
    study_from(STUDY).run(tmp_path / "out", jobs=jobs, rounds=Rounds(tmp_path))
    processes = set()
    for name in ("fedavg0", "fedavg1", "local0", "local1"):
        rows = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        assert [number for _, number in rows] == ["1", "2"]
        processes |= {process for process, _ in rows}
    assert len(processes) <= jobs
    assert (str(os.getpid()) in processes) is (jobs == 1)


def test_one_failure_does_not_stop_the_others(tmp_path):
    changes = {"fine": None, "wild": {"training.optimizer.lr": 1e30}}
    results, seen = outcomes(
        study_from({**STUDY, "methods": ["fedavg"], "settings": changes}), tmp_path
    )
    assert [path.as_posix() for path in results.failures] == [
        "wild/fedavg/seed0",
        "wild/fedavg/seed1",
    ]
    message = results.failures[Path("wild/fedavg/seed0")]
    assert "is not finite" in message
    assert ("wild/fedavg/seed0", f"failed: {message}") in seen
    assert results.cell("wild", "fedavg", "mean") == "failed"
    assert " ± " in results.cell("fine", "fedavg", "mean")
    assert "Failed: `wild/fedavg/seed0`: " in results.markdown()
    assert results.plain()["failures"]["wild/fedavg/seed1"]


def test_a_directory_of_another_experiment_is_refused_before_anything_runs(tmp_path):
    outcomes(study_from({**STUDY, "methods": ["fedavg"], "seeds": [1]}), tmp_path)
    before = snapshot(tmp_path)
    changed = {
        **STUDY,
        "base": {**BASE, "training": {"rounds": 3}},
        "methods": ["fedavg"],
        "seeds": [0, 1],
    }
    seen = []
    with pytest.raises(InputError) as caught:
        study_from(changed).run(tmp_path, watch=lambda job, outcome: seen.append(outcome))
    assert str(caught.value) == (
        f"{tmp_path / 'base' / 'fedavg' / 'seed1'} holds another experiment: training.rounds is 2 "
        "there and 3 here; choose another directory with --out"
    )
    assert (seen, snapshot(tmp_path)) == ([], before)
    outcomes(study_from({**changed, "settings": {"other": {}}}), tmp_path)
    assert (tmp_path / "other" / "fedavg" / "seed1" / "summary.json").exists()


def test_runs_with_other_checkpoints_are_those_of_the_same_study(tmp_path):
    """Results do not depend on checkpoints."""
    study = {**STUDY, "methods": ["fedavg"], "seeds": [1]}
    outcomes(study_from({**study, "base": {**BASE, "checkpoint_every": 2}}), tmp_path)
    before = snapshot(tmp_path / "base")
    for base in (BASE, {**BASE, "checkpoint_every": 5}):
        _, seen = outcomes(study_from({**study, "base": base}), tmp_path)
        assert seen == [("base/fedavg/seed1", "already there")]
        assert snapshot(tmp_path / "base") == before


def test_names_of_classes_that_come_from_the_data_are_no_difference(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "images"
    for seed, place in enumerate(("photo/cat", "photo/dog", "art/cat", "art/dog")):
        (root / place).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (16, 16), (40 * seed, 40 * number, 0)).save(
                root / place / f"{number}.png"
            )
    clip = {"name": "clip", "source": write_clip(tmp_path / "clip", longest=32)}
    data = {"name": "imagefolder", "root": str(root), "size": 16}
    study = {
        "base": {"data": data, "model": clip, "training": {"rounds": 0}},
        "methods": ["fedavg"],
        "seeds": [0],
    }
    outcomes(study_from(study), tmp_path / "runs")
    config = yaml.safe_load(
        (tmp_path / "runs" / "base" / "fedavg" / "seed0" / "config.yaml").read_text()
    )
    assert config["model"]["class_names"] == ["cat", "dog"]
    before = snapshot(tmp_path / "runs" / "base")
    outcomes(study_from(study), tmp_path / "runs")
    assert snapshot(tmp_path / "runs" / "base") == before
    study["base"]["model"] = {**clip, "class_names": ["cat", "mouse"]}
    with pytest.raises(
        InputError, match="another experiment: model.class_names is .'cat', 'dog'. there and "
    ):
        study_from(study).run(tmp_path / "runs")


def test_a_part_that_only_one_of_two_experiments_has_is_a_difference(tmp_path):
    small = {**STUDY, "methods": ["fedavg"], "seeds": [0]}
    outcomes(study_from(small), tmp_path)
    parted = {**BASE, "data": {"name": "digits", "partition": {"name": "iid", "clients": 4}}}
    with pytest.raises(
        InputError, match="another experiment: data.partition is None there and {'name': 'iid'"
    ):
        study_from({**small, "base": parted}).run(tmp_path)


def test_what_only_flower_needs_makes_no_other_experiment(tmp_path):
    small = {**STUDY, "methods": ["fedavg"], "seeds": [0]}
    outcomes(study_from(small), tmp_path)
    _, seen = outcomes(study_from({**small, "base": {**BASE, "flower": {"retries": 7}}}), tmp_path)
    assert seen == [("base/fedavg/seed0", "already there")]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"round": 2}', "5"])
def test_a_damaged_summary_is_named_and_the_others_run(tmp_path, damage):
    outcomes(study_from({**STUDY, "methods": ["fedavg"], "seeds": [0]}), tmp_path)
    file = tmp_path / "base" / "fedavg" / "seed0" / "summary.json"
    whole = file.read_bytes()
    file.write_text(damage)
    results, seen = outcomes(study_from({**STUDY, "methods": ["fedavg"]}), tmp_path)
    message = results.failures[Path("base/fedavg/seed0")]
    assert str(file) in message
    assert seen[0] == ("base/fedavg/seed0", f"failed: {message}")
    assert seen[-1] == ("base/fedavg/seed1", "done")
    assert message.endswith("; without this file, the same command writes it again")
    file.unlink()
    results, _ = outcomes(study_from({**STUDY, "methods": ["fedavg"]}), tmp_path)
    assert (results.failures, file.read_bytes()) == ({}, whole)


def forget_validation(directory):
    """Change a run's summary to that of an earlier release, without validation and checksums."""
    (directory / "SHA256SUMS").unlink()
    file = directory / "summary.json"
    file.write_text(
        json.dumps(
            {
                key: value
                for key, value in json.loads(file.read_text()).items()
                if key != "validation"
            }
        )
    )


def test_summaries_without_validation_are_completed_from_the_rows(tmp_path):
    study = study_from(
        {**STUDY, "methods": ["fedavg"], "metrics": ["mean", "val.mean", "val.unseen.mean"]}
    )
    first, _ = outcomes(study, tmp_path)
    for seed in (0, 1):
        forget_validation(tmp_path / "base" / "fedavg" / f"seed{seed}")
    again, seen = outcomes(study, tmp_path)
    assert [outcome for _, outcome in seen] == ["already there"] * 2
    assert again.plain() == first.plain()
    by_hand = score_by_hand(
        tmp_path / "base" / "fedavg" / "seed1", model="global", metric="mean", split="val"
    )
    assert again.values("base", "fedavg", "val.mean")[1] == pytest.approx(by_hand, abs=1e-12)
    assert again.values("base", "fedavg", "val.unseen.mean") == {}


def test_damaged_rows_are_named_and_the_others_run(tmp_path):
    study = study_from({**STUDY, "methods": ["fedavg"], "split": "val"})
    outcomes(study, tmp_path)
    forget_validation(tmp_path / "base" / "fedavg" / "seed0")
    file = tmp_path / "base" / "fedavg" / "seed0" / "metrics.jsonl"
    file.write_text(file.read_text()[:-9])
    results, _ = outcomes(study, tmp_path)
    assert results.failures[Path("base/fedavg/seed0")].startswith(
        f"cannot read {file}: JSONDecodeError: "
    )
    assert list(results.values("base", "fedavg", "mean")) == [1]


# ---- which model a number is of ------------------------------------------------------------------

ALONE = {"global": {"seen": {"mean": 0.5}, "unseen": {"mean": 0.4}}}
BOTH = {**ALONE, "personal": {"seen": {"mean": 0.7}}}
OWN = {"personal": {"seen": {"mean": 0.6}, "unseen": {"mean": 0.3}}}


def results_of(study, *parts, score="accuracy"):
    """Make results from given scores of each method's runs, in order; None for a failed run."""
    said = dict(zip(study.methods, parts, strict=True))
    whole = {job.path: said[job.method] for job in study.jobs}
    summaries = {
        path: {"score": score, "bytes_up": 8, "bytes_down": 9, "results": part}
        for path, part in whole.items()
        if part
    }
    return Results(study, summaries, {path: "lost" for path, part in whole.items() if not part})


@pytest.mark.parametrize(
    ("parts", "metrics", "expected"),
    [
        ((ALONE, ALONE), ["mean", "unseen.mean"], {}),
        ((ALONE, None), ["mean"], {}),
        ((None, None), ["mean"], {}),
        ((ALONE, BOTH), ["mean", "bytes_up"], {"fedavg": "global", "local": "personal"}),
        ((ALONE, BOTH), ["unseen.mean"], {}),
        ((ALONE, BOTH), ["global.mean", "personal.mean", "bytes_up"], {}),
        (
            (ALONE, BOTH),
            ["mean", "unseen.mean"],
            {"fedavg": "global", "local": "seen personal, unseen global"},
        ),
        ((OWN, OWN), ["mean", "unseen.mean"], {"fedavg": "personal", "local": "personal"}),
        ((None, OWN), ["mean"], {"fedavg": "–", "local": "personal"}),
    ],
)
def test_tables_say_which_model_numbers_are_of(parts, metrics, expected):
    study = study_from({**STUDY, "metrics": metrics})
    parts = [
        part
        and {
            model: {who: {**own, "groups": {}} for who, own in whose.items()}
            for model, whose in part.items()
        }
        for part in parts
    ]
    results = results_of(study, *parts)
    assert results.models("base", metrics) == expected
    header, _, *rows = unmarked(results.markdown())[2:6]
    cells = {
        method: [results.cell("base", method, metric) for metric in metrics]
        for method in study.methods
    }
    lead = {method: [expected[method]] if expected else [] for method in study.methods}
    assert header == f"| {' | '.join(['method', *(['model'] if expected else []), *metrics])} |"
    assert rows == [
        f"| {' | '.join([method, *lead[method], *cells[method]])} |" for method in study.methods
    ]


def test_a_column_without_a_value_is_named():
    study = study_from({**STUDY, "metrics": ["mean", "personal.mean", "unseen.worst10"]})
    part = {"global": {"seen": {"mean": 0.5, "groups": {}}}}
    results = results_of(study, part, part)
    assert results.warnings == ["no run has a value of personal.mean, unseen.worst10"]
    assert results.plain()["warnings"] == results.warnings
    assert (
        "Warning: no run has a value of personal.mean, unseen.worst10"
        in results.markdown().splitlines()
    )
    assert results_of(study, None, None).warnings == []


# ---- groups that are not there -------------------------------------------------------------------

STYLES = "Valid: blurred, inverted, plain, rotated, textured"


def write_silos(root, **groups):
    """Write a directory per client: targets are the sum of the inputs plus a client's offset."""
    random = np.random.default_rng(0)
    for group, added in groups.items():
        for number, more in enumerate(added):
            folder = root / f"{group}-{number}"
            folder.mkdir(parents=True)
            x = random.normal(size=(20, 2))
            np.savez(folder / "data.npz", x=x, y=x.sum(1) + more)
            (folder / "client.yaml").write_text(f"group: {group}")


def test_a_misspelt_group_is_named_before_anything_runs(tmp_path):
    message = f"unknown group 'plane' in metrics of s.yaml; did you mean 'plain'? {STYLES}"
    for metric in ("groups.plane", "global.unseen.groups.plane"):
        with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
            study_from({**STUDY, "metrics": ["mean", "groups.plain", metric]}, "s.yaml").run(
                tmp_path
            )
    with pytest.raises(
        InputError, match="unknown group 'plane' in --metrics; did you mean 'plain'"
    ):
        study_from(STUDY, "s.yaml", metrics=["groups.plane"]).run(tmp_path)
    tuned = {**GRIDS, "tuning": {"by": "groups.plane"}}
    with pytest.raises(
        InputError, match="unknown group 'plane' in tuning of s.yaml; did you mean 'plain'"
    ):
        study_from(tuned, "s.yaml", tune=True).run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert study_from(tuned, "s.yaml").origins.keys() == {"mean", "sigma_clients"}


def test_a_group_of_one_setting_is_enough(tmp_path):
    write_silos(tmp_path / "silos", all=[0.0])
    silos = {"name": "silos", "root": str(tmp_path / "silos"), "task": "regression"}
    settings = {"mixed": {"data": silos}, "by style": None}
    small = {**STUDY, "methods": ["fedavg"], "seeds": [0], "settings": settings}
    out = tmp_path / "runs"
    results, _ = outcomes(study_from({**small, "metrics": ["groups.plain"]}), out)
    assert results.failures == {}
    assert results.cell("mixed", "fedavg", "groups.plain") == "–"
    value = score_by_hand(
        out / "by style" / "fedavg" / "seed0", model="global", metric="groups.plain"
    )
    assert results.cell("by style", "fedavg", "groups.plain") == f"{value:.3f}"
    before = snapshot(out)
    with pytest.raises(
        InputError, match="unknown group 'plane' in metrics of the study.* Valid: all, blurred"
    ):
        study_from({**small, "metrics": ["groups.plane"]}).run(out)
    assert snapshot(out) == before


def test_data_that_cannot_be_loaded_are_their_own_runs_failure(tmp_path):
    settings = {
        "lost": {"data": {"name": "silos", "root": str(tmp_path / "nowhere")}},
        "fine": None,
    }
    small = {
        **STUDY,
        "methods": ["fedavg"],
        "seeds": [0],
        "settings": settings,
        "metrics": ["groups.plane", "mean"],
    }
    results, _ = outcomes(study_from(small), tmp_path / "runs")
    assert list(results.failures) == [Path("lost/fedavg/seed0")]
    assert results.warnings == ["no run has a value of groups.plane"]
    value = score_by_hand(
        tmp_path / "runs" / "fine" / "fedavg" / "seed0", model="global", metric="mean"
    )
    assert results.cell("fine", "fedavg", "mean") == f"{value:.3f}"


# ---- tuning --------------------------------------------------------------------------------------

GRIDS = {
    "base": BASE,
    "methods": [
        {"name": "fedavg", "weights": "uniform"},
        {
            "name": "term",
            "t": 7,
            "label": "tilted",
            "grid": {"t": [1, 30], "tilts": ["clients", "groups"]},
        },
        "local",
        {"name": "ditto", "grid": {"lam": [0.5, 2]}},
    ],
    "tuning": {"seed": 3, "by": "sigma_clients", "tolerance": 0.5, "set": {"training.rounds": 1}},
    "seeds": [1, 2],
    "metrics": ["mean", "sigma_clients"],
}
VARIANTS = {
    "tilted t=1 tilts=clients": {"t": 1, "tilts": "clients"},
    "tilted t=1 tilts=groups": {"t": 1, "tilts": "groups"},
    "tilted t=30 tilts=clients": {"t": 30, "tilts": "clients"},
    "tilted t=30 tilts=groups": {"t": 30, "tilts": "groups"},
}


def test_a_grid_is_ignored_until_it_is_tuned():
    study = study_from(GRIDS)
    assert (study.methods, study.seeds, study.split) == (
        ("fedavg", "tilted", "local", "ditto"),
        (1, 2),
        "test",
    )
    assert {
        job.experiment.method.aggregation.t for job in study.jobs if job.method == "tilted"
    } == {7}
    assert {job.experiment.training.rounds for job in study.jobs} == {2}


def test_tuning_tries_the_first_method_and_every_combination_with_one_seed():
    study = study_from(GRIDS, tune=True)
    assert (study.seeds, study.split) == ((3,), "val")
    assert study.methods == ("fedavg", *VARIANTS, "ditto lam=0.5", "ditto lam=2")
    assert study.tried == {
        "tilted": VARIANTS,
        "ditto": {"ditto lam=0.5": {"lam": 0.5}, "ditto lam=2": {"lam": 2}},
    }
    for job in study.jobs[1:5]:
        rule = job.experiment.method.aggregation
        assert {"t": rule.t, "tilts": rule.tilts} == VARIANTS[job.method]
        assert (job.experiment.training.rounds, job.experiment.seed) == (1, 3)


def test_there_must_be_something_to_tune():
    with pytest.raises(InputError, match="tuning of s.yaml: seed must be from 0 to"):
        study_from({**GRIDS, "tuning": {"seed": -1}}, "s.yaml", tune=True)
    with pytest.raises(
        InputError, match=re.escape("s.yaml: no method has a grid of values to try")
    ):
        study_from(STUDY, "s.yaml", tune=True)


def test_one_value_is_a_grid_too():
    study = study_from(
        {**STUDY, "methods": ["fedavg", {"name": "qffl", "grid": {"q": [2]}}]}, tune=True
    )
    assert study.tried == {"qffl": {"qffl q=2": {"q": 2}}}
    part = {"global": {"seen": EVEN}}
    assert results_of(study, part, part).chosen("base") == {"qffl": {"q": 2}}
    with pytest.raises(InputError, match="no method has a grid"):
        study_from({**STUDY, "methods": ["fedavg", {"name": "qffl", "grid": {}}]}, tune=True)


@pytest.mark.parametrize(
    ("changes", "options", "place"),
    [
        (
            {"base": {**BASE, "data": {"name": "digits", "splits": [0.8, 0, 0.2]}}},
            {},
            "base of s.yaml",
        ),
        (
            {"settings": {"a": None, "b": {"data.splits": [0.8, 0, 0.2]}}},
            {},
            "settings.b of s.yaml",
        ),
        ({}, {"overrides": ["data.splits=[0.8, 0, 0.2]"]}, "--set data.splits=[0.8, 0, 0.2]"),
    ],
)
def test_tuning_needs_validation_data(changes, options, place):
    mapping = {**GRIDS, **changes}
    message = f"needs validation data; data.splits of {place} has none, got [0.8, 0.0, 0.2]"
    with pytest.raises(InputError, match=f"^tuning {re.escape(message)}$"):
        study_from(mapping, "s.yaml", tune=True, **options)
    with pytest.raises(InputError, match=f"^s.yaml: split: val {re.escape(message)}$"):
        study_from({**mapping, "split": "val"}, "s.yaml", **options)
    assert study_from(mapping, "s.yaml", **options).jobs


def test_which_values_are_best():
    tuning = Tuning(tolerance=0.01)
    measured = {"low": (0.795, 0.10), "same": (0.80, 0.20), "far": (0.70, 0.01)}
    assert tuning.best(measured, reference=0.80) == "low"
    assert Tuning(tolerance=0).best(measured, reference=0.80) == "same"
    assert Tuning(tolerance=0.5).best(measured, reference=0.80) == "far"
    assert tuning.best(measured, reference=0.99) == "same"


# Three clients, two of group plain and one of group textured, with 0.9, 0.9, 0.5 under one value of
# the grid and 0.8, 0.8, 0.7 under the other: the mean is 2.3 / 3 under both. Jain: 2.3² / (3 ·
# 1.87) and 2.3² / (3 · 1.77).
UNEVEN = {
    "mean": 2.3 / 3,
    "mean_groups": 0.7,
    "group_gap": 0.4,
    "jain": 5.29 / 5.61,
    "loss": 1.0,
    "gap_variance": 0.01,
}
EVEN = {
    "mean": 2.3 / 3,
    "mean_groups": 0.75,
    "group_gap": 0.1,
    "jain": 5.29 / 5.31,
    "loss": 1.2,
    "gap_variance": 0.02,
}
UNEVEN |= {"sigma_clients": 0.08**0.5 * 2 / 3, "groups": {"plain": 0.9, "textured": 0.5}}
EVEN |= {"sigma_clients": 0.02**0.5 / 3, "groups": {"plain": 0.8, "textured": 0.7}}
AS_ACCURACIES = ({"worst_group": 0.5, "best_group": 0.9}, {"worst_group": 0.7, "best_group": 0.8})
AS_LOSSES = ({"worst_group": 0.9, "best_group": 0.5}, {"worst_group": 0.8, "best_group": 0.7})


@pytest.mark.parametrize(
    ("by", "of_accuracies", "of_losses"),
    [
        ("sigma_clients", "even", "even"),
        ("group_gap", "even", "even"),
        ("jain", "even", "even"),
        ("gap_variance", "uneven", "uneven"),
        ("loss", "uneven", "uneven"),
        ("mean_groups", "even", "uneven"),
        ("worst_group", "even", "even"),
        ("best_group", "uneven", "uneven"),
        ("groups.textured", "even", "uneven"),
        ("groups.plain", "uneven", "even"),
        ("global.seen.groups.plain", "uneven", "even"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_should_be_high_is_maximised_and_what_should_be_low_minimised(
    by, of_accuracies, of_losses, order
):
    grid = [("uneven", 0.1), ("even", 1.0)]
    tilted = {"name": "qffl", "grid": {"q": [grid[position][1] for position in order]}}
    study = study_from(
        {"base": BASE, "methods": ["fedavg", tilted], "tuning": {"by": by}}, tune=True
    )
    for score, kind, expected in (
        ("accuracy", AS_ACCURACIES, of_accuracies),
        ("loss", AS_LOSSES, of_losses),
    ):
        parts = [
            {"global": {"seen": own | more}} for own, more in zip((UNEVEN, EVEN), kind, strict=True)
        ]
        results = results_of(study, parts[0], *(parts[position] for position in order), score=score)
        assert results.chosen("base") == {"qffl": {"q": dict(grid)[expected]}}


def test_losses_of_a_regression_are_minimised(tmp_path):
    write_silos(tmp_path / "silos", near=[0.0, 0.1, -0.1], far=[4.0])
    data = {"name": "silos", "root": str(tmp_path / "silos"), "task": "regression"}
    tilted = {"name": "term", "grid": {"t": [1, 0.01]}}
    mapping = {
        "base": {**BASE, "data": data},
        "methods": ["fedavg", tilted],
        "tuning": {"by": "worst_group"},
    }
    mapping["tuning"]["tolerance"] = 100
    results, _ = outcomes(study_from(mapping, tune=True), tmp_path / "runs")
    worst = {}
    for t in (0.01, 1):
        file = tmp_path / "runs" / "base" / f"term t={t}" / "seed0" / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [
            row
            for row in rows
            if (row["round"], row["model"], row["split"]) == (2, "global", "val")
        ]
        far = [row["loss"] for row in rows if row["group"] == "far"]
        near = [row["loss"] for row in rows if row["group"] == "near"]
        assert (len(far), len(near)) == (1, 3)
        worst[t] = max(far[0], sum(near) / 3)
    assert worst[0.01] < worst[1]
    assert results.chosen("base") == {"term": {"t": 0.01}}


def test_the_tolerance_is_of_losses_too():
    measured = {"low": (0.50, 0.3), "near": (0.515, 0.1), "far": (0.6, 0.0)}
    assert Tuning(tolerance=0.01).best(measured, 0.51, higher_is_better=False) == "near"
    assert Tuning(tolerance=0.001).best(measured, 0.51, higher_is_better=False) == "low"
    assert Tuning(tolerance=0.2).best(measured, 0.51, higher_is_better=False) == "far"
    assert Tuning(tolerance=0.01).best(measured, 0.1, higher_is_better=False) == "low"


def test_the_first_method_is_the_measure_even_without_the_metric():
    """Only the mean is needed for FedAvg, which has no personal models."""
    ditto = {"name": "ditto", "grid": {"lam": [0.5, 2]}}
    mapping = {"base": BASE, "methods": ["fedavg", ditto], "metrics": ["mean"]}
    mapping["tuning"] = {"by": "personal.sigma_clients"}
    study = study_from(mapping, tune=True)
    first = {"global": {"seen": {**EVEN, "mean": 0.8}}}
    fair, good = (
        {"personal": {"seen": {**own, "mean": mean}}} for own, mean in ((EVEN, 0.3), (UNEVEN, 0.8))
    )
    assert results_of(study, first, fair, good).chosen("base") == {"ditto": {"lam": 2}}
    lost = results_of(study, None, fair, good)
    assert lost.chosen("base") == {"ditto": {"lam": 0.5}}
    assert "base: chosen without the tolerance, because fedavg has no mean" in lost.warnings


def test_where_nothing_can_be_chosen_the_results_say_why():
    mapping = {
        "base": BASE,
        "methods": ["fedavg", {"name": "qffl", "grid": {"q": [1, 2]}}],
        "metrics": ["mean"],
    }
    study = study_from({**mapping, "tuning": {"by": "personal.sigma_clients"}}, tune=True)
    part = {"global": {"seen": EVEN}}
    results = results_of(study, part, part, part)
    assert results.chosen("base") == {}
    assert results.warnings == [
        "base: nothing chosen for qffl, because none of its runs has a value of "
        "personal.sigma_clients"
    ]
    assert results.undecided == [("base", "qffl")]
    assert results_of(study, part, None, None).warnings == []


def test_parts_can_be_tuned(tmp_path):
    parts = [{"name": "qffl", "q": 1}, {"name": "afl"}, "fedavg"]
    local = [{"name": "fedprox", "mu": 0.5}]
    mapping = {
        **GRIDS,
        "methods": ["fedavg", {"name": "fedprox", "grid": {"aggregation": parts, "local": local}}],
    }
    study = study_from(mapping, tune=True)
    labels = ["aggregation=qffl,q=1", "aggregation=afl", "aggregation=fedavg"]
    assert study.methods == (
        "fedavg",
        *(f"fedprox {label} local=fedprox,mu=0.5" for label in labels),
    )
    rules = [job.experiment.method for job in study.jobs[1:]]
    assert [rule.aggregation.name for rule in rules] == ["qffl", "afl", "fedavg"]
    assert rules[0].aggregation.q == 1
    assert {rule.local.mu for rule in rules} == {0.5}
    results, _ = outcomes(study, tmp_path)
    assert results.failures == {}
    runs = [tmp_path / "base" / label / "seed3" for label in study.methods[1:]]
    spreads = [
        score_by_hand(run, model="global", metric="sigma_clients", split="val") for run in runs
    ]
    best = parts[spreads.index(min(spreads))]
    assert results.chosen("base") == {"fedprox": {"aggregation": best, "local": local[0]}}


def test_values_are_chosen_on_validation_data(tmp_path):
    results, _ = outcomes(study_from(GRIDS, tune=True), tmp_path)

    def by_hand(label, model, metric):
        return score_by_hand(
            tmp_path / "base" / label / "seed3", model=model, metric=metric, split="val"
        )

    for label in VARIANTS:
        for metric in ("mean", "sigma_clients"):
            assert results.values("base", label, metric) == {
                3: pytest.approx(by_hand(label, "global", metric), abs=1e-12)
            }
    reference = by_hand("fedavg", "global", "mean")
    fair = [label for label in VARIANTS if by_hand(label, "global", "mean") >= reference - 0.5]
    best = min(fair, key=lambda label: by_hand(label, "global", "sigma_clients"))
    assert results.chosen("base")["tilted"] == VARIANTS[best]
    spreads = {lam: by_hand(f"ditto lam={lam}", "personal", "sigma_clients") for lam in (0.5, 2)}
    assert results.chosen("base")["ditto"] == {"lam": min(spreads, key=spreads.__getitem__)}
    assert json.loads((tmp_path / "results.json").read_text())["chosen"]["base"] == results.chosen(
        "base"
    )
    served = {lam: by_hand(f"ditto lam={lam}", "personal", "worst_group") for lam in (0.5, 2)}
    other = replace(results.study, tuning=replace(results.study.tuning, by="worst_group"))
    chosen = Results(other, results.summaries, {}).chosen("base")
    assert chosen["ditto"] == {"lam": max(served, key=served.__getitem__)}
    assert results.markdown().startswith("**base, validation data: one seed**")
    test_mean = score_by_hand(tmp_path / "base" / "fedavg" / "seed3", model="global", metric="mean")
    assert test_mean != reference


def test_a_variant_that_fails_is_not_chosen(tmp_path):
    wild = {"name": "fedmgda", "grid": {"lr": [0.1, 1e38]}}
    results, _ = outcomes(study_from({**GRIDS, "methods": ["fedavg", wild]}, tune=True), tmp_path)
    assert [path.parts[1] for path in results.failures] == ["fedmgda lr=1e+38"]
    assert results.chosen("base") == {"fedmgda": {"lr": 0.1}}


def test_a_study_of_validation_data(tmp_path):
    results, _ = outcomes(
        study_from({**STUDY, "methods": ["fedavg"], "seeds": [0], "split": "val"}), tmp_path
    )
    value = score_by_hand(
        tmp_path / "base" / "fedavg" / "seed0", model="global", metric="mean", split="val"
    )
    assert results.values("base", "fedavg", "mean") == {0: pytest.approx(value, abs=1e-12)}
    again, seen = outcomes(
        study_from({**STUDY, "methods": ["fedavg"], "seeds": [0], "split": "val"}), tmp_path
    )
    assert seen == [("base/fedavg/seed0", "already there")]
    assert again.plain() == results.plain()


# ---- every group left out once -------------------------------------------------------------------

FOLDS = {
    **STUDY,
    "base": {
        **BASE,
        "data": {
            "name": "digits",
            "splits": [0.8, 0.2, 0],
            "leave_out": ["plain", "rotated", "textured"],
        },
    },
    "methods": ["fedavg", {"name": "fedprox", "mu": 10}],
    "metrics": ["global.unseen.mean", "val.mean"],
}


def test_a_list_of_groups_is_left_out_one_by_one():
    study = study_from({**FOLDS, "seeds": [4, 5]})
    groups = ("plain", "rotated", "textured")
    assert (study.settings, study.folds, study.baseline) == (groups, {"base": groups}, "fedavg")
    assert [job.path.as_posix() for job in study.jobs] == [
        f"{group}/{method}/seed{seed}"
        for seed in (4, 5)
        for group in groups
        for method in ("fedavg", "fedprox")
    ]
    assert [job.experiment.data["leave_out"] for job in study.jobs[::2]] == [*groups, *groups]
    assert study_from(FOLDS, settings=["base"]).settings == groups
    part = study_from(FOLDS, settings=["textured", "plain"])
    assert (part.settings, part.folds) == (("plain", "textured"), {"base": ("plain", "textured")})
    one = study_from(FOLDS, overrides=["data.leave_out=rotated"])
    assert (one.settings, one.folds, one.baseline) == (("base",), {}, None)
    assert one.jobs[0].experiment.data["leave_out"] == "rotated"
    none = study_from({**FOLDS, "settings": {"all": {"data": "digits"}}})
    assert (none.settings, none.folds) == (("all",), {})


def test_settings_have_folds_of_their_own():
    settings = {
        "even": {"data.imbalance": 1, "data.leave_out": ["plain"]},
        "uneven": None,
        "whole": {"data": "digits"},
    }
    study = study_from({**FOLDS, "settings": settings})
    assert study.settings == (
        "even-plain",
        "uneven-plain",
        "uneven-rotated",
        "uneven-textured",
        "whole",
    )
    assert study.whole_settings == ("even", "uneven", "whole")
    assert study_from(
        {**FOLDS, "settings": settings}, settings=["even", "uneven-rotated"]
    ).folds == {
        "even": ("even-plain",),
        "uneven": ("uneven-rotated",),
    }
    first = study.jobs[0].experiment.data
    assert (first["imbalance"], first["leave_out"]) == (1, "plain")
    assert study.jobs[-1].experiment.data["leave_out"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"leave_out": []},
            "base of s.yaml: data.leave_out must be a list of different names, got []",
        ),
        (
            {"leave_out": ["plain", "plain"]},
            "data.leave_out must be a list of different names, got ['plain', 'plain']",
        ),
        ({"leave_out": [3]}, "data.leave_out must be a list of different names, got [3]"),
        (
            {"leave_out": ["a/b"]},
            "s.yaml: data.leave_out has the label 'a/b', which cannot name a directory",
        ),
    ],
)
def test_mistakes_in_what_is_left_out(changes, message):
    base = {**BASE, "data": {"name": "digits", **changes}}
    with pytest.raises(InputError) as caught:
        study_from({**FOLDS, "base": base}, "s.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"baseline": "fedvag"},
            "unknown method 'fedvag' in baseline of s.yaml; did you mean 'fedavg'?",
        ),
        (
            {"settings": {"a": {"data.leave_out": ["b"]}, "a-b": None}},
            "s.yaml: two settings are called 'a-b'",
        ),
        (
            {"methods": [{"name": "fedavg", "set": 3}]},
            "set of method 'fedavg' of s.yaml must hold keys with values",
        ),
        (
            {"methods": [{"name": "fedavg", "set": {"seed": 3}}]},
            "set of method 'fedavg' of s.yaml: seed is not valid there",
        ),
        (
            {"methods": [{"name": "fedavg", "set": {"training.epoch": 3}}]},
            "unknown key 'training.epoch' in set of method 'fedavg' of s.yaml; did you mean "
            "'training.epochs'?",
        ),
    ],
)
def test_mistakes_in_baselines_and_methods(changes, message):
    with pytest.raises(InputError) as caught:
        study_from({**STUDY, **changes}, "s.yaml")
    assert message in str(caught.value)


def test_a_method_can_have_settings_of_its_own():
    longer = {
        "name": "fedavg",
        "label": "longer",
        "set": {"training": {"epochs": 2}, "model.hidden": [4]},
    }
    settings = {"a": {"training.epochs": 3, "training.batch_size": 5}}
    study = study_from({**STUDY, "methods": ["fedavg", longer], "settings": settings, "seeds": [0]})
    plain, longer = (job.experiment for job in study.jobs)
    assert (plain.training.epochs, longer.training.epochs) == (3, 2)
    assert (plain.training.batch_size, longer.training.batch_size) == (5, 5)
    assert (plain.model["hidden"], longer.model["hidden"]) == ([8], [4])
    everywhere = study_from(
        {**STUDY, "methods": [{"name": "qffl", "grid": {"q": [1]}, "set": {"training.epochs": 2}}]},
        tune=True,
    )
    assert {job.experiment.training.epochs for job in everywhere.jobs} == {2}


def test_means_over_folds_and_paired_differences_equal_what_the_runs_say(tmp_path):
    results, _ = outcomes(study_from(FOLDS), tmp_path)
    found = {}
    for method in ("fedavg", "fedprox"):
        for group in ("plain", "rotated", "textured"):
            for seed in (0, 1):
                directory = tmp_path / group / method / f"seed{seed}"
                rows = [
                    json.loads(line)
                    for line in (directory / "metrics.jsonl").read_text().splitlines()
                ]
                rows = [row for row in rows if row["round"] == 2]
                unseen = [row["accuracy"] for row in rows if row["split"] == "test"]
                assert {row["group"] for row in rows if row["split"] == "test"} == {group}
                assert group not in {row["group"] for row in rows if row["split"] == "val"}
                seen = [row["accuracy"] for row in rows if row["split"] == "val"]
                found[method, group, seed] = {
                    "global.unseen.mean": sum(unseen) / len(unseen),
                    "val.mean": sum(seen) / len(seen),
                }
    for metric in FOLDS["metrics"]:
        for method in ("fedavg", "fedprox"):
            seeds = [
                sum(
                    found[method, group, seed][metric] for group in ("plain", "rotated", "textured")
                )
                / 3
                for seed in (0, 1)
            ]
            assert list(results.values("base", method, metric).values()) == pytest.approx(
                seeds, abs=1e-12
            )
            cell = f"{sum(seeds) / 2:.3f} ± {abs(seeds[0] - seeds[1]) / 2**0.5:.3f}"
            assert results.cell("base", method, metric) == cell
        pairs = [
            found["fedprox", group, seed][metric] - found["fedavg", group, seed][metric]
            for group in ("plain", "rotated", "textured")
            for seed in (0, 1)
        ]
        difference = results.difference("base", "fedprox", metric)
        deviation = statistics.stdev(pairs)
        assert (
            difference.mean,
            difference.std,
            difference.standard_error,
            difference.pairs,
        ) == pytest.approx((sum(pairs) / 6, deviation, deviation / 6**0.5, 6), abs=1e-12)
    lines = unmarked(results.markdown())
    assert "**plain left out: mean ± sample standard deviation (n - 1) over 2 seeds**" in lines
    title = (
        "**base: mean over left-out groups (plain, rotated, textured): mean ± sample standard "
        "deviation (n - 1) over 2 seeds**"
    )
    mean = lines.index(title)
    assert (
        lines[mean + 4]
        == f"| fedavg | {' | '.join(results.cell('base', 'fedavg', m) for m in FOLDS['metrics'])} |"
    )
    last = lines.index(f"**{results.about_differences('base')}**")
    cells = " | ".join(
        results.difference("base", "fedprox", metric).cell for metric in FOLDS["metrics"]
    )
    assert lines[last + 2 : last + 5] == [
        "| method | global.unseen.mean | val.mean |",
        "|---|---|---|",
        f"| fedprox | {cells} |",
    ]
    plain = results.plain()
    assert {row["setting"] for row in plain["results"]} == {"plain", "rotated", "textured", "base"}
    difference = results.difference("base", "fedprox", "val.mean")
    assert plain["differences"][1] == {
        "setting": "base",
        "method": "fedprox",
        "metric": "val.mean",
        "baseline": "fedavg",
        "mean": difference.mean,
        "std": difference.std,
        "standard_error": difference.standard_error,
        "pairs": 6,
        "p": None,
    }
    table = [line.split(",") for line in results.csv_differences().splitlines()]
    assert table[0] == [
        "setting",
        "method",
        "baseline",
        "metric",
        "mean",
        "std",
        "standard_error",
        "pairs",
        "p",
    ]
    assert table[2][:4] == ["base", "fedprox", "fedavg", "val.mean"]
    assert float(table[2][4]) == difference.mean


def said(score, *, validation=0.5):
    """Make a summary with a score of unseen clients and a validation score of seen clients."""
    of_seen = {"global": {"seen": {"mean": validation, "groups": {}}}}
    return {
        "score": "accuracy",
        "results": {"global": {"unseen": {"mean": score, "groups": {}}}},
        "validation": of_seen,
    }


def test_folds_that_are_missing_leave_a_seed_out_of_the_mean_but_not_of_the_pairs():
    study = study_from({**FOLDS, "baseline": "fedprox"})
    scores = {"plain": 0.5, "rotated": 0.7, "textured": 0.3}
    higher = {"fedavg": 0.1, "fedprox": 0.0}
    summaries = {
        job.path: said(scores[job.setting] + higher[job.method] + job.seed) for job in study.jobs
    }
    lost = Path("rotated/fedavg/seed1")
    del summaries[lost]
    results = Results(study, summaries, {lost: "lost"})
    assert results.values("base", "fedavg", "unseen.mean") == {0: pytest.approx(0.6)}
    assert results.cell("base", "fedavg", "unseen.mean") == "0.600 (1 of 2)"
    assert results.values("base", "fedprox", "unseen.mean") == {
        0: pytest.approx(0.5),
        1: pytest.approx(1.5),
    }
    difference = results.difference("base", "fedavg", "unseen.mean")
    assert (difference.mean, difference.std, difference.pairs) == (
        pytest.approx(0.1),
        pytest.approx(0),
        5,
    )
    assert results.difference("base", "fedavg", "personal.mean").cell == "–"
    assert study.others == ("fedavg",)
    nothing = Results(study, {}, {lost: "lost"})
    assert (nothing.cell("base", "fedavg", "mean"), nothing.cell("base", "fedprox", "mean")) == (
        "failed",
        "–",
    )


def test_one_pair_has_no_standard_error():
    study = study_from({**STUDY, "seeds": [3], "baseline": "local"})
    results = results_of(study, ALONE, BOTH)
    assert results.difference("base", "fedavg", "mean").cell == "-0.200 (1)"
    assert "paired over seeds" in results.about_differences("base")


def test_a_baseline_may_look_like_a_number():
    methods = [{"name": "fedprox", "mu": mu, "label": mu} for mu in (0.1, 1)]
    assert study_from({**STUDY, "methods": methods, "baseline": 1}).others == ("0.1",)


def test_differences_need_the_baseline_and_are_not_shown_unless_wanted():
    assert results_of(study_from(STUDY), ALONE, BOTH).compared == ()
    assert (
        "difference"
        not in results_of(study_from({**STUDY, "metrics": ["mean"]}), ALONE, BOTH).markdown()
    )
    assert study_from({**STUDY, "baseline": "fedavg"}, methods=["local"]).baseline is None
    assert results_of(study_from({**STUDY, "baseline": "local"}), ALONE, BOTH).compared == ("base",)


def test_values_are_chosen_over_all_folds(tmp_path):
    mapping = {**FOLDS, "methods": ["fedavg", {"name": "fedprox", "grid": {"mu": [0.1, 1]}}]}
    study = study_from(mapping, tune=True)
    scores = {"fedavg": 0.5, "fedprox mu=0.1": 0.5, "fedprox mu=1": 0.6}
    spread = {("plain", "fedprox mu=0.1"): 0.3, ("rotated", "fedprox mu=1"): 0.2}
    summaries = {}
    for job in study.jobs:
        sigma = spread.get((job.setting, job.method), 0.1)
        part = {
            "global": {"seen": {"mean": scores[job.method], "sigma_clients": sigma, "groups": {}}}
        }
        summaries[job.path] = {"score": "accuracy", "results": part, "validation": part}
    results = Results(study, summaries, {})
    assert results.chosen("base") == {"fedprox": {"mu": 1}}
    assert results.plain()["chosen"] == {"base": {"fedprox": {"mu": 1}}}
    assert (results.undecided, study.baseline) == ([], None)


# ---- the command ---------------------------------------------------------------------------------


def test_compare_prints_tables_and_writes_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(STUDY))
    options = (
        "--metrics",
        "mean,global.worst10",
        "--markdown",
        "t/t.md",
        "--csv",
        "t/t.csv",
        "--latex",
        "t/t.tex",
    )
    code, stdout, stderr = compare(monkeypatch, capsys, "small.yaml", *options)
    assert code == 0
    assert [line.partition("]")[0] for line in stderr.splitlines()] == [
        f"[{number}/4" for number in (1, 2, 3, 4)
    ]
    results = load_study("small.yaml", metrics=["mean", "global.worst10"]).run("runs/small")
    rows = [re.split(r"\s{2,}", line.strip()) for line in stdout.splitlines()]
    assert ["method", "model", "mean", "global.worst10"] in rows
    for method, model in (("fedavg", "global"), ("local", "personal")):
        assert [
            method,
            model,
            *(results.cell("base", method, metric) for metric in ("mean", "global.worst10")),
        ] in rows
    assert "served worst" in stdout
    assert Path("t/t.md").read_text() == results.markdown()
    assert Path("t/t.tex").read_text() == results.latex()
    assert Path("t/t.csv").read_text() == results.csv()
    assert Path("t/t-seeds.csv").read_text() == results.csv_seeds()
    code, stdout, _ = compare(
        monkeypatch, capsys, "small.yaml", "--metrics", "mean,global.worst10", "--json"
    )
    assert code == 0
    assert json.loads(stdout) == {
        "directory": "runs/small",
        "report": "runs/small/report.html",
        **results.plain(),
    }


def test_compare_shows_folds_and_differences(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("folds.yaml").write_text(yaml.safe_dump({**FOLDS, "seeds": [0]}))
    code, stdout, _ = compare(
        monkeypatch, capsys, "folds.yaml", "--setting", "plain", "--csv", "t.csv"
    )
    results = load_study("folds.yaml", settings=["plain"]).run("runs/folds")
    assert code == 0
    words = " ".join(stdout.split())
    assert results.about_differences("base") in words
    assert "plain left out: one seed" in words
    rows = [re.split(r"\s{2,}", line.strip()) for line in stdout.splitlines()]
    cells = [results.difference("base", "fedprox", metric).cell for metric in FOLDS["metrics"]]
    assert ["fedprox", *cells] in rows
    assert Path("t-differences.csv").read_text() == results.csv_differences()


def test_compare_tunes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("grids.yaml").write_text(yaml.safe_dump(GRIDS))
    code, stdout, _ = compare(monkeypatch, capsys, "grids.yaml", "--tune")
    assert code == 0
    chosen = load_study("grids.yaml", tune=True).run("runs/grids-tuning").chosen("base")
    assert f"chosen for ditto: lam: {chosen['ditto']['lam']}" in stdout
    assert (
        f"chosen for tilted: t: {chosen['tilted']['t']}, tilts: {chosen['tilted']['tilts']}"
        in stdout
    )
    assert "base, validation data: one seed" in stdout


def test_compare_ends_with_1_when_a_run_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bad = {
        "base": BASE,
        "methods": ["fedavg"],
        "settings": {"wild": {"training": {"optimizer": {"lr": 1e30}}}},
    }
    Path("bad.yaml").write_text(yaml.safe_dump(bad))
    code, stdout, stderr = compare(monkeypatch, capsys, "bad.yaml")
    assert code == 1
    assert "failed: wild/fedavg/seed0: round 1: the training loss of client" in stdout
    assert "[1/1] wild/fedavg/seed0: failed: " in stderr


def test_an_edited_study_does_not_replace_what_came_out_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump({**STUDY, "methods": ["fedavg"]}))
    assert compare(monkeypatch, capsys, "s.yaml", "--markdown", "s.md")[0] == 0
    before = snapshot(tmp_path / "runs"), Path("s.md").read_text()
    message = (
        "error: runs/s/base/fedavg/seed0 holds another experiment: training.rounds is 2 there and "
        "1 here; choose another directory with --out\n"
    )
    again = ("s.yaml", "--set", "training.rounds=1", "--markdown", "s.md")
    assert compare(monkeypatch, capsys, *again) == (2, "", message)
    Path("s.yaml").write_text(
        yaml.safe_dump({**STUDY, "base": {**BASE, "training": {"rounds": 1}}})
    )
    assert compare(monkeypatch, capsys, "s.yaml", "--markdown", "s.md") == (2, "", message)
    assert (snapshot(tmp_path / "runs"), Path("s.md").read_text()) == before
    assert compare(monkeypatch, capsys, "s.yaml", "--out", "other")[0] == 0


def test_compare_tries_a_study_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("wide.yaml").write_text(yaml.safe_dump(WIDE))
    chosen = (
        "--setting",
        "uneven",
        "--method",
        "fedavg",
        "--method",
        "strong",
        "--seed",
        0,
        "--seed",
        6,
    )
    options = (
        *chosen,
        "--set",
        "training.rounds=1",
        "--set",
        "model.hidden=[4]",
        "--device",
        "cpu",
        "--json",
    )
    code, stdout, stderr = compare(monkeypatch, capsys, "wide.yaml", *options)
    assert code == 0, stderr
    written = json.loads(Path("runs/wide/results.json").read_text())
    assert json.loads(stdout) == {
        "directory": "runs/wide",
        "report": "runs/wide/report.html",
        **written,
    }
    assert {(row["setting"], row["method"]) for row in written["results"]} == {
        ("uneven", "fedavg"),
        ("uneven", "strong"),
    }
    assert all(list(row["seeds"]) == ["0", "6"] for row in written["results"])
    configs = sorted(Path("runs/wide").rglob("config.yaml"))
    paths = [config.parent.relative_to("runs/wide").as_posix() for config in configs]
    assert paths == [
        f"uneven/{method}/seed{seed}" for method in ("fedavg", "strong") for seed in (0, 6)
    ]
    for config in map(yaml.safe_load, (path.read_text() for path in configs)):
        assert (config["training"]["rounds"], config["model"]["hidden"]) == (1, [4])
        assert (config["data"]["imbalance"], config["machine"]["device"]) == (20.0, "cpu")


def test_compare_ends_with_1_when_nothing_could_be_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mapping = {**GRIDS, "methods": ["fedavg", {"name": "qffl", "grid": {"q": [1, 2]}}]}
    Path("t.yaml").write_text(
        yaml.safe_dump({**mapping, "tuning": {"by": "personal.sigma_clients"}})
    )
    code, stdout, _ = compare(monkeypatch, capsys, "t.yaml", "--tune", "--set", "training.rounds=1")
    assert code == 1
    assert (
        "base: nothing chosen for qffl, because none of its runs has a value of "
        "personal.sigma_clients" in stdout
    )
    Path("t.yaml").write_text(
        yaml.safe_dump({**mapping, "tuning": {"set": {"data.splits": [0.8, 0, 0.2]}}})
    )
    code, stdout, stderr = compare(monkeypatch, capsys, "t.yaml", "--tune", "--out", "none")
    assert (code, stdout) == (2, "")
    assert stderr.startswith(
        "error: tuning needs validation data; data.splits of tuning of t.yaml, set has none"
    )
    assert not Path("none").exists()


def test_compare_ends_with_1_when_a_summary_is_damaged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump({**STUDY, "methods": ["fedavg"]}))
    compare(monkeypatch, capsys, "s.yaml")
    Path("runs/s/base/fedavg/seed0/summary.json").write_text("{")
    code, stdout, stderr = compare(monkeypatch, capsys, "s.yaml")
    assert code == 1
    said = "runs/s/base/fedavg/seed0/summary.json differs from what the run wrote"
    assert f"failed: base/fedavg/seed0: {said}" in stdout
    assert stderr.splitlines()[0].startswith(f"[1/2] base/fedavg/seed0: failed: {said}")
    assert stderr.splitlines()[1:] == ["[2/2] base/fedavg/seed1: already there"]


def test_compare_refuses_a_broken_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("methods: [fedavg]")
    code, stdout, stderr = compare(monkeypatch, capsys, "bad.yaml")
    assert (code, stdout) == (2, "")
    assert (
        stderr == "error: bad.yaml: base must be an experiment, such as 'data: digits', got None\n"
    )


# ---- being killed --------------------------------------------------------------------------------


def start(study, out, *options):
    command = [
        sys.executable,
        "-c",
        "from equipoise.cli import main; main()",
        "compare",
        study,
        "--out",
        out,
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(list(map(str, command)), env=environment, **quiet)


def wait_until(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "the study ended before it could be killed"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def kill_and_start_again(tmp_path, *options):
    study = {
        **STUDY,
        "base": {**BASE, "training": {"rounds": 25}},
        "methods": ["fedavg"],
        "seeds": [0, 1, 2],
    }
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(study))
    process = start(file, out, *options)
    runs = out / "base" / "fedavg"

    def broken_off():
        started = [path.parent for path in runs.glob("seed*/checkpoint.safetensors")]
        done = [path for path in started if (path / "summary.json").exists()]
        return done and len(started) > len(done)

    wait_until(broken_off, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = [path.parent for path in runs.glob("seed*/summary.json")]
    before = {directory: snapshot(directory) for directory in finished}
    assert 1 <= len(finished) < 3
    assert start(file, out, *options).wait() == 0
    assert {directory: snapshot(directory) for directory in finished} == before
    values = []
    for seed, job in enumerate(study_from(study).jobs):
        whole = tmp_path / f"whole{seed}"
        job.experiment.run(whole)
        assert (runs / f"seed{seed}" / "metrics.jsonl").read_bytes() == (
            whole / "metrics.jsonl"
        ).read_bytes()
        values.append(score_by_hand(runs / f"seed{seed}", model="global", metric="mean"))
    row = json.loads((out / "results.json").read_text())["results"][0]
    assert (row["metric"], row["n"]) == ("mean", 3)
    assert row["mean"] == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert row["std"] == pytest.approx(statistics.stdev(values), abs=1e-12)


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.slow
def test_a_killed_study_redoes_no_finished_run(tmp_path):
    kill_and_start_again(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_study_of_two_at_a_time_redoes_no_finished_run(tmp_path):
    kill_and_start_again(tmp_path, "--jobs", 2)
