"""Whatever a client answers or registers with, the run continues, and the reason is logged."""

from __future__ import annotations

import math
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from equipoise import tasks
from equipoise.config import load_experiment
from equipoise.errors import InputError, RunError
from equipoise.flower.checks import Misfit
from equipoise.flower.client import client_app
from equipoise.flower.nodes import Nodes
from equipoise.flower.schema import REPORTS, Answer, Schema, alike
from equipoise.flower.server import serve
from equipoise.flower.settings import FlowerSettings
from equipoise.flower.wire import settings_of, to_record
from equipoise.task import Task
from tests.flower import malformed
from tests.flower.loop import (
    FIRST_NODE,
    LoopGrid,
    misbehaving,
    number_of,
    own_nodes,
    run_on_loop,
    through_bytes,
    write_experiment,
    write_silos,
)

QUICK = {"batch_size": 64}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Look for answers and nodes at once, because all of them are in this process."""
    monkeypatch.setattr("equipoise.flower.nodes._LOOK_FOR_ANSWERS", 0.001)
    monkeypatch.setattr("equipoise.flower.nodes._LOOK_FOR_NODES", 0.0)


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    return write_silos(tmp_path_factory.mktemp("schema") / "silos")


@pytest.fixture
def folder(tmp_path, silos):
    (tmp_path / "silos").symlink_to(silos)
    return tmp_path


def in_turn(kind, faults, hostile, first=0):
    """Make hostile clients answer one kind of message wrongly, with other faults each round."""
    plan = {
        (first + place // len(hostile), hostile[place % len(hostile)]): name
        for place, name in enumerate(faults)
    }

    def tamper(node, message, reply):
        name = plan.get((settings_of(message.content).get("round"), number_of(node)))
        if name is None or message.metadata.message_type != kind:
            return reply
        return malformed.answering(faults[name])(message, reply)

    return plan, tamper


def assert_readable(reasons):
    for name, reason in reasons.items():
        assert reason.isprintable(), name
        assert 10 < len(reason) < 400, name


# For each kind of message: the experiment in which it occurs, and all malformed answers of client
# 1.
EXACT = {"name": "gifair", "exact": True}
KINDS = {
    "an update": (
        "train",
        {"method": "fedavg"},
        {
            **malformed.wrong_arrays("update", "head.bias"),
            **malformed.wrong_numbers(REPORTS, "train_loss"),
            **malformed.wrong_notes(),
            "steps below 0": malformed.in_numbers(REPORTS, steps=-1.0),
        },
    ),
    "an upload": (
        "train", {"method": "scaffold"},
        malformed.wrong_arrays("upload.control_change", "head.bias"),
    ),
    "a report": ("train", {"method": "qffl"}, {
        **malformed.wrong_numbers(REPORTS, "loss_before"),
        **malformed.wrong_numbers(REPORTS, "lr"),
        "a learning rate of 0": malformed.in_numbers(REPORTS, lr=0.0),
        "a tiny learning rate": malformed.in_numbers(REPORTS, lr=1e-300),
    }),
    "an evaluation": (
        "evaluate.models",
        {"method": "ditto"},
        {
            **malformed.wrong_numbers("global.test", "loss"),
            **malformed.wrong_numbers("personal.val", "accuracy"),
            **malformed.wrong_notes(),
            "accuracy of 7.5": malformed.in_numbers("global.test", accuracy=7.5),
            "accuracy below 0": malformed.in_numbers("personal.test", accuracy=-0.1),
        },
    ),
    "metrics of a local model": (
        "train",
        {"method": "fedavg", "evaluation": {"local": True}},
        {
            **malformed.wrong_numbers("local.test", "accuracy"),
            **malformed.wrong_numbers("local.val", "loss"),
        },
    ),
    "a later evaluation": (
        "evaluate", {"method": EXACT},
        {**malformed.wrong_numbers(REPORTS, "loss"), **malformed.wrong_notes()}
    ),
    "an answer to a question": (
        "query.ask",
        {"method": "fediir"},
        {**malformed.wrong_arrays("answer", "0"), **malformed.FORMS, **malformed.wrong_notes()},
    ),
    "a part that clients keep": (
        "query.kept",
        {"method": "fedper", "evaluation": {"average_kept": True}},
        {**malformed.wrong_arrays("kept", "head.bias"), **malformed.wrong_notes()},
    ),
}  # fmt: skip
# Among arrays of unknown shape, only those that differ from most others can be left out.
OF_OTHER_SHAPES = {
    "flat", "empty", "without axes", "one axis more", "thirty axes", "half precision",
    "truth values", "complex",
    "one array more", "one array less", "no arrays", "a thousand arrays more",
}  # fmt: skip


@pytest.mark.parametrize("what", KINDS)
def test_every_malformed_answer_is_refused_in_one_readable_line(what, folder, monkeypatch):
    """The server's own functions read messages as bytes; an answer of client 1 is malformed."""
    kind, sections, faults = KINDS[what]
    heard = []

    def listening(self, requests, round_, read, enough):
        def reading(client, content):
            answer = read(client, content)
            if client == 1 and requests[client][0] == kind:
                heard.append((read, content))
            return answer

        return insist(self, requests, round_, reading, enough)

    insist = Nodes.insist
    monkeypatch.setattr(Nodes, "insist", listening)
    run_on_loop(
        write_experiment(folder, training={"rounds": 1, **QUICK}, **sections), own_nodes(folder)
    )
    read, honest = heard[-1]
    reasons, accepted = {}, []
    for name, wrong in faults.items():
        content = RecordDict(dict(honest))
        wrong(content)
        arrived = through_bytes(Message(content, 1, kind))[0].content
        try:
            read(1, arrived)
        except Misfit as error:
            reasons[name] = str(error)
        else:
            accepted.append(name.rpartition(": ")[2])
    assert_readable(reasons)
    assert set(accepted) <= (
        OF_OTHER_SHAPES if what in ("an upload", "an answer to a question") else set()
    )
    assert len(reasons) > 20


