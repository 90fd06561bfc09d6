"""A study runs the values that tuning has chosen, also if either was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from equipoise.errors import InputError
from equipoise.study import Tuning, load_study, read_choices, study_from
from tests.report.pages import Page
from tests.run.small import promised
from tests.study.small import compare, snapshot

BASE = {"data": "digits", "model": {"name": "mlp", "hidden": [8]}, "training": {"rounds": 2}}
STUDY = {
    "base": BASE,
    "methods": [
        "fedavg",
        {"name": "fedprox", "mu": 0.3, "grid": {"mu": [0.3, 3.0]}},
        {"name": "qffl", "grid": {"q": [2]}},
    ],
    "tuning": {"seed": 0, "by": "sigma_clients", "tolerance": 1.0},
    "seeds": [0, 1],
    "metrics": ["mean"],
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The directory in which the study was tuned."""
    directory = tmp_path_factory.mktemp("tuned") / "s-tuning"
    study_from(STUDY, tune=True).run(directory)
    return directory


def bytes_of(directory):
    """The files of a study that must be equal byte for byte: runs, results and choice."""
    runs = {
        path.parent.relative_to(directory): promised(path.parent)
        for path in directory.rglob("summary.json")
    }
    return runs, {name: (directory / name).read_bytes() for name in ("results.json", "chosen.yaml")}


def test_the_choice_says_how_it_was_made(tuned):
    measured = {
        mu: json.loads((tuned / f"base/fedprox mu={mu}/seed0/summary.json").read_text())[
            "validation"
        ]["global"]["seen"]
        for mu in (0.3, 3.0)
    }
    reference = json.loads((tuned / "base/fedavg/seed0/summary.json").read_text())["validation"][
        "global"
    ]["seen"]
    best = min(measured, key=lambda mu: measured[mu]["sigma_clients"])
    choice = read_choices(tuned)["base"]["fedprox"]
    assert choice.values == {"mu": best}
    assert (choice.by, choice.split, choice.seed, choice.tolerance) == (
        "sigma_clients",
        "val",
        0,
        1.0,
    )
    assert (choice.among, choice.within_tolerance) == (2, 2)
    assert choice.value == measured[best]["sigma_clients"]
    assert (choice.mean, choice.reference) == (measured[best]["mean"], reference["mean"])
    assert read_choices(tuned / "chosen.yaml")["base"]["qffl"].among == 1
    assert json.loads((tuned / "results.json").read_text())["tuning"]["base"]["fedprox"][
        "values"
    ] == {"mu": best}


def test_the_study_runs_what_was_chosen_and_reuses_what_it_can(tuned, tmp_path):
    study = study_from(STUDY, chosen=read_choices(tuned))
    (mu,) = {job.experiment.method.local.mu for job in study.jobs if job.method == "fedprox"}
    assert {"mu": mu} == read_choices(tuned)["base"]["fedprox"].values
    assert {job.experiment.method.aggregation.q for job in study.jobs if job.method == "qffl"} == {
        2.0
    }
    # The values of the file need no separate directory.
    folder = "fedprox" if mu == 0.3 else "fedprox mu=3.0"
    paths = {job.path.as_posix() for job in study.jobs if job.seed == 0}
    assert paths == {"base/fedavg/seed0", f"base/{folder}/seed0", "base/qffl q=2/seed0"}
    told = []
    results = study.run(
        tmp_path / "out",
        watch=lambda job, said: told.append((job.path.as_posix(), said)),
        reuse=tuned,
    )
    assert {path for path, said in told if said == "copied from tuning"} == paths
    assert {path for path, said in told if said == "done"} == {
        path.replace("seed0", "seed1") for path in paths
    }
    assert results.study.methods == ("fedavg", "fedprox", "qffl")
    assert len(results.values("base", "qffl", "mean")) == 2
    # Copied runs equal those that the study would have made itself.
    study.run(tmp_path / "anew")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "anew")
    assert read_choices(tmp_path / "out") == read_choices(tuned)


def test_runs_from_before_tuning_stay_and_unchanged_ones_are_reused(tuned, tmp_path):
    study_from(STUDY).run(tmp_path)
    before = snapshot(tmp_path / "base")
    told = []
    study_from(STUDY, chosen=read_choices(tuned)).run(
        tmp_path, watch=lambda job, said: told.append((job.method, said))
    )
    assert {said for method, said in told if method == "fedavg"} == {"already there"}
    assert {said for method, said in told if method == "qffl"} == {"begun", "done"}
    after = snapshot(tmp_path / "base")
    assert {path: after[path] for path in before} == before


def test_another_grid_is_refused(tuned):
    changed = {**STUDY, "methods": ["fedavg", {"name": "qffl", "grid": {"q": [3]}}]}
    with pytest.raises(
        InputError,
        match="s.yaml: tuning has chosen 'qffl q=2' for base, which is no longer in the grid",
    ):
        study_from(changed, "s.yaml", chosen=read_choices(tuned))
    # Methods that are no longer in the study are ignored.
    assert study_from({**STUDY, "methods": ["fedavg"]}, chosen=read_choices(tuned)).chosen == {}


