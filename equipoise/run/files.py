"""Atomic files, journals, and directories with one writer at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from equipoise.errors import RunError
from equipoise.tree import Tree

try:
    import fcntl
except ImportError:  # Windows has other locks.
    fcntl = None  # type: ignore[assignment]

_KEY = "equipoise"


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Lock a directory while the block runs. The lock is released if the process is killed.

    On file systems without locks this has no effect.

    Raises
    ------
    RunError
        If another run has locked the directory.

    Examples
    --------
    >>> import tempfile
    >>> with sole_writer(Path(tempfile.mkdtemp())):
    ...     pass
    """
    if fcntl is None:
        yield
        return
    folder = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"another process is writing to {directory}; wait for it or choose another "
                "directory"
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it has the old or the new content.

    Raises
    ------
    RunError
        If it cannot be written, such as on a full disk. The old content is intact.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note"
    >>> write_atomically(path, b"hello")
    >>> path.read_bytes()
    b'hello'
    """
    _replace(path, lambda beside: beside.write_bytes(content))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file with the one that ``write`` makes beside it, once that one is on disk."""
    beside = path.with_name(path.name + ".tmp")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, SafetensorError) as error:
        # An incomplete file is useless and may fill the disk.
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else None
        raise RunError(f"cannot write {path}: {reason or error}") from error


def save_tensors(path: Path, tensors: Tree, note: Mapping[str, Any] | None = None) -> None:
    """Write tensors and a small JSON note to a safetensors file, atomically.

    The file contains a checksum of its tensors and of the note. The same content gives the same
    bytes.

    Examples
    --------
    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save_tensors(path, {"w": torch.ones(2)}, {"round": 3})
    >>> load_tensors(path)
    ({'w': tensor([1., 1.])}, {'round': 3})
    """
    plain: Tree = {}
    places: set[int] = set()
    for name, tensor in sorted(tensors.items()):
        there = tensor.detach().cpu().contiguous()
        # Parts of a method may keep the same tensor, such as the ids of all clients. The format
        # does not allow this.
        plain[name] = there.clone() if there.numel() and there.data_ptr() in places else there
        places.add(there.data_ptr())
    text = json.dumps(note or {}, sort_keys=True)
    # A single entry, because the format does not preserve the order of entries. The checksum
    # follows the note, so that no single damaged bit makes the file look like one of an older
    # version, which has no checksum.
    metadata = {_KEY: f"{text} sha256={_checksum(plain, text)}"}
    # Written from where the tensors are: the states of large runs are as large as the memory left.
    _replace(path, lambda beside: save_file(plain, beside, metadata))