REASONS = {
    ("an update", "update: torch"):
        "answered with head.bias written as torch.Tensor; valid: numpy.ndarray",
    ("an update", "update: text, declared as numbers"): (
        "answered with head.bias whose bytes are not the (10,) torch.float64 that it declares"
    ),
    ("an update", "update: an escape sequence as name"): (
        r"answered with other parameters: \x1b[2J\n\x1b]0;title\x07 0"
    ),
    ("an update", "train_loss as a list"): "answered with a list as train_loss",
    ("an update", "client as truth value"): "answered as client True",
    ("an upload", "upload.control_change: flat"): "answered with uploads of other shapes",
    ("an upload", "upload.control_change: text"): (
        "answered with head.bias of type <U1; valid: float64, float32, float16, bfloat16, "
        "complex64, complex128, int64, int32, int16, int8, uint8, bool"
    ),
    ("an upload", "upload.control_change left out"): "answered without control_change",
    ("a report", "a learning rate of 0"): (
        "answered with 0 as lr, which is not in the range from 1e-12 to 1e+12"
    ),
    ("an evaluation", "accuracy of 7.5"): (
        "answered with 7.5 as test accuracy of the global model, which is not in the range from 0 "
        "to 1"
    ),
    ("a later evaluation", "loss as NaN"): "answered with nan as train loss",
    ("an answer to a question", "a form that is no JSON"):
        "answered in a form that cannot be read: {",
    ("an answer to a question", "answer: one axis more"):
        "answered in another form than the others",
    ("an answer to a question", "a form with an unknown tensor"): (
        'answered in a form that does not fit its arrays: {"tensor": "99"}'
    ),
}  # fmt: skip


