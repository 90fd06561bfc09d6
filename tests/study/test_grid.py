"""Grids: options of methods, and keys of experiments such as the learning rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from equipoise import methods
from equipoise.cli.show.study import show_results
from equipoise.config import SECTIONS
from equipoise.errors import InputError
from equipoise.study import Results, read_choices, study_from

RATE = "training.optimizer.lr"
# A study with rates of 0, with which nothing is learned, and rates with which something is.
STUDY = {
    "base": {
        "data": {"name": "digits", "imbalance": 1},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"rounds": 3, "optimizer": {"lr": 0.01}},
    },
    "methods": [
        {"name": "fedavg", "grid": {RATE: [0, 0.5]}},
        {"name": "fedprox", "grid": {"training": {"optimizer": {"lr": [0.5, 0]}}, "mu": [0.1]}},
    ],
    "tuning": {"by": "sigma_clients"},
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The directory in which the study was tuned."""
    directory = tmp_path_factory.mktemp("tuned") / "s-tuning"
    study_from(STUDY, tune=True).run(directory)
    return directory


def test_each_rate_is_a_variant():
    study = study_from(STUDY, tune=True)
    assert study.methods == (
        f"fedavg {RATE}=0",
        f"fedavg {RATE}=0.5",
        f"fedprox {RATE}=0.5 mu=0.1",
        f"fedprox {RATE}=0 mu=0.1",
    )
    assert [job.experiment.training.optimizer.lr for job in study.jobs] == [0, 0.5, 0.5, 0]
    assert study.jobs[2].experiment.method.local.mu == 0.1


def test_the_rate_that_learns_is_chosen(tuned):
    runs = {
        rate: json.loads((tuned / f"base/fedavg {RATE}={rate}/seed0/summary.json").read_text())
        for rate in ("0", "0.5")
    }
    means = {rate: run["validation"]["global"]["seen"]["mean"] for rate, run in runs.items()}
    assert means["0.5"] > means["0"] + 0.1
    chosen = read_choices(tuned)["base"]
    assert chosen["fedavg"].values == {RATE: 0.5}
    assert chosen["fedprox"].values == {RATE: 0.5, "mu": 0.1}
    # The first method counts with its best mean, so a rate of 0 is not within the tolerance,
    # although clients with an untrained model may differ less.
    assert chosen["fedavg"].reference == chosen["fedprox"].reference == means["0.5"]
    assert chosen["fedavg"].within_tolerance == 1


def test_the_study_runs_the_chosen_rate(tuned, tmp_path):
    study = study_from(STUDY, chosen=read_choices(tuned))
    assert [job.experiment.training.optimizer.lr for job in study.jobs] == [0.5, 0.5]
    outcomes = []
    study.run(tmp_path, reuse=tuned, watch=lambda job, outcome: outcomes.append(outcome))
    assert outcomes == ["copied from tuning"] * 2
    config = tmp_path / f"base/fedavg {RATE}=0.5/seed0/config.yaml"
    assert yaml.safe_load(config.read_text())["training"]["optimizer"]["lr"] == 0.5
    assert read_choices(tmp_path) == read_choices(tuned)
    # Without the choice, the value of the file is used.
    assert {job.experiment.training.optimizer.lr for job in study_from(STUDY).jobs} == {0.01}


def test_nothing_may_replace_a_value_of_a_grid(tuned):
    given = [f"{RATE}=1"]
    for options in ({"tune": True}, {"chosen": read_choices(tuned)}):
        with pytest.raises(InputError, match=f"--set {RATE}=1: {RATE} replaces {RATE} in grid of"):
            study_from(STUDY, "s.yaml", overrides=given, **options)
    # If the grid is not used, nothing is replaced.
    assert study_from(STUDY, overrides=given).jobs[0].experiment.training.optimizer.lr == 1
    fixed = {**STUDY, "tuning": {"set": {RATE: 1}}}
    with pytest.raises(InputError, match=f"tuning of s.yaml, set: {RATE} replaces {RATE} in grid"):
        study_from(fixed, "s.yaml", tune=True)
    strong = {**STUDY, "settings": {"strong": {"method.mu": 3}}}
    with pytest.raises(InputError, match=r"settings.strong of s.yaml: method.mu replaces"):
        study_from({**strong, "methods": STUDY["methods"][1:]}, "s.yaml", tune=True)


