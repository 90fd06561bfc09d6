"""Malformed answers and registrations by name: a catalogue for tests."""

from __future__ import annotations

import json
from io import BytesIO

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from numpy.lib import format as npy

from equipoise.flower.wire import from_record, to_record

NUMPY = "numpy.ndarray"


def header(text, version=(1, 0), length=None):
    """Write the header of an .npy file, valid or not."""
    body = text.encode("latin1")
    width = 2 if version == (1, 0) else 4
    count = len(body) if length is None else length
    return b"\x93NUMPY" + bytes(version) + count.to_bytes(width, "little") + body


def plain_header(values):
    """Write the header that NumPy writes for an array."""
    file = BytesIO()
    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(values))
    return file.getvalue()


def saved(values, **declared):
    """Create an array like Flower, with a false declaration."""
    file = BytesIO()
    np.save(file, values, allow_pickle=False)
    return Array(
        declared.get("dtype", str(values.dtype)),
        declared.get("shape", tuple(values.shape)),
        declared.get("stype", NUMPY),
        declared.get("data", file.getvalue()),
    )


def raw(data, like, dtype=None, shape=None):
    """Create an array with arbitrary bytes and the expected declaration."""
    return Array(
        dtype or str(like.dtype), tuple(like.shape) if shape is None else shape, NUMPY, data
    )


def described(descr, shape, order=False, more=""):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}\n"


def _filled(like, value):
    made = np.array(like)
    made.reshape(-1)[-1:] = value
    return saved(made)


# Replacements of one array; `like` is the valid one.
ARRAYS = {
    "text": lambda like: saved(np.full(like.shape, "a")),
    "text, declared as numbers": lambda like: saved(
        np.full(like.shape, "a"), dtype=str(like.dtype)),
    "bytes": lambda like: saved(np.full(like.shape, b"a")),
    "void": lambda like: saved(np.zeros(like.shape, "V8")),
    "void, declared as numbers": lambda like: saved(
        np.zeros(like.shape, "V8"), dtype=str(like.dtype)),
    "struct": lambda like: saved(np.zeros(like.shape, [("a", "f4"), ("b", "f4")])),
    "longdouble": lambda like: saved(like.astype(np.longdouble)),
    "longdouble, declared as numbers": lambda like: saved(
        like.astype(np.longdouble), dtype=str(like.dtype)),
    "complex": lambda like: saved(like.astype(complex)),
    "datetime": lambda like: saved(like.astype("M8[s]")),
    "time span": lambda like: saved(like.astype("m8[s]")),
    "half precision": lambda like: saved(like.astype(np.float16)),
    "unsigned": lambda like: saved(like.astype(np.uint32)),
    "truth values": lambda like: saved(like.astype(bool)),
    "other byte order": lambda like: saved(like.astype(">f8")),
    "objects": lambda like: raw(header(described("'|O'", like.shape)) + bytes(like.nbytes), like),
    "declared as bfloat16": lambda like: saved(like, dtype="bfloat16"),
    "declared as float8": lambda like: saved(like, dtype="float8_e5m2"),
    "declared as nonsense": lambda like: saved(like, dtype="nonsense"),
    "declared as nothing": lambda like: saved(like, dtype=""),
    "declared as struct": lambda like: saved(like, dtype="f4,f4"),
    "a megabyte as type": lambda like: saved(like, dtype="f" * 1_000_000),
    "flat": lambda like: saved(np.zeros(like.size + 1)),
    "without axes": lambda like: saved(np.float64(1).reshape(())),
    "empty": lambda like: saved(np.zeros(0)),
    "one axis more": lambda like: saved(like[None]),
    "thirty axes": lambda like: saved(like.reshape((1,) * 20 + like.shape)),
    "declared smaller": lambda like: saved(like, shape=(1,)),
    "declared larger": lambda like: saved(like, shape=(10**12,)),
    "declared beyond all": lambda like: saved(like, shape=(2**80,)),
    "declared negative": lambda like: saved(like, shape=(-1,)),
    "declared without axes": lambda like: saved(like, shape=()),
    "real shape larger": lambda like: raw(saved(np.zeros((3, *like.shape))).data, like),
    "real shape smaller": lambda like: raw(saved(like.reshape(-1)[:1]).data, like),
    "real shape negative": lambda like: raw(
        header(described("'<f8'", "(-1,)")) + like.tobytes(), like),
    "real shape huge": lambda like: raw(header(described("'<f8'", "(1000000000000,)")), like),
    "real shape beyond all": lambda like: raw(header(described("'<f8'", f"({2**80},)")), like),
    "real shape a text": lambda like: raw(
        header(described("'<f8'", "'ten'")) + like.tobytes(), like),
    "torch": lambda like: saved(like, stype="torch.Tensor"),
    "no way of writing": lambda like: saved(like, stype=""),
    "pickle": lambda like: saved(like, stype="pickle", data=b"\x80\x04cos\nsystem\n."),
    "nothing": lambda like: raw(b"", like),
    "garbage": lambda like: raw(b"garbage " * 10, like),
    "a zip file": lambda like: raw(b"PK\x03\x04" + bytes(100), like),
    "magic alone": lambda like: raw(b"\x93NUMPY\x01\x00", like),
    "cut off": lambda like: raw(saved(like).data[:-3], like),
    "longer": lambda like: raw(saved(like).data + b"more", like),
    "a megabyte longer": lambda like: raw(saved(like).data + bytes(1_000_000), like),
    "version 2": lambda like: raw(
        header(described("'<f8'", like.shape), (2, 0)) + like.tobytes(), like),
    "version 3": lambda like: raw(
        header(described("'<f8'", like.shape), (3, 0)) + like.tobytes(), like),
    "version 9": lambda like: raw(
        header(described("'<f8'", like.shape), (9, 9)) + like.tobytes(), like),
    "header beyond the end": lambda like: raw(header("{", length=60_000), like),
    "header of 60 kB": lambda like: raw(
        header(described("'<f8'", like.shape) + " " * 60_000) + like.tobytes(), like),
    "header of 10 MB": lambda like: raw(header(" " * 10_000_000, (2, 0)) + like.tobytes(), like),
    "header of brackets": lambda like: raw(header("(" * 9_000) + like.tobytes(), like),
    "header of minus signs": lambda like: raw(header("-" * 9_000 + "1") + like.tobytes(), like),
    "header of code": lambda like: raw(
        header("__import__('os').getcwd()\n") + like.tobytes(), like),
    "header of a list": lambda like: raw(header("[1, 2]\n") + like.tobytes(), like),
    "header with more keys": lambda like: raw(
        header(described("'<f8'", like.shape, more="'more': 1")) + like.tobytes(), like
    ),
    "header of Python 2": lambda like: raw(
        header(described("'<f8'", f"({like.size}L,)")) + like.tobytes(), like
    ),
    "header with zero bytes": lambda like: raw(header("\0" * 100) + like.tobytes(), like),
    "NaN": lambda like: _filled(like, np.nan),
    "minus infinity": lambda like: _filled(like, -np.inf),
    "1e300": lambda like: _filled(like, 1e300),
}  # fmt: skip