@pytest.mark.parametrize(("what", "fault"), REASONS)
def test_the_journal_says_why_an_answer_was_left_out(what, fault, folder):
    kind, sections, faults = KINDS[what]
    first = 1 if what in ("an evaluation", "a later evaluation") else 0
    tamper = misbehaving(1, kind, first, malformed.answering(faults[fault]))
    run, _ = run_on_loop(
        write_experiment(folder, training={"rounds": 2, **QUICK}, **sections),
        own_nodes(folder),
        tamper=tamper,
    )
    said = [row.get("not_evaluated") or row.get("left_out") for row in run.trainer.rounds]
    assert sorted(filter(None, said), key=str) == [{"1": REASONS[what, fault]}]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.trainer.state.model.values())


@pytest.mark.slow
@pytest.mark.parametrize("what", KINDS)
def test_a_run_with_malformed_answers_in_every_round_finishes(what, folder):
    """The whole catalogue, with two hostile clients of four."""
    kind, sections, faults = KINDS[what]
    plan, tamper = in_turn(kind, faults, hostile=(1, 2), first=1)
    rounds = 1 + max(round_ for round_, _ in plan)
    path = write_experiment(folder, training={"rounds": rounds, **QUICK}, **sections)
    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    assert run.summary["rounds"] == rounds
    assert all({"0", "3"}.isdisjoint(row.get("left_out", {})) for row in run.trainer.rounds)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.trainer.state.model.values())


@pytest.mark.parametrize("kind", ["train", "evaluate.models", "evaluate"])
def test_what_nobody_asked_for_is_left_out_and_the_rest_is_used(kind, folder, caplog):
    """The names of the first client matter most: all columns are made from its answer."""
    record = {"evaluate.models": "global.test"}.get(kind, REPORTS)
    faults = {
        name: malformed.in_numbers(record, **more) for name, more in malformed.UNDECLARED.items()
    }
    faults["one record more"] = lambda content: content.update({"more": MetricRecord({"a": [1]})})
    faults["arrays more"] = lambda content: content.update(
        {"more": malformed.ArrayRecord({"a": malformed.saved(np.zeros(3), dtype="?!")})}
    )
    method = {"name": "gifair", "exact": True} if kind == "evaluate" else "fedavg"
    plan, tamper = in_turn(kind, faults, hostile=(0,), first=1)
    path = write_experiment(folder, method=method, training={"rounds": len(faults) + 1, **QUICK})
    with caplog.at_level("WARNING", logger="flwr.equipoise"):
        run_on_loop(path, own_nodes(folder), folder / "out", tamper=tamper)
    run_on_loop(path, own_nodes(folder), folder / "honest")
    for file in ("metrics.jsonl", "rounds.jsonl", "model.safetensors"):
        assert (folder / "out" / file).read_bytes() == (folder / "honest" / file).read_bytes()
    said = [r.getMessage() for r in caplog.records if "was not requested" in r.getMessage()]
    assert len(said) == len(plan)
    assert all(line.isprintable() and len(line) < 400 for line in said)


def test_a_client_that_is_missing_from_one_of_two_evaluations_has_no_row(folder):
    """With averaged kept parts, global and personal models are evaluated one after the other."""
    path = write_experiment(
        folder, method="fedper", training={"rounds": 2, **QUICK}, evaluation={"average_kept": True}
    )
    asked = []

    def tamper(node, message, reply):
        if number_of(node) == 1 and message.metadata.message_type == "evaluate.models":
            asked.append(settings_of(message.content)["models"])
            if len(asked) == 1:
                malformed.in_numbers("global.val", loss=[0.5])(reply.content)
        return reply

    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    assert asked == ["global", "personal"] * 2
    assert [row.get("not_evaluated") for row in run.trainer.rounds] == [
        {"1": "answered with a list as val loss of the global model"},
        None,
    ]
    assert {row["client"] for row in run.trainer.metrics if row["round"] == 1} == {0, 2, 3}


