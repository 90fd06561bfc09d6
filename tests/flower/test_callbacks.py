"""Callbacks and trackers on a Flower server: they get the same values as in one process."""

from __future__ import annotations

import logging

import pytest
import yaml

from equipoise import Callback, tracking
from equipoise.config import load_experiment
from equipoise.flower.client import client_app
from equipoise.flower.server import serve
from equipoise.flower.silo import read_experiment
from tests.flower.loop import LoopGrid, own_nodes, run_on_loop, write_experiment, write_silos
from tests.flower.parity import assert_same_rows, differ

OWN = """
from dataclasses import dataclass
from pathlib import Path

from equipoise import Callback, tracking


@tracking.register
@dataclass
class LossesOnServer(Callback):
    file: str

    def round(self, run):
        with Path(self.file).open("a") as file:
            file.write(f"{run.round} {run.record['train_loss']:.9f}\\n")
"""


class Diary(Callback):
    """Records its calls, and stops the run on request."""

    def __init__(self, last=None):
        self.last, self.events, self.rows, self.models, self.groups = last, [], [], [], []

    def begin(self, run):
        self.events.append("begin")

    def evaluated(self, run):
        self.events.append("evaluated")
        self.rows += run.rows
        self.models.append(run.global_model)
        self.groups.append(run.groups())

    def round(self, run):
        self.events.append("round")
        self.bytes = run.record["bytes_up"]
        if run.round == self.last:
            run.stop("enough")

    def end(self, run):
        self.events.append("end")
        self.summary = run.summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("callbacks")
    write_silos(folder / "silos")
    return folder


def on_loop(path, folder, *callbacks, out=None):
    grid = LoopGrid(client_app(path), own_nodes(folder))
    return serve(grid, read_experiment(path, {}), out, callbacks)


@pytest.mark.parametrize("last", [None, 1])
def test_a_server_tells_the_same(last, folder):
    path = write_experiment(folder, training={"rounds": 2}, evaluation={"every": 2})
    ours, theirs = Diary(last), Diary(last)
    load_experiment(path).run(callbacks=[ours])
    on_loop(path, folder, theirs)
    assert theirs.events == ours.events
    assert (
        ours.events == ["begin", "round", "evaluated", "end"]
        if last
        else "evaluated" in ours.events
    )
    assert_same_rows(ours.rows, theirs.rows)
    assert max(differ(*both) for both in zip(ours.models, theirs.models, strict=True)) <= 1e-9
    for one, other in zip(ours.groups, theirs.groups, strict=True):
        assert one["global"] == pytest.approx(other["global"], rel=1e-9)
    assert ours.bytes == theirs.bytes
    for key in ("rounds", "stopped"):
        assert ours.summary.get(key) == theirs.summary.get(key)
    assert theirs.summary["rounds"] == (last or 2)


def test_trackers_of_the_experiment_run_on_the_server(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "TRACKERS", dict(tracking.TRACKERS))
    (folder / "losses_on_server.py").write_text(OWN)
    own = {"name": "LossesOnServer", "file": str(tmp_path / "losses.txt")}
    path = write_experiment(
        folder, training={"rounds": 2}, imports="losses_on_server.py", tracking=[own]
    )
    run, _ = run_on_loop(path, own_nodes(folder), tmp_path / "run")
    losses = [f"{row['round']} {row['train_loss']:.9f}" for row in run.trainer.rounds]
    # Clients read the same experiment but write nothing.
    assert (tmp_path / "losses.txt").read_text().splitlines() == losses
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["tracking"] == [own]


def test_the_log_of_the_server_ends_with_who_is_left_behind(folder, tmp_path, caplog):
    path = write_experiment(folder, training={"rounds": 1})
    with caplog.at_level(logging.INFO):
        run, _ = run_on_loop(path, own_nodes(folder), tmp_path / "run")
    found = run.summary["results"]["global"]["seen"]
    *_, results, files = caplog.messages
    assert results == (
        f"accuracy of the global model, seen clients: mean {found['mean']:.4f}, worst client "
        f"{found['worst_client']:.4f} ({found['worst_client_name']}), worst group "
        f"{found['worst_group']:.4f} ({found['worst_group_name']})"
    )
    assert files.endswith(f"equipoise report {tmp_path / 'run'}")
