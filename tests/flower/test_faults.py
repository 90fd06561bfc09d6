"""Faults: clients that fail are left out with a reason, and the round continues."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo

from equipoise.config import load_experiment
from equipoise.errors import InputError, RunError
from equipoise.flower.checks import Misfit
from equipoise.flower.client import client_app
from equipoise.flower.memory import Versions
from equipoise.flower.nodes import Nodes
from equipoise.flower.roster import Roster
from equipoise.flower.schema import Schema
from equipoise.flower.server import serve
from equipoise.flower.settings import FlowerSettings
from equipoise.flower.wire import from_record, settings_of, to_record
from equipoise.report import write_report
from equipoise.run.files import load_tensors
from equipoise.tree import size_in_bytes
from tests.flower.loop import (
    FIRST_NODE,
    LoopGrid,
    error,
    misbehaving,
    number_of,
    own_nodes,
    run_on_loop,
    write_experiment,
    write_silos,
)
from tests.report.pages import Page
from tests.run.small import promised


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    return write_silos(tmp_path_factory.mktemp("faults") / "silos")


@pytest.fixture
def folder(tmp_path, silos):
    (tmp_path / "silos").symlink_to(silos)
    return tmp_path


def silence(message, reply):
    return None


def changed(change):
    def wrong(message, reply):
        tree = from_record(reply.content.array_records["update"])
        change(tree)
        reply.content["update"] = to_record(tree)
        return reply

    return wrong


def put_nan(tree):
    tree["head.bias"][3] = float("nan")


def put_absurd(tree):
    tree["head.bias"][3] = 1e300


def put_other_shape(tree):
    tree["head.bias"] = tree["head.bias"][:-1]


def put_other_type(tree):
    tree["head.bias"] = tree["head.bias"].float()


def forget_one(tree):
    del tree["head.bias"]


def stale(message, reply):
    reply.content["note"] = ConfigRecord({"client": reply.content["note"]["client"], "round": 0})
    return reply


def impostor(message, reply):
    reply.content["note"] = ConfigRecord({"client": 3, "round": reply.content["note"]["round"]})
    return reply


def infinite_loss(message, reply):
    reply.content["reports"] = MetricRecord(
        {**reply.content["reports"], "train_loss": float("inf")}
    )
    return reply


WRONG_ANSWERS = {
    "silence": (silence, "no answer within 0.3 s"),
    "error": (error, "<class 'MemoryError'>:<'out of memory'>"),
    "NaN": (changed(put_nan), "answered with NaN or infinity in head.bias"),
    "absurd": (changed(put_absurd), r"answered with a number beyond 1e\+12 in head.bias"),
    "shape": (
        changed(put_other_shape),
        r"answered with head.bias of \(9,\) torch.float64 instead of \(10,\)",
    ),
    "type": (
        changed(put_other_type),
        "answered with head.bias of .* torch.float32 instead of .* torch.float64",
    ),
    "missing": (changed(forget_one), "answered with other parameters: head.bias"),
    "stale": (stale, "answered for round 0, counted from 0, instead of 1"),
    "impostor": (impostor, "answered as client 3"),
    "loss": (infinite_loss, "answered with inf as train_loss"),
}


def test_a_mask_that_was_sent_as_minus_infinity_is_no_wrong_answer():
    sent = {"mask": torch.tensor([0.0, -torch.inf]), "head.bias": torch.zeros(2)}
    schema = Schema(client=0, round=0, trees={"update": sent})
    note = ConfigRecord({"client": 0, "round": 0})
    answer = schema.read(RecordDict({"update": to_record(sent), "note": note}))
    assert answer.trees["update"]["mask"].tolist() == [0.0, -torch.inf]
    spoiled = {**sent, "head.bias": torch.tensor([0.0, torch.nan])}
    with pytest.raises(Misfit, match="answered with NaN or infinity in head.bias"):
        schema.read(RecordDict({"update": to_record(spoiled), "note": note}))


@pytest.mark.parametrize("what", WRONG_ANSWERS)
def test_a_wrong_answer_is_left_out_by_name_and_the_round_goes_on(what, folder):
    wrong, reason = WRONG_ANSWERS[what]
    path = write_experiment(folder, method="ditto", flower={"timeout": 0.3})
    run, _ = run_on_loop(
        path, own_nodes(folder), folder / "out", tamper=misbehaving(1, "train", 1, wrong)
    )
    rows = list(run.trainer.rounds)
    assert [row["cohort"] for row in rows] == [4, 3, 4]
    assert list(rows[1]["left_out"]) == ["1"]
    assert re.search(reason, rows[1]["left_out"]["1"])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.trainer.state.model.values())
    # What client 1 wrote in the round that did not count is never read: round 3 continues from
    # round 1.
    assert run.trainer.engine.ledger.now == {0: 3, 1: 3, 2: 3, 3: 3}


def test_an_absurd_upload_is_left_out_too(folder):
    def wrong(message, reply):
        tree = from_record(reply.content.array_records["upload.control_change"])
        tree["head.bias"][0] = -1e300
        reply.content["upload.control_change"] = to_record(tree)
        return reply

    path = write_experiment(folder, method="scaffold", training={"rounds": 2})
    run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(1, "train", 0, wrong))
    assert [row.get("left_out") for row in run.trainer.rounds] == [
        {"1": "answered with a number beyond 1e+12 in head.bias"},
        None,
    ]


def test_too_few_updates_for_a_guard_stop_the_run_with_its_checkpoint_intact(folder):
    method = {"name": "fedavg", "guard": {"name": "multikrum", "f": 0, "m": 4}}
    path = write_experiment(folder, method=method, training={"rounds": 3})
    wrong = misbehaving(1, "train", 1, changed(put_absurd))
    with pytest.raises(
        RunError,
        match=r"round 2: the guard 'multikrum' .* 3 sent a usable one; the checkpoint of round 1",
    ):
        run_on_loop(path, own_nodes(folder), folder / "out", tamper=wrong)
    resumed, _ = run_on_loop(path, own_nodes(folder), folder / "out")
    assert resumed.summary["rounds"] == 3


def test_who_is_left_out_has_no_weight_in_the_round(folder):
    path = write_experiment(folder, training={"rounds": 1}, flower={"timeout": 0.3})
    run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(1, "train", 0, error))
    without, _ = run_on_loop(
        write_experiment(folder, training={"rounds": 1}, flower={"clients": 3}),
        own_nodes(folder, [0, 2, 3]),
    )
    for name, tensor in run.trainer.state.model.items():
        assert torch.equal(tensor, without.trainer.state.model[name])


def test_memory_of_a_round_that_did_not_count_is_not_used(folder):
    """Client 1's answer of round 2 is lost; its memory in round 3 is that of round 1."""
    path = write_experiment(folder, method="ditto")
    seen = {}

    def watch(node, message, reply):
        asked = settings_of(message.content)
        if number_of(node) == 1 and message.metadata.message_type == "train":
            seen[asked["round"]] = asked["version"]
            if asked["round"] == 1:
                return error(message, reply)
        return reply

    run, _ = run_on_loop(path, own_nodes(folder), folder / "out", tamper=watch)
    assert seen == {0: 0, 1: 1, 2: 1}
    memory = Versions(folder / "memory" / "1", run.trainer.engine.run(), 1)
    assert 2 not in memory.versions or memory.versions[-1] == 3


