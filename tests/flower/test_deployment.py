"""Federations in separate processes: with failures, late clients, encryption and simulation."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from equipoise.config import load_experiment
from equipoise.flower.identity import OWNERS, fingerprint
from equipoise.run.files import load_tensors
from tests.flower.certificates import make_key, make_tls
from tests.flower.loop import own_nodes
from tests.flower.processes import Flower, marked, send, wait_until
from tests.flower.world import PATIENCE, assert_same_run, replayed, world
from tests.run.small import rows_of

pytestmark = pytest.mark.slow


def times_received(flower, node, kind="train"):
    return len(re.findall(rf"Receiving: {kind} message", flower.log(node)))


def processes_below(flower, name):
    """A SuperNode and the processes that it has started."""
    pid = flower.processes[name].pid
    return [pid, *flower.children("", under=pid)]


def test_a_bad_day(tmp_path):
    """A node is killed and restarted, one sends NaN, one hangs and returns."""
    path = world(
        tmp_path, method="ditto", training={"rounds": 5}, flower={"timeout": 60, "retries": 1}
    )
    out = tmp_path / "out"
    with Flower(tmp_path / "flower") as flower:
        configs = own_nodes(tmp_path)
        configs[3]["nan-in-round"] = 3
        for client, config in enumerate(configs):
            flower.node(f"node{client}", config)
        run = flower.begin(tmp_path / "app", out=str(out))

        def rounds():
            return len(rows_of(out, "rounds")) if (out / "rounds.jsonl").exists() else 0

        wait_until(lambda: times_received(flower, "node1") == 2, PATIENCE, "round 2 to begin")
        for pid in processes_below(flower, "node1"):
            send(pid, signal.SIGKILL)
        wait_until(lambda: rounds() >= 2, PATIENCE, "round 2 to end")
        flower.node("node1-again", configs[1])
        wait_until(
            lambda: rounds() >= 3 and times_received(flower, "node2") >= 4,
            PATIENCE,
            "round 4 to begin",
        )
        stopped = processes_below(flower, "node2")
        for pid in stopped:
            send(pid, signal.SIGSTOP)
        wait_until(lambda: rounds() >= 4, PATIENCE, "round 4 to end")
        for pid in stopped:
            send(pid, signal.SIGCONT)
        run.wait(PATIENCE)
        log = flower.log("run")
    assert marked(flower.mark) == []
    rows = rows_of(out, "rounds")
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert "1" in rows[1]["left_out"]
    assert "answered with NaN or infinity in" in rows[2]["left_out"]["3"]
    assert rows[3]["left_out"]["2"] in ("no answer within 60 s", "its node went offline")
    assert "1" not in rows[4].get("left_out", {}), "the node that was started again takes part"
    model, _ = load_tensors(out / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.values())
    assert_same_run(out, replayed(path, tmp_path, rows), log)


def test_a_late_joiner_over_real_processes(tmp_path):
    world(tmp_path, training={"rounds": 12}, flower={"clients": 2})
    out = tmp_path / "out"
    with Flower(tmp_path / "flower") as flower:
        configs = own_nodes(tmp_path)
        flower.node("node0", configs[0])
        flower.node("node3", configs[3])
        run = flower.begin(tmp_path / "app", out=str(out))
        wait_until(
            lambda: (out / "rounds.jsonl").exists() and rows_of(out, "rounds"),
            PATIENCE,
            "round 1 to end",
        )
        flower.node("node1", configs[1])
        wait_until(
            lambda: rows_of(out, "rounds")[-1]["cohort"] == 3,
            PATIENCE,
            "the late joiner to take part",
        )
        run.kill()
    assert {row["cohort"] for row in rows_of(out, "rounds")} == {2, 3}


def test_tls_and_keys(tmp_path):
    """Over TLS, nodes with registered keys take part; one with another key is refused."""
    world(tmp_path, training={"rounds": 1}, flower={"clients": 2, "identity": "key"})
    out = tmp_path / "out"
    keys = [make_key(tmp_path / f"key{client}") for client in range(3)]
    with Flower(tmp_path / "flower", tls=make_tls(tmp_path / "tls"), auth=True) as flower:
        for key in keys[:2]:
            said = flower.command("flwr", "supernode", "register", f"{key}.pub", "test")
            assert "registered successfully" in said
        configs = own_nodes(tmp_path)
        wrong = flower.node("wrong", configs[2], key=keys[2])
        for client in range(2):
            flower.node(f"node{client}", configs[client], key=keys[client])
        log = flower.run(tmp_path / "app", timeout=PATIENCE, out=str(out))
        assert (out / "summary.json").exists(), log[-3000:]
        assert "Failed to activate SuperNode" in flower.log("wrong")
        assert wrong.poll() not in (None, 0)
    clients = {said["client"] for said in json.loads((out / "clients.json").read_text())["clients"]}
    assert clients == {0, 1}
    owners = [json.loads(line) for line in (out / OWNERS).read_text().splitlines() if line]
    assert {owner["client"]: owner["key"] for owner in owners} == {
        client: fingerprint(Path(f"{keys[client]}.pub").read_bytes()) for client in range(2)
    }


def test_an_unencrypted_node_cannot_join_over_tls(tmp_path):
    world(tmp_path, training={"rounds": 1}, flower={"clients": 1, "wait": 20})
    with Flower(tmp_path / "flower", tls=make_tls(tmp_path / "tls")) as flower:
        tls, flower.tls = flower.tls, None
        flower.node("plain", own_nodes(tmp_path)[0])
        flower.tls = tls
        log = flower.run(tmp_path / "app", timeout=PATIENCE, out=str(tmp_path / "out"))
    assert "0 of 1 clients have registered within 20 s" in log
    assert not (tmp_path / "out" / "summary.json").exists()


def test_flwr_run_simulates_on_one_machine(tmp_path):
    path = world(tmp_path, method="ditto", evaluation={"every": 1})
    out = tmp_path / "out"
    with Flower(
        tmp_path / "flower", simulation=True, EQUIPOISE_MEMORY=str(tmp_path / "memory")
    ) as flower:
        log = flower.run(
            tmp_path / "app",
            "--federation-config",
            "num-supernodes=4 client-resources-num-cpus=1",
            timeout=PATIENCE,
            out=str(out),
        )
    assert_same_run(out, load_experiment(path).run(), log)
