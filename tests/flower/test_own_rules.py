"""User-defined parts give the same results and bytes in one process and by messages."""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest
import torch

from equipoise import models
from equipoise.config import load_experiment
from equipoise.errors import InputError
from equipoise.flower.wire import settings_of
from equipoise.optimizers import Sgd
from equipoise.random import Purpose, fold
from equipoise.run.files import load_tensors
from equipoise.tree import size_in_bytes
from tests.flower.loop import (
    error,
    misbehaving,
    number_of,
    own_nodes,
    run_on_loop,
    write_experiment,
    write_silos,
)
from tests.flower.parity import TOLERANCE, compare, differ
from tests.own_rules import make_known
from tests.rounds import play
from tests.run.small import promised

TRAINING = {"rounds": 3, "cohort": 3, "optimizer": {"lr": 0.1}}
PLAIN = {"name": "fedavg"}


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    return write_silos(tmp_path_factory.mktemp("rules") / "silos")


@pytest.fixture
def folder(tmp_path, silos):
    (tmp_path / "silos").symlink_to(silos)
    return tmp_path


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Register the parts for both sides."""
    make_known(monkeypatch)


OWN = {
    "label counts": {"name": "calibrated"},
    "mean gradient": {"name": "aligned"},
    "mean images": {"name": "mixed"},
    "projection": {"name": "projected"},
    "facts": {"name": "counted"},
    "power of choice": {**PLAIN, "sampling": "powerofchoice"},
    "longest away": {**PLAIN, "sampling": "longestaway"},
}


@pytest.mark.parametrize("what", OWN)
def test_models_metrics_and_bytes_are_the_same(what, folder):
    training = TRAINING | ({"cohort": 2} if what == "power of choice" else {})
    path = write_experiment(folder, method=OWN[what], training=training)
    _, run, grid = compare(path, folder)
    assert ("query.ask" in grid.kinds) == (what in ("mean gradient", "mean images"))
    assert ("evaluate" in grid.kinds) == (what == "power of choice")
    assert ("projection.weight" in run.trainer.state.model) == (what == "projection")


def test_the_same_clients_are_chosen(folder):
    path = write_experiment(
        folder, method=OWN["power of choice"] | {"aggregation": "noting"}, training={"cohort": 2}
    )
    alone, run, _ = compare(path, folder)
    chosen = [row["clients"] for row in run.trainer.rounds]
    assert [row["clients"] for row in alone.trainer.rounds] == chosen
    assert all(len(clients) == 2 for clients in chosen)


def test_the_keys_of_the_server_are_the_same(folder):
    path = write_experiment(folder, method=PLAIN | {"aggregation": "noting"}, seed=3)
    _, run, _ = compare(path, folder)
    keys = [row["notes"]["key"] for row in run.trainer.rounds]
    assert keys == [fold(3, round_, Purpose.SERVER) for round_ in range(3)]
    assert len(set(keys)) == 3


# ---- what is sent once ---------------------------------------------------------------------------


# The means of four clients: images of 8 by 8 and shares of ten classes.
MEANS = 8 * 4 * (64 + 10)


def bytes_down(run):
    return [row["bytes_down"] for row in run.trainer.rounds]


def test_means_are_sent_once(folder):
    path = write_experiment(folder, method="mixed")
    _, run, _ = compare(path, folder)
    model = size_in_bytes(run.trainer.state.model)
    assert bytes_down(run) == [4 * (model + MEANS), 4 * model, 4 * model]


def forgets_after(client, round_, folder):
    """Make a client lose its disk after it has trained in a round."""

    def tamper(node, message, reply):
        trained = (message.metadata.message_type, settings_of(message.content).get("round")) == (
            "train",
            round_,
        )
        if number_of(node) == client and trained:
            shutil.rmtree(folder / "memory" / str(client) / "runs")
        return reply

    return tamper


@pytest.mark.parametrize("min_clients", [1, 4])
def test_a_client_that_has_lost_its_disk_is_sent_them_again(min_clients, folder):
    path = write_experiment(folder, method="mixed", flower={"min_clients": min_clients})
    alone = load_experiment(path).run()
    begun = time.monotonic()
    run, grid = run_on_loop(path, own_nodes(folder), tamper=forgets_after(1, 0, folder))
    assert differ(alone.trainer.state.model, run.trainer.state.model) <= TOLERANCE
    assert all("left_out" not in row for row in run.trainer.rounds)
    model = size_in_bytes(run.trainer.state.model)
    # Client 1 is asked twice in round 2: without the means, and with them.
    assert bytes_down(run) == [4 * (model + MEANS), 5 * model + MEANS, 4 * model]
    assert grid.kinds.count("train") == 3 * 4 + 1
    assert time.monotonic() - begun < 30, "nobody is waited for"


def test_a_client_that_fails_when_it_is_sent_them_again_gets_them_in_the_next_round(folder):
    path = write_experiment(folder, method="mixed")
    asked = []

    def tamper(node, message, reply):
        if message.metadata.message_type == "train" and number_of(node) == 1:
            round_, whole = (
                settings_of(message.content)["round"],
                "sent.means" in message.content.array_records,
            )
            asked.append((round_, whole))
            if round_ == 0:
                shutil.rmtree(folder / "memory" / "1" / "runs")
            elif round_ == 1 and whole:
                shutil.rmtree(folder / "memory" / "1" / "runs")
                return error(message, reply)
        return reply

    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    assert [row["cohort"] for row in run.trainer.rounds] == [4, 3, 4]
    assert asked == [(0, True), (1, False), (1, True), (2, True)]


def test_a_damaged_file_is_as_good_as_none(folder):
    path = write_experiment(folder, method="mixed")

    def tamper(node, message, reply):
        if (message.metadata.message_type, settings_of(message.content).get("round")) == (
            "train",
            0,
        ):
            for file in (folder / "memory" / str(number_of(node))).glob("runs/*/client-*/held-*"):
                file.write_bytes(file.read_bytes()[:-8] + b"\0" * 8)
        return reply

    run, grid = run_on_loop(path, own_nodes(folder), tamper=tamper)
    assert grid.kinds.count("train") == 3 * 4 + 4
    alone = load_experiment(path).run()
    assert differ(alone.trainer.state.model, run.trainer.state.model) <= TOLERANCE


@pytest.mark.parametrize("name", ["mixed", "calibrated", "counted", "aligned"])
def test_a_server_that_was_stopped_resumes_to_the_same_bytes(name, folder):
    path = write_experiment(folder, method=name, training=TRAINING | {"rounds": 4})
    run_on_loop(path, own_nodes(folder), folder / "alone")

    class Killed(BaseException):
        pass

    def tamper(node, message, reply):
        if (message.metadata.message_type, settings_of(message.content).get("round")) == (
            "train",
            2,
        ):
            raise Killed
        return reply

    with pytest.raises(Killed):
        run_on_loop(path, own_nodes(folder), folder / "out", tamper=tamper)
    resumed, _ = run_on_loop(path, own_nodes(folder), folder / "out")
    assert promised(folder / "out") == promised(folder / "alone")
    alone = load_experiment(path).run()
    assert bytes_down(resumed) == bytes_down(alone)


# ---- memories ------------------------------------------------------------------------------------


def test_facts_are_on_the_clients_own_disks_only(folder):
    path = write_experiment(folder, method="calibrated")
    run, _ = run_on_loop(path, own_nodes(folder), folder / "out")
    data = load_experiment(path).federation()
    for client in range(4):
        kept = (
            folder / "memory" / str(client) / "runs" / run.trainer.engine.run() / f"client-{client}"
        )
        memory, _ = load_tensors(kept / "round-3.safetensors")
        wanted = np.bincount(data.y[torch.from_numpy(data.train.of(client))], minlength=10)
        assert memory["labels/counts"].tolist() == [wanted.tolist()]
    checkpoint, _ = load_tensors(folder / "out" / "checkpoint.safetensors")
    assert not any("labels" in name for name in checkpoint)


def test_a_client_that_has_lost_its_facts_computes_them_again(folder):
    path = write_experiment(folder, method="calibrated")
    alone = load_experiment(path).run()
    run, _ = run_on_loop(path, own_nodes(folder), tamper=forgets_after(2, 0, folder))
    assert differ(alone.trainer.state.model, run.trainer.state.model) <= TOLERANCE


# ---- clients that are lost before they train -----------------------------------------------------


def played(path, cohorts):
    """Run one round per cohort in this process, on the experiment's data."""
    experiment = load_experiment(path)
    data = experiment.federation()
    module = models.build("mlp", shape=data.shape, classes=10, seed=0)
    how = {"seed": 0, "batch_size": 16, "optimizer": Sgd(lr=0.1)}
    return play(experiment.method, data, module, cohorts, **how)