def test_too_few_answers_are_asked_for_again_and_then_the_run_stops(folder):
    path = write_experiment(folder, flower={"min_clients": 4, "retries": 2})
    asked = []

    def tamper(node, message, reply):
        if message.metadata.message_type == "train" and settings_of(message.content)["round"] == 1:
            asked.append(number_of(node))
            if number_of(node) == 2:
                return error(message, reply)
        return reply

    with pytest.raises(
        RunError,
        match=r"round 2: 3 of 4 clients answered, and flower.min_clients is 4 \(client 2: ",
    ):
        run_on_loop(path, own_nodes(folder), folder / "out", tamper=tamper)
    # Clients that have answered are not asked again.
    assert sorted(asked) == [0, 1, 2, 2, 2, 3]
    _, note = load_tensors(folder / "out" / "checkpoint.safetensors")
    assert note["round"] == 1
    resumed, _ = run_on_loop(path, own_nodes(folder), folder / "out")
    run_on_loop(path, own_nodes(folder), folder / "alone")
    assert resumed.summary["rounds"] == 3
    assert promised(folder / "out") == promised(folder / "alone")


def test_a_retry_that_succeeds_changes_nothing(folder):
    path = write_experiment(folder, method="scaffold", flower={"min_clients": 4, "retries": 1})
    failures = iter([True])

    def tamper(node, message, reply):
        once = number_of(node) == 2 and message.metadata.message_type == "train"
        return error(message, reply) if once and next(failures, False) else reply

    run, _ = run_on_loop(path, own_nodes(folder), folder / "out", tamper=tamper)
    run_on_loop(path, own_nodes(folder), folder / "alone")
    assert (folder / "out/model.safetensors").read_bytes() == (
        folder / "alone/model.safetensors"
    ).read_bytes()
    assert (folder / "out/metrics.jsonl").read_bytes() == (
        folder / "alone/metrics.jsonl"
    ).read_bytes()
    assert "left_out" not in next(iter(run.trainer.rounds))


