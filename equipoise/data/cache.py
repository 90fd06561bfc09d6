"""Arrays on disk that are read when needed, and the directory that keeps them between runs.

The environment variable ``EQUIPOISE_CACHE`` sets the cache directory. The default is ``equipoise``
in the user's cache directory: ``$XDG_CACHE_HOME`` or ``~/.cache`` on Linux, ``~/Library/Caches`` on
macOS, ``%LOCALAPPDATA%`` on Windows. Everything in it can be recomputed, so it may be deleted at
any time. :mod:`equipoise.data.cache_entries` lists and removes entries.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.errors import InputError, RunError

try:
    import fcntl
except ImportError:  # not available on Windows
    fcntl = None  # type: ignore[assignment]

VARIABLE = "EQUIPOISE_CACHE"
# Ends the name of the file beside an entry that says what the entry is.
ABOUT = ".txt"
LOCK = ".lock"

# A file ends with this mark, the time at which it was written, in seconds, and the digest.
_MARK = b"equipoise mapped array 1"
_END = struct.Struct(f"<{len(_MARK)}sQ32s")
_SEEKING = threading.Lock()


def cache_directory() -> Path:
    """Return the cache directory, which need not exist yet.

    Returns
    -------
    Path
        Where `cached` keeps its arrays.

    Examples
    --------
    >>> import os
    >>> os.environ["EQUIPOISE_CACHE"] = "/tmp/arrays"
    >>> str(cache_directory())
    '/tmp/arrays'
    >>> del os.environ["EQUIPOISE_CACHE"]
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        usual = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        usual = Path.home() / "Library" / "Caches"
    else:
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return usual / "equipoise"


class MappedArray:
    """An array in a file, whose rows are read when it is indexed.

    It implements :class:`equipoise.samples.Samples`. The file is a NumPy ``.npy`` file, followed by
    the time at which it was written and the SHA-256 of its content. Opening it reads only these,
    unless the modification time of the file differs from the stored time: then the whole content
    is compared with the SHA-256.

    Parameters
    ----------
    path : str or Path
        A file that `MappedArray.write` has written.

    Raises
    ------
    InputError
        If the file is missing, truncated, damaged, or not written by `MappedArray.write`.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "squares.npy"
    >>> blocks = [torch.tensor([0, 1]), torch.tensor([4, 9])]
    >>> squares = MappedArray.write(path, (4,), torch.int64, blocks)
    >>> squares[torch.tensor([3, 1])]
    tensor([9, 1])
    >>> len(squares), squares.dtype, squares.digest == MappedArray(path).digest
    (4, torch.int64, True)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # Open as long as the array is in use, which therefore survives its replacement.
            self._file = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self._file)
            self._shape, self._dtype, self._start, self.digest = _checked(self._file, self.path)
        except (OSError, ValueError) as error:
            raise _unreadable(self.path, error) from error

    @classmethod
    def write(
        cls, path: str | Path, shape: tuple[int, ...], dtype: torch.dtype, blocks: Iterable[Tensor]
    ) -> MappedArray:
        """Write an array, one block of rows at a time.

        The file is written under a temporary name and renamed when it is complete. Until then an
        existing file stays unchanged.

        Parameters
        ----------
        path : str or Path
            Where to write it.
        shape : tuple of int
            The shape of the whole array; the first axis is that of rows.
        dtype : torch.dtype
            The type of all values.
        blocks : iterable of Tensor
            Blocks of rows, each of shape ``[any number, *shape[1:]]``, in order.

        Returns
        -------
        MappedArray
            The array.

        Examples
        --------
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows.npy"
        >>> rows = (torch.full((1, 2), float(i)) for i in range(3))
        >>> MappedArray.write(path, (3, 2), torch.float32, rows)[1:]
        tensor([[1., 1.],
                [2., 2.]])
        """
        path = Path(path)
        if not shape or min(shape) < 1:
            raise InputError(f"an array on disk must have values; its shape is {tuple(shape)}")
        head = _head(shape, dtype)
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with _naming_failures(path):
                file = beside.open("xb")
            with file:
                digest = hashlib.sha256()
                pieces: Iterator[bytes | memoryview] = chain([head], _values(shape, dtype, blocks))
                for piece in pieces:
                    digest.update(piece)
                    with _naming_failures(path):
                        file.write(piece)
                # Every file system can store an even number of seconds.
                written = int(time.time()) // 2 * 2
                with _naming_failures(path):
                    file.write(_END.pack(_MARK, written, digest.digest()))
                    file.flush()
                    os.fsync(file.fileno())
            with _naming_failures(path):
                os.utime(beside, (written, written))
                os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        return cls(path)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows, then the shape of a row."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return torch.from_numpy(np.empty(0, self._dtype)).dtype

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, positions: Tensor | NDArray[np.int64] | slice) -> Tensor:
        if isinstance(positions, slice):
            chosen = np.arange(*positions.indices(len(self)))
        else:
            chosen = np.asarray(positions.cpu() if isinstance(positions, Tensor) else positions)
            chosen = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        rows = chosen.reshape(-1)
        wrong = rows[(rows < -len(self)) | (rows >= len(self))]
        if len(wrong):
            raise IndexError(f"an array of {len(self)} rows has no row {wrong[0]}")
        values = np.empty((*chosen.shape, *self._shape[1:]), self._dtype)
        try:
            self._read(rows % len(self), values)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return torch.from_numpy(values)

    def _read(self, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Read rows, all that follow each other in the file at once.

        The file is not mapped into memory: if a page of a mapped file cannot be read, such as after
        an error of the disk, the system ends the process instead of raising an exception.
        """
        if not len(rows):
            return
        into, size = values.reshape(-1).view(np.uint8).data, values.nbytes // len(rows)
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        firsts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(rows)]
        starts = (self._start + size * rows[firsts]).tolist()
        for first, end, start in zip(firsts, ends, starts, strict=True):
            _fill(into[first * size : end * size], self._file, start)

    def __repr__(self) -> str:
        return f"MappedArray({str(self.path)!r}, shape={self.shape}, dtype={self.dtype})"

    def __reduce__(self) -> tuple[type[MappedArray], tuple[Path]]:
        """Pickle only the path; another process opens the file itself."""
        return MappedArray, (self.path.absolute(),)