def test_a_finite_loss_of_1e30_does_not_win_afl(folder):
    path = write_experiment(folder, method="afl", training={"rounds": 2, **QUICK})
    lie = malformed.answering(malformed.in_numbers(REPORTS, loss_before=1e30))
    run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(1, "train", 0, lie))
    assert next(iter(run.trainer.rounds))["left_out"] == {
        "1": "answered with 1e+30 as loss_before, which is not in the range from -1e+24 to 1e+24"
    }
    assert float(run.trainer.state.server["clients"]["weight"].max()) < 0.9


def test_the_largest_loss_is_the_operators_word(folder):
    lie = malformed.answering(malformed.in_numbers(REPORTS, loss_before=90.0))
    for largest, left_out in ((100.0, False), (50.0, True)):
        path = write_experiment(
            folder, method="afl", training={"rounds": 1, **QUICK}, flower={"max_loss": largest}
        )
        run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(1, "train", 0, lie))
        assert ("left_out" in next(iter(run.trainer.rounds))) == left_out


def test_the_largest_valid_loss_leaves_weights_that_sum_to_one(folder):
    path = write_experiment(
        folder, method={"name": "afl", "ascent": 1e6}, training={"rounds": 2, **QUICK}
    )
    lie = malformed.answering(malformed.in_numbers(REPORTS, loss_before=1e24))
    run, _ = run_on_loop(path, own_nodes(folder), tamper=misbehaving(1, "train", 0, lie))
    assert float(run.trainer.state.server["clients"]["weight"].sum()) == pytest.approx(1, abs=1e-12)


def test_an_answer_that_is_too_large_is_left_out(folder):
    path = write_experiment(
        folder, method="scaffold", training={"rounds": 1, **QUICK}, flower={"max_answer": 1.0}
    )
    long = malformed.in_arrays(
        "upload.control_change",
        lambda arrays: arrays.update(more=malformed.saved(np.zeros(200_000))),
    )
    run, _ = run_on_loop(
        path, own_nodes(folder), tamper=misbehaving(1, "train", 0, malformed.answering(long))
    )
    assert next(iter(run.trainer.rounds))["left_out"] == {
        "1": "answered with more than 1e+06 bytes in control_change"
    }


def test_answers_to_questions_are_bounded():
    schema = Schema(client=0, round=0, open_trees=("answer",), question=True)
    note = ConfigRecord({"client": 0, "round": 0})
    form = ConfigRecord({"text": '{"tensor": "0"}'})

    def read(value):
        answer = to_record({"0": torch.tensor([[value]], dtype=torch.float64)})
        return schema.read(RecordDict({"answer": answer, "form": form, "note": note}))

    assert read(9e23).trees["answer"]["0"].item() == 9e23
    with pytest.raises(Misfit, match=r"answered with a number beyond 1e\+24 in 0"):
        read(-2e24)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64], ids=str
)
def test_open_arrays_of_every_type_are_read_as_they_were_sent(dtype):
    sent = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    schema = Schema(client=0, round=0, open_trees=("upload.h",))
    content = {"upload.h": to_record({"h": sent}), "note": ConfigRecord({"client": 0, "round": 0})}
    message = through_bytes(Message(RecordDict(content), 1, "train"))[0]
    read = schema.read(message.content).trees["upload.h"]["h"]
    assert (read.dtype, read.tolist()) == (sent.dtype, sent.tolist())


def test_numbers_beyond_all_are_found_in_integers_and_complex_numbers():
    schema = Schema(client=0, round=0, open_trees=("upload.h",))
    for value in (torch.tensor([2**62]), torch.tensor([complex(0, math.inf)])):
        content = {
            "upload.h": to_record({"h": value}),
            "note": ConfigRecord({"client": 0, "round": 0}),
        }
        with pytest.raises(Misfit, match="answered with (a number beyond|NaN or infinity)"):
            schema.read(RecordDict(content))