@pytest.mark.parametrize(
    ("name", "checkpoint_every"), [("scaffold", 1), ("ditto", 2), ("gifair", 1)]
)
def test_a_server_stopped_anywhere_resumes_to_the_same_bytes(name, checkpoint_every, folder):
    path = write_experiment(
        folder, method=name, training={"rounds": 5, "cohort": 3}, checkpoint_every=checkpoint_every
    )
    alone, _ = run_on_loop(path, own_nodes(folder), folder / "alone")

    class Killed(BaseException):
        pass

    stops = iter([(0, "train"), (3, "train"), (4, "evaluate.models")])
    stop = next(stops)

    def tamper(node, message, reply):
        if (settings_of(message.content).get("round"), message.metadata.message_type) == stop:
            raise Killed
        return reply

    for _ in range(3):
        with pytest.raises(Killed):
            run_on_loop(path, own_nodes(folder), folder / "out", tamper=tamper)
        stop = next(stops, (None, None))
    resumed, _ = run_on_loop(path, own_nodes(folder), folder / "out")
    assert promised(folder / "out") == promised(folder / "alone")
    assert [row["round"] for row in resumed.trainer.rounds] == [1, 2, 3, 4, 5]
    for client in range(4):
        files = [
            folder
            / "memory"
            / str(client)
            / "runs"
            / run.trainer.engine.run()
            / f"client-{client}/model.safetensors"
            for run in (alone, resumed)
        ]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_client_lost_while_updates_are_combined_counts_no_more(folder):
    path = write_experiment(
        folder, method={"name": "gifair", "exact": True}, training={"rounds": 2}
    )
    wrong = misbehaving(2, "evaluate", 1, error)
    run, _ = run_on_loop(path, own_nodes(folder), tamper=wrong)
    rows = list(run.trainer.rounds)
    assert [row["cohort"] for row in rows] == [4, 3]
    assert list(rows[1]["left_out"]) == ["2"]
    assert run.trainer.engine.ledger.now == {0: 2, 1: 2, 2: 1, 3: 2}
    also, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(2, "train", 1, error))
    for name, tensor in run.trainer.state.model.items():
        assert torch.equal(tensor, also.trainer.state.model[name])


