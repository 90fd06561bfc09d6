"""Conversion of arrays from Python or from files to tensors, with checks."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipoise.errors import InputError

Ints = NDArray[np.int64]

# A compressed file may expand to this many bytes, or to this many times its own size. Usual data
# need much less: images of MNIST expand five times, text ten times.
MOST_BYTES = 256 << 20
MOST_TIMES = 50
# Headers of arrays of numbers have about a hundred bytes.
_LONGEST_HEAD = 4096


def numbers(values: ArrayLike, what: str) -> NDArray[Any]:
    """Return values as an array of real numbers in the native byte order.

    Parameters
    ----------
    values : array-like
        What was given.
    what : str
        How messages name it.

    Returns
    -------
    array
        Of booleans, integers or floating point numbers.

    Raises
    ------
    InputError
        If values are missing (masked), have different lengths, or are not real numbers.

    Examples
    --------
    >>> numbers(np.array([1, 2], ">i4"), "y").dtype
    dtype('int32')
    >>> numbers([1j], "y")
    Traceback (most recent call last):
    equipoise.errors.InputError: y must hold real numbers, not complex128
    """
    if isinstance(values, np.ma.MaskedArray) and np.ma.getmaskarray(values).any():
        hidden = int(np.ma.getmaskarray(values).sum())
        raise InputError(
            f"{what} is a masked array with {hidden} masked values; fill them or drop their samples"
        )
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{what} must be an array of numbers ({error})") from error
    if array.dtype.kind not in "biuf":
        hint = (
            "; numpy.unique(y, return_inverse=True)[1] numbers names of classes"
            if what == "y" and array.dtype.kind in "US"
            else ""
        )
        raise InputError(f"{what} must hold real numbers, not {array.dtype}{hint}")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        # PyTorch has no floating point type longer than float64.
        array = array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def whole_numbers(values: ArrayLike, what: str) -> Ints:
    """Return an array of whole numbers with one axis.

    Parameters
    ----------
    values : array-like
        Whole numbers.
    what : str
        The name of the values in errors.

    Returns
    -------
    int64 array
        The same numbers. It is the given array if that has this type.

    Examples
    --------
    >>> whole_numbers([0.5], "Federation.groups")
    Traceback (most recent call last):
    equipoise.errors.InputError: Federation.groups must be a flat array of whole numbers, not
    float64 of shape (1,)
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InputError(
            f"{what} must be a flat array of whole numbers, not {array.dtype} of shape "
            f"{array.shape}"
        )
    return array.astype(np.int64, copy=False)


def tensor_of(values: ArrayLike | Tensor, what: str) -> Tensor:
    """Return values as a tensor.

    Floating point arrays are converted to PyTorch's default type. Tensors are not changed.

    Parameters
    ----------
    values : array-like or Tensor
        What was given.
    what : str
        How messages name it.

    Returns
    -------
    Tensor
        Of real numbers.

    Examples
    --------
    >>> tensor_of(np.array([0.5]), "x").dtype, tensor_of([3], "y").dtype
    (torch.float32, torch.int64)
    """
    if isinstance(values, Tensor):
        if values.is_complex() or values.is_quantized or values.layout != torch.strided:
            raise InputError(
                f"{what} must hold real numbers, one after the other, not {values.dtype} "
                f"({values.layout})"
            )
        return values
    array = numbers(values, what)
    # Copied if the array is read-only or has negative strides, which tensors do not support.
    return torch.tensor(np.require(array, requirements=["C", "W"]), dtype=_type_of(array))


def _type_of(array: NDArray[Any]) -> torch.dtype | None:
    return torch.get_default_dtype() if array.dtype.kind == "f" else None


