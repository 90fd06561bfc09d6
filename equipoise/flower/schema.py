"""Checks of clients' answers against a schema, before the server uses them.

An answer that does not fit raises :class:`~equipoise.flower.checks.Misfit` with the reason in one
line. The server then leaves the client out and continues. Values that were not requested are
removed, with a warning.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from equipoise.attributes import read_column
from equipoise.flower.checks import (
    LARGEST_SHAPE,
    LONGEST_NAME,
    MOST_AXES,
    MOST_NAMES,
    Misfit,
    several,
    shown,
)
from equipoise.flower.reports import Number
from equipoise.flower.settings import LARGEST_REPORT
from equipoise.flower.wire import NUMPY, plain_type
from equipoise.parity import wrong_counts
from equipoise.tree import LARGEST, Tree, unusable

log = logging.getLogger("flwr.equipoise")


NOTE, REPORTS, UPDATE, KEPT, ANSWER, FORM = "note", "reports", "update", "kept", "answer", "form"
UPLOAD = "upload."

_LONGEST_FORM = 100_000
_DEEPEST_FORM = 32
_LONGEST_HEADER = 4096
# JSON writes a character as up to twelve.
_LONGEST_COLUMN = 12 * 3 * LONGEST_NAME
_LONGEST_WRONG = 160

_PREFIX = b"\x93NUMPY\x01\x00"
_OPEN_TYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}


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
    equipoise.flower.checks.Misfit: answered with w of (3,) torch.float32 instead of (2,)
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
            trees[name] = tree_like(declared[name], expected)
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
                "client %d: left out what was not requested: %s", self.client, several(ignored)
            )
        return Answer(RecordDict(declared), trees, numbers, form)

    def _counts(self, name: str, given: Mapping[str, Any]) -> dict[str, float]:
        """Read the counts by attributes of a record, whose values only the client knows."""
        if name not in self.counted:
            return {}
        counts = {
            each: float(value)
            for each, value in given.items()
            if _is_count(each) and isinstance(value, int | float)
        }
        if wrong := wrong_counts(counts, self.counted[name]):
            kind, _, split = name.partition(".")
            raise Misfit(f"{shown(wrong, _LONGEST_WRONG)} in {split} of the {kind} model")
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
        if len(record) > MOST_NAMES:
            raise Misfit(f"answered with {len(record)} arrays; valid: {MOST_NAMES} or fewer")
        tree: Tree = {}
        for name, array in record.items():
            if not name.isprintable() or len(name) > LONGEST_NAME:
                raise Misfit(f"answered with an array named {shown(name)}")
            dtype = _OPEN_TYPES.get(array.dtype)
            if dtype is None:
                raise Misfit(
                    f"answered with {name} of type {shown(array.dtype)}; valid: "
                    f"{', '.join(_OPEN_TYPES)}"
                )
            shape = tuple(array.shape)
            if len(shape) > MOST_AXES or not all(0 <= length < LARGEST_SHAPE for length in shape):
                raise Misfit(f"answered with {name} of shape {shown(shape)}")
            if self.question and shape[:1] != (1,):
                raise Misfit(f"answered with {name} of shape {shown(shape)} instead of one row")
            tree[name] = _tensor(name, array, dtype, shape)
        # Answers to questions are sums over samples, and depend on a model that another client may
        # have spoiled.
        if wrong := _beyond(tree, LARGEST_REPORT if self.question else LARGEST):
            raise Misfit(wrong)
        return tree


def _is_count(name: str) -> bool:
    """Return whether a number is a count by the value of an attribute, with names to be shown."""
    column = read_column(name) if len(name) <= _LONGEST_COLUMN else None
    return column is not None and all(
        part.isprintable() and len(part) <= LONGEST_NAME for part in column
    )


def _record(content: RecordDict, name: str, kind: type[Any], called: str) -> Any:
    record = content.get(name)
    if not isinstance(record, kind):
        raise Misfit(f"answered without {called}")
    return record


def tree_like(record: ArrayRecord, expected: Mapping[str, Tensor]) -> Tree:
    """Read arrays that must have the names, types and shapes of the expected tensors.

    Raises
    ------
    Misfit
        If they have others, or numbers that cannot be used.
    """
    if set(record) != set(expected):
        raise Misfit(f"answered with other parameters: {several(set(record) ^ set(expected))}")
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