def test_who_is_not_evaluated_is_named_and_has_no_row(folder):
    path = write_experiment(folder, training={"rounds": 2})
    run, _ = run_on_loop(
        path, own_nodes(folder), tamper=misbehaving(0, "evaluate.models", 2, error)
    )
    assert [row.get("not_evaluated") for row in run.trainer.rounds] == [
        None,
        {"0": "<class 'MemoryError'>:<'out of memory'>"},
    ]
    assert {row["client"] for row in run.trainer.metrics if row["round"] == 1} == {0, 1, 2, 3}
    assert {row["client"] for row in run.trainer.metrics if row["round"] == 2} == {1, 2, 3}


def test_who_has_no_result_is_in_the_summary_and_ends_the_log(folder, tmp_path, caplog):
    path = write_experiment(folder, training={"rounds": 2}, evaluation={"metrics": ["auroc"]})
    caplog.set_level("INFO")
    gone = misbehaving(0, "evaluate.models", 2, error)
    run, _ = run_on_loop(path, own_nodes(folder), tmp_path / "run", tamper=gone)
    name = run.trainer.federation.client_name(0)
    for parts in (run.summary["results"], run.summary["validation"]):
        part = parts["global"]["seen"]
        assert (part["clients"], part["left_out"]) == (3, 1)
        assert "out of memory" in part["metrics"]["auroc"]["left_out_clients"]["0"]
    (entry,) = run.summary["without_result"]["results"]["seen"]["listed"]
    assert (entry["client"], entry["name"]) == (0, name)
    assert entry["reason"] == "<class 'MemoryError'>:<'out of memory'>"
    assert any("3 of 4 seen clients: mean" in said for said in caplog.messages)
    said = f"1 of 4 seen clients has no result: {name} ({entry['reason']})"
    assert said in caplog.messages
    assert f"{said}." in Page(write_report([tmp_path / "run"]).read_text()).text


def test_a_client_that_was_evaluated_in_one_of_the_last_rounds_has_a_result(folder):
    path = write_experiment(folder, training={"rounds": 2}, evaluation={"last": 2})
    once, _ = run_on_loop(
        path, own_nodes(folder), tamper=misbehaving(0, "evaluate.models", 2, error)
    )
    assert "without_result" not in once.summary
    assert once.summary["results"]["global"]["seen"]["left_out"] == 0
    assert once.summary["tail"]["selected"]["results"]["global"]["seen"]["left_out"] == 1

    def never(node, message, reply):
        kind = message.metadata.message_type
        wrong = (number_of(node), kind) == (0, "evaluate.models")
        return error(message, reply) if wrong else reply

    gone, _ = run_on_loop(path, own_nodes(folder), tamper=never)
    assert gone.summary["without_result"]["results"]["seen"]["clients"] == 1