def test_tuning_a_part_keeps_the_other_choices(tuned, tmp_path):
    out = tmp_path / "s-tuning"
    study_from(STUDY, tune=True, methods=["qffl"]).run(out)
    assert list(read_choices(out)["base"]) == ["qffl"]
    study_from(STUDY, tune=True, methods=["fedprox"]).run(out)
    assert read_choices(out) == {
        "base": dict(sorted(read_choices(tuned)["base"].items(), reverse=True))
    }


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "chosen.yaml").write_text("base: {qffl: {q: 1}}")
    with pytest.raises(InputError, match=r"chosen.yaml is not a file of choices"):
        read_choices(tmp_path)


def test_ties_and_the_tolerance():
    tuning = Tuning(tolerance=0.25)
    equal = {"first": (0.5, 0.1), "second": (0.75, 0.1), "third": (0.75, 0.2)}
    assert tuning.best(equal, reference=0.75) == "first", (
        "the limit itself is good enough, and the first of equals wins"
    )
    assert tuning.best(equal, reference=0.875) == "second"
    assert tuning.best(equal, reference=2.0) == "second", (
        "nothing is good enough: the first of the best means"
    )
    assert tuning.similar(equal, reference=2.0) == []


def test_folds_share_a_choice(tmp_path):
    folds = {
        "base": {
            **BASE,
            "data": {"name": "digits", "leave_out": ["plain", "rotated"]},
            "training": {"rounds": 1},
        },
        "methods": ["fedavg", {"name": "qffl", "grid": {"q": [2]}}],
    }
    study_from(folds, tune=True).run(tmp_path / "tuning")
    assert list(read_choices(tmp_path / "tuning")) == ["base"]
    study = study_from(folds, chosen=read_choices(tmp_path / "tuning"))
    assert {job.path.as_posix() for job in study.jobs if job.method == "qffl"} == {
        "plain/qffl q=2/seed0",
        "rotated/qffl q=2/seed0",
    }


def test_compare_runs_what_tune_chose(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump({**STUDY, "seeds": [0]}))
    assert compare(monkeypatch, capsys, "s.yaml", "--tune", "--no-report")[0] == 0
    code, stdout, stderr = compare(monkeypatch, capsys, "s.yaml", "--no-report")
    assert code == 0
    assert "chosen for qffl: q: 2 (sigma_clients " in stdout
    assert stderr.count("copied from tuning") == 3
    assert (Path("runs/s/base/qffl q=2/seed0/summary.json")).exists()
    chosen = json.loads(Path("runs/s/results.json").read_text())["tuning"]["base"]["qffl"]
    assert (chosen["by"], chosen["split"], chosen["among"]) == ("sigma_clients", "val", 1)
    # The study stores the values that it was run with.
    Path("runs/s-tuning/chosen.yaml").rename("elsewhere.yaml")
    assert compare(monkeypatch, capsys, "s.yaml", "--no-report")[2].count("already there") == 3
    assert (
        compare(monkeypatch, capsys, "s.yaml", "--no-report", "--chosen", "elsewhere.yaml")[0] == 0
    )
    code, stdout, _ = compare(monkeypatch, capsys, "s.yaml", "--no-report", "--untuned")
    assert (code, "chosen" in stdout) == (0, False)
    assert Path("runs/s/base/qffl/seed0/summary.json").exists()
    assert (
        "--chosen cannot be used together with --tune"
        in compare(monkeypatch, capsys, "s.yaml", "--tune", "--chosen", "elsewhere.yaml")[2]
    )


def test_runs_of_tuning_are_beside_the_given_directory_and_not_in_its_report(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump({**STUDY, "tuning": {"seed": 9, "tolerance": 1.0}}))
    code, stdout, _ = compare(monkeypatch, capsys, "s.yaml", "--tune", "--out", "x")
    assert (code, Path("x").exists()) == (0, False)
    assert "files: x-tuning" in stdout
    code, stdout, _ = compare(monkeypatch, capsys, "s.yaml", "--out", "x", "--method", "qffl")
    assert (code, "chosen for qffl: q: 2" in stdout) == (0, True)
    assert {path.parent.name for path in Path("x").glob("*/*/seed*")} == {"qffl q=2"}
    assert not list(Path("x").glob("*/*/seed9"))
    page = Page(Path("x/report.html").read_text())
    assert set(page.table("Accuracy, seen clients")) == {"qffl q=2"}
    # A directory that is named as one of tuning is used as it is.
    _, _, stderr = compare(
        monkeypatch, capsys, "s.yaml", "--tune", "--out", "x-tuning", "--no-report"
    )
    assert stderr.count("already there") == 4
    assert not Path("x-tuning-tuning").exists()