def in_array(record, name, change):
    """Replace one array of an answer."""

    def wrong(content):
        like = from_record(content.array_records[record])[name].numpy()
        arrays = dict(content.array_records[record])
        arrays[name] = change(like)
        content[record] = ArrayRecord(arrays)

    return wrong


def in_arrays(record, change):
    """Change the names of the arrays of an answer."""

    def wrong(content):
        arrays = dict(content.array_records[record])
        change(arrays)
        content[record] = ArrayRecord(arrays)

    return wrong


def _more(count, name="more"):
    one = next(iter(to_record({"w": _tensor()}).values()))
    return lambda arrays: arrays.update({f"{name} {n}": one for n in range(count)})


def _tensor():
    import torch

    return torch.zeros(1, dtype=torch.float64)


NAMES = {
    "one array more": _more(1),
    "a thousand arrays more": _more(1_000),
    "a megabyte as name": _more(1, "x" * 1_000_000),
    "an escape sequence as name": _more(1, "\x1b[2J\n\x1b]0;title\x07"),
    "half a character as name": _more(1, "\ud800"),
    "one array less": lambda arrays: arrays.popitem(),
    "no arrays": lambda arrays: arrays.clear(),
}


def in_numbers(record, **values):
    """Report other numbers; ``None`` leaves one out."""

    def wrong(content):
        numbers = dict(content.metric_records[record]) | values
        content[record] = MetricRecord(
            {name: value for name, value in numbers.items() if value is not None}
        )

    return wrong


# Replacements of one reported number that is required and must be finite.
NUMBERS = {
    "a list": [0.5],
    "an empty list": [],
    "a long list": [0.5] * 100_000,
    "nothing": None,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "1e30": 1e30,
    "-1e30": -1e30,
}