def arrays_directory() -> Path:
    """Return the folder of the entries in the cache directory, which need not exist yet.

    Examples
    --------
    >>> arrays_directory().name
    'arrays'
    """
    return cache_directory() / "arrays"


def cached(
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    blocks: Callable[[], Iterator[Tensor]],
    about: str = "",
) -> MappedArray:
    """Return an array from the cache directory, or compute it and store it there.

    An entry that is truncated, damaged, or of another shape or type is computed again. If several
    processes need the same array at once, one computes it and the others wait, provided that the
    file system has locks. Otherwise each process computes it, and the last one replaces the equal
    files of the others.

    Parameters
    ----------
    key : str
        A hash, in hexadecimal digits, of everything that the content depends on.
    shape : tuple of int
        The shape of the whole array.
    dtype : torch.dtype
        The type of all values.
    blocks : callable
        Returns an iterator over the blocks of rows, in order. Only called if there is no entry yet.
    about : str
        What the array is, in one line. ``equipoise cache`` shows it.

    Returns
    -------
    MappedArray
        The array.

    Raises
    ------
    RunError
        If the cache directory cannot be written to.

    Examples
    --------
    >>> import tempfile
    >>> os.environ["EQUIPOISE_CACHE"] = tempfile.mkdtemp()
    >>> key = hashlib.sha256(b"squares up to 2").hexdigest()
    >>> cached(key, (3,), torch.int64, lambda: iter([torch.tensor([0, 1, 4])]))[1:]
    tensor([1, 4])
    >>> cached(key, (3,), torch.int64, lambda: 1 / 0)[1:]
    tensor([1, 4])
    >>> del os.environ["EQUIPOISE_CACHE"]
    """
    if not re.fullmatch(r"[0-9a-f]{16,128}", key):
        raise InputError(
            f"the key of a cached array must be a hash of 16 to 128 hexadecimal digits, got {key!r}"
        )
    folder = arrays_directory()
    path = folder / f"{key}.npy"
    described = folder / f"{key}{ABOUT}"
    if (found := _intact(path, shape, dtype)) is not None:
        # Its modification time says when the entry was used last.
        with suppress(OSError):
            os.utime(described)
        return found
    with _naming_failures(path):
        folder.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(path) as alone:
        # Another process may have made it in the meantime.
        if (found := _intact(path, shape, dtype)) is not None:
            return found
        if alone:
            for left_behind in folder.glob(f"{path.name}.*.tmp"):
                left_behind.unlink(missing_ok=True)
        if about:
            with _naming_failures(path):
                described.write_text(f"{about}\n", encoding="utf-8")
        return MappedArray.write(path, shape, dtype, blocks())


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"cannot read the array in {path}: {error}; write it again")


