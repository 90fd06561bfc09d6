"""Random messages and registrations: each is read completely or refused in one line.

The examples are the same in every run.
"""

from __future__ import annotations

import copy
import json
import math
import time
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise import tasks
from equipoise.data import load
from equipoise.errors import InputError
from equipoise.federation import SPLITS
from equipoise.flower.checks import Misfit
from equipoise.flower.registration import read_registration
from equipoise.flower.reports import Declared
from equipoise.flower.roster import Description, Roster
from equipoise.flower.schema import ANSWER, NOTE, REPORTS, UPDATE, Schema
from equipoise.flower.settings import LARGEST_REPORT, FlowerSettings
from equipoise.flower.wire import pack, to_record, unpack
from tests.flower import malformed
from tests.flower.loop import own_nodes, run_on_loop, through_bytes, write_experiment, write_silos

QUICK, LONG = (
    settings(
        max_examples=count,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    for count in (100, 2_000)
)
SECONDS = 10
BYTES = 100e6

EXPECTED = {"features.weight": torch.zeros(3, 2), "head.bias": torch.zeros(4, dtype=torch.float64)}
SIZES = {"train": 9, "val": 0, "test": 3}
DECLARED = Declared(tasks.build("classification"))
TRAINING = Schema(
    client=1,
    round=2,
    trees={UPDATE: EXPECTED},
    open_trees=("upload.h",),
    numbers={
        REPORTS: DECLARED.of_training(["loss_before", "lr"], SIZES),
        **DECLARED.of_model("local", SIZES),
    },
    largest=1e6,
)
QUESTION = Schema(client=1, round=2, open_trees=(ANSWER,), question=True, largest=1e6)


def honest():
    """Return a valid answer to a training message."""
    return RecordDict(
        {
            UPDATE: to_record({name: torch.ones_like(tensor) for name, tensor in EXPECTED.items()}),
            "upload.h": to_record({"h": torch.ones(2, 3)}),
            REPORTS: MetricRecord({"train_loss": 0.5, "steps": 3.0, "loss_before": 0.7, "lr": 0.1}),
            "local.val": MetricRecord({"loss": math.nan}),
            "local.test": MetricRecord({"loss": 0.5, "accuracy": 0.25}),
            NOTE: ConfigRecord({"client": 1, "round": 2}),
        }
    )


NAMES = st.one_of(
    st.sampled_from([
        *EXPECTED, "h", "0", "train_loss", "steps", "lr", "loss", "accuracy", "client", "round",
        "lacks", "text",
    ]),
    st.text(max_size=8),
)  # fmt: skip
RECORDS = st.one_of(
    st.sampled_from([UPDATE, "upload.h", REPORTS, "local.val", "local.test", NOTE, ANSWER, "form"]),
    st.text(max_size=8),
)
WHOLE = st.one_of(
    st.integers(-3, 5), st.sampled_from([-(2**63), 2**63 - 1, 2**63, 2**64 - 1, 10**12])
)
FLOATS = st.floats(width=64)
TYPES = st.one_of(
    st.sampled_from([
        "float64", "float32", "int64", "bool", "bfloat16", "complex64", "float128", "object",
        "<U3", "V8", "f4,f4",
    ]),
    st.text(max_size=5),
)  # fmt: skip
SHAPES = st.lists(
    st.one_of(st.integers(-1, 4), st.sampled_from([10**9, 2**63, 2**80])), max_size=4
).map(tuple)
PLAIN = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def written(draw):
    """Return an array as NumPy writes it, some bytes of which may be changed."""
    dtype = draw(
        st.sampled_from(["f8", "f4", ">f8", "i8", "u2", "?", "c8", "f2", "S2", "U2", "M8[s]", "V4"])
    )
    values = np.zeros(draw(PLAIN), dtype)
    data = bytearray(malformed.saved(values).data)
    for place in draw(st.lists(st.integers(0, len(data) - 1), max_size=3)):
        data[place] = draw(st.integers(0, 255))
    cut = draw(st.one_of(st.none(), st.integers(0, len(data))))
    dtype = draw(st.one_of(st.just(str(values.dtype)), TYPES))
    shape = draw(st.one_of(st.just(values.shape), SHAPES))
    return Array(dtype, shape, "numpy.ndarray", bytes(data[:cut]))


ARRAYS = st.one_of(
    written(),
    st.builds(
        Array,
        TYPES,
        SHAPES,
        st.sampled_from(["numpy.ndarray", "torch", ""]),
        st.binary(max_size=200),
    ),
    st.sampled_from(list(malformed.ARRAYS)).map(lambda name: malformed.ARRAYS[name](np.zeros(4))),
)


def record_of(kind, keys, values):
    return st.dictionaries(keys, values, max_size=4).map(kind)


NUMBERS = st.one_of(FLOATS, WHOLE.filter(lambda n: n >= -(2**63)), st.lists(FLOATS, max_size=3))
METRICS = record_of(MetricRecord, NAMES, NUMBERS)
SHORT_TEXTS = st.lists(st.text(max_size=3), max_size=3)
CONFIGS = record_of(
    ConfigRecord,
    NAMES,
    st.one_of(WHOLE, FLOATS, st.booleans(), st.text(max_size=20), SHORT_TEXTS),
)
ANY_RECORD = st.one_of(METRICS, CONFIGS, record_of(ArrayRecord, NAMES, ARRAYS))
MADE_UP = st.dictionaries(RECORDS, ANY_RECORD, max_size=5).map(RecordDict)


@st.composite
def spoiled(draw):
    """Change up to three places of a valid answer."""
    content = honest()
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(content)))
        what = draw(st.sampled_from(["value", "record", "more", "less"]))
        record = content[name]
        if what == "record":
            del content[name]
            content[name] = draw(ANY_RECORD)
        elif what == "more":
            content[draw(RECORDS.filter(lambda other: other not in content))] = draw(ANY_RECORD)
        elif what == "less" and record:
            changed = dict(record)
            changed.pop(draw(st.sampled_from(sorted(changed))))
            content[name] = type(record)(changed)
        elif record:
            changed = dict(record)
            kinds = {
                ArrayRecord: ARRAYS,
                MetricRecord: st.one_of(FLOATS, st.lists(FLOATS, max_size=2)),
                ConfigRecord: WHOLE,
            }
            changed[draw(st.sampled_from(sorted(changed)))] = draw(kinds[type(record)])
            content[name] = type(record)(changed)
        if not content:
            break
    return content


