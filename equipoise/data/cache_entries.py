"""The entries of the cache directory: what they are, how large, and when they were used last.

Only files that :func:`equipoise.data.cache.cached` has written are listed and removed. They are
recognised by their names, which are hashes. Links and other files stay as they are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from equipoise.data.cache import ABOUT, LOCK, MappedArray, arrays_directory, one_at_a_time
from equipoise.errors import InputError, RunError

# The array, what it is, the lock of a process that computes it, and what such a process has written
# so far.
_FILE = re.compile(
    rf"([0-9a-f]{{16,128}})(\.npy|{re.escape(ABOUT)}|{re.escape(LOCK)}|\.npy\.[0-9a-f]{{16}}\.tmp)"
)
_LONGEST_ABOUT = 1000
_DAY = 24 * 60 * 60


@dataclass(frozen=True)
class Entry:
    """An array in the cache directory.

    Attributes
    ----------
    key : str
        The hash of what the array depends on.
    files : tuple of Path
        All files of the entry.
    bytes : int
        Their size.
    days : float
        Days since the entry was used last. For an entry without a description, days since it was
        written.
    state : {"complete", "damaged", "unfinished"}
        An unfinished entry has no array: a process computes it, or has been killed.
    about : str or None
        What the array is, if it was recorded.
    shape : tuple of int or None
        The shape of a complete array.

    Examples
    --------
    >>> entry = Entry("0" * 16, (), 2048, 3.5, "complete", "images in photos", (10, 3, 8, 8))
    >>> entry.bytes, entry.days
    (2048, 3.5)
    """

    key: str
    files: tuple[Path, ...]
    bytes: int
    days: float
    state: str
    about: str | None
    shape: tuple[int, ...] | None


def entries() -> list[Entry]:
    """Return the entries of the cache directory, the one that was used last first.

    Returns
    -------
    list of Entry
        Empty if there is no cache directory.

    Raises
    ------
    RunError
        If the directory cannot be read.

    Examples
    --------
    >>> import os, tempfile
    >>> os.environ["EQUIPOISE_CACHE"] = tempfile.mkdtemp()
    >>> entries()
    []
    >>> del os.environ["EQUIPOISE_CACHE"]
    """
    folder = arrays_directory()
    found: dict[str, list[Path]] = {}
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read the cache directory {folder}: {error.strerror}") from error
    for name in names:
        if named := _FILE.fullmatch(name):
            found.setdefault(named[1], []).append(folder / name)
    made = [_entry(key, files) for key, files in found.items()]
    return sorted((entry for entry in made if entry is not None), key=lambda entry: entry.days)


def older(found: Sequence[Entry], days: float) -> list[Entry]:
    """Return the entries that were not used for some days, and all that are damaged.

    Parameters
    ----------
    found : sequence of Entry
        What to choose from.
    days : float
        The number of days.

    Returns
    -------
    list of Entry
        In the same order.

    Examples
    --------
    >>> new, old = (Entry("0" * 16, (), 9, age, "complete", None, (1,)) for age in (1.0, 40.0))
    >>> older([new, old], 30) == [old]
    True
    """
    return [entry for entry in found if entry.state == "damaged" or entry.days > days]


def remove(entry: Entry) -> bool:
    """Remove the files of an entry, unless a process is computing it.

    Parameters
    ----------
    entry : Entry
        What to remove. It need not exist any more.

    Returns
    -------
    bool
        Whether it was removed.

    Raises
    ------
    RunError
        If a file cannot be removed.

    Examples
    --------
    >>> remove(Entry("0" * 16, (), 0, 0.0, "complete", None, (1,)))
    True
    """
    if not entry.files:
        return True
    try:
        with one_at_a_time(entry.files[0].parent / f"{entry.key}.npy", wait=False):
            for path in entry.files:
                path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunError(f"cannot remove {error.filename}: {error.strerror}") from error
    return True


def _entry(key: str, files: list[Path]) -> Entry | None:
    """Describe the files of one key; None if they have been removed in the meantime."""
    kept, size, used = [], 0, 0.0
    for path in files:
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if S_ISREG(status.st_mode):
            kept.append(path)
            size += status.st_size
            used = max(used, status.st_mtime)
    if not kept:
        return None
    days = max(0.0, (time.time() - used) / _DAY)
    array = next((path for path in kept if path.suffix == ".npy"), None)
    state, shape = "unfinished", None
    if array is not None:
        try:
            state, shape = "complete", MappedArray(array).shape
        except InputError:
            state = "damaged"
    return Entry(key, tuple(kept), size, days, state, _about(kept), shape)


def _about(files: Sequence[Path]) -> str | None:
    for path in files:
        if path.suffix == ABOUT:
            try:
                with path.open(encoding="utf-8", errors="replace") as file:
                    return file.read(_LONGEST_ABOUT).strip() or None
            except OSError:
                return None
    return None