def test_a_round_goes_on_without_a_client_that_is_lost_while_it_is_prepared(folder):
    path = write_experiment(folder, method="aligned", training={"optimizer": {"lr": 0.1}})
    run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(2, "query.ask", 1, error))
    rows = list(run.trainer.rounds)
    assert [row["cohort"] for row in rows] == [4, 3, 4]
    assert rows[1]["left_out"] == {"2": "<class 'MemoryError'>:<'out of memory'>"}
    wanted = played(path, [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]])
    assert differ(wanted.model, run.trainer.state.model) <= TOLERANCE
    # Everything sent is counted: the model to four clients, and then to three twice.
    model, gradient = size_in_bytes(wanted.model), 8 * (64 * 10 + 10)
    assert rows[1]["bytes_down"] == (4 + 3 + 3) * model + 3 * gradient


def test_a_sampler_chooses_among_those_that_answer(folder):
    path = write_experiment(
        folder,
        method=PLAIN | {"sampling": {"name": "powerofchoice", "candidates": 4}},
        training={"cohort": 2},
    )
    path_of_three = folder / "three.yaml"
    three = (
        path.read_text()
        .replace("candidates: 4", "candidates: 3")
        .replace("clients: 4", "clients: 3")
    )
    path_of_three.write_text(three)
    wrong = misbehaving(1, "evaluate", 0, error)
    run, _ = run_on_loop(path, own_nodes(folder), settings="training.rounds=1", tamper=wrong)
    others, _ = run_on_loop(
        path_of_three, own_nodes(folder, [0, 2, 3]), settings="training.rounds=1"
    )
    (row,) = run.trainer.rounds
    assert row["left_out"] == {"1": "<class 'MemoryError'>:<'out of memory'>"}
    assert row["cohort"] == 2
    assert differ(others.trainer.state.model, run.trainer.state.model) <= TOLERANCE


# ---- mistakes ------------------------------------------------------------------------------------


def test_rows_for_another_number_of_clients_are_refused(folder):
    run, _ = run_on_loop(
        write_experiment(folder, method="aligned", training={"rounds": 1}), own_nodes(folder)
    )
    trainer = run.trainer
    cohort = trainer.engine.cohort(trainer.method, np.array([0, 1, 2]), 1)
    for rows in (2, 4):
        with pytest.raises(
            InputError,
            match=rf"each\['share'\] has {rows} rows for 3 clients; valid: one row per client",
        ):
            cohort.ask("gradient_sums", model=trainer.state.model, each={"share": torch.ones(rows)})


def test_a_cohort_trains_once(folder):
    run, _ = run_on_loop(write_experiment(folder, training={"rounds": 1}), own_nodes(folder))
    trainer = run.trainer
    cohort = trainer.engine.cohort(trainer.method, np.array([0, 1]), 1)
    cohort.train({"model": trainer.state.model}, {}, trainer.method.local)
    with pytest.raises(InputError, match="this cohort has already trained"):
        cohort.train({"model": trainer.state.model}, {}, trainer.method.local)