def as_sent(content):
    """Send an answer as bytes. What Flower cannot write, no client can send."""
    try:
        return through_bytes(Message(content, 1, "train"))[0].content
    except (UnicodeEncodeError, ValueError, TypeError, OverflowError):
        return None


def assert_readable(reason):
    assert reason.isprintable()
    assert 10 < len(reason) < 400


def read(schema, content):
    """Read an answer with limits of time and memory; ``None`` if it is refused."""
    began = time.monotonic()
    tracemalloc.start()
    try:
        answer = schema.read(content)
    except Misfit as error:
        assert_readable(str(error))
        answer = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert time.monotonic() - began < SECONDS
    assert peak < BYTES
    return answer


def check_training(content):
    arrived = as_sent(content)
    answer = None if arrived is None else read(TRAINING, arrived)
    if answer is None:
        return
    tree = answer.trees[UPDATE]
    assert {n: (t.shape, t.dtype) for n, t in tree.items()} == {
        n: (t.shape, t.dtype) for n, t in EXPECTED.items()
    }
    for tensor in (*tree.values(), *answer.trees["upload.h"].values()):
        assert bool(torch.isfinite(tensor).all())
    assert set(answer.content) == {UPDATE, "upload.h", REPORTS, "local.val", "local.test", NOTE}
    numbers = answer.numbers
    assert set(numbers[REPORTS]) == {"train_loss", "steps", "loss_before", "lr"}
    assert all(abs(value) <= LARGEST_REPORT for value in numbers[REPORTS].values())
    assert 0 <= numbers["local.test"]["accuracy"] <= 1
    assert set(numbers["local.test"]) == {"loss", "accuracy"}


@given(st.one_of(MADE_UP, spoiled()))
@QUICK
def test_any_answer_is_read_or_refused(content):
    check_training(content)


@pytest.mark.slow
@given(st.one_of(MADE_UP, spoiled()))
@LONG
def test_any_of_many_answers_is_read_or_refused(content):
    check_training(content)


def test_the_honest_answer_is_read():
    answer = TRAINING.read(as_sent(honest()))
    assert answer.numbers[REPORTS] == {
        "train_loss": 0.5,
        "steps": 3.0,
        "loss_before": 0.7,
        "lr": 0.1,
    }
    assert math.isnan(answer.numbers["local.val"]["loss"])


# ---- questions -----------------------------------------------------------------------------------

