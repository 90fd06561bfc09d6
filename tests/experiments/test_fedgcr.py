"""FedGCR's experiments match the paper, and its clusters are measured correctly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from equipoise.data import SOURCES
from equipoise.study import load_study, study_from
from tests.experiments.scripts import load_script

HOME = Path(__file__).parents[2] / "experiments" / "fedgcr"
STUDIES = sorted(path.stem for path in HOME.glob("*.yaml"))


def described(name):
    return yaml.safe_load((HOME / f"{name}.yaml").read_text())


def test_every_table_is_there():
    assert STUDIES == [
        "classtokens",
        "pacs",
        "pacs-fedgc",
        "table1",
        "table1-fedgc",
        "table2",
        "table2-fedgc",
        "table3-4",
    ]


@pytest.mark.parametrize("name", STUDIES)
def test_training_is_the_papers(name):
    base = described(name)["base"]
    assert base["training"] == {
        "rounds": 50,
        "epochs": 1,
        "batch_size": 32,
        "optimizer": {"name": "adamw", "lr": 0.001},
    }
    assert base["model"]["prompts"] == 4
    assert base["data"].get("test", "group") == "group"


@pytest.mark.skipif("digitfive" not in SOURCES, reason="there is no source digitfive")
@pytest.mark.parametrize("name", STUDIES)
def test_all_studies_can_be_read(name):
    study = described(name)
    assert (
        len(load_study(HOME / f"{name}.yaml").jobs)
        == len(study["methods"]) * len(study["settings"]) * 3
    )


@pytest.mark.parametrize("name", ["classtokens", "table1-fedgc", "table3-4"])
def test_methods_run_as_described(name):
    """With the embedded digits and a small transformer, which are always available."""
    study = described(name)
    small = {"name": study["base"]["model"]["name"], "width": 8, "depth": 1, "heads": 2, "patch": 4}
    made = study_from({"base": {"data": "digits", "model": small}, "methods": study["methods"]})
    assert len(made.jobs) == len(study["methods"])
    for job in made.jobs:
        local = job.experiment.method.local
        if ("fedgc" in name or name == "table3-4") and job.method != "fedavg-gcnet":
            assert (local.lam1, local.lam2, local.tau) == (0.5, 0.1, 0.5)
        if name != "table1-fedgc":
            assert job.experiment.method.aggregation.clusters == int(job.method[-1])


def test_clusters_by_hand(tmp_path):
    clusters = load_script(HOME / "clusters.py")
    run = tmp_path / "dif10" / "T3" / "seed0"
    run.mkdir(parents=True)
    types = ["a", "a", "b", "b"]
    rows = [{"client": client, "group": group} for client, group in enumerate(types)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    noted = [([0, 1, 2, 3], [0, 1, 1, 1]), ([0, 1, 3], [0, 0, 1]), ([1, 2, 3], [0, 1, 1])]
    (run / "rounds.jsonl").write_text(
        "".join(
            json.dumps({"round": number, "clients": here, "notes": {"clusters": numbers}}) + "\n"
            for number, (here, numbers) in enumerate(noted, 1)
        )
    )
    without = tmp_path / "dif10" / "fedavg" / "seed0"
    without.mkdir(parents=True)
    (without / "metrics.jsonl").write_text("")
    (without / "rounds.jsonl").write_text(json.dumps({"round": 1}) + "\n")
    (row,) = clusters.collect(tmp_path).values()
    assert row["round 1"] == 0.75
    assert row["purity"] == row["ARI"] == 1
    # Client 1 changes once; the five others do not.
    assert row["stability"] == pytest.approx(5 / 6)
