"""``equipoise advise`` on sources, files and runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from equipoise.advise import FAMILIES

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "advice"
SMALL = {"data": "digits", "model": {"name": "mlp", "hidden": [4]}, "training": {"rounds": 2}}


def test_measuring_alone_trains_nothing(call):
    code, stdout, stderr = call("advise", "digits", "--set", "data.imbalance=1", "--no-trial")
    assert (code, stderr) == (0, "")
    assert re.search(r"^digits: \d+ clients in 5 groups, ", stdout, re.MULTILINE)
    assert f"advice: {FAMILIES['corrected'].title} (feddyn, fedavgm)" in stdout
    assert not Path("runs").exists()


def test_the_cost_is_said_before_the_trial_and_the_verdict_after(call):
    Path("small.yaml").write_text(yaml.safe_dump(SMALL))
    code, stdout, stderr = call("advise", "small.yaml", "--rounds", "1", "--seeds", "1")
    assert code == 0, stderr
    cost, table, verdict = (
        stdout.index(text)
        for text in ("trial: 7 methods × 1 seed × 1 rounds", "validation data", "use: ")
    )
    assert cost < table < verdict
    assert any(
        f"The trial {does} the advice: " in stdout
        for does in ("supports", "contradicts", "does not contradict")
    )
    assert stderr.count("done") == 7
    assert Path("runs/advise-small/results.json").exists()
    # Nothing is trained again the second time.
    code, stdout, stderr = call("advise", "small.yaml", "--rounds", "1", "--seeds", "1", "--json")
    document = json.loads(stdout)
    assert stderr.count("already there") == 7
    assert document["pick"] == document["trial"]["pick"]
    assert document["family"] == "corrected"
    assert document["measured"]["clients"] == 22


def test_a_run_is_read_with_its_results_and_times(call):
    Path("small.yaml").write_text(yaml.safe_dump(SMALL))
    assert call("run", "small.yaml", "--out", "mine", "--no-report")[0] == 0
    code, stdout, _ = call("advise", "mine", "--no-trial")
    summary = json.loads(Path("mine/summary.json").read_text())
    part = summary["results"]["global"]["seen"]
    assert code == 0
    assert f"the run, fedavg: mean {part['mean']:.3f}, worst tenth {part['worst10']:.3f}" in stdout
    assert f"group {part['worst_group_name']} is served worst" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digitz"], "did you mean 'digits'"),
        (
            ["empty"],
            "empty is a directory without a run; valid: a run directory, an experiment file or a "
            "source",
        ),
        (["digits", "--by", "men"], "unknown metric 'men'"),
        (["digits", "--jobs", "x"], "--jobs must be a whole number from 1, or auto, got 'x'"),
    ],
)
def test_mistakes_are_named(call, arguments, message):
    Path("empty").mkdir()
    code, _, stderr = call("advise", *arguments)
    assert code == 2
    assert message in stderr


FAMILY = {"iid": "average", "labels": "personal", "features": "corrected", "sizes": "average"}


@pytest.mark.parametrize("name", FAMILY)
def test_federations_that_differ_in_one_way(call, name):
    code, stdout, stderr = call(
        "advise",
        f"digits_{name}",
        "--import",
        EXPERIMENTS / "federations.py",
        "--no-trial",
        "--json",
        "--seed",
        "3",
    )
    assert code == 0, stderr
    document = json.loads(stdout)
    assert document["family"] == FAMILY[name]
    assert document["measured"]["clients"] == 20