ITEMS = st.recursive(
    st.one_of(
        st.builds(lambda name: {"tensor": name}, st.sampled_from(["0", "1", "2", 0, None])),
        st.builds(
            lambda value: {"value": value},
            st.one_of(st.none(), st.integers(), st.text(max_size=3)),
        ),
        st.integers(),
        st.none(),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"list": items}, st.lists(inner, max_size=3)),
        st.builds(lambda items: {"tuple": items}, st.lists(inner, max_size=3)),
        st.builds(
            lambda pairs: {"mapping": pairs},
            st.lists(st.tuples(st.one_of(st.text(max_size=2), inner), inner), max_size=3),
        ),
        st.lists(inner, max_size=2),
    ),
    max_leaves=6,
)  # fmt: skip
TREES = st.recursive(
    st.integers(1, 3).map(lambda size: torch.ones(1, size)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=5,
)
# Half of the forms are valid, but do not match the arrays that come with them.
FORMS = st.one_of(
    ITEMS.map(json.dumps), st.text(max_size=30), TREES.map(lambda tree: pack(tree)[0])
)


def check_question(form, tree, spoil):
    text, tensors = pack(tree)
    record = to_record(tensors)
    for name, array in zip(list(record), spoil, strict=False):
        record[name] = array
    content = RecordDict(
        {
            ANSWER: record,
            "form": ConfigRecord({"text": text if form is None else form}),
            NOTE: ConfigRecord({"client": 1, "round": 2}),
        }
    )
    arrived = as_sent(content)
    answer = None if arrived is None else read(QUESTION, arrived)
    if answer is None:
        assert form is not None or spoil
        return
    assert all(
        tensor.shape[0] == 1 and bool(torch.isfinite(tensor).all())
        for tensor in answer.trees[ANSWER].values()
    )
    unpack(answer.form, answer.trees[ANSWER])


QUESTIONS = (st.one_of(st.none(), FORMS), TREES, st.lists(ARRAYS, max_size=2))


@given(*QUESTIONS)
@QUICK
def test_any_answer_to_a_question_is_read_or_refused(form, tree, spoil):
    check_question(form, tree, spoil)


@pytest.mark.slow
@given(*QUESTIONS)
@LONG
def test_any_of_many_answers_to_a_question_is_read_or_refused(form, tree, spoil):
    check_question(form, tree, spoil)


# ---- registrations -------------------------------------------------------------------------------

DIGITS = [Description.of(load("digits"), client) for client in range(3)]
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), WHOLE, FLOATS, st.text(max_size=10)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted(json.loads(DIGITS[0].text()))
CHANGES = st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=5)), JSON, max_size=3)
COUNTS = st.dictionaries(st.sampled_from([*SPLITS, "more"]), st.one_of(WHOLE, FLOATS), max_size=4)
PLAUSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "client": st.one_of(st.integers(0, 9), WHOLE),
        "group": st.sampled_from(["plain", "rotated", "nobody's"]),
        "unseen": st.booleans(),
        "sizes": st.fixed_dictionaries({split: st.integers(0, 9) for split in SPLITS}),
        "outputs": st.integers(9, 10),
        "name": st.text(max_size=5),
    },
)
TEXTS = st.one_of(
    st.builds(lambda changes: json.dumps(json.loads(DIGITS[2].text()) | changes), PLAUSIBLE),
    st.builds(lambda changes: json.dumps(json.loads(DIGITS[2].text()) | changes), CHANGES),
    st.builds(lambda sizes: json.dumps(json.loads(DIGITS[2].text()) | {"sizes": sizes}), COUNTS),
    JSON.map(json.dumps),
    st.text(max_size=50),
)


def check_registration(text):
    roster = Roster("digits", {said.client: said for said in DIGITS[:2]})
    before = copy.deepcopy(roster.known)
    arrived = as_sent(RecordDict({"about": ConfigRecord({"text": text})}))
    if arrived is None:
        return
    try:
        said = read_registration(arrived, FlowerSettings())
    except Misfit as error:
        assert_readable(str(error))
        return
    assert 0 <= said.client < 10_000
    assert all(type(size) is int and 0 <= size <= 10**12 for size in said.sizes.values())
    try:
        roster.admit([said])
    except InputError:
        assert roster.known == before
    assert roster.clients <= 10_000
    assert (
        len(roster.groups)
        == len(roster.unseen)
        == len(roster.split("train").sizes)
        == roster.clients
    )


@given(TEXTS)
@QUICK
def test_any_registration_is_read_or_refused(text):
    check_registration(text)


@pytest.mark.slow
@given(TEXTS)
@LONG
def test_any_of_many_registrations_is_read_or_refused(text):
    check_registration(text)


def test_the_honest_registration_is_read():
    content = RecordDict({"about": ConfigRecord({"text": DIGITS[2].text()})})
    assert read_registration(as_sent(content), FlowerSettings()) == DIGITS[2]


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    write_silos(folder / "silos")
    return folder


def check_run(folder, data, method, rounds):
    """Make client 1 answer randomly in every round: the run finishes with the other three."""

    def tamper(node, message, reply):
        if (
            node["data"].endswith("1")
            and message.metadata.message_type != "query.describe"
            and not reply.has_error()
        ):
            for name in sorted(reply.content):
                if data.draw(st.booleans()):
                    del reply.content[name]
                    reply.content[name] = data.draw(
                        ANY_RECORD.filter(lambda r: as_sent(RecordDict({"a": r})) is not None)
                    )
        return reply

    path = write_experiment(
        folder, method=method, training={"rounds": rounds, "batch_size": 64}, flower={"timeout": 5}
    )
    run, _ = run_on_loop(path, own_nodes(folder), tamper=tamper)
    assert run.summary["rounds"] == rounds
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.trainer.state.model.values())
    assert {client for row in run.trainer.rounds for client in row.get("left_out", {})} <= {"1"}


METHODS = st.sampled_from(
    ["fedavg", "scaffold", "gifair", "afl", "qffl", "fediir", "harmofl", "ditto"]
)


@given(st.data(), METHODS)
@settings(QUICK, max_examples=4)
def test_a_run_with_a_client_that_answers_anything_finishes(folder, data, method):
    check_run(folder, data, method, rounds=2)


@pytest.mark.slow
@given(st.data(), METHODS)
@settings(LONG, max_examples=30)
def test_many_runs_with_a_client_that_answers_anything_finish(folder, data, method):
    check_run(folder, data, method, rounds=3)
