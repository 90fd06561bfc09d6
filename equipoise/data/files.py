"""Finding and reading files of a data directory. Nothing is downloaded unless requested.

The data directory is the option ``root`` of a source, else the environment variable
``EQUIPOISE_DATA``, else ``data`` in the working directory. Any file may be compressed with gzip.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.arrays import most_bytes
from equipoise.data.download import Archive, fetch
from equipoise.errors import InputError

VARIABLE = "EQUIPOISE_DATA"

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def data_directory(root: str | Path | None = None) -> tuple[Path, str]:
    """Return the data directory, and a phrase for messages about where its path came from.

    Parameters
    ----------
    root : str or Path, optional
        The option ``root`` of a source.

    Returns
    -------
    tuple of Path and str
        The directory, which need not exist, and the origin of its path.

    Examples
    --------
    >>> data_directory("/srv/data")
    (PosixPath('/srv/data'), "root='/srv/data'")
    """
    if root is not None:
        return Path(root).expanduser().absolute(), f"root={str(root)!r}"
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute(), f"environment variable {VARIABLE}"
    return Path("data").absolute(), f"neither root nor {VARIABLE} is set"


def data_files(
    source: str,
    *choices: Sequence[str],
    folders: Sequence[str],
    root: str | Path | None = None,
    archives: Sequence[Archive] = (),
    download: bool = False,
) -> tuple[Path, ...]:
    """Find the files of a source in the data directory.

    Parameters
    ----------
    source : str
        The name of the source, for the message.
    *choices : sequence of str
        Alternative sets of files, the preferred one first: names or patterns such as
        ``train/*.json``, each of which must exist, as given or with ``.gz`` added.
    folders : sequence of str
        Where in the data directory to look, in this order; ``"."`` is the data directory itself.
    root : str or Path, optional
        The data directory.
    archives : sequence of Archive
        Archives with the files, if they are published at a fixed address.
    download : bool
        Download the archives if the files are missing.

    Returns
    -------
    tuple of Path
        The files of the first set that is complete in one folder, in the order of its names; those
        of one pattern in alphabetical order.

    Examples
    --------
    >>> data_files("mnist", ["x", "y"], folders=["mnist", "."], root="no")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'mnist' in .../no/mnist or .../no (root='no'):
    expected x, y (or with .gz); ...
    """
    home, origin = data_directory(root)
    places = [home / folder for folder in folders]
    found = _complete(places, choices)
    if not found and download:
        for archive in archives:
            fetch(archive, home)
        found = _complete(places, choices)
    if found:
        return found
    looked = " or ".join(str(place) for place in places)
    expected = "; or ".join(", ".join(choice) for choice in choices)
    raise InputError(
        f"no files of data {source!r} in {looked} ({origin}): expected {expected} (or with .gz); "
        "set the data directory with root or the environment variable "
        f"{VARIABLE}{_offer(source, archives)}"
    )


def working_directory(path: str | Path) -> str:
    """Return where a relative path starts, for the end of a message; nothing for absolute paths.

    Examples
    --------
    >>> working_directory("patients.csv")  # doctest: +ELLIPSIS
    '; relative paths start in the working directory, ...'
    >>> working_directory("/srv/patients.csv")
    ''
    """
    if Path(path).is_absolute():
        return ""
    return f"; relative paths start in the working directory, {Path.cwd()}"


def read(path: Path) -> bytes:
    """Read a whole file. Decompress it if it is compressed with gzip, whatever its name.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    bytes
        Its content.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "greeting.gz")
    ...     _ = path.write_bytes(gzip.compress(b"hello"))
    ...     read(path)
    b'hello'
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if not content.startswith(b"\x1f\x8b"):
        return content
    most = most_bytes(len(content))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            grown = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is a broken gzip file ({error}); download it again") from error
    if len(grown) > most:
        raise InputError(
            f"{path} would grow from {len(content)} to more than {most} bytes; if this is "
            "intended, decompress it with gunzip"
        )
    return grown


def read_idx(path: Path) -> NDArray[Any]:
    """Read an idx file, the format of MNIST.

    It holds two zero bytes, one byte for the type, one for the number of axes, four for the length
    of each axis, and the values. All numbers are big-endian.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    array
        Its values, in native byte order.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "labels-idx1-ubyte")
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 0, 9]))
    ...     read_idx(path).tolist()
    [7, 0, 9]
    """
    content = read(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise InputError(
            f"{path} is not an idx file: it begins with {content[:4].hex(' ') or 'nothing'}"
        )
    kind, axes = np.dtype(_IDX_TYPES[content[2]]), content[3]
    begin = 4 + 4 * axes
    if len(content) < begin:
        raise InputError(f"{path} is truncated: its header of {begin} bytes is incomplete")
    shape = tuple(np.frombuffer(content, ">u4", count=axes, offset=4).tolist())
    wanted = prod(shape) * kind.itemsize
    if len(content) - begin != wanted:
        raise InputError(
            f"{path} holds {len(content) - begin} bytes of values, its shape {shape} needs {wanted}"
        )
    return np.frombuffer(content, kind, offset=begin).reshape(shape).astype(kind.newbyteorder("="))


def read_idx_images(
    images: Path, labels: Path, *, classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read a pair of idx files: grey images and their labels.

    Parameters
    ----------
    images, labels : Path
        The files.
    classes : int
        Labels must be below this.

    Returns
    -------
    tuple of arrays
        Images [N, height, width] of bytes, labels [N].

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     images, labels = Path(folder, "images"), Path(folder, "labels")
    ...     _ = images.write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 255, 0]))
    ...     _ = labels.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 4]))
    ...     read_idx_images(images, labels, classes=10)
    (array([[[255,   0]]], dtype=uint8), array([4]))
    """
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or x.dtype != np.uint8:
        raise InputError(
            f"{images} holds {x.dtype} of shape {x.shape}; images must be uint8 [N, height, width]"
        )
    if y.shape != x.shape[:1] or y.dtype != np.uint8:
        raise InputError(
            f"{labels} holds {y.dtype} of shape {y.shape}, but {images} has {len(x)} images"
        )
    if y.size and y.max() >= classes:
        raise InputError(f"{labels} has label {y.max()}; valid: 0 to {classes - 1}")
    return x, y.astype(np.int64)


def as_pixels(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Turn bytes into numbers from 0 to 1.

    Parameters
    ----------
    images : array of bytes
        Of any shape.

    Returns
    -------
    float32 array
        Of the same shape.

    Examples
    --------
    >>> as_pixels(np.array([0, 51, 255], np.uint8)).tolist()
    [0.0, 0.20000000298023224, 1.0]
    """
    return images.astype(np.float32) / np.float32(255)


def _complete(places: Sequence[Path], choices: Sequence[Sequence[str]]) -> tuple[Path, ...]:
    """Return the files of the first set that is complete in one place, or none."""
    for place in places:
        for choice in choices:
            found = [_matches(place, name) for name in choice]
            if all(found):
                return tuple(path for paths in found for path in paths)
    return ()


def _offer(source: str, archives: Sequence[Archive]) -> str:
    """Return how to download the files, or nothing if they cannot be downloaded."""
    if not archives:
        return ""
    site = archives[0].url.rpartition("/")[0]
    return (
        f"; or download them from {site} with download=True (--download of equipoise data {source})"
    )


def _matches(place: Path, name: str) -> list[Path]:
    """Return the files of a name or pattern; compressed ones only if there are no others."""
    return sorted(place.glob(name)) or sorted(place.glob(f"{name}.gz"))
