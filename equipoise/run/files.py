"""Atomic files, journals, and directories with one writer at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from equipoise.errors import RunError
from equipoise.tree import Tree

try:
    import fcntl
except ImportError:  # Windows has other locks.
    fcntl = None  # type: ignore[assignment]

_KEY = "equipoise"


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Lock a directory while the block runs; the lock is released if the process is killed.

    On file systems without locks nothing is locked.

    Raises
    ------
    RunError
        If another run holds the lock.

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
                f"another process is writing to {directory}; wait for it or choose another directory"
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: a crash at any moment leaves the old or the new content.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note"
    >>> write_atomically(path, b"hello")
    >>> path.read_bytes()
    b'hello'
    """
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_tensors(path: Path, tensors: Tree, note: Mapping[str, Any] | None = None) -> None:
    """Write tensors and a small JSON note into one safetensors file, atomically; the same content gives the same bytes.

    Examples
    --------
    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save_tensors(path, {"w": torch.ones(2)}, {"round": 3})
    >>> load_tensors(path)
    ({'w': tensor([1., 1.])}, {'round': 3})
    """
    # The note is a single entry, because the format does not keep the order of entries.
    metadata = {_KEY: json.dumps(note or {}, sort_keys=True)}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    write_atomically(path, save(plain, metadata))


def load_tensors(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Read what :func:`save_tensors` wrote.

    Raises
    ------
    RunError
        If the file is missing, truncated or of another kind.
    """
    try:
        with safe_open(path, "pt") as file:
            note = json.loads((file.metadata() or {})[_KEY])
            # Copied, because tensors in the file are not aligned. Kernels round differently for
            # other alignments, and new memory is aligned like that of the tensors before they were
            # written.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, note  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RunError(
            f"cannot read {path}: {error}; the file is missing, truncated or not written by Equipoise"
        ) from error


class Journal:
    """A file of JSON lines that is appended to; without a path the rows are in memory only.

    ``mark`` and ``rewind`` let a resumed run drop the rows written after its last checkpoint.

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

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows at the end."""
        lines = [json.dumps(row) for row in rows]
        if self.path is None:
            self._rows += lines
        else:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)

    def mark(self) -> int:
        """Flush the file to disk, and return its length."""
        if self.path is None:
            return len(self._rows)
        if not self.path.exists():
            return 0
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def rewind(self, mark: int) -> None:
        """Truncate the file to a mark."""
        if self.path is None:
            del self._rows[mark:]
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < mark:
            raise RunError(f"{self.path} is shorter than when the checkpoint was written; the run cannot be resumed")
        if size > mark:
            os.truncate(self.path, mark)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.path is None:
            yield from map(json.loads, self._rows)
        elif self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    def complete(self) -> Iterator[dict[str, Any]]:
        r"""Yield all rows but a last one that an interrupted write has left incomplete.

        Examples
        --------
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rounds.jsonl"
        >>> _ = path.write_text('{"round": 1}\n{"rou')
        >>> list(Journal(path).complete())
        [{'round': 1}]
        """
        if self.path is None:
            yield from self
        elif self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                whole = (line for line in file if line.endswith("\n"))
                # Many lines are read as one list, which takes half the time.
                while lines := list(islice(whole, 1000)):
                    yield from json.loads(f"[{','.join(lines)}]")