class Growing(LoopGrid):
    """A grid that some nodes join after a number of messages of a kind, and others leave."""

    def __init__(self, *args, join=(), leave=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.join, self.leave = dict(join), dict(leave)

    def push_messages(self, messages):
        pushed = super().push_messages(messages)
        trained = self.kinds.count("train")
        for moment in [moment for moment in self.join if trained >= moment]:
            self.nodes[FIRST_NODE + 1000 + moment] = self.join.pop(moment)
        for moment in [moment for moment in self.leave if trained >= moment]:
            self.nodes.pop(FIRST_NODE + 7 * self.leave.pop(moment))
        return pushed


@pytest.fixture
def at_once(monkeypatch):
    """Look for nodes at every opportunity, instead of every other second."""
    monkeypatch.setattr("equipoise.flower.nodes._LOOK_FOR_NODES", 0.0)


def run_on(grid, path, out=None):
    return serve(grid, load_experiment(path), out)


def growing(folder, path, clients, **changes):
    return Growing(client_app(path), own_nodes(folder, clients), **changes)


@pytest.mark.parametrize(
    ("name", "late"), [("fedavg", 3), ("scaffold", 0), ("gifair", 2), ("afl", 3)]
)
def test_a_late_joiner_is_taken_in(name, late, folder, at_once):
    path = write_experiment(folder, method=name, training={"rounds": 5}, flower={"clients": 3})
    first = [client for client in range(4) if client != late]
    grid = growing(folder, path, first, join={6: own_nodes(folder, [late])[0]})
    run = run_on(grid, path, folder / "out")
    sizes = [row["cohort"] for row in run.trainer.rounds]
    assert sizes[:2] == [3, 3]
    assert sizes[-1] == 4
    assert {row["client"] for row in run.trainer.metrics if row["round"] == 1} == set(first)
    assert {row["client"] for row in run.trainer.metrics if row["round"] == 5} == {0, 1, 2, 3}
    assert {
        said["client"] for said in json.loads((folder / "out/clients.json").read_text())["clients"]
    } == {0, 1, 2, 3}
    clients = run.trainer.state.server.get("clients", {})
    if "ids" in clients:
        assert clients["ids"].tolist() == [0, 1, 2, 3]
    if "weight" in clients:
        assert float(clients["weight"].sum()) == pytest.approx(1)
    # A run with a new client can be resumed.
    assert run_on(growing(folder, path, [0, 1, 2, 3]), path, folder / "out").summary == run.summary


def test_what_everyone_is_asked_because_of_a_newcomer_is_counted(folder, at_once):
    path = write_experiment(folder, method="gifair", training={"rounds": 5}, flower={"clients": 3})
    run = run_on(growing(folder, path, [0, 1, 3], join={6: own_nodes(folder, [2])[0]}), path)
    rows = list(run.trainer.rounds)
    joined, usual = next(row for row in rows if row["cohort"] == 4), rows[-1]
    # All four get the model once more, and answer with loss and accuracy.
    assert joined["bytes_down"] - usual["bytes_down"] == 4 * size_in_bytes(run.trainer.state.model)
    assert joined["bytes_up"] - usual["bytes_up"] == 4 * 2 * 8


def test_a_client_that_leaves_is_not_connected_and_one_that_comes_back_is_the_same(folder, at_once):
    path = write_experiment(folder, method="ditto", training={"rounds": 6}, flower={"timeout": 0.3})
    grid = growing(folder, path, range(4), leave={4: 1}, join={14: own_nodes(folder, [1])[0]})
    run = run_on(grid, path)
    rows = list(run.trainer.rounds)
    assert rows[1]["left_out"] == {"1": "not connected"}
    assert "left_out" not in rows[-1]
    # It returned as another node, with its memory of its last valid round.
    assert run.trainer.engine.ledger.now == {0: 6, 1: 6, 2: 6, 3: 6}


def unavailable(message):
    return Message(Error(code=ErrorCode.NODE_UNAVAILABLE, reason="no heartbeat"), reply_to=message)


def test_a_node_that_flower_calls_unavailable_is_asked_who_it_is_when_it_is_back(folder, at_once):
    path = write_experiment(folder, training={"rounds": 4})
    away = Counter(train=1)

    def tamper(node, message, reply):
        kind, asked = message.metadata.message_type, settings_of(message.content)
        if number_of(node) != 1 or not away[kind] or (kind == "train" and asked["round"] != 1):
            return reply
        away[kind] -= 1
        if kind == "train":
            away["query.describe"] = 2
        return unavailable(message)

    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    rows = list(run.trainer.rounds)
    assert rows[1]["left_out"] == {"1": "its node went offline"}
    assert rows[3]["cohort"] == 4


def test_a_node_that_cannot_take_part_is_named_when_time_is_up(folder):
    path = write_experiment(folder, flower={"wait": 0.3})
    with pytest.raises(
        RunError,
        match=rf"3 of 4 clients have registered .* node {FIRST_NODE + 21} was refused: cannot read "
        "/nowhere",
    ):
        run_on_loop(path, [*own_nodes(folder, range(3)), {"client": 3, "data": "/nowhere"}])


def test_a_restarted_node_is_asked_again_in_the_same_round(folder, at_once):
    """The old node hangs; its replacement with the same disk gets the question and answers."""
    path = write_experiment(folder, training={"rounds": 2}, flower={"timeout": 20})
    experiment = load_experiment(path)

    class Restarting(Growing):
        def _answer(self, message):
            old = message.metadata.dst_node_id == FIRST_NODE + 7
            if old and message.metadata.message_type == "train":
                self.nodes[FIRST_NODE + 500] = own_nodes(folder, [1])[0]
                return None
            return super()._answer(message)

    run = run_on(Restarting(client_app(path), own_nodes(folder)), path)
    assert [row["cohort"] for row in run.trainer.rounds] == [4, 4]
    undisturbed, _ = run_on_loop(path, own_nodes(folder))
    assert experiment.training.rounds == 2
    for name, tensor in run.trainer.state.model.items():
        assert torch.equal(tensor, undisturbed.trainer.state.model[name])


@pytest.mark.parametrize("lost", ["query.describe", "train"])
def test_a_node_that_restarts_under_the_same_id_is_asked_again(lost, folder, at_once):
    """A node with a key keeps its id, and may be back before anyone has seen that it was away."""
    path = write_experiment(folder, training={"rounds": 1}, flower={"timeout": 3, "wait": 3})

    class Restarting(Growing):
        starts = 1

        def get_nodes(self):
            for place, node in enumerate(self.nodes):
                started = self.starts if place == 1 else 1
                yield NodeInfo(node_id=node, last_activated_at=f"2026-01-0{started}")

        def _answer(self, message):
            second = message.metadata.dst_node_id == FIRST_NODE + 7
            if second and message.metadata.message_type == lost and self.starts == 1:
                self.starts = 2
                return None
            return super()._answer(message)

    run = run_on(Restarting(client_app(path), own_nodes(folder)), path)
    assert [row["cohort"] for row in run.trainer.rounds] == [4]


def test_a_client_whose_disk_is_gone_begins_anew(folder):
    path = write_experiment(folder, method="ditto", training={"rounds": 2})

    def tamper(node, message, reply):
        if message.metadata.message_type == "evaluate.models" and number_of(node) == 0:
            shutil.rmtree(folder / "memory" / "0" / "runs", ignore_errors=True)
        return reply

    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    assert [row["cohort"] for row in run.trainer.rounds] == [4, 4]


def test_one_missing_version_is_an_error_and_not_a_new_beginning(folder):
    path = write_experiment(folder, method="ditto", training={"rounds": 2})

    def tamper(node, message, reply):
        if message.metadata.message_type == "evaluate.models" and number_of(node) == 0:
            for version in (folder / "memory" / "0").rglob("round-*.safetensors"):
                version.unlink()
        return reply

    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    assert "the memory of round 1 is not in" in list(run.trainer.rounds)[1]["left_out"]["0"]


def test_an_experiment_that_differs_on_a_client_is_noticed(folder, tmp_path_factory):
    """Another seed gives another initial model, so parts that are not sent would differ."""
    path = write_experiment(folder, method="fedper", flower={"min_clients": 4, "retries": 0})
    other = write_experiment(
        tmp_path_factory.mktemp("other"),
        method="fedper",
        seed=8,
        data={"root": str(folder / "silos")},
    )
    grid = LoopGrid(client_app(other), own_nodes(folder))
    with pytest.raises(RunError, match=r"head\.\w+.* differ from those of the server"):
        run_on(grid, path)


def test_uploads_of_another_shape_are_left_out(folder):
    path = write_experiment(folder, method="scaffold", training={"rounds": 1})

    def wrong(message, reply):
        tree = from_record(reply.content.array_records["upload.control_change"])
        tree["head.bias"] = tree["head.bias"][:2]
        reply.content["upload.control_change"] = to_record(tree)
        return reply

    run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(3, "train", 0, wrong))
    assert next(iter(run.trainer.rounds))["left_out"] == {
        "3": "answered with uploads of other shapes"
    }