# Names that were not requested. The answer is used without them.
UNDECLARED = {
    "one more": {"more": 0.5},
    "a list more": {"more": [1, 2]},
    "columns": {
        "round": 99.0, "unseen": 1.0, "split": 1.0, "client": 3.0,
        "group": 2.0, "n": 1e9, "model": 1.0, "gap": 0.0,
    },
    "a thousand more": {f"more {n}": 1.0 for n in range(1_000)},
    "a megabyte": {"x" * 1_000_000: 1.0},
    "an escape sequence": {"\x1b[2J\n": 1.0},
}  # fmt: skip


def in_note(**values):
    """Answer with another client or round in the note."""

    def wrong(content):
        note = dict(content.config_records["note"]) | values
        content["note"] = ConfigRecord(
            {name: value for name, value in note.items() if value is not None}
        )

    return wrong


NOTES = {
    "client as text": {"client": "1"},
    "client as fraction": {"client": 1.5},
    "client as truth value": {"client": True},
    "client as list": {"client": [1]},
    "client as whole fraction": {"client": 1.0},
    "client left out": {"client": None},
    "another client": {"client": 7},
    "a huge client": {"client": 10**12},
    "a megabyte as client": {"client": "\x1b" * 1_000_000},
    "round as text": {"round": "0"},
    "round as list": {"round": [0]},
    "round left out": {"round": None},
    "round of the future": {"round": 10**15},
    "lacks what it was sent": {"lacks": "model"},
    "lacks a list": {"lacks": ["a", "b"]},
    "lacks a megabyte": {"lacks": "x" * 1_000_000},
}


def without(record):
    """Leave out a record of an answer."""
    return lambda content: content.pop(record)


def as_another(record, other):
    """Answer with a record of another type."""

    def wrong(content):
        del content[record]
        content[record] = other

    return wrong


def empty(content):
    content.clear()


def answer_kinds(record):
    """Return records of other types that may replace one."""
    return {
        f"{record} as settings": as_another(record, ConfigRecord({"a": "b"})),
        f"{record} as numbers": as_another(record, MetricRecord({"a": [1.0]})),
        f"{record} as arrays": as_another(record, ArrayRecord({"a": saved(np.zeros(3))})),
        f"{record} left out": without(record),
    }


def wrong_arrays(record, name):
    """Return all malformed versions of a record of arrays."""
    changed = {
        f"{record}: {what}": in_array(record, name, change) for what, change in ARRAYS.items()
    }
    named = {f"{record}: {what}": in_arrays(record, change) for what, change in NAMES.items()}
    kinds = {
        what: wrong
        for what, wrong in answer_kinds(record).items()
        if not what.endswith("as arrays")
    }
    return {**changed, **named, **kinds}


def wrong_numbers(record, name):
    """Return all malformed versions of a required number."""
    changed = {
        f"{name} as {what}": in_numbers(record, **{name: value}) for what, value in NUMBERS.items()
    }
    kinds = {
        what: wrong
        for what, wrong in answer_kinds(record).items()
        if not what.endswith("as numbers")
    }
    return {**changed, **kinds}


def wrong_notes():
    """Return all malformed versions of the note of an answer."""
    changed = {what: in_note(**values) for what, values in NOTES.items()}
    kinds = {
        what: wrong
        for what, wrong in answer_kinds("note").items()
        if not what.endswith("as settings")
    }
    return {**changed, **kinds, "nothing at all": empty}


def form(text):
    """Answer a question in another form."""

    def wrong(content):
        content["form"] = ConfigRecord({"text": text})

    return wrong


FORMS = {
    "no form": form(""),
    "a form that is no JSON": form("{"),
    "a form that is no mapping": form("[1]"),
    "a form of a number": form("7"),
    "a form with an unknown tensor": form('{"tensor": "99"}'),
    "a form with a list as tensor": form('{"tensor": ["0"]}'),
    "a form with a number as tensor": form(
        '{"tuple": [{"mapping": [["head.weight", {"tensor": 0}]]}]}'
    ),
    "a form without tensors": form('{"value": 7}'),
    "a form of two kinds": form('{"list": [], "tuple": []}'),
    "a form of an unknown kind": form('{"module": "os"}'),
    "a form with a list as key": form('{"mapping": [[["a"], {"tensor": "0"}]]}'),
    "a form with one pair too short": form('{"mapping": [["a"]]}'),
    "a form of brackets": form("[" * 100_000),
    "a deep form": form('{"list": [' * 5_000 + "]}" * 5_000),
    "a form of a megabyte": form(json.dumps({"value": "x" * 1_000_000})),
    "a form of NaN": form('{"value": NaN}'),
    "a form of digits": form('{"value": ' + "9" * 5_000 + "}"),
    "a form as list": as_another("form", ConfigRecord({"text": ["a"]})),
    "a form without text": as_another("form", ConfigRecord({"other": "a"})),
    "a form as numbers": as_another("form", MetricRecord({"text": 1.0})),
    "form left out": without("form"),
}