def test_open_records_have_a_bounded_number_of_arrays():
    one = next(iter(to_record({"w": torch.zeros(1)}).values()))
    content = {f"{n}": one for n in range(10_001)}
    note = ConfigRecord({"client": 0, "round": 0})
    schema = Schema(client=0, round=0, open_trees=("upload.h",))
    with pytest.raises(Misfit, match="answered with 10001 arrays; valid: 10000 or fewer"):
        schema.read(RecordDict({"upload.h": malformed.ArrayRecord(content), "note": note}))


def test_those_that_most_clients_agree_with_are_kept():
    one, other = (Answer(RecordDict(), {"upload.h": {"h": torch.zeros(size)}}) for size in (2, 3))
    assert sorted(alike({0: other, 1: one, 2: one, 3: other, 4: one})) == [1, 2, 4]
    assert alike({}) == {}


def test_no_malformed_answer_takes_much_memory():
    """The largest message of the catalogue has 10 MB; what it declares is not allocated."""
    expected = {"head.bias": torch.zeros(10, dtype=torch.float64)}
    schema = Schema(client=1, round=0, trees={"update": expected}, open_trees=("upload.c",))
    contents = []
    for change in malformed.ARRAYS.values():
        for record in ("update", "upload.c"):
            content = RecordDict(
                {
                    "update": to_record(expected),
                    "upload.c": to_record(expected),
                    "note": ConfigRecord({"client": 1, "round": 0}),
                }
            )
            malformed.in_array(record, "head.bias", change)(content)
            contents.append(content)
    tracemalloc.start()
    try:
        for content in contents:
            with suppress(Misfit):
                schema.read(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6


# ---- registrations -------------------------------------------------------------------------------


def hostile_nodes(folder, count):
    """Return nodes that all read the data of client 3."""
    return [{**own_nodes(folder, [3])[0], "hostile": place} for place in range(count)]


def lying(faults):
    names = list(faults)

    def tamper(node, message, reply):
        if "hostile" not in node or message.metadata.message_type != "query.describe":
            return reply
        return malformed.answering(faults[names[node["hostile"]]])(message, reply)

    return tamper


class Joining(LoopGrid):
    """A grid that uninvited clients join after a number of training messages."""

    def __init__(self, *args, strangers, after, **kwargs):
        super().__init__(*args, **kwargs)
        self.strangers, self.after = strangers, after

    def push_messages(self, messages):
        pushed = super().push_messages(messages)
        if self.kinds.count("train") >= self.after:
            for place, config in enumerate(self.strangers):
                self.nodes[FIRST_NODE + 10_000 + place] = config
            self.strangers = []
        return pushed


@pytest.mark.parametrize("after", [0, 3], ids=["before round 1", "during the run"])
def test_every_malformed_registration_is_refused_by_name(after, folder):
    path = write_experiment(
        folder, training={"rounds": 3, **QUICK}, flower={"clients": 3, "wait": 10}
    )
    strangers = hostile_nodes(folder, len(malformed.REGISTRATIONS))
    begin = [] if after else strangers
    grid = Joining(
        client_app(path),
        [*own_nodes(folder, range(3)), *begin],
        tamper=lying(malformed.REGISTRATIONS),
        strangers=strangers if after else [],
        after=after,
    )
    run = serve(grid, load_experiment(path))
    assert [row["cohort"] for row in run.trainer.rounds] == [3, 3, 3]
    refused = list(run.trainer.engine.nodes.refused.values())
    assert len(refused) == len(malformed.REGISTRATIONS) > 65
    assert_readable(dict(zip(malformed.REGISTRATIONS, refused, strict=True)))
    assert sorted(run.trainer.engine.roster.known) == [0, 1, 2]
    assert run.trainer.engine.roster.clients == 3
    reasons = dict(zip(malformed.REGISTRATIONS, refused, strict=True))
    assert reasons["client as text"] == (
        "it registered with client '3'; valid: a whole number from 0 to 9999 (flower.max_client)"
    )
    assert reasons["unknown group"].startswith(
        "it registered with the unknown group nobody knows it; valid: "
    )


def test_one_client_does_not_decide_which_model_all_need(folder):
    """The one with the lowest number comes first, and needs another model than the others."""
    path = write_experiment(
        folder, training={"rounds": 2, **QUICK}, flower={"clients": 3, "wait": 10}
    )

    def tamper(node, message, reply):
        if message.metadata.message_type == "query.describe" and number_of(node) == 0:
            return malformed.answering(malformed.registered(shape=[1, 28, 28]))(message, reply)
        return reply

    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    assert [row["cohort"] for row in run.trainer.rounds] == [3, 3]
    assert list(run.trainer.engine.nodes.refused.values()) == [
        "client 0 (client-0) has shape (1, 28, 28), client 1 (client-1) (1, 8, 8); they must agree"
    ]


def test_too_few_clients_that_fit_are_an_error_that_names_the_others(folder):
    path = write_experiment(folder, flower={"clients": 4, "wait": 0.3})
    lie = malformed.answering(malformed.registered(outputs=9))

    def tamper(node, message, reply):
        return (
            lie(message, reply)
            if message.metadata.message_type == "query.describe" and number_of(node) == 2
            else reply
        )

    with pytest.raises(
        RunError, match="3 of 4 clients have registered .* was refused: client 2 .* has outputs 9"
    ):
        run_on_loop(path, own_nodes(folder), tamper=tamper)


def test_sizes_stay_what_they_were_at_registration(folder, caplog):
    """A node that returns with more samples keeps its registered weight."""
    path = write_experiment(folder, training={"rounds": 4, **QUICK}, flower={"timeout": 0.3})
    described = []

    def tamper(node, message, reply):
        if message.metadata.message_type == "query.describe" and number_of(node) == 1:
            described.append(message)
            if len(described) > 1:
                return malformed.answering(malformed.sized(train=10**9))(message, reply)
        return reply

    class Returning(LoopGrid):
        def push_messages(self, messages):
            pushed = super().push_messages(messages)
            if self.kinds.count("train") >= 4 and FIRST_NODE + 7 in self.nodes:
                self.nodes[FIRST_NODE + 500] = self.nodes.pop(FIRST_NODE + 7)
            return pushed

    with caplog.at_level("WARNING", logger="flwr.equipoise"):
        run = serve(
            Returning(client_app(path), own_nodes(folder), tamper=tamper), load_experiment(path)
        )
    assert len(described) == 2
    assert run.trainer.engine.roster.known[1].sizes["train"] < 100
    assert list(run.trainer.rounds)[-1]["cohort"] == 4
    assert "client 1 now has other sizes; its registered sizes are kept" in caplog.text


# ---- strangers that do not answer what everyone is asked -----------------------------------------


def speechless(client):
    """Make a client answer all evaluations for the method with a list."""
    lie = malformed.answering(malformed.in_numbers(REPORTS, loss=[1.0]))

    def tamper(node, message, reply):
        hit = message.metadata.message_type == "evaluate" and number_of(node) == client
        return lie(message, reply) if hit else reply

    return tamper


def test_a_client_that_does_not_answer_before_round_1_waits_and_the_others_train(folder):
    path = write_experiment(folder, method="gifair", training={"rounds": 3, **QUICK})
    run, _ = run_on_loop(path, own_nodes(folder), folder / "out", tamper=speechless(1))
    rows = list(run.trainer.rounds)
    assert [row["cohort"] for row in rows] == [3, 3, 3]
    assert rows[0]["left_out"] == {"1": "answered with a list as train loss"}
    assert run.trainer.state.server["clients"]["ids"].tolist() == [0, 2, 3]
    without, _ = run_on_loop(
        write_experiment(
            folder, method="gifair", training={"rounds": 3, **QUICK}, flower={"clients": 3}
        ),
        own_nodes(folder, [0, 2, 3]),
    )
    for name, tensor in run.trainer.state.model.items():
        assert torch.equal(tensor, without.trainer.state.model[name])


def test_a_client_that_waits_is_asked_again_and_takes_part_then(folder):
    path = write_experiment(
        folder, method="gifair", training={"rounds": 12, **QUICK}, evaluation={"every": 0}
    )
    silent, finished = speechless(1), set()

    def until_round_6(node, message, reply):
        if message.metadata.message_type == "train":
            finished.add(settings_of(message.content)["round"])
        return reply if 5 in finished else silent(node, message, reply)

    run, _ = run_on_loop(path, own_nodes(folder), folder / "out", tamper=until_round_6)
    assert [row["cohort"] for row in run.trainer.rounds] == [3] * 10 + [4] * 2
    assert "waiting" not in run.trainer.state.server


def test_who_waits_still_waits_after_a_resume(folder):
    path = write_experiment(folder, method="gifair", training={"rounds": 4, **QUICK})
    whole, _ = run_on_loop(path, own_nodes(folder), folder / "whole", tamper=speechless(1))

    class Killed(BaseException):
        pass

    silent = speechless(1)

    def tamper(node, message, reply):
        if message.metadata.message_type == "train" and settings_of(message.content)["round"] == 2:
            raise Killed
        return silent(node, message, reply)

    with pytest.raises(Killed):
        run_on_loop(path, own_nodes(folder), folder / "out", tamper=tamper)
    resumed, _ = run_on_loop(path, own_nodes(folder), folder / "out", tamper=silent)
    assert [row["cohort"] for row in resumed.trainer.rounds] == [3, 3, 3, 3]
    for name, tensor in whole.trainer.state.model.items():
        assert torch.equal(tensor, resumed.trainer.state.model[name])


# SCAFFOLD counts registered clients, and AFL has a weight for each of them.
@pytest.mark.parametrize(
    ("name", "same"), [("gifair", True), ("afl", False), ("scaffold", False), ("fedavg", True)]
)
def test_a_stranger_that_joins_and_answers_nothing_right_harms_nobody(name, same, folder):
    path = write_experiment(
        folder,
        method=name,
        training={"rounds": 4, **QUICK},
        flower={"clients": 3, "min_clients": 3},
    )

    def tamper(node, message, reply):
        if number_of(node) == 3 and message.metadata.message_type != "query.describe":
            reply.content["reports"] = MetricRecord({"loss": [1.0], "round": 7.0})
            reply.content["update"] = MetricRecord()
        return reply

    grid = Joining(
        client_app(path),
        own_nodes(folder, range(3)),
        tamper=tamper,
        strangers=own_nodes(folder, [3]),
        after=3,
    )
    run = serve(grid, load_experiment(path))
    assert [row["cohort"] for row in run.trainer.rounds] == [3, 3, 3, 3]
    assert {client for row in run.trainer.rounds for client in row.get("left_out", {})} == {"3"}
    alone, _ = run_on_loop(path, own_nodes(folder, range(3)))
    if same:
        assert all(
            torch.equal(t, alone.trainer.state.model[n]) for n, t in run.trainer.state.model.items()
        )


# ---- messages that Flower cannot put together ----------------------------------------------------


GARBLED = r"sent a message that cannot be read: Unexpected set of `children`.\x1b[2J"


def test_a_message_that_flower_cannot_read_is_left_out_by_name(folder):
    path = write_experiment(folder, training={"rounds": 2, **QUICK})

    class Garbled(LoopGrid):
        """Raises, like Flower, if the answer of client 1 in round 1 is among the requested."""

        def pull_messages(self, message_ids):
            for id_ in message_ids:
                reply = self.replies.get(id_)
                if reply is not None and reply.metadata.message_type == "train" and garbled(reply):
                    raise ValueError("Unexpected set of `children`.\x1b[2J")
            return super().pull_messages(message_ids)

    def garbled(reply):
        note = settings_of(reply.content, "note")
        return (note["client"], note["round"]) == (1, 0)

    run = serve(Garbled(client_app(path), own_nodes(folder)), load_experiment(path))
    assert [row.get("left_out") for row in run.trainer.rounds] == [{"1": GARBLED}, None]


# ---- names, ranges, weights ----------------------------------------------------------------------


def test_a_task_cannot_measure_a_column_or_an_empty_range():
    def task(**members):
        return type(
            "Own",
            (Task,),
            {"loss": lambda self, output, y: output, "metrics": lambda *a: {}, **members},
        )

    for members in ({"score": "round"}, {"ranges": {"unseen": (0.0, 1.0)}}):
        with pytest.raises(
            InputError, match="has a metric called '(round|unseen)', which is another column"
        ):
            tasks.register("own_for_schema")(task(**members))
    with pytest.raises(InputError, match=r"has the range \(1.0, 0.0\) for 'f1'"):
        tasks.register("own_for_schema")(task(ranges={"f1": (1.0, 0.0)}))


def test_a_client_that_claims_a_billion_samples_has_the_largest_share_and_no_more(folder):
    lie = malformed.answering(malformed.sized(train=10**9))

    def tamper(node, message, reply):
        return (
            lie(message, reply)
            if message.metadata.message_type == "query.describe" and number_of(node) == 2
            else reply
        )

    priors = {}
    for share in (None, 0.4):
        flower = {} if share is None else {"max_share": share}
        path = write_experiment(folder, training={"rounds": 1, **QUICK}, flower=flower)
        run, _ = run_on_loop(path, own_nodes(folder), folder / f"out{share}", tamper=tamper)
        engine = run.trainer.engine
        priors[share] = engine.cohort(run.trainer.method, engine.roster.seen, 1).prior
    assert float(priors[None][2]) > 0.999
    assert float(priors[0.4][2]) == pytest.approx(0.4)
    others = [0, 1, 3]
    sizes = np.array([engine.roster.known[client].sizes["train"] for client in others])
    assert priors[0.4][others].tolist() == pytest.approx((0.6 * sizes / sizes.sum()).tolist())
    # The bound changes the result, so a run can be resumed only with the same one.
    other = write_experiment(folder, training={"rounds": 1, **QUICK}, flower={"max_share": 0.5})
    with pytest.raises(InputError, match="flower.max_share is 0.4 there and 0.5 here"):
        run_on_loop(other, own_nodes(folder), folder / "out0.4")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"max_share": 0}, "flower.max_share must be a finite number above 0, got 0"),
        ({"max_share": 1.5}, "flower.max_share must be at most 1, got 1.5"),
        ({"max_loss": math.inf}, "flower.max_loss must be a finite number above 0"),
        ({"max_answer": -1}, "flower.max_answer must be a finite number above 0"),
        ({"max_client": 1.5}, "flower.max_client must be a whole number of at least 0"),
    ],
)
def test_bounds_are_checked(setting, says):
    with pytest.raises(InputError, match=says):
        FlowerSettings(**setting)


def test_numbers_of_clients_that_are_held_out_are_checked_too(folder):
    """An unseen client can falsify results of unseen clients only within the metric's range."""
    path = write_experiment(folder, training={"rounds": 2, **QUICK})
    nodes = own_nodes(folder)
    nodes[2]["unseen"] = True

    def wrong(message, reply):
        numbers = {**reply.content.metric_records["global.test"], "accuracy": 2.0}
        reply.content["global.test"] = MetricRecord(numbers)
        return reply

    run, _ = run_on_loop(path, nodes, tamper=misbehaving(2, "evaluate.models", 2, wrong))
    assert "2" in list(run.trainer.rounds)[-1]["not_evaluated"]
    assert "unseen" not in run.summary["results"]["global"]