def test_settings_are_checked():
    with pytest.raises(InputError, match="flower.min_clients is 3, more than the flower.clients=2"):
        FlowerSettings(min_clients=3)
    with pytest.raises(
        InputError, match="flower.timeout must be a number of seconds above 0, got 0"
    ):
        FlowerSettings(timeout=0)
    with pytest.raises(
        InputError, match="flower.clients must be a whole number of at least 1, got True"
    ):
        FlowerSettings(clients=True)


def test_nobody_there_is_an_error_after_the_wait():
    class Empty(LoopGrid):
        def __init__(self):
            super().__init__(None, [])

    nodes = Nodes(Empty(), Roster("x"), FlowerSettings(wait=0.2))
    with pytest.raises(
        RunError,
        match=r"0 of 2 clients have registered within 0.2 s \(flower.clients, flower.wait;",
    ):
        nodes.gather()


def test_bytes_are_counted_up_and_down(folder):
    path = write_experiment(folder, training={"rounds": 1})
    run, grid = run_on_loop(path, own_nodes(folder))
    row = next(iter(run.trainer.rounds))
    own = 4 * sum(t.numel() * 8 for t in run.trainer.state.model.values())
    # Every update includes two reports of training and one of validation.
    assert row["bytes_down"] == own
    assert row["bytes_up"] == own + 4 * 3 * 8
    trained = [size for kind, size in zip(grid.kinds, grid.bytes, strict=True) if kind == "train"]
    assert row["bytes_down"] < sum(trained) < 1.1 * row["bytes_down"]
    assert 0 < row["bytes_overhead"] < 0.1 * own
    assert np.isfinite(row["train_loss"])