def refuse_missing_ids(
    ids: Sequence[Any] | NDArray[Any] | Tensor, where: str = "clients", kind: str = "client"
) -> None:
    """Refuse missing ids of clients or groups: NaN, NaT, None or masked.

    Parameters
    ----------
    ids : sequence, array or Tensor
        The client or the group of each sample.
    where : str
        Where they came from.
    kind : str
        What they are.

    Raises
    ------
    InputError
        If an id is missing. Otherwise all of them would be one client, or each its own client.

    Examples
    --------
    >>> refuse_missing_ids([1.0, float("nan")])
    Traceback (most recent call last):
    equipoise.errors.InputError: clients: sample 1 has no client (nan); name one or drop the sample
    """
    missing: NDArray[np.bool_] | list[bool]
    if isinstance(ids, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(ids)
    elif isinstance(ids, Tensor):
        missing = torch.isnan(ids).cpu().numpy()
    elif isinstance(ids, np.ndarray) and ids.dtype.kind != "O":
        missing = (
            np.isnan(ids)
            if ids.dtype.kind in "fc"
            else np.isnat(ids)
            if ids.dtype.kind in "mM"
            else np.zeros(0, bool)
        )
    else:
        # Only missing values differ from themselves.
        missing = [each is None or bool(each != each) for each in ids]
    found = np.flatnonzero(missing)
    if found.size:
        raise InputError(
            f"{where}: sample {found[0]} has no {kind} ({ids[int(found[0])]}); name one or drop "
            "the sample"
        )


def most_bytes(size: int) -> int:
    """Return the number of bytes to which a compressed file of a given size may expand.

    Examples
    --------
    >>> most_bytes(1000) == MOST_BYTES, most_bytes(10 << 20) == 500 << 20
    (True, True)
    """
    return max(MOST_BYTES, MOST_TIMES * size)


def names_in(path: Path) -> list[str]:
    """Return the names of the arrays in an ``.npz`` file.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "data.npz"
    >>> np.savez(path, x=np.zeros(2), y=np.arange(2))
    >>> names_in(path)
    ['x', 'y']
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return [
                name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")
            ]
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise InputError(f"cannot read {path}: {error}; it must hold the arrays x and y") from error


def read_npz(path: Path, names: Sequence[str], texts: Sequence[str] = ()) -> list[NDArray[Any]]:
    """Read some arrays of an ``.npz`` file.

    Memory is allocated only after the size of an array has been checked against its header.

    Parameters
    ----------
    path : Path
        The file.
    names : sequence of str
        The names of arrays of numbers.
    texts : sequence of str
        The names of arrays that may also hold text.

    Returns
    -------
    list of array
        In the order of the names, texts last.

    Raises
    ------
    InputError
        If an array is missing, damaged, of another kind, or expands to more than the limit.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "data.npz"
    >>> np.savez(path, x=np.zeros((2, 3)), y=np.arange(2))
    >>> [array.shape for array in read_npz(path, ["x", "y"])]
    [(2, 3), (2,)]
    """
    wanted = " and ".join(names or texts)
    try:
        with zipfile.ZipFile(path) as archive:
            every = [*names, *texts]
            entries = [archive.getinfo(f"{name}.npy") for name in every]
            grown, most = sum(entry.file_size for entry in entries), most_bytes(path.stat().st_size)
            if grown > most and any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise InputError(
                    f"{path} would grow from {path.stat().st_size} to {grown} bytes; valid: at "
                    f"most {most}. If this is intended, write it with numpy.savez instead of "
                    "savez_compressed"
                )
            return [
                _read_npy(archive, entry, f"{name} in {path}", "biufU" if name in texts else "biuf")
                for name, entry in zip(every, entries, strict=True)
            ]
    except KeyError as error:
        raise InputError(
            f"cannot read {path}: {error.args[0]}; it must hold the arrays {wanted}"
        ) from error
    except InputError:
        raise
    # A damaged or forged archive can fail in any of these ways.
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise InputError(
            f"cannot read {path}: {error}; it must hold the arrays {wanted}"
        ) from error


def _read_npy(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, what: str, kinds: str
) -> NDArray[Any]:
    with archive.open(entry) as file:
        shape, by_columns, dtype, head = _head(file)
        if dtype.kind not in kinds:
            raise InputError(
                f"{what} must hold real numbers{' or text' if 'U' in kinds else ''}, not {dtype}"
            )
        needed = prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or needed != entry.file_size - head:
            raise InputError(
                f"{what} has {entry.file_size - head} bytes of values, its shape {shape} needs "
                f"{needed}"
            )
        values = np.frombuffer(bytearray(file.read()), dtype)
    values = values.reshape(shape, order="F" if by_columns else "C")
    return values if dtype.kind == "U" else numbers(values, what)


def _head(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read the header of an array. The last number is the length of the header."""
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(
            f"version {version[0]}.{version[1]} of NumPy's format is not used for numbers"
        )
    try:
        shape, by_columns, dtype = readers[version](file, max_header_size=_LONGEST_HEAD)
    except Exception as error:
        # It is read as Python source, which can raise any error.
        raise ValueError(f"the header of an array is damaged ({type(error).__name__})") from error
    return shape, by_columns, dtype, file.tell()
