"""Conversion of trees and plain values to Flower's records and back, bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from equipoise import __version__
from equipoise.tree import Tree

# Types that NumPy does not have are sent as integers of the same width.
_AS_WHOLE_NUMBERS = {
    dtype: whole
    for name, whole in (
        ("bfloat16", torch.int16),
        ("float8_e4m3fn", torch.uint8),
        ("float8_e5m2", torch.uint8),
        ("float8_e4m3fnuz", torch.uint8),
        ("float8_e5m2fnuz", torch.uint8),
    )
    if (dtype := getattr(torch, name, None)) is not None
}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _AS_WHOLE_NUMBERS}
NUMPY = "numpy.ndarray"
"""The format of arrays, as Flower calls it."""

VERSIONS = "versions"
"""The record of a registration with the versions of the client's packages."""

# Records for evaluation in training messages: the request of the server, and the metrics of local
# models by split.
EVALUATION, LOCAL = "evaluation", "local"


def to_record(tree: Mapping[str, Tensor]) -> ArrayRecord:
    """Write tensors of any type as an ``ArrayRecord``, without changing their bytes.

    Examples
    --------
    >>> record = to_record({"w": torch.tensor([1.5, 2.5], dtype=torch.bfloat16)})
    >>> from_record(record)
    {'w': tensor([1.5000, 2.5000], dtype=torch.bfloat16)}
    """
    return ArrayRecord({name: _to_array(tensor) for name, tensor in tree.items()})


def from_record(record: ArrayRecord) -> Tree:
    """Read what :func:`to_record` wrote, on the CPU.

    Examples
    --------
    >>> from_record(to_record({"steps": torch.tensor(3)}))
    {'steps': tensor(3)}
    """
    return {name: _to_tensor(array) for name, array in record.items()}


def _to_array(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    values = tensor.view(_AS_WHOLE_NUMBERS.get(tensor.dtype, tensor.dtype)).numpy()
    head = BytesIO()
    npy.write_array_header_1_0(head, npy.header_data_from_array_1_0(values))
    # The format that Flower's mods read, written with a single copy of the values.
    data = b"".join([head.getvalue(), values.reshape(-1).view(np.uint8).data])
    return Array(name, tuple(values.shape), NUMPY, data)


def _to_tensor(array: Array) -> Tensor:
    file = BytesIO(array.data)
    if npy.read_magic(file) != (1, 0):
        values = array.numpy()
    else:
        shape, fortran, dtype = npy.read_array_header_1_0(file)
        flat = np.frombuffer(array.data, dtype, offset=file.tell()).copy()
        values = flat.reshape(shape, order="F" if fortran else "C")
    tensor = torch.from_numpy(np.ascontiguousarray(values).reshape(values.shape))
    return tensor.view(_BY_NAME[array.dtype]) if array.dtype in _BY_NAME else tensor


def plain_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the NumPy type in which tensors of a type are sent.

    Examples
    --------
    >>> plain_type(torch.float32), plain_type(torch.bfloat16)
    (dtype('float32'), dtype('int16'))
    """
    return torch.empty(0, dtype=_AS_WHOLE_NUMBERS.get(dtype, dtype)).numpy().dtype


def to_metrics(reports: Mapping[str, Tensor], row: int = 0) -> MetricRecord:
    """Write one client's reports as a ``MetricRecord``.

    Examples
    --------
    >>> to_metrics({"loss": torch.tensor([0.5], dtype=torch.float64)})["loss"]
    0.5
    """
    return MetricRecord({name: float(values[row]) for name, values in reports.items()})


def pack(value: Any) -> tuple[str, Tree]:
    """Split nested dictionaries, lists and tuples into text and tensors.

    Parameters
    ----------
    value : object
        A nested value of tensors, numbers, text, booleans and ``None``.

    Returns
    -------
    tuple
        JSON in which tensors are numbered, and the tensors by number.

    Examples
    --------
    >>> text, tensors = pack([{"w": torch.ones(1)}, 0.5, (1, 2)])
    >>> unpack(text, tensors)
    [{'w': tensor([1.])}, 0.5, (1, 2)]
    """
    tensors: Tree = {}

    def plain(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors[str(len(tensors))] = item
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(item, Mapping):
            return {"mapping": [[key, plain(inner)] for key, inner in item.items()]}
        if isinstance(item, list | tuple):
            return {type(item).__name__: [plain(inner) for inner in item]}
        return {"value": item}

    return json.dumps(plain(value)), tensors


def unpack(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """Reverse :func:`pack`."""

    def built(item: dict[str, Any]) -> Any:
        ((kind, content),) = item.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "mapping":
            return {key: built(inner) for key, inner in content}
        if kind in ("list", "tuple"):
            made = [built(inner) for inner in content]
            return tuple(made) if kind == "tuple" else made
        return content

    return built(json.loads(text))


def bytes_of(content: RecordDict) -> int:
    """Return the bytes of a message's content: its arrays as written, its numbers and settings.

    Examples
    --------
    >>> bytes_of(RecordDict({"model": to_record({"w": torch.zeros(1000)})})) - 4000
    129
    """
    total = 0
    for record in content.values():
        for name, value in record.items():
            total += len(name) + _bytes_of_value(value)
    return total


def _bytes_of_value(value: Any) -> int:
    if isinstance(value, Array):
        return len(value.data)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Iterable):
        return sum(_bytes_of_value(item) for item in value)
    return 8


def tensor_bytes_of(content: RecordDict) -> int:
    """Return the bytes of the numbers in a message, without names and headers.

    The in-process engine counts the same bytes.

    Examples
    --------
    >>> tensor_bytes_of(RecordDict({"model": to_record({"w": torch.zeros(1000)})}))
    4000
    """
    arrays = (array for record in content.array_records.values() for array in record.values())
    reports = sum(len(record) for record in content.metric_records.values())
    return 8 * reports + sum(math.prod(array.shape) * _itemsize(array.dtype) for array in arrays)


def _itemsize(dtype: str) -> int:
    return _BY_NAME[dtype].itemsize if dtype in _BY_NAME else np.dtype(dtype).itemsize


def without_evaluation(content: RecordDict) -> RecordDict:
    """Return a message without its records for evaluation, which do not count as a method's bytes.

    Examples
    --------
    >>> update, metrics = to_record({"w": torch.zeros(9)}), MetricRecord({"loss": 0.5})
    >>> reply = RecordDict({"update": update, "local.val": metrics})
    >>> list(without_evaluation(reply))
    ['update']
    """
    return RecordDict(
        {n: r for n, r in content.items() if n != EVALUATION and not n.startswith(f"{LOCAL}.")}
    )


def versions_here() -> dict[str, str]:
    """Return the versions of the packages that results depend on, without those of builds.

    Examples
    --------
    >>> sorted(versions_here())
    ['equipoise', 'torch']
    """
    return {"equipoise": __version__, "torch": torch.__version__.partition("+")[0]}


def settings_of(content: RecordDict, name: str = "settings") -> dict[str, Any]:
    """Return the settings of a message, empty if it has none."""
    return dict(content.config_records.get(name, ConfigRecord()))
