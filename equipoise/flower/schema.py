"""Checks of clients' answers and registrations, before the server uses them.

An answer is checked against a :class:`Schema`, a registration by :func:`read_registration`. Both
raise :class:`Misfit` with the reason in one line. The server then leaves the client out and
continues. Values that were not requested are removed from an answer, with a warning.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from equipoise import tasks
from equipoise.attributes import read_column
from equipoise.engine.evaluation import Measured
from equipoise.federation import SPLITS
from equipoise.flower.roster import Description
from equipoise.flower.settings import LARGEST_REPORT, FlowerSettings
from equipoise.flower.wire import NUMPY, plain_type
from equipoise.metrics import Metric
from equipoise.parity import wrong_counts
from equipoise.task import Task
from equipoise.tree import LARGEST, Tree, unusable

log = logging.getLogger("flwr.equipoise")

EVALUATED = ("val", "test")
"""The splits on which clients evaluate models."""

NOTE, REPORTS, UPDATE, KEPT, ANSWER, FORM = "note", "reports", "update", "kept", "answer", "form"
UPLOAD = "upload."

# The sum of the sizes of all clients fits in an int64.
_LARGEST_SIZE = 10**12
_LARGEST_SHAPE = 10**9
_MOST_OUTPUTS = 10**7
_MOST_AXES = 16
_MOST_NAMES = 10_000
_LONGEST_NAME = 300
_LONGEST_FORM = 100_000
_DEEPEST_FORM = 32
_LONGEST_REGISTRATION = 4_000_000
_LONGEST_HEADER = 4096
_SMALLEST_RATE = 1e-12

_PREFIX = b"\x93NUMPY\x01\x00"
_OPEN_TYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}


class Misfit(ValueError):
    """An answer or a registration that cannot be used. The message is the reason in one line."""


def shown(value: object, longest: int = 80) -> str:
    r"""Return a value from a client for a terminal or a journal: short, and on one line.

    Parameters
    ----------
    value : object
        Text is kept, other values are converted with ``repr``.
    longest : int
        Maximum number of characters.

    Returns
    -------
    str
        Without characters that are not printable.

    Examples
    --------
    >>> shown("head\x1b[2J\n"), shown([1, 2]), shown("x" * 100, longest=8)
    ('head\\x1b[2J\\n', '[1, 2]', 'xxxxx...')
    """
    # Truncate first: the value may be very long.
    text = (value if isinstance(value, str) else _represented(value))[: longest + 1]
    plain = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
    return plain if len(plain) <= longest else plain[: longest - 3] + "..."


def _represented(value: object) -> str:
    if isinstance(value, list | tuple | dict) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)} values"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    return repr(value)


def _several(names: Iterable[str]) -> str:
    """Return the first few names."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(shown(name) for name in listed[:3]) + more


