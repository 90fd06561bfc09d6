"""A SuperLink and four SuperNodes in separate processes: same numbers as in this process."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest

from equipoise import methods
from equipoise.config import load_experiment
from equipoise.run.files import load_tensors
from tests.flower import own_methods
from tests.flower.loop import own_nodes
from tests.flower.processes import Flower, marked, send, wait_until
from tests.flower.world import PATIENCE, TOLERANCE, assert_same_run, differ, world
from tests.run.small import rows_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A SuperLink and four SuperNodes for several runs."""
    folder = tmp_path_factory.mktemp("running")
    path = world(folder)
    with Flower(folder / "flower") as flower:
        for client, config in enumerate(own_nodes(folder)):
            flower.node(f"node{client}", config)
        yield SimpleNamespace(flower=flower, folder=folder, path=path)
    assert marked(flower.mark) == [], "daemons were left behind"


SIX = {
    "train only": "fedprox",
    "evaluate": "{name: gifair, exact: true}",
    "ask": "{name: fedavg, local: asking, aggregation: asking}",
    "memory": "ditto",
    "frozen backbone": "{name: fedavg, local: headonly}",
    "sampler with state": "{name: scaffold, sampling: turns}",
}


@pytest.mark.parametrize("what", SIX)
def test_six_methods_over_real_processes(what, running, monkeypatch):
    monkeypatch.setattr(methods, "_PARTS", dict(methods._discover()))
    own_methods.register_all()
    settings = f"method={SIX[what]}; training.cohort=3"
    out = running.folder / "runs" / what.replace(" ", "-")
    log = running.flower.run(
        running.folder / "app", timeout=PATIENCE, name=out.name, out=str(out), set=settings
    )
    expected = load_experiment(running.path, settings.split("; ")).run()
    assert_same_run(out, expected, log)
    own = expected.trainer.selected()
    run = json.loads((out / "clients.json").read_text())["run"]
    for client in own.clients:
        file = (
            running.folder
            / "memory"
            / str(client)
            / "runs"
            / run
            / f"client-{client}/model.safetensors"
        )
        module = expected.model(client).state_dict()
        kept = load_tensors(file)[0]
        assert differ({name: module[name] for name in kept}, kept) <= TOLERANCE


def test_a_server_that_is_killed_goes_on(running):
    out = running.folder / "runs" / "killed"
    settings = "method=scaffold; training.rounds=4; evaluation.every=2"
    first = running.flower.begin(running.folder / "app", name="killed", out=str(out), set=settings)
    wait_until(
        lambda: (out / "rounds.jsonl").exists() and len(rows_of(out, "rounds")) >= 2,
        PATIENCE,
        "round 2 to end",
    )
    for pid in running.flower.children("flwr-serverapp"):
        send(pid, signal.SIGKILL)
    os.killpg(first.pid, signal.SIGKILL)
    assert not (out / "summary.json").exists()
    log = running.flower.run(
        running.folder / "app", timeout=PATIENCE, name="goes-on", out=str(out), set=settings
    )
    assert [row["round"] for row in rows_of(out, "rounds")] == [1, 2, 3, 4]
    assert not any("left_out" in row for row in rows_of(out, "rounds"))
    assert_same_run(out, load_experiment(running.path, settings.split("; ")).run(), log)