def _checked(file: int, path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int, str]:
    """Return shape, type, start of the values and digest of a file; ValueError if it is damaged."""
    with open(file, "rb", closefd=False) as content:
        status = os.fstat(file)
        content.seek(max(0, status.st_size - _END.size))
        end = content.read()
        if len(end) != _END.size or not end.startswith(_MARK):
            raise ValueError("it is truncated or of another kind")
        _, written, digest = _END.unpack(end)
        content.seek(0)
        if status.st_mtime != written:
            if _digest(content, status.st_size - _END.size) != digest:
                raise ValueError("its content is not what was written")
            with suppress(OSError):  # so that the content is not compared again
                os.utime(path, (written, written))
            content.seek(0)
        np.lib.format.read_magic(content)
        shape, _, dtype = np.lib.format.read_array_header_2_0(content)
        start = content.tell()
    if start + math.prod(shape) * dtype.itemsize + _END.size != status.st_size:
        raise ValueError("its size is not that of its values")
    return shape, dtype, start, digest.hex()


def _fill(into: memoryview, file: int, start: int) -> None:
    """Fill memory with the bytes of a file from a place on."""
    while into:
        if hasattr(os, "preadv"):
            size = os.preadv(file, [into], start)
        else:  # on Windows, where threads share the place from which a file is read
            with _SEEKING:
                os.lseek(file, start, os.SEEK_SET)
                piece = os.read(file, min(len(into), 1 << 24))
            size = len(piece)
            into[:size] = piece
        if not size:
            raise OSError("it has become shorter")
        into, start = into[size:], start + size


def _digest(file: IO[bytes], size: int) -> bytes:
    """Return the SHA-256 of the next ``size`` bytes of a file."""
    digest = hashlib.sha256()
    while size and (piece := file.read(min(size, 1 << 20))):
        digest.update(piece)
        size -= len(piece)
    return digest.digest()


def _head(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """Return the header of a ``.npy`` file, version 2.0; it does not depend on NumPy's version."""
    try:
        numpy_type = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise InputError(
            f"an array on disk cannot hold {dtype}, which NumPy does not have"
        ) from error
    sizes = tuple(int(size) for size in shape)
    text = f"{{'descr': {numpy_type.str!r}, 'fortran_order': False, 'shape': {sizes!r}, }}"
    magic = b"\x93NUMPY\x02\x00"
    # Pad it with spaces to a multiple of 64 bytes, so that values are aligned.
    padding = -(len(magic) + 4 + len(text) + 1) % 64
    return (
        magic + struct.pack("<I", len(text) + padding + 1) + text.encode() + b" " * padding + b"\n"
    )


def _values(
    shape: tuple[int, ...], dtype: torch.dtype, blocks: Iterable[Tensor]
) -> Iterator[memoryview]:
    """Return the bytes of each block of rows."""
    found = 0
    for block in blocks:
        if block.dtype != dtype or tuple(block.shape[1:]) != tuple(shape[1:]):
            raise InputError(
                f"a block of rows is {block.dtype} of shape {list(block.shape)}; "
                f"the array is {dtype} with rows of shape {list(shape[1:])}"
            )
        found += len(block)
        yield block.detach().cpu().contiguous().numpy().data
    if found != shape[0]:
        raise InputError(
            f"the blocks have {found} rows in all, the array of shape {list(shape)} needs "
            f"{shape[0]}"
        )


@contextmanager
def _naming_failures(path: Path) -> Iterator[None]:
    """Turn an OSError into an error that names the file and, for the cache, the variable to set."""
    try:
        yield
    except OSError as error:
        in_cache = path.is_relative_to(cache_directory())
        hint = (
            f"; the environment variable {VARIABLE} can name another cache directory"
            if in_cache
            else ""
        )
        raise RunError(f"cannot write {path}: {error}{hint}") from error


def _intact(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> MappedArray | None:
    """Open an entry of the cache if it exists and has this shape and type."""
    try:
        found = MappedArray(path)
    except InputError:
        return None
    return found if (found.shape, found.dtype) == (tuple(shape), dtype) else None


@contextmanager
def one_at_a_time(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Wait until no other process computes the same entry; yield whether locks are available.

    Parameters
    ----------
    path : Path
        The entry.
    wait : bool
        Whether to wait. Otherwise ``BlockingIOError`` is raised if another process computes it.

    Examples
    --------
    >>> import tempfile
    >>> with one_at_a_time(Path(tempfile.mkdtemp()) / "entry.npy") as alone:
    ...     alone in (True, False)
    True
    """
    if fcntl is None:
        yield False
        return
    lock = path.with_suffix(LOCK)
    while True:
        with _naming_failures(path):
            file = lock.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            raise
        except OSError:  # the file system has no locks
            file.close()
            yield False
            return
        # Another process may have removed the file while this one waited.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                break
        file.close()
    with file:
        yield True
        lock.unlink(missing_ok=True)