# ---- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number that clients report.

    Parameters
    ----------
    called : str
        Its name in reasons.
    low, high : float
        The smallest and the largest valid number.
    needed : bool
        Whether an answer without it, or with NaN, cannot be used.
    judged : bool
        Whether an answer with a value outside of the range cannot be used. Otherwise the value is
        passed on, and is left out where rows of metrics are made; see
        :func:`equipoise.run.records.client_rows`.

    Examples
    --------
    >>> Number(called="test accuracy", low=0.0, high=1.0).read(0.5)
    0.5
    >>> Number(called="test accuracy", low=0.0, high=1.0).read(7.5)
    Traceback (most recent call last):
    equipoise.flower.schema.Misfit: answered with 7.5 as test accuracy, which is not in the range
    from 0 to 1
    """

    called: str
    low: float = -LARGEST_REPORT
    high: float = LARGEST_REPORT
    needed: bool = True
    judged: bool = True

    def read(self, value: object) -> float:
        """Return a reported value as a number, NaN if there is none."""
        if value is None and not self.needed:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            if not self.judged:
                return math.nan
            what = (
                "nothing"
                if value is None
                else "a list"
                if isinstance(value, list)
                else f"a {type(value).__name__}"
            )
            raise Misfit(f"answered with {what} as {self.called}")
        number = float(value)
        if not self.judged or (math.isnan(number) and not self.needed):
            return number
        if not math.isfinite(number):
            raise Misfit(f"answered with {number} as {self.called}")
        # Means may be outside of the range because of rounding.
        slack = 1e-9
        if not self.low - slack * abs(self.low) <= number <= self.high + slack * abs(self.high):
            raise Misfit(
                f"answered with {number:g} as {self.called}, which is not in the range from "
                f"{self.low:g} to {self.high:g}"
            )
        return number


@dataclass(frozen=True)
class Answer:
    """An answer that fits its schema.

    Attributes
    ----------
    content : RecordDict
        The requested records.
    trees : dict of Tree
        The arrays, by the name of their record.
    numbers : dict of dict
        The reported numbers, by the name of their record; NaN where there is none.
    form : str
        The form of the answer to a question; see :func:`equipoise.flower.wire.unpack`.
    lacks : bool
        Whether the client reports that it has lost a tree that is sent only once. Then the answer
        has nothing else.
    """

    content: RecordDict
    trees: dict[str, Tree] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    form: str = ""
    lacks: bool = False

    @property
    def forms(self) -> Hashable:
        """The names, types and shapes of all arrays, and the form, which all clients must share."""
        arrays = (
            (record, name, tensor.dtype, tensor.shape)
            for record, tree in sorted(self.trees.items())
            for name, tensor in tree.items()
        )
        return (self.form, *arrays)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The required content of an answer of one client.

    Parameters
    ----------
    client, round
        The client that must answer, and the round (counted from 0).
    trees : mapping
        By the name of a record of arrays, the tensors whose names, types and shapes the arrays must
        have.
    open_trees : sequence of str
        Records of arrays whose names, types and shapes the server does not know.
    numbers : mapping
        By the name of a record of numbers, the numbers that clients may report.
    counted : mapping
        The records in which clients may also count samples by the values of attributes, and how
        many samples there are.
    question : bool
        Whether the answer is one to a question: with a form, and with one row in every array of
        ``answer``.
    withheld : collection of str
        Trees that the server did not send because the client should have them.
    largest : float
        Maximum number of bytes of all open records together.

    Examples
    --------
    >>> from equipoise.flower.wire import to_record
    >>> schema = Schema(client=3, round=0, trees={"update": {"w": torch.zeros(2)}})
    >>> note = ConfigRecord({"client": 3, "round": 0})
    >>> update = to_record({"w": torch.ones(2)})
    >>> schema.read(RecordDict({"update": update, "note": note})).trees["update"]
    {'w': tensor([1., 1.])}
    >>> schema.read(RecordDict({"update": to_record({"w": torch.ones(3)}), "note": note}))
    Traceback (most recent call last):
    equipoise.flower.schema.Misfit: answered with w of (3,) torch.float32 instead of (2,)
    torch.float32
    """

    client: int
    round: int
    trees: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    open_trees: tuple[str, ...] = ()
    numbers: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    question: bool = False
    withheld: frozenset[str] = frozenset()
    largest: float = math.inf

    def read(self, content: RecordDict) -> Answer:
        """Return the requested part of an answer.

        Raises
        ------
        Misfit
            If it cannot be used.
        """
        note = self._note(content)
        if "lacks" in note:
            return Answer(RecordDict({NOTE: note}), lacks=True)
        declared: dict[str, Any] = {NOTE: note}
        ignored: list[str] = []
        trees: dict[str, Tree] = {}
        for name, expected in self.trees.items():
            declared[name] = _record(
                content, name, ArrayRecord, "parameters" if name == UPDATE else name
            )
            trees[name] = _tree(declared[name], expected)
        room = self.largest
        for name in self.open_trees:
            declared[name] = record = _record(content, name, ArrayRecord, name.removeprefix(UPLOAD))
            room -= sum(len(array.data) for array in record.values())
            if room < 0:
                raise Misfit(
                    f"answered with more than {self.largest:g} bytes in {name.removeprefix(UPLOAD)}"
                )
            trees[name] = self._open_tree(record)
        numbers: dict[str, dict[str, float]] = {}
        for name, wanted in self.numbers.items():
            record = content.get(name)
            given: Mapping[str, Any] = record if isinstance(record, MetricRecord) else {}
            counts = self._counts(name, given)
            numbers[name] = {
                each: number.read(given.get(each)) for each, number in wanted.items()
            } | counts
            allowed = wanted.keys() | counts.keys()
            known = {
                each: given[each]
                for each in given
                if each in allowed and not isinstance(given[each], list)
            }
            ignored += [each for each in given if each not in known]
            declared[name] = MetricRecord(known)
        form = ""
        if self.question:
            declared[FORM], form = _form(content, trees[ANSWER])
        ignored += [name for name in content if name not in declared]
        if ignored:
            log.warning(
                "client %d: left out what was not requested: %s", self.client, _several(ignored)
            )
        return Answer(RecordDict(declared), trees, numbers, form)

    def _counts(self, name: str, given: Mapping[str, Any]) -> dict[str, float]:
        """Read the counts by attributes of a record, whose values only the client knows."""
        if name not in self.counted:
            return {}
        counts = {
            each: float(value)
            for each, value in given.items()
            if read_column(each) is not None and isinstance(value, int | float)
        }
        if wrong := wrong_counts(counts, self.counted[name]):
            kind, _, split = name.partition(".")
            raise Misfit(f"{wrong} in {split} of the {kind} model")
        return counts

    def _note(self, content: RecordDict) -> ConfigRecord:
        given = content.get(NOTE)
        note = dict(given) if isinstance(given, ConfigRecord) else {}
        client, round_ = note.get("client"), note.get("round")
        if type(client) is not int or client != self.client:
            raise Misfit(f"answered as client {shown(client)}")
        if type(round_) is not int or round_ != self.round:
            raise Misfit(
                f"answered for round {shown(round_)}, counted from 0, instead of {self.round}"
            )
        said: dict[str, Any] = {"client": client, "round": round_}
        if "lacks" in note:
            if not isinstance(note["lacks"], str) or note["lacks"] not in self.withheld:
                raise Misfit(
                    f"answered that it lacks {shown(note['lacks'])}, which is not kept for it"
                )
            said["lacks"] = note["lacks"]
        return ConfigRecord(said)

    def _open_tree(self, record: ArrayRecord) -> Tree:
        if len(record) > _MOST_NAMES:
            raise Misfit(f"answered with {len(record)} arrays; valid: {_MOST_NAMES} or fewer")
        tree: Tree = {}
        for name, array in record.items():
            if not name.isprintable() or len(name) > _LONGEST_NAME:
                raise Misfit(f"answered with an array named {shown(name)}")
            dtype = _OPEN_TYPES.get(array.dtype)
            if dtype is None:
                raise Misfit(
                    f"answered with {name} of type {shown(array.dtype)}; valid: "
                    f"{', '.join(_OPEN_TYPES)}"
                )
            shape = tuple(array.shape)
            if len(shape) > _MOST_AXES or not all(0 <= length < _LARGEST_SHAPE for length in shape):
                raise Misfit(f"answered with {name} of shape {shown(shape)}")
            if self.question and shape[:1] != (1,):
                raise Misfit(f"answered with {name} of shape {shown(shape)} instead of one row")
            tree[name] = _tensor(name, array, dtype, shape)
        # Answers to questions are sums over samples, and depend on a model that another client may
        # have spoiled.
        if wrong := _beyond(tree, LARGEST_REPORT if self.question else LARGEST):
            raise Misfit(wrong)
        return tree