def answering(wrong):
    """Create a fault of :mod:`tests.flower.loop` from a change of an answer's content."""

    def fault(message, reply):
        wrong(reply.content)
        return reply

    return fault


def registered(**values):
    """Register with other values; ``...`` leaves one out."""

    def wrong(content):
        said = json.loads(content.config_records["about"]["text"]) | values
        text = json.dumps({name: value for name, value in said.items() if value is not ...})
        content["about"] = ConfigRecord({"text": text})

    return wrong


def text(value):
    """Register with another text."""

    def wrong(content):
        content["about"] = ConfigRecord({"text": value})

    return wrong


def sized(**values):
    return registered(sizes={"train": 10, "val": 2, "test": 3} | values)


REGISTRATIONS = {
    "client as text": registered(client="3"),
    "client as fraction": registered(client=1.5),
    "client as null": registered(client=None),
    "client left out": registered(client=...),
    "client as list": registered(client=[3]),
    "client as truth value": registered(client=True),
    "client below 0": registered(client=-1),
    "client 10**12": registered(client=10**12),
    "client 10**30": registered(client=10**30),
    "client NaN": registered(client=float("nan")),
    "size NaN": sized(train=float("nan")),
    "size infinite": sized(train=float("inf")),
    "size 2**63": sized(train=2**63),
    "size negative": sized(train=-5),
    "size zero": sized(train=0),
    "size fractional": sized(train=2.5),
    "size as text": sized(train="10"),
    "size as null": sized(val=None),
    "size as truth value": sized(test=True),
    "test size 2**63": sized(test=2**63),
    "sizes of other splits": registered(sizes={"a": 1}),
    "sizes of more splits": sized(more=1),
    "sizes as list": registered(sizes=[10, 2, 3]),
    "sizes as null": registered(sizes=None),
    "unknown group": registered(group="nobody knows it"),
    "group as list": registered(group=["a"]),
    "group as null": registered(group=None),
    "group names as text": registered(group_names="abc"),
    "group names as numbers": registered(group_names=[1, 2]),
    "group names nested": registered(group_names=[["a"]]),
    "a hundred thousand groups": registered(
        group_names=[f"group {n}" for n in range(100_000)], group="group 1"
    ),
    "a megabyte as group": registered(group_names=["g" * 1_000_000], group="g" * 1_000_000),
    "name as null": registered(name=None),
    "name as mapping": registered(name={"a": 1}),
    "an escape sequence as name": registered(name="\x1b[2J\n"),
    "half a character as name": registered(name="\ud800"),
    "a megabyte as name": registered(name="n" * 1_000_000),
    "unseen as text": registered(unseen="no"),
    "unseen as number": registered(unseen=2),
    "unknown task": registered(task="nonsense"),
    "task as list": registered(task=["classification"]),
    "shape as text": registered(shape="8x8"),
    "shape negative": registered(shape=[1, -8, 8]),
    "shape fractional": registered(shape=[1, 8.5, 8]),
    "shape huge": registered(shape=[10**9, 10**9]),
    "shape of many axes": registered(shape=[1] * 10_000),
    "another shape": registered(client=4, shape=[1, 28, 28]),
    "outputs as text": registered(outputs="10"),
    "outputs zero": registered(outputs=0),
    "outputs huge": registered(outputs=10**15),
    "other outputs": registered(client=5, outputs=9),
    "class names as text": registered(class_names="0123456789"),
    "too few class names": registered(class_names=["zero"]),
    "class names as numbers": registered(class_names=list(range(10))),
    "home as list": registered(home=[1]),
    "a megabyte as home": registered(home="h" * 1_000_000),
    "a value more": registered(more=1),
    "no JSON": text("{"),
    "no mapping": text("[1, 2]"),
    "a number": text("7"),
    "no text": text(""),
    "brackets": text("[" * 100_000),
    "digits": text("9" * 5_000),
    "ten megabytes": text(" " * 10_000_000),
    "text as list": text(["a", "b"]),
    "text as number": text(7),
    "about left out": without("about"),
    "about without text": as_another("about", ConfigRecord({"other": "a"})),
    "about as numbers": as_another("about", MetricRecord({"text": 1.0})),
    "nothing at all": empty,
}
