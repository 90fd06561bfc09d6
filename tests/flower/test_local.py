"""Local models on Flower: evaluated by clients, reported with updates, and optionally saved."""

from __future__ import annotations

import pytest
import torch
from flwr.app import MetricRecord

from equipoise.errors import InputError
from tests.flower.loop import (
    error,
    misbehaving,
    own_nodes,
    run_on_loop,
    write_experiment,
    write_silos,
)
from tests.flower.parity import compare

LOCAL = {"local": True, "every": 2}
TRAINING = {"rounds": 3, "cohort": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four clients' directories."""
    folder = tmp_path_factory.mktemp("local")
    write_silos(folder / "silos")
    return folder


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "ga"])
def test_local_models_are_the_same_and_cost_no_message(method, folder):
    path = write_experiment(folder, method=method, training=TRAINING, evaluation=LOCAL)
    _, run, grid = compare(path, folder)
    rows = [row for row in run.trainer.metrics if row["model"] == "local"]
    assert {row["round"] for row in rows} == {2, 3}
    assert len({row["client"] for row in rows if row["round"] == 3}) == 3

    path = write_experiment(folder, method=method, training=TRAINING, evaluation={"every": 2})
    without, other = run_on_loop(path, own_nodes(folder))
    assert grid.kinds == other.kinds
    counted = ("bytes_up", "bytes_down", "bytes_overhead")
    ours, theirs = (
        [[row[name] for name in counted] for row in r.trainer.rounds] for r in (run, without)
    )
    assert ours == theirs
    for name, tensor in without.trainer.state.model.items():
        assert torch.equal(tensor, run.trainer.state.model[name])


def test_local_models_are_kept_from_the_updates(folder):
    path = write_experiment(
        folder, method="ditto", training=TRAINING, evaluation={"keep_local": True}
    )
    alone, run, _ = compare(path, folder)
    here, there = alone.trainer.local_models(), run.trainer.local_models()
    assert here.clients == there.clients
    for client in here.clients:
        theirs = run.local_model(client).state_dict()
        for name, tensor in alone.local_model(client).state_dict().items():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"method": "fedper"},
            r"clients of method 'fedper' keep parts of the model \(head\.weight\)",
        ),
        (
            {"flower": {"privacy": {"clip": 1.0}}},
            "with flower.privacy the server receives clipped or noisy updates",
        ),
    ],
)
def test_what_the_server_does_not_receive_is_not_kept(sections, message, folder):
    path = write_experiment(folder, training=TRAINING, evaluation={"keep_local": True}, **sections)
    with pytest.raises(InputError, match=message):
        run_on_loop(path, own_nodes(folder))


def test_a_client_that_reports_nothing_of_its_local_model_is_left_out(folder):
    def silent(message, reply):
        del reply.content["local.test"]
        return reply

    def diverged(message, reply):
        reply.content["local.val"] = MetricRecord({"loss": float("nan"), "accuracy": 0.0})
        return reply

    path = write_experiment(
        folder,
        training={"rounds": 1},
        evaluation={"local": True},
        flower={"min_clients": 3, "retries": 0},
    )
    for wrong, reason in (
        (silent, "answered with nothing as test loss of the local model"),
        (diverged, "nan as val loss"),
    ):
        run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(1, "train", 0, wrong))
        (row,) = run.trainer.rounds
        assert reason in row["left_out"]["1"]
        assert {row["client"] for row in run.trainer.metrics if row["model"] == "local"} == {
            0,
            2,
            3,
        }


def test_a_client_lost_after_training_has_no_local_row(folder):
    path = write_experiment(
        folder,
        method="faa",
        training={"rounds": 1},
        evaluation={"local": True, "keep_local": True},
        flower={"min_clients": 3, "retries": 0},
    )
    run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(2, "evaluate", 0, error))
    assert {row["client"] for row in run.trainer.metrics if row["model"] == "local"} == {0, 1, 3}
    assert run.trainer.local_models().clients == [0, 1, 3]