def test_a_grid_holds_options_of_parts_and_whole_sections():
    grid = {"aggregation.t": [1, 2], "model": [{"name": "mlp", "hidden": [3]}]}
    tilted = {"name": "fedavg", "aggregation": "term", "grid": grid}
    study = study_from({**STUDY, "methods": [tilted]}, tune=True)
    assert study.methods == (
        "fedavg aggregation.t=1 model=mlp,hidden=[3]",
        "fedavg aggregation.t=2 model=mlp,hidden=[3]",
    )
    assert [job.experiment.method.aggregation.t for job in study.jobs] == [1, 2]
    assert study.jobs[0].experiment.model["hidden"] == [3]


def test_a_grid_refines_what_set_says():
    adam = {"name": "fedavg", "set": {"training.optimizer": "adam"}, "grid": {RATE: [0.1, 0.2]}}
    study = study_from({**STUDY, "methods": [adam]}, tune=True)
    assert [type(job.experiment.training.optimizer).__name__ for job in study.jobs] == ["Adam"] * 2
    assert [job.experiment.training.optimizer.lr for job in study.jobs] == [0.1, 0.2]


def test_no_option_of_a_method_is_called_like_a_key_of_experiments():
    """Otherwise a grid could not name it without ``method.``."""
    for name in methods.names():
        assert not set(methods.options_of(name)) & set(SECTIONS)


# ---- grids that are not used ---------------------------------------------------------------------


def test_a_grid_that_is_not_tuned_is_named_with_the_values_of_its_runs(tuned, capsys):
    plain = {**STUDY, "methods": [*STUDY["methods"], "local"]}
    study = study_from(plain)
    said = (
        f"the grid of fedavg is not used: its runs have {RATE}=0.01; tune it with --tune",
        f"the grid of fedprox is not used: its runs have {RATE}=0.01 mu=0.1; tune it with --tune",
    )
    assert study.warnings == said
    results = Results(study, {}, {})
    assert results.warnings == results.plain()["warnings"] == list(said)
    assert all(f"Warning: {text}" in results.markdown() for text in said)
    show_results(results, Path("runs"))
    shown = capsys.readouterr().out
    assert all(f"warning: {text}" in shown for text in said)
    chosen = read_choices(tuned)
    assert study_from(plain, chosen=chosen).warnings == ()
    assert study_from(STUDY, tune=True).warnings == ()
    del chosen["base"]["fedavg"]
    assert study_from(plain, chosen=chosen).warnings == said[:1]


def test_values_of_runs_are_named_by_setting():
    settings = {"slow": {"training.optimizer.lr": 0.1}, "fast": {"training.epochs": 2}}
    grids = [{"name": "fedavg", "grid": {RATE: [1]}}, {"name": "qffl", "grid": {"q": [5]}}]
    study = study_from({**STUDY, "methods": grids, "settings": settings})
    assert study.warnings == (
        f"slow: the grid of fedavg is not used: its runs have {RATE}=0.1; tune it with --tune",
        "the grid of qffl is not used: its runs have q=1.0; tune it with --tune",
        f"fast: the grid of fedavg is not used: its runs have {RATE}=0.01; tune it with --tune",
    )


def test_parts_and_models_in_a_grid_are_named_too():
    grid = {"aggregation": ["median", {"name": "qffl", "q": 2}], "model": ["logistic"]}
    study = study_from({**STUDY, "methods": [{"name": "fedprox", "grid": grid}]})
    (said,) = study.warnings
    assert "its runs have aggregation=default model=mlp,hidden=[16]," in said
