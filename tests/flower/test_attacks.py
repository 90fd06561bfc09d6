"""Attacks on a federation in separate processes: each is refused, and the run is unaffected."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.flower import malformed
from tests.flower.loop import own_nodes
from tests.flower.processes import Flower, marked, wait_until
from tests.flower.world import PATIENCE, assert_same_run, replayed, world
from tests.run.small import rows_of

pytestmark = pytest.mark.slow

CLIP = 0.05
# A server that requests too much of one client in each of three rounds. It waits for the nodes that
# the test starts, so that the order does not depend on the speed of the machine.
HOSTILE = """
import json
import time

from flwr.app import ConfigRecord

from equipoise.flower.engine import FlowerEngine

ORDERS = {
    1: (0, {"run": "../../../escaped"}),
    2: (1, {"local": json.dumps({"name": "fedprox", "mu": 1.0})}),
    3: (2, {"privacy": "null", "flower.privacy": "null"}),
}
_messages = FlowerEngine.messages


def _wait_for(nodes, condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        nodes.look()
        time.sleep(0.2)


def _hostile(self, clients, round_, model, versions=None, **settings):
    if "reports" in settings and round_ == 1:
        _wait_for(self.nodes, lambda: len(self.nodes.refused) == 2)
    if "reports" in settings and round_ == 4:
        _wait_for(self.nodes, lambda: 3 in self.nodes.node_of)
    contents = _messages(self, clients, round_, model, versions, **settings)
    if "reports" in settings and round_ in ORDERS:
        client, order = ORDERS[round_]
        contents[client]["settings"] = ConfigRecord({**contents[client]["settings"], **order})
    return contents


FlowerEngine.messages = _hostile
"""
# What clients 0 and 1 answer in each round, from the catalogue of malformed answers.
LIES = {
    0: {1: "update: header of brackets"},
    1: {1: "update: cut off"},
    2: {0: "update: pickle"},
    3: {0: "update: real shape huge", 1: "train_loss as a list"},
    4: {0: "update: an escape sequence as name", 1: "another client"},
}
LYING = f"""
import malformed

LIES = {LIES}
WRONG = {{
    **malformed.wrong_arrays("update", "head.bias"),
    **malformed.wrong_numbers("reports", "train_loss"),
    **malformed.wrong_notes(),
}}
_honest = dict(client._registered_funcs)


def _lying(message, context):
    reply = _honest["train.default"](message, context)
    if not reply.has_error():
        note = reply.content["note"]
        if lie := LIES[note["round"]].get(note["client"]):
            WRONG[lie](reply.content)
    return reply


def _boasting(message, context):
    reply = _honest["evaluate.models"](message, context)
    if not reply.has_error() and reply.content["note"]["client"] == 1:
        malformed.in_numbers("global.test", accuracy=7.5)(reply.content)
    return reply


client._registered_funcs |= {{"train.default": _lying, "evaluate.models": _boasting}}
"""


def test_attacks_over_real_processes(tmp_path):
    """Identity theft, a stranger, path traversal, another rule, DP switched off and malformed
    answers, in one federation.
    """
    roster, out = tmp_path / "roster.yaml", tmp_path / "out"
    roster.write_text("{0: , 1: , 2: , 3: }\n")
    path = world(
        tmp_path,
        method={"name": "fedavg", "guard": {"name": "norm", "bound": 1000.0}},
        training={"rounds": 5, "optimizer": {"lr": 0.5}},
        flower={"timeout": PATIENCE, "roster": str(roster), "privacy": {"clip": CLIP}},
    )
    with (tmp_path / "app" / "app.py").open("a") as file:
        file.write(HOSTILE + LYING)
    shutil.copy(malformed.__file__, tmp_path / "app")
    configs = own_nodes(tmp_path)
    thief = {**configs[3], "memory": str(tmp_path / "memory" / "thief")}
    stranger = {**configs[0], "client": 7, "memory": str(tmp_path / "memory" / "stranger")}

    def rounds():
        return len(rows_of(out, "rounds")) if (out / "rounds.jsonl").exists() else 0

    with Flower(tmp_path / "flower") as flower:
        for client, config in enumerate(configs):
            flower.node(f"node{client}", config)
        run = flower.begin(tmp_path / "app", out=str(out))
        wait_until(lambda: rounds() >= 1 or run.poll() is not None, PATIENCE, "round 1 to end")
        flower.processes["node3"].terminate()
        flower.processes["node3"].wait(60)
        flower.node("thief", thief)
        flower.node("stranger", stranger)
        wait_until(
            lambda: rounds() >= 2 or run.poll() is not None,
            PATIENCE,
            "thief and stranger to be refused",
        )
        flower.node("node3-again", configs[3])
        run.wait(PATIENCE)
        log = flower.log("run")
        # Another run of the same app, started without its protection.
        weakened = tmp_path / "weakened"
        flower.begin(
            tmp_path / "app", name="weakened", out=str(weakened), set="flower.privacy=null"
        )
        reason = (
            "cannot take part: the client refuses: the run weakens flower.privacy: none instead of "
            "clip 0.05"
        )
        wait_until(
            lambda: flower.log("weakened").count(reason) == 6, PATIENCE, "all six nodes to refuse"
        )
        silos = {client: flower.log(f"node{client}") for client in range(3)}
    assert marked(flower.mark) == []

    assert "cannot take part: client 3 belongs to the node that registered it first (SHA256:" in log
    assert "cannot take part: client 7 is not in the roster" in log
    rows = rows_of(out, "rounds")
    left_out = [set(row.get("left_out", {})) for row in rows]
    # Client 3 returns in round 3, 4 or 5, whenever its process is ready.
    ordered = [set(), {"0"}, {"1"}, set(), set()]
    lied = [{str(client) for client in lies} for lies in LIES.values()]
    assert [left - {"3"} for left in left_out] == [
        refused | lying for refused, lying in zip(ordered, lied, strict=True)
    ], log[-3000:]
    for number, lies in LIES.items():
        for client in lies:
            said = rows[number]["left_out"][str(client)]
            assert said.startswith("answered "), said
            assert said.isprintable()
    assert list(rows[-1]["not_evaluated"]) == ["1"]
    assert "answered with 7.5 as test accuracy" in rows[-1]["not_evaluated"]["1"]
    assert "Traceback" not in log
    assert "3" in left_out[1]
    assert "3" not in left_out[4]
    assert "'../../../escaped' is not a name for a run" in rows[1]["left_out"]["0"]
    assert "the message has another local rule" in rows[2]["left_out"]["1"]
    assert "refused a message 'train': '../../../escaped' is not a name for a run" in silos[0]
    assert "refused a message 'train': the message has another local rule" in silos[1]
    assert not list(tmp_path.rglob("escaped*"))
    norms = [norm for row in rows for norm in row["notes"]["guard_norms"]]
    assert max(norms) == pytest.approx(CLIP, rel=1e-6), (
        "updates were clipped whatever the message said"
    )
    assert {
        said["client"] for said in json.loads((out / "clients.json").read_text())["clients"]
    } == {0, 1, 2, 3}
    assert_same_run(out, replayed(path, tmp_path, rows), log)

    assert "refused a message 'query.describe': the run weakens flower.privacy" in silos[2]
    assert not weakened.exists()