def test_an_unseen_client_is_evaluated_and_never_trains(folder):
    path = write_experiment(folder, training={"rounds": 2})
    nodes = own_nodes(folder)
    nodes[2]["unseen"] = True
    trained = set()

    def watch(node, message, reply):
        if message.metadata.message_type == "train":
            trained.add(number_of(node))
        return reply

    run, _ = run_on_loop(path, nodes, tamper=watch)
    assert trained == {0, 1, 3}
    rows = [row for row in run.trainer.metrics if row["client"] == 2]
    assert rows
    assert all(row["unseen"] for row in rows)
    assert run.summary["results"]["global"]["unseen"]["worst_client_id"] == 2


def test_a_run_goes_on_only_with_the_same_protection(folder):
    settings = {"rounds": 2}
    path = write_experiment(folder, training=settings, flower={"privacy": {"clip": 1.0}})
    run, _ = run_on_loop(path, own_nodes(folder), folder / "out")
    assert run.config["flower"]["privacy"]["clip"] == 1.0
    again = write_experiment(folder, training=settings, flower={"privacy": {"clip": 2.0}})
    with pytest.raises(
        InputError, match="holds another experiment: flower.privacy.clip is 1.0 there and 2.0 here"
    ):
        run_on_loop(again, own_nodes(folder), folder / "out")
    # The time to wait may change when a run is resumed.
    patient = write_experiment(
        folder, training=settings, flower={"privacy": {"clip": 1.0}, "timeout": 99}
    )
    assert run_on_loop(patient, own_nodes(folder), folder / "out")[0].summary == run.summary


def test_a_chunk_size_is_not_measured_by_messages(folder):
    path = write_experiment(folder, training={"rounds": 1}, machine={"chunk": "measure"})
    run, grid = run_on_loop(path, own_nodes(folder))
    assert grid.kinds.count("train") == 4
    assert run.config["resolved"]["chunk"] == 1