def test_tuning_that_an_earlier_version_began_goes_on_in_the_same_directory(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump(STUDY))
    study = study_from(STUDY, tune=True)
    for job in study.jobs[:2]:
        job.experiment.run(Path("x") / job.path)
    code, stdout, stderr = compare(monkeypatch, capsys, "s.yaml", "--tune", "--out", "x")
    assert (code, stderr.count("already there")) == (0, 2)
    assert "files: x\n" in stdout
    assert not Path("x-tuning").exists()
    code, stdout, _ = compare(monkeypatch, capsys, "s.yaml", "--out", "x", "--no-report")
    assert (code, "chosen for qffl: q: 2" in stdout) == (0, True)
    # Runs of the study itself are no runs of tuning.
    compare(monkeypatch, capsys, "s.yaml", "--untuned", "--out", "y", "--no-report")
    compare(monkeypatch, capsys, "s.yaml", "--tune", "--out", "y", "--no-report")
    assert Path("y-tuning/chosen.yaml").exists()


def test_a_run_is_no_directory_of_tuning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump(STUDY))
    for holding in ("x", "y-tuning"):
        Path(holding).mkdir()
        Path(holding, "config.yaml").write_text("")
        out = holding.removesuffix("-tuning")
        code, _, stderr = compare(monkeypatch, capsys, "s.yaml", "--tune", "--out", out)
        assert code != 0
        assert f"{holding} holds a run" in stderr


# ---- finished studies that grow ------------------------------------------------------------------


def test_seeds_methods_and_settings_are_added_to_a_finished_study(tmp_path):
    small = {
        "base": BASE,
        "methods": ["fedavg"],
        "seeds": [0],
        "settings": {"even": {"data.imbalance": 1}},
    }
    study_from(small).run(tmp_path)
    before = snapshot(tmp_path / "even")
    larger = {
        **small,
        "methods": ["local", "fedavg"],
        "seeds": [5, 0],
        "settings": {"uneven": {"data.imbalance": 9}, **small["settings"]},
    }
    told = []
    study_from(larger).run(
        tmp_path, watch=lambda job, said: told.append((job.path.as_posix(), said))
    )
    assert [path for path, said in told if said == "already there"] == ["even/fedavg/seed0"]
    assert sum(said == "done" for _, said in told) == 7
    after = snapshot(tmp_path / "even")
    assert {path: after[path] for path in before} == before
    study_from(larger).run(tmp_path / "at once")
    assert (tmp_path / "results.json").read_bytes() == (
        tmp_path / "at once" / "results.json"
    ).read_bytes()


# ---- being killed --------------------------------------------------------------------------------


class Stop(Exception):
    """The exception that interrupts a study."""


@pytest.mark.parametrize("number", [1, 3])
def test_a_tuned_study_that_was_broken_off_is_the_same(number, tuned, tmp_path):
    def stop(job, said):
        told.append(said)
        if told.count("done") + told.count("copied from tuning") == number:
            raise Stop

    out, tuning = tmp_path / "s", tmp_path / "s-tuning"
    told = []
    with pytest.raises(Stop):
        study_from(STUDY, tune=True).run(tuning, watch=stop)
    assert not (tuning / "chosen.yaml").exists()
    study_from(STUDY, tune=True).run(tuning)
    assert bytes_of(tuning) == bytes_of(tuned)
    told = []
    study = study_from(STUDY, chosen=read_choices(tuning))
    with pytest.raises(Stop):
        study.run(out, watch=stop, reuse=tuning)
    study.run(out, reuse=tuning)
    study_from(STUDY, chosen=read_choices(tuned)).run(tmp_path / "whole", reuse=tuned)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_a_copy_that_was_broken_off_is_made_again(tuned, tmp_path):
    study = study_from(STUDY, chosen=read_choices(tuned), seeds=[0], methods=["fedavg"])
    half = tmp_path / "base/fedavg/.seed0.copy"
    half.mkdir(parents=True)
    (half / "config.yaml").write_text("method: {")
    study.run(tmp_path, reuse=tuned)
    assert promised(tmp_path / "base/fedavg/seed0") == promised(tuned / "base/fedavg/seed0")
    assert not half.exists()


@pytest.mark.slow
def test_a_tuned_study_whose_process_is_killed_is_the_same(tmp_path):
    (tmp_path / "s.yaml").write_text(
        yaml.safe_dump({**STUDY, "base": {**BASE, "training": {"rounds": 8}}})
    )

    def start(folder, *options):
        folder.mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-c",
            "from equipoise.cli import main; main()",
            "compare",
            "../s.yaml",
            "--no-report",
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        return subprocess.Popen(
            [*command, *options], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        )

    def to_the_end(folder, *options):
        with start(tmp_path / folder, *options) as process:
            process.communicate()
        assert process.returncode == 0

    killed = 0
    for options in (["--tune"], []):
        to_the_end("whole", *options)
        for wait in (0.05, 0.3, 0.6):
            with start(tmp_path / "killed", *options) as process:
                process.stderr.readline()
                time.sleep(wait)
                process.send_signal(signal.SIGKILL)
                killed += process.wait() == -signal.SIGKILL
        to_the_end("killed", *options)
    assert killed >= 3
    for study in ("runs/s-tuning", "runs/s"):
        assert bytes_of(tmp_path / "killed" / study) == bytes_of(tmp_path / "whole" / study)


def test_a_study_is_read_with_its_choice(tuned, tmp_path):
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(STUDY))
    assert load_study(tmp_path / "s.yaml", chosen=tuned).chosen == read_choices(tuned)
