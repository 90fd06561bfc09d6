"""The studies of the embedded digits: the demo, and the one with every method."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from equipoise import methods
from equipoise.study import load_study
from equipoise.study.reading import read_study, study_from
from tests.experiments.scripts import load_script

ROOT = Path(__file__).parents[2]
ALL = ROOT / "experiments" / "digits" / "all.yaml"
DEMO = ROOT / "equipoise" / "demo.yaml"


@cache
def every_method():
    """Read the study with every method once, because it has many experiments."""
    return load_study(ALL)


def own_methods():
    return {
        name
        for name in methods.names()
        if methods.part_class(name).__module__.startswith("equipoise.")
    }


def method_of(job):
    return job.experiment.plain()["method"]["name"]


def test_every_method_of_the_library_is_in_the_study():
    study = every_method()
    assert {method_of(job) for job in study.jobs} == own_methods()
    assert study.seeds == (0, 1, 2)
    for job in study.jobs:
        assert job.experiment.data["name"] == "digits"
        assert job.experiment.data["imbalance"] == 10


def test_methods_run_with_their_defaults_on_the_models_they_need():
    demo = load_study(DEMO).jobs[0].experiment
    for job in every_method().jobs:
        if job.method == "fedavg-prompts":
            continue
        method, model = job.experiment.method, job.experiment.model
        assert method == methods.build(job.method), job.method
        if method.usual_model in ("mlp", "bncnn"):
            assert model == demo.model, job.method
            # Of the demo, so that its plateau is the one of this study.
            assert job.experiment.training == demo.training, job.method
        else:
            # FedGR takes any model with prompts; here it has the one that FedGC and FedGCR have.
            assert model["name"] == ("fedgc" if job.method == "fedgr" else method.usual_model)


def test_fedavg_trains_the_model_with_prompts_too():
    models = {job.method: job.experiment.model for job in every_method().jobs}
    assert all(models[name] == models["fedavg-prompts"] for name in ("fedgc", "fedgcr", "fedgr"))


@pytest.mark.parametrize("method", ["fedavg-prompts", "fedgr", "promptfl", "client2vec", "fedbn"])
def test_a_round_of_the_study_runs(tmp_path, method):
    content = read_study(ALL)
    content["base"]["training"]["rounds"] = 1
    results = study_from(content, str(ALL), methods=[method], seeds=[3]).run(tmp_path)
    assert results.failures == {}
    assert len(results.summaries) == 1


def test_the_tables_and_the_report_go_into_the_documentation(tmp_path, monkeypatch, capsys):
    script = load_script(ROOT / "experiments" / "digits" / "page.py")
    page = tmp_path / "digits.md"
    page.write_text(f"before\n{script.BEGIN}\n| old |\n{script.END}\nafter\n")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "table.md").write_text("| new |\n|---|\n\n**base: 95% bootstrap intervals**\n")
    monkeypatch.setattr("sys.argv", ["page.py", str(runs), "--page", str(page)])
    with pytest.raises(SystemExit):
        script.main()
    assert "report.html is missing" in capsys.readouterr().err
    (runs / "report.html").write_text("<p>report")
    script.main()
    tables = f"| new |\n|---|\n\n{script.REPORT}"
    assert page.read_text() == f"before\n{script.BEGIN}\n{tables}\n{script.END}\nafter\n"
    assert "(digits-report.html)" in script.REPORT
    assert (tmp_path / "digits-report.html").read_text() == "<p>report"
    with pytest.raises(SystemExit, match="must have"):
        script.filled("no comments", "| new |")


def test_the_page_has_room_for_the_tables():
    script = load_script(ROOT / "experiments" / "digits" / "page.py")
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(text, "x") != text


@pytest.mark.slow
def test_the_demo_leaves_groups_behind_however_long_it_is_trained_and_two_methods_help(tmp_path):
    """With seeds that are neither shown nor those by which methods were chosen."""
    content = read_study(DEMO)
    shown, seeds = content["seeds"], [2001, 2002]
    assert not set(seeds) & {*shown, 1000, 1001, 1002}

    def measured(name, *labels, rounds=None):
        changed = {**content, "base": {**content["base"], "evaluation": {"every": 60}}}
        if rounds:
            changed["base"]["training"] = {**content["base"]["training"], "rounds": rounds}
        study = study_from(changed, str(DEMO), methods=list(labels), seeds=seeds)
        results = study.run(tmp_path / name)
        assert results.failures == {}
        found = {}
        for label in labels:
            paths = [job.path for job in study.jobs if job.method == label]
            models = [results.summaries[path]["results"] for path in paths]
            served = [model.get("personal", model.get("global"))["seen"] for model in models]
            found[label] = {
                metric: np.mean([part[metric] for part in served])
                for metric in ("mean", "worst_group", "sigma_groups")
            }
        return found

    demo = measured("demo", "fedavg", "central", "fedbn", "ditto")
    fedavg, central = demo["fedavg"], demo["central"]
    longer = measured("longer", "fedavg", rounds=120)["fedavg"]
    # At its plateau: twice as many rounds change little, and all data in one place would do.
    assert abs(longer["mean"] - fedavg["mean"]) < 0.08
    assert longer["worst_group"] < 0.35
    assert central["worst_group"] > fedavg["worst_group"] + 0.3
    for cure in ("fedbn", "ditto"):
        assert demo[cure]["worst_group"] > fedavg["worst_group"] + 0.2, cure
        assert demo[cure]["sigma_groups"] < fedavg["sigma_groups"] - 0.08, cure
        assert demo[cure]["mean"] > fedavg["mean"], cure