def _record(content: RecordDict, name: str, kind: type[Any], called: str) -> Any:
    record = content.get(name)
    if not isinstance(record, kind):
        raise Misfit(f"answered without {called}")
    return record


def _tree(record: ArrayRecord, expected: Mapping[str, Tensor]) -> Tree:
    """Read arrays that must have the names, types and shapes of the expected tensors."""
    if set(record) != set(expected):
        raise Misfit(f"answered with other parameters: {_several(set(record) ^ set(expected))}")
    tree: Tree = {}
    for name, tensor in expected.items():
        array, dtype = record[name], str(tensor.dtype).removeprefix("torch.")
        if array.dtype != dtype or tuple(array.shape) != tuple(tensor.shape):
            there = f"{shown(tuple(array.shape))} torch.{shown(array.dtype)}"
            raise Misfit(
                f"answered with {name} of {there} instead of {tuple(tensor.shape)} {tensor.dtype}"
            )
        tree[name] = _tensor(name, array, tensor.dtype, tuple(tensor.shape))
    if wrong := unusable(
        [{name: tensor.unsqueeze(0) for name, tensor in tree.items()}], expected
    ).get(0):
        raise Misfit(wrong)
    return tree


def _tensor(name: str, array: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Read an array whose bytes must match its declared type and shape.

    The header is compared with the only one that is valid, and not parsed: NumPy's own parser can
    be brought to warn, to use much memory and to raise all kinds of errors.
    """
    if array.stype != NUMPY:
        raise Misfit(f"answered with {name} written as {shown(array.stype)}; valid: {NUMPY}")
    real, begin = plain_type(dtype), len(_PREFIX) + 2
    length = int.from_bytes(array.data[len(_PREFIX) : begin], "little")
    there = array.data[begin : begin + length].rstrip(b" \n") if length <= _LONGEST_HEADER else b""
    valid = f"{{'descr': {real.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    size = math.prod(shape) * real.itemsize
    if (
        array.data[: len(_PREFIX)] != _PREFIX
        or there != valid
        or len(array.data) != begin + length + size
    ):
        raise Misfit(
            f"answered with {name} whose bytes are not the {shown(shape)} {dtype} that it declares"
        )
    values = np.frombuffer(array.data, real, offset=begin + length).copy().reshape(shape)
    tensor = torch.from_numpy(values)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _beyond(tree: Tree, largest: float) -> str | None:
    """Return the reason if a tensor has NaN, infinity or a number beyond a bound, else ``None``."""
    for name, tensor in tree.items():
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not values.numel() or values.dtype == torch.bool:
            continue
        low, high = (float(bound) for bound in torch.aminmax(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"answered with NaN or infinity in {name}"
        if max(-low, high) > largest:
            return f"answered with a number beyond {largest:g} in {name}"
    return None


def _form(content: RecordDict, tree: Tree) -> tuple[ConfigRecord, str]:
    """Read the form of the answer to a question, which must refer to each of its arrays once."""
    record = content.get(FORM)
    text = record.get("text") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise Misfit("answered a question without a form")
    if len(text) > _LONGEST_FORM:
        raise Misfit(f"answered in a form of {len(text)} characters")
    named: list[str] = []

    def walk(item: Any, depth: int) -> None:
        ((kind, inner),) = item.items()
        if depth > _DEEPEST_FORM:
            raise ValueError
        if kind == "tensor" and isinstance(inner, str):
            named.append(inner)
        elif kind == "mapping":
            for key, value in inner:
                if not isinstance(key, str | int):
                    raise ValueError
                walk(value, depth + 1)
        elif kind in ("list", "tuple") and isinstance(inner, list):
            for value in inner:
                walk(value, depth + 1)
        elif kind != "value" or isinstance(inner, list | dict):
            raise ValueError

    try:
        walk(json.loads(text), 0)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Misfit(f"answered in a form that cannot be read: {shown(text)}") from error
    if sorted(named) != sorted(tree):
        raise Misfit(f"answered in a form that does not fit its arrays: {shown(text)}")
    return ConfigRecord({"text": text}), text


def alike(answers: Mapping[int, Answer]) -> dict[int, Answer]:
    """Keep the answers whose arrays have the most frequent names, types and shapes.

    Examples
    --------
    >>> one, other = (Answer(RecordDict(), {"upload.h": {"h": torch.zeros(n)}}) for n in (2, 3))
    >>> sorted(alike({0: other, 1: one, 2: one}))
    [1, 2]
    """
    forms = {client: answer.forms for client, answer in answers.items()}
    usual = max(Counter(forms.values()).items(), key=lambda counted: counted[1], default=(None, 0))[
        0
    ]
    return {client: answer for client, answer in answers.items() if forms[client] == usual}


# ---- the numbers of a run ------------------------------------------------------------------------


@dataclass(frozen=True)
class Declared:
    """The numbers that clients of a run may report: a fixed set with ranges.

    Parameters
    ----------
    task : Task
        The task, with its metrics besides the loss and their ranges.
    largest_loss : float
        The largest loss, and the negative of the smallest one.
    metrics : sequence of Metric
        Further metrics of the run.

    Examples
    --------
    >>> declared = Declared(tasks.build("classification"))
    >>> numbers = declared.of_model("global", {"val": 0, "test": 9})
    >>> [number.called for number in numbers["global.test"].values()]
    ['test loss of the global model', 'test accuracy of the global model']
    """

    task: Task
    largest_loss: float = LARGEST_REPORT
    metrics: tuple[Metric, ...] = ()

    def measured(self, called: str, *, needed: bool, metrics: bool = False) -> dict[str, Number]:
        """Return the numbers of a model on a split; ``called`` is a template for their names."""
        names = ("loss", self.task.score, *self.task.ranges)
        found = {name: self._of_task(name, called.format(name), needed=needed) for name in names}
        for metric in self.metrics if metrics else ():
            optional = Number(called=called.format(metric.name), needed=False, judged=False)
            found.setdefault(metric.name, optional)
        return found

    def _of_task(self, name: str, called: str, *, needed: bool) -> Number:
        """Return a metric of the task, in its range."""
        low, high = self.task.ranges.get(name, (-math.inf, math.inf))
        largest = self.largest_loss if name == "loss" else LARGEST_REPORT
        return Number(called=called, low=max(low, -largest), high=min(high, largest), needed=needed)

    def of_model(self, kind: str, sizes: Mapping[str, int]) -> dict[str, dict[str, Number]]:
        """Return the numbers of one kind of model on each split, by the names of their records."""
        return {
            f"{kind}.{split}": self.measured(
                f"{split} {{}} of the {kind} model", needed=bool(sizes[split]), metrics=True
            )
            for split in EVALUATED
        }

    def of_training(self, reports: Iterable[str], sizes: Mapping[str, int]) -> dict[str, Number]:
        """Return what clients report after training: loss, steps, and the requested reports."""
        found = {
            # The minimized loss may differ from that of the task.
            "train_loss": Number(
                called="train_loss",
                low=-self.largest_loss,
                high=self.largest_loss,
                needed=bool(sizes["train"]),
            ),
            "steps": Number(called="steps", low=0.0, high=LARGEST, needed=bool(sizes["train"])),
        }
        for name in sorted(reports):
            # The loss on a split without samples is NaN and is not used.
            needed = bool(sizes["val" if name.startswith("val_") else "train"])
            if "loss" in name:
                found[name] = self._of_task("loss", name, needed=needed)
            elif "score" in name:
                found[name] = self._of_task(self.task.score, name, needed=needed)
            elif name == "lr":
                found[name] = Number(called=name, low=_SMALLEST_RATE, high=LARGEST, needed=needed)
            else:
                found[name] = Number(called=name, needed=needed)
        return found


Numbers = Mapping[str, Mapping[str, float]]


def measured_by(
    answers: Mapping[int, Numbers], clients: Iterable[int], kind: str
) -> dict[str, Measured]:
    """Return the metrics of one kind of model by split; NaN for clients that did not answer.

    Parameters
    ----------
    answers : mapping
        The numbers that clients reported, by client and record; see :class:`Answer`.
    clients : iterable of int
        The clients, in the order of the values.
    kind : {"global", "personal", "local"}
        The kind of model.

    Returns
    -------
    dict of dict of float64 arrays
        By split and metric.

    Examples
    --------
    >>> said = {3: {"global.val": {"loss": 0.5}, "global.test": {"loss": 0.25, "accuracy": 0.75}}}
    >>> measured_by(said, [2, 3], "global")["test"]["accuracy"]
    array([ nan, 0.75])
    """
    clients = list(clients)
    measured: dict[str, Measured] = {
        split: {"loss": np.full(len(clients), np.nan)} for split in EVALUATED
    }
    for position, client in enumerate(clients):
        if client not in answers:
            continue
        for split, columns in measured.items():
            for name, value in answers[client][f"{kind}.{split}"].items():
                columns.setdefault(name, np.full(len(clients), np.nan))[position] = value
    return measured


# ---- registrations -------------------------------------------------------------------------------


def read_registration(content: RecordDict, settings: FlowerSettings) -> Description:
    """Read the description that a client sends when it registers.

    Parameters
    ----------
    content : RecordDict
        The message.
    settings : FlowerSettings
        The settings, with the valid client numbers.

    Returns
    -------
    Description
        The description, with valid values. The roster checks whether it fits the other clients.

    Raises
    ------
    Misfit
        If something is missing, is of another type, or is out of range.

    Examples
    --------
    >>> from equipoise.data import load
    >>> said = Description.of(load("digits"), 3)
    >>> message = RecordDict({"about": ConfigRecord({"text": said.text()})})
    >>> read_registration(message, FlowerSettings()) == said
    True
    """
    record = content.get("about")
    text = record.get("text") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise Misfit("it registered without a description")
    if len(text) > _LONGEST_REGISTRATION:
        raise Misfit(
            f"it registered with {len(text)} characters; valid: {_LONGEST_REGISTRATION} or fewer"
        )
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Misfit(f"it registered with a description that is no JSON: {shown(text)}") from error
    if not isinstance(plain, dict):
        raise Misfit(f"it registered with {shown(plain)} instead of a description")
    fields = {each.name: each for each in dataclasses.fields(Description)}
    if strays := set(plain) - set(fields):
        raise Misfit(f"it registered with values that were not requested: {_several(strays)}")
    for name, each in fields.items():
        if name not in plain and each.default is dataclasses.MISSING:
            raise Misfit(f"it registered without {name}")
    checks = _registration_checks(settings)
    for name, value in plain.items():
        if wrong := checks.get(name, _no_text)(value):
            given = f"'{shown(value)}'" if isinstance(value, str) else shown(value)
            raise Misfit(f"it registered with {name} {given}; valid: {wrong}")
    said = Description.read(text)
    _check_together(said)
    return said


def _registration_checks(settings: FlowerSettings) -> dict[str, Callable[[Any], str | None]]:
    """Return a check for each value of a registration, which returns what is valid, or ``None``."""
    return {
        "client": lambda value: _no_count(
            value, 0, settings.largest_client, " (flower.max_client)"
        ),
        "group_names": lambda value: _no_names(value, _MOST_NAMES),
        "unseen": lambda value: None if isinstance(value, bool) else "true or false",
        "sizes": _no_sizes,
        "task": lambda value: (
            None if isinstance(value, str) and value in tasks.names() else ", ".join(tasks.names())
        ),
        "shape": _no_shape,
        "outputs": lambda value: _no_count(value, 1, _MOST_OUTPUTS),
        "class_names": lambda value: (
            None if value is None else _no_names(value, _MOST_OUTPUTS, unique=False)
        ),
    }


def _no_text(value: Any) -> str | None:
    fits = isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()
    return None if fits else f"up to {_LONGEST_NAME} printable characters"


def _no_count(value: Any, least: int, most: int, where: str = "") -> str | None:
    fits = type(value) is int and least <= value <= most
    return None if fits else f"a whole number from {least} to {most}{where}"


def _no_names(value: Any, most: int, *, unique: bool = True) -> str | None:
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= most
        or any(_no_text(name) for name in value)
    ):
        return f"a list of up to {most} names of up to {_LONGEST_NAME} printable characters"
    return None if not unique or len(set(value)) == len(value) else "names that are all different"


def _no_sizes(value: Any) -> str | None:
    fits = isinstance(value, dict) and set(value) == set(SPLITS)
    if fits and not any(_no_count(size, 0, _LARGEST_SIZE) for size in value.values()):
        return None
    return f"for each of {', '.join(SPLITS)} a whole number from 0 to {_LARGEST_SIZE:g}"


def _no_shape(value: Any) -> str | None:
    fits = isinstance(value, list) and len(value) <= _MOST_AXES
    if (
        fits
        and not any(_no_count(length, 1, _LARGEST_SHAPE) for length in value)
        and math.prod(value) < _LARGEST_SHAPE
    ):
        return None
    return f"up to {_MOST_AXES} whole numbers from 1 whose product is below {_LARGEST_SHAPE:g}"


def _check_together(said: Description) -> None:
    """Refuse values that are valid by themselves but not together."""
    if said.group not in said.group_names:
        raise Misfit(
            f"it registered with the unknown group {shown(said.group)}; valid: "
            f"{_several(said.group_names)}"
        )
    if not said.unseen and not said.sizes["train"]:
        raise Misfit(
            "it registered without training samples; valid: one or more, or unseen=true for a "
            "client to test on"
        )
    if said.class_names is not None and len(said.class_names) != said.outputs:
        raise Misfit(
            f"it registered with {len(said.class_names)} class_names for {said.outputs} outputs"
        )


def usual_first(newcomers: Iterable[Description]) -> list[Description]:
    """Order new clients by number, but first those whose data need the most frequent model.

    The first client that is admitted decides which model all others must fit; a single one must not
    decide that.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from equipoise.data import load
    >>> digits = [Description.of(load("digits"), client) for client in range(3)]
    >>> [said.client for said in usual_first([replace(digits[0], outputs=9), *digits[1:]])]
    [1, 2, 0]
    """
    needs = {
        said.client: (said.task, said.shape, said.outputs, said.class_names) for said in newcomers
    }
    newcomers = sorted(newcomers, key=lambda said: said.client)
    counted = Counter(needs[said.client] for said in newcomers)
    usual = max(counted, key=lambda need: counted[need], default=None)
    return sorted(newcomers, key=lambda said: needs[said.client] != usual)


# ---- weights -------------------------------------------------------------------------------------


def capped_shares(shares: Tensor, largest: float | None) -> Tensor:
    """Bound weights that sum to one.

    The excess above the bound is distributed to the other weights in proportion.

    Parameters
    ----------
    shares : Tensor
        The weights.
    largest : float, optional
        The bound. If it is below one over the number of weights, all weights become equal.

    Returns
    -------
    Tensor
        Weights that sum to one; the same tensor if none was above the bound.

    Examples
    --------
    >>> capped_shares(torch.tensor([0.8, 0.15, 0.05]), 0.5)
    tensor([0.5000, 0.3750, 0.1250])
    """
    if largest is None or not len(shares) or float(shares.max()) <= largest:
        return shares
    if largest * len(shares) <= 1:
        return torch.full_like(shares, 1 / len(shares))
    capped = torch.zeros_like(shares, dtype=torch.bool)
    bounded = shares
    while bool((over := (bounded > largest) & ~capped).any()):
        capped |= over
        rest = torch.where(capped, 0.0, shares)
        if not float(rest.sum()):
            # All others have weight 0: divide the rest equally.
            rest = (~capped).to(shares.dtype)
        free = 1 - largest * int(capped.sum())
        bounded = torch.where(capped, largest, rest * free / rest.sum())
    return bounded