def _checksum(tensors: Tree, note: str) -> str:
    """Return the SHA-256 of a note and of the names, types, shapes and values of tensors."""
    digest = hashlib.sha256(note.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        if tensor.numel():  # an empty tensor cannot be viewed as bytes
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_tensors(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Read a file that :func:`save_tensors` wrote, and check its checksum.

    Files of older versions have no checksum.

    Raises
    ------
    RunError
        If the file is missing, truncated, damaged or of another kind.
    """
    try:
        with safe_open(path, "pt") as file:
            entry = (file.metadata() or {})[_KEY]
            # Copied, because tensors in the file are not aligned, and kernels may round differently
            # for other alignments. New memory is aligned like that of the original tensors.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        note, end = json.JSONDecoder().raw_decode(entry)
        if not isinstance(note, dict):
            raise ValueError("its note is not a mapping")
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise RunError(
            f"cannot read {path}: {error}; the file is missing, truncated or not written by "
            "Equipoise"
        ) from error
    if entry[end:] and entry[end:] != f" sha256={_checksum(tensors, entry[:end])}":
        raise RunError(
            f"{path} is damaged: its content differs from what was written (SHA-256); restore the "
            "file"
        )
    return tensors, note


def _digest_of(path: Path, length: int) -> hashlib._Hash:
    """Hash the beginning of a file."""
    digest = hashlib.sha256()
    if length:
        with path.open("rb") as file:
            while length and (piece := file.read(min(length, 1 << 20))):
                digest.update(piece)
                length -= len(piece)
    return digest


class Journal:
    """A file of JSON lines to which rows are appended. Without a path they are kept in memory.

    ``mark`` and ``rewind`` let a resumed run drop the rows written after its last checkpoint.
    ``digest`` tells whether the rows before it are still what was written. Lines may also be
    written later: with ``flush``, or when the journal is used otherwise.

    Examples
    --------
    >>> journal = Journal(None)
    >>> journal.append([{"round": 1}])
    >>> list(journal)
    [{'round': 1}]
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._rows: list[str] = []
        self._unwritten: list[Callable[[], Iterable[str]]] = []
        self._digest = hashlib.sha256()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows at the end."""
        self.append_later(lambda: map(json.dumps, rows))
        self.flush()

    def append_later(self, lines: Callable[[], Iterable[str]]) -> None:
        """Add lines at the end. They are made when they are written.

        Examples
        --------
        >>> journal = Journal(None)
        >>> journal.append_later(lambda: ['{"round": 1}'])
        >>> journal.flush()
        >>> journal.mark()
        1
        """
        self._unwritten.append(lines)

    def flush(self) -> None:
        """Write the lines that were to be written later."""
        if not self._unwritten:
            return
        lines = [line for later in self._unwritten for line in later()]
        self._unwritten = []
        if not lines:
            return
        if self.path is None:
            self._rows += lines
        else:
            content = "\n".join([*lines, ""]).encode()
            try:
                with self.path.open("ab") as file:
                    file.write(content)
            except OSError as error:
                raise RunError(f"cannot write {self.path}: {error.strerror or error}") from error
            self._digest.update(content)

    def mark(self) -> int:
        """Flush the file to disk, and return its length."""
        self.flush()
        if self.path is None:
            return len(self._rows)
        if not self.path.exists():
            return 0
        try:
            with self.path.open("ab") as file:
                os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror or error}") from error

    @property
    def digest(self) -> str:
        """The SHA-256 of all rows that were appended, or kept when the file was checked."""
        self.flush()
        return self._digest.hexdigest()

    def check(self, mark: int, digest: str | None = None) -> None:
        """Compare the file up to a mark with what was written. The file is not changed.

        Parameters
        ----------
        mark : int
            Its length at the mark.
        digest : str, optional
            Its digest at the mark.

        Raises
        ------
        RunError
            If rows are missing or were changed.
        """
        self.flush()
        if self.path is None:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < mark:
            raise RunError(
                f"{self.path} is shorter than when the checkpoint was written; the run cannot be "
                "resumed"
            )
        self._digest = _digest_of(self.path, mark)
        if digest not in (None, self.digest):
            raise RunError(
                f"{self.path} was changed since the checkpoint was written (SHA-256); the run "
                "cannot be resumed. Restore the file, or start again in another directory"
            )

    def truncate(self, mark: int) -> None:
        """Drop the rows after a mark, after :meth:`check`."""
        self.flush()
        if self.path is None:
            del self._rows[mark:]
        elif self.path.exists() and self.path.stat().st_size > mark:
            os.truncate(self.path, mark)

    def rewind(self, mark: int) -> None:
        """Return to a mark: check the rows before it, and drop those after it."""
        self.check(mark)
        self.truncate(mark)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.flush()
        if self.path is None:
            yield from map(json.loads, self._rows)
        elif self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    def complete(self) -> Iterator[dict[str, Any]]:
        r"""Yield all rows except an incomplete last one, which an interrupted write may leave.

        Examples
        --------
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rounds.jsonl"
        >>> _ = path.write_text('{"round": 1}\n{"rou')
        >>> list(Journal(path).complete())
        [{'round': 1}]
        """
        self.flush()
        if self.path is None:
            yield from self
        elif self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                whole = (line for line in file if line.endswith("\n"))
                # Many lines are parsed as one list, which takes half the time.
                while lines := list(islice(whole, 1000)):
                    yield from json.loads(f"[{','.join(lines)}]")
